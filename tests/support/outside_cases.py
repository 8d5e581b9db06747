"""Episodes that programs play, without models: letters for tokens, and policies that say their lines."""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from episode_cases import Speaker, speaker, stage

from siirl.agents.episode import Episode
from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.programs import Programs, starter
from siirl.agents.outside.session_queue import ListenAddress, SessionQueue
from siirl.agents.runner import Game, Played, run_all
from siirl.compiler.plan import InteractionPlan
from siirl.dialect.formats.json_calls import hermes

HTTP = '''
import json, os, urllib.error, urllib.request

def ask(path, body=None, token=os.environ.get("OPENAI_API_KEY"), raw=None, timeout=30):
    """(status, JSON) of GET, or of POST with a body."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        os.environ["SIIRL_URL"] + path, data, {"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def chat(*messages, model="a", **more):
    status, answer = ask("/v1/chat/completions", {"model": model, "messages": list(messages), **more})
    assert status == 200, (status, answer)
    return answer["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

'''
"""The wire of OpenAI's client, in the standard library: it starts in a tenth of the time."""


def program(folder: Path, code: str) -> str:
    """A shell command that runs code after HTTP."""
    path = folder / "program.py"
    path.write_text(HTTP + code)
    return f"{sys.executable} {path}"


def game_of(speakers: dict[str, Speaker], programs: Programs | None) -> Game:
    """Agents 0, 1, ... under the names of `speakers`."""
    stages = tuple(stage(name, agent) for agent, name in enumerate(speakers))
    policies = tuple(f"agent_{agent}.rollout" for agent in range(len(speakers)))
    return Game(InteractionPlan(stages[0].node, stages, policies, 99), speakers, {}, None, 5.0, programs)


def episode(number: int = 0, **extra: Any) -> Episode:
    """One of group 0, whose task has `extra` as extra_info."""
    task = {"raw_prompt": [{"role": "user", "content": "q"}], "ground_truth": "7", "extra_info": extra}
    return Episode(number, 0, number, 100 + number, task)


def play_outside(
    command: Any,
    policies: dict[str, Any],
    episodes: list[Episode] | None = None,
    needs_reward: bool = False,
    limits: ProgramLimits | None = None,
    sandbox: dict[str, Any] | None = None,
) -> list[Played]:
    """Let a command, a function, or clients in a Lobby play episodes (one, unless they are given).

    policies: by model name.
    """
    start = command if isinstance(command, SessionQueue) else starter(command)
    endpoint = Endpoint(start, limits or ProgramLimits(30.0, 64, 8), sandbox)
    programs = Programs(endpoint, hermes, needs_reward)
    game = game_of({name: speaker(policy) for name, policy in policies.items()}, programs)
    made = episodes or [episode()]
    try:
        return run_all(game, made, [[] for _ in made])
    finally:
        endpoint.close()


def lobby(folder: Path, **door: Any) -> SessionQueue:
    """One whose address will be in folder/door.json; a client may be silent for a minute."""
    settings = {"token": None, "idle_s": 60.0, "deadline_s": 60.0, **door}
    return SessionQueue(ListenAddress("127.0.0.1", 0, folder / "door.json", **settings))


class Client:
    """One that comes from outside, with the standard library alone."""

    def __init__(self, file: Path) -> None:
        """file: where the run says its address and token, maybe later."""
        deadline_s = time.monotonic() + 120
        while not file.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        found = json.loads(file.read_text())
        self.url, self.token, self.key = found["url"], found["token"], ""

    def ask(self, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """(status, JSON) of a GET, or of a POST with a body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key if token is None else token}"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=60
            ) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def come(self, wait_s: float = 60) -> dict[str, Any]:
        """Take an episode, if there is one: the answer."""
        status, answer = self.ask("/session", {"wait_s": wait_s}, self.token)
        assert status == 200, answer
        if answer["session"] is not None:
            self.key = answer["session"]["api_key"]
        return answer

    def say(self, text: str = "q", model: str = "a") -> str:
        """A turn after a message of the user's."""
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        status, answer = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]
