"""Runs on fewer machines than asked for: what MIN:MAX means, what is checked, and the job of so many."""

import json
from pathlib import Path

import pytest
from plan_cases import config

import siirl.launch.ray
from siirl.compiler.plan import Plan
from siirl.config import load_config, to_dict
from siirl.config.checks import check_config
from siirl.errors import ConfigError, PlacementError
from siirl.findings import Findings
from siirl.launch.devices import machine_of
from siirl.launch.job import Job
from siirl.launch.launched_devices import with_processes_there
from siirl.launch.ray import RayTrainer
from siirl.launch.scaled import Scaled
from siirl.launch.survey import survey, with_choices

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
TWO_EACH = ("trainer.n_gpus_per_node=2",)


def between(least: int, most: int, *keys: str):
    return config(f"trainer.nnodes={most}", f"trainer.min_nnodes={least}", *TWO_EACH, *keys)


@pytest.mark.parametrize(("written", "nnodes"), [("1:4", (4, 1)), ("'2:4'", (4, 2)), ("3", (3, None))])
def test_two_numbers_are_the_fewest_and_the_most_machines(written, nnodes):
    trainer = load_config([f"trainer.nnodes={written}"]).trainer
    assert (trainer.nnodes, trainer.min_nnodes) == nnodes


def test_what_is_no_range_is_refused():
    with pytest.raises(ConfigError, match=r"trainer.nnodes=1:x: expected an integer"):
        load_config(["trainer.nnodes=1:x"])
    with pytest.raises(ConfigError, match=r"nnodes=2 with trainer.min_nnodes=3: .*MIN:MAX"):
        check_config(load_config(["trainer.nnodes=3:2", "data.train_files=a", "data.val_files=b"]))


def test_the_check_compiles_the_plan_for_both_ends(tmp_path):
    """Of a workflow that places a node on ranks that only the larger one has."""
    workflow, reward = tmp_path / "workflow.yaml", "node_id: function_reward"
    text = (TEMPLATES / "grpo.yaml").read_text()
    workflow.write_text(text.replace(reward, f'{reward}\n    placement: "4-7"'))
    found = Findings()
    survey(between(1, 4, f"dag.workflow_path={workflow}"), found)
    with pytest.raises(PlacementError, match=r"nnodes=1:4: the run could not go on with 1 machine.*4-7"):
        found.close()
    survey(between(4, 4, f"dag.workflow_path={workflow}"), found := Findings())
    assert not len(found)


def test_the_job_of_fewer_machines_has_their_plan_and_that_of_all_comes_back():
    cfg = between(1, 4)
    seen = with_choices(survey(cfg, Findings()), machine_of(cfg, "ray"))
    job = Job(to_dict(cfg), seen.plan.to_json(), "/nowhere", 8, 2, extra={"kept": 1})
    scaled = Scaled(cfg)
    assert (scaled.fewest, scaled.most, scaled.job(job, 4)) == (1, 4, job)
    few = scaled.job(job, 1)
    assert (few.world_size, few.local_world_size, few.extra) == (2, 2, {"kept": 1})
    assert Plan.from_json(few.plan).world_size == 2 and few.config["trainer"]["nnodes"] == 1
    same = {name: value for name, value in few.config["trainer"].items() if "nnodes" not in name}
    assert same == {name: value for name, value in job.config["trainer"].items() if "nnodes" not in name}
    again = scaled.job(few, 4)
    assert json.loads(again.plan) == json.loads(job.plan) and again.world_size == 8


@pytest.mark.parametrize("awake", [True, False])
def test_engines_stay_awake_on_other_machines_where_they_do_at_the_start(tmp_path, awake):
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(model))
    path = f"actor_rollout_ref.model.path={tmp_path}"
    memory = f"trainer.device_memory_gib={80 if awake else 4}"
    keys = ("actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda", "data.max_response_length=256")
    cfg = between(1, 2, path, memory, *keys)
    seen = with_choices(survey(cfg, Findings()), machine_of(cfg, "ray"))
    job = Job(to_dict(cfg), seen.plan.to_json(), "/nowhere", 4, 2)
    scaled = Scaled(cfg)
    few = scaled.job(job, 1)
    key = "actor_rollout_ref.rollout.free_cache_engine"
    for each in (job, few, scaled.job(few, 2)):
        plan = Plan.from_json(each.plan)
        engines = [plan.nodes[model.node].overrides for model in plan.models.values() if model.is_rollout]
        assert [one.get(key) for one in engines] == [False if awake else None]
    assert json.loads(scaled.job(few, 2).plan) == json.loads(job.plan)


def test_without_a_range_there_is_one_job():
    cfg = config("trainer.nnodes=2", *TWO_EACH)
    job = Job(to_dict(cfg), "{}", "/nowhere", 4, 2)
    assert Scaled(cfg).fewest == Scaled(cfg).most == 2 and Scaled(cfg).job(job, 2) is job


@pytest.mark.parametrize(("there", "nnodes"), [(3, 3), (4, 4), (2, 2), (1, 4), (5, 4)])
def test_torchruns_machines_are_those_of_the_run_if_it_may_do_with_them(there, nnodes):
    env = {"RANK": "0", "WORLD_SIZE": str(2 * there), "LOCAL_WORLD_SIZE": "2"}
    assert with_processes_there(between(2, 4), env).trainer.nnodes == nnodes


def reserving(monkeypatch, tmp_path, there: int, *keys: str) -> tuple[RayTrainer, list[tuple[int, float]]]:
    """A trainer for 1 to 3 machines on a cluster of so many, and what it asks for: machines, patience."""
    cfg, asked = between(1, 3, f"trainer.output_dir={tmp_path}", *keys), []

    def reserve(need, wait_s, _await_one):
        asked.append((need.nnodes, wait_s))
        if need.nnodes > there:
            raise PlacementError(f"the Ray cluster is smaller than asked\n  for {need.nnodes}")
        return f"group of {need.nnodes}"

    monkeypatch.setattr(siirl.launch.ray, "reserve", reserve)
    monkeypatch.setattr("ray.util.remove_placement_group", lambda _group: None)
    job = Job(to_dict(cfg), survey(cfg, Findings()).plan.to_json(), str(tmp_path), 6, 2)
    return RayTrainer(job, cfg), asked


def test_on_ray_a_run_takes_as_many_machines_as_there_are(monkeypatch, tmp_path, capsys):
    trainer, asked = reserving(monkeypatch, tmp_path, 1)
    assert trainer._reserve() == "group of 1"
    assert asked == [(3, 30), (2, 5), (1, 5)] and trainer.job.world_size == 2
    assert Job.read(tmp_path / "job.json").world_size == 2
    told = "siirl: the run does with 1 of 3 machines (2 ranks): the Ray cluster is smaller than asked\n"
    assert capsys.readouterr().err == told


def test_on_ray_too_few_machines_end_the_run_with_all_that_was_wrong(monkeypatch, tmp_path):
    trainer, _ = reserving(monkeypatch, tmp_path, 0)
    with pytest.raises(PlacementError, match=r"for 3\n.*\n  for 2\n.*\n  for 1$"):
        trainer._reserve()
    assert trainer.job.world_size == 6


def test_numbers_of_machines_without_a_plan_are_passed_over(monkeypatch, tmp_path, capsys):
    trainer, asked = reserving(monkeypatch, tmp_path, 2)
    refused = trainer._scaled.job

    def job(of, nnodes):
        if nnodes == 2:
            raise ConfigError("a batch of 8 does not split\nover 4 ranks")
        return refused(of, nnodes)

    monkeypatch.setattr(trainer._scaled, "job", job)
    assert trainer._reserve() == "group of 1" and [nnodes for nnodes, _ in asked] == [3, 2, 1]
    assert "does with 1 of 3 machines (2 ranks): the Ray cluster is smaller" in capsys.readouterr().err
