"""Lists and plays tasks of environments of verifiers, in an interpreter that has them, maybe without siirl.

It reads lines of JSON and answers with lines of JSON: `rows` one line, an environment, by all of its rows;
`play` a line for each episode, by its reward or what went wrong, in whatever order they end. Nothing else
goes to the standard output: what environments print goes to the standard error.
"""

import asyncio
import importlib.util
import json
import os
import sys
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

PACKAGE = "verifiers"
MISSING = "missing"
"""Key of an answer: the package that this interpreter lacks."""
KEY: ContextVar[str] = ContextVar("key")
"""Of the episode that a task of the event loop plays."""
OF_THE_MODEL = {
    *("EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError"),
    *("ToolParseError", "ToolCallError"),
}
"""Errors of verifiers that are what the model did, and cost it what the rubric says."""


class Classic:
    """An environment that a module's load_environment gives (verifiers before 0.4)."""

    def __init__(self, name: str, args: dict[str, Any]):
        self._client_of = importlib.import_module("verifiers.clients").OpenAIChatCompletionsClient
        self._clients: dict[str, Any] = {}  # one for all episodes: making one takes as long as a turn
        self._env = importlib.import_module(PACKAGE).load_environment(name, **args)
        if getattr(self._env, "requires_group_rollouts", False):
            raise NotImplementedError(
                "not supported yet: rewards that look at all samples of a prompt together"
            )

    def rows(self, split: str, most: int, seed: int | None) -> list[dict[str, Any]]:
        """The data set that it trains or is evaluated on."""
        read = self._env.get_eval_dataset if split == "eval" else self._env.get_dataset
        return [
            {"prompt": row["prompt"], "answer": row.get("answer"), "input": dict(row)}
            for row in read(n=most, seed=seed)
        ]

    async def play(self, episode: dict[str, Any]) -> float:
        """One rollout, scored by its rubric; also one that ended as the model said nothing, or too much."""
        url = episode["base_url"]
        if url not in self._clients:
            self._clients[url] = self._client_of(_openai_client(url))
        KEY.set(episode["api_key"])
        output = await self._env.run_rollout(episode["input"], self._clients[url], episode["model"], {})
        error = output.get("error")
        if error and error["error"] not in OF_THE_MODEL:
            raise RuntimeError(f"{error['error']}: {error['message']}")
        return float(output["reward"] or 0.0)


def _openai_client(url: str) -> Any:
    """One that says for each request whose it is."""
    openai, httpx = importlib.import_module("openai"), importlib.import_module("httpx")

    async def sign(request: Any) -> None:
        request.headers["Authorization"] = f"Bearer {KEY.get()}"

    http = httpx.AsyncClient(event_hooks={"request": [sign]}, timeout=None, limits=httpx.Limits())
    return openai.AsyncOpenAI(base_url=url, api_key="of the episode", http_client=http, max_retries=0)


class Tasks:
    """A taskset, and the agent that plays it (verifiers.v1 of 0.4); args configure the environment."""

    def __init__(self, name: str, args: dict[str, Any]):
        self._vf = vf = importlib.import_module("verifiers.v1")
        config = vf.resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": name}})
        agents = [name for name, value in config if isinstance(value, vf.AgentConfig)]
        if len(agents) > 1:
            raise NotImplementedError(f"not supported yet: several agents, {', '.join(agents)}")
        self._env = vf.load_environment(config)
        self._task_type = type(self._env.taskset).task_type()
        self._serving: asyncio.Task[AsyncExitStack] | None = None

    def rows(self, split: str, most: int, seed: int | None) -> list[dict[str, Any]]:
        """Its tasks."""
        if split != "train":
            raise ValueError(f"split={split}: a taskset has none. Its own settings are args.taskset.NAME")
        tasks = self._env.taskset
        if seed is not None:
            tasks = tasks.shuffle(seed)
        if most > 0:
            tasks = tasks.take(most)
        if not tasks.bounded:
            raise ValueError("it has tasks without end: set num_examples")
        return [self._row(task.data) for task in tasks]

    def _row(self, data: Any) -> dict[str, Any]:
        given = data.prompt or ""
        prompt = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages = [message if isinstance(message, dict) else message.model_dump() for message in prompt]
        if data.system_prompt:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        return {
            "prompt": messages,
            "answer": getattr(data, "answer", None),
            "input": data.model_dump(mode="json"),
        }

    async def play(self, episode: dict[str, Any]) -> float:
        """One episode, scored by its task."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        await asyncio.shield(self._serving)
        vf = self._vf
        client = vf.EvalClientConfig(base_url=episode["base_url"], api_key_var=episode["key_variable"])
        data = self._task_type.data_type().model_validate(episode["input"])
        task = self._task_type(data, self._env.config.taskset.task)
        context = vf.ModelContext(client=client, model=episode["model"], sampling=vf.SamplingConfig())
        played = await self._env.run_episode(task, context)
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        return float(sum(trace.reward for trace in played.traces))

    async def _serve(self) -> AsyncExitStack:
        """Tool servers and the like, as long as this process."""
        stack = AsyncExitStack()
        await stack.enter_async_context(self._env.serving())
        return stack


def environment(name: str, args: dict[str, Any]) -> Classic | Tasks:
    """The environment of an installed module, or of a file."""
    if name.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
        name = os.path.basename(name).removesuffix(".py")
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_")
    if importlib.util.find_spec(module) is not None:
        found = importlib.import_module(module)
        if hasattr(found, "load_environment"):
            return Classic(module, args)
    return Tasks(name, args)


class Episodes:
    """Plays episodes beside each other, on one event loop, as the package does."""

    def __init__(self, answers: Any):
        self._answers = answers
        self._environments: dict[str, Classic | Tasks] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the standard input ends."""
        reader = asyncio.StreamReader(limit=1 << 30)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            asked = json.loads(line)
            if asked.get("give_up"):
                if (task := self._playing.get(asked["number"])) is not None:
                    task.cancel()
                continue
            task = asyncio.create_task(self._play(asked))
            self._playing[asked["number"]] = task
            task.add_done_callback(lambda _, number=asked["number"]: self._playing.pop(number))

    async def _play(self, asked: dict[str, Any]) -> None:
        number, variable = asked["number"], f"SIIRL_KEY_{asked['number']}"
        os.environ[variable] = asked["api_key"]  # the package takes keys from the environment only
        try:
            source = json.dumps([asked["env"], asked["args"]])
            if source not in self._environments:
                self._environments[source] = environment(asked["env"], asked["args"])
            reward = await self._environments[source].play({**asked, "key_variable": variable})
            answer: dict[str, Any] = {"number": number, "reward": reward}
        except Exception as error:  # noqa: BLE001 - the edge to user code
            answer = {"number": number, "error": f"{type(error).__name__}: {error}"}
        finally:
            del os.environ[variable]
        print(json.dumps(answer), file=self._answers, flush=True)


def main() -> None:
    """The process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del sys.path[0]  # the folder of this file, whose names are none of theirs
    if importlib.util.find_spec(PACKAGE) is None:
        print(json.dumps({MISSING: PACKAGE}), file=answers, flush=True)
    elif sys.argv[1] == "play":
        asyncio.run(Episodes(answers).serve())
        os._exit(0)  # what environments have left running does not hold it up
    else:
        asked = json.loads(sys.stdin.readline())
        try:
            source = environment(asked["env"], asked["args"])
            answer: dict[str, Any] = {
                "rows": source.rows(asked["split"], asked["num_examples"], asked["seed"])
            }
            print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # noqa: BLE001 - the edge to user code
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)


if __name__ == "__main__":
    main()
