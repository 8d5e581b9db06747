"""The settings of a run as the page shows them: all keys with who set them, and those looked at first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.config.values import SECRET_KEYS
from siirl.observe.printable import printable
from siirl.runs.folder_reader import LeftOut, mapping
from siirl.runs.run_files import read_config

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


def looked_at(folder: Path) -> list[list[str]]:
    """[name, value, key] of the settings that say most about a run."""
    config = read_config(folder, LeftOut())
    off = (None, "", [], 0, False)
    return [
        [name, _text(key, config[key]), key]
        for name, key in LOOKED_AT.items()
        if key in config and config[key] not in off
    ]


def settings(folder: Path, job: Mapping[str, Any], plan: Plan | None, left_out: LeftOut) -> list[list[str]]:
    """[key, value, "set" or "chosen" or "", why it was chosen] of all keys of a run, by name."""
    config = read_config(folder, left_out)
    explicit = mapping(job.get("config")).get("explicit")
    by_user = {str(name) for name in explicit} if isinstance(explicit, list) else set()
    chosen: dict[str, list[tuple[str, str]]] = {}
    for choice in plan.choices if plan is not None else ():
        for key, value in choice.keys.items():
            chosen.setdefault(key, []).append((f"{choice.model}: {value}", choice.reason))
    if len(config) > MOST_KEYS:
        left_out.add("settings", f"the first {MOST_KEYS} of {len(config)} keys are shown")
    rows = []
    for name in sorted(config)[:MOST_KEYS]:
        text, how, why = _text(name, config[name]), "set" if _is_set(name, by_user) else "", ""
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
