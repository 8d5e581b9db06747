"""Clients that come for episodes (serve.listen): who gets which, who leaves one, and who is missing."""

import os
import threading
import time

import pytest
from episode_cases import Script, speaker
from outside_cases import Client, episode, game_of, lobby, play_outside

from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.programs import MOST_CLIENTS, Programs
from siirl.agents.runner import run_all
from siirl.dialect.formats.json_calls import hermes
from siirl.errors import UserCodeError
from siirl.observe.position import PositionFile, read_position
from siirl.observe.spans import Observer, observing


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def work(file, seen):
    """A client as docs/agents_elsewhere.md has it: it plays until the run is over."""
    client = Client(file)
    while not (answer := client.come())["over"]:
        if answer["session"] is not None:
            number = answer["session"]["task"]["extra_info"]["item"]
            seen.append((threading.get_ident(), number, client.ask("/task")[1]["extra_info"]["item"]))
            client.say()
            assert client.ask("/reward", {"reward": number})[0] == 200


def test_clients_share_the_episodes_of_all_steps_and_are_told_when_the_run_is_over(tmp_path):
    seen, lines = [], Script(*["hi"] * 24)
    hall = lobby(tmp_path)
    endpoint = Endpoint(hall, ProgramLimits(30.0, 64, 4))
    game = game_of({"a": speaker(lines)}, Programs(endpoint, hermes, True))
    clients = [in_thread(work, tmp_path / "door.json", seen) for _ in range(3)]
    try:
        for step in range(2):
            episodes = [episode(number, item=12 * step + number) for number in range(12)]
            played = run_all(game, episodes, [[] for _ in episodes])
            worth = [one.contexts[0].rows[0].rewards[-1] for one in played]
            assert worth == [12 * step + number for number in range(12)]
            assert not any(one.num_left or one.kind for one in played)
        while len(hall._asking) < len(clients):
            time.sleep(0.01)
    finally:
        endpoint.close()
    for client in clients:
        client.join(60)
        assert not client.is_alive()  # it has been told
    assert sorted(number for _, number, _ in seen) == list(range(24))
    assert all(number == own for _, number, own in seen)
    assert (tmp_path / "door.json").stat().st_mode & 0o777 == 0o600


def test_nobody_gets_an_episode_without_the_token_of_the_run_or_a_turn_with_it_alone(tmp_path):
    def knock():
        client = Client(tmp_path / "door.json")
        refused.append(client.ask("/session", {}, "siirl-wrong")[0])
        refused.append(client.ask("/session", {}, "")[0])
        refused.append(client.ask("/v1/chat/completions", {"messages": []}, client.token)[0])
        wrong.extend(
            client.ask("/session", body, client.token)[0] for body in ({"wait_s": "x"}, [1], {"wait_s": -1})
        )
        client.come()
        refused.append(client.ask("/session", {}, client.key)[0])
        client.say()
        client.ask("/reward", {"reward": 1})
        ended = client.key
        client.come()  # the run goes on
        refused.append(client.ask("/v1/chat/completions", {"messages": []}, ended)[0])
        client.say()
        client.ask("/reward", {"reward": 1})

    refused, wrong = [], []
    thread = in_thread(knock)
    played = play_outside(lobby(tmp_path), {"a": Script("hi", "hi")}, [episode(0), episode(1)])
    thread.join(60)
    assert refused == [401] * 5 and wrong == [400] * 3 and not any(one.kind for one in played)


def test_the_token_stays_the_same_from_start_to_start(tmp_path):
    first = lobby(tmp_path)
    first.open("http://127.0.0.1:1")
    assert lobby(tmp_path).token == first.token and lobby(tmp_path, token="mine").token == "mine"
    (tmp_path / "door.json").write_text("[damaged")
    assert lobby(tmp_path).token not in ("", first.token)


@pytest.mark.parametrize(
    "whose", ["all may write", "all may read", "a group's", "a link", "a pipe", "a stranger's"]
)
def test_a_token_that_somebody_else_can_have_written_or_read_is_not_taken(whose, tmp_path):
    """Whoever may write to the folder would choose it, or know it."""
    door, elsewhere = tmp_path / "door.json", tmp_path / "elsewhere"
    door.write_text('{"token": "planted"}')
    door.chmod(0o600)
    assert lobby(tmp_path).token == "planted"
    match whose:
        case "a link":
            door.rename(elsewhere)
            door.symlink_to(elsewhere)
        case "a pipe":
            door.unlink()
            os.mkfifo(door, 0o600)
        case "a stranger's":
            if os.geteuid():
                pytest.skip("only root gives files away")
            os.chown(door, 65534, 65534)
        case _:
            door.chmod({"all may write": 0o622, "all may read": 0o644, "a group's": 0o640}[whose])
    opened = lobby(tmp_path)
    assert opened.token not in ("", "planted")
    opened.open("http://127.0.0.1:1")
    assert door.lstat().st_mode & 0o777 == 0o600 and lobby(tmp_path).token == opened.token
    assert not elsewhere.exists() or "planted" in elsewhere.read_text()


@pytest.mark.parametrize("says", [0, 1])
def test_an_episode_that_its_client_leaves_is_dealt_anew_from_its_beginning(tmp_path, says):
    def clients():
        client = Client(tmp_path / "door.json")
        client.come()
        for _ in range(says):
            client.say("of the first")
        first = client.key
        client.come()
        assert client.key != first
        late.append(client.ask("/task", token=first)[0])
        client.say("of the second")
        client.ask("/reward", {"reward": 0.5})

    late = []
    thread = in_thread(clients)
    (played,) = play_outside(lobby(tmp_path, idle_s=0.5), {"a": Script(*["hi"] * 2)}, None, True)
    thread.join(60)
    assert played.kind is None and played.num_left == 1 and late == [401]
    assert [one.content for one in played.episode.messages] == ["of the second", "hi"]
    (row,) = played.contexts[0].rows
    assert row.rewards[-1] == 0.5 and played.episode.turns == 1


def test_an_episode_that_every_client_leaves_is_dropped_and_named(tmp_path):
    def leave():
        client = Client(tmp_path / "door.json")
        for _ in range(MOST_CLIENTS):
            client.come()

    in_thread(leave)
    (played,) = play_outside(lobby(tmp_path, idle_s=0.2), {"a": Script()}, None, True)
    assert played.kind == "program_left" and played.num_left == MOST_CLIENTS
    assert "serve.idle_s=0.2" in played.episode.error


@pytest.mark.parametrize(("ends", "words"), [(True, "ended it"), (False, "silent for serve.idle_s=0.5")])
def test_with_a_reward_node_an_end_and_a_silence_end_an_episode_that_is_scored(tmp_path, ends, words):
    def client():
        one = Client(tmp_path / "door.json")
        one.come()
        one.say()
        if ends:
            assert one.ask("/end", {})[0] == 200

    in_thread(client)
    (played,) = play_outside(lobby(tmp_path, idle_s=60 if ends else 0.5), {"a": Script("hi")})
    assert played.kind is None and words in played.episode.ended and played.num_left == (not ends)
    assert played.contexts[0].rows


def test_a_step_without_clients_says_so_and_ends_the_run_at_its_deadline(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("siirl.agents.outside.session_queue.TOLD_S", 0.5)
    monkeypatch.setattr("siirl.agents.outside.endpoint.LOOK_S", 0.1)
    position = PositionFile(tmp_path / "position")
    position.set(3, "rollout", "step", (0, 1))
    seen = []

    def look():
        while not seen or not seen[-1].waits:
            time.sleep(0.05)
            seen.append(read_position(tmp_path / "position"))

    with observing(Observer(position)):
        thread = in_thread(look)
        with pytest.raises(UserCodeError, match=r"no client .*2 episodes are not taken.*/session.*door.json"):
            play_outside(lobby(tmp_path, deadline_s=3.0), {"a": Script()}, [episode(0), episode(1)])
        thread.join(60)
    assert seen[-1].waits == "waits for clients: 2 episodes are not taken" and seen[-1].order == (0, 1)
    assert [record.message for record in caplog.records if "not taken" in record.message]


def test_while_one_plays_an_episode_may_wait_for_longer_than_the_deadline(tmp_path):
    def client(comes_s, holds_s):
        one = Client(tmp_path / "door.json")
        time.sleep(comes_s)
        one.come()
        one.say()
        time.sleep(holds_s)
        one.ask("/reward", {"reward": 1})

    hall = lobby(tmp_path, deadline_s=1.0)
    endpoint = Endpoint(hall, ProgramLimits(30.0, 64, 2))
    game = game_of({"a": speaker(Script("x", "x"))}, Programs(endpoint, hermes, True))
    endpoint.start()
    try:
        in_thread(client, 0, 5)
        while not hall._asking:
            time.sleep(0.01)
        in_thread(client, 2.5, 0)
        played = run_all(game, [episode(0), episode(1)], [[], []])
    finally:
        endpoint.close()
    assert [one.kind for one in played] == [None] * 2
