"""The committed settings of other frameworks' launch scripts (tests/unit/launch_settings.txt)."""

import re
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

FILE = Path(__file__).parents[1] / "unit" / "launch_settings.txt"
SHORT = {
    "AM": "actor_rollout_ref.actor.megatron",
    "FM": "actor_rollout_ref.ref.megatron",
    "A": "actor_rollout_ref.actor",
    "M": "actor_rollout_ref.model",
    "R": "actor_rollout_ref.rollout",
    "F": "actor_rollout_ref.ref",
    "E": "actor_rollout_ref.embodied",
    "C": "critic",
    "D": "data",
    "L": "algorithm",
    "T": "trainer",
    "W": "reward_model",
    "K": "algorithm.rollout_correction",
}


@dataclass
class Launch:
    """arguments: name -> value as text, signs with the names. cannot: names that have no place in siirl."""

    arguments: dict[str, str] = field(default_factory=dict)
    cannot: tuple[str, ...] = ()

    def words(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.arguments.items()]


def _full(name: str) -> str:
    return re.sub(r"^(\+?)([A-Z]{1,2})\.", lambda found: f"{found[1]}{SHORT[found[2]]}.", name)


def launches() -> dict[tuple[str, str], Launch]:
    """(siirl or verl, name) -> its settings."""
    return {key: item for key, item in _entries().items() if key[0] in ("siirl", "verl")}


def write_files(root: Path) -> None:
    """Make the YAML files that scripts name, where they lie in a repository at `root`."""
    for (kind, name), launch in _entries().items():
        if kind == "files":
            path = (root / name).with_suffix(".yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            config = OmegaConf.from_dotlist(launch.words())
            path.write_text("defaults: [ppo_trainer, _self_]\n" + OmegaConf.to_yaml(config))


@cache
def _entries() -> dict[tuple[str, str], Launch]:
    """(siirl, verl, bases or files; name) -> its settings."""
    found: dict[tuple[str, str], Launch] = {}
    launch = Launch()
    for line in FILE.read_text().splitlines():
        head = re.fullmatch(r"\[(\w+) (.+)\]", line)
        first, *rest = line.split() or [""]
        if head:
            launch = found[head[1], head[2]] = Launch()
        elif first == "like":
            for name in rest:
                launch.arguments.update(found["bases", name].arguments)
        elif first == "without":
            for name in rest:
                del launch.arguments[_full(name)]
        elif first == "machines":
            launch.arguments["trainer.nnodes"] = rest[0]
        elif first == "cannot":
            launch.cannot = tuple(map(_full, rest))
        elif not line.startswith("#"):
            for word in shlex.split(line):
                name, _, value = word.partition("=")
                launch.arguments[_full(name)] = value
    return found
