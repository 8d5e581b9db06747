"""How large an engine's KV cache on a CPU is: the same arithmetic for all engines."""

import pytest
from transformers import LlamaConfig

from siirl.engines.rollout.call_limits import cache_bytes_per_token, cached_tokens

SHAPE = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(("head_dim", "expected"), [(64, 3 * 2 * 2 * 64 * 4), (None, 3 * 2 * 2 * 32 * 4)])
def test_a_token_has_a_key_and_a_value_of_each_head_in_each_layer(head_dim, expected):
    config = LlamaConfig(**SHAPE, **({"head_dim": head_dim} if head_dim else {}))
    assert cache_bytes_per_token(config) == expected


def test_there_is_room_for_rows_that_wait_beside_those_that_run():
    assert cached_tokens(max_num_seqs=4, row_tokens=100) == 1200
