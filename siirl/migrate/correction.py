"""verl's algorithm.rollout_correction: a weight, a rejection and two modes, as siirl's rollout_correction."""

from collections.abc import Iterator, Mapping
from typing import Literal

from siirl.config.foreign import CORRECTION, POLICY, foreign

GROUP = "algorithm.rollout_correction."
NOTHING = ("null", "none", "false", "")
LEVELS = {
    "sequence": "sequence",
    "geometric": "geometric",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
}
"""verl's rollout_rs -> reject. Bounds of the `_k1` ones are of rollout over trainer: turned over here."""
DIVERGENCES = {
    f"seq_{reduce}_{kind}": f"{reduce}_{kind}" for reduce in ("max", "sum", "mean") for kind in ("k2", "k3")
}
"""Those with one bound, of a divergence, which is none of a ratio."""
Line = tuple[Literal["changed", "dropped", "impossible"], str, str, str, str]
"""kind, how it stood there, why, name here, value."""


def translate_correction(values: Mapping[str, str | None]) -> Iterator[Line]:
    """The settings for those of verl's group among `values`. Nothing if there are none."""
    own = {name.removeprefix(GROUP): _text(value) for name, value in values.items() if name.startswith(GROUP)}
    if not own:
        return
    bypass = [name for name in ("bypass_mode", "bypass_old_logprob_for_rollout") if own.get(name) == "true"]
    handled = {"bypass_mode", "bypass_old_logprob_for_rollout"}
    for name in bypass:
        why = "the policy loss is taken to the rollout engine's log-probs"
        yield "changed", f"{GROUP}{name}=true", why, f"{POLICY}.actor.recompute_old_log_prob", "false"
    yield from _weight(own, bool(bypass), handled)
    yield from _rejection(own, bool(bypass), handled)
    for name, value in own.items():
        if name in handled and name not in ("bypass_mode", "bypass_old_logprob_for_rollout"):
            continue
        if name in bypass:
            continue
        known = foreign(GROUP + name)
        there = f"{GROUP}{name}={value}"
        if known is None:
            yield "impossible", there, "there is no such key", "", ""
        elif value in NOTHING or value in known[0].asks_nothing or name in handled:
            yield "dropped", there, "off, as it is here", "", ""
        else:
            yield "impossible", there, known[0].why, "", ""


def _weight(own: Mapping[str, str], bypass: bool, handled: set[str]) -> Iterator[Line]:
    level, high = own.get("rollout_is", "null"), own.get("rollout_is_threshold", "2.0")
    handled |= {"rollout_is", "rollout_is_threshold"}
    there = f"{GROUP}rollout_is={level}"
    if "rollout_is" not in own and "rollout_is_threshold" not in own:
        return
    if level in NOTHING:
        yield "dropped", f"{there} rollout_is_threshold={high}", "off, as it is here", "", ""
    elif bypass:
        why = (
            "with the bypass the ratio of the loss is taken to the engine already: a weight would count twice"
        )
        yield "dropped", f"{there} rollout_is_threshold={high}", why, "", ""
    elif level in ("token", "sequence"):
        yield "changed", there, f"ratios are cut at {high}", f"{CORRECTION}.weight", "truncate"
        yield "changed", "", "of each token, or of the whole row", f"{CORRECTION}.level", level
        there = f"{GROUP}rollout_is_threshold={high}" if "rollout_is_threshold" in own else ""
        yield "changed", there, "verl's name is rollout_is_threshold", f"{CORRECTION}.high", high
    else:
        yield "impossible", there, "the levels are token and sequence", "", ""


def _rejection(own: Mapping[str, str], bypass: bool, handled: set[str]) -> Iterator[Line]:
    level = own.get("rollout_rs", "null")
    names = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower")
    handled |= set(names)
    there = " ".join(
        f"{GROUP if not place else ''}{name}={own[name]}" for place, name in enumerate(names) if name in own
    )
    if not there:
        return
    if level in NOTHING:
        yield "dropped", there, "off, as it is here", "", ""
        return
    bounds, largest = _bounds(own), _positive(own.get("rollout_rs_threshold", ""))
    if bypass:
        why = f"{CORRECTION} with {POLICY}.actor.recompute_old_log_prob=false: set one of them"
        yield "impossible", there, why, "", ""
    elif level in DIVERGENCES and largest is not None:
        why = "rows whose tokens are too far apart are skipped"
        yield "changed", there, why, f"{CORRECTION}.reject", DIVERGENCES[level]
        yield "changed", "", "its threshold", f"{CORRECTION}.reject_divergence", f"{largest:g}"
    elif level not in LEVELS or bounds is None:
        why = (
            f"{CORRECTION}.reject leaves out whole rows, by a ratio between two bounds or by one divergence; "
            f"{CORRECTION}.weight=filter leaves out tokens"
        )
        yield "impossible", there, why, "", ""
    else:
        (low, high), why_low, why_high = (
            bounds,
            "null there is 1 / the upper bound",
            "null there is rollout_is_threshold",
        )
        if level.endswith("_k1"):
            low, high = 1 / high, 1 / low
            why_low = f"1 / {bounds[1]:g}: the ratio there is rollout over trainer, here trainer over rollout"
            why_high = f"1 / {bounds[0]:g}, for the same reason"
        yield "changed", there, "rows outside the bounds are skipped", f"{CORRECTION}.reject", LEVELS[level]
        yield "changed", "", why_low, f"{CORRECTION}.reject_low", f"{low:g}"
        yield "changed", "", why_high, f"{CORRECTION}.reject_high", f"{high:g}"


def _bounds(own: Mapping[str, str]) -> tuple[float, float] | None:
    """(lower, upper) ratio; the upper alone, or both as "low_high"."""
    upper = own.get("rollout_rs_threshold", "null")
    if upper in NOTHING:
        upper = own.get("rollout_is_threshold", "2.0")
    lower = own.get("rollout_rs_threshold_lower", "null")
    try:
        if "_" in upper:
            lower, upper = upper.split("_")
        high = float(upper)
        low = 1 / high if lower in NOTHING else float(lower)
        return (low, high) if 0 < low <= high else None
    except (ValueError, ZeroDivisionError):
        return None


def _positive(text: str) -> float | None:
    try:
        return float(text) if float(text) > 0 else None
    except ValueError:
        return None


def _text(value: str | None) -> str:
    text = (value or "").strip()
    return text[1:-1].lower() if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1] else text.lower()
