"""The op table: what each op is. Pure; the code of an op is named by its row, and stands in siirl/nodes.

Which op a node runs is chosen in siirl/dag/op_choice.py. Reads and writes depend on the node's resolved
configuration.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from siirl.config import Config
from siirl.config.algorithm_table import ESTIMATORS
from siirl.config.batch import batch_of
from siirl.config.roles import ROLES, Role
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.types import FIELDS, INTERACTION_FIELDS, PROMPT_FIELDS, ROLLOUT_FIELDS
from siirl.user_code.source import declared_needs

Names = tuple[str, ...]
ModelRole = Literal["actor", "ref", "rollout", "critic", "reward", "judge", "teacher"]

SERVICES = (
    *("engine", "scorer", "encoder", "judge", "judge_tokenizer", "interaction", "recordings"),
    *("buffer", "in_flight"),
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

    model: ModelRole | None = None
    """The role of the model worker that it runs on."""

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
    def keeps_rows(self) -> bool:
        """Whether it keeps rows from step to step, which are part of a checkpoint."""
        return not {"buffer", "in_flight"}.isdisjoint(self.needs)

    @property
    def runs_ahead(self) -> bool:
        """Whether what it gives in a step may be of prompts of earlier ones, as responses go on from step to
        step."""
        return "in_flight" in self.needs

    @property
    def trains_policy(self) -> bool:
        """Whether it trains the model that its agent's rollout samples from."""
        return self.trains and self.role is not None and self.role.gives_weights

    @property
    def on_critic(self) -> bool:
        """Whether it runs on a critic, which several agents may share."""
        return self.role is not None and self.role.head == "value"

    @property
    def on_scorer(self) -> bool:
        """Whether it runs on a reward model with a score head, which several agents may share."""
        return self.role is not None and self.role.head == "score"

    @property
    def asks_policy(self) -> bool:
        """Whether it asks the rollout engine of its agent, which must have the trainer's weights by then."""
        return self.role is not None and self.role.takes_weights and not self.is_handed


def fixed(*names: str) -> Callable[[Config], Names]:
    return lambda cfg: names


_GIVEN = ("response_ids", "response_length", "response_mask", "finish_reason")
_PROMPT = ("row_id", "group_id", "prompt_ids", "prompt_length")
_TOKENS = ("prompt_ids", "prompt_length", "response_ids", "response_length", "response_mask")


def with_images(*names: str) -> Callable[[Config], Names]:
    """These, and the images of the prompt if it may have some: what a model reads."""
    return lambda cfg: (*names, "images") if cfg.data.has_images else names


def old_log_prob_source(cfg: Config) -> Literal["field", "rollout", "current"]:
    """Where the policy loss takes the log-probs of the policy before the step from.

    "field": old_log_prob, a forward pass. "rollout": rollout_log_prob, because actor.recompute_old_log_prob
    is off. "current": the loss's own log-probs, detached, because the batch is one mini-batch: they are equal
    in the first epoch, and kept for the others.
    """
    actor = cfg.actor_rollout_ref.actor
    if actor.imitates:
        return "current"
    if not actor.recompute_old_log_prob:
        return "rollout"
    return "field" if actor.picks_tokens or batch_of(cfg).mini_batches > 1 else "current"


def uses_full_kl(cfg: Config) -> bool:
    """Whether the loss has the KL over the whole vocabulary, which needs the reference's hidden states."""
    actor = cfg.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type.startswith("full")


OF_TEACHER = "_teacher_"
"""Between the id of a teacher's node and what the field is of."""


def teacher_outputs(top_k: int) -> Names:
    """What a teacher computes of each token: outputs of a training engine."""
    if top_k == SAMPLED:
        return ("log_prob",)
    return ("top_log_prob",) if top_k == WHOLE else ("top_log_prob", "top_ids")


def teacher_writes(node_id: str, cfg: Config) -> Names:
    """The fields of a teacher: what it counts in each row, and what it says of its tokens."""
    return tuple(f"{node_id}{OF_TEACHER}{name}" for name in ("weight", *teacher_outputs(cfg.teacher.top_k)))


def _teacher_reads(cfg: Config) -> Names:
    routed = (cfg.teacher.by.partition(".")[0],) if cfg.teacher.takes else ()
    return (*_TOKENS, *routed)


def _reference_writes(cfg: Config) -> Names:
    return ("ref_log_prob", "ref_hidden") if uses_full_kl(cfg) else ("ref_log_prob",)


def uses_critic(cfg: Config) -> bool:
    """Whether the advantages are computed from the values of a critic, which then learns their returns."""
    return "value" in _estimator_needs(cfg)


def reads_prob_square(cfg: Config) -> bool:
    """Whether advantages are computed from the sums of squared probabilities."""
    return "old_prob_square" in _estimator_needs(cfg)


def _estimator_needs(cfg: Config) -> Names:
    """Fields that the advantage estimator reads besides those that the op has anyway."""
    name, had = cfg.algorithm.adv_estimator, ("reward", "response_mask", "group_id", "score")
    if ":" in name:
        needs = declared_needs(name, "register_advantage", "algorithm.adv_estimator")
    else:
        needs, had = cfg.algorithm.estimator.reads, (*had, "other_turns")
        needs = tuple("reward_info" if field == "reward_part" else field for field in needs)
    return tuple(field for field in needs if field not in had)


def advantage_reads(cfg: Config) -> Names:
    """What advantages are computed from, without an interaction."""
    needs = _estimator_needs(cfg)
    if not cfg.algorithm.use_kl_in_reward:
        return ("group_id", "response_length", "response_mask", "score", *needs)
    old = "rollout_log_prob" if old_log_prob_source(cfg) == "rollout" else "old_log_prob"
    return ("group_id", "response_length", "response_mask", "score", *needs, old, "ref_log_prob")


def _advantage_writes(cfg: Config) -> Names:
    reward = ("reward",) if cfg.algorithm.use_kl_in_reward else ()
    return (*reward, "advantage", *(("return_",) if uses_critic(cfg) else ()))


def _actor_train_reads(cfg: Config) -> Names:
    old = ("old_log_prob",) if old_log_prob_source(cfg) == "field" else ()
    ref = _reference_writes(cfg) if cfg.actor_rollout_ref.actor.use_kl_loss else ()
    actor, tokens = cfg.actor_rollout_ref.actor, with_images(*_TOKENS)(cfg)
    if actor.loss.pairs:
        return ("row_id", "group_id", *tokens, "score", "ref_log_prob")
    entropy = ("old_entropy",) if actor.picks_by_entropy else ()
    prompt = ("group_id",) if actor.loss_agg_mode == "prompt-mean" else ()
    sampled = () if actor.imitates else ("rollout_log_prob", *old, *entropy)
    advantage = ("advantage",) if actor.reads_advantage else ()
    return ("row_id", "sample_index", *tokens, *sampled, *advantage, *ref, *prompt)


def _old_log_prob_writes(cfg: Config) -> Names:
    entropy = ("old_entropy",) if cfg.actor_rollout_ref.actor.picks_by_entropy else ()
    return ("old_log_prob", *entropy, *(("old_prob_square",) if reads_prob_square(cfg) else ()))


def _dynamic_sampling_reads(cfg: Config) -> Names:
    info = () if cfg.algorithm.filter_groups.metric == "score" else ("reward_info",)
    return ("row_id", "group_id", "score", *info)


ROLLOUT = OpSpec(
    "rollout",
    with_images(*_PROMPT),
    fixed(*ROLLOUT_FIELDS),
    "generate:rollout",
    needs=("engine",),
    model="rollout",
    split="group",
    changes_rows=True,
    is_rollout=True,
    unique="rollout",
)
PARTIAL_ROLLOUT = replace(
    ROLLOUT, name="partial_rollout", code="partial_rollout:partial_rollout", needs=("engine", "in_flight")
)
"""A rollout whose responses may go on in the next steps (rollout.max_lag)."""
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
    reads=fixed(*PROMPT_FIELDS),
    writes=fixed(*PROMPT_FIELDS, *ROLLOUT_FIELDS, *INTERACTION_FIELDS),
    code="interaction:interaction",
    needs=("interaction",),
)
"""The rollout that an interaction begins with: it plays the episodes, and gives the rows of its own agent."""
PARTIAL_INTERACTION = replace(
    INTERACTION,
    name="partial_interaction",
    code="partial_interaction:partial_interaction",
    needs=("interaction", "in_flight"),
)
"""An interaction whose episodes may go on in the next steps (rollout.max_lag)."""
TURNS = replace(INTERACTION, name="turns", reads=fixed(), code="interaction:turns", is_handed=True)
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
    fixed("row_id", "sample_index", "prompt_ids", "prompt_length", *SCORED_READS[2:]),
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
    _advantage_writes,
    "advantage:advantage",
    split="group",
    in_episodes=("sample_index", *EPISODE, "env_reward"),
    credits=True,
)
OLD_LOG_PROB = OpSpec(
    "old_log_prob",
    with_images(*_TOKENS),
    _old_log_prob_writes,
    "log_prob:old_log_prob",
    needs=("engine",),
    model="actor",
    split="cost",
)
LATER_OLD_LOG_PROB = replace(
    OLD_LOG_PROB,
    name="later_old_log_prob",
    reads=with_images("row_id", *_TOKENS),
    code="log_prob:later_old_log_prob",
    in_episodes=EPISODE[:1],
)
"""The same of the rows that are trained after the policy has moved: not of the first mini-batch."""
REFERENCE = replace(
    OLD_LOG_PROB,
    name="reference_log_prob",
    writes=_reference_writes,
    code="log_prob:reference_log_prob",
    model="ref",
)
TEACHER = replace(
    OLD_LOG_PROB,
    name="teacher_log_prob",
    reads=_teacher_reads,
    writes=fixed(),
    code="teacher_rows:teacher_log_prob",
    model="teacher",
)
"""A model that the policy learns from; its fields are named by its node."""
VALUES = replace(
    OLD_LOG_PROB, name="values", writes=fixed("value"), code="value_model:values", model="critic"
)
ACTOR_TRAIN = OpSpec(
    "actor_train",
    _actor_train_reads,
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
    reads=fixed("row_id", *_TOKENS, "value", "return_"),
    code="value_model:critic_train",
    model="critic",
    unique="critic training",
)
REWARD_TRAIN = replace(
    ACTOR_TRAIN,
    name="reward_train",
    reads=fixed("row_id", "group_id", "sample_index", "raw_prompt", *_TOKENS, "score"),
    code="preference_train:reward_train",
    needs=("engine", "encoder"),
    model="reward",
    split="group",
    unique="reward model training",
)
"""The update of a reward model on pairs of responses."""
DYNAMIC_SAMPLING = OpSpec(
    "dynamic_sampling",
    _dynamic_sampling_reads,
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
    fixed("row_id", "group_id", "score", "response_length"),
    fixed(),
    "filter:filter_op",
    split="group",
    changes_rows=True,
    wanted=lambda cfg: True,
)
CUSTOM = OpSpec("custom", fixed(), fixed(), "function_reward:custom_op")
"""The user's code, on the fields that it declares, or on those of the op whose place it takes."""

OPS: dict[str, OpSpec] = {
    op.name: op
    for op in (
        *(ROLLOUT, PARTIAL_ROLLOUT, REPLAY, DATASET_ROLLOUT, INTERACTION, PARTIAL_INTERACTION, TURNS),
        *(ENVIRONMENT, GREEDY_ROLLOUT),
        *(FUNCTION_REWARD, BASELINE_REWARD, MODEL_REWARD, JUDGE_REWARD, JUDGE_SERVICE, COMBINE_REWARDS),
        *(ADVANTAGE, OLD_LOG_PROB, LATER_OLD_LOG_PROB, REFERENCE, VALUES, ACTOR_TRAIN, PREFERENCE_TRAIN),
        *(TEACHER, CRITIC_TRAIN, REWARD_TRAIN),
        *(DYNAMIC_SAMPLING, RESAMPLE, FILTER, CUSTOM),
    )
}
"""Name -> op, as plans name them."""


def _sampler(cfg: Config) -> OpSpec:
    if cfg.actor_rollout_ref.rollout.name == "replay":
        return REPLAY
    if cfg.actor_rollout_ref.rollout.gives_data:
        return DATASET_ROLLOUT
    return PARTIAL_ROLLOUT if cfg.actor_rollout_ref.rollout.max_lag else ROLLOUT


def _sampling(cfg: Config) -> OpSpec:
    algorithm = cfg.algorithm
    return RESAMPLE if algorithm.use_pf_ppo and not algorithm.filter_groups.enable else DYNAMIC_SAMPLING


def _scoring_model(cfg: Config) -> OpSpec:
    """A score head, or a judge, here or behind a service."""
    judge = cfg.reward_model.judge
    if judge.url is not None:
        return JUDGE_SERVICE
    return MODEL_REWARD if judge.name is None else JUDGE_REWARD


VARIANTS: dict[str, Callable[[Config], OpSpec]] = {
    ROLLOUT.name: _sampler,
    DYNAMIC_SAMPLING.name: _sampling,
    MODEL_REWARD.name: _scoring_model,
    ACTOR_TRAIN.name: lambda cfg: PREFERENCE_TRAIN if cfg.actor_rollout_ref.actor.loss.pairs else ACTOR_TRAIN,
}
"""Op of a node -> what it is under a configuration."""


def score_names(reads: Iterable[str]) -> Names:
    """The rewards among the fields that a combination reads: names of nodes' own, and no further values."""
    return tuple(name for name in reads if name not in FIELDS and not name.endswith(INFO))


def why_unread(name: str, cfg: Config) -> str | None:
    """Why no op reads a field in this run, for the built-in fields that are needed only sometimes."""
    if name == "value" and not uses_critic(cfg):
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no critic"
    if name.startswith("baseline_"):
        those = ", ".join(known for known, row in ESTIMATORS.items() if row.uses_greedy)
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} uses no greedy baseline ({those} does)"
    if name in ("ref_log_prob", "ref_hidden"):
        return "no KL is used (actor.use_kl_loss and algorithm.use_kl_in_reward are off)"
    if name == "old_prob_square":
        return f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} does not read it"
    if OF_TEACHER in name:
        return "no loss learns from teachers (actor.distill.enable is off, loss_mode is not distill)"
    if name == "old_entropy":
        return "actor.top_entropy_quantile is 1: the policy loss trains tokens of any entropy"
    if name == "old_log_prob":
        if old_log_prob_source(cfg) == "rollout":
            return "actor.recompute_old_log_prob is off: the rollout's log-probs are used"
        return "each rollout batch is one mini-batch, so they are those of its first optimizer step"
    return None
