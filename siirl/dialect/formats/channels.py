"""Turns that consist of messages to recipients: a message to a tool is a call."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from siirl.dialect.formats.call_marks import Call, Malformed, MalformedCall, Parsed, Turn, called, take_out
from siirl.dialect.formats.json_calls import json_at, whole_json
from siirl.dialect.formats.tagged_calls import atem_block


@dataclass(frozen=True)
class Message:
    """One message of a turn."""

    recipient: str | None
    channel: str | None
    body: str | None
    """None: it ends before its body."""


END = re.compile(r"<\|(?:end|call|return|eom|eot|start)\|>")
HEAD = re.compile(r"<\|start\|>|<\|channel\|>|^\s*to=|\sto=\S+\s*$")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def messages_of(text: str) -> Iterator[Message]:
    """The messages of a turn; the first may lack its head or the beginning of it, which the prompt has."""
    turn, at = Turn(text), 0
    while at < len(text):
        begin = turn.find("<|message|>", at)
        head = text[at : begin if begin >= 0 else len(text)]
        opening = HEAD.search(head)
        if opening is None or opening.start() > 0:
            said = END.sub("", head[: opening.start()] if opening else head)
            if said.strip() and said.strip() != "assistant":
                yield Message(None, None, said)
        recipient, channel = RECIPIENT.search(head), CHANNEL.search(head)
        who = recipient[1] if recipient and opening else None
        where = channel[1] if channel else None
        if begin < 0:
            if opening is not None and who:
                yield Message(who, where, None)
            return
        start = begin + len("<|message|>")
        end = turn.find(END, start)
        end = len(text) if end < 0 else end
        yield Message(who, where, text[start:end])
        at = end
        if ended := END.match(text, at):
            at = at if ended[0] == "<|start|>" else ended.end()


NOBODY = ("user", "all", "assistant")
"""Recipients that are no tools."""


def gpt_oss(text: str) -> Parsed:
    """<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>."""
    if "<|message|>" not in text and "<|channel|>" not in text and "<|start|>" not in text:
        return Parsed(text)
    content: list[str] = []
    calls: list[Call] = []
    for message in messages_of(text):
        if message.recipient is None or message.recipient in NOBODY:
            content += [message.body or ""] if message.channel != "analysis" else []
        else:
            calls.append(_json_to(message.recipient.removeprefix("functions."), message.body))
    return Parsed("\n".join(content).strip(), tuple(calls))


def _json_to(name: str, body: str | None) -> Call:
    if body is None:
        return MalformedCall(f"the call of {name[:60]!r} is not finished")
    try:
        arguments, _ = whole_json(body, f"what stands as the arguments of {name[:60]!r}")
    except Malformed as error:
        return MalformedCall(str(error))
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {name[:60]!r} are not a mapping of names to values")
    return called(name, arguments)


def muse(text: str) -> Parsed:
    """to=NAME<|message|><atem:function_calls><atem:invoke name="NAME">... as a message to the tool."""
    if "<|message|>" not in text and "<atem:function_calls>" not in text:
        return Parsed(text)
    content: list[str] = []
    calls: list[Call] = []
    for message in messages_of(text):
        if message.recipient == "self":
            continue
        if message.body is None:
            calls.append(MalformedCall(f"the call of {message.recipient!r} is not finished"))
            continue
        parsed = take_out(message.body, (atem_block(),))
        content.append(parsed.content)
        calls += parsed.calls
        if not parsed.calls and message.recipient not in (None, *NOBODY):
            to = f"the message to {message.recipient[:60]!r}"
            calls.append(MalformedCall(f"{to} holds no <atem:function_calls>"))
            content.pop()
    return Parsed("\n".join(content).strip(), tuple(calls))


ADDRESS = re.compile(r">>>([A-Za-z_][\w.-]*)\n")
FIRST = re.compile(r"\s*([A-Za-z_][\w.-]*)\n(?=\s*\{)|\s*(all)\n")


def functionary_v32(text: str) -> Parsed:
    """>>>NAME and its arguments as JSON on the next line; what is for "all" is text."""
    first = FIRST.match(text)
    if first is None and ADDRESS.search(text) is None:
        return Parsed(text)
    turn = Turn(text)
    content: list[str] = []
    calls: list[Call] = []
    at, name = (first.end(), first[1] or first[2]) if first else (0, "all")
    while True:
        problem, end = None, at
        if name != "all":
            try:
                arguments, end = json_at(turn, at, f"what stands as the arguments of {name[:60]!r}")
                if isinstance(arguments, dict):
                    calls.append(called(name, arguments))
                else:
                    problem = f"the arguments of {name[:60]!r} are not a mapping of names to values"
            except Malformed as error:
                problem = str(error)
        if problem:
            calls.append(MalformedCall(problem))
        following = ADDRESS.search(text, end)
        if not problem:
            content.append(text[end : following.start() if following else len(text)])
        if following is None:
            return Parsed("".join(content).strip(), tuple(calls))
        at, name = following.end(), following[1]
