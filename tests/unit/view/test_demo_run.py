"""`siirl view --demo`: the recorded run that comes with siirl."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from importlib.resources import files

from siirl.cli import main
from siirl.view.view_command import DEMO


def test_a_demo_that_is_terminated_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "siirl.cli", "view", "--demo"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        viewing = subprocess.Popen(
            command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )
        assert viewing.stdout.readline().startswith("http://127.0.0.1")
        assert list(tmp_path.glob("siirl_demo_*"))
        viewing.send_signal(number)
        viewing.communicate(timeout=60)
        assert viewing.returncode == 128 + number and not list(tmp_path.iterdir())


def test_the_demo_is_a_whole_run_of_several_agents(tmp_path):
    out = tmp_path / "page.html"
    assert main(["view", "--demo", "--export", str(out)]) == 0
    elements = re.findall(
        r'<script type="application/json" id="([\w-]+)">(.*?)</script>', out.read_text(), re.DOTALL
    )
    data, run = json.loads(dict(elements)["data"]), {}
    for name, text in elements[1:]:
        part = json.loads(text)
        run[name.removeprefix("part-0-")] = part["value"]
        assert part["notes"] == [], name
    (about,) = (one["overview"]["value"] for one in data["runs"])
    assert (about["state"], about["step"], about["total"]) == ("ended", 30, 30)
    assert {node["agent"] for node in run["dag"]["nodes"]} == {0, 1} and run["dag"]["svg"]
    assert [bound["step"] for bound in run["timeline"]["bounds"]] == [28, 29, 30]
    assert any(edge["bytes"] for edge in run["timeline"]["edges"]["30"]), "rows moved between its ranks"
    listed = {(one["kind"], one["step"]) for one in run["episodes"]}
    assert {step for kind, step in listed if kind == "validation"} == {0, 10, 20, 30}
    groups = [one["prompt"] for one in run["episodes"] if (one["kind"], one["step"]) == ("train", 21)]
    assert groups.count(groups[0]) == 10, "a whole group lies side by side"
    said = [one for kind, step in listed for one in run[f"texts-{kind}-{step}"].values()]
    assert len(said) == len(run["episodes"])
    turns = [message for episode in said for message in episode["messages"]]
    assert any(message["tool"] for message in turns) and {0, 1} <= {message["agent"] for message in turns}
    trained = [message["tokens"] for message in turns if "tokens" in message]
    assert {"own", "team", "env", "advantage"} <= trained[0]["credit"].keys() and trained[0]["texts"]
    assert any(advantage for one in trained for advantage in one["numbers"]["advantage"])
    reward = run["curves"]["agent_0/val/reward/mean"]["values"]
    assert reward[-1] > reward[0], "it has learnt something"


def test_the_demo_is_small_and_names_no_place_of_its_making():
    data = files("siirl.view").joinpath(DEMO)
    assert len(data.read_bytes()) < 1 << 20
    with data.open("rb") as file, tarfile.open(fileobj=file) as archive:
        for entry in archive.getmembers():
            content = archive.extractfile(entry)
            assert entry.isfile() and content is not None
            if not entry.name.endswith(".gz"):
                assert not re.findall(rb"(?<![\w.:/~-])/(?!usr/)\w+/\w[^\s\"',]*", content.read()), entry.name
