"""`siirl resume`: the main job again, by the keys that a run has recorded, from its last checkpoint."""

from pathlib import Path

from siirl import main_dag
from siirl.commands.recorded_run import RecordedRun, from_here
from siirl.commands.trust import permissions
from siirl.errors import ConfigError
from siirl.runs.run_state import read_run

LENGTHS = ("trainer.total_training_steps", "trainer.total_epochs")


def resume(folder: Path, overrides: list[str], trust: bool) -> int:
    """Go on with the run of a folder; the exit code is that of the job.

    trust: others may be able to change the folder. ConfigError: they are, it is at its end and no key makes
    it longer, or it has no checkpoint.
    """
    recorded, state = RecordedRun.read(folder), read_run(folder)
    permitted = permissions(recorded, "siirl resume", overrides, trust)
    longer = any(item.lstrip("+").startswith(LENGTHS) for item in overrides)
    if state.status == "ended" and not longer:
        raise ConfigError(
            f"{folder} has ended, at step {state.step} of {state.total_steps}: there is nothing left to do. "
            f"Make it longer: siirl resume RUN {LENGTHS[0]}={2 * state.step or 100}."
        )
    if recorded.newest_checkpoint() is None:
        raise ConfigError(
            f"{recorded.checkpoints} has no checkpoint: there is nothing to go on from. Start over: "
            f"siirl run --config-name {recorded.config_file} trainer.overwrite=true; with trainer.save_freq "
            "it saves some."
        )
    keys = {
        "trainer.output_dir": folder,
        "trainer.default_local_dir": recorded.checkpoints,
        "trainer.resume_mode": "auto",
        "trainer.overwrite": "false",
    }
    given = from_here(overrides)
    recorded.enter_directory()
    own = [f"{name}={value}" for name, value in keys.items()] + permitted
    return main_dag.main(["--config-name", recorded.config_file, *own, *given])
