"""Expands the words of a bash script: variables, defaults, arithmetic, quotes. No command is run."""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from siirl.migrate.shell_syntax import end_of

UNKNOWN = re.compile("\ue000(\\d+)\ue001")
"""Stands for text that only running the script would give; the number is its place in `unknown`."""
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?])(\[[^\]]*\])?(.*)", re.DOTALL)
OPERATION = re.compile(r"(:?[-=+?]|##?|%%?|,,?|\^\^?)(.*)", re.DOTALL)
ALL_ITEMS = re.compile(r"\$(@|\{@\}|\{\w+\[@\]\})")
"""Within double quotes, one word for each item: none for an empty list."""
NPU_PROBE = re.compile(r"\bimport torch_npu\b.*\|\|\s*echo\s+([\w-]+)", re.DOTALL)
"""Whether there is an NPU: there is none where siirl runs."""
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Div: lambda a, b: int(a / b) if b else 0,
    ast.Mod: lambda a, b: a - int(a / b) * b if b else 0,
}


@dataclass
class Variables:
    """What the script has set so far: text, or a list for an array."""

    values: dict[str, str | list[str]]
    arguments: list[str] = field(default_factory=list)
    """What "$@" is."""
    unknown: list[str] = field(default_factory=list)
    """The sources of text that is not known."""
    empty: set[str] = field(default_factory=set)
    """Names that were read though nobody set them."""
    tested: set[str] = field(default_factory=set)
    """Those among them that conditions read."""
    defaulted: set[str] = field(default_factory=set)
    """Names that nobody set, in whose place a default was read: ${NAME:-default}."""
    guesses: list[str] = field(default_factory=list)
    """How conditions that depend on text that is not known were read."""

    def not_known(self, source: str) -> str:
        """A mark that stands for the text of `source`."""
        self.unknown.append(source)
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def take(self, mark: str, value: str) -> None:
        """The text that a mark stands for is `value` from here on: a condition was read so."""
        self.guesses.append(f"{self.shown(mark)}: read as {value!r}")
        for name, text in self.values.items():
            if isinstance(text, str):
                self.values[name] = text.replace(mark, value)

    def shown(self, text: str) -> str:
        """The text with what is not known as the script has it."""
        return UNKNOWN.sub(lambda found: self.unknown[int(found[1])], text)


@dataclass
class _Fields:
    """The words that one word becomes."""

    done: list[str] = field(default_factory=list)
    text: str | None = None

    def add(self, text: str) -> None:
        self.text = (self.text or "") + text

    def cut(self) -> None:
        if self.text is not None:
            self.done.append(self.text)
        self.text = None


def expand(word: str, variables: Variables) -> list[str]:
    """The words that a word of the script becomes, quotes removed."""
    fields = _Fields()
    _expand_into(word, variables, fields, quoted=False)
    fields.cut()
    return fields.done


def expand_text(word: str, variables: Variables) -> str:
    """The word as one text, as in an assignment: nothing is split."""
    fields = _Fields(text="")
    _expand_into(word, variables, fields, quoted=False, split=False)
    fields.cut()
    return " ".join(fields.done)


def _expand_into(word: str, variables: Variables, fields: _Fields, quoted: bool, split: bool = True) -> None:
    at = 0
    while at < len(word):
        char = word[at]
        end = at + 1 if quoted and char in "'\"" else end_of(word, at)
        if char == "\\" and (not quoted or word[at + 1 : at + 2] in '$`"\\'):
            fields.add(word[at + 1 : end])
        elif char == "'" and not quoted:
            fields.add(word[at + 1 : end - 1])
        elif char == '"' and not quoted:
            if not ALL_ITEMS.fullmatch(word[at + 1 : end - 1]):
                fields.add("")
            _expand_into(word[at + 1 : end - 1], variables, fields, quoted=True)
        elif char == "`":
            fields.add(_substitution(word[at + 1 : end - 1], variables))
        elif char == "$":
            found, end = _dollar(word, at, end, variables)
            _add(found, fields, quoted or not split)
        else:
            fields.add(word[at:end])
        at = end


def _add(found: str | list[str], fields: _Fields, quoted: bool) -> None:
    if isinstance(found, list):
        for place, item in enumerate(found):
            if place:
                fields.cut()
            _add(item, fields, quoted)
        return
    if quoted:
        fields.add(found)
        return
    for place, piece in enumerate(re.split(r"[ \t\n]+", found)):
        if place:
            fields.cut()
        if piece:
            fields.add(piece)


def _dollar(word: str, at: int, end: int, variables: Variables) -> tuple[str | list[str], int]:
    """(what the expansion that begins at `at` gives, where it ends); a list is one word for each item."""
    if word.startswith("$((", at) and word[:end].endswith("))"):
        return arithmetic(word[at + 3 : end - 2], variables), end
    if word.startswith("$(", at):
        return _substitution(word[at + 2 : end - 1], variables), end
    if word.startswith("${", at):
        return _parameter(word[at + 2 : end - 1], variables), end
    name = NAME.match(word, at + 1)
    return ("$", at + 1) if name is None else (_value(name[0], variables), name.end())


def _value(name: str, variables: Variables) -> str | list[str]:
    if name in "@*":
        return list(variables.arguments)
    if name.isdigit():
        if name == "0":
            return "script"
        return variables.arguments[int(name) - 1] if int(name) <= len(variables.arguments) else ""
    if name == "#":
        return str(len(variables.arguments))
    if name not in variables.values:
        if not name[0].isalpha() and name[0] != "_":
            return ""
        variables.empty.add(name)
        return ""
    value = variables.values[name]
    return (value[0] if value else "") if isinstance(value, list) else value


def _parameter(inner: str, variables: Variables) -> str | list[str]:
    """What ${inner} gives."""
    found = PARAMETER.fullmatch(inner)
    if found is None:
        return variables.not_known(f"${{{inner}}}")
    count, name, index, rest = found.groups()
    value = variables.values.get(name)
    if index is not None:
        items = value if isinstance(value, list) else [] if value is None else [value]
        if count:
            return str(len(items))
        if index in ("[@]", "[*]"):
            return list(items)
        place = arithmetic(index[1:-1], variables)
        return items[int(place)] if place.isdigit() and int(place) < len(items) else ""
    if count:
        return str(len(_text(name, variables)))
    if not rest:
        return _value(name, variables)
    operation = OPERATION.fullmatch(rest)
    if operation is None:
        return variables.not_known(f"${{{inner}}}")
    return _operate(operation[1], operation[2], name, variables)


def _text(name: str, variables: Variables) -> str:
    value = _value(name, variables)
    return " ".join(value) if isinstance(value, list) else value


def _operate(sign: str, word: str, name: str, variables: Variables) -> str:
    given = name in variables.values or (name.isdigit() and int(name) <= len(variables.arguments))
    text = _text(name, variables) if given else ""
    usable = given and (bool(text) or not sign.startswith(":"))
    match sign[-1]:
        case "-" | "=":
            if usable:
                return text
            if not given:
                variables.defaulted.add(name)
            default = expand_text(word, variables)
            if sign.endswith("="):
                variables.values[name] = default
            return default
        case "+":
            return expand_text(word, variables) if usable else ""
        case "?":
            if not usable:  # bash ends here; what is put there later is for the user to say
                variables.values[name] = text = variables.not_known(f"${name}")
            return text
        case "#" | "%":
            return _without(text, sign, expand_text(word, variables))
        case ",":
            return text.lower() if sign == ",," else text[:1].lower() + text[1:]
        case _:
            return text.upper() if sign == "^^" else text[:1].upper() + text[1:]


def _without(text: str, sign: str, pattern: str) -> str:
    """The text without the shortest or longest beginning (#, ##) or end (%, %%) that matches."""
    from_start = sign[0] == "#"
    cuts = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for cut in cuts:
        piece, left = (
            (text[:cut], text[cut:]) if from_start else (text[len(text) - cut :], text[: len(text) - cut])
        )
        if fnmatch.fnmatchcase(piece, pattern):
            return left
    return text


def _substitution(command: str, variables: Variables) -> str:
    """The folder of the script is the one where siirl is called; other commands are not known."""
    command = command.strip()
    if command == "pwd" or re.search(r"\bdirname\b", command):
        return "."
    without_npu = NPU_PROBE.fullmatch(command[command.find("import torch_npu") :])
    return without_npu[1] if without_npu else variables.not_known(f"$({command})")


def arithmetic(text: str, variables: Variables) -> str:
    """The value of $((text)), or a mark if it is not one of whole numbers."""
    plain = (
        re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text) if "${" not in text else expand_text(text, variables)
    )
    try:
        value = _number(ast.parse(plain.strip() or "0", mode="eval").body, variables, 0)
    except (ValueError, SyntaxError, OverflowError):
        return variables.not_known(f"$(({text}))")
    return str(value)


def _number(node: ast.expr, variables: Variables, depth: int) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and depth < 20:
        text = _text(node.id, variables).strip() or "0"
        return _number(ast.parse(text, mode="eval").body, variables, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _number(node.operand, variables, depth)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = (_number(side, variables, depth) for side in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and not 0 <= right < 64:
            raise ValueError
        return OPERATORS[type(node.op)](left, right)
    raise ValueError
