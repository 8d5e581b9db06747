"""What a run writes so that it can be looked at holds no step up, and takes a bounded share of its time."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from plan_cases import config

from siirl.dag_worker.step_report import MOST_SHARE, TokenPace
from siirl.data.rows import make_rows
from siirl.dialect.dialect import Dialect
from siirl.dialect.marks import ReasoningMarks
from siirl.nodes.context import Samples
from siirl.nodes.function_reward import function_reward, show
from siirl.nodes.trained_tokens import Found, ShownRow, sample_records
from siirl.observe.memory_probe import HostMemory
from siirl.observe.metrics import Metrics
from siirl.show.conversation_text import parts_of, split_episodes


def told_steps(step_s: float, each_s: float, steps: int, first_s: float | None = None) -> list[int]:
    """The steps in which tokens are written of a run that would do it in 1, 11, 21, ..."""
    pace, told, now_s, next_step = TokenPace(), [], 100.0, 0
    for step in range(1, steps + 1):
        now_s += step_s
        if step % 10 == 1 and step >= next_step:
            next_step = pace.next_step(step, now_s)
            took_s = each_s if told or first_s is None else first_s
            pace.count(took_s)
            now_s += took_s
            told.append(step)
    return told


@pytest.mark.parametrize("each_s", [0.002, 0.01, 0.3])
def test_token_records_take_at_most_their_share_of_the_run(each_s):
    step_s, steps = 0.2, 4000
    told = told_steps(step_s, each_s, steps, first_s=1.0)
    assert told[:2] == [1, 11]
    spent_s = each_s * len(told[1:])
    assert spent_s <= MOST_SHARE * steps * step_s + 2 * each_s
    assert spent_s >= 0.5 * min(
        MOST_SHARE * steps * step_s, each_s * steps / 10
    )  # and what it may take, it takes


def test_records_that_take_less_than_their_share_are_written_of_every_tenth_step():
    assert told_steps(20.0, 0.02, 200) == list(range(1, 201, 10))


def test_a_step_whose_rows_are_shown_does_not_wait_for_their_rewards():
    rows = make_rows(
        {
            "sample_index": [4, 4, 6],
            "data_source": ["s"] * 3,
            "raw_prompt": ["one", "one", [{"role": "user", "content": "two"}]],
            "ground_truth": ["g", "g", 7],
            "response_ids": [[1], [2], [3]],
            "response_length": [1] * 3,
        }
    )
    future: Future = Future()
    tokenizer = SimpleNamespace(decode=lambda ids, **_: f"said {int(ids[0])}")
    ctx = SimpleNamespace(
        agent=0, validate=False, shown=Samples([], 2, []), trained=None, metrics=Metrics(), node_id="reward",
        reward_name="score", cfg=config(), tokenizer=tokenizer, dialect=Dialect("small"),
        peers=SimpleNamespace(has_whole_groups=True),
    )  # fmt: skip
    scorer = SimpleNamespace(submit=lambda *_, **__: future)
    assert function_reward(ctx, rows, scorer) is future  # type: ignore[arg-type]
    assert not ctx.shown.rows
    future.set_result(make_rows({"score": [1.0, 2.0, 3.0], "reward_info": [{"x": 1}, {}, {"y": 2}]}))
    for told in ctx.shown.later:
        told()
    first, last = ctx.shown.rows  # all of one prompt
    assert (first["prompt"], first["response"], first["score"], first["x"]) == ("one", "said 1", 1.0, 1)
    assert (last["prompt"], last["response"], last["score"], last["ground_truth"]) == (
        "one",
        "said 2",
        2.0,
        "g",
    )


def shown(
    rows, limit: int, dialect: Dialect, whole_groups: bool = True, validate: bool = False, keys: tuple = ()
) -> list[dict]:
    said = {1: "<think>2+2</think>4", 2: "4", 3: "<think>2+", 4: "<think>a</think>b"}
    tokenizer = SimpleNamespace(
        decode=lambda ids, **_: said[int(ids[0])],
        batch_decode=lambda ids, **_: [said[one[0]] for one in ids],
        is_fast=False,
    )
    ctx = SimpleNamespace(
        agent=0, validate=validate, shown=Samples([], limit, []), trained=None, node_id="reward",
        tokenizer=tokenizer, dialect=dialect, peers=SimpleNamespace(has_whole_groups=whole_groups),
        cfg=config(*keys),
    )  # fmt: skip
    show(ctx, rows, rows)  # type: ignore[arg-type]
    return ctx.shown.rows


def samples_of(prompts: list[int], said: list[int]):
    return make_rows(
        {
            "sample_index": prompts,
            "data_source": ["s"] * len(prompts),
            "raw_prompt": ["one"] * len(prompts),
            "ground_truth": ["g"] * len(prompts),
            "response_ids": [[one] for one in said],
            "response_length": [1] * len(prompts),
            "score": [1.0] * len(prompts),
        }
    )


def test_groups_are_shown_whole_wherever_their_samples_lie():
    prompts = [n // 4 for n in range(40)]
    rows = samples_of(prompts, [2] * 40)
    assert [row["sample_index"] for row in shown(rows, 6, Dialect("x"))] == [0] * 4 + [1] * 4
    assert [row["sample_index"] for row in shown(rows, 6, Dialect("x"), validate=True)] == list(range(6))
    parts = [samples_of(prompts[rank::3], [2] * len(prompts[rank::3])) for rank in range(3)]
    found = [
        row["sample_index"] for part in parts for row in shown(part, 3, Dialect("x"), whole_groups=False)
    ]
    first, second = sorted({prompt: found.count(prompt) for prompt in found}.items(), key=lambda x: -x[1])[:2]
    assert first[1] == second[1] == 4, "each rank takes the samples of the same prompts that it has"


def test_what_a_model_said_is_shown_in_parts():
    rows = samples_of([0, 0, 0, 0], [1, 2, 3, 4])
    dialect = Dialect("thinks", reasoning=ReasoningMarks("<think>", "</think>"))
    parts = [row.get("said") for row in shown(rows, 4, dialect)]
    assert parts[0] == {"reasoning": "2+2", "answer": "4", "calls": []}
    assert parts[1] is None, "there is nothing to take apart"
    assert parts[2] == {"reasoning": "2+", "answer": "", "calls": []}, "cut off before it answered"
    assert shown(rows, 4, dialect)[0]["response"] == "<think>2+2</think>4"


def test_what_agents_said_is_shown_in_parts_turn_by_turn():
    call = '<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>'
    say = [
        {"role": "user", "agent": None, "turn": None, "content": "2+2?"},
        {"role": "assistant", "agent": 0, "turn": 0, "content": f"<think>use it</think>{call}"},
        {"role": "tool", "agent": None, "turn": None, "content": "4"},
        {"role": "assistant", "agent": 1, "turn": 1, "content": "<think>not its own</think>4"},
        {"role": "assistant", "agent": 0, "turn": 2, "content": "4"},
    ]
    rows = samples_of([0], [2])
    rows = make_rows(
        {"extra_info": [{"agent": 0, "episode_id": 0, "conversation": say}], "turn_id": [[2]]}
    ).update(rows)
    dialect = Dialect("thinks", reasoning=ReasoningMarks("<think>", "</think>"), tool_format="hermes")
    tools = ("actor_rollout_ref.rollout.multi_turn.enable=true",)
    (row,) = shown(rows, 4, dialect, keys=tools)
    calls = [{"name": "add", "arguments": {"x": 2}}]
    assert row["episode"]["said"] == {0: {"reasoning": "use it", "answer": "", "calls": calls}}
    _, (episode,) = split_episodes([row])
    assert [parts_of(one) for one in episode.messages] == [
        None,
        ("use it", "", ["add(x=2)"]),
        None,
        None,
        None,
    ]


def test_what_a_span_has_in_memory_is_asked_for_a_trace_only():
    assert HostMemory().end("rollout", traced=False) == {}
    assert HostMemory().end("rollout", traced=True)["host_gib"] > 0


def record(row_id: int, advantage: float) -> dict:
    tokens = {"text": ["a"], "id": [1], "turn": [0], "advantage": [advantage]}
    return {
        "agent": 0,
        "sample_index": 3,
        "row_id": row_id,
        "episode_id": None,
        "turns": [],
        "tokens": tokens,
    }


@pytest.mark.parametrize(
    ("shown", "expected"), [((5, 6), [0.5, 0.6]), ((6, 5), [0.6, 0.5]), ((1, 2), [0.5, 0.6])]
)
def test_samples_that_say_the_same_have_numbers_of_their_own(shown, expected):
    """Under the numbers of the training, or other ones that a node before it gave them."""
    found = Found({(0, n): record(n, n / 10) for n in (5, 6)}, {(0, 5): "same", (0, 6): "same"}, {})
    lines = sample_records([ShownRow(0, 3, "same", row, None) for row in shown], found)
    assert [line["row_id"] for line in lines] == list(shown)
    assert [line["tokens"]["advantage"][0] for line in lines] == expected
