"""What is added to siirl and not finished is red by itself: tried in a copy of the tree."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_tiny import make_tiny_reward_model
from job_harness import Inputs, overrides

from siirl.algorithms.advantages import built_in

pytestmark = [pytest.mark.heavy, pytest.mark.real_starts]  # forks have imported siirl from elsewhere
ROOT = Path(__file__).parents[2]
FOLDERS = ("siirl", "docs", "dag_templates", "tools", "tests/support")


@pytest.fixture
def tree(tmp_path):
    """A copy of what the tests of a change need."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "tests/conftest.py"):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, (path, before)
    path.write_text(text.replace(before, after))


def reds(tree: Path, *words: str) -> tuple[set[str], str]:
    """Run tests in the copy: the names of those that failed, and what was printed."""
    for word in words:
        if word.startswith("tests/") and not (file := tree / word.partition("::")[0]).exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / word.partition("::")[0], file)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True
    )
    red = {
        line.split(" - ")[0].split(" ", 1)[1]
        for line in done.stdout.splitlines()
        if line[:5] in ("FAILE", "ERROR")
    }
    return red, done.stdout + done.stderr


@pytest.mark.slow  # it tries the tests that ask for the rest, and those run by themselves
def test_a_rollout_engine_that_is_a_row_alone_is_red_everywhere(tree):
    """The contract suite, the registry and the import contract ask for the rest; its logs are shown."""
    table = "ROLLOUT_BACKENDS: dict[str, Backend] = {\n"
    stub = '    "stub": HF("siirl.engines.rollout.stub.stub_rollout:Stub"),\n'
    change(tree / "siirl/compiler/backends/__init__.py", table, table + stub)
    suite, registry = (
        "tests/contracts/test_rollout_engine_contract.py",
        "tests/unit/engines/test_engine_registry.py",
    )
    imports = "tests/unit/test_import_circles.py"
    words = (
        suite,
        registry,
        imports,
        "-k",
        "stub or names_every_engine or results_come_per_prompt and stub or rows",
    )
    red, told = reds(tree, *words)
    assert {name.partition("::")[0] for name in red} == {suite, registry, imports}, told
    assert f"{suite}::test_results_come_per_prompt_in_order_with_n_samples_each[stub]" in red, told
    assert f"{registry}::test_keys_have_the_rows_as_choices" in red, told
    shown = "from siirl.view.run_status import _LOG; assert _LOG.fullmatch('stub_agent_0.rollout.log')"
    subprocess.run([sys.executable, "-c", shown], cwd=tree, check=True)


def test_a_command_is_red_until_a_page_names_it(tree):
    last = "    add_commands(commands)\n"
    change(tree / "siirl/cli.py", last, '    commands.add_parser("polish", help="make it shine")\n' + last)
    test = "tests/unit/test_documented_commands.py::test_every_command_is_on_a_page"
    red, told = reds(tree, test)
    assert red == {test} and "polish" in told, told
    with (tree / "docs" / "runs.md").open("a") as page:
        page.write("\n`siirl polish` makes it shine.\n")
    assert reds(tree, test)[0] == set()


def test_an_estimator_without_a_row_is_told_where_one_is_missing():
    with pytest.raises(
        LookupError, match=r"'mine' .*without a row in siirl/config/algorithm_table\.py: .*Add one"
    ):
        built_in("mine")


STYLE_CODE = '''"""What a frozen model thinks of the style of a response."""

from tensordict import TensorDict

from siirl.engines.train.base import TrainEngine
from siirl.nodes.context import OpContext


def style(ctx: OpContext, rows: TensorDict, engine: TrainEngine) -> TensorDict:
    """style [B]: the score of a frozen model of the node's own. Collective over the model's ranks."""
    style_B = engine.compute(rows, ("score",), 1.0)["score"][:, 0]
    ctx.metrics.mean("style/mean", style_B.double().sum(), len(rows))
    return TensorDict({"style": style_B}, batch_size=rows.batch_size)
'''
STYLE_OP = """
STYLE = replace(
    OLD_LOG_PROB,
    name="style",
    reads=fixed(*TOKENS),
    writes=fixed("style"),
    code="style:style",
    model="style",
    node_role="STYLE",
)
"""
STYLE_NODES = """\
  - {node_id: style, node_type: MODEL_INFERENCE, node_role: STYLE, dependencies: [rollout_actor],
     config: {model.path: PATH, fsdp_config.mixed_precision.param_dtype: float32}}
  - {node_id: liked, node_type: COMPUTE, dependencies: [style, function_reward],
     executable_ref: "liked.py:liked", reads: [score, style], writes: []}
"""
LIKED = """from tensordict import TensorDict


def liked(ctx, rows):
    ctx.metrics.mean("style/liked", (rows["style"] * (rows["score"] > 0)).double().sum(), len(rows))
    return TensorDict({}, batch_size=rows.batch_size)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_op_with_a_model_of_a_role_of_its_own_takes_three_files(tree):
    """Its code, its row among ops, its row among roles of models: checked, planned, and run a step."""
    ops, last = tree / "siirl/dag/ops.py", "SERVICE, CUSTOM),\n"
    (tree / "siirl/nodes/style.py").write_text(STYLE_CODE)
    change(ops, "ACTOR_TRAIN = OpSpec(", f"{STYLE_OP}\nACTOR_TRAIN = OpSpec(")
    change(ops, last, last.replace("CUSTOM", "CUSTOM, STYLE"))
    row = '    "frozen": of_a_node("lm"),\n'
    change(tree / "siirl/config/roles.py", row, row + '    "style": of_a_node("score"),\n')
    changed = [
        file
        for file in (tree / "siirl").rglob("*.py")
        if not (ROOT / file.relative_to(tree)).exists()
        or not filecmp.cmp(file, ROOT / file.relative_to(tree), shallow=False)
    ]
    assert len(changed) <= 3

    model = make_tiny_reward_model(tree / "style_model", init_std=0.2, seed=3)
    workflow = tree / "style.yaml"
    nodes = (ROOT / "dag_templates/grpo.yaml").read_text().rstrip() + "\n" + STYLE_NODES
    workflow.write_text(nodes.replace("PATH", str(model)).replace("liked.py", str(tree / "liked.py")))
    (tree / "liked.py").write_text(LIKED)
    keys = overrides(Inputs.make(tree / "inputs"), tree / "out", f"dag.workflow_path={workflow}")
    keys.append("trainer.total_training_steps=1")
    told = by_command(tree, "siirl.cli", "check", *keys)
    assert "agent_0.style.style" in told, told
    by_command(tree, "siirl.main_dag", *keys)
    last = json.loads((tree / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert last["style/mean"] != 0 and "style/liked" in last


def by_command(tree: Path, *words: str) -> str:
    """What a command of the copy prints."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
