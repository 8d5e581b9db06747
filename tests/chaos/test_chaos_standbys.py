"""Processes that stand by are struck, and those beside which they do."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("standbys")
def test_what_stands_by_may_go_or_be_a_rank_and_the_run_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)
