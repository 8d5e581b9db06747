"""Prompts of an asynchronous interaction: a delay line of asyncio tasks.

consumes: prompts, and in each step the engines. produces: the episodes of one batch of prompts, those that
were begun first. waits for: the episodes, until a batch of groups is over. unblocked by: their ends.

Where the engines are disaggregated, episodes go on between steps, in a thread: turns are generated,
tools run and environments step while others train, and new weights arrive within a turn. Else no event loop
runs then and no engine is asked: a turn keeps the tokens that it has (ResumablePolicy), an environment stays
as it is, and what it is doing goes on in its thread.
"""

import asyncio
import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

from siirl.agents.episode import Episode
from siirl.agents.event_loop import LoopThread, interruptible
from siirl.agents.policy import ResumablePolicy, StreamGate
from siirl.agents.runner import Game, Played, run_episode
from siirl.agents.stream_client import StreamClient
from siirl.agents.transcript import Transcript
from siirl.data.buffer import ORDER
from siirl.data.completions import Completion, Key
from siirl.data.rows import take_rows
from siirl.nodes.in_flight import InFlight

Begin = Callable[[TensorDict, list[int]], list[list[tuple[Episode, list[int]]]]]
"""(prompts, number of the batch of each) -> the episodes of each prompt, with the tokens of their prompts."""
Clients = Mapping[str, Sequence[StreamClient]]
"""Of each policy, as many in every step."""
Result = TypeVar("Result")


@dataclass
class HeldEpisode:
    """One episode, and when it has spoken."""

    task: asyncio.Task[Played]

    transcript: Transcript

    asked: dict[Key, int] = field(default_factory=dict)
    """The turns that it waits for, and the training step in which it has asked for each."""

    @property
    def first_step(self) -> int | None:
        """The training step in which its first token was sampled."""
        return self.transcript.first_step


@dataclass(frozen=True)
class FinishedEpisodes:
    """The groups that leave in a step."""

    prompts: TensorDict
    """With the group_ids of a batch; the episodes have them too."""

    played: list[Played]
    """The episodes of each prompt, in the order of the prompts."""

    staleness: list[int]
    """Of each episode, how many steps ago its first token was sampled."""

    num_partial: int
    """Episodes that have spoken in several steps."""

    num_restarted: int
    """Groups that were restarted: too old, or with an episode that a resume could not bring back."""

    num_replayed: int
    """Episodes that a resume has brought back to where they were."""

    num_in_flight: int
    """Groups that stay."""

    step_of: dict[str, dict[int, int]]
    """Policy -> version of its weights -> the last training step that sampled with them."""


class EpisodesInFlight(InFlight[HeldEpisode]):
    """The prompts of one driver that have been loaded and not been given, with their episodes so far.

    Of an episode a checkpoint holds the transcript, which brings it back after a resume. One that cannot be
    brought back restarts, with the seeds that it had.
    """

    def __init__(
        self,
        max_lag: int,
        surplus: float,
        batch_size: int,
        step_size: int | None = None,
        stale: str = "wait",
        runs_in_background: bool = False,
    ) -> None:
        """See InFlight. runs_in_background: episodes go on between the steps, while others train."""
        super().__init__(max_lag, surplus, batch_size, step_size, stale)
        self._runs_in_background = runs_in_background
        self._batches: dict[int, int] = {}  # ORDER of a group -> number of its batch, which the seeds are of
        self._resumed: dict[int, list[Transcript]] = {}  # ORDER of a group that has begun before a resume
        self._restarted: set[int] = set()  # ORDERs
        self._runner: asyncio.Runner | LoopThread | None = None
        self._opened = ExitStack()  # what is open while the engines may be asked
        self._is_open = False
        self._news = asyncio.Event()
        self._lines: dict[str, tuple[StreamGate, ...]] = {}
        self._step_of: dict[str, dict[int, int]] = {}  # see FinishedEpisodes
        self._game: Game | None = None
        self._step = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # of steps and of what follows: for the loop and threads of engines
        self._num_open: dict[int, int] = {}
        self._firsts: dict[int, int] = {}  # ORDER of a group -> the step of its oldest token
        self._ended_turns: set[Key] = set()
        self._ending = False

    def admit(self, rows: TensorDict, step: int) -> None:
        """Take the prompts that were loaded, whose group_ids go on from batch to batch."""
        for batch, orders in self._admitted(rows, step):
            self._batches |= dict.fromkeys(orders.values(), batch)

    def play(
        self,
        open_clients: Callable[[], AbstractContextManager[Clients]],
        game_of: Callable[[dict[str, tuple[Any, ...]]], Game],
        begin: Begin,
        step: int,
        versions: Mapping[str, int],
    ) -> FinishedEpisodes:
        """Let episodes go on until a batch of groups can leave; the others are paused, unless they run in the
        background.

        game_of: the game whose policies are these lines. versions: of the weights of policies of which that
        is known. Raises what ends an episode but an EpisodeFailed; then all are over.
        """
        self._restart(self._too_old(step))
        self._runner = self._runner or (LoopThread() if self._runs_in_background else asyncio.Runner())
        try:
            clients = None
            if not self._is_open:
                self._ending, clients = False, self._opened.enter_context(open_clients())
                self._is_open = True
                self._lines = self._lines or {
                    name: tuple(StreamGate() for _ in found) for name, found in clients.items()
                }
            self._begin_step(step, versions)
            self._game = self._game or game_of(self._lines)
            self._runner.run(interruptible(self._until_enough(self._game, begin, clients)))
            if not self._runs_in_background:
                self.pause()
        except BaseException as error:
            opened, self._opened = self._opened, ExitStack()
            self.close()
            opened.__exit__(type(error), error, error.__traceback__)
            raise
        return self._leave()

    def pause(self) -> None:
        """Take back from the engines what they are asked, until the next step. Idempotent."""
        if not self._is_open:
            return
        assert self._runner is not None
        self._ending, self._is_open = True, False
        if self._runs_in_background:
            self._runner.run(self._closed_gates())
        for line in self._all_lines():
            line.close()
            line.take_back()
        self._runner.run(self._all_read())
        self._opened.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine gives; in the loop of the episodes if that runs, as they share tools."""
        runner = self._runner
        return runner.run(work) if isinstance(runner, LoopThread) else asyncio.run(work)

    def _begin_step(self, step: int, versions: Mapping[str, int]) -> None:
        with self._lock:
            self._step = step
            for name in self._lines:
                known = self._step_of.get(name, {})
                self._step_of[name] = {v: at for v, at in known.items() if step - at <= self._max_lag}
                if name in versions:
                    self._step_of[name][versions[name]] = step

    def may_end(self, ended: Sequence[Key]) -> bool:
        """Whether the step would be over if the episodes whose turns have ended were over too.

        Asked, from any thread, by engines that work inside `collect` and come back then.
        """
        with self._lock:
            self._ended_turns.update(ended)
            if self._ending or not self._ended_turns:
                return self._ending
            num_open = dict(self._num_open)
            for (order, number), num_ended in Counter(map(_episode_of, self._ended_turns)).items():
                num_open[order] -= num_ended == len(self.work[order][number].asked)
            return self._is_enough(num_open)

    def state(self) -> dict[str, Any]:
        """See RowBuffer; turns that are generated are taken back, with the tokens that they have."""
        self.pause()

        async def transcripts() -> list[list[Any]]:  # in the loop, where nothing happens meanwhile
            held = {order: [one.transcript for one in group] for order, group in self.work.items()}
            return [
                [order, [one.state() for one in group]] for order, group in (held | self._resumed).items()
            ]

        batches = [self._batches[order] for order in self._orders()]
        step_of = {name: list(known.items()) for name, known in self._step_of.items()}
        episodes = self.run(transcripts())
        return super().state() | {"batches": batches, "episodes": episodes, "step_of": step_of}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """See InFlight."""
        super().load_state(states, shard, num_shards)
        known: dict[int, int] = {}
        for state in states:
            orders = sorted(set(state["columns"].get(ORDER, {"values": []})["values"]))
            known |= zip(orders, state["batches"], strict=True)
        self._batches = {order: known[order] for order in self._orders()}
        self._resumed = {order: group for order, group in self._resumed.items() if order in self._batches}
        self._restarted &= self._batches.keys()

    def _load_work(self, states: Sequence[dict[str, Any]]) -> None:
        """See InFlight."""
        for state in states:
            self._restarted |= set(state.get("begun", ()))  # as an older version of siirl tells of them
            for order, group in state.get("episodes", ()):
                self._resumed[order] = [Transcript.of_state(one) for one in group]
                self._restarted |= {order} if None in group else set()
            for name, known in state.get("step_of", {}).items():
                mine = self._step_of.setdefault(name, {})
                mine |= {version: max(at, mine.get(version, at)) for version, at in known}

    def close(self) -> None:
        """End all episodes, and their environments. Idempotent."""
        runner, self._runner = self._runner, None
        self._ending, self._is_open = True, False
        if runner is not None:
            runner.close()
        self._opened.close()
        self.work, self._num_open, self._firsts, self._resumed = {}, {}, {}, {}

    def _restart(self, orders: Sequence[int]) -> None:
        """Have groups restart, with the seeds that they had."""
        self._end(orders)
        self._restarted |= set(orders)

    def _forget(self, orders: Sequence[int]) -> None:
        """See InFlight."""
        self._end(orders)
        for order in orders:
            del self._batches[order]

    def _end(self, orders: Sequence[int]) -> None:
        """End the episodes of groups, and their environments."""
        if orders:
            self.pause()  # another episode may ask under the same key
        held = [one for order in orders for one in self.work.pop(order, ())]
        for order in orders:
            self._resumed.pop(order, None)
            self._num_open.pop(order, None)
            self._firsts.pop(order, None)
        if held:
            assert self._runner is not None
            self._runner.run(interruptible(_cancelled([one.task for one in held])))

    async def _until_enough(self, game: Game, begin: Begin, clients: Clients | None) -> None:
        """clients: those that can be asked from now on; None: the ones of before.

        What a resume brings back is where it was before anybody asks: engines read together what they would
        have read together.
        """
        with self._lock:
            self._ended_turns = set()
            self._firsts = {order: self._oldest(order, self._step) for order in self.work}
        back = [order for order in self._active() if order in self._resumed]
        self._begin(game, begin, back)
        for one in [one for order in back for one in self.work[order]]:
            await one.transcript.caught_up()
        for name, found in (clients or {}).items():
            for line, client in zip(self._lines[name], found, strict=True):
                line.open(client)
        self._begin(game, begin, [order for order in self._active() if order not in self.work])
        while not self._may_stop():
            self._news.clear()
            await self._news.wait()

    async def _closed_gates(self) -> None:
        """In the loop: else who has passed a gate would ask a client that is closed."""
        for line in self._all_lines():
            line.close()

    async def _all_read(self) -> None:
        """Until what the engines have said is with the episodes."""
        while any(line.num_asked for line in self._all_lines()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # those that ended by it have told so
        self._may_stop()

    def _begin(self, game: Game, begin: Begin, new: Sequence[int]) -> None:
        """Begin the episodes of groups."""
        if not new or self.rows is None:
            return
        rows = take_rows(self.rows, torch.isin(self.rows[ORDER], torch.tensor(new)))
        rows = take_rows(rows, rows[ORDER].argsort())
        for order, episodes in zip(new, begin(rows, [self._batches[order] for order in new]), strict=True):
            with self._lock:
                self._num_open[order], self._firsts[order] = len(episodes), self._oldest(order, self._step)
            known = self._resumed.pop(order, [])
            if len(known) != len(episodes):
                self._restarted |= {order} if known else set()
                known = [Transcript() for _ in episodes]
            both = enumerate(zip(episodes, known, strict=True))
            self.work[order] = [self._held(game, order, number, *one, of) for number, (one, of) in both]

    def _held(
        self,
        game: Game,
        order: int,
        number: int,
        episode: Episode,
        prompt: list[int],
        transcript: Transcript,
    ) -> HeldEpisode:
        """Begin an episode, the task of which it is; what its transcript holds happens again."""

        def asked(key: Key) -> None:
            with self._lock:
                held.asked[key] = self._step
                self._firsts[order] = min(self._firsts[order], self._step)

        def heard(policy: str, key: Key, part: Completion) -> None:
            """A version that nobody has told is that of the last step that has asked for its tokens."""
            with self._lock:
                self._ended_turns.discard(key)
                step = held.asked.pop(key, self._step)
                if part.token_ids:
                    known, versions = self._step_of[policy], set(part.token_versions)
                    known |= {version: max(step, known.get(version, step)) for version in versions}
                    first = transcript.first_step or min(known[version] for version in versions)
                    transcript.first_step = first
                    transcript.last_step = max(known[version] for version in versions)
                    self._firsts[order] = min(self._firsts[order], first)

        async def played() -> Played:
            """To its end; from its beginning, if it does not come back to where it was."""
            fresh = copy.deepcopy(episode) if transcript.is_behind else None
            try:
                one = await run_episode(asks, episode, prompt, transcript)
                if fresh is not None and transcript.is_behind:
                    with self._lock:
                        self._restarted.add(order)
                    transcript.begin_again()
                    transcript.over()
                    one = await run_episode(asks, fresh, prompt, transcript)
            finally:
                transcript.over()
            return one

        def ended(task: asyncio.Task[Played]) -> None:
            with self._lock:
                self._ended_turns -= held.asked.keys()  # of those that failed
                if order in self._num_open:
                    self._num_open[order] -= 1
            error = None if task.cancelled() else task.exception()
            self._failure = self._failure or error
            self._news.set()

        policy_of = {line: name for name, lines in self._lines.items() for line in lines}
        keys = (f"{order}/{number}/{turn}" for turn in count())
        asks = game.asking(
            lambda line: ResumablePolicy(line, keys, asked, partial(heard, policy_of[line]), transcript)
        )
        transcript.replayable &= game.play_outside is None
        held = HeldEpisode(asyncio.get_running_loop().create_task(played()), transcript)
        held.task.add_done_callback(ended)
        return held

    def _may_stop(self) -> bool:
        """Whether a batch can leave. Raises what an episode raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        with self._lock:
            return self._is_enough(self._num_open)

    def _is_enough(self, num_open: dict[int, int]) -> bool:
        return self._may_end(num_open, lambda: self._firsts, self._step)

    def _oldest(self, order: int, step: int) -> int:
        """See InFlight; also of a token that is not told yet."""
        resumed = (one.first_step or step for one in self._resumed.get(order, ()))
        held = (one.first_step or min(one.asked.values(), default=step) for one in self.work.get(order, ()))
        return min([*held, *resumed], default=step)

    def _too_old(self, step: int) -> list[int]:
        """See InFlight."""
        begun = [*self.work, *self._resumed]
        return [order for order in begun if self._oldest(order, step) < step - self._max_lag]

    def _in_turn(self, orders: Sequence[int]) -> list[int]:
        """See InFlight."""
        return sorted(orders, key=lambda order: (self._oldest(order, sys.maxsize), order))

    def _leave(self) -> FinishedEpisodes:
        with self._lock:
            chosen = self._chosen(self._num_open, self._step)
            groups = [self.work.pop(order) for order in chosen]
            for order in chosen:
                del self._num_open[order], self._firsts[order], self._batches[order]
        staleness = [self._step - (one.first_step or self._step) for group in groups for one in group]
        prompts = self.give_prompts(chosen)
        played = []
        for slot, group in zip(prompts["group_id"].tolist(), groups, strict=True):
            for sample, one in enumerate(group):
                played.append(one.task.result())
                episode = played[-1].episode
                episode.group_id, episode.episode_id = slot, slot * len(group) + sample
        with self._lock:
            num_restarted, self._restarted = len(self._restarted), set()
        transcripts = [one.transcript for group in groups for one in group]
        return FinishedEpisodes(
            prompts,
            played,
            staleness,
            sum(one.first_step != one.last_step for one in transcripts),
            num_restarted,
            sum(one.was_replayed for one in transcripts),
            len(self._orders()),
            self._step_of,
        )

    def _all_lines(self) -> list[StreamGate]:
        return [line for lines in self._lines.values() for line in lines]


async def _cancelled(tasks: Sequence[asyncio.Task[Played]]) -> None:
    """Until these tasks have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _episode_of(key: Key) -> tuple[int, int]:
    """The group and number of the episode that has asked for a turn."""
    order, number, _ = str(key).split("/")
    return int(order), int(number)
