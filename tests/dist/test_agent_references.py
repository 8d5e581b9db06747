"""An agent's reference computes as the agent's actor does, also where that actor's node alone says how."""

from pathlib import Path

import torch
import train_engine_cases as cases
import yaml
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from plan_cases import ONE_STEP

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import load_config
from siirl.engines.engine_registry import make_train_engine
from siirl.parallel.process_groups import ProcessGroupManager

TYPE = "actor.fsdp_config.mixed_precision.param_dtype"


def two_agents(folder: Path) -> Path:
    """A workflow of two agents that learn apart, each with a reference."""
    nodes = []
    for agent in (0, 1):
        for name, kind, role, above in (
            ("rollout", "MODEL_INFERENCE", "ROLLOUT", []),
            ("reward", "COMPUTE", "REWARD", ["rollout"]),
            ("reference", "MODEL_TRAIN", "REFERENCE", ["rollout"]),
            ("advantage", "COMPUTE", "ADVANTAGE", ["reward"]),
            ("train", "MODEL_TRAIN", "ACTOR", ["advantage", "reference"]),
        ):
            node = {"node_id": f"{name}_{agent}", "node_type": kind, "node_role": role, "agent_group": agent}
            node["dependencies"] = [f"{parent}_{agent}" for parent in above]
            nodes.append(node | {"only_forward_compute": role == "REFERENCE"})
    (folder / "dag.yaml").write_text(yaml.safe_dump({"dag_id": "two", "nodes": nodes}))
    return folder / "dag.yaml"


def log_probs(rank: int, world: int, model: str, workflow: str) -> dict[str, torch.Tensor]:
    """Of the actor and the reference of two agents on the same rows; agent 1 in fp32, the run in bf16."""
    keys = [key for key in cases.overrides_for(model) if "param_dtype" not in key]
    keys += [*ONE_STEP, "actor_rollout_ref.actor.use_kl_loss=true"]
    keys += [f"dag.workflow_path={workflow}", f"dag.node_config.train_1.{TYPE}=float32"]
    cfg = load_config(keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, world)
    groups = ProcessGroupManager(plan.groups, "gloo", 60)
    engines = {
        name: make_train_engine(model, configs[model.node], groups, torch.device("cpu"), None)
        for name, model in plan.models.items()
        if model.role in ("actor", "ref")
    }
    rows = cases.sample_rows(0)
    return {name: engine.compute(rows, ("log_prob",), 1.0)["log_prob"] for name, engine in engines.items()}


def test_the_reference_of_an_agent_computes_in_the_type_that_its_actors_node_sets(tmp_path):
    model = make_tiny_model_dir(tmp_path / "model")
    (found,) = run_workers(log_probs, 1, str(model), str(two_agents(tmp_path)), deadline_s=120)
    for agent in (0, 1):
        assert torch.equal(found[f"agent_{agent}.actor"], found[f"agent_{agent}.ref"])
    assert not torch.equal(found["agent_0.actor"], found["agent_1.actor"]), "bf16 and fp32 differ"
