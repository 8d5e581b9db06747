"""Workflows that cannot work: each is refused before anything starts, with names, numbers and a fix."""

import pytest
from plan_cases import add_agent, compiled, custom

from siirl.dag.spec import DagBuilder
from siirl.errors import ConfigError, DagError, NotSupportedError, PlacementError


def one_agent(**rollout_options) -> tuple[DagBuilder, dict[str, str]]:
    dag = DagBuilder("test")
    return dag, add_agent(dag, **rollout_options)


def missing_field():
    dag, ids = one_agent()
    custom(dag, "reader", [ids["reward"]], ["scroe"], [])
    return dag


def missing_reference():
    return one_agent()[0]


def not_an_ancestor():
    dag, _ = one_agent()
    custom(dag, "reader", ["rollout_0"], ["score"], [])
    return dag


def doubly_written():
    dag, ids = one_agent()
    custom(dag, "again", [ids["reward"]], ["response_ids"], ["score"])
    return dag


def overwritten_prompt():
    dag, ids = one_agent()
    custom(dag, "again", [ids["reward"]], ["score"], ["raw_prompt"])
    return dag


def shared_field():
    dag, ids = one_agent()
    add_agent(dag, 1)
    custom(dag, "thief", [ids["reward"]], ["score"], ["agent_1.bonus"])
    return dag


def unknown_agent():
    dag, ids = one_agent()
    custom(dag, "reader", [ids["reward"]], ["agent_7.score"], [])
    return dag


def malformed_field():
    dag, ids = one_agent()
    custom(dag, "reader", [ids["reward"]], ["other.score"], [])
    return dag


def two_trainers():
    dag, ids = one_agent()
    dag.node("train_again", "MODEL_TRAIN", "ACTOR", dependencies=[ids["train"]])
    return dag


def no_trainer():
    dag = DagBuilder("test")
    dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    return dag


def rollout_after_other_agents_reward():
    dag, ids = one_agent()
    add_agent(dag, 1, dependencies=[ids["reward"]])
    return dag


def rows_that_do_not_pair_up():
    dag, ids = one_agent(config={"rollout.n": 2})
    other = add_agent(dag, 1)
    custom(dag, "compare", [ids["reward"], other["reward"]], ["score", "agent_1.score"], [])
    return dag


def prompts_made_beside_the_rollout():
    dag, ids = one_agent()
    beside = custom(dag, "level", [], ["raw_prompt"], ["difficulty"])
    custom(dag, "reader", [beside, ids["reward"]], ["difficulty"], [])
    return dag


def node(node_type: str, role: str = "DEFAULT", **options):
    def build():
        dag, ids = one_agent()
        dag.node("extra", node_type, role, dependencies=[ids["reward"]], **options)
        return dag

    return build


def scored_by(node_type: str):
    def build():
        dag = DagBuilder("test")
        rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
        reward = dag.node("reward", node_type, "REWARD", dependencies=[rollout])
        advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
        dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
        return dag

    return build


def rollout_with(config=None, **options):
    return lambda: one_agent(config=config or {}, **options)[0]


def train_with(config=None, **options):
    def build():
        dag = DagBuilder("test")
        rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
        reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
        old = dag.node(
            "old", "MODEL_TRAIN", "ACTOR", only_forward_compute=True, dependencies=[rollout],
            config=options.get("old", {}), placement=options.get("old_placement"),
        )  # fmt: skip
        advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward, old])
        dag.node(
            "train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage], config=config or {},
            placement=options.get("placement"), filter_plugin=options.get("filter_plugin"),
        )  # fmt: skip
        return dag

    return build


def refilled(twice: bool, beside: bool = False):
    def build():
        dag = DagBuilder("test")
        rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
        reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
        last = [dag.node("refill", "COMPUTE", "POSTPROCESS_SAMPLING", dependencies=[reward])]
        if twice or beside:
            above = last if twice else [reward]
            last.append(dag.node("again", "COMPUTE", "POSTPROCESS_SAMPLING", dependencies=above))
        advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=last)
        dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
        return dag

    return build


REFILL = "algorithm.filter_groups.enable=true"
RM, RM_PATH = "reward_model.enable=true", "reward_model.model.path=/models/rm"
GAE = "algorithm.adv_estimator=gae"
TWO_STEPS = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
KL = "actor_rollout_ref.actor.use_kl_loss=true"

CASES = [
    (missing_field, (), DagError, ["'reader' reads agent_0.scroe, which no node writes", "'score'"]),
    (missing_reference, (KL,), DagError, ["'train_0' reads agent_0.ref_log_prob", "node_role REFERENCE"]),
    (
        missing_reference,
        ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.recompute_old_log_prob=false"),
        DagError,
        ["'advantage_0' reads agent_0.ref_log_prob", "node_role REFERENCE"],
    ),
    (
        missing_reference,
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",),
        DagError,
        ["'train_0' reads agent_0.old_log_prob", "only_forward_compute"],
    ),
    (
        missing_reference,
        (TWO_STEPS,),
        DagError,
        ["agent_0.old_log_prob", "only_forward_compute", "recompute_old_log_prob"],
    ),
    (
        not_an_ancestor,
        (),
        DagError,
        ["'reader' reads agent_0.score, which node 'reward_0' writes", "Add 'reward_0'"],
    ),
    (doubly_written, (), DagError, ["'reward_0' and node 'again' both write agent_0.score"]),
    (overwritten_prompt, (), DagError, ["writes agent_0.raw_prompt, which comes with the prompts"]),
    (shared_field, (), DagError, ["writes agent_1.bonus", "two agents would share a field"]),
    (unknown_agent, (), DagError, ["no agent 7", "its agents are [0]"]),
    (malformed_field, (), DagError, ["'other.score' is no field", "agent_N.NAME"]),
    (two_trainers, (), DagError, ["'train_0' and node 'train_again'", "training of agent 0"]),
    (no_trainer, (), NotSupportedError, ["a DAG that trains nothing", "node_role ACTOR"]),
    (rollout_after_other_agents_reward, (), DagError, ["'rollout_1'", "through 'reward_0'", "pre_process"]),
    (rows_that_do_not_pair_up, (), NotSupportedError, ["agents 0 and 1", "rollout.n"]),
    (
        prompts_made_beside_the_rollout,
        (),
        DagError,
        ["agent_0.difficulty", "Let the rollout of agent 0 depend"],
    ),
    (node("COMPUTE"), (), DagError, ["no code of its own", "executable_ref"]),
    (node("COMPUTE", executable_ref="a.b:c"), (), DagError, ["declares the fields", "reads: [...]"]),
    (
        node("COMPUTE", "ROLLOUT"),
        (),
        DagError,
        ["ROLLOUT does not go with node_type COMPUTE", "MODEL_INFERENCE"],
    ),
    (node("MODEL_INFERENCE", "REWARD", reads=["score"]), (), DagError, ["'model_reward' are fixed"]),
    (node("MODEL_TRAIN", "REWARD", reads=["score"]), (), DagError, ["'reward_train' are fixed"]),
    (
        node("MODEL_TRAIN", "REWARD", writes=["score"]),
        (),
        DagError,
        ["trains the reward model", "node_type: MODEL_INFERENCE"],
    ),
    (
        node("MODEL_TRAIN", "CRITIC"),
        (),
        DagError,
        ["node 'extra' trains a critic, but algorithm.adv_estimator=grpo uses none"],
    ),
    (rollout_with(), (GAE,), DagError, ["node 'advantage_0'", "no node trains the critic of agent 0"]),
    (node("MODEL_TRAIN", "CRITIC"), (GAE,), DagError, ["reads agent_0.value", "only_forward_compute: true"]),
    (node("MODEL_INFERENCE", "REWARD"), (RM, RM_PATH), DagError, ["both write agent_0.score"]),
    (scored_by("MODEL_INFERENCE"), (), DagError, ["'reward'", "reward_model.enable is False"]),
    (scored_by("MODEL_INFERENCE"), (RM,), ConfigError, ["'reward'", "reward_model.model.path is not set"]),
    (
        scored_by("COMPUTE"),
        (RM, RM_PATH),
        DagError,
        ["no node of the DAG scores by a model"],
    ),
    (rollout_with(), (REFILL,), DagError, ["no node filters the groups of node 'rollout_0'", "dapo.yaml"]),
    (
        node("COMPUTE", "POSTPROCESS_SAMPLING"),
        (REFILL,),
        DagError,
        ["node 'advantage_0' works on rows that node 'extra' samples again", "Add 'extra'"],
    ),
    (refilled(twice=True), (REFILL,), DagError, ["is above node 'again', which repeats"]),
    (refilled(twice=False, beside=True), (REFILL,), DagError, ["both change the rows of agent 0"]),
    (node("BARRIER_SYNC", executable_ref="a.b:c"), (), DagError, ["node 'extra'", "skipped", "CUSTOM"]),
    (node("MODEL_TRAIN", "REFERENCE", executable_ref="a.b:c"), (), NotSupportedError, ["in place of op"]),
    (rollout_with(agent_options={"obs": True}), (), DagError, ["agent_options", "unknown key 'obs'"]),
    (train_with(filter_plugin=7), (), DagError, ["node 'train'", "names no function"]),
    (train_with(filter_plugin={"fn": "a.b:c", "read": []}), (), DagError, ["unknown key 'read'", "reads"]),
    (rollout_with(), ("algorithm.use_pf_ppo=true",), DagError, ["no node resamples the rows of node 'roll"]),
    (rollout_with(), ("algorithm.adv_estimator=remax",), DagError, ["baseline_score", "remax.yaml"]),
    (
        rollout_with({"rollout.tempreture": 1}),
        (),
        ConfigError,
        ["node 'rollout_0'", "tempreture", "temperature"],
    ),
    (rollout_with({"rollout.n": "four"}), (), ConfigError, ["node 'rollout_0'", "four"]),
    (rollout_with({"trainer.nnodes": 2}), (), DagError, ["holds for the whole run", "trainer.nnodes=2"]),
    (rollout_with({"data.train_batch_size": 12}), (), ConfigError, ["node 'rollout_0'", "12", "8"]),
    (rollout_with({"rollout.mode": "async"}), (), NotSupportedError, ["node 'rollout_0'", "async"]),
    (train_with({"actor.strategy": "fdsp"}), (), ConfigError, ["node 'train'", "fdsp", "fsdp"]),
    (train_with({"rollout.n": 2}), (), DagError, ["rollout.n=4", "has 2", "rollout node only"]),
    (train_with({"model.path": "/b"}), (), DagError, ["actor_rollout_ref.model.path", "one policy"]),
    (
        train_with(old={"actor.fsdp_config.fsdp_size": 1}),
        (TWO_STEPS,),
        DagError,
        ["'old' sets actor_rollout_ref.actor.fsdp_config.fsdp_size=1", "agent_0.actor", "'train'"],
    ),
    (
        train_with(old_placement="0", placement="1"),
        (TWO_STEPS,),
        PlacementError,
        ["'old' is placed on ranks 0 and node 'train' on 1", "agent_0.actor"],
    ),
    (rollout_with(placement="3-4"), (), PlacementError, ["'rollout_0'", "rank 4", "4 ranks (0-3)"]),
    (
        rollout_with(),
        ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
        PlacementError,
        [
            "'rollout_0'",
            "2 prompts of a batch for 4 data-parallel shards (ranks 0-3)",
            "data.train_batch_size",
        ],
    ),
    (
        train_with(),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.n=2"),
        PlacementError,
        ["2 rows of a mini-batch (1 prompts x 2 responses) for 4 data-parallel shards"],
    ),
    (
        train_with(),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=3",),
        PlacementError,
        ["'train'", "fsdp_size = 3 does not divide the 4"],
    ),
]


@pytest.mark.parametrize(
    ("build", "overrides", "error", "fragments"),
    CASES,
    ids=[f"{i}-{c[3][0][:40]}" for i, c in enumerate(CASES)],
)
def test_a_workflow_that_cannot_work_is_refused(build, overrides, error, fragments):
    dag = build().build()
    with pytest.raises(error) as caught:
        compiled(dag, 4, *overrides)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    starts = str(caught.value).startswith("not supported yet: ")
    assert starts == isinstance(caught.value, NotSupportedError)
