"""The kernels of experts, interpreted by Triton on a CPU."""

import pytest
from dist_harness import run_interpreted


def test_kernels_of_experts_equal_their_definition_and_a_layer_without_them():
    pytest.importorskip("triton")
    run_interpreted("expert_kernels_cases")
