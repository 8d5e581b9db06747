"""Every supported key is read by something: an accepted key that nobody reads would be swallowed.

The scan parses the package, without importing it, and collects each attribute that is read together with
the names that its parent goes by. A key counts as read if its last name is read from something that is, or
is called after, the group that holds it: `cfg.trainer.seed`, `optim.lr`, `self.actor_cfg.grad_clip`,
`settings.n` after `settings = rollout.val_kwargs`, an argument annotated with the group's class, or the
result of a function that returns the group.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest
from package_sources import PACKAGE, package_nodes

from siirl.config.algorithm_table import ESTIMATORS, LOSSES
from siirl.config.keys import has_one_value
from siirl.config.resolve import FOLLOWS, REFERENCE, status
from siirl.config.roles import ROLES
from siirl.config.root import Config, all_groups, all_keys, get_group_class

SUFFIXES = ("_cfg", "_config", "_options", "_keys", "_params")


def module_nodes(package: Path, leave_out: tuple[str, ...] = ("config",)) -> Iterator[list[ast.AST]]:
    """Of each module, what is in it."""
    names = (
        "actor.py",
        "algorithm.py",
        "batch.py",
        "roles.py",
        "rollout.py",
    )  # what rooms above ask is computed there
    readers = [package / "config" / name for name in names]
    for file in sorted(package.rglob("*.py")):
        if file in readers or file.relative_to(package).parts[0] not in leave_out:
            yield package_nodes()[file] if package == PACKAGE else list(ast.walk(ast.parse(file.read_text())))


def names_of(node: ast.expr) -> set[str]:
    """What a value may be: the last name of each attribute, variable or function that it comes from."""
    match node:
        case ast.Attribute(attr=name):
            return {name}
        case ast.Name(id=name):
            return {name}
        case ast.Call(func=ast.Name(id="getattr"), args=args) if len(args) > 1:
            return {args[1].value} if isinstance(args[1], ast.Constant) else {"*"}
        case ast.Call(func=ast.Name(id=name)):
            return {name}
        case ast.IfExp(body=body, orelse=orelse):
            return names_of(body) | names_of(orelse)
        case (
            ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values)
        ):
            return set().union(*map(names_of, values))
        case ast.Dict(values=values):
            return set().union(*map(names_of, values))
        case ast.Subscript(value=value):
            return names_of(value)
    return set()


def aliases_of(nodes: list[ast.AST], class_groups: dict[str, set[str]]) -> dict[str, set[str]]:
    """Variable, argument, attribute or function -> the names of what it stands for, in one module."""
    aliases: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    for name in names_of(target):
                        aliases[name] |= names_of(value)
            case (
                ast.NamedExpr(target=target, value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                aliases[next(iter(names_of(target)))] |= names_of(value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                for name in names_of(target):
                    aliases[name] |= names_of(value)
            case ast.FunctionDef(name=name, returns=returns):
                aliases[name] |= annotated(returns, class_groups)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        aliases[name] |= names_of(inner.value)
        if isinstance(node, ast.ClassDef):
            aliases["self"] |= class_groups.get(node.name, set())
        if isinstance(node, ast.arg):
            aliases[node.arg] |= annotated(node.annotation, class_groups)
        if isinstance(node, ast.AnnAssign):
            for name in names_of(node.target):
                aliases[name] |= annotated(node.annotation, class_groups)
    return aliases


def annotated(annotation: ast.expr | None, class_groups: dict[str, set[str]]) -> set[str]:
    """The groups whose class an annotation names."""
    found = (
        (names_of(node) for node in ast.walk(annotation) if isinstance(node, ast.expr)) if annotation else ()
    )
    return set().union(*(class_groups.get(name, set()) for names in found for name in names))


def reads_of(package: Path, class_groups: dict[str, set[str]]) -> dict[str, set[str]]:
    """Attribute name -> the names of the parents that it is read from, "*" for one that cannot be known."""
    modules = [(nodes, aliases_of(nodes, class_groups)) for nodes in module_nodes(package)]
    functions: dict[str, set[str]] = defaultdict(set)
    roles = package / "config" / "roles.py"  # its functions give groups; what it reads itself does not count
    givers = [list(ast.walk(ast.parse(roles.read_text())))] if roles.exists() else []
    for nodes, aliases in [*modules, *((nodes, aliases_of(nodes, class_groups)) for nodes in givers)]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                functions[node.name] |= aliases[node.name]
    reads: dict[str, set[str]] = defaultdict(set)
    for nodes, aliases in modules:
        stands_for = functools.cache(functools.partial(resolved, tables=(aliases, functions)))
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                reads[node.attr] |= stands_for(frozenset(names_of(node.value)))
            if isinstance(node, ast.Call) and names_of(node.func) == {"getattr"} and len(node.args) > 1:
                for name in names_of(node):
                    reads[name] |= stands_for(frozenset(names_of(node.args[0])))
    return reads


def resolved(names: frozenset[str], tables: Iterable[dict[str, set[str]]]) -> set[str]:
    """The names and all that they stand for, with a leading _ and a suffix such as _cfg taken off."""
    found, open_names = set(), list(names)
    while open_names:
        name = open_names.pop()
        if name in found:
            continue
        found.add(name)
        short = name.lstrip("_")
        for suffix in SUFFIXES:
            short = short.removesuffix(suffix)
        open_names += [short, *(inner for table in tables for inner in table.get(name, ()))]
    return found


def unread_keys(package: Path, keys: Iterable[str], class_groups: dict[str, set[str]]) -> list[str]:
    """The keys that nothing in `package` reads."""
    reads = reads_of(package, class_groups)
    unread = []
    for key in keys:
        *groups, last = key.split(".")
        parents = reads.get(last, set())
        if not parents & {groups[-1], "*"}:
            unread.append(key)
    return unread


def class_groups() -> dict[str, set[str]]:
    """Name of a schema class -> the last names of the groups that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for group in all_groups():
        schema = get_group_class(group)
        for base in schema.__mro__[:-1] if schema else ():
            found[base.__name__].add(group.rsplit(".", 1)[-1])
    assert Config.__name__ not in found
    return found


SYNTHETIC = {
    "direct": "def f(cfg):\n    return cfg.actor_rollout_ref.actor.optim.lr",
    "variable": "def f(cfg):\n    optim = cfg.actor_rollout_ref.actor.optim\n    return optim.lr",
    "other name": "def f(cfg):\n    settings = cfg.actor_rollout_ref.actor.optim\n    return settings.lr",
    "suffix": "def f(optim_cfg):\n    return optim_cfg.lr",
    "attribute": "def build(self, cfg):\n    self._o = cfg.actor.optim\ndef f(self):\n    return self._o.lr",
    "annotation": "def f(x: OptimConfig):\n    return x.lr",
    "either": "def f(a, b, first):\n    o = a.optim if first else b.optim\n    return o.lr",
    "returned": "def section(cfg):\n    return cfg.actor.optim\ndef f(cfg):\n    return section(cfg).lr",
    "getattr": "def f(optim):\n    return getattr(optim, 'lr')",
    "unknown parent": "def f(cfg, name):\n    return getattr(cfg, name).lr",
}


@pytest.mark.parametrize("source", SYNTHETIC.values(), ids=SYNTHETIC.keys())
def test_the_scan_finds_a_key_that_is_read(source, tmp_path):
    (tmp_path / "module.py").write_text(source)
    assert unread_keys(tmp_path, ["actor.optim.lr"], {"OptimConfig": {"optim"}}) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(cfg):\n    return cfg.critic.lr",
        "def f(optim):\n    return optim.betas",
        "def f(optim):\n    optim.lr = 3",
        "lr = 'actor.optim.lr'",
        "def f(x: CriticConfig):\n    return x.lr",
    ],
)
def test_the_scan_misses_no_key_that_nobody_reads(source, tmp_path):
    (tmp_path / "module.py").write_text(source)
    assert unread_keys(tmp_path, ["actor.optim.lr"], {"OptimConfig": {"optim"}}) == ["actor.optim.lr"]


def test_the_scan_leaves_out_the_configuration_itself(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "checks.py").write_text("def f(optim):\n    return optim.lr")
    assert unread_keys(tmp_path, ["actor.optim.lr"], {}) == ["actor.optim.lr"]


ACTOR = "actor_rollout_ref.actor"
TAKEN = {f"algorithm.{key}" for row in ESTIMATORS.values() for key in row.keys} | {
    f"{group}.{key}"
    for row in LOSSES.values()
    for key in row.keys
    for group in (ACTOR, f"{ACTOR}.policy_loss")
}
"""Keys that nodes hand to estimators and losses as the table says (test_algorithms_names.py)."""
TAKEN |= {
    key for role in ROLES.values() for keys in (role.forward, role.train) if keys for key in astuple(keys)
}
"""Keys that tables name, for whoever asks the row."""


@pytest.mark.heavy
def test_every_supported_key_is_read_by_something():
    followed = {source for template in FOLLOWS.values() for source in REFERENCE.findall(template)}
    supported = [
        name
        for name, key in all_keys().items()
        if status(name) == "supported" and not has_one_value(key)
        if name not in followed and name not in TAKEN
    ]
    unread = unread_keys(PACKAGE, supported, class_groups())
    assert unread == [], f"{len(unread)} of {len(supported)} supported keys are read by nothing"
