"""What a run is and where it stands: its record, its configuration, its ranks; its errors and logs."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from siirl.compiler.backends import ROLLOUT_BACKENDS
from siirl.compiler.plan import Plan
from siirl.config.values import SECRET_KEYS
from siirl.observe.logs import TAIL_BYTES, log_lines
from siirl.observe.printable import printable
from siirl.runs.folder_reader import Skipped, attempt, content, json_file, mapping, number, whole, word
from siirl.runs.rank_now import doing
from siirl.runs.run_files import RESUMED, latest_metrics, read_config, read_starts
from siirl.runs.run_state import RunState, attempt_text
from siirl.runs.run_text import moment_text
from siirl.view.rank_groups import MOST_CELLS, RankGroup, cells, places

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
LOOKED_AT = {
    "model": "actor_rollout_ref.model.path",
    "workflow": "dag.workflow_path",
    "algorithm": "algorithm.adv_estimator",
    "training data": "data.train_files",
    "reward function": "custom_reward_function.path",
    "prompts a step": "data.train_batch_size",
    "responses of a prompt": f"{ROLLOUT}.n",
    "longest response": "data.max_response_length",
    "learning rate": f"{ACTOR}.optim.lr",
    "mini-batch, prompts": f"{ACTOR}.ppo_mini_batch_size",
    "KL loss": f"{ACTOR}.use_kl_loss",
    "entropy coefficient": f"{ACTOR}.entropy_coeff",
    "temperature": f"{ROLLOUT}.temperature",
    "training engine": f"{ACTOR}.strategy",
    "rollout engine": f"{ROLLOUT}.name",
    "staleness, steps": f"{ROLLOUT}.max_lag",
    "LoRA rank": "actor_rollout_ref.model.lora_rank",
}
"""What the page calls a setting -> its key; those that are off are left out."""
MOST_KEYS, MOST_TEXT = 5_000, 2_000
_HIDDEN = "ray_init.env_vars."
_RESUME = re.compile(r"\bsiirl(?:\.cli)? resume ")


def looked_at(folder: Path) -> list[list[str]]:
    """[name, value, key] of the settings that say most about a run."""
    config = read_config(folder, Skipped())
    off = (None, "", [], 0, False)
    return [
        [name, _text(key, config[key]), key]
        for name, key in LOOKED_AT.items()
        if key in config and config[key] not in off
    ]


def settings(folder: Path, job: Mapping[str, Any], plan: Plan | None, skipped: Skipped) -> list[list[str]]:
    """[key, value, who set it, why it was chosen] of all keys of a run, by name.

    Who: "set" (a user), "siirl resume", "chosen" (the plan), or "".
    """
    config = read_config(folder, skipped)
    command = read_starts(folder, Skipped())[1].command
    explicit = mapping(job.get("config")).get("explicit")
    by_user = {str(name) for name in explicit} if isinstance(explicit, list) else set()
    chosen: dict[str, list[tuple[str, str]]] = {}
    for choice in plan.choices if plan is not None else ():
        for key, value in choice.keys.items():
            chosen.setdefault(key, []).append((f"{choice.model}: {value}", choice.reason))
    if len(config) > MOST_KEYS:
        skipped.add("settings", f"the first {MOST_KEYS} of {len(config)} keys are shown")
    rows = []
    for name in sorted(config)[:MOST_KEYS]:
        text, how, why = _text(name, config[name]), "set" if _is_set(name, by_user) else "", ""
        if how and name in RESUMED and _RESUME.search(command) and f"{name}=" not in command:
            how = "siirl resume"
        if name in chosen and not how:
            values, reasons = zip(*chosen[name], strict=True)
            text, how, why = "; ".join(dict.fromkeys(values)), "chosen", "; ".join(dict.fromkeys(reasons))
        rows.append([printable(name), printable(text)[:MOST_TEXT], how, printable(why)[:MOST_TEXT]])
    return rows


def _is_set(name: str, by_user: set[str]) -> bool:
    """Whether a user set a key, or a mapping that it is in."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in by_user for n in range(1, len(parts) + 1))


def _text(name: str, value: Any) -> str:
    """A value as it is written on the command line; secrets are not shown."""
    if name.endswith(SECRET_KEYS) or name.startswith(_HIDDEN):
        return "***" if value else ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return printable("[" + ",".join(map(str, value)) + "]")[:MOST_TEXT]
    return printable(str(value))[:MOST_TEXT]


MOST_LOGS, MOST_PLACES = 64, 200
SHOWN_PACKAGES = ("torch", "transformers", "vllm", "sglang")
MOST_AGENTS = 256
ENGINES = {
    "rollout/engine_restarts": "engines started again since the report before",
    "rollout/in_flight": "prompts in flight after the step",
    "rollout/restarted": "prompts restarted, as too old or after a resume",
    "rollout/replayed": "episodes brought back by a resume",
    "rollout/dropped": "prompts given up as too old",
    "rollout/staleness_max": "steps, age of the oldest token that was trained",
    "rollout/vllm_kv_cache_usage": "share of the KV cache in use when generation ended",
    "rollout/vllm_preemptions_total": "requests preempted for lack of KV cache since the start",
    "rollout/prefix_cache_hits": "share of prompt tokens that were in the engine's cache",
    "reward/worker_death": "reward processes that died and were restarted",
    "reward/worker_leak": "reward processes that were replaced because they held ever more memory or files",
    "sampling/groups_left": "prompts kept for the next step",
    "perf/idle_s_max": "seconds, most that a rank waited for others",
}
"""What tells how engines do, and what waits at them or for others."""
NUMBERS = ("sessions", "samplers", "waiting", "waiting_bytes", "tokens", "unread_bytes")
"""What a service tells of each tenant, beside its adapters."""
MOST_STATUS_BYTES = 8 << 20
_LOG = re.compile(rf"(.*rank_\d+|({'|'.join(ROLLOUT_BACKENDS)})_.*)\.log")


def trainer_of(job: dict[str, Any]) -> dict[str, Any]:
    """The keys of `trainer` in the run's configuration."""
    return mapping(mapping(job.get("config")).get("trainer"))


def overview(
    run: RunState,
    job: dict[str, Any],
    plan: Plan | None,
    groups: Mapping[str, list[RankGroup]],
    skipped: Skipped,
) -> dict[str, Any]:
    """What ran, how far it is, in which state, by which command; where its ranks are or ended."""
    _, start = read_starts(run.folder, Skipped(), packages=True)
    where = places(run.ranks, attempt(lambda: doing(plan, run.ranks), {}, "what ranks do", skipped))
    if len(where) > MOST_PLACES:
        skipped.add(
            "ranks", f"they are in {len(where)} places, of which the {MOST_PLACES} furthest behind are shown"
        )
    shown = {kind: some for kind, some in groups.items() if kind != "alike" and run.ranks}
    for kind, some in shown.items():
        if len(some) > MOST_CELLS:
            skipped.add(kind, f"the first {MOST_CELLS} of {len(some)} are shown")
    commit = word(start.siirl.get("commit"))[:12]
    return {
        "name": _given_name(job) or run.folder.name,
        "folder": printable(str(run.folder)),
        "state": run.status,
        "cause": run.cause,
        "how_on": run.how_on,
        "step": run.step or None,
        "total": run.total_steps,
        "left_s": run.left_s,
        "command": run.command,
        "host": run.host,
        "started": moment_text(run.started_s) if run.started_s else "",
        "starts": run.starts,
        "world_size": whole(job.get("world_size")),
        "commit": commit + (" (changed)" if start.siirl.get("changed") else ""),
        "packages": {name: start.packages[name] for name in SHOWN_PACKAGES if name in start.packages},
        "settings": attempt(lambda: looked_at(run.folder), [], "settings", skipped),
        "places": where[:MOST_PLACES],
        "groups": {kind: cells(some[:MOST_CELLS], where) for kind, some in shown.items()},
    }


def _given_name(job: dict[str, Any]) -> str:
    """trainer.experiment_name, unless it is the default, which many runs have."""
    explicit = mapping(job.get("config")).get("explicit")
    is_default = isinstance(explicit, list) and "trainer.experiment_name" not in explicit
    return "" if is_default else word(trainer_of(job).get("experiment_name"))


def health(run: RunState, skipped: Skipped) -> dict[str, Any]:
    """Attempts, the last heartbeat, engines and what waits at them; errors that ranks left behind, first
    ones first, and the last lines of the logs.
    """
    if len(run.failures) > MOST_LOGS:
        skipped.add("errors", f"those of {MOST_LOGS} of {len(run.failures)} ranks are shown")
    failures = [
        {**{key: printable(str(value)) for key, value in asdict(failure).items()}, "rank": failure.rank}
        for failure in run.failures[:MOST_LOGS]
    ]
    logs = attempt(lambda: _logs(run.folder / "logs", skipped), [], "logs", skipped)
    return {
        "starts": run.starts,
        "attempts": [
            {"attempt": one.attempt, "ended_s": one.ended_s, "cause": attempt_text(one), "next": one.next}
            for one in run.attempts
        ],
        "amendments": list(run.amendments),
        "last_sign_s": run.last_sign_s or None,
        "engines": attempt(lambda: _engines(latest_metrics(run.folder)), [], "engines", skipped),
        "service": attempt(lambda: _service(run.folder, skipped), None, "service", skipped),
        "errors": failures,
        "logs": logs,
    }


def _engines(latest: Mapping[str, float]) -> list[list[Any]]:
    """[metric, agent or None, newest value, what it is]"""
    return [
        [metric, agent, latest[name], meaning]
        for metric, meaning in ENGINES.items()
        for agent, name in ((None, metric), *((n, f"agent_{n}/{metric}") for n in range(MOST_AGENTS)))
        if name in latest
    ]


def _service(folder: Path, skipped: Skipped) -> dict[str, Any] | None:
    """Of a service: when it said so, and of each tenant its name, the rank of each adapter that it trains,
    and NUMBERS. None for a run that is none."""
    file = folder / "service" / "status.json"
    if not file.is_file():
        return None
    told = json_file(file, MOST_STATUS_BYTES, skipped)
    tenants = mapping(told.get("tenants"))
    if len(tenants) > MOST_PLACES:
        skipped.add("tenants", f"the first {MOST_PLACES} of {len(tenants)} are shown")
    rows: list[list[Any]] = []
    for name, one in list(tenants.items())[:MOST_PLACES]:
        row = mapping(one)
        ranks = [whole(rank) or 0 for rank in mapping(row.get("adapters")).values()]
        rows.append([printable(name), ranks[:MOST_PLACES], *(whole(row.get(key)) or 0 for key in NUMBERS)])
    return {"told_s": number(told.get("time")), "tenants": rows}


def _logs(folder: Path, skipped: Skipped) -> list[dict[str, Any]]:
    paths = (
        sorted(path for path in folder.glob("*.log") if _LOG.fullmatch(path.name)) if folder.is_dir() else []
    )
    paths.sort(key=lambda path: (len(path.name), path.name))
    if len(paths) > MOST_LOGS:
        skipped.add("logs", f"the last lines of {MOST_LOGS} of {len(paths)} are shown")
    texts = ((path, content(path, skipped, TAIL_BYTES)) for path in paths[:MOST_LOGS])
    return [{"name": printable(path.name), "lines": log_lines(text)} for path, text in texts]
