"""The op table: what each op is. Pure; the code of an op is named by its row, and stands in siirl/nodes.

Which op a node runs is chosen in siirl/dag/op_choice.py. Reads and writes depend on the node's resolved
configuration.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from siirl.config import Config
from siirl.config.roles import ROLES, Role
from siirl.dag.fields_read import (
    TOKENS,
    Names,
    actor_train_reads,
    advantage_reads,
    advantage_writes,
    dynamic_sampling_reads,
    experts_by,
    old_log_prob_reads,
    old_log_prob_writes,
    reference_writes,
    teacher_reads,
    with_images,
)
from siirl.types import FIELDS, INTERACTION_FIELDS, PROMPT_FIELDS, ROLLOUT_FIELDS

SERVICES = (
    *("engine", "scorer", "encoder", "judge", "judge_tokenizer", "interaction", "recordings"),
    *("buffer", "in_flight", "service", "teacher_service", "own_tokens"),
)
"""What an op can need besides its rows and its context; siirl/nodes/services.py builds them."""


@dataclass(frozen=True)
class OpSpec:
    """What an op is: worker, compiler, memory estimate and reports ask this row, and nothing else."""

    name: str

    reads: Callable[[Config], Names]
    """Fields of the node's own agent, or "agent_N.name"."""

    writes: Callable[[Config], Names]
    """Fields of the node's own agent."""

    code: str = ""
    """ "file:function", among the ops' code, that runs it: (context, rows), and what it needs by keyword. For
    the user's code, what makes an op of that. Empty for what runs inside another op."""

    needs: Names = ()
    """SERVICES that it gets by keyword."""

    model: str | None = None
    """The role of the model worker that it runs on: one of ROLES."""

    node_role: str = ""
    """The node_role of its nodes, if they have one of their own; the keys of their config are those of the
    group of its model. Those of the other ops say node_kinds.py and op_choice.py."""

    split: Literal["group", "cost", "any"] = "any"
    """How its rows must lie: whole groups on one shard, or balanced by cost, or anyhow."""

    in_episodes: Names = ()
    """What it reads besides where the rows of its agent are those of an interaction."""

    changes_rows: bool = False
    """It starts a new row set."""

    draws: bool = False
    """The rows that it gives are drawn: each draw is an episode of its own."""

    collects: str = ""
    """ "file:function" that takes the rows of each round of the nodes above it, until it has enough."""

    is_rollout: bool = False
    """It makes the samples of its agent, or brings them."""

    gives_data: bool = False
    """A rollout that brings responses of the dataset: nothing samples them."""

    is_handed: bool = False
    """A rollout whose rows another node of its interaction makes: it reads nothing and asks no engine."""

    is_asked: bool = False
    """Its work comes from outside, as commands: it reads no rows, and a step ends with an optimizer step that
    somebody has asked for."""

    is_environment: bool = False
    """It answers the agents of an interaction, inside their rollout."""

    scores: bool = False
    """It gives the responses of its agent a score, or a part of one."""

    by_model: bool = False
    """It scores by a reward model, which each name of a score has for itself."""

    combines: bool = False
    """It adds up the rewards that it reads."""

    credits: bool = False
    """It turns scores into advantages, and may read scores and values of other agents by episode."""

    teaches: bool = False
    """The policy of its agent learns from what it says."""

    trains: bool = False
    """It steps the optimizer."""

    side_effect: bool = False
    """It is never pruned."""

    wanted: Callable[[Config], bool] = lambda cfg: False
    """Whether the configuration asks for it: then it is not pruned either."""

    unique: str = ""
    """What messages call it, if an agent has one at most."""

    @property
    def role(self) -> Role | None:
        """What its model is for."""
        return None if self.model is None else ROLES[self.model]

    @property
    def repeats(self) -> bool:
        """Whether the nodes above it run in rounds, until it has collected enough rows."""
        return bool(self.collects)

    @property
    def may_be_stale(self) -> bool:
        """Whether what it gives in a step may be of prompts of earlier ones, as responses go on from step to
        step: with rollout.max_lag."""
        return "in_flight" in self.needs

    @property
    def trains_policy(self) -> bool:
        """Whether it trains the model that its agent's rollout samples from."""
        return self.trains and self.role is not None and self.role.gives_weights

    @property
    def on_critic(self) -> bool:
        """Whether it runs on a critic, which several agents may share."""
        return self.model == "critic"

    @property
    def on_scorer(self) -> bool:
        """Whether it runs on the reward model of an agent, which several may share."""
        return self.model == "reward"

    @property
    def asks_policy(self) -> bool:
        """Whether it asks the rollout engine of its agent, which must have the trainer's weights by then."""
        return self.role is not None and self.role.takes_weights and not (self.is_handed or self.is_asked)


def fixed(*names: str) -> Callable[[Config], Names]:
    return lambda cfg: names


def with_experts(*names: str) -> Callable[[Config], Names]:
    """These, and the experts that the rollout engine chose, if the trainer is to use them."""
    return lambda cfg: (*names, *experts_by(cfg, "R3"))


_GIVEN = ("response_ids", "response_length", "response_mask", "finish_reason")
_PROMPT = ("row_id", "group_id", "prompt_ids", "prompt_length")


ROLLOUT = OpSpec(
    "rollout",
    with_images(*_PROMPT),
    with_experts(*ROLLOUT_FIELDS),
    "generate:rollout",
    needs=("engine", "in_flight"),
    model="rollout",
    split="group",
    changes_rows=True,
    is_rollout=True,
    unique="rollout",
)
REPLAY = replace(
    ROLLOUT, name="replay", reads=fixed(*_PROMPT), code="replay:replay", needs=("recordings",), model=None
)
"""Recorded rows in place of a rollout: no engine, so no model and no weights to take."""
DATASET_ROLLOUT = replace(
    ROLLOUT,
    name="dataset_rollout",
    reads=fixed(*_PROMPT, "given_responses"),
    writes=lambda cfg: (*_GIVEN, "score") if len(cfg.data.response_keys) > 1 else _GIVEN,
    code="dataset_rollout:dataset_rollout",
    needs=(),
    model=None,
    gives_data=True,
)
"""Responses of the dataset in place of a rollout's."""
INTERACTION = replace(
    ROLLOUT,
    name="interaction",
    reads=with_images(*PROMPT_FIELDS),
    writes=lambda cfg: (
        *with_images(*PROMPT_FIELDS, *ROLLOUT_FIELDS, *INTERACTION_FIELDS)(cfg),
        *experts_by(cfg, "R3"),
    ),
    code="interaction:interaction",
    needs=("interaction", "in_flight"),
)
"""The rollout that an interaction begins with: it plays the episodes, and gives the rows of its own agent."""
TURNS = replace(
    INTERACTION,
    name="turns",
    reads=fixed(),
    code="interaction:turns",
    needs=("interaction",),
    is_handed=True,
)
"""Another rollout of an interaction: it gives the rows of its agent, prompts included."""
FROZEN_TURNS = replace(TURNS, writes=fixed())
"""A rollout of an interaction whose agent is not trained."""
SHARED_TURNS = replace(FROZEN_TURNS, model=None)
"""A rollout of an interaction that speaks with another agent's policy, and whose rows are among its rows."""
ENVIRONMENT = OpSpec("environment", fixed(), fixed(), is_environment=True)
GREEDY_ROLLOUT = OpSpec(
    "greedy_rollout",
    with_images(*_PROMPT),
    fixed("baseline_response_ids", "baseline_response_length"),
    "baseline:greedy_rollout",
    needs=("engine",),
    model="rollout",
    split="group",
)
SHOWN_REWARD = ("extra_info", "turn_id")
"""What a node reads that gives the rows of an interaction their score: it shows them, as conversations."""
_TASK = ("row_id", "sample_index", "raw_prompt", "data_source", "ground_truth")
SCORED_READS = (*_TASK, "response_ids", "response_length")
"""What a reward of responses as texts reads; a combination of rewards reads those besides."""
FUNCTION_REWARD = OpSpec(
    "function_reward",
    fixed(*_TASK, "extra_info", "response_ids", "response_length"),
    fixed("score", "reward_info"),
    "function_reward:function_reward",
    needs=("scorer",),
    in_episodes=SHOWN_REWARD,
    scores=True,
)
BASELINE_REWARD = OpSpec(
    "baseline_reward",
    fixed(*_TASK, "extra_info", "baseline_response_ids", "baseline_response_length"),
    fixed("baseline_score"),
    "baseline:baseline_reward",
    needs=("scorer",),
)
MODEL_REWARD = OpSpec(
    "model_reward",
    with_images("row_id", "sample_index", "prompt_ids", "prompt_length", *SCORED_READS[2:]),
    fixed("score", "reward_info"),
    "reward_model:model_reward",
    needs=("engine", "encoder"),
    model="reward",
    split="cost",
    in_episodes=SHOWN_REWARD,
    scores=True,
    by_model=True,
)
JUDGE_REWARD = replace(
    MODEL_REWARD,
    name="judge_reward",
    reads=fixed(*SCORED_READS),
    code="reward_judge:judge_reward",
    needs=("judge", "engine", "judge_tokenizer"),
    model="judge",
)
JUDGE_SERVICE = replace(JUDGE_REWARD, name="judge_service", needs=("judge",), model=None, split="any")
COMBINE_REWARDS = OpSpec(
    "combine_rewards",
    fixed(*SCORED_READS),
    fixed("score", "reward_info"),
    "reward_combine:combine_rewards",
    in_episodes=SHOWN_REWARD,
    scores=True,
    combines=True,
)
INFO = "_info"
"""The further values of reward NAME are the field NAME_info."""
EPISODE = ("episode_id", "speaker", "turn_id")
ADVANTAGE = OpSpec(
    "advantage",
    advantage_reads,
    advantage_writes,
    "advantage:credited",
    split="group",
    in_episodes=("sample_index", *EPISODE, "env_reward"),
    credits=True,
)
OLD_LOG_PROB = OpSpec(
    "old_log_prob",
    old_log_prob_reads,
    old_log_prob_writes,
    "log_prob:old_log_prob",
    needs=("engine",),
    model="actor",
    split="cost",
)
LATER_OLD_LOG_PROB = replace(
    OLD_LOG_PROB,
    name="later_old_log_prob",
    reads=lambda cfg: ("row_id", *old_log_prob_reads(cfg)),
    code="log_prob:later_old_log_prob",
    in_episodes=EPISODE[:1],
)
"""The same of the rows that are trained after the policy has moved: not of the first mini-batch."""
REFERENCE = replace(
    OLD_LOG_PROB,
    name="reference_log_prob",
    reads=with_images(*TOKENS),
    writes=reference_writes,
    code="log_prob:reference_log_prob",
    model="ref",
)
TEACHER = replace(
    OLD_LOG_PROB,
    name="teacher_log_prob",
    reads=teacher_reads,
    writes=fixed(),
    code="teacher_rows:teacher_log_prob",
    needs=("engine", "own_tokens"),
    model="teacher",
    teaches=True,
)
"""A model that the policy learns from; its fields are named by its node."""
SCORING_TEACHER = replace(
    TEACHER, name="teacher_scores", code="scoring_teacher:teacher_scores", model="scoring_teacher"
)
"""The same by a rollout engine."""
TEACHER_SERVICE = replace(
    SCORING_TEACHER, name="teacher_service", needs=("teacher_service", "own_tokens"), model=None, split="any"
)
"""The same by one behind a service."""
VALUES = replace(
    OLD_LOG_PROB,
    name="values",
    reads=with_images(*TOKENS),
    writes=fixed("value"),
    code="value_model:values",
    model="critic",
)
ACTOR_TRAIN = OpSpec(
    "actor_train",
    actor_train_reads,
    fixed(),
    "actor_train:actor_train",
    needs=("engine",),
    model="actor",
    split="cost",
    in_episodes=EPISODE,
    trains=True,
    side_effect=True,
    unique="training",
)
PREFERENCE_TRAIN = replace(
    ACTOR_TRAIN, name="preference_train", code="preference_train:preference_train", split="group"
)
"""The same on pairs of responses, which are computed together."""
CRITIC_TRAIN = replace(
    ACTOR_TRAIN,
    name="critic_train",
    reads=with_images("row_id", *TOKENS, "value", "return_"),
    code="value_model:critic_train",
    model="critic",
    unique="critic training",
)
REWARD_TRAIN = replace(
    ACTOR_TRAIN,
    name="reward_train",
    reads=fixed("row_id", "group_id", "sample_index", "raw_prompt", *TOKENS, "score"),
    code="preference_train:reward_train",
    needs=("engine", "encoder"),
    model="reward",
    split="group",
    unique="reward model training",
)
"""The update of a reward model on pairs of responses."""
DYNAMIC_SAMPLING = OpSpec(
    "dynamic_sampling",
    dynamic_sampling_reads,
    fixed(),
    "dynamic_sampling:dynamic_sampling",
    needs=("buffer",),
    split="group",
    changes_rows=True,
    collects="dynamic_sampling:collect_varied",
    wanted=lambda cfg: cfg.algorithm.filter_groups.enable,
)
RESAMPLE = OpSpec(
    "pf_ppo",
    fixed("row_id", "score"),
    fixed(),
    "filter:pf_ppo",
    split="group",
    changes_rows=True,
    draws=True,
    wanted=lambda cfg: cfg.algorithm.use_pf_ppo,
)
FILTER = OpSpec(
    "filter",
    fixed("row_id", "group_id", "score", "response_length", "data_source"),
    fixed(),
    "filter:filter_op",
    split="group",
    changes_rows=True,
    wanted=lambda cfg: True,
)
SERVICE = OpSpec(
    "service",
    fixed(),
    fixed(),
    "asked:asked",
    needs=("service",),
    model="rollout",
    node_role="SERVICE",
    is_asked=True,
    side_effect=True,
    unique="service",
)
"""Clients of another API decide what is computed, on a trainer and a sampler of adapters."""
CUSTOM = OpSpec("custom", fixed(), fixed(), "function_reward:custom_op")
"""The user's code, on the fields that it declares, or on those of the op whose place it takes."""

OPS: dict[str, OpSpec] = {
    op.name: op
    for op in (
        *(ROLLOUT, REPLAY, DATASET_ROLLOUT, INTERACTION, TURNS),
        *(ENVIRONMENT, GREEDY_ROLLOUT),
        *(FUNCTION_REWARD, BASELINE_REWARD, MODEL_REWARD, JUDGE_REWARD, JUDGE_SERVICE, COMBINE_REWARDS),
        *(ADVANTAGE, OLD_LOG_PROB, LATER_OLD_LOG_PROB, REFERENCE, VALUES, ACTOR_TRAIN, PREFERENCE_TRAIN),
        *(TEACHER, SCORING_TEACHER, TEACHER_SERVICE, CRITIC_TRAIN, REWARD_TRAIN),
        *(DYNAMIC_SAMPLING, RESAMPLE, FILTER, SERVICE, CUSTOM),
    )
}
"""Name -> op, as plans name them."""


def _sampler(cfg: Config) -> OpSpec:
    if cfg.actor_rollout_ref.rollout.replays:
        return REPLAY
    if cfg.actor_rollout_ref.rollout.gives_data:
        return DATASET_ROLLOUT
    return ROLLOUT


def _sampling(cfg: Config) -> OpSpec:
    algorithm = cfg.algorithm
    return RESAMPLE if algorithm.use_pf_ppo and not algorithm.filter_groups.enable else DYNAMIC_SAMPLING


def _scoring_model(cfg: Config) -> OpSpec:
    """A score head, or a judge, here or behind a service."""
    judge = cfg.reward_model.judge
    if judge.url is not None:
        return JUDGE_SERVICE
    return MODEL_REWARD if judge.name is None else JUDGE_REWARD


def _teacher(cfg: Config) -> OpSpec:
    if cfg.teacher.is_remote:
        return TEACHER_SERVICE
    return SCORING_TEACHER if cfg.teacher.is_scored else TEACHER


VARIANTS: dict[str, Callable[[Config], OpSpec]] = {
    ROLLOUT.name: _sampler,
    DYNAMIC_SAMPLING.name: _sampling,
    MODEL_REWARD.name: _scoring_model,
    TEACHER.name: _teacher,
    ACTOR_TRAIN.name: lambda cfg: PREFERENCE_TRAIN if cfg.actor_rollout_ref.actor.loss.pairs else ACTOR_TRAIN,
}
"""Op of a node -> what it is under a configuration."""


def score_names(reads: Iterable[str]) -> Names:
    """The rewards among the fields that a combination reads: names of nodes' own, and no further values."""
    return tuple(name for name in reads if name not in FIELDS and not name.endswith(INFO))
