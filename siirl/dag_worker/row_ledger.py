"""What a worker writes into the ledger: at the one place where nodes run, of what went in and came out."""

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.compiler.ledger_fields import LEDGER_ID
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Collect, Load, Run
from siirl.config import Config, with_overrides
from siirl.config.batch import batch_of
from siirl.data.buffer import ORDER
from siirl.data.ledger import Columns, SegmentedStream, digests, events, of_rows, row_ids, token_lists
from siirl.data.ledger_events import EVENTS, FOLDER, TOKEN_NUMBERS, TOKENS
from siirl.data.loader import PromptLoader
from siirl.data.rows import objects
from siirl.nodes.context import LocalNode, OpContext
from siirl.nodes.taken_rows import TakenRows

WHY = {
    "dynamic_sampling": "all responses of its prompt score alike (algorithm.filter_groups)",
    "pf_ppo": "not drawn (algorithm.use_pf_ppo)",
    "filter": "dropped by the filter of node {node}",
}
NOT_TRAINED = "its policy was not trained in this step (critic_warmup, actor.freeze, or another agent's turn)"


class RowLedger:
    """The events of this rank, written once a step. Of ranks that hold the same rows the first one tells."""

    def __init__(
        self,
        cfg: Config,
        plan: Plan,
        rank: int,
        began: dict[str, Any],
        loaders: Mapping[str, PromptLoader | None],
        output_dir: Path,
    ):
        """began: attempt, first_step, and whether it is resumed. loaders: of training."""
        trainer, header = cfg.trainer, began | {"rank": rank} | header_of(cfg, plan, loaders)
        folder, stem = output_dir / FOLDER, f"{header['attempt']}.rank_{rank}"
        most = float("inf") if trainer.ledger_gib is None else trainer.ledger_gib * 2**30 / plan.world_size
        parts = 2 if trainer.ledger == "tokens" else 1
        self._plan, self._rank = plan, rank
        self._rows = SegmentedStream(folder, f"attempt_{stem}", EVENTS, header, most / parts)
        self.keeps_tokens = trainer.ledger == "tokens"
        self._tokens = (
            SegmentedStream(folder, f"tokens_{stem}", TOKENS, header, most / parts) if parts > 1 else None
        )
        self._events: list[pa.RecordBatch] = []
        self._lists: list[pa.RecordBatch] = []

    def loaded(self, ins: Load, rows: TensorDict, step: int, loader: PromptLoader) -> None:
        """Prompts that a loader gave."""
        if self._tells(ins.layout) and len(rows):
            epoch_B = torch.tensor(loader.epochs_given)[rows["row_id"] // loader.batch_size]
            columns = {"epoch": epoch_B, "prompt": rows["sample_index"]}
            self._add("loaded", step, self._plan.loaders[ins.loader].agent, len(rows), columns)

    def ran(
        self, ins: Run, context: OpContext, rows: TensorDict, result: TensorDict | Future[TensorDict]
    ) -> None:
        """A node has run on rows, and gave the result."""
        spec = context.node.plan.spec
        if spec.is_rollout and isinstance(result, TensorDict):
            self._sampled(ins, context, result)
        if LEDGER_ID not in rows.keys() or not self._tells(ins.source):
            return
        if spec.scores or "score" in context.writes:
            tell = partial(self._scored, context, rows, result)
            if isinstance(result, Future):
                context.shown.later.append(tell)
            else:
                tell()
        if spec.credits and isinstance(result, TensorDict) and "advantage" in result.keys():
            self._credited(context, rows, result)
        if spec.changes_rows and not spec.is_rollout and not spec.collects:
            self._left(context, rows[LEDGER_ID], result[LEDGER_ID], draws=spec.draws)
        if context.taken is not None:
            self._trained(context, rows, context.taken)

    def collected(self, ins: Collect, context: OpContext, rows: TensorDict) -> None:
        """A node that repeats has taken rows of a round into its buffer."""
        kept = context.node.buffer.rows
        if LEDGER_ID in rows.keys() and self._tells(ins.source):
            held = kept[LEDGER_ID] if kept is not None else torch.empty(0, dtype=torch.int64)
            self._left(context, rows[LEDGER_ID], held)

    def end_step(self, step: int, nodes: Mapping[str, LocalNode]) -> None:
        """Write what this step has said, and which rows and prompts wait in the nodes' buffers."""
        for name, node in nodes.items():
            if node.plan.keeps_rows and self._tells(self._plan.run_of(name).source):
                self._waiting(step, node.plan.agent, node.buffer)
        count = sum(batch.num_rows for batch in self._events)
        self._add("step", step, -1, 1, {"count": count + 1})
        self._rows.write(pa.Table.from_batches(self._events).combine_chunks().to_batches()[0])
        for batch in self._lists:
            assert self._tokens is not None
            self._tokens.write(batch)
        self._events, self._lists = [], []

    def sync(self) -> None:
        """All that was written is on the disk."""
        for stream in self._streams():
            stream.sync()

    def close(self, step: int | None = None) -> None:
        """step: the last one, with which the run has come to its end; None: another attempt goes on."""
        if step is not None:
            self._rows.write(events("end", 1, {"step": step}))
        for stream in self._streams():
            stream.close()

    def _streams(self) -> list[SegmentedStream]:
        return [stream for stream in (self._rows, self._tokens) if stream is not None]

    def _sampled(self, ins: Run, context: OpContext, out: TensorDict) -> None:
        if LEDGER_ID not in context.writes:
            return
        out[LEDGER_ID] = row_ids(context.step, context.round, out["row_id"])
        if not self._tells(ins.target):
            return
        for prompt, group, reason in context.lost:
            lost = {"prompt": [prompt], "what": reason} | ({"group": [group]} if group >= 0 else {})
            self._add("dropped", context.step, context.agent, 1, lost)
        if not len(out):
            return
        mask_BT, columns = out["response_mask"], {}
        if "weight_version" in out.keys():
            version_BT = out["weight_version"]
            foreign_BT = mask_BT & (version_BT < 0)
            if "turn_id" in out.keys():
                foreign_BT |= mask_BT & (out["turn_id"] < 0)
            columns = {"foreign": foreign_BT.sum(-1)}
            if mask_BT.shape[1]:
                columns |= {
                    "first_version": of_rows(_least, mask_BT, version_BT),
                    "last_version": of_rows(_greatest, mask_BT, version_BT),
                }
        columns |= {
            column: out[name]
            for column, name in (
                ("prompt", "sample_index"),
                ("episode", "episode_id"),
                ("speaker", "speaker"),
            )
            if name in out.keys()
        }
        columns |= {"score": out["score"]} if "score" in out.keys() else {}
        columns |= {"id": out[LEDGER_ID], "group": out["group_id"], "tokens": mask_BT.sum(-1)}
        columns |= {"digest": digests(out["response_ids"], mask_BT), "what": context.node_id}
        self._add("sampled", context.step, context.agent, len(out), columns)

    def _scored(self, context: OpContext, rows: TensorDict, result: TensorDict | Future) -> None:
        scored = result.result() if isinstance(result, Future) else result
        name = context.reward_name
        if name not in scored.keys() or not len(rows):
            return
        columns: dict[str, Any] = {
            "id": rows[LEDGER_ID],
            "score": scored[name].float(),
            "what": context.node_id,
        }
        columns["update"] = int(name == "score")
        info = "reward_info" if name == "score" else f"{name}_info"
        if info in scored.keys():
            failures = [one.get("failure") if one else None for one in objects(scored, info)]
            columns |= {"failure": failures} if any(failures) else {}
        self._add("scored", context.step, context.agent, len(rows), columns)

    def _credited(self, context: OpContext, rows: TensorDict, result: TensorDict) -> None:
        if len(rows):
            mask_BT = rows["response_mask"]
            columns = {"id": rows[LEDGER_ID], "advantage": _token_mean(result["advantage"], mask_BT)}
            columns |= {"score": rows["score"]} if "score" in rows.keys() else {}
            columns |= {"reward": result["reward"].sum(-1)} if "reward" in result.keys() else {}
            columns |= {"environment": rows["env_reward"].sum(-1)} if "env_reward" in rows.keys() else {}
            self._add("credited", context.step, context.agent, len(rows), columns)

    def _left(self, context: OpContext, before_B: Tensor, after_B: Tensor, draws: bool = False) -> None:
        """Rows that a node has dropped; how often it has drawn the others."""
        gone_B = before_B[~torch.isin(before_B, after_B)]
        if len(gone_B):
            op = "filter" if context.node.plan.op not in WHY else context.node.plan.op
            reason = WHY[op].format(node=context.node_id)
            self._add("dropped", context.step, context.agent, len(gone_B), {"id": gone_B, "what": reason})
        if draws and len(after_B):
            drawn, counts = after_B.unique(return_counts=True)
            self._add("drawn", context.step, context.agent, len(drawn), {"id": drawn, "count": counts})

    def _trained(self, context: OpContext, rows: TensorDict, taken: TakenRows) -> None:
        versions = {"first_version": taken.version, "last_version": taken.engine.version}
        versions |= {"what": context.node_id}
        self._add("policy", context.step, context.agent, 1, versions)
        if not taken.updates:
            reason = {"id": rows[LEDGER_ID], "what": NOT_TRAINED}
            self._add("dropped", context.step, context.agent, len(rows), reason)
            return
        mask_BT = rows["response_mask"]
        of_row = {"id": rows[LEDGER_ID], "tokens": mask_BT.sum(-1)}
        of_row["digest"] = digests(rows["response_ids"], mask_BT)
        if "advantage" in rows.keys():
            of_row["advantage"] = _token_mean(rows["advantage"], mask_BT)
        of_row |= {"score": rows["score"]} if "score" in rows.keys() else {}
        rows_of = [mine_B.nonzero().squeeze(-1) for mine_B, _ in taken.updates]
        counts, every = torch.tensor([len(mine) for mine in rows_of]), torch.cat(rows_of)
        columns = {name: column[every] for name, column in of_row.items()}
        columns["update"] = torch.arange(len(rows_of)).repeat_interleave(counts)
        told = [(mine, means) for mine, (_, means) in zip(rows_of, taken.updates, strict=True) if len(mine)]
        for name in told[0][1] if told else ():
            column = torch.cat([means[name][mine] for mine, means in told])
            columns["clipped" if name == "clip" else name] = column
        self._add("trained", context.step, context.agent, len(every), columns)
        if self._tokens is not None:
            numbers = {name: rows[name] for name in TOKEN_NUMBERS if name in rows.keys()} | taken.tokens
            ids = {"token": rows["response_ids"], "id": rows[LEDGER_ID]}
            where = {"step": context.step, "agent": context.agent}
            numbers = {name: column.float() for name, column in numbers.items()}
            all_B = torch.ones(len(rows), dtype=torch.bool)
            self._lists.append(token_lists(mask_BT, numbers | ids | where, all_B))

    def _waiting(self, step: int, agent: int, buffer: Any) -> None:
        rows = buffer.rows
        if rows is None or not len(rows):
            return
        if LEDGER_ID in rows.keys():
            self._add("waiting", step, agent, len(rows), {"id": rows[LEDGER_ID]})
        elif "sample_index" in rows.keys():
            _, first = np.unique(rows[ORDER].numpy(), return_index=True)
            self._add("waiting", step, agent, len(first), {"prompt": rows["sample_index"].numpy()[first]})

    def _tells(self, layout: str) -> bool:
        found = self._plan.layouts[layout]
        return self._rank in found.ranks and found.is_shard_leader(self._rank)

    def _add(self, kind: str, step: int, agent: int, num_rows: int, columns: Columns) -> None:
        if num_rows:
            self._events.append(events(kind, num_rows, {"step": step, "agent": agent, **columns}))


def fit_ledger(kept: TensorDict, numbered: bool, shard: int) -> TensorDict:
    """Rows that a checkpoint has kept, in a run whose rows are numbered, or not: it may keep another ledger
    than the one before. Rows that had no number get those of a step 0."""
    if numbered and LEDGER_ID not in kept.keys():
        kept[LEDGER_ID] = row_ids(0, 0, torch.arange(len(kept)) + (shard << 20))
    return kept if numbered else kept.exclude(LEDGER_ID)


def _token_mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Over the trained tokens of each row, float64 [B]; 0 of a row without."""
    sum_B = of_rows(lambda value_bT, mask_bT: value_bT.double().mul_(mask_bT).sum(-1), value_BT, mask_BT)
    return sum_B / mask_BT.sum(-1).clamp(min=1)


def _least(mask_bT: Tensor, version_bT: Tensor) -> Tensor:
    return torch.where(mask_bT, version_bT, torch.iinfo(torch.int64).max).amin(-1)


def _greatest(mask_bT: Tensor, version_bT: Tensor) -> Tensor:
    return torch.where(mask_bT, version_bT, -1).amax(-1)


def header_of(cfg: Config, plan: Plan, loaders: Mapping[str, PromptLoader | None]) -> dict[str, Any]:
    """What the files of a run say of it: what is promised of its rows. JSON values."""
    agents: dict[int, dict[str, Any]] = {}
    for name, node in plan.nodes.items():
        of_node, spec = with_overrides(cfg, node.overrides), node.spec
        rollout = of_node.actor_rollout_ref.rollout
        about = agents.setdefault(node.agent, {"max_lag": 0})
        if spec.is_rollout:
            about |= {"max_lag": rollout.max_lag, "n": rollout.n, "given": rollout.gives_data, "node": name}
            for talk in plan.interactions.values():
                if node.agent in talk.homes:
                    about["prompts_of"] = plan.nodes[talk.entry].agent
                    about |= {"branches": talk.most_branches} if talk.branching else {}
            if rollout.gives_data:
                about["n"] = max(1, len(of_node.data.response_keys))
        if spec.trains and not spec.on_critic:
            role = "reward" if spec.on_scorer else "actor"
            about |= {"epochs": batch_of(of_node, role).epochs}
        if of_node.custom_reward_function.on_error == "zero":
            about["counts_as_zero"] = True
    return {
        "world_size": plan.world_size,
        "seed": cfg.trainer.seed,
        "level": cfg.trainer.ledger,
        "rollout_only": cfg.trainer.rollout_only,
        "agents": agents,
        "loaders": {
            plan.loaders[name].agent: {
                "prompts": len(loader.dataset),
                "batch": loader.batch_size,
                "files": loader.dataset.file_starts(),
            }
            for name, loader in loaders.items()
            if loader is not None
        },
    }
