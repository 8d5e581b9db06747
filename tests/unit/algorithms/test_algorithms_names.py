"""What schema, checks, op table, registries and documentation say of an algorithm agree."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from plan_cases import compiled, config, template_plan

from siirl.algorithms import turns
from siirl.algorithms.advantages import ADVANTAGES, compute_advantage
from siirl.algorithms.kl import KL_ESTIMATORS
from siirl.algorithms.policy_losses import POLICY_LOSSES
from siirl.algorithms.token_picks import pick_tokens
from siirl.compiler.compile import TEMPLATES, template_of
from siirl.compiler.plan_instructions import Run
from siirl.config import effect_warnings, load_config, with_overrides
from siirl.config.algorithm_table import AGGREGATIONS, ESTIMATORS, LOSSES
from siirl.config.checks import check_config
from siirl.config.effects import LOSS_KEYS
from siirl.config.root import all_keys
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import ConfigError, DagError, NotSupportedError

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("algorithms.md", "algorithms_reference.md"))
ACTOR = "actor_rollout_ref.actor"
ADVANTAGE, LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"


def test_the_table_has_the_functions_and_what_they_take():
    assert list(all_keys()[ADVANTAGE].rule.choices) == list(ESTIMATORS)
    assert list(all_keys()[LOSS].rule.choices) == list(LOSSES)
    by_token = {name: row for name, row in LOSSES.items() if not (row.pairs or row.distills)}
    assert set(ESTIMATORS) == set(ADVANTAGES.names()) and set(by_token) == set(POLICY_LOSSES.names())
    for name, row in ESTIMATORS.items():
        parameters = inspect.signature(ADVANTAGES.get(name).fn).parameters.values()
        fields = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
        assert ADVANTAGES.get(name).needs == row.reads and len(fields) == len(row.reads), name
        options = {
            item.name for item in parameters if item.kind is item.KEYWORD_ONLY and item.default is item.empty
        }
        assert options == set(row.keys), name
        assert all(f"algorithm.{key}" in all_keys() for key in row.keys), name
    for name, row in by_token.items():
        options = POLICY_LOSSES.get(name).options
        assert ("picked_BT" in options) == row.picks_tokens, name
        assert {*options, *picking_keys(name)} - {"picked_BT"} == set(row.keys), name
        assert row.paper_mode in AGGREGATIONS and row.instead.keys() | row.instead.values() <= actor_keys()
    for key in LOSS_KEYS:
        assert {row.takes(key) for row in LOSSES.values()} == {True, False}, key


def actor_keys() -> set[str]:
    """Keys of actor and actor.policy_loss."""
    names = (name.removeprefix(f"{ACTOR}.").removeprefix("policy_loss.") for name in all_keys())
    return {name for name in names if "." not in name}


def picking_keys(name: str) -> set[str]:
    """The keys that are asked for where a loss picks its tokens."""
    asked: set[str] = set()

    class Options(dict):
        def __getitem__(self, key):
            asked.add(key)
            return 0.5

    if LOSSES[name].picks_tokens:
        ones = torch.ones(1, 4)
        pick_tokens(name, ones, ones, ones.bool(), ones, Options())
    return asked


def test_the_page_has_every_name():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    first_cells = " ".join(row.split("|")[1] for row in rows)
    named = set(re.findall(r"`([^`]+)`", first_cells))
    for names in (ADVANTAGES.names(), LOSSES, AGGREGATIONS, KL_ESTIMATORS, ["full"]):
        assert set(names) <= named


def table() -> list[list[str]]:
    """The cells of each row of the page's first table."""
    head = PAGE.index("| name | keys | template")
    rows = PAGE[head : PAGE.index("\n\n", head)].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def full_name(key: str) -> str:
    """A key by its end, as the page writes it; those of the critic are written in full."""
    inside, _, entry = key.rpartition(".")
    for name, known in all_keys().items():
        if f".{name}".endswith(f".{key}") and (name == key or not name.startswith("critic.")):
            return name
        if inside and known.is_map and f".{name}".endswith(f".{inside}"):
            return f"{name}.{entry}"
    raise AssertionError(f"{key} is no key")


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_a_row_of_the_page_is_a_run_with_its_template(row):
    words = [word for word in re.findall(r"`([^`]+)`", row[1]) if "*" not in word and "..." not in word]
    known = (*ADVANTAGES.names(), *LOSSES)
    pairs = [word.partition("=") for word in words if word not in known]
    overrides = [f"{full_name(name)}={value}" for name, _, value in pairs if value]
    if "as PPO" in row[1]:
        overrides.append(f"{ADVANTAGE}=gae")
    assert all(full_name(name) for name, _, _ in pairs)
    cfg = config(*overrides)
    check_config(with_overrides(cfg, {"data.train_files": ["a"], "data.val_files": ["a"]}))
    assert template_of(cfg) == row[2].strip("`")
    template_plan(2, *overrides)


NEEDS = dict.fromkeys(("gae", turns.gae_marft.__name__), "no node trains the critic of agent 0")
NEEDS["remax"] = "baseline_score"


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_the_check_knows_what_an_estimator_needs_of_the_workflow(name):
    """In GRPO's workflow, which has no critic and no greedy baseline; and with one response a prompt."""
    dag = load_dag_file(TEMPLATES / "grpo.yaml")
    if name in NEEDS:
        with pytest.raises(DagError, match=NEEDS[name]):
            compiled(dag, 2, f"{ADVANTAGE}={name}")
    else:
        compiled(dag, 2, f"{ADVANTAGE}={name}")
    data = ("data.train_files=[a]", "data.val_files=[a]")
    parts = ["algorithm.gdpo_rewards={score:1}"] if name == "gdpo" else []
    single = config(f"{ADVANTAGE}={name}", "actor_rollout_ref.rollout.n=1", *data, *parts)
    if "group_id" in ADVANTAGES.get(name).needs:
        with pytest.raises(ConfigError, match=r"rollout\.n=1 with .*Set actor_rollout_ref\.rollout\.n=2"):
            check_config(single)
    else:
        check_config(single)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_old_log_probs_are_computed_where_a_loss_needs_them(name):
    """With one optimizer step a batch only the losses that pick tokens before it need the pass."""
    plan = compiled(load_dag_file(TEMPLATES / "grpo.yaml"), 2, f"{LOSS}={name}")
    assert ("actor_old_log_prob" in plan.nodes) == LOSSES[name].picks_tokens


def rewards_at_the_end() -> dict[str, torch.Tensor]:
    """What estimators read: rows of one turn, each with a reward at its last token."""
    rows, width = 6, 4
    mask = torch.ones(rows, width, dtype=torch.bool)
    return {
        "reward": torch.nn.functional.pad(torch.tensor([[1.0], [0], [0.5], [1], [0], [0]]), (width - 1, 0)),
        "response_mask": mask,
        "group_id": torch.arange(rows) // 3,
        "value": torch.linspace(0, 1, rows * width).view(rows, width) ** 2,
        "baseline_score": torch.zeros(rows),
        "old_log_prob": -(torch.linspace(0.1, 2, rows * width).view(rows, width) ** 2),
        "old_prob_square": torch.full((rows, width), 0.7),
        "turn_id": torch.arange(width).div(2, rounding_mode="floor").expand(rows, width),
        "episode_id": torch.arange(rows),
        "other_turns": turns.NO_TURNS,
        "reward_part": torch.tensor([[1.0], [0], [0.5], [1], [0], [0]]),
    }


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_gmpo_is_told_of_where_the_advantages_of_a_row_differ(name, gamma):
    """And only there: what the check says of an estimator is what the estimator does."""
    options = {"norm_adv_by_std_in_grpo": True, "gamma": gamma, "lam": 0.9}
    options |= {"weight_factor_in_cpgd": "STD_weight", "gdpo_rewards": {"score": 1.0}}
    found = compute_advantage(name, rewards_at_the_end(), options).advantage_BT
    differ = bool((found != found[:, :1]).any())
    for loss in POLICY_LOSSES.names():
        cfg = config(f"{LOSS}={loss}", f"{ADVANTAGE}={name}", f"algorithm.gamma={gamma}")
        said = [line for line in effect_warnings(cfg) if "mean of a row's advantages" in line]
        assert len(said) == (differ and loss in ("gmpo", "geo_mean")), (loss, said)


@pytest.mark.parametrize(
    ("estimator", "keys"),
    [
        ("reinforce_plus_plus", ["algorithm.use_kl_in_reward=true"]),
        ("remax", ["algorithm.use_kl_in_reward=true"]),
        ("grpo", ["algorithm.credit.group_by=[task,turn]"]),
        ("grpo", ["algorithm.credit.equal_weight=turn"]),
    ],
)
def test_gmpo_is_told_of_credit_by_token_and_turn(estimator, keys):
    keys = [f"{ADVANTAGE}={estimator}", f"{LOSS}=gmpo", *keys]
    assert any("mean of a row's advantages" in line for line in effect_warnings(config(*keys)))
    assert not any("mean of a row's" in line for line in effect_warnings(config(*keys, f"{LOSS}=gspo")))


def test_the_plan_has_what_masks_and_means_over_prompts_read():
    """The entropy before the step needs the pass of old log-probs of all rows, also with one mini-batch."""
    dag = load_dag_file(TEMPLATES / "grpo.yaml")
    for mini in (1024, 256):
        keys = (f"{ACTOR}.ppo_mini_batch_size={mini}", "data.train_batch_size=1024")
        picks = compiled(dag, 2, *keys, f"{ACTOR}.top_entropy_quantile=0.2")
        assert picks.nodes["actor_old_log_prob"].op == "old_log_prob"
        assert {"old_entropy", "old_log_prob"} <= read_by_training(picks)
        prompts = compiled(dag, 2, *keys, f"{ACTOR}.loss_agg_mode=prompt-mean", f"{ACTOR}.opsm_delta=0.1")
        assert "group_id" in read_by_training(prompts) and "rollout_log_prob" in read_by_training(prompts)
        assert not {"old_entropy", "group_id"} & read_by_training(compiled(dag, 2, *keys))


def test_the_plan_has_what_the_optimal_token_baseline_reads():
    """The sums of squares come with the old log-probs, of all rows, also with one mini-batch."""
    dag = load_dag_file(TEMPLATES / "grpo.yaml")
    for mini in (1024, 256):
        keys = (f"{ACTOR}.ppo_mini_batch_size={mini}", "data.train_batch_size=1024")
        plan = compiled(dag, 2, *keys, f"{ADVANTAGE}=optimal_token_baseline")
        assert plan.nodes["actor_old_log_prob"].op == "old_log_prob"
        (run,) = [x for x in plan.instructions if isinstance(x, Run) and x.node == "calculate_advantages"]
        assert {"old_log_prob", "old_prob_square"} <= {key.name for key in run.reads}
        without = compiled(dag, 2, *keys)
        assert "old_prob_square" not in without.to_json()


def test_a_baseline_of_tokens_and_groups_of_turns_do_not_go_together():
    dag = load_dag_file(TEMPLATES / "solver_verifier.yaml")
    keys = (f"{ADVANTAGE}=optimal_token_baseline", "algorithm.credit.group_by=[task,agent,turn]")
    with pytest.raises(DagError, match=r"baseline for each token, and .*has turn"):
        compiled(dag, 2, *keys)


def read_by_training(plan) -> set[str]:
    (run,) = [ins for ins in plan.instructions if isinstance(ins, Run) and ins.node == "actor_train"]
    return {key.name for key in run.reads}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["gdpo", "gdpo_rewards={}"], r"gdpo_rewards is empty .* Set NAME: WEIGHT"),
        (["gdpo", "gdpo_rewards={score: much}"], r"gdpo_rewards.score=much: expected a weight"),
        (["gdpo", "gdpo_rewards={score: 1}", "use_kl_in_reward=true"], r"use_kl_in_reward=true with .*gdpo"),
        (["maxrl", "use_kl_in_reward=true"], r"success rate.* Set algorithm.use_kl_in_reward=false"),
        (["maxrl", "~overlong_buffer"], r"success rate.* Set reward_model.overlong_buffer.enable=false"),
        (["grpo", "credit.equal_weight=row", "~prompts"], "both say what has the same share"),
    ],
)
def test_rewards_that_an_estimator_cannot_take_are_refused(keys, words):
    short = {"~overlong_buffer": "reward_model.overlong_buffer.enable=true"}
    short["~prompts"] = f"{ACTOR}.loss_agg_mode=prompt-mean"
    more = [short.get(key, f"algorithm.{key}") for key in keys[1:]]
    with pytest.raises(ConfigError, match=words):
        check_config(config(f"{ADVANTAGE}={keys[0]}", *more, "data.train_files=[a]", "data.val_files=[a]"))


@pytest.mark.parametrize("kl", [None, "k3", "full", "full+"])
def test_the_reference_gives_what_the_kl_of_the_loss_needs(kl):
    keys = [] if kl is None else [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={kl}"]
    plan = compiled(load_dag_file(TEMPLATES / "grpo.yaml"), 2, *keys)
    runs = {ins.node: ins for ins in plan.instructions if isinstance(ins, Run)}
    assert ("reference_log_prob" in runs) == (kl is not None)
    names = {key.name for key in runs["actor_train"].reads if key.name.startswith("ref_")}
    assert names == {None: set(), "k3": {"ref_log_prob"}}.get(kl, {"ref_log_prob", "ref_hidden"})


def test_the_full_kl_in_the_reward_is_refused_with_what_there_is():
    with pytest.raises(NotSupportedError, match=r"algorithm.kl_penalty=full.*actor.kl_loss_type=full"):
        load_config(["algorithm.kl_penalty=full"])
