"""What every training engine is held to: sample rows, a loss, plain Hugging Face as the reference."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from hydra.core.override_parser.overrides_parser import OverridesParser
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.compiler.memory import estimate
from siirl.compiler.plan import ModelPlan
from siirl.config import Config, load_config, with_overrides
from siirl.data.rows import make_rows, take_rows
from siirl.engines.train.base import BatchCounts, TokenOutputs, TrainEngine
from siirl.models.families import types_with
from siirl.models.trained import OWN_TYPE
from siirl.observe.metrics import Metrics
from siirl.parallel.dims import ParallelDims, megatron_groups
from siirl.parallel.process_groups import ProcessGroupManager

NUM_ROWS, NUM_STEPS, WIDTH = 10, 2, 9
SAME_PROMPT = (0, 0, 0, 0, 4, 4, 6, 6, 8, 6)
"""Of each row, the first one of its prompt."""
TEMPERATURE, LR, EPS, BETA1, WEIGHT_DECAY, CLIP = 0.7, 1e-3, 1e-6, 0.9, 0.1, 0.5
ENTROPY_COEFF = 0.05
LORA_RANK, LORA_ALPHA, SEED = 4, 8, 3
ENGINES = {
    "fsdp": "siirl.engines.train.fsdp.fsdp_engine:FSDPEngine",
    "megatron": "siirl.engines.train.megatron.engine:MegatronEngine",
}


@dataclass(frozen=True)
class Scenario:
    """One way of running the same training: all must give what the reference gives.

    split: "even", "first_rank" (every other rank has zero rows) or "uneven". fsdp_size: 0 for all ranks.
    sizes: (axis of ParallelDims, size), under fsdp of cp and ep alone; other ranks are data parallel. large:
    fsdp takes the model for one that is too large to stay whole on every rank unless it is told to.
    """

    name: str
    world: int
    model: str = "qwen3_tied"
    split: str = "even"
    overrides: tuple[str, ...] = ()
    fsdp_size: int = 0
    strategy: str = "fsdp"
    sizes: tuple[tuple[str, int], ...] = ()
    device: str = "cpu"
    large: bool = False


def sample_rows(step: int) -> TensorDict:
    """NUM_ROWS rows of unequal length: one without response, one with nothing to train, masks with holes.

    Some have the same prompt as others.
    """
    draw = torch.Generator().manual_seed(100 + step)
    prompt_B = torch.randint(1, 8, (NUM_ROWS,), generator=draw)[list(SAME_PROMPT)]
    response_B = torch.randint(1, WIDTH + 1, (NUM_ROWS,), generator=draw)
    response_B[3] = 0
    inside_BT = torch.arange(WIDTH) < response_B[:, None]
    mask_BT = inside_BT & (torch.rand(NUM_ROWS, WIDTH, generator=draw) < 0.8)
    mask_BT[5] = False
    return make_rows(
        {
            "row_id": torch.arange(NUM_ROWS),
            "prompt_ids": torch.randint(0, 64, (NUM_ROWS, 7), generator=draw)[list(SAME_PROMPT)],
            "prompt_length": prompt_B,
            "response_ids": torch.randint(0, 64, (NUM_ROWS, WIDTH), generator=draw),
            "response_length": response_B,
            "response_mask": mask_BT,
            "advantage": torch.randn(NUM_ROWS, WIDTH, generator=draw),
            "raw_prompt": [[{"role": "user", "content": str(row)}] for row in range(NUM_ROWS)],
        }
    )


def rows_of_rank(rank: int, world: int, split: str) -> list[int]:
    """Positions of the rows that a rank holds."""
    if split == "even":
        return list(range(rank, NUM_ROWS, world))
    if split == "first_rank":
        return list(range(NUM_ROWS)) if rank == 0 else []
    bounds = [0, *(NUM_ROWS - world + r for r in range(1, world)), NUM_ROWS]
    return list(range(bounds[rank], bounds[rank + 1]))


def policy_loss(outputs: TokenOutputs, rows: TensorDict, counts: BatchCounts) -> tuple[Tensor, TensorMetrics]:
    """This micro-batch's share of the token-mean of -advantage * log_prob - coefficient * entropy."""
    loss_BT = -rows["advantage"] * outputs.log_prob_BT - ENTROPY_COEFF * outputs.entropy_BT
    share = (loss_BT * rows["response_mask"]).sum() / counts.num_tokens
    metrics = TensorMetrics()
    metrics.sum("loss", share.detach())
    metrics.sum("rows", len(rows))
    return share, metrics


def _one_row(model: Any, rows: TensorDict, row: int) -> tuple[Tensor, Tensor]:
    """(response tokens, log-probs of all words at each) by plain Hugging Face, the row alone in its batch."""
    num_prompt, num_response = int(rows["prompt_length"][row]), int(rows["response_length"][row])
    prompt = rows["prompt_ids"][row][rows["prompt_ids"].shape[1] - num_prompt :]
    response = rows["response_ids"][row][:num_response]
    logits = model(input_ids=torch.cat([prompt, response]).unsqueeze(0)).logits[0]
    return response, torch.log_softmax(logits[num_prompt - 1 : -1].float() / TEMPERATURE, dim=-1)


def one_row_outputs(model: Any, rows: TensorDict, row: int) -> tuple[Tensor, Tensor]:
    """(log_prob, entropy) of a row's response tokens."""
    response, log_p = _one_row(model, rows, row)
    return log_p.gather(-1, response[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def reference_outputs(model: Any, rows: TensorDict) -> tuple[Tensor, Tensor]:
    """(log_prob, entropy) [B, T], a row at a time."""
    log_prob_BT = torch.zeros(len(rows), WIDTH)
    entropy_BT = torch.zeros(len(rows), WIDTH)
    for row in range(len(rows)):
        if (num := int(rows["response_length"][row])) > 0:
            log_prob_BT[row, :num], entropy_BT[row, :num] = one_row_outputs(model, rows, row)
    return log_prob_BT, entropy_BT


def _squares(model: Any, rows: TensorDict) -> Tensor:
    """The sum of the squared probabilities of all words, [B, T]."""
    square_BT = torch.zeros(len(rows), WIDTH)
    for row in range(len(rows)):
        if (num := int(rows["response_length"][row])) > 0:
            square_BT[row, :num] = _one_row(model, rows, row)[1].exp().square().sum(-1)
    return square_BT


@dataclass
class Outcome:
    """What a training run leaves behind; of the reference or of an engine."""

    log_prob: Tensor
    entropy: Tensor
    prob_square: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def model_of_hf(path: Path) -> torch.nn.Module:
    """transformers' model of a folder in float32. Where a type caps scores, not by SDPA, which does not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    capped = types_with(lambda row: "attn_logit_softcapping" in row.scales)
    how = {"attn_implementation": "eager"} if AutoConfig.from_pretrained(path).model_type in capped else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **how)


def run_reference(path: Path, lora: str | list[str] = "") -> Outcome:
    """Plain single-process Hugging Face and AdamW; lora: modules with adapters, which alone train then."""
    model = model_of_hf(path)
    if lora:
        model = plain_lora(model, lora)
    with torch.no_grad():
        outcome = Outcome(*reference_outputs(model, sample_rows(0)), _squares(model, sample_rows(0)))
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=LR, betas=(BETA1, 0.999), eps=EPS, weight_decay=WEIGHT_DECAY)
    for step in range(NUM_STEPS):
        rows = sample_rows(step)
        log_prob_BT, entropy_BT = reference_outputs(model, rows)
        mask_BT = rows["response_mask"]
        loss_BT = -rows["advantage"] * log_prob_BT - ENTROPY_COEFF * entropy_BT
        loss = (loss_BT * mask_BT).sum() / mask_BT.sum()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(torch.nn.utils.clip_grad_norm_(trained, CLIP).item())
        if step == 0:
            outcome.grads = {
                plain_name(n): p.grad.clone() for n, p in model.named_parameters() if p.requires_grad
            }
        adamw.step()
        adamw.zero_grad()
    if lora:
        model = model.merge_and_unload()
    kept = {n: buffer for n, buffer in model.named_buffers() if n.endswith(OWN_TYPE)}
    outcome.weights = {n: p.detach().clone() for n, p in (*model.named_parameters(), *kept.items())}
    return outcome


def plain_lora(model: Any, targets: str | list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    return get_peft_model(model, LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets))


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.")


def overrides_for(path: Path | str, role: str = "actor") -> list[str]:
    """Config overrides that describe the reference's training in fp32."""
    precision = "fsdp_config.mixed_precision.param_dtype=float32"
    group = "actor_rollout_ref"
    return [
        f"{group}.model.path={path}",
        f"{group}.{role}.{precision}",
        f"{group}.{role}.megatron.param_dtype=float32",
        f"{group}.actor.grad_clip={CLIP}",
        f"{group}.actor.optim.lr={LR}",
        f"{group}.actor.optim.weight_decay={WEIGHT_DECAY}",
        f"+{group}.actor.optim.override_optimizer_config={{eps:{EPS}}}",
        f"{group}.actor.ppo_micro_batch_size_per_gpu=4",
        f"{group}.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"{group}.ref.log_prob_micro_batch_size_per_gpu=4",
        f"trainer.seed={SEED}",
    ]


@functools.cache
def _defaults() -> Config:
    return load_config([])


def configured(overrides: list[str]) -> Config:
    """load_config of these overrides; hydra composes once in a process, which takes long."""
    parser = OverridesParser.create()
    values: dict[str, Any] = {}
    for override in map(parser.parse_override, overrides):
        name = override.key_or_group
        if not override.is_delete():
            values[name] = override.value()
            continue
        values.pop(name, None)
        head, _, last = name.rpartition(".")
        if head in values:
            values[head] = {key: value for key, value in values[head].items() if key != last}
    return with_overrides(_defaults(), values)


def build_engine(
    scenario: Scenario, path: Path | str, role: str = "actor", deadline_s: float = 60
) -> tuple[TrainEngine, ProcessGroupManager]:
    """The scenario's engine on all ranks of the default group."""
    ranks = tuple(range(scenario.world))
    _, wanted = dims_of(scenario, ranks)
    backend = "gloo" if scenario.device == "cpu" else "cpu:gloo,cuda:nccl"
    groups = ProcessGroupManager(wanted, backend, deadline_s)
    return make_engine(scenario, path, groups, ranks, role), groups


def release(groups: ProcessGroupManager) -> None:
    """End the groups of an engine, for one that comes after it. On all ranks, when nothing is in flight."""
    for ranks, group in groups._groups.items():
        if groups.rank in ranks:
            dist.destroy_process_group(group)


def make_engine(
    scenario: Scenario,
    path: Path | str,
    groups: ProcessGroupManager,
    ranks: tuple[int, ...],
    role: str = "actor",
) -> TrainEngine:
    """The scenario's engine on these ranks, which all call this; its groups exist."""
    import importlib

    dims, _ = dims_of(scenario, ranks)
    estimate.SMALL_MODEL_BYTES = 0 if scenario.large else 2 << 30
    plan = ModelPlan(
        name=f"agent_0.{role}",
        agent=0,
        role=role,
        backend=scenario.strategy,
        head="lm",
        trains=role == "actor",
        ranks=ranks,
        dims=dims,
        node=role,
        nodes=(role,),
    )
    cfg = configured([*overrides_for(path, role), *scenario.overrides])
    module, _, name = ENGINES[scenario.strategy].partition(":")
    return getattr(importlib.import_module(module), name)(plan, cfg, groups, torch.device(scenario.device))


def dims_of(scenario: Scenario, ranks: tuple[int, ...]) -> tuple[ParallelDims, list[tuple[int, ...]]]:
    """The parallel sizes of a scenario, and the process groups that it needs."""
    world = scenario.world
    if scenario.strategy == "megatron":
        dims = ParallelDims(world, **dict(scenario.sizes))
        dims = replace(dims, dp_replicate=dims.dp)
        return dims, list(megatron_groups(dims, ranks))
    shard = scenario.fsdp_size or world
    sizes = dict(scenario.sizes)
    cp, ep = sizes.get("cp", 1), sizes.get("ep", 1)
    dims = ParallelDims(world=world, cp=cp, ep=ep, dp_shard=shard // cp, dp_replicate=world // shard)
    lines = [line for lines in dims.fsdp_groups(ranks).values() for line in lines]
    return dims, list(dict.fromkeys([ranks, *lines]))


def first_step_gradients(engine: TrainEngine, on_all: bool = True) -> dict[str, Tensor]:
    """Full gradients of the first optimizer step, out of AdamW's first moment: (1 - beta1) * gradient."""
    prefix = "exp_avg."
    moments = whole_tensors(engine.state_dict()["optimizer"], on_all)
    return {
        name.removeprefix(prefix): moment / (1 - BETA1)
        for name, moment in moments.items()
        if name.startswith(prefix)
    }


def whole_tensors(state: dict[str, Tensor], on_all: bool = True) -> dict[str, Tensor]:
    """The tensors of a sharded state, whole, on every rank or on rank 0; NaN where no rank has anything."""
    mine = [(name, *part) for name, tensor in state.items() for part in parts_of(name, tensor)]
    parts: list[Any] = [None] * dist.get_world_size()
    if on_all:
        dist.all_gather_object(parts, mine)
    else:
        dist.gather_object(mine, parts if dist.get_rank() == 0 else None)
        parts = parts if dist.get_rank() == 0 else []
    whole: dict[str, Tensor] = {}
    for name, size, offsets, part in itertools.chain(*parts):
        if name not in whole:
            whole[name] = torch.full(size, torch.nan if part.is_floating_point() else 0, dtype=part.dtype)
        place = tuple(slice(at, at + num) for at, num in zip(offsets, part.shape, strict=True))
        whole[name][place] = part
    return whole


def parts_of(name: str, tensor: Any) -> Iterator[tuple[torch.Size, tuple[int, ...], Tensor]]:
    """(size of the whole tensor, offsets, what this rank has there), as checkpoints are told."""
    if not hasattr(tensor, "__create_write_items__"):
        yield tensor.shape, (0,) * tensor.dim(), tensor.detach().cpu().clone()
        return
    for item in tensor.__create_write_items__(name, tensor):
        part = tensor.__get_tensor_shard__(item.index).detach().cpu().clone()
        yield item.tensor_data.size, tuple(item.tensor_data.chunk.offsets), part


def train_steps(engine: TrainEngine, scenario: Scenario, steps: range) -> list[Metrics]:
    """Run optimizer steps on this rank's rows."""
    mine = rows_of_rank(engine.dp_rank, engine.dp_size, scenario.split)
    return [
        engine.train_mini_batch(
            take_rows(sample_rows(step), mine), policy_loss, ("log_prob", "entropy"), TEMPERATURE
        )
        for step in steps
    ]


def run_scenario(scenario: Scenario, path: Path | str) -> Outcome:
    """Train as the scenario says, see `train`."""
    return train(build_engine(scenario, path)[0], scenario)


def train(engine: TrainEngine, scenario: Scenario) -> Outcome:
    """Outputs before the first of NUM_STEPS steps; on rank 0 gradients of it, and weights after the last."""
    mine = rows_of_rank(engine.dp_rank, engine.dp_size, scenario.split)
    names = ("log_prob", "entropy", "prob_square")
    columns = engine.compute(take_rows(sample_rows(0), mine), names, TEMPERATURE)
    whole = torch.zeros(3, NUM_ROWS, WIDTH)
    for index, name in enumerate(names):
        whole[index, mine] = columns[name]
    dist.all_reduce(whole)
    whole /= scenario.world // engine.dp_size  # the ranks of a shard hold the same rows
    outcome = Outcome(*whole)
    for step in range(NUM_STEPS):
        (metrics,) = train_steps(engine, scenario, range(step, step + 1))
        if step == 0:
            outcome.grads = first_step_gradients(engine, on_all=False)
        values = metrics.values()
        loss = torch.tensor([values.get("loss", 0.0), values.get("rows", 0.0)])
        dist.all_reduce(loss)
        loss /= scenario.world // engine.dp_size
        assert loss[1] == NUM_ROWS, "the loss function saw every row once"
        outcome.losses.append(loss[0].item())
        outcome.grad_norms.append(values["grad_norm"])
    assert engine.version == NUM_STEPS
    for name, weight in engine.export_weights(torch.float32):
        if dist.get_rank() == 0:
            outcome.weights[name] = weight.to("cpu", copy=True)
    return outcome


def run_scenarios(rank: int, world: int, scenarios: list[Scenario], paths: dict[str, str]) -> Any:
    """All scenarios of one world size, one after the other: name -> Outcome, from rank 0."""
    outcomes = {scenario.name: run_scenario(scenario, paths[scenario.model]) for scenario in scenarios}
    return outcomes if rank == 0 else None


def follow(rank: int, world: int, scenario: Scenario, path: str, other: str) -> None:
    """A frozen engine of `path` goes a share of the way to the weights of `other`, and then all of it."""
    engine, _ = build_engine(scenario, path, role="ref")
    rows = take_rows(sample_rows(0), rows_of_rank(0, 1, "even"))
    engine.compute(rows, ("log_prob",), TEMPERATURE)
    before = {name: weight.clone() for name, weight in engine.export_weights()}
    whole = dict(safetensors.torch.load_file(Path(other) / "model.safetensors"))
    assert not before.keys() - whole.keys()
    weights = {name: whole[name].float() for name in before}
    engine.take_weights(iter(weights.items()), 0.25)
    for name, weight in engine.export_weights():
        torch.testing.assert_close(weight, 0.75 * before[name] + 0.25 * weights[name], msg=name)
    engine.take_weights(iter(weights.items()), 1.0)
    for name, weight in engine.export_weights():
        assert torch.equal(weight, weights[name]), name
    if scenario.strategy == "fsdp":  # whose ranks each have rows of their own
        from transformers import AutoModelForCausalLM

        found = engine.compute(rows, ("log_prob",), TEMPERATURE)["log_prob"]
        expected, _ = reference_outputs(AutoModelForCausalLM.from_pretrained(other), sample_rows(0))
        torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)
