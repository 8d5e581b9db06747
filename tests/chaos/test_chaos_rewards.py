"""Processes that score are struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("rewards")
def test_a_sample_whose_worker_is_struck_is_scored_all_the_same(chain, inputs, undisturbed, tmp_path):
    take(chain, inputs, undisturbed, tmp_path)
