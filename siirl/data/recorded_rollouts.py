"""Where recorded rollouts lie: DIR/agent_A/step_N/*.safetensors. No torch; siirl/data/replayed_rows.py
reads and writes them."""

from pathlib import Path

from siirl.config import Config
from siirl.errors import ConfigError


def step_folder(root: Path, agent: int, step: int) -> Path:
    """The rows of one agent and step."""
    return root / f"agent_{agent}" / f"step_{step}"


def recorded_steps(root: Path, agent: int) -> list[int]:
    """The steps of which something was recorded."""
    parts = (root / f"agent_{agent}").glob("step_*/*.safetensors")
    return sorted({int(part.parent.name.removeprefix("step_")) for part in parts})


def describe_steps(root: Path, agent: int) -> str:
    """What is there, for messages."""
    steps = recorded_steps(root, agent)
    if not steps:
        return "no step"
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def check_recorded(cfg: Config, agent: int) -> None:
    """ConfigError if the steps that a run will replay are not all there, as far as it can be known now."""
    root = Path(cfg.actor_rollout_ref.rollout.replay_dir or "").expanduser()
    needed = range(1, (cfg.trainer.total_training_steps or 1) + 1)
    missing = sorted(set(needed) - set(recorded_steps(root, agent)))
    if missing:
        raise ConfigError(
            f"actor_rollout_ref.rollout.replay_dir={root} has no rollouts of step {missing[0]} of agent "
            f"{agent}: it has {describe_steps(root, agent)}. Record more with trainer.dump_rollouts_dir, or "
            "set trainer.total_training_steps to what is there."
        )
