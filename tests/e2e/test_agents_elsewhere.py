"""Agents that are outside programs, through the main job, asked for by the client of OpenAI."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures_tiny import make_tiny_model_dir
from job_harness import ROOT, Finished, Inputs, overrides, run_example, run_job

HERE = Path(__file__).parent
KEYS = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
TWO_MODELS = """
import openai

client = openai.OpenAI()
task = client.get("/task", cast_to=object)
said = {}
for model in ("solver", "verifier"):
    reply = client.chat.completions.create(model=model, messages=task["raw_prompt"])
    said[model] = reply.choices[0].message.content
rewards = {model: sum(letter.isdigit() for letter in text) / 8 for model, text in said.items()}
client.post("/reward", body={"rewards": rewards}, cast_to=object)
"""


LEAVES_AND_LISTENS = """
import json, sys, openai

client = openai.OpenAI()
task = client.get("/task", cast_to=object)
asked = {"model": "talker", "messages": task["raw_prompt"], "stream": True}


def deltas(stream):
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


with client.chat.completions.create(max_tokens=400, **asked) as stream:
    left = next(deltas(stream), "")
said = list(deltas(client.chat.completions.create(max_tokens=40, **asked)))
with open(sys.argv[1], "a") as file:
    print(json.dumps([left, said]), file=file)
client.post("/reward", body={"reward": sum(x.isdigit() for x in "".join(said)) / 40}, cast_to=object)
"""


def example(folder: Path, *keys: str, **options: Any) -> str:
    """Run examples/agents_elsewhere/run.sh; what it prints."""
    return run_example(folder, *keys, example="agents_elsewhere", **options)


def test_an_official_client_with_a_tool_trains(tmp_path, monkeypatch):
    importlib.import_module("examples.agents_elsewhere.prepare").write(tmp_path, 16)
    keys = ["actor_rollout_ref.rollout.n=8", "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    keys += ["trainer.val_before_train=False", "trainer.logger=[]", *KEYS]
    words = example(tmp_path, *keys, python="echo").split()
    monkeypatch.chdir(ROOT)
    finished = run_job(1, words[2:], deadline_s=180)
    assert finished.values("interaction/episodes") == [16, 16]
    assert finished.values("interaction/failed") == [0, 0]
    assert all(1 <= turns <= 2 for turns in finished.values("interaction/turns"))
    assert max(finished.values("actor/grad_norm")) > 0
    assert max(finished.values("actor/rollout_log_prob_diff_max")) < 1e-3


def test_a_stream_comes_as_it_is_said_and_one_that_is_left_leaves_no_trace(tmp_path):
    """The model's template knows of no reasoning, as those of most do."""
    (tmp_path / "agent.py").write_text(LEAVES_AND_LISTENS)
    dag = (ROOT / "examples" / "agents_elsewhere" / "shopper.yaml").read_text().replace("shopper", "talker")
    (tmp_path / "dag.yaml").write_text(dag)
    command = f"{sys.executable} {tmp_path / 'agent.py'} {tmp_path / 'said'}"
    keys = [
        f"dag.workflow_path={tmp_path / 'dag.yaml'}",
        f"dag.node_config.talker.serve.command={command}",
        "data.max_response_length=400",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.val_before_train=False",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.n=2",
        *("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"),
    ]
    finished = run_job(
        1, overrides(Inputs.make(tmp_path / "inputs"), tmp_path / "out", *keys), deadline_s=180
    )
    assert finished.values("interaction/episodes") == [2] and finished.values("interaction/failed") == [0]
    assert finished.values("interaction/turns") == [1]  # that of the stream that was left is none
    assert finished.values("actor/grad_norm")[0] > 0
    assert finished.values("actor/rollout_log_prob_diff_max")[0] < 1e-3
    heard = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert len(heard) == 2
    assert all(len(said) >= 3 for _, said in heard), heard  # of 8 tokens, of 16, and the rest
    assert all(left and "".join(said).startswith(left) for left, said in heard), heard


@pytest.mark.slow
def test_clients_from_outside_play_the_episodes_of_all_steps(tmp_path):
    keys = ["actor_rollout_ref.rollout.n=8", "trainer.total_training_steps=2", "trainer.test_freq=-1"]
    keys += ["trainer.val_before_train=False", "trainer.logger=[]", *KEYS]
    importlib.import_module("examples.agents_elsewhere.prepare").write(tmp_path, 16)
    example(tmp_path, *keys, script="listen.sh", timeout_s=400)
    finished = Finished.read(tmp_path / "run")
    assert finished.values("interaction/episodes") == [16, 16]
    assert finished.values("interaction/failed") == [0, 0]
    assert max(finished.values("actor/grad_norm")) > 0
    assert max(finished.values("actor/rollout_log_prob_diff_max")) < 1e-3
    assert (tmp_path / "run" / "listen" / "shopper_rank_0.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_agent_with_a_tool_learns_to_use_it(tmp_path):
    example(tmp_path, "trainer.total_training_steps=50", timeout_s=1700)
    worth = Finished.read(tmp_path / "run").values("val/interaction/env_reward")
    assert worth[0] < 0.5 and worth[-1] > 0.9, worth


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_is_learnt_and_each_framework_asks_it_alike(tmp_path):
    pytest.importorskip("agents", reason="pip install openai-agents")
    short, runs = ("trainer.total_training_steps=3", "trainer.test_freq=3"), {}
    for framework, keys in (("openai", ()), ("anthropic", short), ("openai_agents", short)):
        example(tmp_path / framework, framework, *keys, script="quickstart.sh", timeout_s=1700)
        runs[framework] = Finished.read(tmp_path / framework)
    whole = runs.pop("openai")
    found = whole.values("val/reward/mean")
    assert found[0] < 0.3 and found[-1] > 0.9, found
    assert max(whole.values("actor/rollout_log_prob_diff_max")) < 1e-3
    for finished in runs.values():
        for name in ("rollout/tokens", "reward/score", "actor/loss", "actor/grad_norm"):
            assert finished.values(name) == pytest.approx(whole.values(name)[:3], rel=1e-4), name


ADAPTERS = "{actor_rollout_ref.model.lora_rank: 2, rollout.agent.share_instance: 0}"


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["models", "adapters of one base"])
def test_a_command_with_two_model_names_trains_two_policies(tmp_path, adapters):
    inputs = Inputs.make(tmp_path / "inputs")
    other = make_tiny_model_dir(tmp_path / "other", family="llama", tie=False, vocab=80, init_std=0.2, seed=5)
    (tmp_path / "agent.py").write_text(TWO_MODELS)
    text, own = (HERE / "solver_verifier.yaml").read_text(), "{model.path: MODEL_B}"
    lines = text.replace(own, ADAPTERS if adapters else f"{{model.path: {other}}}").splitlines()
    dag = "\n".join(line for line in lines if "node_role: REWARD" not in line)
    for agent in ("solver", "verifier"):
        dag = dag.replace(f"[reward_{agent}]", "[verifier]")
    (tmp_path / "dag.yaml").write_text(dag)
    finished = run_job(
        1,
        overrides(
            inputs,
            tmp_path / "out",
            f"dag.workflow_path={tmp_path / 'dag.yaml'}",
            f"actor_rollout_ref.serve.command={sys.executable} {tmp_path / 'agent.py'}",
            "trainer.total_training_steps=1",
            *(["actor_rollout_ref.model.lora_rank=4"] if adapters else []),
            *KEYS,
        ),
        deadline_s=180,
    )
    assert finished.values("agent_0/interaction/failed") == [0]
    assert finished.values("agent_0/interaction/turns") == [2]
    for agent in (0, 1):
        assert finished.values(f"agent_{agent}/actor/grad_norm")[0] > 0
        assert finished.values(f"agent_{agent}/actor/rollout_log_prob_diff_max")[0] < 1e-3
