"""What `import siirl` offers a script or a notebook."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import pytest

import siirl
from siirl.dag.spec import DagBuilder
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError, WorkerError

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]
GOOD = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=8"]
LOADED = "import sys; {}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"


def loaded(statement: str) -> set[str]:
    code = LOADED.format(statement)
    return set(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=200).split())


def test_import_siirl_loads_nothing_and_all_its_names_are_there_without_torch():
    assert "siirl" in loaded("import siirl")
    assert not {"numpy", "yaml", "torch"} & loaded("import siirl")
    names = ", ".join(siirl.__all__)
    used = loaded(f"from siirl import {names}; plan(load_config({GOOD!r}))")
    assert "hydra" in used and not {"networkx", "numpy", "torch", "transformers", "ray", "tensordict"} & used


def test_other_names_are_no_attributes_and_no_module_hides_one():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = siirl.trian
    assert set(siirl.__all__) <= set(dir(siirl))
    modules = {path.stem for path in (ROOT / "siirl").iterdir()}
    assert not modules & set(siirl.__all__), "importing siirl.X would replace the function siirl.X"


def test_a_plan_shows_itself_in_a_notebook_as_the_picture_and_its_words():
    planned = siirl.plan(siirl.load_config([*GOOD, "trainer.n_gpus_per_node=8"]))
    ElementTree.fromstring(planned._repr_svg_())
    page = planned._repr_html_()
    assert page.count("<svg") == 1 and "<?xml" not in page
    for node in planned.plan.nodes:
        assert node in planned._repr_svg_() and node in str(planned)
    assert "plan of DAG 'grpo' on 8 ranks" in page
    graph = planned.graph()
    assert list(nx.topological_sort(graph)) == list(planned.plan.nodes)
    assert nx.ancestors(graph, "function_reward") == {"rollout_actor"}
    assert graph.nodes["actor_train"] == {"agent": 0, "op": "actor_train", "ranks": tuple(range(8))}


def test_check_raises_all_that_is_wrong_and_plan_does_not_look_for_data():
    cfg = siirl.load_config(
        [*GOOD, "data.train_files=/no/train.parquet", "actor_rollout_ref.model.path=/no/m"]
    )
    assert siirl.plan(cfg).plan.nodes
    assert isinstance(siirl.check(cfg, elsewhere=True), list)
    with pytest.raises(UserError) as raised:
        siirl.check(cfg)
    assert "/no/train.parquet" in str(raised.value) and "/no/m" in str(raised.value)


def test_a_run_that_fails_or_is_stopped_raises(monkeypatch):
    cfg = siirl.load_config(GOOD)
    for code, error in ((1, WorkerError), (2, WorkerError), (143, WorkerError), (130, KeyboardInterrupt)):
        monkeypatch.setattr("siirl.main_dag.run", lambda cfg, found, code=code: code)
        with pytest.raises(error):
            siirl.train(cfg)


def test_a_dag_that_is_saved_reads_as_the_same_dag(tmp_path):
    dag = DagBuilder("äny", "what: it is")
    rollout = dag.node(
        "rollout", "MODEL_INFERENCE", "ROLLOUT", placement="0-1", config={"n": 4, "name": "hf"}
    )
    dag.node("mine", "COMPUTE", executable_ref="a.py:f", dependencies=[rollout], reads=["score"], writes=[])
    specs = [dag.build(), *map(load_dag_file, sorted(ROOT.glob("dag_templates/*.yaml")))]
    assert len(specs) > 5
    for spec in specs:
        spec.save(tmp_path / "dag.yaml")
        assert load_dag_file(tmp_path / "dag.yaml") == spec
