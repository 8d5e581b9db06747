"""Reads the text of a bash script into statements: words stay as they were written, nothing is expanded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from siirl.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
SEPARATORS = (";;", "&&", "||", "|&", "&", "|", ";", "\n")
CLOSING = {"(": ")", "{": "}"}
ENDS = {"if": "fi", "while": "done", "until": "done", "for": "done", "select": "done", "case": "esac"}


@dataclass(frozen=True)
class Array:
    """NAME=( words ), or NAME+=( words )."""

    name: str
    append: bool
    words: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """Assignments and words up to the next separator, redirections left out."""

    parts: tuple[str | Array, ...]


@dataclass(frozen=True)
class Chain:
    """Statements joined by && and ||: the joint stands before each but the first."""

    items: tuple[tuple[str, "Statement"], ...]


@dataclass(frozen=True)
class If:
    """A choice by conditions."""

    branches: tuple[tuple[tuple["Statement", ...], tuple["Statement", ...]], ...]
    """(condition, body), in order."""
    otherwise: tuple["Statement", ...] = ()
    """The body of `else`."""


@dataclass(frozen=True)
class Case:
    """A choice by patterns."""

    word: str
    branches: tuple[tuple[tuple[str, ...], tuple["Statement", ...]], ...]
    """(patterns, body), in order."""


@dataclass(frozen=True)
class Function:
    """A definition; the body runs where the name is called."""

    name: str
    body: tuple["Statement", ...]


@dataclass(frozen=True)
class Group:
    """{ ... } or ( ... )."""

    body: tuple["Statement", ...]


@dataclass(frozen=True)
class Loop:
    """while, until, for: its body is never run."""


Statement = Command | Chain | If | Case | Function | Group | Loop
Token = str | Array


def parse(text: str) -> tuple[Statement, ...]:
    """The statements of a script. ConfigError, with the line, where a quote or bracket is never closed."""
    return _Parser(list(_Lexer(text.replace("\r\n", "\n")).tokens())).block(())


def end_of(text: str, start: int) -> int:
    """One past the end of the quoted text, expansion or single character that begins at `start`."""
    return _Lexer(text).piece(start)


@dataclass
class _Lexer:
    """Cuts text into words, separators and arrays. Separators are marked by a leading NUL."""

    text: str
    at: int = 0
    heredocs: list[str] = field(default_factory=list)

    def tokens(self) -> Iterator[Token]:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = self._line_end()
            elif char in "<>" or re.match(r"\d+[<>]|&>", self.text[self.at :]):
                self._redirection()
            elif char in "()":
                self.at += 1
                yield "\0" + char
            elif separator := next((s for s in SEPARATORS if self.text.startswith(s, self.at)), ""):
                self.at += len(separator)
                if separator == "\n":
                    self._skip_heredocs()
                yield "\0" + separator
            else:
                yield self._word()

    def _word(self) -> Token:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|<>()":
            self.at = self.piece(self.at)
        word = self.text[start : self.at]
        array = ARRAY.fullmatch(word)
        if array and self.text[self.at : self.at + 1] == "(":
            self.at += 1
            return Array(array[1], bool(array[2]), tuple(self._array_words(start)))
        return word.replace("\\\n", "")

    def _array_words(self, start: int) -> Iterator[str]:
        while True:
            if self.at >= len(self.text):
                raise self._unclosed(start, "(")
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                return
            if char in " \t\n":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = self._line_end()
            else:
                begin = self.at
                while self.at < len(self.text) and self.text[self.at] not in " \t\n)":
                    self.at = self.piece(self.at)
                yield self.text[begin : self.at].replace("\\\n", "")

    def piece(self, start: int) -> int:
        """One past the end of the quoted text, expansion or single character at `start`."""
        text, char = self.text, self.text[start]
        if char == "\\":
            return min(start + 2, len(text))
        if char == "'":
            end = text.find("'", start + 1)
            if end < 0:
                raise self._unclosed(start, char)
            return end + 1
        if char in '"`':
            return self._until(start, start + 1, char)
        if char == "$" and text[start + 1 : start + 2] in CLOSING:
            return self._until(start, start + 2, CLOSING[text[start + 1]])
        return start + 1

    def _until(self, start: int, at: int, closing: str) -> int:
        """One past the closing character, nested pieces passed over."""
        opening = {close: open_ for open_, close in CLOSING.items()}.get(closing, "")
        depth = 1
        while at < len(self.text):
            char = self.text[at]
            if char == closing:
                depth -= 1
                if not depth:
                    return at + 1
                at += 1
            elif opening and char == opening:
                depth, at = depth + 1, at + 1
            elif char == "'" and closing == '"':
                at += 1  # within double quotes it is a character like any other
            else:
                at = self.piece(at)
        raise self._unclosed(start, self.text[start])

    def _redirection(self) -> None:
        found = re.match(r"(?:\d+|&)?(<<<|<<-?|>>|>&|<&|>\||[<>])[ \t]*", self.text[self.at :])
        assert found is not None
        self.at += found.end()
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|<>()":
            self.at = self.piece(self.at)
        if found[1].startswith("<<") and found[1] != "<<<":
            self.heredocs.append(self.text[begin : self.at].strip("'\"\\"))

    def _skip_heredocs(self) -> None:
        for delimiter in self.heredocs:
            while self.at < len(self.text):
                end = self._line_end()
                line, self.at = self.text[self.at : end].strip(), end + 1
                if line == delimiter:
                    break
        self.heredocs = []

    def _line_end(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _unclosed(self, start: int, what: str) -> ConfigError:
        line = self.text.count("\n", 0, start) + 1
        return ConfigError(f"line {line} of the script: {what} is never closed. Correct the script.")


class _Parser:
    """Recursive descent over tokens; what it does not know ends at the next separator."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def block(self, ends: tuple[str, ...]) -> tuple[Statement, ...]:
        """Statements up to one of the words `ends`, which is not taken."""
        found: list[Statement] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token in ends:
                break
            if isinstance(token, str) and token in ("\0;", "\0\n", "\0&", "\0|", "\0|&", "\0)", "\0;;"):
                self.at += 1
                continue
            found.append(self._chain(ends))
        return tuple(found)

    def _chain(self, ends: tuple[str, ...]) -> Statement:
        items: list[tuple[str, Statement]] = [("", self._statement(ends))]
        while self.at < len(self.tokens) and self.tokens[self.at] in ("\0&&", "\0||"):
            joint = str(self.tokens[self.at])[1:]
            self.at += 1
            while self._peek() == "\0\n":
                self.at += 1
            items.append((joint, self._statement(ends)))
        return items[0][1] if len(items) == 1 else Chain(tuple(items))

    def _peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def _statement(self, ends: tuple[str, ...]) -> Statement:
        token = self._peek()
        if token == "if":
            return self._if()
        if token == "case":
            return self._case()
        if token in ("while", "until", "for", "select"):
            return self._loop()
        if token in ("{", "\0("):
            self.at += 1
            closing = "}" if token == "{" else "\0)"
            body = self.block((closing,))
            self._close("{" if token == "{" else "(", closing)
            return Group(body)
        if token == "function" or (self._peek(1) == "\0(" and self._peek(2) == "\0)"):
            return self._function(token == "function")
        return self._command(ends)

    def _if(self) -> If:
        branches, otherwise = [], ()
        while self._peek() in ("if", "elif"):
            self.at += 1
            condition = self.block(("then",))
            self.at += 1
            branches.append((condition, self.block(("elif", "else", "fi"))))
        if self._peek() == "else":
            self.at += 1
            otherwise = self.block(("fi",))
        self._close("if", "fi")
        return If(tuple(branches), otherwise)

    def _close(self, opening: str, closing: str) -> None:
        """Take the word that ends a statement. ConfigError at the end of the script: bash has none either."""
        if self.at >= len(self.tokens):
            raise ConfigError(
                f"the script ends within {opening!r}: {closing.removeprefix(chr(0))!r} is missing, and bash "
                "would not run it either. Correct the script."
            )
        self.at += 1

    def _case(self) -> Case:
        word = str(self._peek(1))
        self.at += 2
        while self._peek() in ("in", "\0\n"):
            self.at += 1
        branches = []
        while self.at < len(self.tokens) and self._peek() != "esac":
            patterns: list[str] = []
            while self.at < len(self.tokens) and self._peek() != "\0)":
                if not str(self._peek()).startswith("\0"):
                    patterns.append(str(self._peek()))
                self.at += 1
            self.at += 1
            branches.append((tuple(patterns), self.block(("\0;;", "esac"))))
            while self._peek() in ("\0;;", "\0\n"):
                self.at += 1
        self._close("case", "esac")
        return Case(word, tuple(branches))

    def _loop(self) -> Loop:
        depth = 0
        while self.at < len(self.tokens):
            token = str(self._peek())
            depth += token in ENDS
            self.at += 1
            if token in ENDS.values():
                depth -= 1
                if not depth:
                    break
        return Loop()

    def _function(self, keyword: bool) -> Function:
        self.at += keyword
        name = str(self._peek())
        self.at += 1
        while self._peek() in ("\0(", "\0)", "\0\n"):
            self.at += 1
        body = self._statement(())
        return Function(name, body.body if isinstance(body, Group) else (body,))

    def _command(self, ends: tuple[str, ...]) -> Command:
        parts: list[str | Array] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if isinstance(token, str) and token.startswith("\0"):
                break
            parts.append(token)
            self.at += 1
        if not parts:
            self.at += 1
        return Command(tuple(parts))
