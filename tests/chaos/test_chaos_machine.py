"""The machine takes no more, or its clock jumps, or what looks after its memory is struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("machine")
def test_what_the_machine_does_is_named_or_done_without(chain, inputs, undisturbed, tmp_path):
    take(chain, inputs, undisturbed, tmp_path)
