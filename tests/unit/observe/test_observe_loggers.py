"""wandb, mlflow and swanlab get what a run reports: each package replaced by one that records its calls."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from siirl.observe.sinks import RunInfo, make_sinks, samples_text

SAMPLES = [{"prompt": "1+1=", "response": "2\x1b[2J", "score": 1.0}, {"prompt": "2+2=", "note": "late"}]


def record(calls: list, name: str, result=None):
    def call(*args, **kwargs):
        calls.append((name, args, kwargs))
        return result

    return call


def wandb(calls):
    run = SimpleNamespace(log=record(calls, "log"), finish=record(calls, "finish"))
    return {"init": record(calls, "init", run), "Table": lambda columns, data: ("table", columns, data)}


def mlflow(calls):
    names = ("set_experiment", "start_run", "log_metrics", "log_text", "log_dict", "end_run")
    return {name: record(calls, name) for name in names}


def swanlab(calls):
    return {name: record(calls, name) for name in ("init", "log", "finish")} | {
        "Text": lambda text: ("text", text)
    }


FAKES = {"wandb": wandb, "mlflow": mlflow, "swanlab": swanlab}
METRICS = {"reward/score": 0.25, "val/gsm8k (main)/reward/mean": 0.5}


@pytest.fixture
def calls_of(tmp_path, monkeypatch):
    """Run a short life of one logger; its package's calls, by name."""

    def run(name: str) -> dict[str, list]:
        calls: list = []
        module = ModuleType(name)
        module.__dict__.update(FAKES[name](calls))
        monkeypatch.setitem(sys.modules, name, module)
        info = RunInfo(tmp_path, "project", "experiment", 50, 0, {"trainer": {"seed": 1}}, {})
        sinks = make_sinks([name], info)
        sinks.text(7, "train", SAMPLES)
        sinks.log(7, METRICS)
        sinks.close()
        by_name: dict[str, list] = {}
        for called, args, kwargs in calls:
            by_name.setdefault(called, []).append((args, kwargs))
        assert calls[-1][0] in ("finish", "end_run")
        return by_name

    return run


def test_wandb_gets_configuration_numbers_and_a_table_at_the_step(calls_of, tmp_path):
    calls = calls_of("wandb")
    ((_, options),) = calls["init"]
    assert options == {
        "project": "project",
        "name": "experiment",
        "config": {"trainer": {"seed": 1}},
        "dir": str(tmp_path),
    }
    (table, numbers) = calls["log"]
    rows = [["1+1=", r"2\x1b[2J", "1.0", ""], ["2+2=", "", "", "late"]]
    expected = ("table", ["prompt", "response", "score", "note"], rows)
    assert table == (({"samples/train": expected},), {"step": 7})
    assert numbers == ((METRICS,), {"step": 7})


def test_mlflow_gets_clean_names_configuration_and_text(calls_of):
    calls = calls_of("mlflow")
    assert calls["set_experiment"] == [(("project",), {})]
    assert calls["start_run"] == [((), {"run_name": "experiment"})]
    assert calls["log_dict"] == [(({"trainer": {"seed": 1}}, "config.json"), {})]
    clean = {"reward/score": 0.25, "val/gsm8k__main_/reward/mean": 0.5}
    assert calls["log_metrics"] == [((clean,), {"step": 7})]
    assert calls["log_text"] == [((samples_text(SAMPLES), "samples/train/step_7.txt"), {})]


def test_swanlab_gets_configuration_numbers_and_text(calls_of, tmp_path):
    calls = calls_of("swanlab")
    ((_, options),) = calls["init"]
    assert options["config"] == {"trainer": {"seed": 1}} and options["experiment_name"] == "experiment"
    assert options["logdir"] == str(tmp_path / "swanlab")
    text, numbers = calls["log"]
    assert text == (({"samples/train": ("text", samples_text(SAMPLES))},), {"step": 7})
    assert numbers == ((METRICS,), {"step": 7})
