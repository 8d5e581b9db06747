"""A row of 16,384 tokens, packed, shared by ranks, and by Megatron's: plain Hugging Face in float64.

LONG_ROW_TOKENS=131072 asks for more, of one layer: attention takes 64 times as long as for 16,384, of which
each layer costs 4 s of a processor for the reference, 3 packed, 5 shared by two ranks, 11 by Megatron's.
"""

import os
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from tensordict import TensorDict
from torch import Tensor
from train_engine_cases import Scenario

from siirl.data.rows import make_rows

TOKENS, PROMPT = int(os.environ.get("LONG_ROW_TOKENS", 16_384)), 1_000
HALF = TOKENS // 2
DEADLINE_S = 2400
"""Also of a rank that waits for another, whose tokens read more."""
PLACES = (0, 1, 4_095, HALF - PROMPT - 1, HALF - PROMPT, HALF, TOKENS - PROMPT - 1)
"""Tokens of the response, at ends and in the middle, also of a rank's half."""
LAYERS = 2 if TOKENS <= 32_768 else 1
SIZES = {"layers": LAYERS, "heads": 2, "kv_heads": 2, "hidden": 32, "init_std": 0.2, "max_positions": TOKENS}
LAYOUTS = {
    1: [Scenario("packed", 1)],
    2: [
        Scenario("shared", 2, sizes=(("cp", 2),)),
        Scenario("megatron cp 2", 2, strategy="megatron", sizes=(("cp", 2),)),
    ],
}


def long_row() -> TensorDict:
    draw = torch.Generator().manual_seed(3)
    num = TOKENS - PROMPT
    mask_BT = torch.zeros(1, num, dtype=torch.bool)
    mask_BT[0, list(PLACES)] = True
    return make_rows(
        {
            "row_id": torch.zeros(1, dtype=torch.int64),
            "prompt_ids": torch.randint(0, 64, (1, PROMPT), generator=draw),
            "prompt_length": torch.tensor([PROMPT]),
            "response_ids": torch.randint(0, 64, (1, num), generator=draw),
            "response_length": torch.tensor([num]),
            "response_mask": mask_BT,
            "advantage": torch.randn(1, num, generator=draw),
            "raw_prompt": [[{"role": "user", "content": "long"}]],
        }
    )


def outcome(rank: int, world: int, folder: Path, scenario: Scenario) -> tuple[Tensor, float]:
    """Log-probs of the row's response, and the gradient norm of an update by a few of its tokens."""
    engine, _ = cases.build_engine(scenario, folder, deadline_s=DEADLINE_S)
    rows = long_row()
    log_prob_BT = engine.compute(rows, ("log_prob",), cases.TEMPERATURE)["log_prob"]
    outputs = ("log_prob", "entropy")
    metrics = engine.train_mini_batch(rows, cases.policy_loss, outputs, cases.TEMPERATURE)
    return log_prob_BT[0], metrics.values()["grad_norm"]


def plain(folder: Path) -> tuple[Tensor, float]:
    """The same by transformers in float64, and no code of ours; of the log-probs those at PLACES."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    rows = long_row()
    ids = torch.cat([rows["prompt_ids"], rows["response_ids"]], -1)
    at = torch.tensor([PROMPT + place for place in PLACES])
    logits = model(ids, logits_to_keep=at - 1).logits[0] / cases.TEMPERATURE
    log_p = logits.log_softmax(-1)
    log_prob = log_p.gather(-1, ids[0, at][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = -rows["advantage"][0, list(PLACES)] * log_prob - cases.ENTROPY_COEFF * entropy
    loss.mean().backward()
    return log_prob.detach(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_row_is_what_plain_hugging_face_computes_in_float64(tmp_path):
    make_tiny_model_dir(tmp_path, **SIZES)
    expected, norm = plain(tmp_path)
    first = None
    for world, scenarios in LAYOUTS.items():
        for scenario in scenarios:
            arguments = (outcome, world, tmp_path, scenario)
            log_prob_T, grad_norm = run_workers(*arguments, deadline_s=DEADLINE_S)[0]
            first = log_prob_T if first is None else first
            assert len(log_prob_T) == TOKENS - PROMPT
            assert float((log_prob_T[list(PLACES)].double() - expected).abs().max()) < 2e-5, scenario.name
            assert float((log_prob_T - first).abs().max()) < 5e-5, scenario.name
            assert grad_norm == pytest.approx(norm, rel=1e-4), scenario.name
