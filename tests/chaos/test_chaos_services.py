"""What a job asks is struck: a service that scores, and MCP servers with a tool."""

import pytest
from chaos_chains import chains_of, take


@pytest.mark.slow
@pytest.mark.timeout(1800)
@chains_of("services")
def test_a_service_that_is_struck_comes_back_and_no_row_is_lost(chain, inputs, undisturbed, tmp_path):
    take(chain, inputs, undisturbed, tmp_path)
