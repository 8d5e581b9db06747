"""Whether a reward function returns what the environment gave, by its source: it would count twice. Pure.

Followed are names within a function, and functions of the same file that it calls. A dict counts by its
"score".
"""

import ast
from collections.abc import Iterator

from siirl.user_code.signatures import Function
from siirl.user_code.source import source_of, top_functions

KEY, SCORE, CONVERSATION = "reward", "score", "conversation"
"""Of a message: what its environment gave for it. Of what is returned: the score. Where messages are."""


def returns_given(where: str, name: str) -> bool:
    """Whether the score of a function of "file.py" or "pkg.mod" is made of the rewards in the conversation.

    False of what cannot be read, which other checks say.
    """
    try:
        tree = source_of(where) or ast.Module([], [])
    except (ImportError, OSError, SyntaxError):
        return False
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    functions = top_functions(tree)
    return CONVERSATION in constants and name in functions and _Flow(functions).returns(name)


class _Flow:
    """What flows where among the functions of a file."""

    def __init__(self, functions: dict[str, Function]) -> None:
        self._functions = functions
        self._known: dict[str, bool] = {}

    def returns(self, name: str) -> bool:
        """Whether a function returns what is made of such rewards; one that calls itself adds nothing."""
        if name not in self._known:
            self._known[name] = False
            function, names = self._functions[name], set()
            for _ in range(len(list(ast.walk(function)))):  # until no further name is found
                before = len(names)
                names |= {target for target, value in _assigned(function) if self._made_of(value, names)}
                if len(names) == before:
                    break
            returned = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
            self._known[name] = any(value is not None and self._made_of(value, names) for value in returned)
        return self._known[name]

    def _made_of(self, value: ast.expr, names: set[str]) -> bool:
        dicts = [node for node in ast.walk(value) if isinstance(node, ast.Dict)]
        scores = [
            item
            for found in dicts
            for key, item in zip(found.keys, found.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == SCORE
        ]
        return any(self._touches(node, names) for part in scores or [value] for node in ast.walk(part))

    def _touches(self, node: ast.AST, names: set[str]) -> bool:
        match node:
            case ast.Subscript(value=base, slice=ast.Constant(value=key)) if key == KEY:
                return ast.unparse(base) not in ("extra_info", "extra_infos")
            case ast.Call(func=ast.Attribute(value=base, attr="get"), args=[ast.Constant(value=key), *_]):
                return key == KEY and ast.unparse(base) != "extra_info"
            case ast.Name(id=name):
                return name in names or (name in self._functions and self.returns(name))
        return False


def _assigned(function: Function) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are assigned, or given by +=, append or a key "score"."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from ((name, value) for name in _names(target))
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield from ((name, value) for name in _names(target))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from ((name, value) for name in _names(target))
            case ast.For(target=target, iter=value):
                yield from ((name, value) for name in _names(target))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append" | "extend"), args=[value]
            ):
                yield name, value


def _names(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _names(part)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key)) if key == SCORE:
            yield name
