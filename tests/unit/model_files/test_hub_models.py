"""Models by name: from a hub's cache on disk, without a network; tokens that no file of a run holds."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures_tiny import make_tiny_model_dir
from huggingface_hub import constants

from siirl import cli, main_dag
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.plan import Plan
from siirl.config import from_dict, load_config, to_dict, with_overrides
from siirl.errors import ConfigError, DagError, DataError
from siirl.launch.job import Job
from siirl.model_files.directory import check_weight_files, model_dir
from siirl.model_files.hub import is_hub_id
from siirl.model_files.local_models import token_to_environment, with_local_models

pytestmark = pytest.mark.heavy

NAME = "some-org/Tiny-0.1B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
POLICY = "actor_rollout_ref"
GRPO = ["algorithm.adv_estimator=grpo", f"{POLICY}.rollout.name=hf", f"{POLICY}.rollout.n=4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whatever the environment says: no test asks a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path, model) -> Path:
    """A hub's cache as its client lays it out: a branch and a commit."""
    repo = tmp_path / "cache" / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(model, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return tmp_path / "cache"


def settings(cache: Path, *more: str) -> list[str]:
    return [*GRPO, f"{POLICY}.model.path={NAME}", f"{POLICY}.model.cache_dir={cache}", *more]


def compiled(arguments: list[str]):
    cfg = load_config(arguments)
    return cfg, compile_plan(load_dag(cfg), cfg, 2)[0]


def paths(cfg, plan) -> set[str]:
    return {with_overrides(cfg, node.overrides).actor_rollout_ref.model.path for node in plan.nodes.values()}


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("org/a.b_c-d", True),
        ("~/models/llama", False),
        ("/models/llama", False),
        ("./models", False),
        ("../models", False),
        ("outputs/quickstart/model", False),
        ("gpt2", False),
        ("org/..", False),
        ("org/", False),
    ],
)
def test_a_name_on_a_hub_is_org_and_name(name, is_id):
    assert is_hub_id(name) is is_id


@pytest.mark.parametrize("revision", ["main", COMMIT])
@pytest.mark.parametrize("cached_first", [False, True])
def test_every_node_gets_the_local_directory_and_the_plan_stays_data(cache, revision, cached_first):
    cfg, plan = compiled(
        settings(cache, f"{POLICY}.model.model_revision={revision}", f"data.tokenizer={NAME}")
    )
    local = with_local_models(cfg, plan, cached_first)
    (path,) = paths(cfg, local)
    assert path.endswith(f"/snapshots/{COMMIT}")
    check_weight_files(model_dir(path))
    node_cfg = with_overrides(cfg, next(iter(local.nodes.values())).overrides)
    assert node_cfg.data.tokenizer == path
    assert Plan.from_json(local.to_json()) == local
    assert paths(cfg, plan) == {NAME}, "the plan given is unchanged"


@pytest.mark.parametrize("judge", ["null", "hf"])
def test_a_reward_model_on_a_hub_gets_its_local_directory(cache, model, judge):
    keys = (
        "reward_model.enable=True",
        f"reward_model.model.path={NAME}",
        f"reward_model.model.cache_dir={cache}",
        f"reward_model.judge.name={judge}",
    )
    cfg, plan = compiled([*GRPO, f"{POLICY}.model.path={model}", *keys])
    local = with_local_models(cfg, plan)
    found = {
        name: with_overrides(cfg, node.overrides).reward_model.model.path
        for name, node in local.nodes.items()
    }
    assert found.pop("reward_model").endswith(f"/snapshots/{COMMIT}")
    assert set(found.values()) == {NAME}, "nodes without a reward model leave it alone"


def test_a_local_directory_goes_before_a_name_on_a_hub(model, tmp_path, monkeypatch):
    (tmp_path / "some-org").mkdir()
    shutil.copytree(model, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    cfg, plan = compiled([*GRPO, f"{POLICY}.model.path={NAME}"])
    assert with_local_models(cfg, plan) == plan


@pytest.mark.parametrize("lost", ["everything", "the weights"])
def test_without_a_network_the_error_says_what_was_tried(cache, lost):
    snapshot = next(cache.glob("*/snapshots/*"))
    if lost == "everything":
        shutil.rmtree(cache)
    else:
        (snapshot / "model.safetensors").unlink()
    cfg, plan = compiled(settings(cache))
    with pytest.raises(DataError) as caught:
        local = with_local_models(cfg, plan, cached_first=True)
        check_weight_files(model_dir(*paths(cfg, local)))
    message = str(caught.value)
    assert "on host " in message
    if lost == "everything":
        for part in (NAME, "revision main", str(cache), "HF_HUB_OFFLINE is set", "give the local directory"):
            assert part in message


def test_a_name_that_is_nearly_that_of_a_local_directory_is_told_so(cache, model, tmp_path, monkeypatch):
    shutil.copytree(model, tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    cfg, plan = compiled([*GRPO, f"{POLICY}.model.path=models/mien"])
    with pytest.raises(DataError, match=r"Did you mean the directory 'models/mine'\? "):
        with_local_models(cfg, plan, cached_first=True)


def test_check_and_plan_need_config_json_alone(cache, capsys):
    snapshot = next(cache.glob("*/snapshots/*"))
    for path in snapshot.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert (
        cli.main(["plan", *settings(cache, "data.max_response_length=128", "data.max_prompt_length=128")])
        == 0
    )
    assert "GiB" in capsys.readouterr().out
    assert cli.main(["check", "--elsewhere", *settings(cache)]) == 2
    assert "gives the model 512 positions" in capsys.readouterr().err
    shutil.rmtree(cache)
    assert cli.main(["check", "--elsewhere", *settings(cache)]) == 0
    printed = capsys.readouterr()
    assert "ok: DAG" in printed.out and f"warning: model '{NAME}'" in printed.err


def test_check_elsewhere_and_migrate_ask_no_hub(tmp_path, monkeypatch, capsys):
    """They say so where the model's config.json is not in the cache, and read it where it is."""
    monkeypatch.setattr("siirl.model_files.local_models.fetch", lambda *_: pytest.fail("a hub was asked"))
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
        f"actor_rollout_ref.model.path=nobody/model actor_rollout_ref.model.cache_dir={tmp_path}"
    )
    assert cli.main(["migrate", str(tmp_path / "run.sh")]) == 0
    assert (
        "# warning: model 'nobody/model' (revision main) is not in the hub's cache" in capsys.readouterr().out
    )


def test_modelscope_is_asked_when_the_environment_says_so(model, tmp_path, monkeypatch):
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options))
        return str(model)

    monkeypatch.setenv("SIIRL_USE_MODELSCOPE", "true")
    cfg, plan = compiled(settings(tmp_path, f"{POLICY}.model.model_revision=v2"))
    with pytest.raises(ConfigError, match="modelscope is not installed"):
        with_local_models(cfg, plan)
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    assert paths(cfg, with_local_models(cfg, plan)) == {str(model)}
    ((name, options),) = calls
    assert name == NAME and options["revision"] == "v2" and options["cache_dir"] == str(tmp_path)
    assert "*.safetensors" in options["allow_file_pattern"]


def test_a_token_reaches_the_environment_and_no_file_of_the_run(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "")
    seen = []
    monkeypatch.setattr(main_dag, "preflight", lambda cfg, plan: None)
    monkeypatch.setattr(main_dag, "setup_logging", lambda rank, folder: None)
    monkeypatch.setattr(main_dag, "check_start", lambda cfg, launcher: None)
    monkeypatch.setattr(main_dag, "run_local", lambda job: seen.append(job) or 0)
    arguments = settings(
        cache, f"{POLICY}.model.hf_hub_token=hf_secret", f"trainer.output_dir={tmp_path}/out"
    )
    assert main_dag.main(arguments) == 0
    (job,) = seen
    assert isinstance(job, Job) and "hf_secret" not in job.to_json()
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert set(job.config["explicit"]) == set(load_config(arguments).explicit), "what a user set, no more"
    assert main_dag.main([*arguments, "--cfg", "job"]) == 0
    assert "hf_secret" not in capsys.readouterr().out


def test_a_run_has_one_token():
    key = "model.hf_hub_token"
    cfg = load_config([f"{POLICY}.{key}=a"])
    env: dict[str, str] = {}
    stripped = token_to_environment(cfg, env)
    assert env == {"HF_TOKEN": "a"} and "'a'" not in str(to_dict(stripped)["actor_rollout_ref"]["model"])
    assert from_dict(to_dict(stripped)) == stripped
    with pytest.raises(ConfigError, match="two different tokens"):
        token_to_environment(with_overrides(cfg, {f"critic.{key}": "b"}), env)


def test_a_token_in_a_dag_file_is_refused(tmp_path):
    text = (Path(main_dag.__file__).parents[1] / "dag_templates" / "grpo.yaml").read_text()
    text = text.replace(
        "node_role: ROLLOUT", "node_role: ROLLOUT\n    config: {model.hf_hub_token: hf_secret}", 1
    )
    (tmp_path / "dag.yaml").write_text(text)
    cfg = load_config([*GRPO, f"dag.workflow_path={tmp_path}/dag.yaml"])
    with pytest.raises(DagError, match="must not be in a DAG") as caught:
        compile_plan(load_dag(cfg), cfg, 1)
    assert "hf_secret" not in str(caught.value)


def test_an_unreadable_directory_names_host_and_path(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    for name, words in (
        ("mien", "does not exist. Did you mean the directory .*/mine'"),
        ("file", "is a file"),
    ):
        with pytest.raises(DataError, match=f"model directory .*/{name} {words}"):
            model_dir(str(tmp_path / name))
    with pytest.raises(DataError, match=r"on host \S+: model directory /no/such/model does not exist"):
        model_dir("/no/such/model")
    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(DataError, match=rf"on host \S+: model directory {tmp_path} cannot be read.*denied"):
        model_dir(str(tmp_path))
