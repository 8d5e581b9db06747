"""The plan: what the compiler makes of a DAG, and all that a worker needs to know of it. Data only, no torch.

A plan is the same for every rank, process and hash seed; it travels to the workers as JSON (`to_json`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from siirl.compiler import plan_json
from siirl.compiler.plan_instructions import Instruction, Run
from siirl.config.roles import ROLES, Head
from siirl.dag.ops import OPS, OpSpec
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks
from siirl.types import Layout


@dataclass(frozen=True)
class NodePlan:
    """What a kept node runs."""

    name: str
    agent: int
    dependencies: tuple[str, ...]
    """Kept nodes that run before it."""
    op: str
    """Name in the op table (siirl/dag/ops.py)."""
    model: str | None
    """The ModelPlan whose worker the op runs on."""
    executable: str | None
    """Where the user's code is: pkg.mod:fn."""
    overrides: dict[str, Any]
    """Full keys; its configuration is `with_overrides(cfg, overrides)` of the run's cfg."""
    options: dict[str, Any]
    """Further arguments of the user's code."""
    own_needs: tuple[str, ...] = ()
    """SERVICES that the user's code needs."""
    max_lag: int = 0
    """Of a rollout: steps that the oldest token of a row may be older than the weights that it trains."""
    runs_in_background: bool = False
    """Of an asynchronous rollout: its engines go on while others train; no model beside them computes."""

    @property
    def spec(self) -> OpSpec:
        """The row of its op in the table."""
        return OPS[self.op]

    @property
    def needs(self) -> tuple[str, ...]:
        """SERVICES that its code gets by keyword."""
        return self.own_needs or self.spec.needs

    @property
    def keeps_rows(self) -> bool:
        """Whether it keeps rows from step to step, which are part of a checkpoint."""
        return self.max_lag > 0 or "buffer" in self.needs


@dataclass(frozen=True)
class ModelPlan:
    """One model of one role: a model worker lives on each of its ranks."""

    name: str
    """agent_0.actor, for one."""
    agent: int
    role: str
    backend: str
    head: Head
    trains: bool
    ranks: Ranks
    dims: ParallelDims
    node: str
    """The node whose resolved configuration it is built from."""
    nodes: tuple[str, ...]
    """All that use it."""
    base: str | None = None
    """The model that holds the frozen weights on which this one has an adapter, or (a reference) nothing of
    its own; may be this one itself. They are on the same ranks, and `base` is built first."""
    adapters: dict[str, int] | None = None
    """Of a rollout that is a base: the rollouts on it and their LoRA ranks."""

    @property
    def generates(self) -> bool:
        """Whether it is a rollout engine; all others run in a training engine."""
        return ROLES[self.role].generates

    @property
    def computes_between(self) -> bool:
        """Whether it needs the device between the rollouts of a step: on a training engine, or a teacher."""
        return not self.generates or self.is_teacher

    @property
    def is_rollout(self) -> bool:
        """Whether it is a rollout engine that takes the weights of its agent's trainer."""
        return ROLES[self.role].takes_weights

    @property
    def is_policy(self) -> bool:
        """Whether it is the model on a training engine whose weights its agent's rollout takes."""
        return ROLES[self.role].gives_weights

    @property
    def is_reference(self) -> bool:
        """Whether it is the frozen model that the policy is kept close to."""
        return ROLES[self.role].is_reference

    @property
    def is_teacher(self) -> bool:
        """Whether it is a model that the policy learns from."""
        return ROLES[self.role].is_teacher


@dataclass(frozen=True)
class PoolPlan:
    """Versions of a policy that are kept, one of which an opponent plays as in each step."""

    agent: int
    """The opponent."""
    policy: int
    """The agent whose versions they are."""
    size: int
    every_steps: int
    """Promotion: a version is kept after so many steps; 0: not by steps."""
    win_rate: float | None
    """Promotion: one is kept once the policy wins this share of its games."""
    sampling: str
    power: float
    current: float
    """Probability of the policy's current weights."""

    @property
    def needs_results(self) -> bool:
        """Whether it is to be known who wins."""
        return self.win_rate is not None or self.sampling.startswith("pfsp")


@dataclass(frozen=True)
class LinkPlan:
    """Weights of `source` (a training engine) are brought to `target` (a rollout engine, or a teacher)."""

    name: str
    source: str
    target: str
    ranks: Ranks
    kind: Literal["local", "broadcast", "checkpoint"]
    """ "local": every rank of the target holds the source too. "broadcast": to ranks that do not, over NCCL
    or gloo, from one rank of the source. "checkpoint": by a folder that all ranks see."""
    every_steps: int | None = None
    """Of a teacher that is a policy: it takes the weights at the beginning of every such step, but the first.
    None: a rollout, which takes them whenever they are newer."""
    share: float | None = None
    """Of a teacher: what the weights count beside those that it has."""
    pool: PoolPlan | None = None
    """Of an opponent: it takes a version that was kept, drawn anew in each step."""

    @property
    def is_stale(self) -> bool:
        """Whether the target is something else than the source at the beginning of a step."""
        return self.every_steps is not None and (self.every_steps, self.share) != (1, 1.0)


@dataclass(frozen=True)
class RoutePlan:
    """Rows move from layout `source` to layout `target` (ids into Plan.layouts) within the group of `ranks`.

    Rows are assigned to shards by row_id, group_id,
    prompt_length and, once the row set has it, response_length. The compiler keeps these columns alive in
    `source` at every Reshard, and the first Reshard of an agent's fields into `target` carries them, so that
    `target` can be a source later. A Reshard of these columns alone is an order: a node on other ranks waits
    for one that it depends on but reads nothing of; for this to hold, an exchange must not end on any rank
    before all its ranks have begun it.
    """

    name: str
    source: str
    target: str
    ranks: Ranks
    """Those of both layouts, sorted."""


@dataclass(frozen=True)
class LoaderPlan:
    """Prompts of one agent; both instruction lists name the same loader, which has training prompts and
    validation prompts for each."""

    name: str
    agent: int
    node: str
    """Whose configuration says which files, and in which order."""
    layout: str
    """Where they are loaded (id): its ranks read them."""
    ahead: int = 0
    """Batches that are loaded before their step, for an asynchronous rollout."""


@dataclass(frozen=True)
class Stage:
    """A node of an interaction: what happens there to an episode, and where it goes next."""

    node: str
    agent: int
    """Whose node it is."""
    following: tuple[str, ...]
    """Where an episode goes that does not go back: to all of these; (): it ends, or `route` says where."""
    back_to: tuple[str, ...]
    """Where it goes back to, unless `until` is true or the node has run max_turns times; (): nowhere."""
    max_turns: int
    until: str | None
    """A function of the episode: whether it does not go back."""
    route: str | None
    """A function of the episode that chooses the node instead."""
    beside: tuple[str, ...] = field(default=(), kw_only=True)
    """The nodes that may run while this one does: no edge orders them."""


ALL, BEST = "all", "best"
"""Which candidates of a turn go on."""


@dataclass(frozen=True)
class Branches:
    """Candidates of a turn: an episode branches there."""

    candidates: int
    visits: tuple[int, ...]
    """The visits of the node at which it does, from 0 on; (): all."""
    go_on: str
    """ALL or BEST."""


@dataclass(frozen=True)
class AgentStage(Stage):
    """An agent speaks."""

    policy: int
    """The agent whose rollout model it speaks with."""
    rows: bool
    """Whether rows of it are made; those of an agent that shares a policy are among the owner's."""
    process_path: str | None = None
    """Where pre_process and post_process are, the functions around a turn."""
    pre_process_kwargs: dict[str, Any] | None = None
    """None: there is no such function."""
    post_process_kwargs: dict[str, Any] | None = None
    branches: Branches | None = None
    """Of its turns, where there are several candidates."""

    @property
    def model(self) -> str:
        """Name of the rollout model that it speaks with."""
        return f"agent_{self.policy}.rollout"

    @property
    def who(self) -> str:
        """What messages call whoever acts."""
        return f"agent {self.agent}"

    @property
    def acts_by(self) -> str:
        """What it acts by, for reports."""
        return f"{self.model}{'' if self.policy == self.agent else ' (shared)'}"


@dataclass(frozen=True)
class ProgramStage(AgentStage):
    """The first agent of an interaction that a program plays, which says who speaks when."""

    serve: dict[str, Any] | None = None
    """The group of that name, and needs_reward, if nobody else scores."""


@dataclass(frozen=True)
class Environment:
    """An environment: each episode has one of its own."""

    path: str
    kwargs: dict[str, Any]
    seed: str
    """Of ENV_SEEDS: whether episodes of a prompt play the same one."""
    deadline_s: float
    max_concurrent: int


@dataclass(frozen=True)
class EnvStage(Stage):
    """The environment of the episode steps."""

    obs_with_env: bool
    """Whether what it shows is used."""
    rewards_with_env: bool
    """Whether what it gives is."""
    env: Environment | None = None
    """None: another stage says which."""
    rows = False
    branches = None
    who = "environment"

    @property
    def acts_by(self) -> str:
        """What it acts by, for reports."""
        return self.env.path if self.env else ""


StagePlan = AgentStage | ProgramStage | EnvStage


@dataclass(frozen=True)
class StreamPlan:
    """Whom a driver, a rank that plays episodes, asks for the turns of a policy."""

    policy: str
    """Name of the rollout model."""
    driver: int
    heads: Ranks
    """The ranks of its engines; an episode keeps to one of them. An engine that several ranks ask, or
    another one, is served."""
    shares: tuple[int, ...]
    """Of its episodes, how many each of them gets of sum(shares)."""


@dataclass(frozen=True)
class InteractionPlan:
    """A conversation of agents, episode by episode, which the Run of `entry` plays."""

    entry: str
    stages: tuple[AgentStage | ProgramStage | EnvStage, ...]
    """In the order of dependencies, the entry first."""
    policies: tuple[str, ...]
    """Names of the rollout models, the entry's first, of which all have their trainer's weights before that
    Run."""
    most_turns: int
    """Of an episode, over all agents."""
    streams: tuple[StreamPlan, ...] = ()
    """Of the policies that are not on the drivers' ranks alone; drivers ask their own engines of the
    others."""

    @property
    def program(self) -> dict[str, Any] | None:
        """What plays its episodes in the place of the stages: the keys of actor_rollout_ref.serve."""
        return self.stages[0].serve if isinstance(self.stages[0], ProgramStage) else None

    @property
    def branching(self) -> list[Branches]:
        """Of the stages at which an episode branches."""
        return [stage.branches for stage in self.speaking if stage.branches]

    @property
    def most_branches(self) -> int:
        """The episodes of one sample of a prompt at most."""
        if not (found := self.branching):
            return 1
        rounds, size = sum(len(one.visits) or self.most_turns for one in found), found[0].candidates
        return size**rounds if found[0].go_on == ALL else 1 + rounds * (size - 1)

    def branch_number(self, of: int, place: int, candidate: int) -> int:
        """The number of an episode among those of its sample: the candidate, of those at the place-th turn
        with candidates on the way of episode `of`, which is candidate 0."""
        size = self.branching[0].candidates
        if self.branching[0].go_on == BEST:  # of each turn, one goes on
            return place * (size - 1) + candidate
        return of + candidate * size**place

    @property
    def speaking(self) -> list[AgentStage]:
        """The stages at which agents speak."""
        return [stage for stage in self.stages if isinstance(stage, AgentStage)]

    @property
    def acting(self) -> list[EnvStage]:
        """The stages at which its environment steps."""
        return [stage for stage in self.stages if isinstance(stage, EnvStage)]

    @property
    def homes(self) -> dict[int, str]:
        """Agent -> the first node at which it speaks."""
        return {stage.agent: stage.node for stage in reversed(self.speaking)}

    @property
    def environment(self) -> Environment | None:
        """The environment of its episodes: one at most, whichever stages name it."""
        return next((stage.env for stage in reversed(self.acting) if stage.env), None)

    @property
    def gives_rewards(self) -> bool:
        """Whether something beside reward nodes does: its environment, or the program that plays it."""
        return self.program is not None or any(stage.rewards_with_env for stage in self.acting)

    def heads(self, policy: str, driver: int) -> Ranks:
        """The ranks whose engines answer the episodes of a driver."""
        found = (x.heads for x in self.streams if (x.policy, x.driver) == (policy, driver))
        return next(found, (driver,))

    def shares(self, policy: str, driver: int) -> tuple[int, ...]:
        """How a driver shares its episodes out to these (StreamPlan.shares)."""
        found = (x.shares for x in self.streams if (x.policy, x.driver) == (policy, driver))
        return next(found, (1,))

    @property
    def connected(self) -> Ranks:
        """The ranks that ask others for turns, or answer them."""
        return tuple(sorted({rank for x in self.streams for rank in (x.driver, *x.heads)}))

    def clients(self, policy: str, head: int) -> Ranks:
        """The drivers that the engine of a rank is served to; none if only its own rank asks it."""
        asking = tuple(x.driver for x in self.streams if x.policy == policy and head in x.heads)
        return () if asking == (head,) else asking


@dataclass(frozen=True)
class Choice:
    """Values of keys of speed or memory that nobody set, for a model; its nodes have them as overrides."""

    model: str
    keys: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Plan:
    """The compiled workflow. `instructions` is one training step; `validation` one validation batch."""

    dag_id: str
    world_size: int
    nodes: dict[str, NodePlan]
    """Kept nodes by id, in execution order."""
    pruned: dict[str, str]
    """Node id -> why it costs nothing in this run."""
    models: dict[str, ModelPlan]
    layouts: dict[str, Layout]
    routes: dict[str, RoutePlan]
    links: dict[str, LinkPlan]
    loaders: dict[str, LoaderPlan]
    interactions: dict[str, InteractionPlan]
    """By entry node; of their nodes, environments and agents without rows have no Run."""
    groups: tuple[Ranks, ...]
    """Distinct rank tuples, in creation order, the world first; every rank creates all of them in this order.
    They are the ranks of the models, of their mesh axes, and of all layouts, routes and links."""
    instructions: tuple[Instruction, ...]
    validation: tuple[Instruction, ...]
    choices: tuple[Choice, ...] = ()
    """What was chosen for keys that nobody set, in the order in which it was."""
    chosen_for: str | None = None
    """The ranks and devices that the choices were made for."""

    def of_rank(self, rank: int, section: Literal["instructions", "validation"] = "instructions"):
        """The instructions of one rank, in the one global order."""
        return [ins for ins in getattr(self, section) if rank in ins.ranks]

    def run_of(self, node: str) -> Run:
        """The Run of a node in a training step."""
        return next(ins for ins in self.instructions if isinstance(ins, Run) and ins.node == node)

    def before(self, node: str) -> list[Instruction]:
        """What happens between the Run before a node's and its own: the loads and reshards that it needs."""
        end = self.instructions.index(self.run_of(node))
        start = max((i for i in range(end) if isinstance(self.instructions[i], Run)), default=-1)
        return list(self.instructions[start + 1 : end])

    def to_json(self) -> str:
        """The plan as JSON text: the same for every process and hash seed, exact under from_json."""
        return plan_json.encode(self)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that to_json wrote."""
        return plan_json.decode(text, Plan)
