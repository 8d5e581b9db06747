"""Interactions with a lag, by the command: what is trained, how old it is, and what a resume trains."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from dist_harness import WorkerFailure
from fixtures_tiny import make_tiny_model_dir, write_parquet
from job_harness import Finished, Inputs, audited, overrides, run_job, three_steps, work
from transformers import AutoModelForCausalLM

ROLLOUT = "actor_rollout_ref.rollout"
LAG = [f"{ROLLOUT}.max_lag=2", f"{ROLLOUT}.surplus=1.5"]
LONG_TAIL = [
    *("trainer.val_before_train=False", "trainer.test_freq=2", "trainer.total_training_steps=5"),
    *("data.max_prompt_length=64", "data.max_response_length=160", f"{ROLLOUT}.agent.max_turn_tokens=48"),
    *(f"{ROLLOUT}.n=2", f"{ROLLOUT}.stop_token_ids=[5,6,7,8]", "trainer.export_hf=False"),
]
CONSTANT = "actor_rollout_ref.actor.optim.lr=0"
GAME = '''
from pathlib import Path


class Dice:
    """Over by its seed, after up to three turns; BEGUN has a line for each that was begun."""

    replayable = True

    def reset(self, task, seed):
        with Path(BEGUN).open("a") as file:
            file.write(f"{seed}\\n")
        self.left = 1 + seed % 3
        return ""

    def step(self, actions):
        self.left -= 1
        return f"{self.left} to go", float(len(actions[0]) % 2), self.left == 0
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"), rows=40)


def agent(number: int, above: str, **rollout) -> list[dict]:
    """The nodes that train an agent behind its rollout, and this. above: the last node of its interaction."""

    def node(name: str, kind: str, role: str, *parents: str, **more) -> dict:
        who = {"agent_group": number, "node_id": f"{name}_{number}"}
        return {**who, "node_type": kind, "node_role": role, "dependencies": list(parents), **more}

    return [
        {**node("talk", "MODEL_INFERENCE", "ROLLOUT"), **rollout},
        node("reward", "COMPUTE", "REWARD", above),
        node("advantage", "COMPUTE", "ADVANTAGE", f"reward_{number}"),
        node("old", "MODEL_TRAIN", "ACTOR", f"talk_{number}", only_forward_compute=True),
        node("train", "MODEL_TRAIN", "ACTOR", f"advantage_{number}", f"old_{number}"),
    ]


def game(folder: Path) -> list[str]:
    """An agent in an environment, which it answers up to three times."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "game.py").write_text(GAME.replace("BEGUN", repr(str(folder / "begun"))))
    env = {
        "node_id": "game",
        "node_type": "ENV_INTERACT",
        "dependencies": ["talk_0"],
        "config": {"env_path": f"{folder / 'game.py'}:Dice", "obs_with_env": True, "rewards_with_env": True},
        "loop": {"to": "talk_0", "max_turns": 3},
    }
    talk, *rest = agent(0, "game")
    return workflow(folder, [talk, env, *rest])


def workflow(folder: Path, nodes: list[dict]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dag.yaml").write_text(yaml.safe_dump({"dag_id": "talking", "nodes": nodes}))
    return [f"dag.workflow_path={folder / 'dag.yaml'}", f"trainer.rollout_data_dir={folder / 'rows'}"]


def trained(folder: Path) -> Counter:
    """(prompt, what was said) of all episodes that were trained, over all steps."""
    found: Counter = Counter()
    for file in (folder / "rows").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            said = tuple((one["agent"], one["content"]) for one in row["messages"])
            found[row["sample_index"], said] += 1
    return found


def prompts_of(rows: Counter) -> Counter:
    return Counter(prompt for prompt, _ in rows.elements())


def compared(inputs, tmp_path, world_size, made, *more, steps=5, deadline_s=200) -> Finished:
    """The run with a lag, whose rows are those of the run without: the weights stay as they are."""
    rows, runs = {}, {}
    for name, lag in (("plain", []), ("lagging", LAG)):
        keys = [*made(tmp_path / name), *LONG_TAIL, *lag, CONSTANT, f"trainer.total_training_steps={steps}"]
        keys += more
        runs[name] = run_job(world_size, overrides(inputs, tmp_path / name / "out", *keys), deadline_s)
        rows[name] = trained(tmp_path / name)
    assert rows["plain"] == rows["lagging"] and rows["plain"].total() == steps * 8 * 2
    scores = [name for name in runs["lagging"].lines[1] if "val/" in name and "time" not in name]
    assert scores and all(runs["lagging"].values(name) == runs["plain"].values(name) for name in scores)
    return runs["lagging"]


@pytest.mark.slow
def test_under_constant_weights_a_lag_changes_the_order_and_nothing_else(inputs, tmp_path):
    run = compared(inputs, tmp_path, 1, game)
    assert 0 < max(run.values("rollout/staleness_max")) <= 2 and max(run.values("rollout/partial")) > 0
    ages = run.values("rollout/token_staleness")
    assert max(ages) > 0 and all(map(float.__le__, ages, run.values("rollout/staleness_max")))
    assert run.values("rollout/in_flight")[-1] == 0 and not any(run.values("rollout/restarted"))
    shares = [sum(line[f"rollout/staleness_{lag}"] for lag in range(3)) for line in run.lines]
    assert shares == pytest.approx([1] * 5)
    begun = [(tmp_path / name / "begun").read_text().split() for name in ("plain", "lagging")]
    assert sorted(begun[0]) == sorted(begun[1]), "no environment is begun again"


def cut(inputs, tmp_path, made, num_ranks, *more, run=three_steps, death="killed in step 4"):
    """A run, and the same that was killed after three steps and resumed, on any number of ranks.

    run, death: what each worker does when it is killed, and what is said of it.
    """
    whole_keys = [*made(tmp_path / "whole"), *LONG_TAIL, *LAG, *more]
    whole = run_job(num_ranks[0], overrides(inputs, tmp_path / "whole/out", *whole_keys), 300)
    keys = [*made(tmp_path / "cut"), *LONG_TAIL, *LAG, *more, "trainer.save_freq=1"]
    arguments = overrides(inputs, tmp_path / "cut/out", *keys)
    with pytest.raises(WorkerFailure, match=death):
        run_job(num_ranks[0], arguments, 300, run=run)
    resumed = run_job(num_ranks[1], arguments, 300)
    of = "agent_0/" if "agent_0/rollout/in_flight" in resumed.lines[-1] else ""
    assert max(whole.values(f"{of}rollout/staleness_max")) > 0
    assert 0 < max(resumed.values(f"{of}rollout/staleness_max")) <= 2
    assert resumed.values(f"{of}rollout/restarted")[3] == 0
    assert sum(resumed.values(f"{of}rollout/replayed")) > 0
    assert resumed.values(f"{of}rollout/in_flight")[-1] == 0
    return whole, resumed


@pytest.mark.slow
def test_episodes_of_a_run_that_is_killed_are_brought_back_on_other_ranks(inputs, tmp_path):
    cut(inputs, tmp_path, game, (2, 1), CONSTANT)
    assert trained(tmp_path / "cut") == trained(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_agents_that_are_killed_and_resumed_say_what_they_would_have_said(inputs, tmp_path):
    def talk(folder: Path) -> list[str]:
        nodes = [*agent(0, "talk_1"), *agent(1, "talk_1")]
        next(one for one in nodes if one["node_id"] == "talk_1")["dependencies"] = ["talk_0"]
        return workflow(folder, nodes)

    small = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    cut(inputs, tmp_path, talk, (1, 1), CONSTANT, "trainer.test_freq=-1", *small)
    assert trained(tmp_path / "cut") == trained(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_agents_whose_engines_are_on_other_ranks_go_on_too(inputs, tmp_path):
    other = make_tiny_model_dir(tmp_path / "other", family="llama", tie=False, vocab=80, init_std=0.2, seed=5)

    def apart(folder: Path) -> list[str]:
        """Agent 1, of another model, answers on a rank of its own."""
        nodes = [*agent(0, "talk_1"), *agent(1, "talk_1")]
        for one in nodes:
            if one["node_role"] in ("ROLLOUT", "ACTOR"):
                one["placement"] = f"{one['agent_group']}"
                one |= {"config": {"model.path": str(other)}} if one["agent_group"] else {}
            if one["node_id"] == "talk_1":
                one["dependencies"] = ["talk_0"]
        return workflow(folder, nodes)

    run = compared(inputs, tmp_path, 2, apart, "trainer.deadline_s=240", deadline_s=360)
    assert max(run.values("agent_0/rollout/staleness_max")) > 0
    assert max(run.values("agent_0/rollout/partial")) > 0
    assert run.values("agent_0/rollout/in_flight")[-1] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_on_vllm_go_on(inputs, tmp_path):
    make_tiny_model_dir(tmp_path / "model", init_std=0.2, head_dim=32)
    vllm = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=16", "trainer.deadline_s=240"]
    keys = [*game(tmp_path), *LONG_TAIL, *LAG, *vllm, f"actor_rollout_ref.model.path={tmp_path / 'model'}"]
    run = run_job(1, overrides(inputs, tmp_path / "out", *keys), deadline_s=400)
    assert 0 < max(run.values("rollout/staleness_max")) <= 2 and max(run.values("rollout/partial")) > 0
    assert run.values("rollout/in_flight")[-1] == 0
    assert trained(tmp_path).total() == 5 * 8 * 2
    assert min(run.values("actor/grad_norm")) > 0


TRAINS_LONG = """
import time
from pathlib import Path


def train_long(ctx, rows):
    began = time.time()
    time.sleep(2 if ctx.step < 3 else 0)
    with Path(SLEPT).open("a") as file:
        file.write(f"{began} {time.time()}\\n")
    return rows.select()
"""
TIMED = """

_step = Dice.step


def step(self, actions):
    import time

    time.sleep(0.2 * (self.left % 2))
    with Path(BEGUN + "_stepped").open("a") as file:
        file.write(f"{time.time()}\\n")
    return _step(self, actions)


Dice.step = step
"""


UNTIL_HEARD = """

def until_heard(began, turns):
    \"\"\"Let environments go on, and sleep for 2 s, and until so many were heard; a minute at most.\"\"\"
    time.sleep(0.5)
    Path(SLEPT + "_begun").touch()
    time.sleep(1.5)
    said = Path(SAID)
    while turns and time.time() < began + 60:
        if sum(float(at) > began + 0.3 for at in said.read_text().split()) >= turns:
            return
        time.sleep(0.1)
"""
HELD = """

import time

_reset, _timed = Dice.reset, Dice.step


def reset(self, task, seed):
    self.held = (task["extra_info"] or {}).get("place", 0) >= 8
    return _reset(self, task, seed)


def step_when_it_trains(self, actions):
    until = time.time() + 150
    while self.held and not Path(SLEPT + "_begun").exists() and time.time() < until:
        time.sleep(0.05)
    return _timed(self, actions)


Dice.reset, Dice.step = reset, step_when_it_trains
"""


def held(folder: Path, heard: str, turns: int) -> None:
    """Until rank 0 sleeps in training, episodes of later batches than the first wait with their second turns;
    in its first step it sleeps until so many lines more are in a file: whatever the machine's speed.

    The rows say their places: `placed`.
    """
    paths = {"SLEPT": repr(str(folder / "slept")), "SAID": repr(str(folder / heard))}
    slow = TRAINS_LONG.replace(
        "time.sleep(2 if ctx.step < 3 else 0)", f"until_heard(began, {turns}) if ctx.step < 2 else None"
    )
    game = (folder / "game.py").read_text()
    for name, text in (("trains_long.py", slow + UNTIL_HEARD), ("game.py", game + HELD)):
        for word, path in paths.items():
            text = text.replace(word, path)
        (folder / name).write_text(text)
    dag = yaml.safe_load((folder / "dag.yaml").read_text())
    next(one for one in dag["nodes"] if one["node_id"] == "game")["config"]["deadline_s"] = 200
    (folder / "dag.yaml").write_text(yaml.safe_dump(dag))


def placed(inputs, folder: Path) -> list[str]:
    """The keys of training rows that say their places, in their order."""
    rows = pq.read_table(inputs.train).to_pylist()
    rows = [row | {"extra_info": {"place": i}} for i, row in enumerate(rows)]
    write_parquet(folder / "train.parquet", rows)
    return [f"data.train_files={folder / 'train.parquet'}", "data.shuffle=false"]


def apart(folder: Path) -> list[str]:
    """The game, played on rank 1; rank 0 trains, and sleeps while it does."""
    game(folder)
    stepped = (folder / "game.py").read_text() + TIMED.replace("BEGUN", repr(str(folder / "begun")))
    (folder / "game.py").write_text(stepped)
    (folder / "trains_long.py").write_text(TRAINS_LONG.replace("SLEPT", repr(str(folder / "slept"))))
    dag = yaml.safe_load((folder / "dag.yaml").read_text())
    for node in dag["nodes"]:
        node["placement"] = "1" if node["node_id"] in ("talk_0", "game") else "0"
    dag["nodes"].append(
        {
            **{"node_id": "slow", "agent_group": 0, "node_type": "COMPUTE", "dependencies": ["advantage_0"]},
            **{"executable_ref": f"{folder / 'trains_long.py'}:train_long", "reads": ["advantage"]},
            **{"writes": [], "placement": "0"},
        }
    )
    return workflow(folder, dag["nodes"])


def heard_of(made: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """The same workflow, `held` until some step of an environment, where there is a lag."""

    def both(folder: Path) -> list[str]:
        keys = made(folder)
        held(folder, "begun_stepped", int(folder.name == "lagging"))
        return keys

    return both


def while_it_trained(folder: Path, what: str = "begun_stepped") -> int:
    """How often something has happened while rank 0 slept in training; by default a step of environments."""
    slept = [tuple(map(float, line.split())) for line in (folder / "slept").read_text().splitlines()]
    times = map(float, (folder / what).read_text().split())
    return sum(any(began + 0.3 < at < ended for began, ended in slept) for at in times)


def test_episodes_on_ranks_of_their_own_go_on_while_the_trainer_trains(inputs, tmp_path):
    """Turns, environments and weights go on; each prompt is trained once, within the bound."""
    keys = (*placed(inputs, tmp_path), "trainer.ledger=rows")
    run = compared(inputs, tmp_path, 2, heard_of(apart), *keys, steps=3)
    assert while_it_trained(tmp_path / "plain") == 0 < while_it_trained(tmp_path / "lagging")
    assert 0 < max(run.values("rollout/staleness_max")) <= 2
    assert run.values("rollout/in_flight")[-1] == 0 and not any(run.values("rollout/restarted"))
    begun = [(tmp_path / name / "begun").read_text().split() for name in ("plain", "lagging")]
    assert sorted(begun[0]) == sorted(begun[1]), "no environment is begun again"
    audited(run)


def answered_elsewhere(folder: Path) -> list[str]:
    """The game of two agents: agent 1, which acts, answers on rank 2. Rank 0 trains both."""
    apart(folder)
    nodes = yaml.safe_load((folder / "dag.yaml").read_text())["nodes"]
    second = [{"placement": "0"} | one for one in agent(1, "game")]
    second[0] |= {"placement": "2", "dependencies": ["talk_0"]}
    next(one for one in nodes if one["node_id"] == "game")["dependencies"] = ["talk_1"]
    return workflow(folder, [*nodes, *second])


@pytest.mark.slow
@pytest.mark.timeout(1100)
def test_episodes_go_on_while_the_trainer_trains_where_a_rank_plays_and_another_answers(inputs, tmp_path):
    """Neither waits for the other: turns of both agents are said while rank 0 sleeps."""
    keys = (*placed(inputs, tmp_path), "trainer.ledger=rows")
    run = compared(inputs, tmp_path, 3, heard_of(answered_elsewhere), *keys, deadline_s=500)
    assert while_it_trained(tmp_path / "plain") == 0 < while_it_trained(tmp_path / "lagging")
    for of in ("agent_0", "agent_1"):
        assert 0 < max(run.values(f"{of}/rollout/token_staleness")) <= 2
    assert 0 < max(run.values("agent_0/rollout/staleness_max")) <= 2
    assert run.values("agent_0/rollout/in_flight")[-1] == 0
    assert not any(run.values("agent_0/rollout/restarted"))
    begun = [(tmp_path / name / "begun").read_text().split() for name in ("plain", "lagging")]
    assert sorted(begun[0]) == sorted(begun[1]), "no environment is begun again"
    audited(run)


READ = ("prompt_ids", "prompt_length", "response_ids", "response_mask", "weight_version", "rollout_log_prob")
NOTES = """
import time
from pathlib import Path

import torch


def post_process(text, episode):
    with Path(FOLDER, "said").open("a") as file:
        file.write(f"{time.time()}\\n")
    return text


def keep(ctx, rows):
    torch.save({name: rows[name] for name in READ}, Path(FOLDER, f"step_{ctx.step}.rows"))
    return rows.select()
"""


def answered_by_vllm(folder: Path) -> list[str]:
    """As answered_elsewhere, and vLLM samples agent 1: its turns note when they are heard; rows are kept."""
    answered_elsewhere(folder)
    held(folder, "said", 9)
    (folder / "notes.py").write_text(f"FOLDER, READ = {str(folder)!r}, {READ!r}\n{NOTES}")
    nodes = yaml.safe_load((folder / "dag.yaml").read_text())["nodes"]
    second = next(one for one in nodes if one["node_id"] == "talk_1")
    second["config"] = {"rollout.name": "vllm", "rollout.max_num_seqs": 16}
    second["agent_options"] = {"process_path": str(folder / "notes.py"), "post_process_kwargs": {}}
    keeps = {
        **{"node_id": "keep", "agent_group": 1, "node_type": "COMPUTE", "dependencies": ["game"]},
        **{"executable_ref": f"{folder / 'notes.py'}:keep", "reads": list(READ), "writes": []},
    }
    return workflow(folder, [*nodes, keeps | {"placement": "0"}])


def keeping_weights(rank, world_size, arguments, output):
    """A worker; rank 0 keeps the weights of agent 1 that each sync brings."""
    from siirl.dag_worker.worker import DAGWorker

    sync = DAGWorker.sync_weights

    def kept(worker, ins, step, validate=False):
        if rank == 0 and ins.link == "agent_1.weights":
            engine = worker.train_engines["agent_1.actor"]
            weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
            torch.save(weights, f"{output}.weights_{engine.version}")
        return sync(worker, ins, step, validate)

    DAGWorker.sync_weights = kept
    work(rank, world_size, arguments, output)


def log_prob_errors(model: Path, folder: Path) -> dict[int, float]:
    """Version -> how far the log-probs of the tokens that agent 1 sampled under it are from transformers'."""
    found: dict[int, float] = {}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = [
        row for file in sorted(folder.glob("*.rows")) for row in zip(*torch.load(file).values(), strict=True)
    ]
    for file in folder.glob("out.weights_*"):
        version = int(file.name.rpartition("_")[2])
        policy.load_state_dict(torch.load(file), strict=False)
        for prompt, length, response, mask, versions, told in rows:
            sampled = mask & (versions == version)
            if sampled.any():
                ids = torch.cat([prompt[len(prompt) - length :], response]).long()
                with torch.no_grad():
                    log_probs = policy(ids[None]).logits[0, length - 1 : -1].log_softmax(-1)
                ours = log_probs.gather(-1, response[:, None].long())[:, 0]
                found[version] = max(found.get(version, 0.0), float((ours - told)[sampled].abs().max()))
    assert len(rows) == 5 * 8 * 2
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_answers_another_rank_while_the_trainer_trains(inputs, tmp_path):
    """Its service is kept over steps, validations and new weights; each token is of the version it names."""
    model = make_tiny_model_dir(tmp_path / "model", init_std=0.2, head_dim=32)
    keys = [*answered_by_vllm(tmp_path), *LONG_TAIL, *LAG, f"actor_rollout_ref.model.path={model}"]
    keys += placed(inputs, tmp_path)
    keys += ["trainer.deadline_s=240", "trainer.ledger=rows"]
    run = run_job(3, overrides(inputs, tmp_path / "out", *keys), 600, run=keeping_weights)
    assert while_it_trained(tmp_path, "said") > 8, "turns of vLLM while rank 0 slept in training"
    assert max(run.values("agent_0/rollout/partial")) > 0, "weights come within episodes"
    assert 0 < max(run.values("agent_1/rollout/token_staleness")) <= 2
    assert 0 < max(run.values("agent_0/rollout/staleness_max")) <= 2
    assert run.values("agent_0/rollout/in_flight")[-1] == 0
    errors = log_prob_errors(model, tmp_path)
    assert len(errors) >= 3 and max(errors.values()) < 1e-4, errors
    assert min(run.values("agent_1/actor/grad_norm")) > 0
    audited(run)


def rank_2_dies(rank, world_size, arguments, output):
    """A worker; that of rank 2 is killed in the fourth step, in which it only answers."""
    from siirl.dag_worker.training import Training

    train_step = Training.train_step

    def dies(training):
        if training.step == 4 and rank == 2:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return train_step(training)

    Training.train_step = dies
    work(rank, world_size, arguments, output)


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_episodes_survive_the_death_of_a_rank_that_only_answers(inputs, tmp_path):
    keys = (CONSTANT, "trainer.test_freq=-1")
    cut(inputs, tmp_path, answered_elsewhere, (3, 3), *keys, run=rank_2_dies, death="exit code -9")
    assert trained(tmp_path / "cut") == trained(tmp_path / "whole")
