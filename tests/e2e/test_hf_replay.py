"""The main job against a replay of its dumped rows in plain Hugging Face, in float64.

Rewards, advantages, losses and updates are written here anew, from the papers; of siirl nothing is read but
the files that the job left.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from job_harness import Finished, Inputs, overrides, run_job
from safetensors import safe_open
from torch import Tensor

ACTOR = "actor_rollout_ref.actor"
LR, PROMPTS, SAMPLES, MINI = 2e-3, 8, 4, 4
MARGIN = 1e-6


@dataclass
class Row:
    """A response of the dump, and what the replay finds of it."""

    group: int
    prompt: list[int]
    response: list[int]
    score: float
    advantage: list[float]
    old: list[float]
    ref: list[float]


def dumped(folder: Path, tokenizer) -> list[Row]:
    """The rows of a step, in their order, scored by what the reward function says (job_harness.REWARD)."""
    (part,) = folder.glob("*.safetensors")
    texts = [json.loads(line) for line in part.with_suffix(".jsonl").read_text().splitlines()]
    with safe_open(part, "pt") as file:
        columns = {name: file.get_tensor(name).tolist() for name in file.keys()}
    rows, at = {}, {"prompt": 0, "response": 0}
    for index, number in enumerate(columns["row_id"]):
        ids = {}
        for side in at:
            length = columns[f"{side}_length"][index]
            ids[side] = columns[f"{side}_ids"][at[side] : at[side] + length]
            at[side] += length
        said = tokenizer.decode(ids["response"], skip_special_tokens=True)
        worth = sum(character.isdigit() for character in said) / 8
        worth += 0.5 if texts[index]["ground_truth"] in said else 0.0
        rows[number] = Row(columns["group_id"][index], ids["prompt"], ids["response"], worth, [], [], [])
    return [rows[number] for number in sorted(rows)]


def log_probs(model, row: Row) -> Tensor:
    """Of each response token."""
    ids = torch.tensor([row.prompt + row.response])
    logits = model(ids).logits[0, len(row.prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(row.response)[:, None])[:, 0]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def group_scores(rows: list[Row], row: Row) -> list[float]:
    return [other.score for other in rows if other.group == row.group]


def normalised(rows: list[Row]) -> None:
    """GRPO: how many deviations of its group a response is above its mean."""
    for row in rows:
        scores = group_scores(rows, row)
        deviation = math.sqrt(sum((x - mean(scores)) ** 2 for x in scores) / (len(scores) - 1))
        spread = (row.score - mean(scores)) / (deviation + 1e-6)
        row.advantage = [spread if max(scores) > min(scores) else 0.0] * len(row.response)


def skipped(rows: list[Row]) -> None:
    """RLOO: above the mean of the others."""
    for row in rows:
        scores = group_scores(rows, row)
        others = (sum(scores) - row.score) / (len(scores) - 1)
        row.advantage = [row.score - others] * len(row.response)


def whitened(rows: list[Row], gamma: float = 0.9) -> None:
    """REINFORCE++: the score at the last token, discounted back to each, over all tokens of the batch."""
    for row in rows:
        last = len(row.response) - 1
        row.advantage = [row.score * gamma ** (last - place) for place in range(last + 1)]
    tokens = [x for row in rows for x in row.advantage]
    centre = mean(tokens)
    deviation = math.sqrt(sum((x - centre) ** 2 for x in tokens) / (len(tokens) - 1))
    for row in rows:
        row.advantage = [(x - centre) / (deviation + 1e-8) for x in row.advantage]


def clipped(row: Row, now: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's loss of each token, with the floor of dual clip."""
    worth = torch.tensor(row.advantage, dtype=torch.float64)
    ratio = (now - torch.tensor(row.old, dtype=torch.float64)).exp()
    loss = torch.maximum(-worth * ratio, -worth * ratio.clamp(1 - low, 1 + high))
    return torch.where(worth < 0, torch.minimum(loss, -3.0 * worth), loss)


def with_kl(row: Row, now: Tensor) -> Tensor:
    above = now - torch.tensor(row.ref, dtype=torch.float64)
    return clipped(row, now, 0.2, 0.28) + 0.1 * ((-above).exp() - 1 + above)


def of_the_row(row: Row, now: Tensor) -> Tensor:
    """GSPO: one ratio for the row, the geometric mean over its tokens."""
    ratio = (now - torch.tensor(row.old, dtype=torch.float64)).mean().exp()
    loss = torch.maximum(-row.advantage[0] * ratio, -row.advantage[0] * ratio.clamp(1 - 3e-4, 1 + 4e-4))
    return loss.expand(len(now))


def weighted(row: Row, now: Tensor) -> Tensor:
    """CISPO: a clipped weight, without gradient, of REINFORCE."""
    worth = torch.tensor(row.advantage, dtype=torch.float64)
    ratio = (now.detach() - torch.tensor(row.old, dtype=torch.float64)).exp()
    return -ratio.clamp(0, 1.05) * worth * now


def over_tokens(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def over_rows(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def sums_over_rows(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.sum() for loss in losses]).mean()


@dataclass(frozen=True)
class Algorithm:
    advantages: Callable[[list[Row]], None]
    loss: Callable[[Row, Tensor], Tensor]
    average: Callable[[list[Tensor]], Tensor]
    keys: tuple[str, ...]


def loss_keys(name: str, mode: str, *more: str) -> tuple[str, ...]:
    return (f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.loss_agg_mode={mode}", *more)


KL = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.clip_ratio_high=0.28")
BOUNDS = (f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4")
CISPO = (f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.05")
REINFORCE = ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9")
ALGORITHMS = {
    "grpo": Algorithm(normalised, with_kl, over_tokens, loss_keys("vanilla", "token-mean", *KL)),
    "rloo": Algorithm(
        skipped,
        clipped,
        sums_over_rows,
        loss_keys("vanilla", "seq-mean-token-sum", "algorithm.adv_estimator=rloo"),
    ),
    "reinforce++": Algorithm(
        whitened, clipped, over_rows, loss_keys("vanilla", "seq-mean-token-mean", *REINFORCE)
    ),
    "gspo": Algorithm(normalised, of_the_row, over_rows, loss_keys("gspo", "seq-mean-token-mean", *BOUNDS)),
    "cispo": Algorithm(normalised, weighted, over_tokens, loss_keys("cispo", "token-mean", *CISPO)),
}


def replayed(
    algorithm: Algorithm, model_dir: Path, rows: list[Row]
) -> tuple[float, float, dict[str, Tensor]]:
    """Mean loss and gradient norm of the two mini-batches, and the weights after them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        for row in rows:
            row.old = row.ref = log_probs(model, row).tolist()
    algorithm.advantages(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)
    losses, norms = [], []
    for first in range(0, len(rows), MINI * SAMPLES):
        mini_batch = rows[first : first + MINI * SAMPLES]
        loss = algorithm.average([algorithm.loss(row, log_probs(model, row)) for row in mini_batch])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss))
    return mean(losses), mean(norms), model.state_dict()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def job(inputs: Inputs, algorithm: Algorithm, output: Path, world: int) -> Finished:
    keys = (
        *(f"{ACTOR}.optim.lr={LR}", "trainer.total_training_steps=1", "trainer.test_freq=-1"),
        *("trainer.val_before_train=False", f"trainer.dump_rollouts_dir={output / 'dump'}"),
    )
    return run_job(world, overrides(inputs, output, *keys, *algorithm.keys))


@pytest.mark.parametrize(
    "name", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_a_step_of_the_main_job_is_that_of_plain_hugging_face_on_its_rows(inputs, tmp_path, name):
    from transformers import AutoTokenizer

    algorithm = ALGORITHMS[name]
    ours = job(inputs, algorithm, tmp_path, 1)
    rows = dumped(tmp_path / "dump" / "agent_0" / "step_1", AutoTokenizer.from_pretrained(inputs.model))
    assert len(rows) == PROMPTS * SAMPLES
    loss, norm, weights = replayed(algorithm, inputs.model, rows)
    assert ours.values("reward/score") == [pytest.approx(mean([row.score for row in rows]), abs=1e-6)]
    assert ours.values("actor/loss") == [pytest.approx(loss, rel=1e-4, abs=MARGIN)]
    assert ours.values("actor/grad_norm") == [pytest.approx(norm, rel=1e-4)]
    assert norm > 1e-3  # otherwise the weights would say nothing
    apart = torch.cat(
        [(tensor.double() - weights[key]).abs().flatten() for key, tensor in ours.weights().items()]
    )
    assert float(apart.max()) < LR / 10 and float(apart.mean()) < LR / 1e4
