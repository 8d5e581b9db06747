"""What ops need besides their rows, built once for each node: a table by the names in the op table."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.compiler.plan import NodePlan
from siirl.config.batch import batch_of
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.engines.train.settings import trained_limit
from siirl.nodes.context import LocalNode, Op
from siirl.nodes.episodes_in_flight import EpisodesInFlight
from siirl.nodes.in_flight import InFlight
from siirl.nodes.interaction import Interaction
from siirl.nodes.own_tokens import OwnTokens
from siirl.nodes.rollouts_in_flight import RolloutsInFlight
from siirl.nodes.teacher_service import TeacherService
from siirl.rewards.conversations import ConversationEncoder, reward_tokenizer
from siirl.rewards.judge import Judge
from siirl.rewards.scorer import RewardScorer
from siirl.user_code.load_object import load_object
from siirl.user_code.signatures import Call
from siirl.user_code.source import check_loaded


@dataclass(frozen=True)
class OnRank:
    """What nodes of this rank share."""

    engines: Mapping[str, TrainEngine | RolloutEngine]
    """By model."""

    interactions: Mapping[str, Interaction]
    """By entry node."""

    def interaction_of(self, node: str) -> Interaction:
        """The interaction that a node is a stage of."""
        return next(x for x in self.interactions.values() if node in (s.node for s in x.plan.stages))


SERVICES: dict[str, Callable[[LocalNode, OnRank], Any]] = {
    "engine": lambda node, rank: rank.engines[str(node.plan.model)],
    "scorer": lambda node, rank: RewardScorer(node.cfg, node.tokenizer, node.dialect),
    "encoder": lambda node, rank: ConversationEncoder(node.cfg, node.tokenizer, node.dialect),
    "judge": lambda node, rank: Judge(node.cfg),
    "judge_tokenizer": lambda node, rank: reward_tokenizer(node.cfg),
    "teacher_service": lambda node, rank: _teacher_service(node),
    "own_tokens": lambda node, rank: _own_tokens(node),
    "interaction": lambda node, rank: rank.interaction_of(node.plan.name),
    "buffer": lambda node, rank: node.buffer,
    "in_flight": lambda node, rank: _in_flight(node, rank),
    "service": lambda node, rank: _service(node, rank),
    "recordings": lambda node, rank: Path(node.cfg.actor_rollout_ref.rollout.replay_dir or "").expanduser(),
}
"""Name of what an op needs -> how it is made."""


def _teacher_service(node: LocalNode) -> TeacherService:
    model = node.cfg.teacher.model if node.cfg.teacher.is_aligned else node.cfg.actor_rollout_ref.model
    own = _own_tokens(node)
    return TeacherService(node.cfg.teacher.endpoint, own.tokenizer if own else node.tokenizer, model)


def _own_tokens(node: LocalNode) -> OwnTokens | None:
    """None for a teacher that reads the policy's tokens."""
    return OwnTokens(node.cfg, node.tokenizer, node.dialect) if node.cfg.teacher.is_aligned else None


def _in_flight(node: LocalNode, rank: OnRank) -> InFlight | None:
    """What the node keeps from step to step: it takes the place of its buffer. None without staleness."""
    rollout = node.cfg.actor_rollout_ref.rollout
    if not node.plan.max_lag:
        return None
    batch = batch_of(node.cfg)
    how: dict[str, Any] = {
        "batch_size": batch.generated,
        "step_size": batch.prompts,
        "stale": rollout.stale,
        "runs_in_background": node.plan.runs_in_background,
    }
    if "interaction" in node.plan.needs:
        kept = EpisodesInFlight(rollout.max_lag, rollout.surplus, **how)
    else:
        engine = rank.engines[str(node.plan.model)]
        assert isinstance(engine, RolloutEngine)
        kept = RolloutsInFlight(engine, rollout.n, rollout.max_lag, rollout.surplus, **how)
    node.buffer = kept
    return kept


def _service(node: LocalNode, rank: OnRank) -> Any:
    from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
    from siirl.nodes.asked import Service  # a server, which no other run needs

    base, sampler = rank.engines[f"agent_{node.plan.agent}.actor"], rank.engines[str(node.plan.model)]
    assert isinstance(base, FSDPEngine) and isinstance(sampler, RolloutEngine)
    return Service(node, sampler, base, trained_limit(node.cfg))


def find_op(node: NodePlan) -> Op:
    """The function of a node: its op's, or the user's "pkg.mod:fn" or "file.py:fn" (else DagError)."""
    code = built_in(node.spec.code)
    if node.executable is None:
        return code
    who = f"node {node.name!r}: executable_ref"
    function = load_object(node.executable, who)
    check_loaded(function, f"{who} = {node.executable!r}", Call(("context", "rows"), node.needs, "needs"))
    return code(function)


def built_in(reference: str) -> Any:
    """The function that "file:function" of the op table names, of a file beside this one."""
    file, _, name = reference.partition(":")
    return getattr(importlib.import_module(f".{file}", __package__), name)
