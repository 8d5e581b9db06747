"""The attention of a token that is decoded equals transformers', without its copies of keys and values."""

from types import SimpleNamespace

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from siirl.engines.rollout.hf.decode import (
    DECODE_ATTENTION,
    decode_attention,
    use_decode_attention,
)

ROWS, POSITIONS, SIZE = 5, 11, 8


class LargestResult(TorchDispatchMode):
    """The most numbers of a tensor that was made, views of others left out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = func.is_view is False and isinstance(result, torch.Tensor)
        self.numel = max(self.numel, result.numel() if made else 0)
        return result


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("heads, groups", [(6, 2), (6, 1), (6, 6)])
def test_it_equals_transformers_attention(tokens, is_masked, heads, groups):
    torch.manual_seed(0)
    query = torch.randn(ROWS, tokens, heads, SIZE).transpose(1, 2)
    key, value = torch.randn(2, ROWS, groups, 2 * POSITIONS, SIZE)[..., :POSITIONS, :].unbind()
    mask = None
    if is_masked:
        mask = (torch.arange(POSITIONS) >= torch.arange(ROWS)[:, None]).view(ROWS, 1, 1, POSITIONS)
        mask = mask.expand(ROWS, 1, tokens, POSITIONS)
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=False)
    with LargestResult() as made:
        ours, _ = decode_attention(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    if tokens == 1:
        assert made.numel < key.numel() or heads == groups, "keys or values were copied"


def test_a_models_text_attends_by_it(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model_dir(tmp_path), attn_implementation="sdpa")
    ids, mask = torch.randint(1, 60, (4, 6)), torch.ones(4, 7, dtype=torch.int64)
    mask[0, :3] = 0

    def logits() -> torch.Tensor:
        read = model(input_ids=ids, attention_mask=mask[:, :-1], use_cache=True)
        return model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=read.past_key_values).logits

    with torch.no_grad():
        theirs = logits()
        use_decode_attention(model)
        ours = logits()
    assert model.config._attn_implementation == DECODE_ATTENTION
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
