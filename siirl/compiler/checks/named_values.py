"""Numbers by name, beside the score, that a run asks rewards for: whether its rows get them. Pure."""

from collections.abc import Iterator

from siirl.compiler.resolved_node import ResolvedNode
from siirl.compiler.workflow import Workflow
from siirl.dag.ops import score_names
from siirl.errors import ConfigError, UserError


def check_named_values(kept: Workflow) -> Iterator[UserError]:
    """Names that a model's score, or a sum of rewards, does not come with. Functions may return any."""
    scorers = {node.agent: node for node in kept.nodes.values() if node.op.scores and _gives_score(node)}
    for node in kept.nodes.values():
        scorer = scorers.get(node.agent)
        known = None if scorer is None else _numbers(scorer)
        if known is None:
            continue
        for key, name in _asked(node):
            if name in known or name.partition("/")[0] in known:
                continue
            has = f"gives {', '.join(known)}" if known else "gives the score of a model alone"
            yield ConfigError(
                f"{node}: {key} names {name!r}, but {scorer} {has}. Name "
                f"{', '.join(dict.fromkeys((*known, 'score')))}, or score by a function that returns it."
            )


def _gives_score(node: ResolvedNode) -> bool:
    return any(key.name == "score" for key in node.writes)


def _numbers(scorer: ResolvedNode) -> tuple[str, ...] | None:
    """What a row has by name of whoever scores it, besides the score; None: whatever the function returns."""
    if scorer.op.by_model:
        return ()
    return score_names(scorer.spec.reads or ()) if scorer.op.combines else None


def _asked(node: ResolvedNode) -> Iterator[tuple[str, str]]:
    """The keys that name numbers for a node, and those numbers."""
    algorithm = node.cfg.algorithm
    metric = algorithm.filter_groups.metric
    if node.op.repeats and metric not in ("acc", "score"):
        yield "algorithm.filter_groups.metric", metric
    if node.op.credits and algorithm.estimator.compares_parts:
        yield from (("algorithm.gdpo_rewards", name) for name in algorithm.gdpo_rewards if name != "score")
