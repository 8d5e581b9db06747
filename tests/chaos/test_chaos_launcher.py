"""The launcher is struck."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("launcher")
def test_a_command_whose_launcher_is_struck_goes_on_when_it_is_given_again(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)
