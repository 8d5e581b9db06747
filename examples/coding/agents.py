"""mini-swe-agent, as it is installed, on the episodes of a run: its model is siirl's, its shell the sandbox.

`python agents.py RUN/listen/coder_rank_0.json` waits for the file, takes episodes, several at once, and ends
with the run. It needs the package mini-swe-agent, and nothing of siirl.
"""

import argparse
import json
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "2")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would ask the network for prices

import litellm
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

litellm.suppress_debug_info = True  # or it prints a line for each model that it has no price of


def post(url: str, key: str, body: Any) -> Any:
    """The JSON that a POST of siirl's answers."""
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(asked, timeout=3600) as answer:
        return json.load(answer)


class Sandbox(LocalEnvironment):
    """Runs commands where siirl does, in the place of this machine."""

    def __init__(self, session: dict[str, Any]):
        super().__init__()
        self._session = session

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command of the agent."""
        body = {"command": action["command"], **({"time_s": timeout} if timeout else {})}
        ran = post(f"{self._session['url']}/exec", self._session["api_key"], body)
        late = "The command was killed: its time was over." if ran["timed_out"] else ""
        output = {"output": ran["output"], "returncode": ran["exit_code"], "exception_info": late}
        self._check_finished(output)
        return output


def play(session: dict[str, Any], config: dict[str, Any]) -> None:
    """One episode: the agent works on the task, until it submits or its steps are used up."""
    said = dict(config.get("model", {}))
    kwargs = {**said.pop("model_kwargs", {}), "api_base": session["base_url"], "api_key": session["api_key"]}
    made = LitellmTextbasedModel if said.pop("model_class", "") == "litellm_textbased" else LitellmModel
    said |= {"model_name": "openai/coder", "model_kwargs": kwargs, "cost_tracking": "ignore_errors"}
    agent = {key: value for key, value in config["agent"].items() if key not in ("mode", "confirm_exit")}
    DefaultAgent(made(**said), Sandbox(session), **agent).run(session["task"]["raw_prompt"][-1]["content"])


def work(file: Path, config: dict[str, Any]) -> None:
    """Play one episode after the other, until the run is over."""
    while not file.exists():
        time.sleep(0.5)
    run = json.loads(file.read_text())
    while True:
        try:
            answer = post(f"{run['url']}/session", run["token"], {"wait_s": 30})
        except OSError:  # nobody listens: the run has ended
            return
        if answer["over"]:
            return
        if (session := answer["session"]) is None:
            continue  # the run trains
        try:
            play(session, config)
        except Exception as error:  # noqa: BLE001 - the edge to the agent: what it has done counts
            print(f"agent: {type(error).__name__}: {error}"[:500], flush=True)
        try:
            post(f"{session['url']}/end", session["api_key"], {})
        except urllib.error.HTTPError:  # the episode is over already
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="RUN_FOLDER/listen/NODE_rank_N.json")
    parser.add_argument("--agents", type=int, default=4, help="that work at once")
    parser.add_argument("--config", default="mini.yaml", help="of mini-swe-agent: a name, or a file")
    args = parser.parse_args()
    config = yaml.safe_load(get_config_path(args.config).read_text())
    workers = [threading.Thread(target=work, args=[args.file, config]) for _ in range(args.agents)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
