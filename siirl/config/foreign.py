"""What keys of siiRL and verl are called here, what becomes of them, and whose defaults are others.

The one table of these facts (foreign_keys.txt, which says how it is written): the messages about unknown
keys, `siirl migrate` and docs/migration_reference.md read it.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config.algorithm_table import GROUPED, WITH_CRITIC, losses_with

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
    preset: Any = None
    """Of siiRL before its main_dag: the preset that siirl.client.main_dag reads."""
    when: str = ""
    """ "key=a|b" or "key>1", joined by " and ": only then does the key act."""
    at_most: str = ""
    """The key whose value bounds the default: a larger one does the same there, and is refused here."""
    same: bool = False
    """Whether the default here does the same: a migrated script shows it, as the reader may look for it."""


GAE = f"algorithm.adv_estimator={'|'.join(WITH_CRITIC)}"
GROUPS = f"algorithm.adv_estimator={'|'.join(GROUPED)}"
MEGATRON = f"{POLICY}.actor.strategy=megatron"
CRITIC_MEGATRON = f"{GAE} and critic.strategy=megatron"
VLLM = f"{ROLLOUT}.name=vllm"
DPPO = f"{POLICY}.actor.policy_loss.{losses_with('ratio_cap')}"
CLIP, WAIT = "clip_ratio alone changes nothing there", "where parameters wait: speed, memory"
SPLIT = "activations are split over the tensor parallel ranks: memory"
TABLES = "siirl's own tables read the same weights"


def _all(changes: str, there: Any, when: str = "") -> OtherDefault:
    return OtherDefault(changes, there, there, there, when)


def _not_siirl(changes: str, there: Any, when: str = "") -> OtherDefault:
    """Of verl, and of siiRL until it lost its preset."""
    return OtherDefault(changes, verl=there, preset=there, when=when)


def _verl(changes: str, there: Any, when: str = "", same: bool = False) -> OtherDefault:
    return OtherDefault(changes, verl=there, when=when, same=same)


OTHER_DEFAULTS: dict[str, OtherDefault] = {
    "trainer.n_gpus_per_node": _all("devices", 8),
    f"{ROLLOUT}.n": _all("responses of a prompt", 1, GROUPS),
    "critic.optim.lr": _not_siirl("how fast the critic learns", 1e-5, GAE),
    f"{ROLLOUT}.tensor_model_parallel_size": _not_siirl("ranks of one engine: speed, memory", 2, VLLM),
    "data.train_batch_size": _all("prompts of a step", 1024),
    f"{POLICY}.actor.ppo_mini_batch_size": _all("prompts of an optimizer step", 256),
    "critic.ppo_mini_batch_size": OtherDefault(
        "prompts of an optimizer step", siirl=256, when=GAE, at_most="data.train_batch_size"
    ),
    "critic.ppo_epochs": _not_siirl("passes over a batch", f"${{{POLICY}.actor.ppo_epochs}}", GAE),
    "critic.shuffle": _not_siirl("order of mini-batches", f"${{{POLICY}.actor.shuffle}}", GAE),
    "critic.loss_agg_mode": _not_siirl("how tokens are averaged", f"${{{POLICY}.actor.loss_agg_mode}}", GAE),
    "critic.forward_max_token_len_per_gpu": _not_siirl(
        "tokens of a pass without gradient: memory",
        "${critic.ppo_max_token_len_per_gpu}",
        f"{GAE} and critic.use_dynamic_bsz=true",
    ),
    "trainer.balance_batch": _not_siirl("which rank computes which rows: speed", True),
    f"{POLICY}.actor.clip_ratio_low": _all(CLIP, 0.2),
    f"{POLICY}.actor.clip_ratio_high": _all(CLIP, 0.2),
    f"{POLICY}.actor.policy_loss.clip_divergence_low": _verl("trust region", 0.2, DPPO),
    f"{POLICY}.actor.policy_loss.clip_divergence_high": _verl("trust region", 0.2, DPPO),
    f"{POLICY}.actor.policy_loss.ratio_cap": _verl("greatest weight of a token", 3.0, DPPO),
    "algorithm.filter_groups.max_num_gen_batches": _verl(
        "rounds of dynamic sampling; 0: no limit", 0, "algorithm.filter_groups.enable=true"
    ),
    f"{POLICY}.actor.megatron.param_offload": _not_siirl(WAIT, False, MEGATRON),
    f"{POLICY}.ref.megatron.param_offload": _not_siirl(
        WAIT, f"${{{POLICY}.actor.megatron.param_offload}}", MEGATRON
    ),
    "critic.megatron.param_offload": _not_siirl(WAIT, False, CRITIC_MEGATRON),
    f"{POLICY}.actor.megatron.sequence_parallel": _not_siirl(
        SPLIT, True, f"{MEGATRON} and {POLICY}.actor.megatron.tensor_model_parallel_size>1"
    ),
    "critic.megatron.sequence_parallel": _not_siirl(
        SPLIT, True, f"{CRITIC_MEGATRON} and critic.megatron.tensor_model_parallel_size>1"
    ),
    f"{POLICY}.actor.megatron.use_mbridge": _verl(TABLES, True, MEGATRON, same=True),
    "critic.megatron.use_mbridge": _verl(TABLES, True, CRITIC_MEGATRON, same=True),
}


@functools.cache
def foreign(name: str) -> tuple[Foreign, str] | None:
    """(what is known of a foreign key, its name here or ""), the first entry that fits; None if unknown.

    A group that has another name here is read on under that name.
    """
    for pattern, entry in FOREIGN.items():
        found = re.fullmatch(_regular(pattern), name)
        if found:
            here = entry.here
            for part in found.groups() if "*" in here else ():
                here = here.replace("*", part, 1)
            moved = foreign(here) if here.endswith(name.rpartition(".")[2]) and here != name else None
            return moved or (entry, here)
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
