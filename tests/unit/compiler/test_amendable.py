"""What a run may be told while it goes on, and why the rest cannot be."""

import dataclasses
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from siirl.compiler.amendable import AMENDABLE, REFUSED, changed_keys, differences, problems, why_not
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import load_config
from siirl.config.root import all_keys
from siirl.observe.amendments import ASKED, TAKEN, Amendment, ask, put_back, take, taken

BASE = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu")
VERIFIER = "dag.workflow_path=dag_templates/solver_verifier.yaml"
ROLLOUT = "actor_rollout_ref.rollout"


def planned(*keys: str, ranks: int = 2):
    cfg = load_config([*BASE, *keys, f"trainer.n_gpus_per_node={ranks}"])
    return cfg, compile_plan(load_dag(cfg), cfg, ranks)[0]


def amended(before: tuple[str, ...], after: tuple[str, ...], ranks: int = 2) -> tuple[list[str], list[str]]:
    """(what differs, why it cannot be)."""
    (old, was), (new, now) = planned(*before), planned(*after, ranks=ranks)
    keys = changed_keys(old, new)
    why = [reason for name in keys if (reason := why_not(name))]
    return differences(was, now, keys), [*why, *problems(was, now)]


def test_each_pattern_fits_a_key_and_no_key_is_both_allowed_and_refused():
    names = [name for name, key in all_keys().items() if key.rule.status == "supported"]
    for patterns in (*AMENDABLE.values(), *REFUSED.values()):
        for pattern in patterns:
            assert any(fnmatchcase(name, pattern) for name in names), pattern
    assert why_not("data.train_batch_size") and why_not("trainer.seed") and not why_not("data.mixture")


ALLOWED = {
    "learning rate": ((), ("actor_rollout_ref.actor.optim.lr=0.5",), "optim.lr: 1e-06 -> 0.5"),
    "a lag": ((), (f"{ROLLOUT}.max_lag=1",), "staleness of at most 0 -> 1"),
    "a smaller lag": ((f"{ROLLOUT}.max_lag=2",), (f"{ROLLOUT}.max_lag=1",), "at most 2 -> 1"),
    "an agent is frozen": (
        (VERIFIER,),
        (VERIFIER, "dag.node_config.train_verifier.actor.freeze=true"),
        "node train_verifier: actor_rollout_ref.actor.freeze: as the run -> true",
    ),
    "a reference": ((), ("actor_rollout_ref.actor.use_kl_loss=true",), "model agent_0.ref: new"),
    "shares": (("data.mixture={a:1,b:1}",), ("data.mixture={a:2,b:1}",), "data.mixture"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_change_is_allowed_and_told(name):
    before, after, words = ALLOWED[name]
    lines, why = amended(before, after)
    assert not why and any(words in line for line in lines), (lines, why)


IMPOSSIBLE = {
    "fewer processes": ((), (), 1, "the run has 2 processes, and the new plan 1"),
    "a model that learns is gone": ((VERIFIER,), (), 2, "agent_1.actor would be gone"),
    "a new one": ((), (VERIFIER,), 2, "would be new, and the checkpoint has no weights of it"),
    "another order of speakers": ((VERIFIER,), (), 2, "who speaks after whom"),
    "prompts in flight": ((f"{ROLLOUT}.max_lag=1",), (), 2, "has prompts in flight, which would be lost"),
    "another layout": (
        (),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",),
        2,
        "model agent_0.actor would have another dims",
    ),
    "another batch": ((), ("data.train_batch_size=512",), 2, "optimizer steps, mini-batches"),
    "a node's own key": (
        (VERIFIER,),
        (VERIFIER, "dag.node_config.train_verifier.actor.ppo_epochs=2"),
        2,
        "node train_verifier: actor_rollout_ref.actor.ppo_epochs: optimizer steps",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_change_is_impossible_for_a_reason(name):
    before, after, ranks, words = IMPOSSIBLE[name]
    _, why = amended(before, after, ranks)
    assert any(words in line for line in why), why


def test_a_request_is_taken_once_and_only_if_it_is_this_users_alone(tmp_path: Path):
    asked = Amendment("1", "run", ["a=1"], ["a: 0 -> 1"], {}, "a: 1")
    assert not take(tmp_path) and taken(tmp_path, "run") is None
    ask(tmp_path, asked)
    assert take(tmp_path) and not take(tmp_path)
    put_back(tmp_path)
    assert (tmp_path / ASKED).exists() and take(tmp_path)
    assert taken(tmp_path, "run") == asked and taken(tmp_path, "run") is None
    ask(tmp_path, dataclasses.replace(asked, run_id="another"))
    assert take(tmp_path) and taken(tmp_path, "run") is None
    ask(tmp_path, asked)
    (tmp_path / ASKED).chmod(0o666)
    assert not take(tmp_path) and not (tmp_path / ASKED).exists() and not (tmp_path / TAKEN).exists()
