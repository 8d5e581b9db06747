"""A Ray cluster of two machines is struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("ray")
def test_a_run_on_ray_comes_back_or_names_what_the_cluster_lost(chain, inputs, undisturbed, tmp_path):
    take(chain, inputs, undisturbed, tmp_path)
