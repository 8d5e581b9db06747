# ruff: noqa: E501
"""Whatever is written on a command line, in a preset or in a DAG: the outcome is a plan or a message."""

import copy
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from siirl.cli import main
from siirl.compiler.compile import TEMPLATES
from siirl.config import Config, load_config
from siirl.config.load import read_config
from siirl.config.root import all_keys
from siirl.data.check_files import inspect_files
from siirl.errors import ConfigError, DagError, DataError, UserError
from siirl.findings import Findings
from siirl.launch.survey import survey, survey_inputs

pytestmark = pytest.mark.heavy

MODEL = "actor_rollout_ref.model.path=nobody/model"
CHECK = ["check", "--elsewhere", MODEL]
VALUES = [
    None, "", "x", 0, -1, 3, 10**30, 0.5, float("nan"), float("inf"), True, [], ["a", 1], {}, {"a": {"b": 1}},
    [[]], [None], {1: 2}, "{{n}}", "${a.b}", "${trainer.seed}", "é\u0000\ud800", "a:b", "/no/file.py:fn", "rollout",
    "agent_1.score", "agent_x.score", {"to": "x"}, {"fn": 3}, "1-0", "a" * 5000,
]  # fmt: skip
TEXTS = [
    "", "null", "x", "-1", "0", "1e400", "nan", "[", "[a,b]", "{a:1}", "{a: {b: 1}}", "'", "\"", "${x}", "${trainer.seed}",
    "${oc.env:HOME}", "a=b", "~", "\\", "\u0000", "é", "1,2", "range(1,5)", "/no/such", "file.py:fn", ":", "%s", "{{n}}",
]  # fmt: skip
NODE_KEYS = [
    "node_id", "node_type", "node_role", "dependencies", "only_forward_compute", "agent_group", "config", "executable_ref",
    "filter_plugin", "agent_options", "loop", "placement", "reads", "writes", "max_lag", "unknown",
]  # fmt: skip


def outcome(cfg: Config, found: Findings) -> None:
    """Everything that `siirl check --elsewhere` looks at after composing; only problems may be found."""
    survey_inputs(survey(cfg, found), True, found)
    assert all(str(problem) for problem in found.problems)


def mutated(spec: dict, draw: random.Random) -> dict:
    """The DAG with one to three random changes: of a key of a node, a node, or a key of the file."""
    spec = copy.deepcopy(spec)
    for _ in range(draw.randint(1, 3)):
        nodes = spec.get("nodes")
        if draw.random() < 0.1 or not isinstance(nodes, list) or not nodes:
            spec[draw.choice(["dag_id", "nodes", "description", "global_config", "x_config", "y"])] = (
                draw.choice(VALUES)
            )
            continue
        node = draw.choice(nodes)
        if draw.random() < 0.2 or not isinstance(node, dict):
            nodes.append(copy.deepcopy(draw.choice([node, *VALUES])))
        elif draw.random() < 0.2:
            nodes.remove(node)
        elif draw.random() < 0.4:
            key = draw.choice(sorted(all_keys()))
            node["config"] = {key.partition(".")[2] if draw.random() < 0.5 else key: draw.choice(VALUES)}
        else:
            others = [other.get(key) for other in nodes if isinstance(other, dict) for key in NODE_KEYS[:6]]
            node[draw.choice(NODE_KEYS)] = draw.choice([*VALUES, *others])
    return spec


@pytest.mark.parametrize("template", ["ppo.yaml", "dapo.yaml", "reasoner_actor.yaml", "self_play.yaml"])
def test_any_change_of_a_workflow_ends_in_a_plan_or_a_message(template, tmp_path):
    spec = yaml.safe_load((TEMPLATES / template).read_text())
    draw, file = random.Random(template), tmp_path / "dag.yaml"
    cfg = load_config([MODEL, f"dag.workflow_path={file}"])
    for _ in range(40):
        text = yaml.safe_dump(mutated(spec, draw))
        file.write_text(text.replace("'{{n}}'", "{{n}}") if draw.random() < 0.5 else text)
        outcome(cfg, Findings())


def test_any_command_line_ends_in_a_plan_or_a_message():
    draw = random.Random(15)
    names = [
        *sorted(all_keys()),
        "data",
        "trainer",
        "critic.optim",
        "hydra.run",
        "a.b",
        "dag.node_config.x.y",
        "",
    ]
    for _ in range(40):
        signs = ("", "", "", "+", "++", "~")
        written = [
            f"{draw.choice(signs)}{draw.choice(names)}={draw.choice(TEXTS)}"
            for _ in range(draw.randint(1, 3))
        ]
        found, given = (
            Findings(),
            [text if draw.random() < 0.9 else text.partition("=")[0] for text in written],
        )
        try:
            outcome(read_config([MODEL, *given], "ppo_dag_trainer", found), found)
        except UserError as error:
            assert str(error)


@pytest.mark.parametrize(
    "change", [lambda text: text[: len(text) // 2], lambda text: text.replace(":", "", 3)]
)
def test_a_file_that_is_cut_or_no_yaml_is_a_message(change, tmp_path, capsys):
    (tmp_path / "dag.yaml").write_text(change((TEMPLATES / "ppo.yaml").read_text()))
    assert main([*CHECK, f"dag.workflow_path={tmp_path}/dag.yaml"]) == 2
    assert "dag.yaml" in capsys.readouterr().err


def test_a_node_type_that_is_left_empty_and_a_template_that_is_not_filled_in_are_named(tmp_path, capsys):
    for text, words in (
        ("dag_id: a\nnodes:\n  - node_id: one\n    node_type:\n", "node 'one' has no node_type"),
        ("dag_id: a\nnodes:\n  - node_id: one\n    {{n}}: 3\n", "a key is no text"),
        ("{{n}}: 1\n", "a key is no text"),
    ):
        (tmp_path / "dag.yaml").write_text(text)
        assert main([*CHECK, f"dag.workflow_path={tmp_path}/dag.yaml"]) == 2
        assert words in capsys.readouterr().err


def test_a_key_is_removed_of_a_group_that_the_preset_replaced(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("trainer: 3\n")
    with pytest.raises(ConfigError, match="trainer is a group of keys"):
        load_config(["~trainer.logger"], str(preset))
    preset.write_text("{{n}}: 3\n")
    with pytest.raises(ConfigError):
        load_config([], str(preset))


PIPELINES = {
    "def dag():\n    from siirl.execution.dag.pipeline import Pipeline\n": "raised ModuleNotFoundError",
    "class Pipeline: ...\ndef dag():\n    return Pipeline()\n": "Pipeline, not a DagSpec",
    "dag = 3\n": "is int, not a function",
    "def dag():\n    return 1 / 0\n": "line 2",
    "raise RuntimeError('no')\n": "raised RuntimeError when it was imported: no",
    "raise SystemExit(0)\n": "raised SystemExit when it was imported: 0",
    "def dag():\n    raise SystemExit(0)\n": "raised SystemExit: 0 (",
}


@pytest.mark.parametrize("code", PIPELINES)
def test_a_pipeline_of_other_classes_or_that_fails_is_a_message(code, tmp_path, capsys):
    (tmp_path / "pipeline.py").write_text(code)
    for _ in range(2):  # the second time says the same
        assert main([*CHECK, f"dag.custom_pipeline_fn={tmp_path}/pipeline.py:dag"]) == 2
        error = capsys.readouterr().err
        assert PIPELINES[code] in error
        assert "Traceback" not in error


def test_columns_that_cannot_be_read_are_named_with_their_file(tmp_path):
    texts = pa.array(["a"])
    for columns, names, words in (
        (
            [texts, texts, pa.array([7])],
            ["prompt", "data_source", "reward_model"],
            "'reward_model' has type int64",
        ),
        ([texts, texts, texts], ["prompt", "data_source", "prompt"], "2 columns 'prompt'"),
    ):
        pq.write_table(pa.table(columns, names=names), tmp_path / "rows.parquet")
        with pytest.raises(DataError, match=words):
            inspect_files(str(tmp_path / "rows.parquet"))


def test_a_dag_error_of_several_nodes_keeps_its_class(tmp_path):
    (tmp_path / "dag.yaml").write_text("dag_id: a\nnodes:\n  - {node_id: a}\n  - {node_id: b}\n")
    found = Findings()
    survey(read_config([MODEL, f"dag.workflow_path={tmp_path}/dag.yaml"], "ppo_dag_trainer", found), found)
    assert [type(problem) for problem in found.problems] == [DagError, DagError]
