"""What a test asserts of a workflow, a function each: trial in, verdict with its evidence out.

None of them passes in silence: what does not apply to a workflow says why, and what could not be seen,
because a run failed, fails; what the machine was too busy for is not done.
"""

from collections.abc import Collection, Mapping

from siirl.testing.learning_assertions import (
    better_answers_become_likelier,
    equal_rewards_teach_nothing,
    groups_are_as_declared,
)
from siirl.testing.reward_assertions import (
    credit_adds_up,
    reward_errors_are_no_zeros,
    rewards_are_numbers_that_differ,
    tools_and_environments_are_used,
    what_an_agent_says_counts,
)
from siirl.testing.run_assertions import (
    one_rank_equals_two,
    resume_equals_undisturbed,
    the_real_job_fits,
    the_steps_run,
)
from siirl.testing.token_assertions import (
    answers_are_whole,
    only_sampled_tokens_are_trained,
    rows_are_of_their_own_policy,
    the_template_keeps_what_it_wrote,
)
from siirl.testing.trial import Trial
from siirl.testing.verdicts import Assertion, Verdict

FIRST = "the steps run"
FITS = "the real job fits"
ASSERTIONS: dict[str, Assertion] = {
    FIRST: the_steps_run,
    "groups are as declared": groups_are_as_declared,
    "equal rewards teach nothing": equal_rewards_teach_nothing,
    "better answers become likelier": better_answers_become_likelier,
    "only sampled tokens are trained": only_sampled_tokens_are_trained,
    "rows are of their own policy": rows_are_of_their_own_policy,
    "rewards are numbers that differ": rewards_are_numbers_that_differ,
    "reward errors are no zeros": reward_errors_are_no_zeros,
    "credit adds up": credit_adds_up,
    "tools and environments are used": tools_and_environments_are_used,
    "what an agent says counts": what_an_agent_says_counts,
    "one rank equals two": one_rank_equals_two,
    "resume equals undisturbed": resume_equals_undisturbed,
    "the template keeps what it wrote": the_template_keeps_what_it_wrote,
    "answers are whole": answers_are_whole,
    FITS: the_real_job_fits,
}
NEEDS = {
    "equal rewards teach nothing": "equal",
    "one rank equals two": "two_ranks",
    "resume equals undisturbed": "resumed",
}
"""Assertion -> the run that it looks at besides the one that all look at."""


def judged(trial: Trial, names: Collection[str] = ()) -> dict[str, Verdict]:
    """The verdict of each assertion whose runs were played; where the steps do not run, of what does not
    need them. names: of these and of the first alone."""
    first = the_steps_run(trial)
    if first.is_open:
        return {FIRST: first} if trial.real is not None else {FIRST: first, FITS: the_real_job_fits(trial)}
    return {
        name: check(trial)
        for name, check in ASSERTIONS.items()
        if NEEDS.get(name, "alone") in trial.runs and (not names or name in (FIRST, *names))
    }


def require(trial: Trial, names: Collection[str] = ()) -> Mapping[str, Verdict]:
    """The verdicts of these assertions; no names: of all. AssertionError, with what is wrong, if one fails.

    KeyError for a name that is no assertion, or whose run was not played.
    """
    __tracebackhide__ = True  # of pytest: the reader's own line is where it fails
    found = judged(trial, names)
    if unknown := [name for name in names if name not in ASSERTIONS]:
        raise KeyError(unknown[0])
    if names and not found[FIRST].is_open:
        found = {name: found[name] for name in (FIRST, *names)}
    failed = {name: one for name, one in found.items() if one.is_open}
    assert not failed, "\n".join(f"{name}: {one.evidence}. {one.fix}" for name, one in failed.items())
    return found
