"""Clients that come to a run by themselves, from anywhere, and play its episodes (serve.listen).

`python client.py ADDRESS_FILE` waits for the file, asks the run for episodes, several at once, and plays each
as agent.py does; it ends when the run is over. It knows nothing of siirl but the two fields of the file.
"""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

from openai import APIConnectionError, OpenAI

from examples.agents_elsewhere.agent import shop


def door(file: Path) -> OpenAI:
    """A client with the address and the token of the run, as soon as it has written them."""
    while not file.exists():
        time.sleep(0.5)
    found = json.loads(file.read_text())
    return OpenAI(base_url=found["base_url"], api_key=found["token"])


def work(file: Path) -> None:
    """Play one episode after the other, until the run is over."""
    run = door(file)
    while True:
        try:
            answer: Any = run.post("/session", body={"wait_s": 30}, cast_to=object)
        except APIConnectionError:  # nobody listens: the run has ended, or starts again elsewhere
            return
        if answer["over"]:
            return
        if (session := answer["session"]) is None:
            continue  # the run trains
        client = run.with_options(base_url=session["base_url"], api_key=session["api_key"])
        client.post("/reward", body={"reward": shop(client, session["task"])}, cast_to=object)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="RUN_FOLDER/listen/NODE_rank_N.json")
    parser.add_argument("--clients", type=int, default=4, help="that play at once")
    args = parser.parse_args()
    workers = [threading.Thread(target=work, args=[args.file]) for _ in range(args.clients)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
