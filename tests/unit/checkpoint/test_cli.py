"""The console script: exit codes, messages without tracebacks, files, and start-up time."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from siirl import cli
from siirl.checkpoint.files import POINTER
from siirl.cli import main
from siirl.compiler.plan import Plan
from siirl.config import load_config
from siirl.launch.run_folder import held

pytestmark = pytest.mark.heavy

GOOD = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=8"]
EIGHT = ["trainer.n_gpus_per_node=8"]
CHECK = ["check", "--elsewhere"]
TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chek", *GOOD], "there is no command 'chek'. Did you mean 'check'?"),
        (["nothing"], "there is no command 'nothing'. Known: check, plan, run, "),
        (GOOD, f"{GOOD[0]}: settings come after a command. Write siirl run {GOOD[0]}"),
        (["plan", *GOOD, "--device", "h200"], "--device h200: only --explain and --search predict times"),
        (["plan", *GOOD, "--tokens", "1+1"], "--tokens 1+1: only --explain and --search"),
    ],
)
def test_words_that_say_nothing_are_refused_with_what_was_perhaps_meant(words, told, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("own", [[], ["dag.workflow_path=dag_templates/grpo.yaml"]])
def test_check_says_ok_and_what_is_skipped_of_a_file_that_the_user_has_named(own, capsys):
    """Of the algorithm's own template nobody had asked for the reference."""
    assert main([*CHECK, *GOOD, *own]) == 0
    out = capsys.readouterr().out
    assert "ok: DAG 'grpo'" in out
    assert ("skipped: reference_log_prob" in out) == bool(own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CHECK, *GOOD, "trainer.nodes=2"], "trainer.nnodes"),
        (
            [*CHECK, *GOOD, "dag.workflow_path=/no/such.yaml"],
            "DagError: DAG file '/no/such.yaml' cannot be read",
        ),
        (
            [*CHECK, *GOOD, "dag.custom_pipeline_fn=/no/such.py:f"],
            "there is no file '/no/such.py'",
        ),
        (
            [*CHECK, *GOOD, "dag.workflow_path=a", "dag.custom_pipeline_fn=b:c"],
            "one workflow",
        ),
        (
            [
                *["plan", *GOOD, *EIGHT, "data.train_batch_size=4"],
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            ],
            "PlacementError",
        ),
        (["plan", *GOOD, "--draw", "x.pdf"], "End it with .svg or .png"),
        (["plan", *GOOD, "--json", "/proc/nowhere/plan.json"], "cannot be written"),
    ],
)
def test_a_user_error_is_one_message_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_check_refuses_what_a_run_would_refuse_before_it_starts(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "reward.py").write_text("def compute_score(solution_str): ...\n")
    here = [*GOOD, f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=/no/trian.parquet"]
    wrong = f"custom_reward_function.path={tmp_path}/reward.py"
    for arguments, message in (
        (["check", *here], "/no/trian.parquet does not exist"),
        ([*CHECK, *here], ""),
        (["plan", *here], ""),
        ([*CHECK, *here, wrong], "it does not take data_source"),
        (["plan", *here, wrong], "it does not take data_source"),
    ):
        assert main(arguments) == (2 if message else 0)
        assert message in capsys.readouterr().err


FOLDERS = {  # files there, settings -> what check says
    "a pointer below all steps": (["checkpoints/global_step_5/x"], [], "names step 3, but the checkpoints"),
    "no such checkpoint": (
        [],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/global_step_3"],
        "/no/global_step_3",
    ),
    "an earlier run": (["metrics.jsonl"], [], "metrics.jsonl of an earlier run"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_check_looks_at_the_folder_that_the_run_will_write(case, tmp_path, capsys):
    names, settings, message = FOLDERS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / POINTER).write_text("3")
    keys = [*GOOD, f"trainer.output_dir={tmp_path}", *settings]
    assert main(["check", *keys]) == 2
    assert message in capsys.readouterr().err
    assert main([*CHECK, *keys]) == 0


def test_check_sees_that_a_run_is_in_the_folder(tmp_path, capsys):
    keys = [*GOOD, f"trainer.output_dir={tmp_path}"]
    with held(load_config(keys), "another"):
        assert main(["check", *keys]) == 2
        assert f"trainer.output_dir={tmp_path} is in use by a run" in capsys.readouterr().err
    main(["check", *keys])
    assert "in use" not in capsys.readouterr().err


def test_hydra_full_error_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main([*CHECK, *GOOD, "trainer.nodes=2"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_option_prints_the_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *GOOD, "--jsn", "x"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("unknown argument '--jsn'\n")
    with pytest.raises(SystemExit):
        main(["plan", *GOOD, "--trainer.nnodes=2"])
    assert "settings have no dashes, as trainer.nnodes=2" in capsys.readouterr().err


def test_what_cannot_be_exported_is_told_with_what_can(capsys, tmp_path):
    for given in (tmp_path / "none", tmp_path):
        assert main(["export", str(given), str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert f"{given} is no checkpoint: there is no {given}/manifest.json." in told
        assert "RUN/checkpoints/global_step_N" in told
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / POINTER).write_text("4")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"there is no {tmp_path}/checkpoints/global_step_4/manifest.json" in capsys.readouterr().err


def test_plan_prints_and_writes_everything(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    files = [tmp_path / "out" / name for name in ("plan.json", "plan.svg", "plan.png")]
    model = f"actor_rollout_ref.model.path={tmp_path}"
    sizes = {
        "ppo_mini_batch_size": 256,
        "ppo_micro_batch_size_per_gpu": 1,
    }  # else: the whole batch; what fits
    cut = [f"actor_rollout_ref.actor.{key}={size}" for key, size in sizes.items()]
    cut.append("data.train_batch_size=1024")
    assert main(["plan", "--json", str(files[0]), *GOOD, *EIGHT, *cut, model, "--draw", str(files[1])]) == 0
    out = capsys.readouterr().out
    for expected in (
        "nodes by rank",
        "1024 prompts x 8 responses = 8192 sequences",
        "4 mini-batches of 256 prompts = 2048 sequences -> 4 optimizer steps",
        "256 micro-batches of 1 sequence on each rank",
        "fits 80 GiB: yes, ",
        "reference_log_prob: nothing reads ref_log_prob: no KL is used",
    ):
        assert expected in out
    plan = Plan.from_json(files[0].read_text())
    assert plan.world_size == 8
    svg = files[1].read_text()
    assert svg.startswith("<?xml") and "rollout_actor" in svg
    assert main(["plan", *GOOD, model, "--draw", str(files[2])]) == 0
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_plan_needs_no_model_but_says_that_the_estimate_is_skipped(capsys):
    assert main(["plan", *GOOD, "actor_rollout_ref.model.path=/no/such/model"]) == 0
    assert "skipped: /no/such/model/config.json cannot be read" in capsys.readouterr().out


def test_keys_without_effect_are_warned_about(capsys):
    assert main([*CHECK, *GOOD, "trainer.should_log=true"]) == 0
    assert "warning: trainer.should_log" in capsys.readouterr().err


@pytest.mark.heavy
def test_check_starts_quickly_and_without_what_it_does_not_need():
    code = "import sys; from siirl.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    before = os.times().children_user
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", code, *CHECK, *GOOD],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    modules = set(run.stdout.split())
    assert "siirl.launch.survey" in modules
    assert modules.isdisjoint({"networkx", "numpy", "pandas", "pyarrow", "ray", "torch", "transformers"})
    seconds = min(time.monotonic() - start, os.times().children_user - before)
    assert seconds < 3, "CPU seconds, so that other work on the machine does not count"


def test_help_loads_no_graph_library_and_no_torch():
    code = "import sys; from siirl.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    modules = set(run.stdout.split())
    assert "siirl.cli" in modules, run.stderr
    assert modules.isdisjoint({"networkx", "torch", "transformers"})


@pytest.mark.parametrize("name", cli._commands(cli._parser()))
def test_the_help_of_a_command_says_its_name_and_what_it_does(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    usage, _, told = capsys.readouterr().out.partition("\n\n")
    assert ended.value.code == 0 and usage.startswith(f"usage: siirl {name} ")
    assert re.match(r"[A-Za-z].{20}", told), "a sentence, before the list of arguments"
    assert not told.startswith(("positional", "options"))


def test_config_path_and_config_name_are_hydras(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath: [file://elsewhere]\ndefaults: [ppo_dag_trainer, _self_]\n"
        "trainer:\n  total_epochs: 7\n"
    )
    for arguments in (
        [f"--config-path={tmp_path}", "--config-name=mine"],
        ["--config-path", str(tmp_path), "--config-name", "mine.yaml"],
        ["-cp", str(tmp_path), "-cn", "mine"],
    ):
        assert main(["run", "--cfg", "job", *arguments]) == 0
        assert "total_epochs: 7\n" in capsys.readouterr().out
    assert main([*CHECK, f"--config-path={tmp_path}", "--config-name=your"]) == 2
    assert f"{tmp_path}/your.yaml does not exist" in capsys.readouterr().err
