"""Reads DAG files: safe YAML, siiRL's schema, `!Ref global_config.key`, and no key is swallowed."""

from pathlib import Path
from typing import Any

import yaml

from siirl.dag.spec import DagSpec, dag_spec, node_spec
from siirl.errors import DagError, Place, reworded
from siirl.findings import Findings
from siirl.spelling import suggest

_TOP_KEYS = ("dag_id", "description", "global_config", "nodes")


class _Ref:
    """A `!Ref` tag before it is resolved."""

    def __init__(self, path: str) -> None:
        self.path = path


class _Loader(yaml.SafeLoader):
    """SafeLoader that knows `!Ref` and refuses a key written twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise DagError(
                    f"a key is no text, but a list or a mapping (line {key.start_mark.line + 1}): was a "
                    "template, as in {{NAME}}, not filled in? Write a name, in quotes if it has braces."
                )
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise DagError(
                    f"key {key.value!r} is written twice (line {key.start_mark.line + 1}): remove one."
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("!Ref", lambda loader, node: _Ref(str(node.value)))


TEMPLATES = Path(__file__).parents[2] / "dag_templates"
"""The workflows that come with siirl."""


def load_dag_file(path: str | Path) -> DagSpec:
    """The DagSpec of a YAML file; dag_templates/NAME.yaml is siirl's own wherever there is no other one.

    DagError if it cannot be read or does not follow the schema.
    """
    file = Path(path).expanduser()
    if file.parts[:-1] == (TEMPLATES.name,) and not file.exists() and (TEMPLATES / file.name).is_file():
        file = TEMPLATES / file.name
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DagError(
            f"DAG file {str(file)!r} cannot be read: there is none in {file.absolute().parent}. Check "
            "dag.workflow_path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DagError(f"DAG file {str(file)!r} cannot be read: {error}. Check dag.workflow_path.") from None
    try:
        return parse_dag(text)
    except DagError as error:
        raise reworded(error, lambda message: f"DAG file {str(file)!r}: {message}") from None


def _told(error: yaml.YAMLError) -> str:
    """What PyYAML says, and of which line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    line = mark.get_snippet(indent=0, max_length=60) or ""
    text = f": {line.splitlines()[0].strip()!r}" if line else ""
    tab = ". Indent by spaces" if "\\t" in problem else ""
    return f"line {mark.line + 1}: {problem}{text}{tab}"


def parse_dag(text: str) -> DagSpec:
    """The DagSpec of YAML text.

    Top-level keys other than the schema's are refused, except mappings named `*_config`: siiRL's files keep
    the anchors (`&name`) there that nodes repeat.
    """
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise DagError(f"it is not YAML: {_told(error)}.") from None
    if not isinstance(raw, dict):
        raise DagError("it holds no mapping. Start with dag_id: NAME and nodes: [...].")
    found = Findings(Place.WORKFLOW)
    for key in raw:
        holds_anchor = isinstance(raw[key], dict) and str(key).endswith("_config")
        if key not in _TOP_KEYS and not holds_anchor:
            found.add(DagError(f"unknown key {key!r}. {suggest(key, _TOP_KEYS)}"))
    dag_id, entries = raw.get("dag_id"), raw.get("nodes")
    if not isinstance(dag_id, str) or not dag_id:
        found.add(DagError(f"dag_id = {dag_id!r} is no name. Add dag_id: NAME."))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        found.add(
            DagError("`nodes` is not a list of mappings. Write nodes: [{node_id: ..., node_type: ...}, ...].")
        )
        entries = []
    nodes = []
    for entry in entries:
        with found.at():
            nodes.append(node_spec(_resolve(entry, raw.get("global_config") or {})))
    found.close()
    return dag_spec(str(dag_id), nodes, str(raw.get("description") or ""))


def _resolve(value: Any, global_config: dict[str, Any]) -> Any:
    """`value` with every `!Ref global_config.a.b` replaced by what it names."""
    if isinstance(value, dict):
        return {key: _resolve(item, global_config) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, global_config) for item in value]
    return _look_up(value.path, global_config) if isinstance(value, _Ref) else value


def _look_up(path: str, global_config: dict[str, Any]) -> Any:
    prefix, _, rest = path.partition(".")
    if prefix != "global_config" or not rest:
        raise DagError(
            f"!Ref {path}: only values of global_config can be named. Write !Ref global_config.NAME."
        )
    here: Any = global_config
    while rest:
        if not isinstance(here, dict):
            here = {}
        name = rest if rest in here else rest.partition(".")[0]  # a dotted key counts as one name
        if name not in here:
            raise DagError(f"!Ref {path} names nothing. {suggest(name, map(str, here))}")
        here, rest = here[name], rest[len(name) + 1 :]
    return here
