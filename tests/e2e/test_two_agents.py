"""Two agents with models of their own on disjoint ranks: nothing assumes one model or one group."""

from pathlib import Path

import pytest
import yaml
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, audited, overrides, run_job
from some_cases import some

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def two_models(inputs, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "model"
    return inputs.model, make_tiny_model_dir(other, family="llama", tie=False, init_std=0.2, seed=5)


def dag_file(path: Path, models, agents: tuple[int, ...], ranks: int) -> Path:
    """The two-policy DAG with only the nodes of `agents`, each of which has so many ranks."""
    text = (TESTS / "e2e" / "two_policies.yaml").read_text()
    text = text.replace("MODEL_A", str(models[0])).replace("MODEL_B", str(models[1]))
    text = text.replace("OPS:", f"{TESTS / 'support' / 'two_policies_ops.py'}:")
    if ranks == 1:
        text = text.replace('"0-1"', '"0"').replace('"2-3"', '"1"')
    dag = yaml.safe_load(text)
    dag["nodes"] = [node for node in dag["nodes"] if node["agent_group"] in agents]
    if len(agents) == 1:
        for node in dag["nodes"]:
            node.pop("placement", None)
    path.write_text(yaml.safe_dump(dag))
    return path


@pytest.mark.parametrize("ranks", some([1, 2], 1))
def test_two_agents_on_disjoint_ranks_equal_two_separate_runs(inputs, two_models, tmp_path, ranks):
    def run(name: str, world_size: int, agents: tuple[int, ...]):
        dag = dag_file(tmp_path / f"{name}.yaml", two_models, agents, ranks)
        keys = (f"dag.workflow_path={dag}", "trainer.ledger=rows", "trainer.total_training_steps=2")
        finished = run_job(world_size, overrides(inputs, tmp_path / name, *keys))
        audited(finished)
        return finished

    both, alone = run("both", 2 * ranks, (0, 1)), [run("a", ranks, (0,)), run("b", ranks, (1,))]
    for agent, separate in enumerate(alone):
        together, expected = both.weights(f"agent_{agent}.actor"), separate.weights()
        assert together.keys() == expected.keys()
        for name in expected:
            assert together[name].equal(expected[name]), f"agent {agent}: {name}"
        for name in ("reward/score", "actor/loss", "actor/grad_norm"):
            assert both.values(f"agent_{agent}/{name}") == separate.values(name), f"agent {agent}: {name}"
            assert len(separate.values(name)) == 2
    assert both.values("agent_0/reward/score") != both.values("agent_1/reward/score")
    assert both.values("agent_0/actor/ref_kl") and not both.values("agent_1/actor/ref_kl")
