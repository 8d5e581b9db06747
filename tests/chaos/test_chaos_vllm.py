"""vLLM engines are struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("vllm")
def test_a_vllm_engine_that_is_struck_again_and_again_answers_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)
