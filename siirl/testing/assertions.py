"""What a test asserts of a workflow, a function each: trial in, verdict with its evidence out.

None of them passes in silence: what does not apply to a workflow says why, and what could not be seen,
because a run failed, fails.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from siirl.algorithms.advantages import ADVANTAGES
from siirl.compiler.cost.device_kinds import chosen_device
from siirl.compiler.cost.step_time import step_time
from siirl.compiler.cost.work import row_tokens
from siirl.compiler.plan import NodePlan
from siirl.errors import UserError
from siirl.launch.devices import device_name, rank_memory_gib
from siirl.show.memory_text import memory_table
from siirl.testing.evidence import NodeRecord
from siirl.testing.trial import Outcome, Trial
from siirl.user_code.load_object import load_object

Status = Literal["pass", "FAIL", "n/a"]
SAME = 1e-4
"""Relative distance up to which float32 sums in another order are equal."""


@dataclass(frozen=True)
class Verdict:
    """What came of an assertion."""

    status: Status
    evidence: str
    fix: str = ""
    """What to change, of one that failed."""


Assertion = Callable[[Trial], Verdict]


def _pass(evidence: str) -> Verdict:
    return Verdict("pass", evidence)


def _fail(evidence: str, fix: str) -> Verdict:
    return Verdict("FAIL", evidence, fix)


def _none(why: str) -> Verdict:
    return Verdict("n/a", why)


def _nodes(trial: Trial, wanted: Callable[[NodePlan], bool]) -> list[NodePlan]:
    return [node for node in trial.plan.nodes.values() if wanted(node)]


def _calls(trial: Trial, wanted: Callable[[NodePlan], bool], run: str = "alone") -> Iterator[NodeRecord]:
    """The calls of nodes of a kind that had rows."""
    names = {node.name for node in _nodes(trial, wanted)}
    yield from (record for record in trial.runs[run].records() if record.node in names and len(record))


def _trains_policy(node: NodePlan) -> bool:
    return node.spec.trains_policy


def _scores(node: NodePlan) -> bool:
    return node.spec.scores


def _credits(node: NodePlan) -> bool:
    return node.spec.credits


def _compares(trial: Trial, node: str) -> bool:
    """Whether an advantage node compares the responses of a prompt; also by an estimator of the user's."""
    who = "algorithm.adv_estimator"
    estimator = trial.cfg(node).algorithm.adv_estimator
    name = ADVANTAGES.resolve(estimator, partial(load_object, who=who))
    return "group_id" in ADVANTAGES.get(name).needs


def the_steps_run(trial: Trial) -> Verdict:
    """The workflow goes through its training steps."""
    outcome = trial.alone
    if outcome.error:
        return _fail(outcome.error, "Correct what it names; nothing else can be said before the steps run.")
    steps = {record.step for record in outcome.records()}
    names = ", ".join(trial.plan.nodes)
    return _pass(f"{len(steps)} steps of {names} in {outcome.seconds:.1f} s")


def groups_are_as_declared(trial: Trial) -> Verdict:
    """What is compared are groups of n rows or episodes of a prompt each."""
    told = []
    for node in _nodes(trial, _credits):
        cfg = trial.cfg(node.name)
        n, keys = cfg.actor_rollout_ref.rollout.n, cfg.algorithm.credit.group_by
        if not _compares(trial, node.name):
            continue
        if n < 2:
            return _fail(
                f"node {node.name!r} compares the responses of a prompt, and there is {n}: nothing is learnt",
                "Set actor_rollout_ref.rollout.n to 4 or more.",
            )
        for record in _calls(trial, lambda one, name=node.name: one.name == name):
            samples: dict[int, set[Any]] = defaultdict(set)
            own = "episode_id" if record.has("episode_id") else None
            groups = record.column("group_id").tolist()
            ids = record.column(own).tolist() if own else range(len(groups))
            for group, sample in zip(groups, ids, strict=True):
                samples[group].add(sample)
            odd = {group: len(found) for group, found in samples.items() if len(found) != n}
            if odd:
                group, size = next(iter(odd.items()))
                return _fail(
                    f"{len(odd)} of {len(samples)} groups of {node.name!r} in step {record.step} have not "
                    f"rollout.n={n} {'episodes' if own else 'rows'}: prompt {group} has {size}",
                    "Let nodes between the rollout and the advantages keep or drop whole groups.",
                )
            if own and "episode" in keys:
                return _fail(
                    f"algorithm.credit.group_by={list(keys)} of {node.name!r} makes each episode a group: "
                    "nothing is compared",
                    "Group by task, or task and agent.",
                )
            told.append(f"{node.name}: {len(samples)} groups of {n}")
    if not told:
        return _none("no advantage node compares the responses of a prompt")
    return _pass("; ".join(dict.fromkeys(told)))


def equal_rewards_teach_nothing(trial: Trial) -> Verdict:
    """Where all responses are worth the same, no policy has a gradient."""
    outcome, told = trial.runs["equal"], []
    if not any(_compares(trial, node.name) for node in _nodes(trial, _credits)):
        return _none("no estimator compares the responses of a prompt: equal rewards may teach")
    if outcome.error:
        return _fail(f"the run with equal rewards failed: {outcome.error}", "Correct what it names.")
    for record in _calls(trial, _credits, "equal"):
        if not _compares(trial, record.node):
            continue
        largest = float((record.column("advantage") * record.column("response_mask")).abs().max())
        if largest > SAME:
            return _fail(
                f"with equal rewards node {record.node!r} gives advantages up to {largest:.3g}",
                "Compare each reward with those of its group: subtract the mean of the group.",
            )
        told.append(f"{record.node}: advantages 0")
    for record in _calls(trial, _trains_policy, "equal"):
        norm = record.metrics.get("actor/grad_norm")
        if norm is not None and norm > SAME and not trial.cfg(record.node).actor_rollout_ref.actor.distills:
            return _fail(
                f"with equal rewards the gradient of {record.node!r} has norm {norm:.3g}",
                "Find the term of the loss that does not come from rewards.",
            )
        told.append(f"{record.node}: gradient {norm or 0.0:.0e}")
    return _pass("; ".join(told))


def better_answers_become_likelier(trial: Trial) -> Verdict:
    """An update moves probability from answers worth less to those of the same prompt that are worth more."""
    told, told_why = [], []
    for node in _nodes(trial, _trains_policy):
        found = _moved(trial, node)
        if isinstance(found, Verdict):
            return found
        (told if found[0] else told_why).append(found[1])
    if not told:
        return _none("; ".join(told_why) or "no policy is trained")
    return _pass("; ".join(told + told_why))


def _moved(trial: Trial, node: NodePlan) -> Verdict | tuple[bool, str]:
    """(whether it could be seen, what was), of one node that trains."""
    actor = trial.cfg(node.name).actor_rollout_ref.actor
    record = next(_calls(trial, lambda one: one.name == node.name), None)
    if record is None or record.before is None or record.after is None:
        return False, f"{node.name}: trained nothing"
    if actor.loss.distills or not actor.reads_advantage:
        return False, f"{node.name}: its loss reads no rewards (SFT, preferences or distillation)"
    mask_BT = record.column("response_mask").float()
    change_B = ((record.after - record.before) * mask_BT).sum(-1).double()
    if not float(change_B.abs().max()):
        return _fail(
            f"the update of {node.name!r} changed no log-prob: nothing is learnt",
            "Look at the learning rate, and whether its advantages are all 0.",
        )
    worth = _worth(trial, record)
    if worth is None:
        return False, f"{node.name}: what its rows are worth is not known from its nodes"
    better_B, worse_B = worth > SAME, worth < -SAME
    if (
        record.has("advantage")
        and not bool((record.column("advantage") * mask_BT).any())
        and bool(worse_B.any())
    ):
        return _fail(
            f"all advantages of {node.name!r} are 0, and its rows are worth more and less",
            "Look at the estimator, and at what writes the advantages.",
        )
    if not (bool(better_B.any()) and bool(worse_B.any())):
        return False, f"{node.name}: no two answers of a prompt are worth more and less"
    up, down = float(change_B[better_B].mean()), float(change_B[worse_B].mean())
    text = f"{node.name}: better answers {up:+.3g} nats, worse ones {down:+.3g}"
    if float((worth * change_B).sum()) <= 0:
        return _fail(text, "Look at the sign of the advantages and of the loss, and whose rewards they are.")
    return True, text


def _worth(trial: Trial, record: NodeRecord) -> Tensor | None:
    """By how much each trained row earned more than its group, float64 [B]; None: not known."""
    for credit in _calls(trial, _credits):
        if (credit.agent, credit.step) != (record.agent, record.step) or not credit.has("group_id"):
            continue
        known = _total(credit)
        rewarded = _row_numbers(trial, credit)
        if known is None or rewarded is None or not record.has("row_id"):
            return None
        groups = credit.column("group_id")
        centered = known - torch.stack([known[groups == group].mean() for group in groups])
        by_row = dict(zip(rewarded, centered.tolist(), strict=True))
        rows = record.column("row_id").tolist()
        return torch.tensor([by_row.get(row, 0.0) for row in rows], dtype=torch.float64)
    return None


def _total(credit: NodeRecord) -> Tensor | None:
    """What each row of an advantage node earned, [B], before anything is made of it."""
    if credit.expected is not None:
        return credit.expected
    return credit.column("score").double() if credit.has("score") else None


def _row_numbers(trial: Trial, credit: NodeRecord) -> list[int] | None:
    """The row_id of each row that an advantage node saw: its own, or that of the nodes on the same rows."""
    if credit.has("row_id"):
        return credit.column("row_id").tolist()
    for other in trial.alone.records(credit.step):
        same = other.agent == credit.agent and len(other) == len(credit) and other.round == credit.round
        same = same and other.has("row_id", "response_length") and credit.has("response_length")
        if same and torch.equal(other.column("response_length"), credit.column("response_length")):
            return other.column("row_id").tolist()
    return None


def rewards_are_numbers_that_differ(trial: Trial) -> Verdict:
    """Rewards are finite, the same when asked twice, and differ among the answers to a prompt."""
    told = []
    for name in dict.fromkeys(node.name for node in _nodes(trial, _scores)):
        varied = groups = 0
        for record in _calls(trial, lambda one, name=name: one.name == name):
            score_B = next(
                column
                for key, column in record.wrote.items()
                if not key.endswith("_info") and _is_score(column)
            )
            if not bool(torch.isfinite(score_B).all()):
                return _fail(
                    f"node {name!r} gives {score_B.tolist()}", "Return a finite number for each response."
                )
            if record.again is not None and not torch.equal(score_B, record.again):
                row = int((score_B != record.again).nonzero()[0, 0])
                return _fail(
                    f"node {name!r} gave {float(score_B[row]):g}, and asked again "
                    f"{float(record.again[row]):g}, for the same response",
                    "Let the reward depend on response and row alone: no random numbers, no counters.",
                )
            prompts = record.column("sample_index")
            for prompt in prompts.unique():
                own = score_B[prompts == prompt]
                groups, varied = groups + 1, varied + int(len(own.unique()) > 1)
        if not groups:
            continue
        if not varied:
            where = f"those of {trial.answers.source}" if trial.answers.source else "the row's own among them"
            return _fail(
                f"node {name!r} gives all answers to a prompt the same reward, in all of {groups} groups "
                f"({where})",
                "Look at what the reward is given and how it compares; say by --answers what good and bad "
                "answers look like.",
            )
        told.append(f"{name}: finite, the same twice, differ in {varied} of {groups} groups")
    return _pass("; ".join(told)) if told else _none("no node scores")


def _is_score(column: Any) -> bool:
    return isinstance(column, Tensor) and column.dim() == 1 and column.is_floating_point()


def credit_adds_up(trial: Trial) -> Verdict:
    """What a row's tokens are rewarded with is the sum of what scores and environment gave."""
    told = []
    for record in _calls(trial, _credits):
        if record.expected is None or "reward" not in record.wrote:
            continue
        off = float((record.column("reward").double().sum(-1) - record.expected).abs().max())
        if off > SAME * max(1.0, float(record.expected.abs().max())):
            return _fail(
                f"node {record.node!r}: the tokens of a row get {off:.3g} more or less than its parts",
                "Look at algorithm.credit and at the node that writes the reward.",
            )
        told.append(f"{record.node}: {len(record)} rows, off by {off:.0e}")
    return _pass("; ".join(dict.fromkeys(told))) if told else _none("no sum of scores alone is made")


def only_sampled_tokens_are_trained(trial: Trial) -> Verdict:
    """Every trained token was sampled by an engine of the row's own policy, under the weights of its step."""
    told = []
    for record in _calls(trial, lambda node: node.spec.is_rollout):
        if not record.has("response_mask", "weight_version"):
            continue
        mask_BT, version_BT = record.column("response_mask"), record.column("weight_version")
        unsampled = mask_BT & (version_BT < 0)
        if bool(unsampled.any()):
            return _fail(
                f"{int(unsampled.sum())} trained tokens of node {record.node!r} were sampled by no engine",
                "Train on tokens whose weight_version is 0 or more.",
            )
        engine = f"agent_{record.agent}.rollout"
        said = {
            x.token_ids: x.version
            for one in trial.alone.evidence
            for s, x in one.spoken
            if x.engine == engine
        }
        for mask_T, ids_T, _version_T in zip(mask_BT, record.column("response_ids"), version_BT, strict=True):
            for turn in _runs(mask_T.tolist()):
                tokens = tuple(ids_T[turn].tolist())
                if tokens not in said and not _joined(tokens, said):
                    return _fail(
                        f"node {record.node!r} trains {list(tokens)[:12]}, which {engine} did not sample",
                        "Do not turn responses into text and tokens again: train on what was sampled.",
                    )
        told.append(
            f"{record.node}: {int(mask_BT.sum())} trained of {int(mask_BT.numel())} positions, all sampled"
        )
    if not told:
        return _none("no rollout samples")
    return _pass("; ".join(dict.fromkeys(told)))


def _runs(mask: list[bool]) -> Iterator[slice]:
    """The stretches of a mask that are true."""
    start = None
    for place, value in enumerate([*mask, False]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            yield slice(start, place)
            start = None


def _joined(tokens: tuple[int, ...], said: dict[tuple[int, ...], int]) -> bool:
    """Whether tokens are several responses, one after the other."""
    reached = {0}
    for start in range(len(tokens)):
        if start in reached:
            reached |= {start + len(one) for one in said if one and tokens[start : start + len(one)] == one}
    return len(tokens) in reached


def one_rank_equals_two(trial: Trial) -> Verdict:
    """On two ranks the same is sampled, rewarded and learnt as on one."""
    two = trial.runs["two_ranks"]
    if two.error:
        return _fail(f"the run on two ranks failed: {two.error}", "Correct what it names.")
    told = []
    for node in trial.plan.nodes:
        one_rows, two_rows = _by_row(trial.alone, node), _by_row(two, node)
        for name in ("response_ids", "score", "advantage"):
            mine = {row: found[name] for row, found in one_rows.items() if name in found}
            theirs = {row: found[name] for row, found in two_rows.items() if name in found}
            if mine.keys() != theirs.keys():
                return _fail(
                    f"{name} of node {node!r}: {len(mine)} rows on one rank, {len(theirs)} on two",
                    "Let the node treat each row, or each group, by itself.",
                )
            wrong = [row for row in mine if not _same(mine[row], theirs[row])]
            if wrong:
                return _fail(
                    f"{name} of {len(wrong)} of {len(mine)} rows of node {node!r} is another one on two",
                    "Let rewards, tools, environments and nodes depend on the row and its seed alone, not on "
                    "what else is on the rank.",
                )
            if mine:
                told.append(f"{name} of {node}")
    for node in _nodes(trial, _trains_policy):
        mine, theirs = (_norms(run, node.name) for run in (trial.alone, two))
        if mine and theirs and abs(mine[0] - theirs[0]) > 0.01 * max(mine[0], SAME):
            return _fail(
                f"the gradient of {node.name!r} has norm {mine[0]:.6g} on one rank, {theirs[0]:.6g} on two",
                "Normalise by sums over all ranks (sum_over_ranks), not by those of one.",
            )
        if mine and theirs:
            told.append(f"gradient of {node.name} {mine[0]:.4g} and {theirs[0]:.4g}")
    return _pass("equal: " + "; ".join(told))


def _norms(run: Outcome, node: str) -> list[float]:
    found = (x.metrics.get("actor/grad_norm") for x in run.records(1) if x.node == node)
    return [norm for norm in found if norm is not None and math.isfinite(norm)]


def _by_row(run: Outcome, node: str) -> dict[int, dict[str, Any]]:
    """row_id -> the fields of what a node wrote in the first step, where it knows its rows."""
    found: dict[int, dict[str, Any]] = {}
    for record in run.records(1):
        if record.node != node or not record.has("row_id"):
            continue
        for place, row in enumerate(record.wrote.get("row_id", record.read.get("row_id")).tolist()):
            names = [name for name in record.wrote if isinstance(record.wrote[name], Tensor)]
            found[row] = {name: record.wrote[name][place] for name in names}
            if "response_ids" in found[row] and record.has("response_length"):
                length = int(record.column("response_length")[place])
                found[row]["response_ids"] = found[row]["response_ids"][:length]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dim() and one.shape != other.shape:
        width = min(one.shape[0], other.shape[0])
        one, other = one[:width], other[:width]
    return bool(torch.allclose(one.double(), other.double(), rtol=SAME, atol=SAME))


def resume_equals_undisturbed(trial: Trial) -> Verdict:
    """A run that was killed and gone on with ends with the same weights, bit for bit."""
    resumed = trial.runs["resumed"]
    if resumed.error:
        return _fail(f"the run that was killed did not go on: {resumed.error}", "Correct what it names.")
    last = max((step for one in trial.alone.evidence for step in one.digests), default=0)
    mine, theirs = (
        {name: digest for one in run.evidence for name, digest in one.digests.get(last, {}).items()}
        for run in (trial.alone, resumed)
    )
    other = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if other:
        return _fail(
            f"{', '.join(other)} after step {last} is not what it is without the kill",
            "Keep what nodes, tools and environments remember from step to step in ctx.state, or nowhere.",
        )
    return _pass(f"killed in step {last}, gone on with: weights of {', '.join(mine)} equal bit for bit")


def answers_are_whole(trial: Trial) -> Verdict:
    """Responses end by a stop token, and no answer of the script is cut."""
    spoken = [x for one in trial.alone.evidence for _, x in one.spoken]
    if not spoken:
        return _none("no engine sampled")
    cut = [x for x in spoken if x.num_script > len(x.token_ids)]
    without = [node for one in trial.alone.evidence for node, stops in one.stops.items() if not stops]
    if without:
        return _fail(f"the model of {without[0]!r} has no stop token", "Set rollout.stop_token_ids.")
    if cut:
        longest = max(cut, key=lambda x: x.num_script)
        return _fail(
            f"{len(cut)} of {sum(x.scripted for x in spoken)} answers are cut, one of "
            f"{longest.num_script} tokens behind {len(longest.token_ids)}",
            "Raise data.max_response_length, or rollout.agent.max_turn_tokens of agents.",
        )
    share = sum(x.finish_reason == "length" for x in spoken) / len(spoken)
    stops = {text for one in trial.alone.evidence for texts in one.stops.values() for text in texts}
    return _pass(f"stop tokens {' '.join(sorted(stops))}; {share:.0%} of {len(spoken)} responses are cut")


def the_real_job_fits(trial: Trial) -> Verdict:
    """Memory and time of the job as it is planned, with its own models on its own devices."""
    real = trial.real
    table = memory_table(real.plan, real.node_cfgs, rank_memory_gib(real.cfg))
    told = [" ".join(line.split()) for line in table if not line.startswith(("phase ", "("))][-1:]
    try:
        kind, _ = chosen_device(None, device_name())
        found = step_time(real.plan, real.node_cfgs, kind, row_tokens(None))
    except UserError as error:
        found = str(error)
    if not isinstance(found, str):
        told.append(f"a step of the longest rows takes {found.step_s:.3g} s on {kind.name}")
    told += [f"warning: {line}" for line in real.warnings[:1]]
    return _pass("; ".join(filter(None, told)) or "nothing is known of its sizes")


ASSERTIONS: dict[str, Assertion] = {
    "the steps run": the_steps_run,
    "groups are as declared": groups_are_as_declared,
    "equal rewards teach nothing": equal_rewards_teach_nothing,
    "better answers become likelier": better_answers_become_likelier,
    "only sampled tokens are trained": only_sampled_tokens_are_trained,
    "rewards are numbers that differ": rewards_are_numbers_that_differ,
    "credit adds up": credit_adds_up,
    "one rank equals two": one_rank_equals_two,
    "resume equals undisturbed": resume_equals_undisturbed,
    "answers are whole": answers_are_whole,
    "the real job fits": the_real_job_fits,
}


def judged(trial: Trial) -> dict[str, Verdict]:
    """The verdict of each assertion; where the steps do not run, of that alone."""
    first = the_steps_run(trial)
    if first.status == "FAIL":
        return {"the steps run": first}
    return {name: check(trial) for name, check in ASSERTIONS.items()}
