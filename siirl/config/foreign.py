"""What keys of siiRL and verl are called here, what becomes of them, and whose defaults are others.

The one table of these facts (foreign_keys.txt, which says how it is written): the messages about unknown
keys, `siirl migrate` and docs/migration.md read it.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config.algorithm_table import WITH_CRITIC, losses_with

POLICY = "actor_rollout_ref"
ROLLOUT = f"{POLICY}.rollout"
CORRECTION = f"{POLICY}.actor.rollout_correction"


@dataclass(frozen=True)
class Foreign:
    """A key that is not one of siirl, or means something else here."""

    here: str = ""
    """The key with its meaning, "" if there is none; a trailing `*` takes the rest of the name."""
    why: str = ""
    """What became of it, for a comment."""
    asks_nothing: tuple[str, ...] = ()
    """Values with which the key changes nothing; with any other, what it asks for cannot be had (unless
    harmless)."""
    harmless: bool = False
    """Leaving the key out never changes what is computed."""


OFF = ("false", "null", "none", "")


def _read() -> Iterator[tuple[str, Foreign]]:
    status = why = ""
    for line in Path(__file__).with_name("foreign_keys.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            name, *said = line.strip().split(" | ")
            here, remark, values = (*said, "", "", "")[:3] if status == "moved" else ("", why, "".join(said))
            words = (OFF if word == "off" else (word,) for word in values.split())
            yield name, Foreign(here, remark, tuple(itertools.chain(*words)), harmless=status == "dropped")
        elif line and not line.startswith("#"):
            status, _, why = line.partition(": ")
            assert status in ("moved", "dropped", "lost"), f"{status!r} is no status"


FOREIGN: dict[str, Foreign] = dict(_read())
"""Key there, or pattern -> what became of it; the first that fits a name counts."""


@dataclass(frozen=True)
class OtherDefault:
    """A key of siirl whose default elsewhere is another; text in ${} names the key that it follows there."""

    changes: str
    """What the difference changes."""
    verl: Any = None
    siirl: Any = None
    when: str = ""
    """ "key=a|b": only then does the key act."""


GAE = f"algorithm.adv_estimator={'|'.join(WITH_CRITIC)}"
MEGATRON = f"{POLICY}.actor.strategy=megatron"
VLLM = f"{ROLLOUT}.name=vllm"
DPPO = f"{POLICY}.actor.policy_loss.{losses_with('ratio_cap')}"
CLIP, WAIT = "clip_ratio alone changes nothing there", "where parameters wait: speed, memory"


def _both(changes: str, there: Any, when: str = "") -> OtherDefault:
    return OtherDefault(changes, verl=there, siirl=there, when=when)


OTHER_DEFAULTS: dict[str, OtherDefault] = {
    "critic.optim.lr": _both("how fast the critic learns", 1e-5, GAE),
    f"{ROLLOUT}.tensor_model_parallel_size": _both("ranks of one engine: speed, memory", 2, VLLM),
    "data.train_batch_size": _both("prompts of a step", 1024),
    f"{POLICY}.actor.ppo_mini_batch_size": _both("prompts of an optimizer step", 256),
    "trainer.balance_batch": _both("which rank computes which rows: speed", True),
    f"{POLICY}.actor.clip_ratio_low": _both(CLIP, 0.2),
    f"{POLICY}.actor.clip_ratio_high": _both(CLIP, 0.2),
    f"{POLICY}.actor.policy_loss.clip_divergence_low": OtherDefault("trust region", verl=0.2, when=DPPO),
    f"{POLICY}.actor.policy_loss.clip_divergence_high": OtherDefault("trust region", verl=0.2, when=DPPO),
    f"{POLICY}.actor.policy_loss.ratio_cap": OtherDefault("greatest weight of a token", verl=3.0, when=DPPO),
    "algorithm.filter_groups.max_num_gen_batches": OtherDefault(
        "rounds of dynamic sampling; 0: no limit", verl=0, when="algorithm.filter_groups.enable=true"
    ),
    f"{POLICY}.actor.megatron.param_offload": _both(WAIT, False, MEGATRON),
    "critic.megatron.param_offload": _both(WAIT, False, "critic.strategy=megatron"),
}


def foreign(name: str) -> tuple[Foreign, str] | None:
    """(what is known of a foreign key, its name here or ""), the first entry that fits; None if unknown."""
    for pattern, entry in FOREIGN.items():
        found = re.fullmatch(_regular(pattern), name)
        if found:
            here = entry.here
            for part in found.groups() if "*" in here else ():
                here = here.replace("*", part, 1)
            return entry, here
    return None


def foreign_hint(name: str) -> str:
    """A sentence on an unknown key that siiRL or verl has, or an empty string."""
    known = foreign(name)
    if known is None:
        return ""
    entry, here = known
    if here:
        more = f" ({entry.why})" if entry.why else ""
        return f" siiRL or verl has it; here it is {here}{more}."
    return f" siiRL or verl has it; there is no such key here: {entry.why}. Remove it."


def _regular(pattern: str) -> str:
    """`.*` at the end takes any number of names, `*` elsewhere part of one, at the start any number."""
    body = re.escape(pattern)
    if body.endswith(r"\.\*"):
        body = body[: -len(r"\.\*")] + r"\.(.+)"
    if body.startswith(r"\*\."):
        body = r"(.+)\." + body[len(r"\*\.") :]
    return body.replace(r"\*", "([^.]*)")
