"""Episodes with a resources server of NeMo-Gym, against one that speaks its public protocol."""

import json
import threading
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from episode_cases import Script, play, speaker, stage, text_of
from job_harness import ROOT, Inputs, overrides, run_job

from siirl.agents.environments import check_packaged, load_environment
from siirl.agents.task_run import check_turns
from siirl.data.data_files import list_files
from siirl.errors import DagError, DataError

WHO = "node 'gym': env_path"
ADD = {
    "type": "function",
    "name": "add",
    "description": "adds to the counter",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
    "strict": True,
}


def row(expected: int, *tools: dict, **more) -> dict:
    params = {"input": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "q"}]}
    return {"responses_create_params": params | {"tools": list(tools)}, "expected": expected, **more}


class Server(ThreadingHTTPServer):
    """A counter of each session, which its cookie names; `verify` compares it, or the text, with the row."""

    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.counters: dict[str, int] = {}
        self.verified: list[dict] = []
        self.paths: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def reference(self) -> str:
        return f"nemo_gym:http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *what):
        pass

    def do_GET(self):
        self._answer(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = SimpleCookie(self.headers.get("Cookie", "")).get("session")
        self.server.paths.append(self.path)
        if self.path == "/seed_session":
            name = f"s{len(self.server.counters)}"
            self.server.counters[name] = 0
            return self._answer(200, {}, name)
        counters, name = self.server.counters, session.value
        if self.path == "/add":
            if not isinstance(body.get("count"), int):
                return self._answer(422, {"detail": "count is no integer"})
            counters[name] += body["count"]
            return self._answer(200, {"counter": counters[name]})
        if self.path != "/verify":
            return self._answer(404, {"detail": "Not Found"})
        self.server.verified.append(body)
        if body.get("breaks") == "masked":
            return self._answer(
                200, body | {"reward": 0.0, "mask_sample": True, "failure_reason": "judge is gone"}
            )
        if body.get("breaks"):
            return self._answer(500, {"detail": "no"})
        said = "".join(
            part["text"] for item in body["response"]["output"] for part in item.get("content", ())
        )
        right = counters[name] == body["expected"] or str(body["expected"]) in said
        return self._answer(200, body | {"reward": float(right), "counter": counters[name]})

    def _answer(self, status, body, session=None):
        data = json.dumps(body).encode()
        self.send_response(status)
        if session is not None:
            self.send_header("Set-Cookie", f"session={session}; Path=/")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def episode(server: Server, task: dict, *lines: str, num_episodes: int = 1, script=None, **kwargs):
    """Episodes of one agent that says these lines; what it read before each, and the episodes."""
    script = script or Script(*lines)
    stages = [stage("a", 0, following="gym"), stage("gym", None, back_to="a", max_turns=8)]
    make = load_environment(server.reference, WHO, kwargs)
    extra = {"nemo_gym_row": json.dumps(task)}
    played = play(stages, {"a": speaker(script)}, make_env=make, extra_info=extra, num_episodes=num_episodes)
    return script.read, played


def test_a_single_turn_is_verified_as_a_response_of_openai(server):
    _, (played,) = episode(server, row(7, verifier={"level": 3}), "it is 7")
    assert played.kind is None and played.episode.done and played.episode.messages[-1].reward == 1.0
    (asked,) = server.verified
    assert asked["verifier"] == {"level": 3} and asked["expected"] == 7
    responses = pytest.importorskip("openai.types.responses")
    (message,) = responses.Response.model_validate(asked["response"]).output
    assert message.content[0].text == "it is 7"
    assert server.paths == ["/seed_session", "/verify"]


def test_tools_are_called_in_a_session_of_the_episode(server):
    lines = [f"first {call('add', count=2)}", call("add", count="x") + call("add", count=3), "done"]
    read, (played,) = episode(server, row(5, ADD), *lines)
    assert played.kind is None and sum(m.reward for m in played.episode.messages) == 1.0
    assert '"name": "add"' in read[0] and '{"counter": 2}' in read[1]
    assert "count is no integer" in read[2] and '{"counter": 5}' in read[2]
    responses = pytest.importorskip("openai.types.responses")
    outputs = server.verified[0]["response"]["output"]
    kinds = [item["type"] for item in outputs]
    assert kinds == ["message", *["function_call", "function_call_output"] * 3, "message"]
    calls = [item for item in outputs if item["type"] == "function_call"]
    assert [json.loads(item["arguments"]) for item in calls] == [{"count": 2}, {"count": "x"}, {"count": 3}]
    assert [item["call_id"] for item in outputs if "output" in item] == [item["call_id"] for item in calls]
    plain = [item for item in outputs if item["type"] != "function_call_output"]
    responses.Response.model_validate(server.verified[0]["response"] | {"output": plain})
    assert played.episode.state["env"]["counter"] == 5


def test_sessions_of_episodes_at_once_are_apart(server):
    class Adds(Script):
        async def generate(self, prompt, params, seed, seen=None):
            self.lines = ["done" if '"counter"' in text_of(prompt) else call("add", count=1)]
            return await super().generate(prompt, params, seed, seen)

    _, played = episode(server, row(1, ADD), num_episodes=6, script=Adds())
    assert [sum(m.reward for m in one.episode.messages) for one in played] == [1.0] * 6
    assert list(server.counters.values()) == [1] * 6


def test_the_agent_calls_no_path_that_is_no_tool_of_its_row(server):
    lines = [call("verify", reward=1), call("../seed_session"), "done"]
    read, (played,) = episode(server, row(5, ADD), *lines)
    assert "there is no tool 'verify'" in read[1] and "there is no tool '../seed_session'" in read[2]
    assert server.paths == ["/seed_session", "/verify"] and played.episode.messages[-1].reward == 0.0


def test_after_the_last_step_the_episode_is_verified(server):
    _, (played,) = episode(server, row(2, ADD), call("add", count=2), max_steps=1)
    assert played.episode.done and played.episode.messages[-1].reward == 1.0 and server.counters == {"s0": 2}
    kwargs = {"max_steps": 4}
    check_turns(server.reference, kwargs, 4, WHO)
    with pytest.raises(DagError, match=r"max_turns = 3 ends .* env_kwargs\.max_steps = 4"):
        check_turns(server.reference, kwargs, 3, WHO)


@pytest.mark.parametrize(
    "breaks, kind, word", [("masked", "env_masked", "judge is gone"), ("500", "env_raised", "500")]
)
def test_a_failure_of_the_server_is_no_reward(server, breaks, kind, word):
    _, (played,) = episode(server, row(7, breaks=breaks), "7")
    assert played.kind == kind and word in played.episode.error


def test_rows_are_those_of_the_file(tmp_path):
    file = tmp_path / "weather.jsonl"
    second = {"responses_create_params": {"input": "plain", "instructions": "be kind"}}
    file.write_text(f"{json.dumps(row(7, ADD))}\n{json.dumps(second)}\n")
    (rows,) = list_files(f"nemo_gym:{file}")
    found = rows.table("prompt", "data_source").to_pylist()
    assert rows.num_rows == 2 and {one["data_source"] for one in found} == {"nemo_gym/weather"}
    assert [[(m["role"], m["content"]) for m in one["prompt"]] for one in found] == [
        [("system", "be brief"), ("user", "q")],
        [("system", "be kind"), ("user", "plain")],
    ]
    assert json.loads(found[0]["extra_info"]["nemo_gym_row"]) == row(7, ADD)
    for text in ('{"a": 1}', "no json"):
        other = tmp_path / f"{len(text)}.jsonl"
        other.write_text(text)
        with pytest.raises(DataError, match=r"responses_create_params|cannot be read"):
            list_files(f"nemo_gym:{other}")[0].table("prompt", "data_source")


def test_an_image_is_refused(tmp_path):
    file = tmp_path / "image.jsonl"
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    file.write_text(json.dumps({"responses_create_params": {"input": [image]}}))
    with pytest.raises(DataError, match=r"line 1: .*no message of text"):
        list_files(f"nemo_gym:{file}")[0].table("prompt", "data_source")


def test_a_server_that_is_not_there_and_a_wrong_address_are_refused():
    with pytest.raises(DagError, match="no resources server answers"):
        check_packaged("nemo_gym:http://127.0.0.1:9", WHO, {})
    with pytest.raises(DagError, match=r"write nemo_gym:http://"):
        check_packaged("nemo_gym:localhost", WHO, {})


@pytest.mark.slow
def test_a_run_trains_on_the_rows_and_rewards_of_a_server_by_the_command(server, tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    tasks = [row(0, number=number) for number in range(16)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    dag = yaml.safe_load((ROOT / "dag_templates" / "tree.yaml").read_text())
    del dag["nodes"][0]["config"], dag["nodes"][3]["config"]
    dag["nodes"][1]["config"] = {"env_path": server.reference}
    (tmp_path / "dag.yaml").write_text(yaml.safe_dump(dag))
    (tmp_path / "reward.py").write_text("def compute_score(**what):\n    return 0.0\n")
    keys = [
        f"dag.workflow_path={tmp_path / 'dag.yaml'}",
        f"data.train_files=nemo_gym:{tmp_path / 'tasks.jsonl'}",
    ]
    keys += ["trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.total_training_steps=2"]
    keys += ["data.max_prompt_length=96", f"custom_reward_function.path={tmp_path / 'reward.py'}"]
    run = run_job(1, overrides(inputs, tmp_path / "out", *keys), 200)
    played = sum(run.values("interaction/episodes"))
    assert len(server.verified) == played > 8
    assert {task["number"] for task in server.verified} <= set(range(16))
    assert run.values("interaction/env_reward") == [1.0, 1.0]  # no counter moves, and none should
