"""Plans that train on responses of the dataset: who trains which policy, in which order, what is refused."""

import re

import pytest
from plan_cases import compiled, config

from siirl.compiler.agent_steps import in_step
from siirl.compiler.compile import TEMPLATES, compile_plan
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.config.checks import check_config
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagSpec, NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError
from siirl.show.plan_text import report

AGENT = "actor_rollout_ref.rollout.agent"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
GIVEN = ("actor_rollout_ref.rollout.name=dataset", "actor_rollout_ref.rollout.n=1")
SFT = (*GIVEN, f"{LOSS}=sft", "trainer.val_before_train=false", "trainer.test_freq=-1")


def warm_up(**nodes: dict) -> DagSpec:
    """sft_grpo.yaml, with keys of nodes."""
    return with_node_config(load_dag_file(TEMPLATES / "sft_grpo.yaml"), nodes)


def runs(plan: Plan, section: str = "instructions") -> list[str]:
    return [ins.node for ins in getattr(plan, section) if isinstance(ins, Run)]


def test_a_warm_up_trains_the_policy_that_samples_and_before_it_does():
    plan = compiled(warm_up(), 2)
    assert plan.models.keys() == {"agent_0.actor", "agent_0.rollout"}
    assert plan.models["agent_0.actor"].nodes == ("sft", "train")
    assert plan.models["agent_0.actor"].node == "train"  # the optimizer is that of the agent that samples
    order = runs(plan)
    assert order.index("demonstrations") < order.index("sft") < order.index("rollout")
    assert runs(plan, "validation") == ["rollout", "reward"]


def test_in_its_steps_an_agent_has_all_of_its_instructions_and_the_other_none():
    plan = compiled(warm_up(), 2)
    windows = {0: (4, None), 1: (2, 3)}
    of_rank = plan.of_rank(0)
    ran = [
        {ins.node for ins in in_step(of_rank, plan, windows, x) if isinstance(ins, Run)} for x in range(1, 5)
    ]
    own = {"demonstrations", "sft"}
    assert ran == [set(), own, own, set(runs(plan)) - own]
    halves = [in_step(of_rank, plan, windows, step) for step in (2, 4)]
    assert sum(map(len, halves)) == len(of_rank) and not in_step(of_rank, plan, windows, 1)


def test_a_policy_of_its_own_learns_from_given_responses_without_sharing():
    nodes = {"demonstrations": {f"{AGENT}.share_instance": None}}
    plan = compiled(warm_up(**nodes), 2)
    assert {"agent_0.actor", "agent_1.actor"} <= plan.models.keys()


def declared(*order: str) -> DagSpec:
    dag = warm_up()
    return dag_spec(dag.dag_id, [dag.node(name) for name in order], dag.description)


ORDER = ("rollout", "reward", "old_log_prob", "advantages", "demonstrations", "sft", "train")
WINDOW = f"{AGENT}.first_step"
ALONE = NodeSpec("sft", "MODEL_TRAIN", "ACTOR", dependencies=("demonstrations",))
DPO = (
    *(*SFT, f"{LOSS}=dpo", "actor_rollout_ref.rollout.n=2"),
    "data.response_keys=[chosen,rejected]",
)
REFUSED = {
    "pairs of one response": (
        lambda: load_dag_file(TEMPLATES / "dpo.yaml"),
        (*SFT, f"{LOSS}=dpo"),
        r"loss_mode=dpo with actor_rollout_ref\.rollout\.n=1: it compares two responses",
    ),
    "a KL beside that of the loss": (
        lambda: load_dag_file(TEMPLATES / "dpo.yaml"),
        (*DPO, "actor_rollout_ref.actor.use_kl_loss=true"),
        "keeps the policy close to the reference by .*dpo_beta alone",
    ),
    "an entropy of pairs": (
        lambda: load_dag_file(TEMPLATES / "dpo.yaml"),
        (*DPO, "actor_rollout_ref.actor.entropy_coeff=0.1"),
        "entropy_coeff=0.1 with .*loss_mode=dpo, which is a loss of pairs",
    ),
    "pairs that a shuffle would part": (
        lambda: load_dag_file(TEMPLATES / "dpo.yaml"),
        (*DPO, "actor_rollout_ref.actor.shuffle=true"),
        "the two rows of a pair would be in different mini-batches",
    ),
    "pairs in a conversation": (
        lambda: with_node_config(
            load_dag_file(TEMPLATES / "solver_verifier.yaml"), {"train_solver": {LOSS: "dpo"}}
        ),
        ("actor_rollout_ref.rollout.n=2",),
        "loss_mode=dpo in an interaction",
    ),
    "pairs without a reference": (
        lambda: dag_spec("d", [NodeSpec(**vars(load_dag_file(TEMPLATES / "sft.yaml").nodes[0])), ALONE]),
        DPO,
        "node 'sft' reads agent_0.ref_log_prob, which no node writes. Add a node .* node_role REFERENCE",
    ),
    "preferences of a policy that samples": (
        lambda: warm_up(
            demonstrations={"rollout.n": 2, "data.response_keys": ["chosen", "rejected"]}, sft={LOSS: "dpo"}
        ),
        (),
        "loss_mode=dpo of a policy that agent 0 samples from",
    ),
    "it would be trained between rollout and update": (
        lambda: declared(*ORDER),
        (),
        "node 'sft' trains agent_0.actor between 'rollout', which samples from it, and 'train'",
    ),
    "a loss of sampled responses": (
        lambda: warm_up(sft={LOSS: "vanilla"}),
        (),
        r"node 'sft' trains the responses of a dataset \(node 'demonstrations'\) by .*loss_mode=vanilla",
    ),
    "a policy that nobody samples from": (
        lambda: warm_up(demonstrations={f"{AGENT}.share_instance": 7}),
        (),
        "share_instance = 7: agent 7 does not train a policy that it samples from",
    ),
    "another learning rate for one optimizer": (
        lambda: warm_up(sft={"actor_rollout_ref.actor.optim.lr": 0.5}),
        (),
        r"node 'sft' sets actor_rollout_ref\.actor\.optim\.lr=0\.5, but model agent_0\.actor",
    ),
    "responses that go on while the policy is warmed up": (
        lambda: warm_up(rollout={"actor_rollout_ref.rollout.max_lag": 1}),
        (),
        "rollout.max_lag: its rollouts are asynchronous",
    ),
    "a reference of before the warm-up": (
        lambda: dag_spec(
            "d",
            [
                *warm_up().nodes[:-1],
                NodeSpec("ref", "MODEL_TRAIN", "REFERENCE", dependencies=("rollout",)),
                NodeSpec("train", "MODEL_TRAIN", "ACTOR", dependencies=("advantages", "ref")),
            ],
        ),
        ("actor_rollout_ref.actor.use_kl_loss=true",),
        "the reference of agent 0 has the weights of before the dataset's responses were learnt",
    ),
    "no step in its window": (
        lambda: warm_up(demonstrations={WINDOW: 9, f"{AGENT}.last_step": 3}),
        (),
        "first_step=9 is after last_step=3",
    ),
    "a window after the end": (
        lambda: warm_up(rollout={WINDOW: 9}),
        ("trainer.total_training_steps=8",),
        "first_step=9, and the run ends after trainer.total_training_steps=8",
    ),
    "a window in a conversation": (
        lambda: with_node_config(load_dag_file(TEMPLATES / "solver_verifier.yaml"), {"solver": {WINDOW: 2}}),
        (),
        "first_step of an agent in an interaction",
    ),
    "validation of what samples nothing": (
        lambda: load_dag_file(TEMPLATES / "sft.yaml"),
        (*SFT[:-2], "trainer.test_freq=5"),
        "the run validates, and all its responses come with the dataset",
    ),
    "given responses in a conversation": (
        lambda: with_node_config(
            load_dag_file(TEMPLATES / "solver_verifier.yaml"),
            {"solver": {"rollout.name": "dataset", "rollout.n": 1}},
        ),
        (),
        "rollout.name=dataset in an interaction",
    ),
    "an estimate of the KL at tokens that nobody sampled": (
        lambda: load_dag_file(TEMPLATES / "sft.yaml"),
        (*SFT, "actor_rollout_ref.actor.use_kl_loss=true"),
        "kl_loss_type=low_var_kl with .*loss_mode=sft",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(what):
    dag, overrides, reason = REFUSED[what]
    with pytest.raises(UserError) as error:
        check_config(config(*overrides, "data.train_files=[a]", "data.val_files=[a]"))
        compiled(dag(), 2, *overrides)
    assert re.search(reason, str(error.value)), error.value


def test_a_run_on_given_responses_has_the_template_and_computes_nothing_that_it_does_not_read():
    cfg = config(*SFT)
    check_config(config(*SFT, "data.train_files=[a]"))
    plan = compiled(
        load_dag_file(TEMPLATES / "sft.yaml"), 2, *SFT, "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    )
    assert cfg.actor_rollout_ref.rollout.gives_data
    assert runs(plan) == ["demonstrations", "sft"] and not plan.validation and not plan.links


def test_the_number_of_responses_is_that_of_their_columns():
    with pytest.raises(UserError, match=r"rollout\.n=4 with data\.response_keys=\[response\]"):
        check_config(config(*GIVEN[:1], "data.train_files=[a]", "data.val_files=[a]"))


def test_the_rows_of_a_pair_lie_on_one_rank_also_where_rows_are_spread_by_cost():
    plan = compiled(load_dag_file(TEMPLATES / "dpo.yaml"), 2, *DPO, "trainer.balance_batch=true")
    assert runs(plan) == ["pairs", "reference", "dpo"]
    layout = plan.layouts[plan.run_of("dpo").source]
    assert layout.split == "group" and layout.num_shards == 2


def test_pairs_that_are_sampled_and_scored_are_trained_likewise():
    dag = warm_up()
    sampled = [dag.node(name) for name in ("rollout", "reward")]
    more = [
        NodeSpec("ref", "MODEL_TRAIN", "REFERENCE", dependencies=("rollout",)),
        NodeSpec("train", "MODEL_TRAIN", "ACTOR", dependencies=("reward", "ref")),
    ]
    keys = (f"{LOSS}=dpo", "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=gae")
    plan = compiled(dag_spec("online_dpo", [*sampled, *more]), 2, *keys)
    assert runs(plan) == ["rollout", "reward", "ref", "train"]
    assert plan.nodes["train"].op == "preference_train"


def test_the_plan_says_what_is_given_and_in_which_steps():
    keys = {"demonstrations": {f"{AGENT}.last_step": 15}, "rollout": {WINDOW: 16}}
    plan, configs = compile_plan(warm_up(**keys), config(), 2)
    text = report(plan, configs)
    assert (
        "agent 0: 8 prompts x 4 responses = 32 sequences a step" in text and "in steps 16 to the last" in text
    )
    assert "agent 1: 8 prompts x 1 response of the dataset = 8 sequences a step, in steps 1 to 15" in text
    assert "sft, of agent_0.actor:" in text
