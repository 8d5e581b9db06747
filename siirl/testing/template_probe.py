"""What a chat template makes of a conversation that goes on: whether a prompt stays a prefix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl.dialect.template import PROBE, ChatTemplate, TemplateRefused


@dataclass(frozen=True)
class TemplateSeen:
    """Of one model and the prompt of a row."""

    refused: str = ""
    """Why the template writes no such conversation; empty: it does."""
    between: str = ""
    """What it writes between the prompt and the turn's words, which the prompt does not hold."""
    keeps: bool = True
    """Whether it writes a turn the same when another one follows."""
    reasons: bool = False
    """The model thinks, so that its template adds and drops reasoning."""


def template_seen(
    template: ChatTemplate | None, messages: Sequence[Mapping[str, Any]], reasons: bool
) -> TemplateSeen | None:
    """What it makes of a prompt, a turn and a further question; None without a template or messages."""
    if template is None or not messages or messages[-1]["role"] == "assistant":
        return None
    turn = {"role": "assistant", "content": PROBE}
    try:
        opened = template.render(messages, generation=True)
        whole = template.render([*messages, turn])
        longer = template.render([*messages, turn, {"role": "user", "content": "And then?"}], generation=True)
    except TemplateRefused as error:
        return TemplateSeen(refused=str(error), reasons=reasons)
    head, found, _ = whole.partition(PROBE)
    between = head[len(opened) :] if found and head.startswith(opened) else head if found else "nothing of it"
    return TemplateSeen("", between.strip(), longer.startswith(head + PROBE), reasons)
