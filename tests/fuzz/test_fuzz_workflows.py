"""Whatever a DAG file holds: exit code 0 or 2, and never a traceback."""

from pathlib import Path

import pytest
import yaml
from fuzzing import PLAIN, cases, command, explore, mangled, replaced_somewhere
from hypothesis import strategies as st
from job_harness import ROOT

from siirl import session
from siirl.config.load import load_config
from siirl.errors import UserError

TEMPLATES = sorted((ROOT / "dag_templates").glob("*.yaml"))
WORKFLOWS = [*TEMPLATES, *sorted((ROOT / "tests" / "e2e").glob("*.yaml"))]


def plain_tree(path: Path):
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError:  # it has !Ref
        return None


TREES = [tree for path in WORKFLOWS if (tree := plain_tree(path)) is not None]
OPTIONS = {
    "loop": {"to": "rollout_actor", "max_turns": 2},
    "agent_options": {"until": "x", "max_turns": 2, "env_path": "no.py:Env", "env_kwargs": {"a": 1}},
    "placement": "0-1",
    "filter_plugin": "no.py:f",
    "config": {"actor_rollout_ref.rollout.n": 2, "optim.lr": 0.1},
    "reads": ["score"],
    "writes": ["score"],
    "max_lag": 1,
    "only_forward_compute": True,
    "agent_group": 1,
}
"""What nodes of the templates rarely say, to be changed too."""


@st.composite
def trees(draw):
    tree = draw(st.sampled_from(TREES))
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=2))
    nodes = [dict(node) for node in tree["nodes"]]
    for name in names:
        nodes[draw(st.integers(0, len(nodes) - 1))][name] = OPTIONS[name]
    return draw(replaced_somewhere(tree | {"nodes": nodes}))


@pytest.mark.heavy
@cases(25)
def test_any_workflow_is_taken_or_refused_in_words(num_cases, good, deep):
    """By what `siirl check` and `siirl plan` call; once in a while by the commands."""
    path, key = Path(deep) / "workflow.yaml", "dag.workflow_path"
    cfg = load_config([f"{key}={path}"], str(good))

    def check(content: bytes, verb: str) -> None:
        path.write_bytes(content)
        if verb:
            command([*verb.split(), f"--config-name={good}", f"{key}={path}"], deep)
            return
        try:
            assert str(session.plan(cfg))
        except UserError as error:
            assert str(error).strip()

    def written(value) -> bytes:
        return yaml.safe_dump(value, allow_unicode=True).encode()

    changed = trees().map(written)
    broken = st.sampled_from(WORKFLOWS).map(Path.read_bytes).flatmap(mangled)
    content = st.one_of(changed, changed, broken, PLAIN.map(written))
    explore(num_cases, check, content, st.sampled_from(["check --elsewhere", "plan", *[""] * 18]))
