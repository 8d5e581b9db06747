"""Environments that a resources server of NeMo-Gym runs: env_path: nemo_gym:http://HOST:PORT. One agent acts.

Rows are those of nemo_gym:FILE.jsonl (siirl/data/nemo_gym_rows.py). What the agent says is told the server as
items of the Responses API: its tools are called by name, and `verify` gives the reward.
"""

import json
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from siirl.agents.task_run import MOST_STEPS
from siirl.data.nemo_gym_rows import PARAMS, ROW_KEY
from siirl.dialect.tool_formats import ToolCall, tool_parser
from siirl.errors import EpisodeFailed

if TYPE_CHECKING:
    import httpx  # takes 0.4 s

CONNECT_S = 30.0
TOLD = "You can call these tools, as <tool_call>{{...}}</tool_call>:\n{tools}"


class NemoGym:
    """A session of an episode with the server at an address.

    max_steps: turns with calls of tools; after so many the episode is verified, as it is after a turn without
    calls. tool_format: of calls, as rollout.multi_turn.format. tell_tools: what the agent reads of the row's
    tools before its first turn, with {tools} as JSON; "": nothing.
    """

    def __init__(
        self, address: str, max_steps: int = MOST_STEPS, tool_format: str = "hermes", tell_tools: str = TOLD
    ) -> None:
        scheme, _, place = address.partition("://")
        if scheme not in ("http", "https") or not place:
            raise ValueError(f"{address!r} is no address: write nemo_gym:http://HOST:PORT.")
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: it must be at least 1.")
        self._address, self._most = address.rstrip("/"), max_steps
        self._parse, self._tell = tool_parser(tool_format, "env_kwargs.tool_format"), tell_tools
        self._client: httpx.Client | None = None
        self._row: dict[str, Any] = {}
        self._items: list[dict[str, Any]] = []
        self._num_turns = 0

    def problem(self) -> str | None:
        """Why the server cannot be used, and the fix; None if it answers."""
        import httpx

        try:
            httpx.get(f"{self._address}/openapi.json", timeout=CONNECT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"no resources server answers ({type(error).__name__}: {error}). Start it before the run."
        return None

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """Begin a session for the row; what the agent reads besides its prompt."""
        import httpx

        row = (task.get("extra_info") or {}).get(ROW_KEY)
        if row is None:
            raise ValueError("the row is none of NeMo-Gym: name data.train_files=nemo_gym:FILE.jsonl.")
        self._row, self._items, self._num_turns = json.loads(row), [], 0
        transport = httpx.HTTPTransport(retries=3)  # of connections only
        self._client = httpx.Client(transport=transport, timeout=httpx.Timeout(None, connect=CONNECT_S))
        self._post("seed_session", self._row).raise_for_status()
        tools = self._row[PARAMS].get("tools") or []
        told = json.dumps(tools, ensure_ascii=False)
        return self._tell.format(tools=told) if tools and self._tell else ""

    def step(self, actions: dict[int, str]) -> tuple[str, float, bool, dict[str, Any]]:
        """Call tools, or verify. ValueError if several agents act."""
        if len(actions) != 1:
            raise ValueError(f"agents {list(actions)} act at once: a resources server hears one")
        (said,) = actions.values()
        names = [tool.get("name") for tool in self._row[PARAMS].get("tools") or []]
        parsed = self._parse(said)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)] if names else []
        number, self._num_turns = self._num_turns, self._num_turns + 1
        text = parsed.content if calls else said
        if text.strip() or not calls:
            self._items.append(_message(text, f"msg_{number}"))
        answers = []
        for place, call in enumerate(calls):
            item = {"type": "function_call", "call_id": f"call_{number}_{place}", "status": "completed"}
            item |= {"id": f"fc_{number}_{place}", "name": call.name, "arguments": json.dumps(call.arguments)}
            answer = self._call(call) if call.name in names else f"there is no tool {call.name!r}"
            output = {"type": "function_call_output", "call_id": item["call_id"], "output": answer}
            self._items += [item, output]
            answers.append(answer)
        if calls and self._num_turns < self._most:
            return "\n".join(answers), 0.0, False, {}
        reward, info = self._verified()
        return "", reward, True, info

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _call(self, call: ToolCall) -> str:
        """What a tool answers; also its errors, which the agent may correct."""
        return self._post(quote(call.name, safe=""), call.arguments).text

    def _verified(self) -> tuple[float, dict[str, Any]]:
        """The reward. EpisodeFailed where the server says that its own failure has spoilt it."""
        params = self._row[PARAMS]
        response = {
            **{"id": "resp_0", "object": "response", "created_at": time.time(), "model": "policy"},
            **{"output": self._items, "tools": params.get("tools") or [], "tool_choice": "auto"},
            **{"parallel_tool_calls": True},
        }
        answered = self._post("verify", {**self._row, "response": response})
        answered.raise_for_status()
        told = answered.json()
        if told.get("mask_sample"):
            why = told.get("failure_reason") or told.get("failure_kind") or "it does not say why"
            raise EpisodeFailed(f"the server says that its reward does not count: {why}", "env_masked")
        numbers = {name: value for name, value in told.items() if isinstance(value, int | float)}
        return float(told["reward"]), numbers

    def _post(self, path: str, body: Any) -> "httpx.Response":
        assert self._client is not None, "reset comes first"
        return self._client.post(f"{self._address}/{path}", json=body)


def _message(text: str, name: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": name, "status": "completed", "content": content}
