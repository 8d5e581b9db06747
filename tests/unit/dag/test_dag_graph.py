"""The graph: order, cycles, unknown dependencies, removal of nodes."""

import random

import networkx as nx
import pytest

from siirl.dag.graph import build_graph
from siirl.dag.spec import DagBuilder
from siirl.errors import DagError


def graph_of(**dependencies: str):
    dag = DagBuilder("test")
    for node, parents in dependencies.items():
        dag.node(node, "COMPUTE", dependencies=parents.split())
    return build_graph(dag.build())


@pytest.mark.parametrize(
    ("dependencies", "order"),
    [
        ({"a": "", "b": "a", "c": "a"}, "abc"),
        ({"c": "a", "b": "a", "a": ""}, "acb"),
        ({"d": "b c", "c": "a", "b": "a", "a": ""}, "acbd"),
        ({"z": "", "y": "", "x": "z"}, "zyx"),
        ({"b": "", "a": "b", "c": ""}, "bac"),
    ],
)
def test_order_is_topological_with_declaration_as_tie_break(dependencies, order):
    assert "".join(graph_of(**dependencies).order) == order


@pytest.mark.parametrize(
    ("dependencies", "cycle"),
    [
        ({"a": "a"}, "a -> a"),
        ({"a": "b", "b": "a"}, "a -> b -> a"),
        ({"s": "", "a": "s c", "b": "a", "c": "b", "d": "c"}, "a -> b -> c -> a"),
        ({"d": "c", "c": "b", "b": "a", "a": "c"}, "c -> a -> b -> c"),
    ],
)
def test_a_cycle_is_printed_node_by_node_in_the_direction_of_the_rows(dependencies, cycle):
    with pytest.raises(DagError, match=f"form a cycle: {cycle}\\. "):
        graph_of(**dependencies)


def test_an_unknown_dependency_names_node_and_closest_match():
    with pytest.raises(
        DagError,
        match=r"node 'b' depends on 'rolout', but the DAG has no such node\. Did you mean 'rollout'\?",
    ):
        graph_of(rollout="", b="rolout")


def test_children_of_removed_nodes_inherit_what_these_depended_on():
    graph = graph_of(a="", b="a", c="b", d="c a", e="d").without({"b", "c"})
    assert graph.order == ("a", "d", "e")
    assert graph.parents == {"a": (), "d": ("a",), "e": ("d",)}
    assert graph.children == {"a": ("d",), "d": ("e",), "e": ()}


def test_ancestors_are_all_nodes_above():
    assert graph_of(a="", b="a", c="b", x="").above == {
        "a": set(),
        "b": {"a"},
        "c": {"a", "b"},
        "x": set(),
    }


def by_networkx(parents: dict[str, list[str]]) -> list[str]:
    """Of the nodes that are free to run, the one that was declared first."""
    graph, declared = nx.DiGraph(), list(parents)
    graph.add_nodes_from(parents)
    graph.add_edges_from((parent, node) for node, above in parents.items() for parent in above)
    return list(nx.lexicographical_topological_sort(graph, key=declared.index))


def test_the_order_of_random_workflows_is_that_of_networkx():
    for seed in range(300):
        draw = random.Random(seed)
        ids = [f"n{index}" for index in range(draw.randint(1, 12))]
        hidden = draw.sample(ids, len(ids))  # a topological order
        parents = {
            node: draw.sample(hidden[:at], draw.randint(0, min(at, 3))) for at, node in enumerate(hidden)
        }
        declared = {node: parents[node] for node in ids}
        graph = graph_of(**{node: " ".join(above) for node, above in declared.items()})
        assert list(graph.order) == by_networkx(declared), declared
        above: dict[str, set[str]] = {}
        for node in graph.order:
            above[node] = set(declared[node]).union(*(above[parent] for parent in declared[node]))
        assert graph.above == above
        assert graph.children == {node: tuple(x for x in ids if node in declared[x]) for node in ids}
        removed = set(draw.sample(ids, draw.randint(0, len(ids) - 1)))
        left = graph.without(removed)
        assert left.above == {node: above[node] - removed for node in left.order}
        assert set(left.order) == set(ids) - removed
