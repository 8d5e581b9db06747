"""The reference of the configuration, generated from the schema, a page for each group of keys; and where a
default of ours is not that of siiRL, and why, which a page of its own shows.

`python tools/configuration_pages.py FOLDER` writes the pages.
"""

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.config.aliases import ALIASES
from siirl.config.keys import AUTO, Key, has_one_value
from siirl.config.resolve import FOLLOWS
from siirl.config.root import all_keys, get_group_class
from siirl.config.unused_keys import group_docs
from siirl.config.values import show, type_name


@dataclass(frozen=True)
class Deviation:
    """siiRL's default of a key, and why ours is another."""

    reference: Any
    reason: str


FILLED_IN = "the same when unset; ours is filled in when the configuration is read"

BY_NAME = "whose data and model a run takes is said by name"

ONE_STEP = "an optimizer step on each batch where nobody asks for more: 256 does not divide every batch"

SCHEDULE = "the schedule is warmup_style's under each strategy, so that changing the strategy changes nothing"

DEVIATIONS: dict[str, Deviation] = {
    "trainer.logger": Deviation(["console", "wandb"], "wandb needs an account and a package of its own"),
    "actor_rollout_ref.actor.optim.lr_decay_style": Deviation("linear", SCHEDULE),
    "critic.optim.lr_decay_style": Deviation("linear", SCHEDULE),
    "trainer.device": Deviation("cuda", "auto takes cuda where there is one, and runs without a GPU as well"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Deviation(256, ONE_STEP),
    "critic.ppo_mini_batch_size": Deviation(256, ONE_STEP),
    "data.train_batch_size": Deviation(1024, "a step of 1,024 prompts takes minutes where a task is begun"),
    "data.train_files": Deviation(["~/data/rlhf/gsm8k/train.parquet"], BY_NAME),
    "data.val_files": Deviation(["~/data/rlhf/gsm8k/test.parquet"], BY_NAME),
    "actor_rollout_ref.model.path": Deviation("~/models/deepseek-llm-7b-chat", BY_NAME),
    "critic.model.path": Deviation("~/models/deepseek-llm-7b-chat", BY_NAME),
    "reward_model.model.path": Deviation("~/models/deepseek-llm-7b-chat", BY_NAME),
    "trainer.project_name": Deviation("siirl_examples", "a run is named by what it does"),
    "trainer.experiment_name": Deviation("gsm8k", "a run is named by what it does"),
    "trainer.val_before_train": Deviation(True, "no validation without data.val_files"),
    "trainer.default_local_dir": Deviation(
        "checkpoints/siirl_examples/gsm8k", "everything that a run writes lies below trainer.output_dir"
    ),
    "profiler.save_path": Deviation(
        "./prof_data", "everything that a run writes lies below trainer.output_dir"
    ),
    "profiler.profile_steps": Deviation([0], "steps count from 1, and the first one is unlike the others"),
    "profiler.roles": Deviation(
        ["generate", "compute_reward"],
        "there they count with profiler.discrete=true only, and the whole step is recorded without; here "
        "they count whenever they are given",
    ),
    "actor_rollout_ref.rollout.multi_turn.format": Deviation(
        "hermes",
        "many families write tool calls otherwise; auto reads them as the chat template writes them",
    ),
    "actor_rollout_ref.rollout.prompt_length": Deviation(None, FILLED_IN),
    "actor_rollout_ref.rollout.response_length": Deviation(None, FILLED_IN),
    "actor_rollout_ref.actor.data_loader_seed": Deviation(None, FILLED_IN),
    "critic.data_loader_seed": Deviation(None, FILLED_IN),
    "critic.ppo_micro_batch_size_per_gpu": Deviation(None, FILLED_IN),
    "reward_model.micro_batch_size_per_gpu": Deviation(None, FILLED_IN),
}


GENERATED = "Generated from the schema by `make docs`; do not edit."

HEADER = f"""\
# Configuration reference

{GENERATED}

A run is configured by `key=value` on the command line, over a preset
(`siirl/config/ppo_dag_trainer.yaml`, or a YAML file of your own given by `--config-name FILE.yaml`),
over the defaults on these pages. `--cfg job` prints the outcome. [The keys that matter](../keys.md)
are enough for most runs.

- Unknown keys and values of a wrong type are errors that name the closest key.
- A list is written `[a,b]`; a single path may stand for a list of one. `null` is no value.
  `${{other.key}}` inserts another key.
- Maps are free-form: any key may be set below them, with or without a leading `+`.
- `~key` puts a key that a preset has set back to its default.
- `auto`: the plan chooses, by what memory and packages there are; `siirl plan` says what and why
  ([performance](../tuning.md)). What is set is taken.
- A node of the DAG may override keys for itself (`config:`).

In brackets: the type of a key, and its default. Some keys do nothing. **Later**: known, but its feature
does not exist yet, so any value but the default is refused. **No effect**: accepted, because launch
scripts set it, and answered by a warning. **Older name** of another key. **Replaced**: refused, with the
key to use instead. They stand last in a group.
"""

PLACES: dict[str, tuple[str, ...]] = {
    "files, columns, prompt and response lengths, batch size": ("data", "data.columns"),
    "the model, LoRA, kernels, gradient checkpointing": ("actor_rollout_ref.model",),
    "the algorithm (advantage estimator, KL in the reward, credit among agents)": (
        "algorithm",
        "algorithm.credit",
        "algorithm.filter_groups",
    ),
    "the loss (clipping, KL to a reference, entropy, mini-batches and micro-batches)": (
        "actor_rollout_ref.actor",
        "actor_rollout_ref.actor.policy_loss",
    ),
    "learning rate, its schedule, weight decay": ("actor_rollout_ref.actor.optim",),
    "off-policy corrections, teachers": (
        "actor_rollout_ref.actor.rollout_correction",
        "actor_rollout_ref.actor.distill",
        "teacher",
    ),
    "sampling, the rollout engine (vLLM, SGLang), its memory, staleness": ("actor_rollout_ref.rollout",),
    "validation (sampling, how often, what is kept)": ("actor_rollout_ref.rollout.val_kwargs", "trainer"),
    "turns, tools, agents, environments": (
        "actor_rollout_ref.rollout.multi_turn",
        "actor_rollout_ref.rollout.agent",
        "actor_rollout_ref.serve",
    ),
    "clients that train here by Tinker's API": ("service",),
    "rewards (a function, a reward model, a judge, a service)": (
        "custom_reward_function",
        "reward_model",
        "reward_model.judge",
        "reward_model.remote",
    ),
    "FSDP2 (sharding, number types, offload)": (
        "actor_rollout_ref.actor.fsdp_config",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    ),
    "Megatron-Core (parallel sizes, number types, its own options)": ("actor_rollout_ref.actor.megatron",),
    "steps, checkpoints, loggers, output folder, GPUs, machines": (
        "trainer",
        "actor_rollout_ref.actor.checkpoint",
        "ray_init",
    ),
    "the workflow, profiles": ("dag", "profiler"),
}
"""What a user wants to set -> the groups that have it, for the list at the beginning of the page."""


def bullet(text: str) -> str:
    """An entry of a list in Markdown, in lines of at most 120 characters where words allow it."""
    return textwrap.fill(
        f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("Data", ("data",)),
    "model": ("Model", ("actor_rollout_ref", "actor_rollout_ref.model")),
    "actor": ("Actor: loss, optimizer, backend", ("actor_rollout_ref.actor",)),
    "rollout": ("Rollout: engine, sampling, agents", ("actor_rollout_ref.rollout",)),
    "ref": ("Reference policy", ("actor_rollout_ref.ref",)),
    "critic": ("Critic", ("critic",)),
    "reward": ("Rewards", ("reward_model", "custom_reward_function")),
    "algorithm": ("Algorithm", ("algorithm",)),
    "teacher": ("Teachers and frozen models", ("teacher", "frozen")),
    "dag": ("Workflow", ("dag",)),
    "trainer": ("Trainer: steps, checkpoints, machines, profiles", ("trainer", "ray_init", "profiler")),
    "serve": ("Programs and clients from outside", ("actor_rollout_ref.serve", "service")),
    "embodied": ("Embodied agents (later)", ("actor_rollout_ref.embodied", "algorithm.embodied_sampling")),
}
"""File of a page -> its title, and the groups that it has, with those below them that no other page names."""

DIFFERENCES = "differences"


def reference_pages() -> dict[str, str]:
    """File name -> text, of docs/configuration/."""
    sections: dict[str, list[str]] = {page: [] for page in PAGES}
    for group, text in _sections():
        sections[page_of(group)].append(text)
    pages = {"index": "\n".join([HEADER, _places_by_effect(), _list_of_pages(), _contents()])}
    for page, texts in sections.items():
        head = f"# Keys: {PAGES[page][0]}\n\n{GENERATED} [How keys are set and read](index.md).\n"
        pages[page] = "\n".join([head, *texts])
    return {f"{name}.md": text for name, text in {**pages, DIFFERENCES: _deviations()}.items()}


def page_of(group: str) -> str:
    """The page that has a group: that of the longest name at its beginning."""
    owners = {name: page for page, (_, names) in PAGES.items() for name in names}
    return owners[max((name for name in owners if f"{group}.".startswith(f"{name}.")), key=len)]


def _places_by_effect() -> str:
    """A list: what a user wants to set, and the sections that have it."""
    rows = [bullet(f"{wanted}: {', '.join(map(_link, groups))}") for wanted, groups in PLACES.items()]
    return "\n".join(("## Find a key by its effect\n", *rows, ""))


def _list_of_pages() -> str:
    """A list: page, its groups, what they hold."""
    rows = [
        bullet(f"[{title}]({page}.md), `{'`, `'.join(groups)}`: {' '.join(map(_about, groups))}")
        for page, (title, groups) in PAGES.items()
    ]
    last = f"- [Defaults that differ from siiRL's]({DIFFERENCES}.md): both, and why."
    return "\n".join(("## All groups\n", *rows, last, ""))


def _contents() -> str:
    """The pages as the site's menu has them."""
    return "\n".join(("```{toctree}\n:hidden:\n", *PAGES, DIFFERENCES, "```", ""))


def _link(group: str, seen_from: str = "index") -> str:
    page = page_of(group)
    return f"[`{group}`]({'' if page == seen_from else f'{page}.md'}#{group.replace('.', '')})"


def _sections() -> Iterator[tuple[str, str]]:
    """Group -> the list of its keys, a group before those below it."""
    below: dict[str, list[str]] = {}
    for name in _places():
        below.setdefault(name.rpartition(".")[0], []).append(name)
    waiting, written = below[""][::-1], dict[str, dict[str, str]]()
    while waiting:
        name = waiting.pop()
        waiting += below.get(name, [])[::-1]
        keys = [key for key in all_keys().values() if key.name.rpartition(".")[0] == name]
        if keys:
            keys.sort(key=lambda key: bool(_does_nothing(key)))
            entries = {key.name.rpartition(".")[2]: _entry(key) for key in keys}
            acts = dict.fromkeys(f" Acts with `{key.rule.within}`." for key in keys if key.rule.within)
            about = f"{_about(name)}{''.join(acts)}"
            yield name, f"## {name}\n\n{about}\n\n{_entries(name, entries, written)}\n"


def _entries(group: str, entries: dict[str, str], written: dict[str, dict[str, str]]) -> str:
    """The keys of a group; where most are those of a group of its kind, which is written, the others.

    written: group -> its entries, of those that are written whole; this one is added to them.
    """

    def equal(other: dict[str, str]) -> list[str]:
        return [name for name, entry in entries.items() if other.get(name) == entry]

    kind = group.rpartition(".")[2]
    like = {name: equal(other) for name, other in written.items() if name.rpartition(".")[2] == kind}
    best = max(like, key=lambda name: len(like[name]), default="")
    if not best or 2 * len(like[best]) < len(entries):
        written[group] = entries
        return "\n".join(entries.values())
    names = ", ".join(f"`{name}`" for name in like[best])
    parts = [
        textwrap.fill(
            f"As in {_link(best, page_of(group))}: {names}.",
            120,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
    others = [entry for name, entry in entries.items() if name not in like[best]]
    return "\n".join([*parts, *(["", *others] if others else [])])


def _places() -> dict[str, None]:
    """All groups, in the order of their keys."""
    parts = (name.split(".")[:-1] for name in all_keys())
    return dict.fromkeys(".".join(groups[:end]) for groups in parts for end in range(1, len(groups) + 1))


def _about(group: str) -> str:
    """What a group holds."""
    if group in group_docs():
        return group_docs()[group]
    schema = get_group_class(group)
    return str(schema.__doc__) if schema else "An older place of keys: the status says where they are."


def _entry(key: Key) -> str:
    rule, last = key.rule, key.name.rsplit(".", 1)[-1]
    if key.name in ALIASES:
        return bullet(f"`{last}`: another name of {' and '.join(f'`{name}`' for name in ALIASES[key.name])}.")
    meaning = rule.doc
    if rule.choices and not has_one_value(key):
        meaning += f"; one of {', '.join(f'`{name}`' for name in rule.choices)}"
    if rule.when:
        meaning += f"; acts with `{rule.when}`"
    return bullet(f"`{last}` ({type_name(key.type)}, {_default(key)}): {meaning}.{_status(key)}")


def _default(key: Key) -> str:
    if key.name in FOLLOWS:
        return f"`{FOLLOWS[key.name]}`"
    if key.rule.auto:
        return f"`{AUTO}`"
    return f"`{show(key, key.default)}`"


def _does_nothing(key: Key) -> str:
    """Why a key is known though it changes nothing, if it is such a one."""
    rule = key.rule
    if key.name in ALIASES:
        return "**Older name**"
    if rule.later:
        return f" **Later**: {rule.later}."
    if rule.ignored:
        return f" **No effect**: {rule.ignored}."
    return f" **Replaced**: {rule.replaced}." if rule.replaced else ""


def _status(key: Key) -> str:
    """What the entry of a key says besides its meaning."""
    rule = key.rule
    if nothing := _does_nothing(key):
        return nothing
    later = ", ".join(f"`{name}`" for name in rule.later_choices)
    if has_one_value(key):
        return f" Only `{rule.choices[0]}` so far (later: {later})."
    return f" Later: {later}." if later else ""


def _deviations() -> str:
    entries = [
        bullet(f"`{key.name}`: `{show(key, item.reference)}` there, {_default(key)} here: {item.reason}.")
        for key, item in ((all_keys()[name], item) for name, item in DEVIATIONS.items())
    ]
    head = f"# Defaults that differ from siiRL's\n\n{GENERATED}\n"
    return "\n".join((head, *entries, ""))


def write_pages(folder: Path) -> None:
    """Writes the pages into a folder, and removes those of groups that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = reference_pages()
    for page in folder.glob("*.md"):
        if page.name not in pages:
            page.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
