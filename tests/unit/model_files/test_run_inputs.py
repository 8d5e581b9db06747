"""What a run reads of the user's is known by its content, and code stays what it was when the run began."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures_tiny import make_arithmetic_parquet, make_tiny_model_dir
from safetensors.numpy import save_file

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.resume_settings import settings_of
from siirl.config import load_config
from siirl.errors import ConfigError
from siirl.launch.preflight import check_settings
from siirl.model_files.run_inputs import ChangeWatch, RunInputs, digest_file, digests_of, inputs_of
from siirl.user_code.source import find_module, own_code

CODE = {
    "reward.py": "import json\nimport numpy\nfrom lib import near\nimport tools.words as words\n"
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    from lib.late import x\n",
    "lib/__init__.py": "",
    "lib/near.py": "from . import far\nfrom .deep.er import y\n",
    "lib/far.py": "x = 1",
    "lib/late.py": "x = 1",
    "lib/deep/er.py": "from ..up import z\n",
    "lib/deep/__init__.py": "",
    "lib/up.py": "z = 1",
    "tools/words.py": "import lib.missing, absent",
    "unrelated.py": "x = 1",
    "broken.py": "def (",
}
SEEN = [
    *(
        "lib/__init__.py",
        "lib/deep/__init__.py",
        "lib/deep/er.py",
        "lib/far.py",
        "lib/late.py",
        "lib/near.py",
    ),
    *("lib/up.py", "reward.py", "tools/words.py"),
]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_code_is_followed_into_what_it_imports_below_its_folder(tmp_path):
    write(tmp_path, CODE)
    assert sorted(own_code(tmp_path / "reward.py")) == SEEN
    assert sorted(own_code(tmp_path / "broken.py")) == ["broken.py"]


def test_modules_are_found_without_importing_their_parents(tmp_path, monkeypatch):
    write(tmp_path, {"loud/__init__.py": "raise SystemExit('imported')", "loud/inner.py": "", "alone.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    assert find_module("loud.inner") == tmp_path / "loud" / "inner.py"
    assert find_module("loud") == tmp_path / "loud" / "__init__.py"
    assert find_module("alone") == tmp_path / "alone.py"
    assert find_module("loud.absent") is None and find_module("absent.x") is None
    assert "loud" not in sys.modules


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    write(folder, CODE)
    write(
        folder,
        {
            "tools.yaml": "tools:\n- function: my_tools.py:ask\n- class_name: own_module.Tool\n"
            f"- mcp: {{command: [python, server.py], env: {{LOGS: {folder}/logs}}}}\n",
            "server.py": "x = 1",
            "logs/tool.log": "what a server writes",
            "my_tools.py": "import asked\ndef ask(question: str) -> str:\n    '''Asks.'''\n",
            "asked.py": "x = 1",
            "agent.py": "import asked",
            "template.jinja": "{{ x }}",
            "written.log": "what a run writes",
        },
    )
    make_tiny_model_dir(folder / "model")
    make_arithmetic_parquet(folder / "train.parquet", 16)
    make_arithmetic_parquet(folder / "val.parquet", 4)
    return folder


@functools.cache
def configured(project):
    cfg = load_config(
        [
            *("algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "data.train_batch_size=8"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"),
            f"custom_reward_function.path={project}/reward.py",
            f"custom_reward_function.reward_kwargs.template={project}/template.jinja",
            f"custom_reward_function.reward_kwargs.log={project}/written.log",
            f"actor_rollout_ref.model.path={project}/model",
            "actor_rollout_ref.rollout.multi_turn.enable=true",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={project}/tools.yaml",
            f"data.train_files=[{project}/train.parquet]",
            f"data.val_files=[{project}/val.parquet]",
            f"trainer.output_dir={project}/out",
        ]
    )
    return cfg, compile_plan(load_dag(cfg), cfg, 1)[0]


CHANGES = {
    "reward.py": "custom_reward_function.path, reward.py",
    "lib/deep/er.py": "custom_reward_function.path, lib/deep/er.py",
    "tools/words.py": "custom_reward_function.path, tools/words.py",
    "template.jinja": "custom_reward_function.reward_kwargs, template.jinja",
    "tools.yaml": "actor_rollout_ref.rollout.multi_turn.tool_config_path, tools.yaml",
    "my_tools.py": "actor_rollout_ref.rollout.multi_turn.tool_config_path, my_tools.py",
    "asked.py": "actor_rollout_ref.rollout.multi_turn.tool_config_path, asked.py",
    "server.py": "actor_rollout_ref.rollout.multi_turn.tool_config_path, server.py",
    "logs/tool.log": None,
    "model/model.safetensors": "actor_rollout_ref.model.path, model.safetensors",
    "model/config.json": "actor_rollout_ref.model.path, config.json",
    "model/tokenizer.json": "actor_rollout_ref.model.path, tokenizer.json",
    "train.parquet": "data.train_files, train.parquet",
    "val.parquet": None,
    "unrelated.py": None,
    "written.log": None,
}


@pytest.fixture(scope="module")
def begun(project, tmp_path_factory):
    """A run that has a checkpoint: its configuration and plan, the checkpoint, and what it has read."""
    (cfg, plan), checkpoint = configured(project), tmp_path_factory.mktemp("checkpoint")
    began = inputs_of(cfg, plan)
    (checkpoint / "extra.json").write_text(json.dumps({"settings": settings_of(cfg, plan) | began.digests}))
    check_settings(cfg, plan, checkpoint)
    assert ChangeWatch(began).look() == []
    return cfg, plan, checkpoint, began


@pytest.mark.parametrize(("file", "name"), CHANGES.items(), ids=CHANGES)
def test_a_change_of_what_a_run_reads_is_refused_when_it_goes_on(project, begun, file, name, caplog):
    cfg, plan, checkpoint, began = begun
    watch = ChangeWatch(began)
    content = (project / file).read_bytes()
    changed = content[:-3] + bytes((content[-3] ^ 1,)) + content[-2:]
    try:
        (project / file).write_bytes(changed)
        if name is None:
            check_settings(cfg, plan, checkpoint)
            assert watch.look() == []
            return
        with pytest.raises(ConfigError, match="made with other settings") as refused:
            check_settings(cfg, plan, checkpoint)
        assert f"\n  {name}: " in str(refused.value) and str(refused.value).count("\n  ") == 1
        (line,) = watch.look()
        kept = not name.startswith(("data.", "actor_rollout_ref.model."))
        assert str(project / file) in line and ("keeps to" in line) == kept and watch.look() == []
        trainer = dataclasses.replace(cfg.trainer, resume_changed=True)
        check_settings(dataclasses.replace(cfg, trainer=trainer), plan, checkpoint)
        assert name in caplog.text
    finally:
        (project / file).write_bytes(content)


def test_what_cannot_be_read_is_left_to_who_needs_it(project, monkeypatch):
    cfg, plan = configured(project)
    whole = inputs_of(cfg, plan)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("siirl.model_files.run_inputs.digest_file", refuse)
    left = inputs_of(cfg, plan)
    assert "custom_reward_function.path, reward.py" in left.digests
    assert left.digests.keys() < whole.digests.keys()


def test_any_tensor_of_a_large_file_counts(tmp_path):
    tensors = {f"layer_{i}": np.full(60_000 + i, i, np.float32) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = digest_file(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 8 << 20
    for name in tensors:
        save_file(tensors | {name: tensors[name] + 1}, tmp_path / "model.safetensors")
        assert digest_file(tmp_path / "model.safetensors") != before
    save_file(tensors, tmp_path / "model.safetensors")
    assert digest_file(tmp_path / "model.safetensors") == before


def test_sizes_and_blocks_of_other_large_files_count(tmp_path):
    file = tmp_path / "rows.parquet"
    content = bytes(range(256)) * (20 << 12)
    file.write_bytes(content)
    before = digest_file(file)
    for changed in (
        content + b"x",
        content[:-1] + b"x",
        b"x" + content[1:],
        content[: 5 << 20] + bytes(15 << 20),
    ):
        file.write_bytes(changed)
        assert digest_file(file) != before
    assert digests_of(tmp_path / "*.parquet").keys() == {str(file)}
    assert digests_of(tmp_path / "absent") == {}


LOADS = """
import json, sys
from pathlib import Path
from siirl.user_code.load_object import keep_to
from siirl.user_code.load_object import load_object
keep_to(json.loads(sys.argv[1]))
found = load_object(sys.argv[2], "key")
print(found(), Path(sys.modules[found.__module__].__file__).name)
"""


@pytest.mark.parametrize("what", ["edited", "removed", "as it was"])
@pytest.mark.parametrize("reference", ["{0}/reward.py:score", "pkg.reward:score"])
def test_code_is_what_it_was_when_the_run_began(tmp_path, what, reference):
    """Also what it imports, and whatever a compiled file of Python says."""
    files = {
        "reward.py": "from pkg.inner import value\nimport helper\ndef score(): return value + helper.more\n",
        "pkg/__init__.py": "",
        "pkg/inner.py": "value = 20",
        "pkg/reward.py": "from .inner import value\nimport helper\ndef score(): return value + helper.more\n",
        "helper.py": "more = 1",
    }
    write(tmp_path, files)
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}", "PATH": ""}
    run = [sys.executable, "-c", LOADS, "{}", reference.format(tmp_path)]
    assert subprocess.check_output(run, text=True, env=env, cwd="/") == "21 reward.py\n"
    kept = {str((tmp_path / name).resolve()): text for name, text in files.items()}
    for name in files:
        if what == "edited":
            (tmp_path / name).write_text(files[name].replace("20", "70").replace("more = 1", "more = 2"))
        elif what == "removed":
            (tmp_path / name).unlink()
    run[3] = json.dumps(kept)
    assert subprocess.check_output(run, text=True, env=env, cwd="/") == "21 reward.py\n"
    if what == "edited":
        for name in files:
            os.utime(tmp_path / name, (0, 0))  # else Python takes the compiled file for that of now
        run[3] = "{}"
        assert subprocess.check_output(run, text=True, env=env, cwd="/") == "72 reward.py\n"


def test_nothing_is_known_of_a_run_without_inputs():
    assert RunInputs().changed() == {} and ChangeWatch(RunInputs()).look() == []
