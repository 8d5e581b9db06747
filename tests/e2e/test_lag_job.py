"""Rollouts with a lag, by the command: what is trained, how old it is, and that a resume loses nothing."""

import json
from collections import Counter

import pytest
import torch
import yaml
from dist_harness import WorkerFailure
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished, Inputs, audited, overrides, run_job, three_steps
from safetensors.torch import load_file

from siirl.compiler.compile import TEMPLATES

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=64", "trainer.deadline_s=100"]
LONG_TAIL = [
    *("trainer.val_before_train=False", "trainer.test_freq=2", "trainer.total_training_steps=5"),
    *("data.max_response_length=96", f"{ROLLOUT}.n=2", f"{ROLLOUT}.stop_token_ids=[5,6,7,8]"),
]
LAG = [f"{ROLLOUT}.max_lag=2", f"{ROLLOUT}.surplus=1.5"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"), rows=40)


def recorded(folder):
    """(prompt, response) of all rows that were trained, over all steps."""
    rows = Counter()
    for file in folder.rglob("*.safetensors"):
        columns = load_file(file)
        prompts, responses = (
            columns[f"{name}_ids"].split(columns[f"{name}_length"].tolist())
            for name in ("prompt", "response")
        )
        for prompt, response in zip(prompts, responses, strict=True):
            rows[tuple(prompt.tolist()), tuple(response.tolist())] += 1
    return rows


def versions_of(folder):
    """Of each step, the versions of the tokens that were trained, and how many versions each row has."""
    found = {}
    for file in folder.rglob("*.safetensors"):
        columns = load_file(file)
        rows = columns["weight_version"].split(columns["response_length"].tolist())
        assert all(row.tolist() == sorted(row.tolist()) for row in rows)
        found.setdefault(int(file.parent.name.removeprefix("step_")), []).extend(rows)
    return {step: (torch.cat(rows), [len(row.unique()) for row in rows]) for step, rows in found.items()}


def test_under_constant_weights_a_lag_changes_the_order_and_nothing_else(inputs, tmp_path):
    rows, runs = {}, {}
    for name, more in (("plain", []), ("lagging", [*LAG, "trainer.ledger=rows"])):
        constant = [*LONG_TAIL, *more, "actor_rollout_ref.actor.optim.lr=0", "trainer.export_hf=False"]
        constant.append("trainer.total_training_steps=4")
        dump = f"trainer.dump_rollouts_dir={tmp_path / name / 'dump'}"
        runs[name] = run_job(2, overrides(inputs, tmp_path / name / "out", *constant, dump))
        rows[name] = recorded(tmp_path / name / "dump")
    assert rows["plain"] == rows["lagging"] and rows["plain"].total() == 4 * 8 * 2
    lagging = runs["lagging"]
    audited(lagging)
    versions = {name: versions_of(tmp_path / name / "dump") for name in runs}
    step_of = {}
    for step, (of_tokens, of_rows) in versions["plain"].items():
        assert set(of_rows) == {1} and len(of_tokens.unique()) == 1, "without a lag all are of one version"
        step_of[int(of_tokens[0])] = step
    assert len(step_of) == 4
    for line, (step, (of_tokens, of_rows)) in zip(
        lagging.lines, sorted(versions["lagging"].items()), strict=True
    ):
        ages = [step - step_of[version] for version in of_tokens.tolist()]
        assert line["rollout/token_staleness"] == pytest.approx(sum(ages) / len(ages))
        assert line["rollout/staleness_max"] == max(ages)
        assert line["rollout/partial"] == sum(n > 1 for n in of_rows) / len(of_rows)
    assert max(lagging.values("rollout/staleness_max")) == 2 and max(lagging.values("rollout/partial")) > 0
    assert lagging.values("rollout/in_flight")[-1] == 0 and not any(lagging.values("rollout/restarted"))
    shares = [sum(line[f"rollout/staleness_{lag}"] for lag in range(3)) for line in lagging.lines]
    assert shares == pytest.approx([1] * 4)
    scores = [name for name in lagging.lines[1] if name.startswith("val/")]
    assert scores and all(lagging.values(name) == runs["plain"].values(name) for name in scores)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_run_that_goes_on_from_a_checkpoint_trains_every_prompt_once(inputs, whole, tmp_path, ranks):
    run, prompts = whole
    settings = [*LONG_TAIL, *LAG, "trainer.save_freq=1", f"trainer.dump_rollouts_dir={tmp_path / 'dump'}"]
    arguments = overrides(inputs, tmp_path / "out", *settings)
    with pytest.raises(WorkerFailure, match="killed in step 4"):
        run_job(2, arguments, run=three_steps)
    assert len(Finished.read(tmp_path / "out").lines) == 3
    resumed = run_job(ranks, arguments)
    assert prompts_of(recorded(tmp_path / "dump")) == prompts
    assert max(resumed.values("rollout/staleness_max")) <= 2
    weights = resumed.values("actor/rollout_correction/weight")
    assert len(weights) == 5 and all(0 < weight <= 2 for weight in weights)
    if ranks == 2:
        ours, theirs = resumed.weights(), run.weights()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_too_old_is_dropped_and_replaced_also_after_a_kill(tmp_path):
    """Killed and resumed it drops, loads and trains what the uninterrupted run does, bit for bit."""
    made, runs, rows = Inputs.make(tmp_path / "inputs", rows=120), {}, {}
    keys = [*LONG_TAIL, f"{ROLLOUT}.max_lag=1", f"{ROLLOUT}.stale=drop", "trainer.total_training_steps=7"]
    keys += ["trainer.test_freq=-1", "trainer.deadline_s=240"]
    for name, more in (("whole", []), ("killed", ["trainer.save_freq=1"])):
        dump = f"trainer.dump_rollouts_dir={tmp_path / name / 'dump'}"
        texts = f"trainer.rollout_data_dir={tmp_path / name / 'texts'}"
        arguments = overrides(made, tmp_path / name / "out", *keys, *more, dump, texts)
        if name == "killed":
            with pytest.raises(WorkerFailure, match="killed in step 4"):
                run_job(2, arguments, deadline_s=300, run=three_steps)
        runs[name] = run_job(2, arguments, deadline_s=300)
        rows[name] = recorded(tmp_path / name / "dump")
    lines = [
        line for file in (tmp_path / "whole/texts").glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    trained = Counter(json.loads(line)["sample_index"] for line in lines)
    assert set(trained.values()) == {2} and len(trained) == 7 * 8, "n rows of each prompt, no prompt twice"
    dropped = runs["whole"].values("rollout/dropped")
    assert (
        sum(dropped[:3]) > 0
        and sum(dropped[3:]) > 0
        and max(runs["whole"].values("rollout/staleness_max")) == 1
    )
    assert runs["killed"].values("rollout/dropped") == dropped and rows["killed"] == rows["whole"]
    ours, theirs = (runs[name].weights() for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["remax", "gae"])
def test_what_is_computed_of_prompts_and_a_critic_go_with_a_lag(inputs, tmp_path, estimator):
    keys = [*LONG_TAIL, *LAG, f"algorithm.adv_estimator={estimator}"]
    run = run_job(2, overrides(inputs, tmp_path / "out", *keys))
    assert max(run.values("rollout/staleness_max")) == 2 and run.values("rollout/in_flight")[-1] == 0
    norms = run.values("actor/grad_norm")
    assert len(norms) == 5 and all(0 < norm < float("inf") for norm in norms)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A run of two ranks, and the prompts that it trained."""
    folder = tmp_path_factory.mktemp("whole")
    dump = f"trainer.dump_rollouts_dir={folder / 'dump'}"
    run = run_job(2, overrides(inputs, folder / "out", *LONG_TAIL, *LAG, dump))
    return run, prompts_of(recorded(folder / "dump"))


def prompts_of(rows):
    return Counter(prompt for prompt, _ in rows.elements())


TRAINS_LONG = """
import time

def train_long(ctx, rows):
    if ctx.step == 2 and ctx.cfg.actor_rollout_ref.rollout.max_lag:
        time.sleep(10)
    return rows.select()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_on_a_rank_of_its_own_decodes_on_while_the_trainer_trains(tmp_path):
    """Weights arrive, prompts are validated and checkpoints written while its requests run."""
    made = Inputs.make(tmp_path / "inputs", rows=40)
    make_tiny_model_dir(made.model, init_std=0.2, head_dim=32)  # vLLM's CPU attention has no smaller heads
    dag = yaml.safe_load((TEMPLATES / "grpo.yaml").read_text())
    for node in dag["nodes"]:
        node["placement"] = "1" if node["node_role"] == "ROLLOUT" else "0"
    (tmp_path / "trains_long.py").write_text(TRAINS_LONG)
    slow = {"node_id": "slow", "node_type": "COMPUTE", "dependencies": ["calculate_advantages"]}
    code = {
        "executable_ref": f"{tmp_path / 'trains_long.py'}:train_long",
        "reads": ["advantage"],
        "writes": [],
    }
    dag["nodes"].append(slow | code | {"placement": "0"})
    (tmp_path / "apart.yaml").write_text(yaml.safe_dump(dag))
    apart = [*LONG_TAIL, f"dag.workflow_path={tmp_path / 'apart.yaml'}", *VLLM]
    rows, runs = {}, {}
    for name, more in (("plain", []), ("lagging", [*LAG, "trainer.save_freq=2"])):
        keys = [*apart, *more, "actor_rollout_ref.actor.optim.lr=0", "trainer.export_hf=False"]
        dump = f"trainer.dump_rollouts_dir={tmp_path / name / 'dump'}"
        runs[name] = run_job(2, overrides(made, tmp_path / name / "out", *keys, dump), deadline_s=140)
        rows[name] = recorded(tmp_path / name / "dump")
    assert rows["plain"] == rows["lagging"] and rows["plain"].total() == 5 * 8 * 2
    lagging = runs["lagging"]
    assert (
        0 < max(lagging.values("rollout/staleness_max")) <= 2 and lagging.values("rollout/in_flight")[-1] == 0
    )
    newest = {name: int(versions_of(tmp_path / name / "dump")[3][0].max()) for name in runs}
    assert newest["lagging"] < newest["plain"], "the batch of step 3 was complete before its weights came"
    waited = {line["step"]: line["perf/idle_s_max"] for line in lagging.lines}
    assert max(waited[2], waited[3]) > 9, "the rollout's rank waits for the trainer's, which sleeps"
    assert max(lagging.values("actor/rollout_log_prob_diff")) < 1e-4
    scores = [name for name in lagging.lines[1] if name.startswith("val/")]
    assert scores and all(lagging.values(name) == runs["plain"].values(name) for name in scores)
