"""Plan, check and train from Python: python examples/python/train.py [--out FOLDER] [--steps N]

The quickstart's model, data and reward; the workflow is built here. quickstart.ipynb does the same in a
notebook.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import siirl

QUICKSTART = Path(__file__).parents[1] / "quickstart"


def workflow() -> siirl.DagBuilder:
    """GRPO, node by node."""
    dag = siirl.DagBuilder("grpo_from_python")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
    return dag


def settings(out: Path, steps: int) -> list[str]:
    """The settings of a command line; docs/configuration/ lists them."""
    return [
        f"dag.workflow_path={out / 'workflow.yaml'}",
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"data.train_files={out / 'data' / 'train.parquet'}",
        f"data.val_files={out / 'data' / 'test.parquet'}",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=2",
        f"actor_rollout_ref.model.path={out / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "actor_rollout_ref.actor.entropy_coeff=0.02",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=16",
        f"custom_reward_function.path={QUICKSTART / 'reward.py'}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=20",
        "trainer.overwrite=true",
        f"trainer.output_dir={out}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/from_python"))
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    subprocess.run([sys.executable, QUICKSTART / "prepare.py", "--out", args.out], check=True)
    workflow().build().save(args.out / "workflow.yaml")
    cfg = siirl.load_config(settings(args.out, args.steps))

    siirl.plan(cfg).draw(args.out / "plan.svg")
    for warning in siirl.check(cfg):
        print(f"warning: {warning}")
    run = siirl.train(cfg)

    reward = run.metrics()["reward/score"]
    print(f"reward {reward[min(reward)]:.2f} -> {reward[max(reward)]:.2f}; everything is in {run.output_dir}")


if __name__ == "__main__":
    main()
