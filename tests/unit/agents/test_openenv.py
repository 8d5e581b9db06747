"""Environments of an OpenEnv server: what it shows, takes and pays over its WebSocket."""

import asyncio
import subprocess
import sys

import pytest
from held_ports import await_listening, held_port

from siirl.agents.environments import check_packaged, load_environment
from siirl.errors import DagError, EpisodeFailed

pytestmark = pytest.mark.heavy
WHO = "node 'game': env_path"
SERVER = '''
import random, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str
    loud: bool = False

class Seen(Observation):
    text: str
    turns: int = 0

class Number(Environment):
    """A number from 0 to 9 is to be guessed."""
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.turns = random.Random(seed).randrange(10), 0
        return Seen(text="guess", reward=None, done=False)

    def step(self, action, timeout_s=None, **more):
        if action.message == "break":
            raise RuntimeError("broken")
        self.turns += 1
        guess = int(action.message)
        right = guess == self.number
        hint = "right" if right else "higher" if guess < self.number else "lower"
        reward = 1 / self.turns if right else -0.125
        return Seen(text=hint.upper() if action.loud else hint, turns=self.turns, reward=reward, done=right)

    @property
    def state(self):
        return State()

if __name__ == "__main__":
    app = create_fastapi_app(Number, Guess, Seen, max_concurrent_envs=100)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", ws_ping_interval=1, ws_ping_timeout=1)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(its address, the module that it runs, the file of what it prints)"""
    pytest.importorskip("openenv", reason="pip install openenv-core")
    file = tmp_path_factory.mktemp("openenv") / "number_server.py"
    file.write_text(SERVER)
    printed = file.with_name("printed.txt")
    with held_port() as port:
        with printed.open("w") as stream:
            process = subprocess.Popen([sys.executable, str(file), str(port)], stdout=stream, stderr=stream)
        await_listening(port, process)
        sys.path.insert(0, str(file.parent))
        import number_server

        yield f"http://127.0.0.1:{port}", number_server, printed
        sys.path.remove(str(file.parent))
        process.terminate()
        process.wait(20)


def guesses(read):
    """Guess by halves, from what was read so far."""
    low, high = 0, 9
    while True:
        guess = (low + high) // 2
        hint = yield str(guess)
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)


async def play(make, seed):
    env, paid, read = make(), [], []
    try:
        read.append((await env.reset({}, seed, 30)).text_for(0))
        player = guesses(read)
        said = next(player)
        while True:
            result = await env.step({0: said}, 30)
            read.append(result.text_for(0))
            paid.append(result.rewards)
            if result.done:
                return paid, read
            said = player.send(result.info["observation"]["text"])
    finally:
        await env.close()


def theirs(module, seed):
    """The same episode by the environment itself, without a server."""
    env = module.Number()
    read, paid = [env.reset(seed=seed).text], []
    player = guesses(read)
    said = next(player)
    while True:
        seen = env.step(module.Guess(message=said))
        read.append(seen.text)
        paid.append(seen.reward)
        if seen.done:
            return paid, read
        said = player.send(seen.text)


@pytest.mark.slow
def test_64_episodes_at_once_pay_what_the_environment_pays(server):
    make = load_environment(f"openenv:{server[0]}", WHO, {}, max_concurrent=64)

    async def everything():
        return await asyncio.gather(*(play(make, seed) for seed in range(64)))

    episodes = asyncio.run(everything())
    assert episodes == [theirs(server[1], seed) for seed in range(64)]
    assert len({sum(paid) for paid, _ in episodes}) > 2
    assert server[2].read_text() == ""  # sessions end as the server expects it


@pytest.mark.slow
def test_fields_of_the_action_and_functions_of_the_user(server, tmp_path):
    (tmp_path / "number.py").write_text(
        'def show(observation, info):\n    return f\'{observation["turns"]}: {observation["text"]}\'\n'
        "def read(text, info):\n    return {'message': text.split()[-1]}\n"
    )

    async def once(kwargs, said):
        env = load_environment(f"openenv:{server[0]}", WHO, kwargs)()
        try:
            await env.reset({}, 3, 30)
            return (await env.step({0: said}, 30)).text_for(0)
        finally:
            await env.close()

    assert asyncio.run(once({"fields": {"loud": True}}, "-1")) == "HIGHER"
    functions = {name: f"{tmp_path / 'number.py'}:{name}" for name in ("show", "read")}
    assert asyncio.run(once(functions, "my guess is -1")) == "1: higher"


@pytest.mark.slow
def test_a_turn_may_take_longer_than_the_pings_of_the_server(server):
    async def slowly():
        env = load_environment(f"openenv:{server[0]}", WHO, {})()
        try:
            await env.reset({}, 3, 30)
            await asyncio.sleep(4)
            return (await env.step({0: "-1"}, 30)).text_for(0)
        finally:
            await env.close()

    assert asyncio.run(slowly()) == "higher"


@pytest.mark.slow
def test_an_environment_that_breaks_costs_its_episode(server):
    async def breaks():
        env = load_environment(f"openenv:{server[0]}", WHO, {})()
        try:
            await env.reset({}, 3, 30)
            await env.step({0: "break"}, 30)
        finally:
            await env.close()

    with pytest.raises(EpisodeFailed, match="the server says EXECUTION_ERROR: broken"):
        asyncio.run(breaks())


def test_a_server_that_is_not_there_is_refused():
    with pytest.raises(DagError, match=r"no OpenEnv server answers \(.*Start it before the run"):
        check_packaged("openenv:http://127.0.0.1:9", WHO, {})
    with pytest.raises(DagError, match="is no address"):
        check_packaged("openenv:localhost", WHO, {})
