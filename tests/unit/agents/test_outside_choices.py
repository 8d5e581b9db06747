"""What a request may ask of sampling, by the clients that users have: stop, n, log-probs, tokens, texts."""

import asyncio
import json
import math
import urllib.request

import pytest
from episode_cases import END, Letters, Script, speaker, text_of
from later import Later
from outside_cases import episode, game_of, play_outside

from siirl.agents.contexts import Limits
from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.programs import Programs, starter
from siirl.agents.policy import StoppedPolicy
from siirl.agents.runner import run_all
from siirl.agents.stream_client import StreamClient
from siirl.data.completions import Completion, SamplingParams
from siirl.dialect.formats.json_calls import hermes
from siirl.errors import EpisodeFailed

anthropic, openai = Later("anthropic"), Later("openai")
USER = {"role": "user", "content": "q"}


class Counted(Script):
    """Says its lines with another log-prob for each token."""

    async def generate(self, prompt, params, seed, seen=None):
        turn = await super().generate(prompt, params, seed, seen)
        log_probs = [-float(index + 1) for index in range(len(turn.token_ids))]
        return Completion(turn.token_ids, log_probs, turn.finish_reason, 5, [], None)


def by(ask, *lines, history="as_template", max_requests=64):
    """(what ask(client) gives, the episode, the policy) of an episode that ask plays with OpenAI's client."""
    got, policy = [], Counted(*lines)

    def play(session):
        got.append(ask(openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)))
        return 1

    endpoint = Endpoint(starter(play), ProgramLimits(30.0, max_requests, 8))
    limits = Limits(500, 500, history=history)
    game = game_of({"a": speaker(policy, limits)}, Programs(endpoint, hermes, False))
    try:
        (played,) = run_all(game, [episode()], [[]])
    finally:
        endpoint.close()
    assert played.kind is None, played.episode.error
    return got[0], played, policy


def rows(played):
    return played.contexts[0].rows


def said_by(row):
    """What a row holds behind its prompt: the agent's own tokens in capitals."""
    pairs = zip(text_of(row.ids), row.assistant_mask, strict=True)
    return "".join(letter.upper() if own else letter for letter, own in pairs)


def chat(client, *messages, **more):
    return client.chat.completions.create(model="a", messages=[USER, *messages], **more)


@pytest.mark.parametrize(
    ("stop", "told", "trained", "by_what"),
    [
        ("obs:", "act ", "ACT OBS:", "obs:"),
        (["never", "obs"], "act ", "ACT OBS", "obs"),
        (["obs", "act"], "", "ACT", "act"),
        (["ct o", "t o"], "a", "ACT O", "ct o"),
        ("never", "act obs: 5 obs: 6", "ACT OBS: 5 OBS: 6/", None),
    ],
)
def test_a_turn_ends_at_a_stop_text_and_what_is_trained_is_what_was_sampled_until_then(
    stop, told, trained, by_what
):
    answer, played, _ = by(lambda client: chat(client, stop=stop), "act obs: 5 obs: 6")
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (told, "stop", by_what)
    (row,) = rows(played)
    assert said_by(row) == trained and answer.usage.completion_tokens == len(row.ids)
    assert row.log_probs == [-float(index + 1) for index in range(len(row.ids))]


@pytest.mark.parametrize(
    ("sends_stop", "history", "held"),
    [
        (True, "as_template", ["ACT OBS:/u:5/a:DONE/"]),
        (False, "grow", ["ACT OBS:/u:5/a:DONE/"]),
        (True, "grow", ["ACT OBS:/u:5/a:DONE/"]),
        (False, "as_template", ["ACT OBS:", "DONE/"]),
    ],
)
def test_a_row_goes_on_behind_a_stop_text_where_the_program_says_it_or_history_grows(
    sends_stop, history, held
):
    """Else the model reads what the program has kept: a row of its own."""

    def ask(client):
        said = chat(client, stop=["obs:"]).choices[0].message.content
        mine = {"role": "assistant", "content": f"{said}obs:" if sends_stop else said}
        return chat(client, mine, {"role": "user", "content": "5"}, stop=["obs:"])

    _, played, policy = by(ask, "act obs: 7", "done", history=history)
    assert [said_by(row) for row in rows(played)] == held
    if len(held) == 2:
        assert policy.read[1] == "u:q/a:act/u:5/a:"


def test_a_stop_text_that_ends_with_the_turn_leaves_no_stop_token_behind():
    _, played, _ = by(lambda client: chat(client, stop=["done"]), "all done")
    assert said_by(rows(played)[0]) == "ALL DONE" and END not in rows(played)[0].ids
    assert rows(played)[0].finish_reason == "stop_string"


def test_what_experts_and_versions_say_of_dropped_tokens_is_dropped():
    class Routed:
        async def generate(self, prompt, params, seed, seen=None):
            ids, width = [ord(letter) for letter in "ab stop cd"], 6
            experts = bytes(width * (len(prompt) + len(ids) - 1))
            return Completion(ids, [-1.0] * 10, "length", 3, list(range(10)), experts)

    policy = StoppedPolicy(Routed(), ["stop"], lambda ids: Letters().decode(ids))
    turn = asyncio.run(policy.generate([1, 2, 3], SamplingParams(max_tokens=10), 0))
    assert text_of(turn.token_ids) == "ab stop" and policy.ended_by == "stop"
    assert (turn.log_probs, turn.versions) == ([-1.0] * 7, list(range(7)))
    assert len(turn.experts) == 6 * (3 + 7 - 1) and turn.finish_reason == "stop_string"


class Reader:
    """An engine's stream that goes through a text; keeps what it was asked for."""

    def __init__(self, text):
        self.ids, self.asked, self.waiting = [*map(ord, text), END], [], []

    @property
    def num_pending(self):
        return len(self.waiting)

    def submit(self, requests):
        self.waiting += requests

    def collect(self, timeout_s):
        answers = []
        for one in self.waiting:
            assert list(one.prompt) == [1, 2, 3, *self.ids[: one.start]]
            ids = self.ids[one.start : one.start + one.params.max_tokens]
            self.asked.append(len(ids))
            log_probs = [-float(one.start + index) for index in range(len(ids))]
            experts = bytes(2 * (len(one.prompt) + len(ids) - 1))
            reason = "stop" if ids[-1] == END else "length"
            answers.append((one.key, Completion(ids, log_probs, reason, 7, [], experts)))
        self.waiting = []
        return answers

    def close(self):
        pass


@pytest.mark.parametrize(
    ("text", "most", "asked", "num_said", "reason"),
    [
        ("a" * 100 + " stop " + "b" * 900, 1000, [64, 128], 105, "stop_string"),
        ("a" * 60 + " stop " + "b" * 900, 1000, [64, 128], 65, "stop_string"),
        ("a" * 300, 1000, [64, 128, 109], 301, "stop"),
        ("a" * 300, 150, [64, 86], 150, "length"),
        ("a" * 63, 1000, [64], 64, "stop"),
        ("a" * 64, 1000, [64, 1], 65, "stop"),
    ],
)
def test_little_more_is_sampled_than_the_turn_that_a_stop_text_ends(text, most, asked, num_said, reason):
    stream = Reader(text)
    params = SamplingParams(max_tokens=most)
    with StreamClient(lambda: stream, "a", 30.0) as stream_client:
        policy = StoppedPolicy(stream_client, ["stop"], lambda ids: Letters().decode(ids))
        turn = asyncio.run(policy.generate([1, 2, 3], params, 5))
    assert (stream.asked, len(turn.token_ids), turn.finish_reason) == (asked, num_said, reason)
    assert turn.token_ids == stream.ids[:num_said] and turn.weight_version == 7
    assert turn.log_probs == [-float(index) for index in range(num_said)]
    assert len(turn.experts) == 2 * (3 + num_said - 1)


def test_choices_are_rows_of_their_own_and_each_may_be_gone_on_from():
    def ask(client):
        first = chat(client, n=3)
        texts = [choice.message.content for choice in first.choices]
        again = chat(client, {"role": "assistant", "content": texts[1]}, USER, n=2)
        return texts, first, again

    (texts, first, again), played, policy = by(ask, "one", "two", "three", "four", "five")
    assert texts == ["one", "two", "three"] and [one.index for one in first.choices] == [0, 1, 2]
    assert [said_by(row) for row in rows(played)] == ["ONE/", "TWO/u:q/a:FOUR/", "THREE/", "FIVE/"]
    assert text_of(rows(played)[3].prompt_ids) == "u:q/a:two/u:q/a:"
    assert first.usage.prompt_tokens == 6 and first.usage.completion_tokens == 14
    assert [choice.message.content for choice in again.choices] == ["four", "five"]
    assert len(set(policy.seeds)) == 5  # choices are drawn apart


def test_choices_count_as_requests_and_are_all_or_none():
    def ask(client):
        for wrong in (0, 129, 1.5, True):
            with pytest.raises(openai.BadRequestError, match="n = "):
                client.post(
                    "/chat/completions", body={"model": "a", "messages": [USER], "n": wrong}, cast_to=object
                )
        chat(client)
        with pytest.raises(openai.RateLimitError, match="max_requests=6"):
            chat(client, n=6)

    with pytest.raises(AssertionError, match=r"more than serve\.max_requests=6"):
        by(ask, "x", max_requests=6)


def test_log_probs_and_token_ids_are_those_that_are_trained():
    def ask(client):
        whole = chat(client, logprobs=True, extra_body={"return_token_ids": True})
        stream = list(chat(client, logprobs=True, stream=True, n=2, extra_body={"return_token_ids": True}))
        return whole, stream

    (whole, stream), played, _ = by(ask, "ab", "cd", "ef")
    row, *others = rows(played)
    (choice,) = whole.choices
    assert [one.token for one in choice.logprobs.content] == ["a", "b", ""]  # the stop token is one, too
    assert [one.logprob for one in choice.logprobs.content] == row.log_probs == [-1.0, -2.0, -3.0]
    assert choice.token_ids == row.ids and whole.prompt_token_ids == row.prompt_ids
    for index, other in enumerate(others):
        parts = [one.choices[0] for one in stream if one.choices and one.choices[0].index == index]
        found = [one.logprob for part in parts if part.logprobs for one in part.logprobs.content]
        assert found == other.log_probs
        assert [id for part in parts for id in getattr(part, "token_ids", None) or []] == other.ids


def test_a_program_that_keeps_texts_or_tokens_goes_on_in_its_row():
    def ask(client):
        def go_on(prompt, **more):
            return client.completions.create(model="a", prompt=prompt, **more).choices[0]

        text = "think: "
        for stop in ("obs: ", "obs: ", None):
            text += go_on(text, stop=stop, max_tokens=20).text
            text += f"{stop}5 " if stop else ""
        tokens, said = [40, 41], []
        for _ in range(2):
            one = go_on(tokens, extra_body={"return_token_ids": True}, logprobs=0)
            said.append((one.prompt_token_ids, one.token_ids, one.logprobs.token_logprobs))
            tokens = [*one.prompt_token_ids, *one.token_ids, 42]
        return text, said

    lines = ["look obs: 9", "again obs: 9", "end...", "x", "y"]
    (text, said), played, policy = by(ask, *lines)
    assert text == "think: look obs: 5 again obs: 5 end"
    texts, ids = rows(played)
    assert said_by(texts) == "LOOK OBS: 5 AGAIN OBS: 5 END" and text_of(texts.prompt_ids) == "think: "
    assert (ids.prompt_ids, said_by(ids)) == ([40, 41], "X/*Y/")
    assert said[1][0] == [40, 41, ord("x"), END, 42] and said[1][2] == [-1.0, -2.0]
    assert policy.read[2] == "think: look obs: 5 again obs: 5 "


def test_a_text_behind_a_turn_that_has_ended_begins_a_row():
    """The row holds a stop token there that the text has not."""

    def ask(client):
        said = client.completions.create(model="a", prompt=["q", "r"], n=2)
        client.completions.create(model="a", prompt="qone more")
        return said

    said, played, _ = by(ask, "one", "two", "three", "four", "five")
    assert [one.text for one in said.choices] == ["one", "two", "three", "four"]
    assert said.usage.prompt_tokens == 2
    assert [text_of(row.prompt_ids) for row in rows(played)] == ["q", "q", "r", "r", "qone more"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "logprobs": 5}, "logprobs = 5"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": ["x"] * 100, "n": 2}, "at most 128"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": ["y"] * 17}, "stop"),
        ({"prompt": "x" * 501}, "data.max_prompt_length=500"),
    ],
)
def test_a_completion_that_cannot_be_given_is_refused_and_the_episode_goes_on(body, words):
    def ask(client):
        with pytest.raises(openai.BadRequestError, match=words):
            client.post("/completions", body={"model": "a", **body}, cast_to=object)
        return chat(client)

    _, played, _ = by(ask, "x")
    assert len(rows(played)) == 1


def test_anthropics_client_stops_at_its_sequences():
    def play(session):
        client = anthropic.Anthropic(base_url=session.url, api_key=session.api_key, max_retries=0)
        options = {"model": "a", "max_tokens": 50, "messages": [USER], "stop_sequences": ["obs:"]}
        got.append(client.messages.create(**options))
        with client.messages.stream(**options) as stream:
            got.append(stream.get_final_message())
        return 1

    got: list = []
    (played,) = play_outside(play, {"a": Script("act obs: 5", "plain")})
    assert played.kind is None, played.episode.error
    assert [(one.content[0].text, one.stop_reason, one.stop_sequence) for one in got] == [
        ("act ", "stop_sequence", "obs:"),
        ("plain", "end_turn", None),
    ]
    assert math.isclose(sum(rows(played)[0].log_probs), -8.0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_says_that_it_lives_and_ends_by_the_turn_or_by_an_error(fails, monkeypatch):
    monkeypatch.setattr("siirl.agents.outside.endpoint.ALIVE_S", 0.05)

    class Slow(Script):
        async def generate(self, prompt, params, seed, seen=None):
            await asyncio.sleep(0.4)
            if fails:
                raise EpisodeFailed("the engine has no answer", "policy")
            return await super().generate(prompt, params, seed)

    def play(session):
        for path, more in (("chat/completions", {}), ("messages", {"max_tokens": 9}))[: 1 + (not fails)]:
            body = {"model": "a", "messages": [USER], "stream": True, **more}
            head = {"Authorization": f"Bearer {session.api_key}"}
            asked = urllib.request.Request(f"{session.base_url}/{path}", json.dumps(body).encode(), head)
            with urllib.request.urlopen(asked, timeout=30) as answer:
                texts.append(answer.read().decode())
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        stream = client.chat.completions.create(model="a", messages=[USER], stream=True)
        texts.append("".join(part.choices[0].delta.content or "" for part in stream))
        return 1

    texts: list = []
    (played,) = play_outside(play, {"a": Slow("one", "two", "three")})
    if fails:  # its program is ended at once, maybe before it has read why
        assert played.kind == "policy" and all('"code": "episode_over"' in text for text in texts)
    else:
        assert texts[0].startswith(": the turn is being generated\n\n" * 3)
        assert played.kind is None and '"one"' in texts[0] and '"two"' in texts[1] and texts[2] == "three"
