"""Rank 0, which completes checkpoints and writes the results, is struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("rank_0")
def test_a_run_whose_rank_0_is_struck_again_and_again_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)
