"""The op of an interaction with a lag: its episodes may go on in the next steps, under newer weights."""

from tensordict import TensorDict

from siirl.agents.episode import Episode
from siirl.nodes.context import OpContext
from siirl.nodes.episodes_in_flight import EpisodesInFlight
from siirl.nodes.generate import prompt_tokens
from siirl.nodes.interaction import Interaction, episodes_of, game_of, give_rows, samples_of_prompt
from siirl.nodes.interaction import interaction as whole_interaction
from siirl.nodes.lag_report import report_lag


def partial_interaction(
    ctx: OpContext, rows: TensorDict, interaction: Interaction, in_flight: EpisodesInFlight
) -> TensorDict:
    """The rows of as many prompts as a batch has: those of this step, or of some steps before.

    rows: the prompts that were loaded, maybe several batches or none. Validation plays its own, and all of
    them, while the others wait. Communicates and raises as `interaction` does.
    """
    if ctx.validate:
        return whole_interaction(ctx, rows, interaction)
    n = samples_of_prompt(ctx)

    def begin(prompts: TensorDict, batches: list[int]) -> list[list[tuple[Episode, list[int]]]]:
        episodes = iter(episodes_of(ctx, interaction, prompts, n, batches))
        return [[(next(episodes), tokens) for _ in range(n)] for tokens in prompt_tokens(prompts)]

    in_flight.admit(rows, ctx.step)
    with interaction.streams.open(in_flight.may_end) as stream_clients:
        left = in_flight.play(
            stream_clients, lambda lines: game_of(interaction, lines, validate=False), begin, ctx.step
        )
    interaction.step_of = left.step_of
    dropped = in_flight.drain_dropped()
    report_lag(ctx, left.lags, left.num_partial, left.num_restarted, dropped, left.num_in_flight)
    return give_rows(ctx, interaction, left.prompts, left.played, n)
