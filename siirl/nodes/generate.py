"""The rollout op: prompts in, n sampled responses of each out, at once or some steps later.

Sources: "APRIL: Active partial rollouts in reinforcement learning" (2025), "AReaL" (2025).
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tensordict import TensorDict

from siirl.config import Config
from siirl.dag.fields_read import experts_by
from siirl.data.completions import Completion, SamplingParams, expert_columns
from siirl.data.recorded_rollouts import step_folder
from siirl.data.replayed_rows import conditions, record
from siirl.data.rows import pad_stack, seen_of, take_rows
from siirl.engines.rollout.base import RolloutEngine
from siirl.models.config_json import as_built
from siirl.models.sizes import router_choices
from siirl.nodes.context import OpContext, StepInfo
from siirl.nodes.rollouts_in_flight import FinishedGroups, RolloutsInFlight
from siirl.nodes.staleness_report import report_staleness, report_token_staleness
from siirl.observe.spans import phase
from siirl.types import EXPERT_FIELDS, FIELDS, FINISH_LENGTH, FINISH_STOP


def rollout(
    ctx: OpContext, rows: TensorDict, engine: RolloutEngine, in_flight: RolloutsInFlight | None
) -> TensorDict:
    """One row per sample: the prompt's fields repeated, and the response's. No communication but within the
    shard.

    in_flight: of an asynchronous rollout. Rows are then the prompts that were loaded, maybe several batches
    or none; what it gives is of as many prompts as a batch has, or still lacks, of this step or some steps
    before. Without it, and in validation, which has prompts of its own, it is of these prompts.
    """
    params = sampling_params(ctx.cfg, ctx.dialect.stop_ids, ctx.validate)
    if in_flight is None or ctx.validate:
        seeds = [prompt_seed(ctx, group_id) for group_id in rows["group_id"].tolist()]
        found = engine.generate(prompt_tokens(rows), params, seeds, seen_of(rows))
        samples = [sample for prompt in found for sample in prompt]
    else:
        rows, samples = _asynchronous(ctx, rows, engine, in_flight, params)
    out = samples_of(rows, params.n, response_columns(samples))
    add_experts(ctx.cfg, out, [sample.experts for sample in samples])
    report(ctx, out)
    ctx.metrics.merge(engine.drain_metrics())
    dump_rollouts(ctx, out)
    return out


def _asynchronous(
    ctx: OpContext,
    rows: TensorDict,
    engine: RolloutEngine,
    in_flight: RolloutsInFlight,
    params: SamplingParams,
) -> tuple[TensorDict, list[Completion]]:
    """The prompts that leave now, and the completions of each. Collective over the ranks of the shard."""
    in_flight.admit(
        rows, ctx.step, lambda batch, slot: prompt_seed(replace(ctx, now=StepInfo(batch, False)), slot)
    )
    taken: FinishedGroups = engine.share(in_flight.sample(params, ctx.step) if engine.leads else None)
    prompts = in_flight.give(taken)
    staleness = [ctx.step - (one.first_step or ctx.step) for one in taken.responses]
    num_partial = sum(len(set(one.steps)) > 1 for one in taken.responses)
    report_token_staleness(ctx, Counter(step for one in taken.responses for step in one.steps))
    dropped, left = in_flight.drain_dropped(), in_flight.num_more(ctx.step)
    report_staleness(ctx, staleness, num_partial, taken.num_restarted, dropped, left)
    return prompts, [one.completion() for one in taken.responses]


def prompt_tokens(rows: TensorDict) -> list[list[int]]:
    """The tokens of each prompt, without padding."""
    lengths = rows["prompt_length"].tolist()
    return [
        ids[len(ids) - length :] for ids, length in zip(rows["prompt_ids"].tolist(), lengths, strict=True)
    ]


def samples_of(rows: TensorDict, n: int, columns: dict[str, torch.Tensor]) -> TensorDict:
    """One row per sample: the fields of its prompt, a row_id of its own, and the columns of the responses."""
    out = take_rows(rows, torch.arange(len(rows)).repeat_interleave(n))
    out["row_id"] = out["group_id"] * n + torch.arange(n).repeat(len(rows))
    for name, column in columns.items():
        out[name] = column
    return out


def sampling_params(cfg: Config, stop_ids: tuple[int, ...], validate: bool) -> SamplingParams:
    """The sampling of a training or validation rollout. do_sample=False is temperature 0."""
    rollout_cfg = cfg.actor_rollout_ref.rollout
    source = rollout_cfg.val_kwargs if validate else rollout_cfg
    return SamplingParams(
        max_tokens=rollout_cfg.response_length,
        n=source.n,
        temperature=source.temperature if source.do_sample else 0.0,
        top_k=source.top_k,
        top_p=source.top_p,
        stop_token_ids=stop_ids,
        ignore_eos=rollout_cfg.ignore_eos,
    )


def prompt_seed(ctx: OpContext, group_id: int) -> int:
    """A 63-bit seed of (run seed, agent, step, split, prompt): the same on any number of ranks."""
    return seed_of(ctx, str(group_id))


def seed_of(ctx: OpContext, drawn: str, fixed: bool = False, step: int | None = None) -> int:
    """A 63-bit seed of (run seed, agent, step, split, what is drawn); fixed: the same in every step.

    step: in place of the one of now.
    """
    run_seed = (ctx.cfg.trainer.seed, ctx.cfg.actor_rollout_ref.rollout.seed)
    again = f"/{ctx.round}" if ctx.round > 1 else ""
    when = "every step" if fixed else step or ctx.step
    text = f"{run_seed}/{ctx.agent}/{when}/{ctx.validate}/{drawn}{again}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def response_columns(samples: list[Completion]) -> dict[str, torch.Tensor]:
    """ROLLOUT_FIELDS of the samples, right-padded to the longest: [B, T] and [B]."""
    lengths = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64)
    width = int(lengths.max()) if len(samples) else 0
    finish = [FINISH_STOP if sample.finish_reason == "stop" else FINISH_LENGTH for sample in samples]

    def padded(name: str, lists: list[list]) -> torch.Tensor:
        return pad_stack(lists, FIELDS[name])

    return {
        "response_ids": padded("response_ids", [sample.token_ids for sample in samples]),
        "response_length": lengths,
        "response_mask": torch.arange(width) < lengths[:, None],
        "finish_reason": torch.tensor(finish, dtype=torch.int8),
        "weight_version": padded("weight_version", [sample.token_versions for sample in samples]),
        "rollout_log_prob": padded("rollout_log_prob", [sample.log_probs for sample in samples]),
    }


def add_experts(cfg: Config, out: TensorDict, experts: Sequence[bytes | None]) -> None:
    """Add EXPERT_FIELDS to the rows of a rollout, if the trainer is to use what its engine chose."""
    if experts_by(cfg, "R3"):
        choices = router_choices(as_built(cfg.actor_rollout_ref.model))
        assert choices is not None, "router_replay without experts"
        for name, column in expert_columns(out, experts, choices).items():
            out[name] = column


def report(ctx: OpContext, out: TensorDict, full_at: int = 0) -> None:
    """Lengths and truncation of the responses, and the tokens of prompts and responses together.

    full_at: shorter responses are not truncated: what ended them was another bound.
    """
    lengths = out["response_length"].tolist()
    cut = (out["finish_reason"] == FINISH_LENGTH) & (out["response_length"] >= full_at)
    truncated = int(cut.sum())
    ctx.metrics.mean("rollout/response_length", sum(lengths), len(lengths))
    ctx.metrics.mean("rollout/truncated", truncated, len(lengths))
    ctx.metrics.sum("rollout/tokens", sum(lengths))
    ctx.metrics.max("rollout/response_length_max", max(lengths, default=0))
    ctx.metrics.sum("perf/tokens", int(out["prompt_length"].sum()) + sum(lengths))


def dump_rollouts(ctx: OpContext, out: TensorDict) -> None:
    """Write a training step's rows where trainer.dump_rollouts_dir says, if it does, for rollout.name=replay.

    Without the experts of their tokens, which are many times as large: a replay trains by those of its pass.
    """
    root = ctx.cfg.trainer.dump_rollouts_dir
    if root and not ctx.validate:
        with phase("dump"):
            folder = step_folder(Path(root).expanduser(), ctx.agent, ctx.step)
            record(folder, out.exclude(*EXPERT_FIELDS), conditions_of(ctx))


def conditions_of(ctx: OpContext) -> dict[str, str]:
    """What this run's rows depend on: to be recorded, or compared."""
    rollout_cfg = ctx.cfg.actor_rollout_ref.rollout
    return conditions(ctx.tokenizer, rollout_cfg.n, rollout_cfg.temperature)
