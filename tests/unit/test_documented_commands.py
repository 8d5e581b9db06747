"""Commands of the pages that start a run are accepted by `siirl check`, those of benchmarks by their parsers,
and nodes by the DAG's schema."""

import argparse
import importlib
import json
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from siirl import cli
from siirl.cli import main
from siirl.dag.yaml_file import parse_dag

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
STARTS = re.compile(r"(?:siirl run|python -m siirl\.main_dag|torchrun .* -m siirl\.main_dag) (.*)")
NO_WORDS = ("...", "key=value")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096}


def commands() -> list[tuple[str, str]]:
    """(page, settings) of each."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```", page.read_text(), re.S | re.M):
            lines = (line.split(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines())
            found += [(page.name, match[1]) for line in lines if (match := STARTS.match(line))]
    return found


def test_there_are_commands():
    assert {"README.md", "given_responses.md", "distillation.md", "vision.md"} <= {
        page for page, _ in commands()
    }


@pytest.mark.parametrize(("page", "settings"), commands())
def test_a_documented_command_is_accepted(page, settings, tmp_path, monkeypatch, capsys):
    for name in ("MODEL", "TEACHER", "Qwen3-8B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n"
    )
    (tmp_path / "my.yaml").symlink_to(ROOT / "dag_templates/grpo.yaml")
    for name in ("tests", "dag_templates", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(settings) if word not in NO_WORDS]
    assert main(["check", "--elsewhere", *words]) == 0, capsys.readouterr()


def test_every_command_is_on_a_page():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    missing = [name for name in cli._commands(cli._parser()) if not re.search(rf"siirl {name}\b", text)]
    assert missing == [], "name and explain them on a page of docs/"


def spans(pattern: str) -> list[tuple[str, ...]]:
    """(page, groups) of what the pages have in code, in a line of it or of a block."""
    found = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(
            r"^```.*?^```", lambda block: block[0].replace("\n", "`\n`"), page.read_text(), flags=re.S | re.M
        )
        found += [
            (page.name, *(group or "" for group in match.groups())) for match in re.finditer(pattern, text)
        ]
    return found


BENCHMARKS = [
    (page, name, words)
    for page, python, name, words in spans(r"`(python\s+)?(?:benchmarks/)?(\w+)\.py((?: [^`#]*)?)[`#]")
    if (python or words) and (ROOT / "benchmarks" / f"{name}.py").exists()
]


class Taken(Exception):
    """Of words that a parser takes."""


@pytest.mark.parametrize(("page", "name", "words"), BENCHMARKS)
def test_a_documented_benchmark_takes_its_words(page, name, words, monkeypatch):
    path = ROOT / "benchmarks" / f"{name}.py"
    method = "parse_known_args" if "parse_known_args" in path.read_text() else "parse_args"
    parse = getattr(argparse.ArgumentParser, method)

    def only_parse(parser, *given):
        raise Taken(parse(parser, *given))

    if "ArgumentParser" not in path.read_text():
        assert not words.strip(), f"{page}: {path.name} takes none"
        return
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(argparse.ArgumentParser, method, only_parse)
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "end_by_signals", lambda: None, raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), *shlex.split(words)])
    with pytest.raises(Taken):
        module.main()


def test_documented_tests_are_there():
    named = spans(r"pytest (tests/[\w/]+\.py)")
    assert len(named) >= 2
    for page, path in named:
        assert (ROOT / path).is_file(), page


def test_there_are_benchmarks():
    of_gpus = {name for page, name, _ in BENCHMARKS if page == "gpu.md"}
    assert of_gpus >= {"backends_gpu", "grpo_gpu", "weight_link", "weight_sync"} and len(BENCHMARKS) > 9


def workflows() -> list[tuple[str, str]]:
    """(page, YAML) of each block with nodes; those that show some nodes alone are completed."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for body in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.S | re.M):
            if "node_id" in body:
                body = body if "nodes:" in body else "nodes:\n" + textwrap.indent(textwrap.dedent(body), "  ")
                found.append((page.name, body if "dag_id" in body else f"dag_id: shown\n{body}"))
    return found


@pytest.mark.parametrize(("page", "text"), workflows())
def test_documented_nodes_have_known_keys(page, text):
    assert parse_dag(text).nodes, page


def test_there_are_workflows():
    assert len(workflows()) > 15
