"""Norms and rotary embeddings in few passes: what transformers' own code gives, forward and backward."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GlmConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from siirl.engines.train.cpu_layers import RMSNorm, Rotary, use_cpu_layers

SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
KINDS = {  # how many norms and attentions are replaced
    "llama": (LlamaConfig, 5, 2),
    "qwen3": (Qwen3Config, 9, 2),
    "gemma2": (Gemma2Config, 0, 2),  # its norms multiply by 1 + w
    "glm": (GlmConfig, 5, 0),  # it turns half of the features, pairs side by side
}
IDS = torch.randint(1, 24, (3, 11), generator=torch.Generator().manual_seed(1))


def pair(kind):
    """A model as transformers has it, and a copy of it in few passes."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(KINDS[kind][0](**SIZES, attn_implementation="eager"))
    for name, weight in plain.named_parameters():
        if "norm" in name:
            weight.data.add_(0.3 * torch.randn_like(weight))
    fast = copy.deepcopy(plain)
    use_cpu_layers(fast)
    return plain, fast


def outputs(model):
    """Logits and gradients of a loss."""
    logits = model(input_ids=IDS).logits
    logits.float().log_softmax(-1).square().mean().backward()
    return [logits] + [p.grad for p in model.parameters() if p.grad is not None]


def replaced(model, what):
    return [m for m in model.modules() if "forward" in vars(m) and isinstance(m.forward, what)]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers(kind):
    plain, fast = pair(kind)
    _, norms, attentions = KINDS[kind]
    assert len(replaced(fast, partial)) == norms
    assert len(replaced(fast, MethodType)) == attentions
    (logits, *grads), (their_logits, *their_grads) = outputs(fast), outputs(plain)
    if not attentions:
        assert torch.equal(logits, their_logits)
    torch.testing.assert_close(logits, their_logits, rtol=0, atol=5e-7)
    for ours, theirs in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-7)


def test_weights_that_are_not_trained_get_no_gradient():
    plain, fast = pair("qwen3")
    for model in (plain, fast):
        for name, weight in model.named_parameters():
            weight.requires_grad_("q_proj" in name)
    for ours, theirs in zip(outputs(fast), outputs(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-7)
    assert [name for name, p in fast.named_parameters() if p.grad is not None] == [
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)
    ]


def test_other_types_are_computed_by_transformers():
    plain, fast = (model.to(torch.bfloat16) for model in pair("qwen3"))
    for ours, theirs in zip(outputs(fast), outputs(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_those_of_finite_differences():
    draw = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    x, weight = randn(2, 3, 6).requires_grad_(), randn(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: RMSNorm.apply(x, w, 1e-3), (x, weight))
    cos, sin = randn(1, 3, 6), randn(1, 3, 6)  # halves that differ, too
    assert torch.autograd.gradcheck(lambda x: Rotary.apply(x, cos, sin), (x,))
    assert torch.autograd.gradcheck(lambda x: Rotary.apply(x.transpose(0, 1), cos[:, :2], sin[:, :2]), (x,))


class Quartic(LlamaRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(4).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Shifted(LlamaRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight + hidden_states.to(input_dtype)


def test_code_that_differs_in_a_number_or_an_operator_stays():
    norms = torch.nn.ModuleList([Quartic(4), Shifted(4), LlamaRMSNorm(4)])
    use_cpu_layers(norms)
    assert ["forward" in vars(norm) for norm in norms] == [False, False, True]
