"""The user's Python code as source text: found, parsed and searched for a name, never run."""

import ast
import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from siirl.dag.names import suggest
from siirl.errors import ConfigError, DagError


def module_source(module: str) -> Path | None:
    """The file of an importable module; None for one without Python source. Parent packages are imported.

    ModuleNotFoundError if there is no such module.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a parent that is missing or fails; a module without a spec
        spec = None
    if spec is None:
        raise ModuleNotFoundError(f"no module {module!r} can be imported")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def parse_source(source: Path) -> ast.Module:
    """The syntax tree of a file. SyntaxError or OSError if it cannot be read as Python."""
    try:
        return ast.parse(source.read_text(encoding="utf-8"), str(source))
    except ValueError as error:  # not UTF-8, or a null byte
        raise SyntaxError(str(error)) from error


def top_functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that a module defines at its top level, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@functools.cache
def declared_needs(reference: str, decorator: str, key: str) -> tuple[str, ...]:
    """The literal `needs` of the decorator of a function that "file.py:fn" or "pkg.mod:fn" names.

    ConfigError if there is no such function, decorated so, with needs written out as a tuple of texts.
    """
    where, _, name = reference.rpartition(":")
    try:
        source = Path(where).expanduser() if where.endswith(".py") else module_source(where)
        tree = parse_source(source) if source else ast.Module([], [])
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{key}={reference}: it cannot be read: {error}. Check the path.") from error
    function = top_functions(tree).get(name)
    for call in function.decorator_list if function else ():
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != decorator:
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        needs = named.get("needs") or (call.args[1] if len(call.args) > 1 else None)
        if isinstance(needs, ast.Tuple) and all(isinstance(item, ast.Constant) for item in needs.elts):
            return tuple(str(item.value) for item in needs.elts if isinstance(item, ast.Constant))
    raise ConfigError(
        f"{key}={reference}: {where} has no function {name!r} below @{decorator} with the fields that it "
        "needs written out, as in needs=('reward', 'response_mask'). Decorate it so."
    )


def may_define(tree: ast.Module, name: str) -> bool:
    """Whether the module may bind `name` other than by a plain top-level `def`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for inner in ast.walk(node):
            match inner:
                case ast.alias(name="*"):
                    return True
                case ast.alias(name=bound, asname=renamed) if name in (renamed, bound):
                    return True
                case ast.Name(id=bound, ctx=ast.Store()) if bound == name:
                    return True
                case ast.ClassDef(name=bound) | ast.FunctionDef(name=bound) if bound == name:
                    return True
    return False


def check_reference(reference: str, who: str) -> None:
    """DagError unless "pkg.mod:fn" or "file.py:fn" names a function that is there, by its source text."""
    where, _, name = reference.rpartition(":")
    try:
        source = Path(where).expanduser() if where.endswith(".py") else module_source(where)
        tree = parse_source(source) if source else None
    except (ImportError, OSError, SyntaxError) as error:
        raise DagError(
            f"{who}: {reference!r} cannot be imported: {error}. Check the path and PYTHONPATH."
        ) from error
    if tree and (absent := missing_import(tree)):
        raise DagError(
            f"{who}: {reference!r} cannot be imported: it imports {absent!r}, and no such module is "
            "installed. Install it, or check the name and PYTHONPATH."
        )
    if tree and name not in top_functions(tree) and not may_define(tree, name):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [node.name for node in tree.body if isinstance(node, kinds)]
        defined = ", ".join(names) or "no function or class"
        raise DagError(f"{who}: {where!r} has no {name!r}, it defines {defined}. {suggest(name, names)}")


def missing_import(tree: ast.Module) -> str | None:
    """The first module imported at the top level, outside of `try`, whose package is not installed.

    None also where the code changes sys.path, as only running it tells then.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path":
            return None
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            package = module.partition(".")[0]
            if package not in sys.modules and importlib.util.find_spec(package) is None:
                return module
    return None


def check_arguments(reference: str, count: int, who: str, more: bool = False) -> None:
    """DagError unless the function of a reference, if its source shows it, can be called with `count` values.

    more: further arguments are given by keyword, so that it may need more than these.
    """
    where, _, name = reference.rpartition(":")
    source = Path(where).expanduser() if where.endswith(".py") else module_source(where)
    function = top_functions(parse_source(source)).get(name) if source else None
    if function is None or function.decorator_list:
        return
    arguments = [*function.args.posonlyargs, *function.args.args]
    most = float("inf") if function.args.vararg else len(arguments)
    least = len(arguments) - len(function.args.defaults)
    if count > most or (count < least and not more):
        named = ", ".join(argument.arg for argument in arguments)
        raise DagError(
            f"{who}: {name}({named}) of {where!r} is called with {count} argument{'s' * (count > 1)}: its "
            "number of arguments does not fit. Change its signature."
        )


def check_environment(reference: str, who: str, kwargs: Mapping[str, Any]) -> None:
    """DagError unless a class that its source shows in full has reset(task, seed) and step(actions), and is
    made of these arguments.

    Gymnasium's reset(*, seed, options) is taken as well. A class with bases or decorators is left to the
    start of the run.
    """
    where, _, name = reference.rpartition(":")
    source = Path(where).expanduser() if where.endswith(".py") else module_source(where)
    body = parse_source(source).body if source else []
    cls = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if cls is None and any(isinstance(node, ast.FunctionDef) and node.name == name for node in body):
        raise DagError(f"{who}: {reference!r} is a function, not a class. Name a class with reset and step.")
    if cls is None or cls.bases or cls.decorator_list:
        return
    methods = {
        node.name: node.args for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    _check_init(methods.get("__init__"), kwargs, f"{who}: {reference!r}")
    for method, wanted in (("reset", "task, seed"), ("step", "actions")):
        if method not in methods:
            raise DagError(f"{who}: {reference!r} has no method {method}. Add {method}(self, {wanted}).")
        arguments = methods[method]
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
        count, keywords = len(wanted.split(", ")), [a.arg for a in arguments.kwonlyargs]
        least = len(names) - len(arguments.defaults)
        fits = least <= count and (count <= len(names) or arguments.vararg)
        is_gym = method == "reset" and "seed" in (*names, *keywords) and "task" not in names
        if not fits and not is_gym:
            raise DagError(
                f"{who}: {method}({', '.join(['self', *names])}) of {reference!r} cannot be called as "
                f"{method}(self, {wanted}). Change its arguments."
            )


def _check_init(arguments: ast.arguments | None, kwargs: Mapping[str, Any], who: str) -> None:
    """DagError unless __init__ takes these keywords, and needs no others."""
    taken, needed = [], []
    if arguments is not None:
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
        keywords = [a.arg for a in arguments.kwonlyargs]
        taken = [*positional, *keywords]
        needed = positional[: max(0, len(positional) - len(arguments.defaults))]
        needed += [name for name, default in zip(keywords, arguments.kw_defaults, strict=True) if not default]
    missing = [name for name in needed if name not in kwargs]
    takes_all = arguments is not None and arguments.kwarg is not None
    unknown = [name for name in kwargs if name not in taken and not takes_all]
    if missing:
        raise DagError(f"{who} needs {', '.join(missing)}. Add env_kwargs: {{{missing[0]}: ...}}.")
    if unknown:
        raise DagError(f"{who} takes no {unknown[0]!r} of env_kwargs. {suggest(unknown[0], taken)}")
