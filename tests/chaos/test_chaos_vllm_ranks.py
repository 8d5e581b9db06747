"""Ranks are struck that have a vLLM engine each, or share one."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("vllm_ranks")
def test_ranks_that_are_struck_start_again_with_new_engines_and_the_run_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)
