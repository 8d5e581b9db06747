"""When a process gives back the device memory that torch keeps: before somebody else may need it.

The engine of a rollout, which is another process, needs it in turn. Given back after each node that computes,
it costs the driver a few hundred pieces each time, and as many when the next node takes them again.
"""

from collections.abc import Container, Mapping, Sequence

from siirl.compiler.plan import Collect, Free, Instruction, NodePlan, Reshard, Run


def cached_after(
    instructions: Sequence[Instruction], nodes: Mapping[str, NodePlan], engines: Container[str | None]
) -> set[int]:
    """The ids of those Runs of a rank after which a training engine computes before anybody else does.

    instructions: of one rank, in order. engines: its training engines, by the names of models.
    """
    found, keeps = set(), False
    for ins in reversed(instructions):
        match ins:
            case Run(node=name) if nodes[name].model in engines:
                if keeps:
                    found.add(id(ins))
                keeps = True
            case Run(node=name):
                keeps = keeps and _computes_on_rows_alone(nodes[name])
            case Reshard() | Free() | Collect():
                pass
            case _:
                keeps = False
    return found


def _computes_on_rows_alone(node: NodePlan) -> bool:
    """An advantage, say: no model, no rewards of the user's, nobody's own code."""
    spec = node.spec
    needs_others = spec.needs or spec.scores or spec.is_rollout
    return node.model is None and node.executable is None and not needs_others
