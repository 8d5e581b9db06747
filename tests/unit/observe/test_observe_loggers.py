"""wandb, mlflow and swanlab get what a run reports: each package replaced by one that records its calls."""

import json
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from siirl.config.trainer import SINKS
from siirl.errors import ConfigError
from siirl.observe.loggers import LOGGERS, make_sinks
from siirl.observe.sinks import RunInfo, samples_text

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
    run = SimpleNamespace(info=SimpleNamespace(run_id="m1"))
    return {name: record(calls, name) for name in names} | {"start_run": record(calls, "start_run", run)}


def swanlab(calls):
    return {
        "init": record(calls, "init", SimpleNamespace(id="s1")),
        "log": record(calls, "log"),
        "finish": record(calls, "finish"),
        "Text": lambda text: ("text", text),
    }


FAKES = {"wandb": wandb, "mlflow": mlflow, "swanlab": swanlab}
METRICS = {"reward/score": 0.25, "val/gsm8k (main)/reward/mean": 0.5}


@pytest.fixture
def calls_of(tmp_path, monkeypatch):
    """Run a short life of one logger; its package's calls, by name."""

    def run(name: str, first_step: int = 0) -> dict[str, list]:
        calls: list = []
        module = ModuleType(name)
        module.__dict__.update(FAKES[name](calls))
        monkeypatch.setitem(sys.modules, name, module)
        info = RunInfo(tmp_path, "project", "experiment", 50, first_step, {"trainer": {"seed": 1}}, {})
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
        "id": json.loads((tmp_path / "loggers.json").read_text())["wandb"],
        "resume": "allow",
    }
    (table, numbers) = calls["log"]
    rows = [["1+1=", r"2\x1b[2J", "1.0", ""], ["2+2=", "", "", "late"]]
    expected = ("table", ["prompt", "response", "score", "note"], rows)
    assert table == (({"samples/train": expected},), {"step": 7})
    assert numbers == ((METRICS,), {"step": 7})


def test_mlflow_gets_clean_names_configuration_and_text(calls_of):
    calls = calls_of("mlflow")
    assert calls["set_experiment"] == [(("project",), {})]
    assert calls["start_run"] == [((), {"run_id": None, "run_name": "experiment"})]
    assert calls["log_dict"] == [(({"trainer": {"seed": 1}}, "config.json"), {})]
    clean = {"reward/score": 0.25, "val/gsm8k__main_/reward/mean": 0.5}
    assert calls["log_metrics"] == [((clean,), {"step": 7})]
    assert calls["log_text"] == [((samples_text(SAMPLES), "samples/train/step_7.txt"), {})]


def test_swanlab_gets_configuration_numbers_and_text(calls_of, tmp_path):
    calls = calls_of("swanlab")
    ((_, options),) = calls["init"]
    assert options["config"] == {"trainer": {"seed": 1}} and options["name"] == "experiment"
    assert options["log_dir"] == str(tmp_path / "swanlab")
    text, numbers = calls["log"]
    assert text == (({"samples/train": ("text", samples_text(SAMPLES))},), {"step": 7})
    assert numbers == ((METRICS,), {"step": 7})


def test_a_resumed_run_goes_on_where_it_was_and_a_fresh_one_begins_anew(calls_of):
    fresh, resumed, again = (calls_of("wandb", step)["init"][0][1]["id"] for step in (0, 2, 0))
    assert fresh == resumed != again
    assert [calls_of("mlflow", step)["start_run"][0][1]["run_id"] for step in (0, 2, 0)] == [None, "m1", None]
    first, second = (calls_of("swanlab", step)["init"][0][1] for step in (0, 2))
    assert "id" not in first and (second["id"], second["resume"]) == ("s1", "allow")


def test_a_logger_that_fails_in_a_run_is_named_once_and_costs_no_step(tmp_path, monkeypatch, caplog):
    module = ModuleType("swanlab")
    module.__dict__.update(swanlab([]) | {"log": lambda *args, **kwargs: 1 / 0})
    monkeypatch.setitem(sys.modules, "swanlab", module)
    sinks = make_sinks(["swanlab"], RunInfo(tmp_path, "p", "e", 50, 0, {}, {}))
    for step in (1, 2):
        sinks.log(step, METRICS)
    sinks.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    (record,) = caplog.records
    assert "swanlab failed" in record.getMessage() and "ZeroDivisionError" in record.getMessage()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_logger_that_does_not_start_ends_the_run_with_the_way_out(name, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no key\nwas given")

    module = ModuleType(name)
    module.__dict__.update(FAKES[name]([]) | {"init": refuse, "start_run": refuse})
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(
        ConfigError, match=f"'{name}', which did not start: RuntimeError: no key was given.*Or"
    ):
        make_sinks([name], RunInfo(tmp_path, "p", "e", 50, 0, {}, {}))


def test_the_configuration_knows_the_loggers():
    assert tuple(LOGGERS) == SINKS


def test_prometheus_gets_the_newest_numbers(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    info = RunInfo(tmp_path, "project", "experiment", 50, 0, {}, {}, prometheus_address="127.0.0.1:0")
    sinks = make_sinks(["prometheus"], info)
    for step in (6, 7):
        sinks.log(step, {name: value * step for name, value in METRICS.items()})
    port = sinks.sinks[-1].sink.port
    lines = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines()
    labels = '{experiment="experiment",project="project"}'
    assert f"siirl_step{labels} 7.0" in lines and f"siirl_reward_score{labels} 1.75" in lines
    assert f"siirl_val_gsm8k__main__reward_mean{labels} 3.5" in lines
    for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example:1", 403)):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
        try:
            assert urllib.request.urlopen(request).status == status
        except urllib.error.HTTPError as error:
            assert error.code == status and b"siirl_step" not in error.read()
    monkeypatch.setenv("METRICS_TOKEN", "secret")
    asking = make_sinks(["prometheus"], replace(info, prometheus_token_env="METRICS_TOKEN"))
    asking.log(9, METRICS)
    url = f"http://127.0.0.1:{asking.sinks[-1].sink.port}/metrics"
    for token, status in (("", 401), ("Bearer secre", 401), ("Bearer secret", 200)):
        request = urllib.request.Request(url, headers={"Authorization": token})
        try:
            with urllib.request.urlopen(request) as answer:
                assert (status, b"siirl_step{" in answer.read()) == (200, True)
        except urllib.error.HTTPError as error:
            assert error.code == status and b"siirl" not in error.read()
    asking.close()
    with pytest.raises(ConfigError, match="METRICS_TOKEN"):
        monkeypatch.delenv("METRICS_TOKEN")
        make_sinks(["prometheus"], replace(info, prometheus_token_env="METRICS_TOKEN"))
    taken = replace(info, prometheus_address=f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=r"'prometheus', which did not start.*another trainer.prometheus"):
        make_sinks(["prometheus"], taken)
    sinks.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)
