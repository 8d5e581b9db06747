"""The op table: each row has its code, users' rows are read from files, and nobody asks an op its name."""

import ast
import inspect
from pathlib import Path

import pytest
from package_sources import package_nodes
from plan_cases import config

from siirl.compiler.compile import compile_plan
from siirl.compiler.plan import Plan
from siirl.dag.ops import OPS, SERVICES
from siirl.dag.spec import DagBuilder
from siirl.dag.user_ops import OFFERED
from siirl.errors import DagError, NotSupportedError, UserError
from siirl.nodes import services
from siirl.user_code.signatures import Call, misfits

WRAPPERS = ("filter", "custom")
INSIDE = ("environment",)


@pytest.mark.parametrize("name", [name for name in OPS if name not in INSIDE])
def test_the_code_of_an_op_takes_what_its_row_says(name):
    op = OPS[name]
    codes = [code for code in (op.code, op.collects) if code]
    assert codes
    for code in codes:
        function = services.built_in(code)
        values = ("function",) if name in WRAPPERS else ("context", "rows")
        assert misfits(inspect.signature(function), Call(values, op.needs)) == []


def test_what_ops_need_is_built_by_one_table():
    assert set(services.SERVICES) == set(SERVICES)
    assert {need for op in OPS.values() for need in op.needs} == set(SERVICES)
    assert set(OFFERED) <= set(SERVICES)


def test_nobody_asks_an_op_its_name():
    """A file that compares a node's op with a name knows something that the op's row should say."""
    asked = []
    for file, in_file in package_nodes().items():
        for node in in_file:
            if isinstance(node, ast.Compare):
                texts = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
                names = [x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)]
                if "op" in names and set(texts) & OPS.keys():
                    asked.append(f"{file.name}: {ast.unparse(node)}")
    assert asked == []


def workflow(reference: str, **more: str):
    dag = DagBuilder("own")
    dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    entry = {"node_type": "MODEL_INFERENCE", "node_role": "REWARD"} | more
    dag.node("mine", dependencies=["rollout"], executable_ref=reference, **entry)
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=["mine"])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=["advantage"])
    return dag.build()


def own_op(folder: Path, declaration: str) -> str:
    file = folder / "mine.py"
    file.write_text(f"{declaration}\ndef mine(ctx, rows, **needs): ...\n")
    return f"{file}:mine"


DECLARED = '@declare_op(reads=("response_ids", "response_length"), writes=("score", "reward_info"), {more})'


@pytest.mark.parametrize("model", ["ref", "actor", "rollout"])
def test_an_op_of_the_user_runs_on_the_model_that_it_declares(tmp_path, model):
    reference = own_op(tmp_path, DECLARED.format(more=f'model="{model}", needs=("engine", "scorer")'))
    plan, _ = compile_plan(workflow(reference), config(), 2)
    plan = Plan.from_json(plan.to_json())
    assert plan.nodes["mine"].model == f"agent_0.{model}"
    assert "mine" in plan.models[f"agent_0.{model}"].nodes
    assert plan.nodes["mine"].needs == ("engine", "scorer") and plan.nodes["train"].needs == ("engine",)
    assert {key.name for key in plan.run_of("mine").writes} == {"score", "reward_info"}
    assert any(getattr(ins, "node", None) == "mine" for ins in plan.validation), "it is a reward"


def asking_frozen_models(reference: str, *configs: dict):
    """Two nodes of a user's op, each with a frozen model of its own."""
    dag = DagBuilder("asked")
    dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    dag.node("reward", "COMPUTE", "REWARD", dependencies=["rollout"])
    for number, keys in enumerate(configs):
        writes = [f"style_{number}"]
        dag.node(
            *(f"mine_{number}", "MODEL_INFERENCE"),
            **{"dependencies": ["reward"], "executable_ref": reference, "config": keys, "writes": writes},
        )
    dag.node("told", "COMPUTE", dependencies=["mine_0", "mine_1"], reads=["style_0", "style_1"], writes=[],
             executable_ref=reference.replace("mine.py:mine", "mine.py:told"))  # fmt: skip
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=["reward"])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=["advantage"])
    return dag.build()


OF_A_NODE = '@declare_op(reads=("response_ids",), writes=("style",), model="{}", needs=("engine",))'


@pytest.mark.parametrize(("model", "head"), [("frozen", "lm"), ("frozen_score", "score")])
def test_each_node_of_an_op_has_a_frozen_model_of_its_own(tmp_path, model, head):
    reference = own_op(tmp_path, OF_A_NODE.format(model))
    (tmp_path / "mine.py").open("a").write("\ndef told(ctx, rows): ...\n")
    paths = [
        {"frozen.model.path": "/a"},
        {"frozen.model.path": "/b", "frozen.log_prob_use_dynamic_bsz": True},
    ]
    plan, configs = compile_plan(asking_frozen_models(reference, *paths), config(), 2)
    for number, path in enumerate("ab"):
        mine = plan.models[f"agent_0.{model}.mine_{number}"]
        assert (mine.head, mine.trains, mine.nodes) == (head, False, (f"mine_{number}",))
        assert configs[mine.node].frozen.model.path == f"/{path}"
    wrong = [paths[0], {"frozen.model.lora_rank": 4}]
    with pytest.raises(UserError) as refused:
        compile_plan(asking_frozen_models(reference, *wrong), config(), 2)
    assert "node 'mine_1': frozen.model.path is not set: the node has no model" in str(refused.value)
    assert "node 'mine_1': frozen.model.lora_rank=4: the model is frozen" in str(refused.value)
    assert "mine_0" not in str(refused.value) and "reward_model" not in str(refused.value)


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        (DECLARED.format(more='needs=("scorers",)'), "needs = 'scorers' is none of engine, scorer"),
        (DECLARED.format(more='needs=("interaction",)'), "needs = 'interaction' is none of"),
        (DECLARED.format(more='needs=("engine",)'), "needs an engine, but names no model"),
        (DECLARED.format(more='model="critics"'), "model = 'critics' is none of"),
        (DECLARED.format(more='model="ref", split="rows"'), "split = 'rows' is none of"),
        (DECLARED.format(more="model=REF"), "model = REF is not written out"),
        (DECLARED.format(more='modle="ref"'), "has no argument 'modle'.*Did you mean 'model'"),
        ('@declare_op(model="ref")', "names no fields"),
        ('@declare_op(reads="score", writes=())', "reads = 'score' is no list of names"),
    ],
)
def test_a_declaration_that_says_nothing_is_refused(tmp_path, declaration, words):
    with pytest.raises(DagError, match=f"'mine'.*{words}"):
        compile_plan(workflow(own_op(tmp_path, declaration)), config(), 1)


def test_an_undeclared_function_takes_no_place_of_an_op_on_a_model(tmp_path):
    with pytest.raises(NotSupportedError, match=r"in place of op 'model_reward'.*declare_op"):
        compile_plan(workflow(own_op(tmp_path, "")), config(), 1)


def test_the_node_type_says_whether_an_op_has_a_model(tmp_path):
    reference = own_op(tmp_path, DECLARED.format(more='needs=("scorer",)'))
    with pytest.raises(DagError, match="Set node_type: COMPUTE"):
        compile_plan(workflow(reference, node_role="DEFAULT"), config(), 1)
    plan, _ = compile_plan(workflow(reference, node_type="COMPUTE"), config(), 1)
    assert plan.nodes["mine"].model is None and plan.nodes["mine"].needs == ("scorer",)
