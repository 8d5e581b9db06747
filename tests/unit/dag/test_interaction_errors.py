"""Interactions that cannot run, or would never end, are refused before anything starts, with the fix."""

import pytest
from plan_cases import add_agent, compiled, custom, run_symbolically

from siirl.dag.spec import DagBuilder
from siirl.errors import DagError

CODE = """
def until(episode):
    return True

def two(episode, other):
    return None

class Game:
    def reset(self, task, seed):
        return ""
    def step(self, actions):
        return "", 0.0, True

class Sized:
    def __init__(self, size, *, color="red"):
        self.size = size
    def reset(self, task, seed):
        return ""
    def step(self, actions):
        return "", 0.0, True

class Lacks:
    def reset(self, seed):
        return ""
    def step(self, action):
        return "", 0.0, True

class LacksAwaited:
    async def reset(self, seed):
        return ""
    async def step(self, actions):
        return "", 0.0, True

class NoStep:
    def reset(self, task, seed):
        return ""

class BadReset:
    def reset(self, task):
        return ""
    def step(self, actions):
        return "", 0.0, True
"""
AROUND = """
def pre_process(messages, episode):
    return messages
def post_process(text, episode):
    return text
"""
PROCESS = """
def pre_process(messages):
    return messages
"""


def pair(first=None, second=None, env=None, third=None) -> DagBuilder:
    """Two agents, with an environment between them if `env` (its options) is given, and a third one."""
    dag = DagBuilder("pair")
    above = add_agent(dag, 0, **(first or {}))["rollout"]
    if env is not None:
        above = dag.node("game", "ENV_INTERACT", dependencies=[above], **env)
    above = add_agent(dag, 1, dependencies=[above], **(second or {}))["rollout"]
    if third is not None:
        add_agent(dag, 2, **{"dependencies": [above], **third})
    return dag


def share(agent: int) -> dict:
    return {"config": {"rollout.agent.share_instance": agent}}


def sharing(*targets: int | None) -> DagBuilder:
    """A chain of rollouts, agent i shares targets[i]; those that own their policy are trained."""
    dag, above = DagBuilder("sharing"), []
    for agent, target in enumerate(targets):
        options = {"dependencies": above, **({} if target is None else share(target))}
        if target is None:
            above = [add_agent(dag, agent, **options)["rollout"]]
        else:
            above = [dag.node(f"rollout_{agent}", "MODEL_INFERENCE", "ROLLOUT", agent_group=agent, **options)]
    return dag


def sharing_with_model() -> DagBuilder:
    dag = DagBuilder("sharing")
    above = add_agent(dag, 0)["rollout"]
    config = {"rollout.agent.share_instance": 0, "model.path": "elsewhere"}
    dag.node("rollout_1", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[above], config=config)
    return dag


def env(code, name="Game", **config) -> dict:
    return {"config": {"env_path": f"{code}:{name}", **config}}


def without(dag: DagBuilder, node_id: str, instead: str) -> DagBuilder:
    """The DAG without a node; what depended on it depends on another one."""
    found, spec = DagBuilder("without"), dag.build()
    for node in spec.nodes:
        if node.node_id != node_id:
            above = [instead if name == node_id else name for name in node.dependencies]
            options = {"agent_group": node.agent_group, "dependencies": above}
            found.node(node.node_id, node.node_type, node.node_role, **options)
    return found


def with_thief(dag: DagBuilder) -> DagBuilder:
    custom(dag, "thief", ["reward_1"], ["score"], ["agent_0.score"], agent_group=1)
    return dag


def with_environment(dag: DagBuilder, code, above: list[str], name: str, cls: str = "Sized") -> DagBuilder:
    """The DAG with one more environment, by default one which takes a size."""
    kwargs = {"size": 1} if cls == "Sized" else {}
    dag.node(name, "ENV_INTERACT", dependencies=above, **env(code, cls, env_kwargs=kwargs))
    return dag


def after_reward() -> DagBuilder:
    """Two agents, the second of which waits for the reward of the first."""
    dag = DagBuilder("after")
    add_agent(dag, 1, dependencies=[add_agent(dag, 0)["reward"]])
    return dag


def environment_first(code) -> DagBuilder:
    dag = with_environment(DagBuilder("first"), code, [], "game")
    add_agent(dag, 1, dependencies=[add_agent(dag, 0, dependencies=["game"])["rollout"]])
    return dag


def looping_reward() -> DagBuilder:
    dag = DagBuilder("reward")
    above = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    dag.node("reward", "COMPUTE", "REWARD", dependencies=[above], loop={"max_turns": 2})
    return dag


def alone(**options) -> DagBuilder:
    dag = DagBuilder("alone")
    add_agent(dag, 0)
    add_agent(dag, 1, **options)
    return dag


TOOLS = {"rollout.multi_turn.enable": True}


def process(code, **options) -> dict:
    return {"agent_options": {"process_path": str(code.parent / "around.py"), **options}}


def advantage(dag: DagBuilder, agent: int, config: dict, reads: list[str] | None = None) -> DagBuilder:
    """The DAG with another advantage node of an agent, below all rewards, that reads scores of others."""
    rewards = [node.node_id for node in dag.build().nodes if node.node_role == "REWARD"]
    more = {"agent_group": agent, "dependencies": rewards, "config": config, "reads": reads}
    dag.node(f"credit_{agent}", "COMPUTE", "ADVANTAGE", **more)
    return dag


def frozen() -> DagBuilder:
    dag = DagBuilder("frozen")
    first = add_agent(dag, 0)["rollout"]
    dag.node("judge", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[first])
    return dag


FLAT = {"rollout.agent.obs_with_env": True}


def two_starts() -> DagBuilder:
    dag = DagBuilder("two_starts")
    first, second = add_agent(dag, 0)["rollout"], add_agent(dag, 1)["rollout"]
    add_agent(dag, 2, dependencies=[first, second])
    return dag


CASES = {
    "other samples": (
        lambda c: pair(second={"config": {"rollout.n": 2}}),
        ["'rollout_1'", "rollout.n=2", "'rollout_0'", "Set the same on both"],
    ),
    "no bound": (lambda c: pair(second={"loop": {}}), ["'rollout_1'", "max_turns = None", "never end"]),
    "unknown key": (lambda c: pair(second={"loop": {"max_turn": 3}}), ["'max_turn'", "max_turns"]),
    "forward loop": (
        lambda c: pair(first={"loop": {"max_turns": 2, "to": "rollout_1"}}),
        ["loop.to = 'rollout_1'", "goes back"],
    ),
    "no until": (
        lambda c: pair(second={"loop": {"max_turns": 2, "until": f"{c}:untli"}}),
        ["until", "no 'untli'", "it defines until, two"],
    ),
    "until arity": (
        lambda c: pair(second={"loop": {"max_turns": 2, "until": f"{c}:two"}}),
        ["two(episode, other)", "cannot be called as two(episode)", "needs other"],
    ),
    "no file": (
        lambda c: pair(second={"agent_options": {"route": "nowhere.py:fn"}}),
        ["route = 'nowhere.py:fn'", "there is no file 'nowhere.py' in /"],
    ),
    "process file": (
        lambda c: pair(second={"agent_options": {"process_path": "nowhere.py"}}),
        ["process_path = 'nowhere.py'", "there is no file"],
    ),
    "process arity": (
        lambda c: pair(second={"agent_options": {"process_path": str(c.parent / "process.py")}}),
        [
            "pre_process(messages)",
            "cannot be called as pre_process(messages, episode): it takes 1 value, not 2",
        ],
    ),
    "process functions": (
        lambda c: pair(second={"agent_options": {"process_path": str(c)}}),
        ["defines neither pre_process nor post_process"],
    ),
    "env name": (lambda c: pair(env=env(c, "Gmae")), ["'game'", "no 'Gmae'", "Did you mean 'Game'?"]),
    "env module": (
        lambda c: pair(env=env("no_such.module")),
        ["'game'", "'no_such.module' cannot be imported: there is no such module", "PYTHONPATH"],
    ),
    "env import": (
        lambda c: pair(env=env(c.parent / "needy.py")),
        ["'game'", "needy.py:Game' cannot be imported: it imports 'no_such_package.part'", "Install it"],
    ),
    "env needs": (lambda c: pair(env=env(c, "Sized")), ["Sized' needs size", "env_kwargs: {size: ...}"]),
    "env takes": (
        lambda c: pair(env=env(c, "Sized", env_kwargs={"size": 3, "colr": 1})),
        ["cannot be made of env_kwargs: it does not take colr (did you mean 'color'?)"],
    ),
    "tool file": (
        lambda c: pair(second={"config": TOOLS | {"rollout.multi_turn.tool_config_path": "nowhere.yaml"}}),
        ["'rollout_1'", "tool_config_path = 'nowhere.yaml'", "no such file"],
    ),
    "tool format": (
        lambda c: pair(second={"config": TOOLS | {"rollout.multi_turn.format": "nowhere.py:fn"}}),
        ["nowhere.py"],
    ),
    "no reward": (
        lambda c: without(pair(), "reward_1", "rollout_1"),
        ["'advantage_1' reads agent_1.score", "node_role REWARD, agent_group 1", "whose scores it then gets"],
    ),
    "two writers": (
        lambda c: with_thief(pair()),
        ["'thief' of agent 1 writes agent_0.score", "two agents would share a field"],
    ),
    "env method": (lambda c: pair(env=env(c, "NoStep")), ["NoStep", "no method step"]),
    "env arity": (lambda c: pair(env=env(c, "BadReset")), ["reset(self, task)", "reset(self, task, seed)"]),
    "gym of two": (
        lambda c: with_environment(pair(), c, ["rollout_1"], "game", "Lacks"),
        ["reset(self, seed) (line", "lacks task", "one agent, but 'rollout_0' and 'rollout_1' both speak"],
    ),
    "gym that is awaited": (
        lambda c: pair(env=env(c, "LacksAwaited")),
        ["lacks task", "whose methods are no coroutines. Write reset(self, task, seed)"],
    ),
    "env function": (lambda c: pair(env=env(c, "until")), ["is a function, not a class"]),
    "no env": (lambda c: pair(env={}), ["'game' names no environment", "env_path"]),
    "env key": (lambda c: pair(env=env(c, env_kwarg={})), ["'env_kwarg'", "env_kwargs"]),
    "two envs": (
        lambda c: pair(env={"config": {"env_path": [f"{c}:Game", f"{c}:Game"]}}),
        ["names 2 environments", "an episode has one"],
    ),
    "env switch": (lambda c: pair(env=env(c, obs_with_env="no")), ["obs_with_env = 'no'", "true nor false"]),
    "env seed": (lambda c: pair(env=env(c, env_seed="row")), ["env_seed = 'row'", "'sample'", "'prompt'"]),
    "flat env unused": (
        lambda c: pair(second={"config": {"rollout.agent.env_path": [f"{c}:Game"]}}),
        ["'rollout_1'", "neither obs_with_env nor rewards_with_env"],
    ),
    "flat env missing": (
        lambda c: pair(second={"config": {"rollout.agent.rewards_with_env": True}}),
        ["'rollout_1'", "rewards_with_env = True without", "env_path: [file.py:Class]"],
    ),
    "flat env class": (
        lambda c: pair(second={"config": FLAT | {"rollout.agent.env_path": ["nowhere.py:Game"]}}),
        ["'rollout_1_env'", "env_path = 'nowhere.py:Game': there is no file"],
    ),
    "env places": (lambda c: pair(env=env(c, max_concurrent=0)), ["max_concurrent = 0", "at least 1"]),
    "env deadline": (lambda c: pair(env=env(c, deadline_s=0)), ["deadline_s = 0"]),
    "share unknown": (lambda c: sharing(None, 7), ["share_instance = 7", "not in its interaction"]),
    "share itself": (lambda c: sharing(None, 1), ["share_instance = 1", "1 -> 1"]),
    "share cycle": (lambda c: sharing(None, 2, 1), ["1 -> 2 -> 1"]),
    "share chain": (lambda c: sharing(None, 0, 1), ["2 -> 1 -> 0"]),
    "share first": (lambda c: sharing(1, None), ["the first agent", "share_instance = 0"]),
    "share and train": (lambda c: pair(second=share(0)), ["'reward_1' belongs to agent 1", "speaker"]),
    "share and model": (
        lambda c: sharing_with_model(),
        ["'rollout_1' sets actor_rollout_ref.model", "the policy of agent 0", "share_instance"],
    ),
    "share alone": (
        lambda c: alone(**share(0)),
        ["'rollout_1' has rollout.agent.share_instance", "in no interaction"],
    ),
    "loop of a reward": (lambda c: looping_reward(), ["'reward' has loop", "no rollout or environment"]),
    "arguments of nothing": (
        lambda c: pair(second={"agent_options": {"post_process_kwargs": {"a": 1}}}),
        ["'rollout_1'", "post_process_kwargs are arguments of no function", "Set process_path"],
    ),
    "two env nodes": (
        lambda c: with_environment(pair(env=env(c)), c, ["rollout_1"], "sized"),
        ["'game' and node 'sized' name different environments", "an episode has one"],
    ),
    "env first": (
        lambda c: environment_first(c),
        ["'game' begins an interaction", "starts with a turn of an agent"],
    ),
    "env alone": (
        lambda c: with_environment(pair(), c, ["reward_1"], "game"),
        ["'game' is an environment that no rollout acts in"],
    ),
    "reward between": (
        lambda c: after_reward(),
        ["'rollout_1' depends on node 'rollout_0' through 'reward_0'", "pre_process"],
    ),
    "team of one": (
        lambda c: advantage(pair(), 0, {"credit.team": 0.5}),
        ["'credit_0': algorithm.credit.team = 0.5 has nobody to count", "Add reads: [agent_1.score]"],
    ),
    "read of a sharer": (
        lambda c: advantage(sharing(None, None, 1), 0, {"credit.team": 0.5}, ["agent_2.score"]),
        ["'credit_0' reads agent_2.score, but agent 2 speaks with agent 1's policy", "Read agent_1.score."],
    ),
    "read of one's own": (
        lambda c: advantage(sharing(None, 0), 0, {"credit.team": 0.5}, ["agent_1.score"]),
        ["agent 1 speaks with agent 0's policy", "credit.team counts them. Remove it from reads"],
    ),
    "read of nobody": (
        lambda c: advantage(pair(), 0, {"credit.team": 0.5}, ["agent_7.score"]),
        ["'credit_0' reads agent_7.score, but there is no agent 7: there are 0, 1."],
    ),
    "read of a frozen one": (
        lambda c: advantage(frozen(), 0, {"credit.team": 0.5}, ["agent_1.score"]),
        ["agent 1 is frozen: no rows of it are made"],
    ),
    "removed reward": (
        lambda c: pair(third={"dependencies": ["reward_worker"]}),
        ["'rollout_2' depends on 'reward_worker', but the DAG has no such node. Add the node"],
    ),
    "pre_process_kwargs": (
        lambda c: pair(second=process(c, pre_process_kwargs={"rolle": "x"})),
        ["(messages, episode, rolle=...): it does not take rolle", "or pre_process_kwargs"],
    ),
    "post_process_kwargs": (
        lambda c: pair(second=process(c, post_process_kwargs={"a": 1})),
        ["post_process(text, episode, a=...): it does not take a", "or post_process_kwargs"],
    ),
    "kwargs that are a list": (
        lambda c: pair(second=process(c, pre_process_kwargs=[1])),
        ["'rollout_1': pre_process_kwargs = [1] is no mapping of arguments"],
    ),
    "process_path that is a list": (
        lambda c: pair(second={"agent_options": {"process_path": [str(c)]}}),
        ["'rollout_1': process_path = ['", "is no text. Write the path of a file.py"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_interaction_that_cannot_work_is_refused(name, tmp_path):
    code = tmp_path / "code.py"
    code.write_text(CODE)
    (tmp_path / "process.py").write_text(PROCESS)
    (tmp_path / "around.py").write_text(AROUND)
    (tmp_path / "needy.py").write_text("import no_such_package.part\n" + CODE)
    build, fragments = CASES[name]
    with pytest.raises(DagError) as caught:
        compiled(build(code).build(), 1)
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is not in: {caught.value}"


def test_an_agent_that_is_scored_but_not_trained_is_refused_and_one_without_nodes_is_frozen():
    dag = DagBuilder("frozen")
    first = add_agent(dag, 0)["rollout"]
    dag.node("judge", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[first])
    plan = compiled(dag.build(), 2)
    assert not plan.models["agent_1.actor"].trains and plan.links["agent_1.weights"]
    assert "judge" not in run_symbolically(plan)
    dag.node("reward_judge", "COMPUTE", "REWARD", agent_group=1, dependencies=["judge"])
    with pytest.raises(DagError, match=r"'judge'.*node_role ACTOR.*the agent is then frozen"):
        compiled(dag.build(), 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_has_what_it_needs_in_an_interaction(world_size, tmp_path):
    code = tmp_path / "code.py"
    code.write_text(CODE)
    dags = [
        pair(env=env(code), third={"loop": {"max_turns": 3}}),
        sharing(None, 0),
        pair(second={"agent_options": {"route": f"{code}:until"}}),
    ]
    for dag in dags:
        plan = compiled(dag.build(), world_size)
        ran = run_symbolically(plan)
        assert "rollout_0" in ran and "game" not in ran
        assert "rollout_0" in run_symbolically(plan, "validation")
