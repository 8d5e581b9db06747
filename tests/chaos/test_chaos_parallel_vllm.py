"""The processes of a vLLM engine of two ranks are struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("parallel_vllm")
def test_an_engine_of_two_ranks_that_loses_a_process_is_named_and_the_run_starts_again(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)
