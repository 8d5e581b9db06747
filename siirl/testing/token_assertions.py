"""Of tokens: which are trained, who sampled them, and what the chat template makes of them."""

from collections.abc import Iterator

from torch import Tensor

from siirl.compiler.plan import NodePlan
from siirl.testing.evidence import NodeRecord
from siirl.testing.trial import Trial
from siirl.testing.verdicts import (
    Verdict,
    calls,
    failing,
    nodes_of,
    not_here,
    passed,
    staleness_bound,
    trains_policy,
)

SAME_LOG_PROB = 0.01
"""By which log-probs of the same weights differ at most, in float32, sampled and computed anew."""


def _handles_tokens(node: NodePlan) -> bool:
    return node.spec.is_rollout or node.spec.trains_policy


def only_sampled_tokens_are_trained(trial: Trial) -> Verdict:
    """Every trained token was sampled by an engine of the row's own policy."""
    told: dict[str, str] = {}
    for record in calls(trial, _handles_tokens):
        said = _said(trial, f"agent_{record.agent}.rollout")
        if not said or not record.has("response_mask", "response_ids"):
            continue
        mask_BT = record.column("response_mask").bool()
        if record.has("weight_version") and bool((mask_BT & (record.column("weight_version") < 0)).any()):
            return failing(
                f"trained tokens of node {record.node!r} were sampled by no engine",
                "Train on tokens whose weight_version is 0 or more.",
            )
        for mask_T, ids_T in zip(mask_BT, record.column("response_ids"), strict=True):
            for turn in _runs(mask_T.tolist()):
                tokens = tuple(ids_T[turn].tolist())
                if tokens not in said and not _joined(tokens, said):
                    return failing(
                        f"node {record.node!r} trains tokens {list(tokens)[:12]}, which the engine of "
                        f"agent {record.agent} did not sample",
                        "Do not turn responses into text and tokens again, and leave response_mask as the "
                        "rollout wrote it: train on what was sampled.",
                    )
        told[record.node] = f"{record.node}: {int(mask_BT.sum())} of {mask_BT.numel()} positions"
    if not told:
        return not_here("no engine samples what is trained")
    shown = {node: text for one in trial.alone.evidence for node, text in one.shown.items()}
    rows = "\n".join(f"{node}: {text}" for node, text in shown.items())
    return passed(
        "all sampled: " + "; ".join(told.values()), rows and f"{rows}\n(between >> and <<: what is trained)"
    )


def _said(trial: Trial, engine: str) -> set[tuple[int, ...]]:
    """The responses of an engine."""
    spoken = (x for one in trial.alone.evidence for _, x in one.spoken)
    return {x.token_ids for x in spoken if x.engine == engine}


def _runs(mask: list[bool]) -> Iterator[slice]:
    """The stretches of a mask that are true."""
    start = None
    for place, value in enumerate([*mask, False]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            yield slice(start, place)
            start = None


def _joined(tokens: tuple[int, ...], said: set[tuple[int, ...]]) -> bool:
    """Whether tokens are several responses, one after the other."""
    reached = {0}
    for start in range(len(tokens)):
        if start in reached:
            reached |= {start + len(one) for one in said if one and tokens[start : start + len(one)] == one}
    return len(tokens) in reached


def rows_are_of_their_own_policy(trial: Trial) -> Verdict:
    """What a policy trains was sampled under its own weights of that step: equal ids of another agent, or
    another context, have other log-probs."""
    told: list[str] = []
    bound_of = {
        node.agent: staleness_bound(trial, node) for node in nodes_of(trial, lambda x: x.spec.is_rollout)
    }
    for record in calls(trial, lambda node: node.spec.is_rollout):
        if wrong := _wrong_version(trial, record, bound_of.get(record.agent, 0)):
            return wrong
    told += [f"agent {agent}: at most {bound} steps old" for agent, bound in bound_of.items() if bound]
    waiting = {node.agent for node in nodes_of(trial, lambda one: one.spec.collects)}
    for record in calls(trial, trains_policy):
        if record.before is None or not record.has("rollout_log_prob", "response_mask"):
            continue
        if record.step > 1 and record.agent in waiting:
            continue  # rows of a round that a step did not need, of the weights before
        if record.round or bound_of.get(record.agent, 0) or not _said(trial, f"agent_{record.agent}.rollout"):
            continue
        mask_BT = record.column("response_mask").bool()
        off = _largest(record.before - record.column("rollout_log_prob"), mask_BT)
        if off > SAME_LOG_PROB:
            return failing(
                f"node {record.node!r} trains tokens that were sampled with log-probs up to {off:.2g} nats "
                "from those of its own policy before the update: another agent's, other weights, another "
                "prompt",
                "Let the rows of an agent reach its own update as its rollout wrote them.",
            )
        told.append(
            f"{record.node}: step {record.step} under version {_versions(trial, record)}, off by {off:.0e}"
        )
    return passed("; ".join(told)) if told else not_here("no policy trains what its engine has just sampled")


def _wrong_version(trial: Trial, record: NodeRecord, max_lag: int) -> Verdict | None:
    """Of a rollout whose tokens are of weights that its policy did not have, or too old ones."""
    model = f"agent_{record.agent}.actor"
    if not record.has("weight_version", "response_mask") or model not in record.versions:
        return None
    version_B = record.column("weight_version")[record.column("response_mask").bool()]
    if not len(version_B) or int(version_B.max()) < 0:
        return None
    now = record.versions[model]
    updates = max((x.versions[model] for x in trial.alone.records() if model in x.versions), default=0)
    oldest = now - max_lag * max(1, updates)
    if int(version_B.min()) < oldest or int(version_B.max()) > now:
        return failing(
            f"node {record.node!r} in step {record.step}: tokens of version {int(version_B.min())} to "
            f"{int(version_B.max())}, where its policy has {now} and rollout.max_lag={max_lag}",
            "Send weights to the engines after each update; rows that wait belong to asynchronous rollouts.",
        )
    return None


def _versions(trial: Trial, record: NodeRecord) -> str:
    found = {
        version
        for one in trial.alone.records(record.step)
        if one.agent == record.agent and one.has("weight_version", "response_mask")
        for version in one.column("weight_version")[one.column("response_mask").bool()].tolist()
    }
    return ", ".join(map(str, sorted(found)))


def _largest(difference_BT: Tensor, mask_BT: Tensor) -> float:
    return float((difference_BT * mask_BT).abs().max()) if mask_BT.any() else 0.0


def the_template_keeps_what_it_wrote(trial: Trial) -> Verdict:
    """What an agent reads before a turn is a prefix of what the chat template writes after it."""
    told, seen = [], {node: x for one in trial.alone.evidence for node, x in one.templates.items()}
    for node, found in seen.items():
        cfg = trial.cfg(node).actor_rollout_ref.rollout
        turns = 1 + max((len(turns) - 1 for turns in _own_turns(trial, node)), default=0)
        if found.refused:
            told.append(f"{node}: the template refuses a conversation that goes on ({found.refused})")
        elif found.between and not found.reasons:
            return failing(
                f"node {node!r}: between the prompt and the words of the turn the template writes "
                f"{found.between!r}, which the model does not see before it speaks",
                "Let the template write that where add_generation_prompt is true.",
            )
        elif not found.keeps and turns > 1 and cfg.agent.history == "grow":
            return failing(
                f"node {node!r} speaks {turns} times, the template writes earlier turns anew, and "
                "rollout.agent.history=grow keeps them: it is trained on what the template never makes",
                "Set actor_rollout_ref.rollout.agent.history=as_template, or a template that keeps turns.",
            )
        elif not found.keeps:
            told.append(f"{node}: earlier turns are written anew, so each turn after one is a row of its own")
        else:
            told.append(f"{node}: a prefix, {turns} own turn{'s' * (turns > 1)}")
    return passed("; ".join(told)) if told else not_here("no chat template is used")


def _own_turns(trial: Trial, node: str) -> Iterator[list[int]]:
    """The turns of a node in each conversation."""
    for record in trial.alone.records():
        if record.has("conversation") and "conversation" in record.wrote:
            for talk in record.column("conversation"):
                yield [said["turn"] for said in talk if said.get("node") == node and said["turn"] is not None]


def answers_are_whole(trial: Trial) -> Verdict:
    """Responses end by a stop token, and no answer of the script is cut."""
    spoken = [x for one in trial.alone.evidence for _, x in one.spoken]
    if not spoken:
        return not_here("no engine sampled")
    cut = [x for x in spoken if x.num_script > len(x.token_ids)]
    without = [node for one in trial.alone.evidence for node, stops in one.stops.items() if not stops]
    if without:
        return failing(f"the model of {without[0]!r} has no stop token", "Set rollout.stop_token_ids.")
    if cut:
        longest = max(cut, key=lambda x: x.num_script)
        return failing(
            f"{len(cut)} of {sum(x.scripted for x in spoken)} answers are cut, one of "
            f"{longest.num_script} tokens behind {len(longest.token_ids)}",
            "Raise data.max_response_length, or rollout.agent.max_turn_tokens of agents.",
        )
    share = sum(x.finish_reason == "length" for x in spoken) / len(spoken)
    stops = {text for one in trial.alone.evidence for texts in one.stops.values() for text in texts}
    return passed(f"stop tokens {' '.join(sorted(stops))}; {share:.0%} of {len(spoken)} responses are cut")
