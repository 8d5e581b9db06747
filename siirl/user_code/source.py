"""The user's Python code as source text: found, parsed and searched for a name, never run."""

import ast
import functools
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from siirl.errors import ConfigError, DagError
from siirl.spelling import suggest
from siirl.user_code.extras import REPLAYABLE_PACKAGES, env_package
from siirl.user_code.signatures import Call, Function, misfits, needed_names, signature_of

_NAME = re.compile(r"[A-Za-z_]\w*")
PACKAGE_FUNCTIONS = {"show": Call(("observation", "info")), "read": Call(("text", "info"))}
"""Arguments of environments of packages that name functions, and how these are called."""
_WRITE = {"function": "file.py:fn or pkg.mod:fn", "class": "file.py:Class or pkg.mod:Class"}


def module_source(module: str) -> Path | None:
    """The file of an importable module; None for one without Python source. Nothing is imported.

    ModuleNotFoundError if there is no such module.
    """
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in inner:  # by its last name: a folder without __init__.py looks a longer one's parents up
            places = spec.submodule_search_locations if spec is not None else None
            spec = importlib.machinery.PathFinder.find_spec(part, list(places)) if places else None
    except (ImportError, ValueError):  # a module without a spec
        spec = None
    if spec is None:
        raise ModuleNotFoundError("there is no such module")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def parse_source(source: Path) -> ast.Module:
    """The syntax tree of a file. SyntaxError or OSError if it cannot be read as Python."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
        with warnings.catch_warnings(action="ignore"):
            compile(tree, str(source), "exec")  # finds what the grammar does not: two arguments of one name
    except ValueError as error:  # not UTF-8, or a null byte
        raise SyntaxError(str(error)) from error
    return tree


def import_problem(where: str, error: ImportError | OSError | SyntaxError) -> str:
    """Why a file or module cannot be used, and the fix, as two sentences."""
    if isinstance(error, SyntaxError):
        line = f", line {error.lineno}" if error.lineno else ""
        code = f" ({error.text.strip()})" if error.text else ""
        return f"{error.filename or where}{line} is no Python: {error.msg}{code}. Correct it."
    if isinstance(error, FileNotFoundError):
        place = "" if Path(where).is_absolute() else f" in {Path.cwd()}"
        return f"there is no file {where!r}{place}. Correct the path."
    return f"{where!r} cannot be imported: {error}. Check the path and PYTHONPATH."


def split_reference(reference: Any, who: str, kind: str = "function") -> tuple[str, str]:
    """(file or module, name) of "file.py:name" or "pkg.mod:name". DagError if it is no such text."""
    if not isinstance(reference, str):
        raise DagError(f"{who} = {reference!r} is no text. Write {_WRITE[kind]}.")
    where, _, name = reference.rpartition(":")
    if not where or not _NAME.fullmatch(name):
        raise DagError(f"{who} = {reference!r} names no {kind}. Write {_WRITE[kind]}.")
    return where, name


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
        tree = source_of(where) or ast.Module([], [])
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{key}={reference}: {import_problem(where, error)}") from error
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


def source_of(where: str) -> ast.Module | None:
    """The syntax tree of "file.py" or "pkg.mod"; None for a module without Python source.

    ImportError, OSError or SyntaxError if it cannot be read.
    """
    source = Path(where).expanduser() if where.endswith(".py") else module_source(where)
    return parse_source(source) if source else None


def check_reference(
    reference: Any, who: str, call: Call | None = None, kind: str = "function"
) -> ast.stmt | None:
    """DagError unless "pkg.mod:fn" or "file.py:fn" names what is there, and it can be called so.

    Looks at source text only. kind: "function" or "class". Returns the definition, or None where the source
    does not show it in full: it is imported, assigned or decorated, and is checked when it is loaded.
    """
    where, name = split_reference(reference, who, kind)
    try:
        tree = source_of(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise DagError(f"{who} = {reference!r}: {import_problem(where, error)}") from error
    if tree and (absent := missing_import(tree, Path(where).parent if where.endswith(".py") else None)):
        raise DagError(
            f"{who} = {reference!r} cannot be imported: it imports {absent!r}, and no such module is "
            "installed. Install it, or check the name and PYTHONPATH."
        )
    if tree is None:
        return None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {node.name: node for node in tree.body if isinstance(node, kinds)}
    if name not in found and not may_define(tree, name):
        defined = ", ".join(found) or "no function or class"
        raise DagError(
            f"{who} = {reference!r}: {where!r} has no {name!r}, it defines {defined}. {suggest(name, found)}"
        )
    node = found.get(name)
    if node is None or node.decorator_list:
        return None
    if isinstance(node, ast.ClassDef) != (kind == "class"):
        actual = "class" if isinstance(node, ast.ClassDef) else "function"
        raise DagError(f"{who} = {reference!r} is a {actual}, not a {kind}. Write {_WRITE[kind]}.")
    if call is not None and not isinstance(node, ast.ClassDef):
        check_call(node, f"{who} = {reference!r}", call)
    return node


def check_call(function: Function, who: str, call: Call, bound: bool = False) -> None:
    """DagError unless a definition can be called so; the message shows both signatures."""
    signature, name = signature_of(function, bound), function.name
    shown = signature_of(function)
    problems = misfits(signature, call)
    if problems:
        _refuse(f"{who}: {name}{shown} (line {function.lineno})", name, call, problems, bound)
    if isinstance(function, ast.AsyncFunctionDef) and not call.awaits:
        raise DagError(f"{who}: {name}{shown} is a coroutine, and nobody awaits it. Drop `async`.")


def check_loaded(function: Any, who: str, call: Call) -> None:
    """DagError unless a loaded function can be called so. What is written in C tells when it is called."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    except TypeError:
        raise DagError(f"{who}: {function!r} cannot be called. Write def {call.written('fn')}.") from None
    if problems := misfits(signature, call):
        _refuse(f"{who}: {name}{signature}", name, call, problems)
    if inspect.iscoroutinefunction(function) and not call.awaits:
        raise DagError(f"{who}: {name}{signature} is a coroutine, and nobody awaits it. Drop `async`.")


def _refuse(shown: str, name: str, call: Call, problems: list[str], bound: bool = False) -> NoReturn:
    wanted = call.written(name).replace("(", "(self, ", 1) if bound else call.written(name)
    fix = "Change its arguments."
    if call.more and not call.values:
        fix = f"Correct {call.more}."
    elif call.more and (call.keywords or "it needs" in str(problems)):
        fix = f"Change its arguments, or {call.more}."
    raise DagError(
        f"{shown} cannot be called as {wanted.replace('(self, )', '(self)')}: {'; '.join(problems)}. {fix}"
    )


def missing_import(tree: ast.Module, folder: Path | None = None) -> str | None:
    """The first module imported at the top level, outside of `try`, whose package is not installed.

    folder: of the file, whose neighbours it may import. None also where the code changes sys.path, as only
    running it tells then.
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
            beside = folder is not None and any((folder / f"{package}{end}").exists() for end in ("", ".py"))
            if not beside and package not in sys.modules and importlib.util.find_spec(package) is None:
                return module
    return None


def check_environment(
    reference: Any, who: str, kwargs: Mapping[str, Any], several: tuple[str, ...] = ()
) -> None:
    """DagError unless a class that its source shows in full has reset(task, seed) and step(actions), and is
    made of these arguments.

    Gymnasium's reset(*, seed, options) is taken as well, unless several nodes speak before it steps. A class
    with bases or decorators is left to the start of the run.
    """
    if packaged := env_package(reference):
        _check_packaged(packaged, f"{who} = {reference!r}", kwargs, several)
        return
    cls = check_reference(reference, who, kind="class")
    if not isinstance(cls, ast.ClassDef) or cls.bases:
        return
    who = f"{who} = {reference!r}"
    methods = methods_of(cls)
    check_init(methods.get("__init__"), kwargs, who, "env_kwargs")
    for method, values in (("reset", ("task", "seed")), ("step", ("actions",))):
        if method not in methods:
            raise DagError(f"{who} has no method {method}. Add {method}(self, {', '.join(values)}).")
        if method == "reset" and is_gym_reset(signature_of(methods[method], bound=True)):
            _check_gym(methods[method], who, several)
            continue
        check_call(methods[method], who, Call(values, awaits=True), bound=True)


def may_be_replayable(reference: str) -> bool:
    """Whether an environment says `replayable = True`, or its source does not show that it does not."""
    if packaged := env_package(reference):
        return packaged[0] in REPLAYABLE_PACKAGES
    cls = check_reference(reference, "env_path", kind="class")
    if not isinstance(cls, ast.ClassDef) or cls.bases:
        return True
    return any(
        ast.unparse(target) in ("replayable", "self.replayable")
        for node in ast.walk(cls)
        for target in (*getattr(node, "targets", ()), getattr(node, "target", None))
        if target is not None
    )


def _check_packaged(
    packaged: tuple[str, str], who: str, kwargs: Mapping[str, Any], several: tuple[str, ...]
) -> None:
    """DagError for an environment of a package that is not named, is given functions that are not there, or
    is for one agent where several speak."""
    module, name = packaged
    if not name:
        raise DagError(f"{who} names no environment. Write {module}:NAME.")
    for key, call in PACKAGE_FUNCTIONS.items():
        if kwargs.get(key) is not None:
            check_reference(kwargs[key], f"{who}: env_kwargs.{key}", call)
    if module == "sandbox" and name != "tasks":
        raise DagError(f"{who}: there is only sandbox:tasks. Write that.")
    if several and module != "textarena":
        raise DagError(
            f"{who} takes the action of one agent, but {' and '.join(map(repr, several))} both "
            "speak before it steps. Write a class with reset(self, task, seed) and step(self, actions)."
        )


def _check_gym(reset: Function, who: str, several: tuple[str, ...]) -> None:
    """DagError for a reset that lacks `task` and cannot be meant as Gymnasium's."""
    why = ""
    if isinstance(reset, ast.AsyncFunctionDef):
        why = "whose methods are no coroutines"
    elif several:
        why = f"which takes the action of one agent, but {' and '.join(map(repr, several))} both speak"
    if why:
        raise DagError(
            f"{who}: reset{signature_of(reset)} (line {reset.lineno}) lacks task, and so is taken for "
            f"Gymnasium's, {why}. Write reset(self, task, seed) and step(self, actions)."
        )


def is_gym_reset(signature: inspect.Signature) -> bool:
    """Whether a method reset, without self, is Gymnasium's: it takes `seed` but no `task`."""
    return "seed" in signature.parameters and "task" not in signature.parameters


def methods_of(cls: ast.ClassDef) -> dict[str, Function]:
    """The methods that a class defines, by name."""
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def check_init(init: Function | None, kwargs: Mapping[str, Any], who: str, key: str) -> None:
    """DagError unless __init__ takes these keywords, which `key` gives, and needs no others."""
    signature = signature_of(init, bound=True) if init else inspect.Signature()
    missing = [name for name in needed_names(signature) if name not in kwargs]
    if missing:
        raise DagError(f"{who} needs {', '.join(missing)}. Add {key}: {{{missing[0]}: ...}}.")
    if problems := misfits(signature, Call(keywords=tuple(kwargs))):
        raise DagError(f"{who} cannot be made of {key}: {'; '.join(problems)}. Correct {key}.")


def find_module(module: str, folders: Sequence[str] | None = None) -> Path | None:
    """The source file of a module, sought in folders (sys.path unless given) without importing its parents.

    Of a package, its __init__.py. None if there is no source of it there.
    """
    for folder in sys.path if folders is None else folders:
        base = Path(folder or ".", *module.split("."))
        for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


def own_code(file: Path) -> dict[str, Path]:
    """The file and all that it imports of the user's own, again and again: name below its folder -> file.

    Own is what lies below the file's folder or a folder of sys.path, and is neither installed nor of Python
    or siirl. Imports in functions count; those that are computed are not seen. What is no Python has none.
    """
    root = file.resolve().parent
    folders = [str(root), *(path for path in sys.path if is_own(Path(path or ".")))]
    found: dict[Path, None] = {file.resolve(): None}
    for one in _each_once(found):
        for name in _imported(one, root):
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):  # the packages above are imported, too
                source = find_module(".".join(parts[:depth]), folders)
                if source is not None and is_own(source):
                    found.setdefault(source.resolve())
    return {_name(path, root): path for path in found}


def _each_once(found: dict[Path, None]) -> Iterator[Path]:
    """The keys of a dict that grows meanwhile, each once."""
    done: set[Path] = set()
    while left := [path for path in found if path not in done]:
        for path in left:
            done.add(path)
            yield path


def _imported(file: Path, root: Path) -> Iterator[str]:
    """Full names of modules that a file imports; "from a import b" may name the module a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [_package(file, root, node.level), base]))
            yield from filter(None, [base])
            yield from (".".join(filter(None, [base, alias.name])) for alias in node.names)


def _package(file: Path, root: Path, level: int) -> str:
    """The package that so many dots mean in a file, as a name below the root."""
    folder = file.parent
    for _ in range(level - 1):
        folder = folder.parent
    return ".".join(folder.relative_to(root).parts) if folder.is_relative_to(root) else ""


def is_own(path: Path) -> bool:
    path = path.resolve()
    return path.exists() and not any(path.is_relative_to(folder) for folder in _others())


def _others() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [Path(sysconfig.get_path(name)).resolve() for name in names] + [
        Path(__file__).resolve().parents[1]
    ]


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
