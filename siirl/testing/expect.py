"""The assertions of `siirl test` as functions of a trial: verdict, or AssertionError with what to change."""

from collections.abc import Callable

from siirl.testing.assertions import ASSERTIONS, require
from siirl.testing.trial import Trial
from siirl.testing.verdicts import Verdict

Expected = Callable[[Trial], Verdict]


def _required(name: str) -> Expected:
    def expected(trial: Trial) -> Verdict:
        __tracebackhide__ = True
        return require(trial, [name])[name]

    expected.__doc__ = ASSERTIONS[name].__doc__
    return expected


the_steps_run = _required("the steps run")
groups_are_as_declared = _required("groups are as declared")
equal_rewards_teach_nothing = _required("equal rewards teach nothing")
better_answers_become_likelier = _required("better answers become likelier")
only_sampled_tokens_are_trained = _required("only sampled tokens are trained")
rows_are_of_their_own_policy = _required("rows are of their own policy")
rewards_are_numbers_that_differ = _required("rewards are numbers that differ")
reward_errors_are_no_zeros = _required("reward errors are no zeros")
credit_adds_up = _required("credit adds up")
tools_and_environments_are_used = _required("tools and environments are used")
what_an_agent_says_counts = _required("what an agent says counts")
one_rank_equals_two = _required("one rank equals two")
resume_equals_undisturbed = _required("resume equals undisturbed")
the_template_keeps_what_it_wrote = _required("the template keeps what it wrote")
answers_are_whole = _required("answers are whole")
the_real_job_fits = _required("the real job fits")
