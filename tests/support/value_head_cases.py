"""What the value head of every training engine is held to: rows, the training, plain Hugging Face."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import train_engine_cases as cases
from tensordict import TensorDict
from torch import Tensor
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import Config, load_config
from siirl.data.rows import take_rows
from siirl.engines.engine_registry import make_train_engine
from siirl.engines.train.base import TrainEngine
from siirl.engines.train.hf_model import load_source
from siirl.model_files.hf_config import load_hf_config
from siirl.nodes.value_model import make_value_loss_fn
from siirl.parallel.process_groups import ProcessGroupManager

STEPS, LR, CLIP_RANGE = 2, 1e-3, 0.2


def critic_config(path: str, *more: str) -> Config:
    """The configuration of the critic that plain_training trains."""
    return load_config(
        [
            f"critic.model.path={path}",
            "critic.fsdp_config.mixed_precision.param_dtype=float32",
            "critic.megatron.param_dtype=float32",
            f"critic.optim.lr={LR}",
            f"+critic.optim.override_optimizer_config={{eps:{cases.EPS}}}",
            "critic.optim.weight_decay=0.1",
            "critic.ppo_micro_batch_size_per_gpu=3",
            f"critic.cliprange_value={CLIP_RANGE}",
            *more,
        ]
    )


def critic_rows(step: int) -> TensorDict:
    """sample_rows with returns, and old values from which some values are clipped."""
    rows = cases.sample_rows(step)
    draw = torch.Generator().manual_seed(step)
    rows["return_"] = torch.randn(rows["advantage"].shape, generator=draw)
    rows["value"] = torch.randn(rows["advantage"].shape, generator=draw) * 0.3
    return rows


def make_critic(
    scenario: Scenario, path: str, groups: ProcessGroupManager, ranks: tuple[int, ...]
) -> tuple[TrainEngine, Config]:
    """The critic of a scenario on these ranks, which all call this; its groups exist."""
    dims, _ = cases.dims_of(scenario, ranks)
    name, strategy = "agent_0.critic", scenario.strategy
    plan = ModelPlan(name, 0, "critic", strategy, "value", True, ranks, dims, "c", ("c",))
    cfg = critic_config(path, *scenario.overrides)
    return make_train_engine(plan, cfg, groups, torch.device(scenario.device)), cfg


@dataclass
class CriticOutcome:
    """What a training leaves behind: values before and after it, gradients of its first step, weights."""

    before: Tensor
    after: Tensor
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


class CriticRun:
    """The training of a critic, step by step, on rows spread over its data-parallel shards."""

    def __init__(self, engine: TrainEngine, cfg: Config, split: str):
        self.engine = engine
        self._loss_fn = make_value_loss_fn(cfg.critic)
        self._mine = cases.rows_of_rank(engine.dp_rank, engine.dp_size, split)
        self._grads: dict[str, Tensor] = {}
        self._before = self.values()

    def values(self) -> Tensor:
        """Values of the first rows, whole on every rank."""
        values = torch.zeros(cases.NUM_ROWS, cases.WIDTH)
        values[self._mine] = self.engine.compute(take_rows(critic_rows(0), self._mine), ("value",), 1.0)[
            "value"
        ]
        dist.all_reduce(values)
        return values / (dist.get_world_size() // self.engine.dp_size)

    def step(self, step: int) -> None:
        rows = take_rows(critic_rows(step), self._mine)
        self.engine.train_mini_batch(rows, self._loss_fn, ("value",), 1.0)
        if step == 0:
            self._grads = cases.first_step_gradients(self.engine)

    def outcome(self) -> CriticOutcome:
        weights = {name: weight.to("cpu", copy=True) for name, weight in self.engine.export_weights()}
        return CriticOutcome(self._before, self.values(), self._grads, weights)


def plain_values(model: Any, rows: TensorDict) -> Tensor:
    """The value of each response token by plain Hugging Face, from the state before it, a row at a time."""
    value_BT = torch.zeros(len(rows), cases.WIDTH)
    for row in range(len(rows)):
        num_prompt, num = int(rows["prompt_length"][row]), int(rows["response_length"][row])
        if num:
            prompt = rows["prompt_ids"][row][rows["prompt_ids"].shape[1] - num_prompt :]
            ids = torch.cat([prompt, rows["response_ids"][row][:num]])[None]
            value_BT[row, :num] = model(input_ids=ids).logits[0, num_prompt - 1 : -1, 0]
    return value_BT


def plain_training(path: str) -> CriticOutcome:
    """The same training in plain PyTorch, loss written out."""
    cfg = critic_config(path)
    hf_config = load_hf_config(cfg.critic.model)
    hf_config.num_labels = 1
    model = load_source(hf_config, cfg.critic.model, "value", cfg.trainer.seed)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, eps=cases.EPS, weight_decay=0.1)
    grads: dict[str, Tensor] = {}
    with torch.no_grad():
        before = plain_values(model, critic_rows(0))
    for step in range(STEPS):
        rows = critic_rows(step)
        value, old, target = plain_values(model, rows), rows["value"], rows["return_"]
        near = torch.maximum(torch.minimum(value, old + CLIP_RANGE), old - CLIP_RANGE)
        loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
        mask = rows["response_mask"]
        ((loss * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = grads or {name: param.grad.clone() for name, param in model.named_parameters()}
        adamw.step()
        adamw.zero_grad()
    weights = {name: param.detach() for name, param in model.named_parameters()}
    with torch.no_grad():
        return CriticOutcome(before, plain_values(model, critic_rows(0)), grads, weights)


def assert_equal(ours: CriticOutcome, theirs: CriticOutcome) -> None:
    """Values and gradients to 1e-5, weights to a fiftieth of an optimizer step."""
    assert theirs.before.abs().max() > 0.1
    torch.testing.assert_close(ours.before, theirs.before, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.after, theirs.after, atol=2e-5, rtol=0)
    assert ours.grads.keys() == ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.grads[name], theirs.grads[name], atol=1e-5, rtol=0, msg=name)
        torch.testing.assert_close(ours.weights[name], weight, atol=0.02 * LR, rtol=0, msg=name)
