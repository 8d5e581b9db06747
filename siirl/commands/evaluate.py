"""`siirl eval`: one validation by the main job, of a checkpoint or a model; its rewards as a table."""

import bisect
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siirl.checkpoint.files import MANIFEST
from siirl.command_line import DEFAULT_CONFIG
from siirl.commands.recorded_run import RecordedRun, from_here, run_of
from siirl.commands.resume import permissions
from siirl.errors import ConfigError, DataError
from siirl.runs.folder_reader import Skipped, json_lines, number, numbered
from siirl.runs.run_files import read_config, read_history
from siirl.runs.run_text import table
from siirl.show.conversation_text import reward_of

MOST_BYTES = 1 << 36
RESPONSES, RESULT_FILE = "responses", "eval.json"
ALWAYS = {
    "trainer.val_only": "true",
    "trainer.overwrite": "false",
    "trainer.logger": "[console]",
    "trainer.save_freq": "-1",
    "trainer.trace": "false",
    "trainer.dump_rollouts_dir": "null",
    "trainer.rollout_data_dir": "null",
}
"""Keys of every evaluation, whatever the run had."""


def evaluate(
    model: str,
    overrides: list[str],
    config_name: str | None,
    samples: int | None,
    right: float,
    out: Path | None,
    trust: bool,
) -> tuple[int, dict[str, Any] | None]:
    """(exit code of the job, what `siirl eval --json` prints; None if the job failed).

    model: a run, a checkpoint, a model's directory or its name on a hub; what lies in a run is evaluated by
    that run's keys. overrides go before them. samples: responses of each prompt. right: the least reward of
    a right one. trust: others may be able to change the run's folder. ConfigError for what cannot be
    evaluated.
    """
    path = Path(model).expanduser().absolute()
    run = run_of(path) if path.exists() else None
    recorded = RecordedRun.read(run) if run else None
    by_its_keys = recorded if config_name is None else None
    permitted = permissions(by_its_keys, "siirl eval", overrides, trust) if by_its_keys else []
    keys = dict(ALWAYS) | _weights(model, path, recorded)
    out = (out or Path("outputs/eval") / f"{path.name}_{time.strftime('%Y%m%d_%H%M%S')}").absolute()
    keys |= {
        "trainer.output_dir": str(out),
        "trainer.default_local_dir": str(out / "checkpoints"),
        "trainer.validation_data_dir": str(out / RESPONSES),
    }
    if samples is not None:
        sampling = "actor_rollout_ref.rollout.val_kwargs"
        keys |= {
            f"{sampling}.n": str(samples),
            f"{sampling}.do_sample": "true",
            f"{sampling}.temperature": "1.0",
        }
    words = permitted + [f"{name}={value}" for name, value in keys.items()] + from_here(overrides)
    config = config_name or (recorded.config_file if recorded else DEFAULT_CONFIG)
    if by_its_keys:
        by_its_keys.enter_directory()
    job = [sys.executable, "-m", "siirl.main_dag", "--config-name", config, *words]
    code = subprocess.run(job, stdout=sys.stderr).returncode  # what it prints is no part of the result
    if code:
        return code, None
    told = {"model": model, "output": str(out), "right_from": right, **results(out, right)}
    (out / RESULT_FILE).write_text(json.dumps(told, indent=1))
    return 0, told


def _weights(model: str, path: Path, recorded: RecordedRun | None) -> dict[str, str]:
    """The keys that say whose weights are evaluated."""
    checkpoint = path
    if recorded and path in (recorded.folder, recorded.checkpoints):
        newest, exported = recorded.newest_checkpoint(), recorded.folder / "hf_model"
        if newest is None and exported.is_dir():
            return _weights(str(exported), exported, recorded)
        if newest is None:
            raise ConfigError(
                f"{recorded.folder} has neither checkpoints nor hf_model: there are no weights to evaluate. "
                "Start the run with trainer.save_freq, or let it end: it then writes hf_model."
            )
        checkpoint = newest
    if (checkpoint / MANIFEST).is_file():
        if recorded is None:
            raise ConfigError(
                f"{checkpoint} lies in no run's folder, whose run_config.yaml says what its models are. Turn "
                "it into a model by siirl export, and evaluate that with the keys of your data and rewards."
            )
        return {
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": str(checkpoint),
            "trainer.resume_changed": "true",  # nothing goes on: rewards and environments may be others
        }
    if path.is_dir() and not (path / "config.json").is_file():
        inside = sorted(found.parent.name for found in path.glob("*/config.json"))
        several = f" It has several models ({', '.join(inside)}): name one." if inside else ""
        raise ConfigError(
            f"{model} is neither a checkpoint nor a model's directory: it has no config.json.{several} A "
            "run, a checkpoint global_step_N, a model's directory or a name on a hub can be evaluated."
        )
    source = str(path) if path.is_dir() else model
    return {
        "trainer.rollout_only": "true",
        "actor_rollout_ref.rollout.max_lag": "0",
        "actor_rollout_ref.model.path": source,
        "critic.model.path": source,  # as it follows the policy's, unless a run's file has set it
    }


def results(out: Path, right: float) -> dict[str, Any]:
    """What a validation came to: by file, data source and agent, and the job's own metrics.

    DataError: the job wrote no responses.
    """
    skipped = Skipped()
    starts = _file_starts(out)
    scores: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for _, path in numbered(out / RESPONSES, "step_", ".jsonl", skipped):
        for row in json_lines(path, MOST_BYTES, skipped):
            index = row.get("sample_index")
            file = _file_of(starts, index) if isinstance(index, int) else ""
            for agent, score in _scores(row).items():
                key = (file, str(row.get("data_source")), agent)
                scores.setdefault(key, {}).setdefault(int(index or 0), []).append(score)
    if not scores:
        raise DataError(f"{out / RESPONSES} has no scored responses: the workflow validates nothing.")
    history = read_history(out, skipped)
    return {
        "results": [
            {"file": file, "data_source": source, "agent": agent, **summary(prompts.values(), right)}
            for (file, source, agent), prompts in sorted(scores.items())
        ],
        "metrics": {
            name: points[max(points)] for name, points in sorted(history.series.items()) if "val/" in name
        },
        "unreadable": dict(skipped),
    }


def summary(prompts: Any, right: float) -> dict[str, Any]:
    """Mean reward and pass@k of the scores of each prompt, for k = 1, 2, 4, ... and the fewest responses."""
    scored = [list(scores) for scores in prompts]
    everything = list(itertools.chain.from_iterable(scored))
    fewest = min(map(len, scored))
    powers = [2**power for power in range(fewest.bit_length()) if 2**power <= fewest]
    counts = [(len(scores), sum(score >= right for score in scores)) for scores in scored]
    return {
        "prompts": len(scored),
        "responses": len(everything),
        "reward": sum(everything) / len(everything),
        "pass_at": {
            str(k): sum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
            for k in sorted({*powers, fewest})
        },
    }


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of n responses, drawn without putting back, have a right one among them.

    Source: Chen et al., "Evaluating large language models trained on code" (2021), eq. 1.
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def table_text(told: dict[str, Any]) -> str:
    """What `siirl eval` prints."""
    ks = sorted({k for row in told["results"] for k in row["pass_at"]}, key=int)
    head = ("file", "data source", "agent", "prompts", "responses", "reward", *(f"pass@{k}" for k in ks))
    rows = [
        (
            Path(row["file"]).name or "-",
            row["data_source"],
            row["agent"] or "-",
            str(row["prompts"]),
            str(row["responses"]),
            f"{row['reward']:.4f}",
            *(f"{row['pass_at'][k]:.4f}" if k in row["pass_at"] else "-" for k in ks),
        )
        for row in told["results"]
    ]
    about = f"pass: a reward of at least {told['right_from']:g}; all responses are in {told['output']}"
    return f"{table(head, rows, None)}\n{about}"


def _scores(row: dict[str, Any]) -> dict[str, float]:
    """Agent -> its score; "" where agents do not talk and there is one."""
    rewards = row.get("rewards")
    found = rewards if isinstance(rewards, dict) else {_agent(row): reward_of(row)}
    return {str(agent): value for agent in found if (value := number(found[agent])) is not None}


def _agent(row: dict[str, Any]) -> str:
    """The agent of a row of no interaction, by its node; "" of the only one."""
    name = str(row.get("node", "")).partition(".")[0]
    return name.replace("_", " ") if name.startswith("agent_") else ""


def _file_starts(out: Path) -> tuple[list[int], list[str]]:
    """(number of the first row of each validation file among all rows, the files)."""
    from siirl.data.data_files import list_files, open_rows

    files = list_files(read_config(out, Skipped()).get("data.val_files") or ())
    counts = [open_rows(path).num_rows for path in files]
    return [0, *itertools.accumulate(counts)][: len(files)], [str(path) for path in files]


def _file_of(starts: tuple[Sequence[int], Sequence[str]], index: int) -> str:
    first, files = starts
    return files[bisect.bisect_right(first, index) - 1] if files else ""
