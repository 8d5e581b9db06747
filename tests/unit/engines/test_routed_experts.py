"""What vLLM says of the experts of tokens becomes what rows carry: the right layers, tokens and numbers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from siirl.data.completions import expert_columns
from siirl.data.rows import make_rows
from siirl.engines.rollout.vllm.arguments import ARGUMENT, experts_of, replayed_layers
from siirl.errors import RolloutError
from siirl.models.sizes import RouterChoices

LAYERS, NUM_LAYERS, TOP_K, EXPERTS = [1, 3], 5, 3, 300
PROMPTS, RESPONSES = (4, 2), (3, 5)


def said(num_tokens: int, dtype=np.uint16) -> np.ndarray:
    """Of each token and layer other experts, no two alike; zeros in layers without any."""
    found = np.zeros((num_tokens, NUM_LAYERS, TOP_K), dtype)
    for token in range(num_tokens):
        for layer in LAYERS:
            found[token, layer] = [(7 * token + 50 * layer + 90 * k) % EXPERTS for k in range(TOP_K)]
    return found


def test_each_number_is_that_of_its_token_layer_and_place():
    rows = make_rows(
        {
            "prompt_ids": [list(range(num)) for num in PROMPTS],
            "prompt_length": list(PROMPTS),
            "response_ids": [list(range(num)) for num in RESPONSES],
        }
    )
    arrays = [said(prompt + response - 1) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    experts = [experts_of(array, LAYERS, len(array) + 1) for array in arrays]
    columns = expert_columns(rows, experts, RouterChoices(len(LAYERS), TOP_K, EXPERTS))
    prompt_BPW, response_BTW = columns.values()
    for row, (num_prompt, num_response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        start = max(PROMPTS) - num_prompt
        assert (prompt_BPW[row, :start] == -1).all()
        wanted = torch.from_numpy(arrays[row][:, LAYERS].astype(np.int64)).flatten(1)
        assert torch.equal(prompt_BPW[row, start:].long(), wanted[:num_prompt])
        assert torch.equal(response_BTW[row, : num_response - 1].long(), wanted[num_prompt:])
        assert (response_BTW[row, num_response - 1 :] == -1).all(), "nothing reads the last token"


def test_narrow_numbers_above_127_stay_what_they_are():
    found = said(2, np.uint8)
    found[0, 1] = [255, 128, 3]
    numbers = np.frombuffer(experts_of(found, LAYERS, 3), np.int16)
    assert numbers[:TOP_K].tolist() == [255, 128, 3]


@pytest.mark.parametrize("found", [None, said(4), said(6)], ids=["nothing", "too few", "too many"])
def test_other_tokens_than_the_row_has_end_the_run(found):
    with pytest.raises(RolloutError, match="for a row of 6 tokens"):
        experts_of(found, LAYERS, 6)


def test_a_kernel_that_does_not_say_is_noticed():
    found = said(5)
    found[2, 3] = 0
    with pytest.raises(RolloutError, match=r"one expert computed it twice.*moe_backend"):
        experts_of(found, LAYERS, 6)


def test_the_layers_are_those_that_config_json_gives_experts(tmp_path):
    config = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"model": str(tmp_path), ARGUMENT: True}
    assert replayed_layers(asked) == [1, 3]
    assert replayed_layers(asked | {"hf_overrides": {"mlp_only_layers": [1]}}) == [3]
    assert replayed_layers({"model": str(tmp_path)}) is None


@pytest.mark.heavy  # imports vLLM
def test_an_engine_adds_them_to_what_it_gives_also_of_a_response_that_was_paused():
    from siirl.engines.rollout.vllm.native import NativeEngine

    engine, found = NativeEngine.__new__(NativeEngine), said(6)
    engine._expert_layers, engine._kept = LAYERS, None

    def response(token_ids, experts):
        flat = SimpleNamespace(logprobs=[-1.0] * len(token_ids), start_indices=range(len(token_ids)))
        sampled = SimpleNamespace(token_ids=token_ids, logprobs=flat, routed_experts=experts)
        output = SimpleNamespace(
            request_id="7-x", prompt_token_ids=[1, 2, 3, 4], outputs=[sampled], num_cached_tokens=0
        )
        return engine._response(output, "paused").completion

    assert response([5, 6, 7], found).experts == experts_of(found, LAYERS, 7)
    assert response([], None).experts is None
    engine._expert_layers = None
    assert response([5, 6, 7], None).experts is None
