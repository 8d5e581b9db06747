"""DAG files and the Python builder: siiRL's schema is read, and nothing else is swallowed."""

import pytest

from siirl.dag.spec import DagBuilder
from siirl.dag.yaml_file import load_dag_file, parse_dag
from siirl.errors import DagError
from siirl.user_code.load_object import load_object

SIIRL_FILE = """
dag_id: "grpo_training_pipeline"
description: "This is GRPO DAG workflow configured via YAML."
global_config:
  lr: 2.0e-6
  sampling: {rollout.n: 16, "rollout.temperature": 0.7}

actor1_config: &actor1_config
  model.path: Qwen/Qwen2.5-7B-Instruct
  rollout.n: 16

nodes:
  - node_id: "rollout"
    node_type: "MODEL_INFERENCE"
    node_role: "ROLLOUT"
    config: *actor1_config
    dependencies: []
  - node_id: "reward"
    node_type: "compute"
    node_role: "reward"
    agent_group: 0
    dependencies: ["rollout"]
    executable_ref: "pkg.rewards.score"
  - node_id: "train"
    node_type: "MODEL_TRAIN"
    node_role: "ACTOR"
    only_forward_compute: false
    config: {actor.optim.lr: !Ref global_config.lr, rollout.n: !Ref global_config.sampling.rollout.n}
    dependencies: ["reward"]
    placement: {ranks: "0-3"}
"""


def test_a_siirl_file_is_read_with_anchors_refs_and_dotted_executables():
    dag = parse_dag(SIIRL_FILE)
    assert (dag.dag_id, [node.node_id for node in dag.nodes]) == (
        "grpo_training_pipeline",
        ["rollout", "reward", "train"],
    )
    assert dag.node("rollout").config == {"model.path": "Qwen/Qwen2.5-7B-Instruct", "rollout.n": 16}
    assert dag.node("train").config == {"actor.optim.lr": 2e-6, "rollout.n": 16}
    assert dag.node("reward").executable_ref == "pkg.rewards:score"
    assert (dag.node("reward").node_type, dag.node("reward").node_role) == ("COMPUTE", "REWARD")
    assert dag.node("train").placement == {"ranks": "0-3"}


def test_the_python_builder_makes_the_same_object():
    dag = DagBuilder("grpo_training_pipeline", "This is GRPO DAG workflow configured via YAML.")
    model = {"model.path": "Qwen/Qwen2.5-7B-Instruct", "rollout.n": 16}
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT", config=model)
    reward = dag.node(
        "reward", "COMPUTE", "REWARD", dependencies=[rollout], executable_ref="pkg.rewards:score"
    )
    dag.node(
        "train",
        "MODEL_TRAIN",
        "ACTOR",
        config={"actor.optim.lr": 2e-6, "rollout.n": 16},
        dependencies=[reward],
        placement={"ranks": "0-3"},
    )
    assert dag.build() == parse_dag(SIIRL_FILE)


NODE = "{node_id: a, node_type: COMPUTE%s}"


def with_node(extra: str) -> str:
    return "dag_id: x\nnodes: [" + NODE % extra + "]"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["no mapping"]),
        ("- a", ["no mapping"]),
        ("dag_id: [", ["not YAML"]),
        ("dag_id: x\nnodes:\n\t- 1", ["not YAML: line 3: found character '\\t'", "Indent by spaces."]),
        ("dag_id: x\nnodes:\n  - a: 1\n   b: 2", ["not YAML: line 4: expected", "'b: 2'."]),
        ("nodes: []", ["dag_id = None"]),
        ("dag_id: x\nnodes: []", ["has no nodes"]),
        ("dag_id: x\nnodes: {a: 1}", ["not a list"]),
        ("dag_id: x\nnodes: [1]", ["not a list"]),
        ("dag_id: x\nndoes: []\nnodes: []", ["unknown key 'ndoes'", "Did you mean 'nodes'?"]),
        ("dag_id: x\ndag_id: y\nnodes: []", ["'dag_id' is written twice (line 2)"]),
        (with_node(", dependncies: []"), ["unknown key 'dependncies'", "'dependencies'"]),
        (with_node(", node_role: ROLOUT"), ["unknown node_role 'ROLOUT'", "'ROLLOUT'"]),
        (with_node(", dependencies: b"), ["dependencies = 'b' is not a list"]),
        (with_node(", agent_group: one"), ["agent_group = 'one' is not a whole number"]),
        (with_node(", agent_group: -1"), ["agents are numbered from 0"]),
        (with_node(", only_forward_compute: 1"), ["only_forward_compute = 1 is not true or false"]),
        (with_node(", config: [a]"), ["config = ['a'] is not a mapping"]),
        (with_node(", config: {a: 2020-01-01}"), ["not plain data"]),
        (with_node(", executable_ref: nowhere"), ["executable_ref 'nowhere'", "pkg.mod:fn"]),
        (with_node(", config: {a: !Ref global_config.x}"), ["!Ref global_config.x names nothing"]),
        (with_node(", config: {a: !Ref x.y}"), ["only values of global_config"]),
        (with_node(", config: {a: !!python/object/apply:os.getcwd []}"), ["not YAML"]),
        ("dag_id: x\nnodes: [{node_type: COMPUTE}]", ["node_id None"]),
        ("dag_id: x\nnodes: [{node_id: a}]", ["node 'a' has no node_type"]),
        ("dag_id: x\nnodes: [{node_id: a, node_type: MODEL_TRIAN}]", ["'MODEL_TRIAN'", "'MODEL_TRAIN'"]),
        (
            "dag_id: x\nnodes: [{node_id: a, node_type: COMPUTE}, {node_id: a, node_type: COMPUTE}]",
            ["node id 'a' is used twice"],
        ),
    ],
)
def test_a_malformed_file_is_refused_by_name(text, fragments, tmp_path):
    file = tmp_path / "dag.yaml"
    file.write_text(text)
    with pytest.raises(DagError) as caught:
        load_dag_file(file)
    assert all(fragment in str(caught.value) for fragment in [str(file), *fragments]), caught.value


def test_a_missing_file_is_named():
    with pytest.raises(DagError, match=r"'/no/such.yaml' cannot be read: there is none in /no\. Check"):
        load_dag_file("/no/such.yaml")


def test_functions_are_loaded_from_modules_and_from_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def double(x):\n    return 2 * x\n")
    assert load_object(f"{file}:double", "node 'a'")(4) == 8
    assert load_object("math:sqrt", "node 'a'")(4) == 2
    for reference, fragment in (
        (f"{file}:triple", "has no 'triple'"),
        (f"{tmp_path}/none.py:f", "there is no file"),
        ("no_such_package.mod:f", "cannot be imported"),
    ):
        with pytest.raises(DagError, match=fragment):
            load_object(reference, "node 'a'")


def test_a_shipped_workflow_is_found_from_any_folder_unless_that_has_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_dag_file("dag_templates/solver_verifier.yaml").dag_id == "solver_verifier"
    with pytest.raises(DagError, match="there is none in"):
        load_dag_file("dag_templates/no_such.yaml")
    (tmp_path / "dag_templates").mkdir()
    (tmp_path / "dag_templates" / "solver_verifier.yaml").write_text("dag_id: mine\nnodes: []\n")
    with pytest.raises(DagError, match="dag_templates"):
        load_dag_file("dag_templates/solver_verifier.yaml")
