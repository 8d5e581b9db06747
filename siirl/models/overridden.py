"""config.json with the values that model.override_config puts in the place of its own. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from siirl.errors import ConfigError

ROPE, OLD_ROPE = "rope_parameters", "rope_scaling"
"""The settings of rotary embeddings, as transformers 5 writes and reads them, and by their older name."""
BESIDE_OLD = ("rope_theta", "partial_rotary_factor")
"""What older files have beside rope_scaling, and newer ones in rope_parameters."""
TURNING = (ROPE, OLD_ROPE, *BESIDE_OLD)
TYPE = ("dtype", "torch_dtype")
"""The type of the weights, by its name of today and by the older one."""
PARTS = ("text_config", "vision_config")
"""Values that are configurations themselves."""


def overridden(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json would say with the changes in it. ConfigError where they have no place.

    A change of a part (text_config) changes the values that it names. Rotary settings keep the base and the
    share of dimensions that they do not name. With fewer layers, what there is of each layer goes with them.
    1 is 1.0 where the file has such a number: transformers tells them apart.
    """
    whole = {name: value for name, value in changes.items() if type(value) is int}
    floats = {name: float(value) for name, value in whole.items() if isinstance(raw.get(name), float)}
    found = {**raw, **changes, **floats}
    for name in PARTS:
        part, change = raw.get(name), changes.get(name)
        if isinstance(part, Mapping) and isinstance(change, Mapping):
            found[name] = overridden(part, change)
    found |= _of_fewer_layers(raw, changes)
    if any(name in changes for name in TYPE):
        found[TYPE[0]] = next(changes[name] for name in TYPE if name in changes)
        found.pop(TYPE[1], None)
    if any(name in changes for name in TURNING):
        _turn(raw, changes, found)
    return found


def names(raw: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json names, and what stands for it; values of parts with the name of the part."""
    yield from raw
    if ROPE in raw or OLD_ROPE in raw:
        yield from (ROPE, OLD_ROPE, "rope_theta", *(raw.get(ROPE) or ()))
    for part in PARTS:
        if isinstance(raw.get(part), Mapping):
            yield from (f"{part}.{name}" for name in names(raw[part]))


def _of_fewer_layers(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    before, now = raw.get("num_hidden_layers"), changes.get("num_hidden_layers")
    if not isinstance(before, int) or not isinstance(now, int) or now >= before:
        return {}
    lists = {name: value for name, value in raw.items() if isinstance(value, list) and "layer" in name}
    return {
        name: value[:now] for name, value in lists.items() if len(value) == before and name not in changes
    }


def _turn(raw: Mapping[str, Any], changes: Mapping[str, Any], found: dict[str, Any]) -> None:
    """The rotary settings of `found`, in the form in which the file has them."""
    own, given = raw.get(ROPE), changes.get(ROPE, changes.get(OLD_ROPE))
    if not isinstance(own, Mapping):
        if ROPE in changes:
            found.pop(OLD_ROPE, None)
        return
    single = {name: changes[name] for name in BESIDE_OLD if name in changes}
    for name in (OLD_ROPE, *(name for name in single if name not in raw)):
        found.pop(name, None)
    kinds = [kind for kind, part in own.items() if isinstance(part, Mapping)]
    if not kinds:
        found[ROPE] = _rope(own, given, ROPE in changes or OLD_ROPE in changes) | single
        return
    if single or not isinstance(given, Mapping) or not set(given) <= set(kinds):
        raise ConfigError(
            f"override_config.{next(iter(single), ROPE)}: rotary embeddings of this model differ by the kind "
            f"of layer. Set override_config.{ROPE}={{{kinds[0]}: {{...}}}}; there are {', '.join(kinds)}."
        )
    found[ROPE] = {**own, **{kind: _rope(own[kind], part, True) for kind, part in given.items()}}


def _rope(own: Mapping[str, Any], given: Any, is_given: bool) -> dict[str, Any]:
    if not is_given:
        return dict(own)
    kept = {name: own[name] for name in BESIDE_OLD if name in own}
    return {**kept, **(given or {"rope_type": "default"})}
