"""Rows that vLLM scores, with stand-ins for its engine and its process: what is said comes back whole."""

import numpy as np
import pytest
import torch

from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.rollout.call_limits import CallLimits
from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.lora_adapters import SharedEngine
from siirl.engines.rollout.served.messages import RowScores, Score, Scored
from siirl.engines.rollout.served.server import Server
from siirl.engines.rollout.vllm.vllm_rollout import VLLMRollout
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.errors import NotSupportedError, RolloutError

ROWS, STARTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [1, 1, 2]


class Native:
    """Reads the last of its rows in each step, and finds each token as likely as its id says."""

    def __init__(self):
        self.rows: dict[int, tuple[list[int], int]] = {}

    def add_scored(self, number, tokens, top_k):
        self.rows[number] = (tokens, top_k)

    def step_scored(self, starts):
        number, (tokens, top_k) = self.rows.popitem()
        ids = np.array(tokens[starts[number] :], np.int32)[:, None] + np.arange(1 + top_k, dtype=np.int32)
        return {number: RowScores(ids.tobytes(), (-ids / 8).astype(np.float32).tobytes())}


class Process:
    """The engine's process, with a server in it that has Native. change: of what it answers."""

    def __init__(self, change=lambda scored: scored):
        self.server, self.change = Server(None), change
        self.server._engine = Native()

    def ask(self, message: Score) -> Scored:
        return self.change(self.server._score(message))


def engine(process: Process) -> VLLMRollout:
    made = VLLMRollout.__new__(VLLMRollout)
    made.name, made._dtype, made._state = "agent_0.scoring_teacher.t", "bfloat16", "ready"
    made._limits = CallLimits(made.name, vocab=20, max_context=5)
    made._engine, made._process = SharedEngine(users=[made]), process
    made._shard = EngineShard((0,))
    made._weights = EngineWeights(made.name, {}, torch.device("cpu"), False, made._shard)
    return made


@pytest.mark.parametrize("top_k", [0, 2])
def test_each_row_gets_what_was_said_of_its_tokens_whatever_the_order(top_k):
    found = engine(Process()).score(ROWS, STARTS, top_k)
    assert [ids_TK[:, 0].tolist() for ids_TK, _ in found] == [[2, 3], [5], [8, 9]]
    assert [ids_TK.shape[1] for ids_TK, _ in found] == [1 + top_k] * 3
    for ids_TK, log_prob_TK in found:
        assert (ids_TK.dtype, log_prob_TK.dtype) == (torch.int64, torch.float32)
        torch.testing.assert_close(log_prob_TK, -ids_TK / 8)
    assert engine(Process()).score([], [], top_k) == []


def test_a_row_without_room_for_the_token_after_it_is_refused():
    with pytest.raises(RolloutError, match=r"row 1 has 5 tokens .* has 5 positions"):
        engine(Process()).score([[1, 2], [1, 2, 3, 4, 5]], [1, 1], 0)


def test_weights_that_overflow_and_answers_of_other_rows_end_the_run():
    def overflowing(scored):
        one, *others = scored.rows
        return Scored([RowScores(one.token_ids, np.array([-1, -np.inf], np.float32).tobytes()), *others])

    with pytest.raises(RolloutError, match=r"row 0 has log-probs .* not finite: .* overflow in bfloat16"):
        engine(Process(overflowing)).score(ROWS, STARTS, 0)
    with pytest.raises(RolloutError, match="scored other tokens than those of row 0"):
        engine(Process(lambda scored: Scored(scored.rows[::-1]))).score(ROWS, STARTS, 0)


def test_other_engines_say_that_they_cannot():
    with pytest.raises(NotSupportedError, match="'x' as a teacher"):
        RolloutEngine.score(type("Engine", (), {"name": "x"})(), ROWS, STARTS, 0)
