"""The page in a real browser: what it shows, also of hostile text. Skipped where there is no browser."""

import json
import re
import shutil
import subprocess
import threading

import pytest
from page_browser import opened_tab
from viewed_runs import HOSTILE, write_error, write_run

from siirl.observe.position import record_end
from siirl.view.page_server import PageServer
from siirl.view.view_page import export, read_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 200

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(LIMIT_S + 40)]


@pytest.fixture
def dom(tmp_path):
    """Gives the elements that a browser makes of a page's address."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: the page was not opened in a browser")

    def opened(address: str) -> str:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
        done = subprocess.run(
            [browser, *flags, address], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)

    return opened


EVERY_SECTION = """
(async () => { for (const item of SECTIONS) {
  await show(item.id);
  await page.written;
  if (item.id === "step") {
    const scrub = document.getElementById("scrub");
    scrub.value = 0.3 * scrub.max;
    scrub.dispatchEvent(new Event("input"));
  }
  if (item.id === "curves") {
    const kinds = document.querySelectorAll("#panel .bar select");
    kinds[1].value = "time"; kinds[1].dispatchEvent(new Event("change"));
    kinds[2].value = "log"; kinds[2].dispatchEvent(new Event("change"));
    page.state.zoom = [5, 9];
    redraw();
    const look = { agent: "", window: 1, across: "time", log: true, zoom: page.state.zoom };
    const table = csvOf([["reward/score", linesOf("reward/score", look)]]);
    document.getElementById("panel").append(make("pre", { id: "table" }, table));
  }
  if (item.id === "config") {
    const beside = [...document.querySelectorAll("#panel .bar select")].pop();
    beside.value = "1";
    beside.dispatchEvent(new Event("change"));
    await new Promise(done => setTimeout(done, 50));
    await page.written;
  }
  if (item.id === "conversations") {
    const beside = document.querySelector("#episodes details select");
    beside.selectedIndex = 1;
    beside.dispatchEvent(new Event("change"));
    await new Promise(done => setTimeout(done, 50));
  }
  const copy = document.getElementById("panel").cloneNode(true);
  copy.id = "copy-" + item.id;
  document.body.append(copy);
  if (item.id === "conversations") {
    for (const look of ["groups", "flat", "table", "length"]) {
      const [shown] = document.querySelectorAll("#panel .bar select");
      shown.value = look === "flat" ? "groups" : look;
      shown.dispatchEvent(new Event("change"));
      await page.written;
      if (look === "flat") document.getElementById("go-next").click();
      const heads = [...document.querySelectorAll(".sort")];
      if (look === "table") heads.find(head => head.textContent === "tokens").click();
      await page.written;
      const copy = document.getElementById("panel").cloneNode(true);
      copy.id = "copy-" + look;
      document.body.append(copy);
    }
  }
} })();
"""


def tell_groups(folder):
    """Samples of the last step: a prompt whose responses differ, and one whose rewards are equal."""
    about = {
        "step": 6,
        "node": "agent_0.rollout",
        "data_source": HOSTILE,
        "prompt": "1+3?",
        "ground_truth": "4",
    }
    said = {"reasoning": HOSTILE, "answer": "four", "calls": [{"name": HOSTILE, "arguments": {}}]}
    rows = [
        {"sample_index": prompt, "score": score, "response": HOSTILE, "response_length": length} | about
        for prompt, score, length in ((6, 0.0, 9), (6, 1.0, 5), (6, 0.5, 7), (8, 1.0, 3), (8, 1.0, 2))
    ]
    lines = map(json.dumps, [rows[0] | {"said": said}, *rows[1:]])
    (folder / "rollouts" / "train" / "step_6.jsonl").write_text("\n".join(lines) + "\n")


def retell(folder, more):
    """Its metrics with more of them, as if a step had taken two seconds."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = (json.dumps(record | {"time_s": 1000 + 2 * record["step"]} | more) for record in records)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_every_section_shows_the_run_and_no_text_of_it_is_markup(tmp_path, dom, monkeypatch):
    folder = write_run(tmp_path / "run", text=HOSTILE)
    added = ["reward/part/form", "reward/part/right", "val/reward/part/right"]
    retell(folder, {"actor/entropy": 1.0} | dict.fromkeys(reversed(added), 0.5))
    tell_groups(folder)
    write_error(folder, 0, HOSTILE)
    record_end(folder, "id", "failed", HOSTILE)
    job = json.loads((folder / "job.json").read_text())
    part = ["agent_0.actor", HOSTILE, 3 << 30]
    phase = {
        "node": HOSTILE,
        "ranks": "0-1",
        "tensors": 3 << 30,
        "device": 4 << 30,
        "host": 0,
        "parts": [part],
    }
    job["memory_estimate"] = {"device_gib": 8, "assumed": True, "phases": [phase]}
    (folder / "job.json").write_text(json.dumps(job))
    second = write_run(tmp_path / "second", name="other")
    retell(second, {})
    monkeypatch.setattr("siirl.view.view_page.LAST_WORDS", "start();\n" + EVERY_SECTION)
    shown = dom(export([folder, second], tmp_path / "page.html").as_uri())
    run = read_run(folder)
    parts = dict(re.findall(r'id="copy-(\w+)"(.*?)(?=id="copy-|</body>)', shown, flags=re.DOTALL))
    assert "6 of 6" in re.sub("<[^>]*>", "", parts["overview"]) and "failed" in parts["overview"]
    assert 'data-metric="reward/score"' in parts["curves"] and parts["curves"].count("<polyline") >= 4
    first = ["reward/score", *added, "actor/entropy"]
    assert re.findall('data-metric="([^"]*)"', parts["curves"])[:5] == first
    assert sorted(re.findall('data-last="([^"]*)"', parts["overview"])) == sorted(first)
    assert parts["overview"].count('class="spark"') == 5, "what is optimised first, each with its curve"
    assert "<details" in parts["overview"] and "trainer.token=..." in parts["overview"], "the command, folded"
    axis = re.findall('class="axis"[^>]*>([^<]*)', parts["curves"])
    assert any(text.endswith(" s") for text in axis), "wall-clock time"
    table = re.search('id="table">(.*?)</pre>', parts["curves"], re.S)[1].splitlines()
    assert table[0] == '"metric","run","agent","step","seconds","value"'
    assert [line.split(",")[0] for line in table[1:]] == ['"reward/score"'] * (len(table) - 1)
    times = [float(line.split(",")[4]) for line in table[1:] if line]
    assert len(times) > 1 and all(5 <= time <= 9 for time in times), (
        "the stretch that was drawn, of both runs"
    )
    assert re.findall('data-key="([^"]*)"', parts["config"]) == ["trainer.experiment_name"]
    color: dict[str, str] = {}
    for fill, name in re.findall(
        'fill="(#[^"]*)"[^>]*data-name="([^"]*)"', parts["step"] + parts["timeline"]
    ):
        if name in [node["name"] for node in run["dag"]["nodes"]]:
            assert color.setdefault(name, fill) == fill, "one colour for a node in all sections"
    assert set(color) == {node["name"] for node in run["dag"]["nodes"]}
    assert parts["dag"].count("data-node=") == len(run["dag"]["nodes"]), "all boxes are coloured"
    assert parts["dag"].count('data-state="failed"') == 1, "rank 0 has left an error in the first node"
    assert parts["timeline"].count('class="span"') >= len(run["dag"]["nodes"]) * 3 * 2
    bound = run["timeline"]["bounds"][-1]
    assert bound["text"].split(":")[0] in parts["step"] and 'id="path"' in parts["step"]
    assert parts["step"].count('class="span"') == len(bound["path"]) and "32 rows" in parts["step"]
    running = re.search(r'id="now"[^>]*>([^<]*)', parts["step"])
    assert running and re.search(r": \w+ on 0, 1$", running[1]), "what runs at the time that was chosen"
    assert all(words in parts["memory"] for words in ('id="memory-bars"', "4 GiB", "assumed"))
    assert parts["conversations"].count('class="pair"') == 1 and "step 1, reward" in parts["conversations"]
    assert parts["conversations"].count("<details data-id") == 8 and "2+2?" in parts["conversations"]
    assert parts["groups"].count('class="sample"') == 3 and "1 of 2" in parts["groups"]
    scores = re.findall(r'class="reward[^"]*">reward ([^<]*)<', parts["groups"])
    assert scores == ["+1", "+0.5", "0"], "a whole group, the best first"
    assert parts["groups"].count(">prompt<") == 1 and 'id="flat"' not in parts["groups"]
    assert "<summary>reasoning, " in parts["groups"] and 'class="call"' in parts["groups"]
    assert parts["flat"].count('class="sample"') == 2 and 'id="flat"' in parts["flat"]
    tokens = [
        re.findall("<td>(.*?)</td>", row)[4] for row in re.findall("<tr data-row.*?</tr>", parts["table"])
    ]
    assert [one for one in tokens if one != "-"] == ["9", "7", "5", "3", "2"], "the longest first"
    said = re.findall('<td class="said">([^<]*)', parts["table"])
    assert len(said) == len(tokens) and all(said), "what each said last"
    assert parts["length"].count('class="dot"') == 5
    assert "hello from rank 1" in parts["health"] and "&lt;img src=x" in parts["health"]
    assert (
        "<title>owned" not in shown
        and "<img" not in shown
        and "onerror=" not in re.sub("&lt;.*?&gt;", "", shown)
    )


def test_an_exported_page_opens_at_a_section_by_its_address(tmp_path, dom):
    out = export([write_run(tmp_path / "run")], tmp_path / "page.html")
    shown = dom(f"{out.as_uri()}#conversations")
    assert 'id="episodes"' in shown and "four in step 6" in shown
    assert re.search(r'<button[^>]*id="tab-conversations"[^>]*aria-selected="true"', shown)


@pytest.fixture
def served(tmp_path):
    with PageServer([write_run(tmp_path / "run", text=HOSTILE)]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


FETCHED = "fetch({!r}).then(answer => answer.text()).then(text => 'read: ' + text, error => 'refused')"
BLOCKED = """
(async () => {
  const said = [];
  document.addEventListener("securitypolicyviolation", event => said.push(event.effectiveDirective));
  const script = document.createElement("script");
  script.textContent = "window.owned = 1";
  document.body.append(script);
  const box = document.createElement("div");
  box.innerHTML = "<img src=x onerror='window.owned = 2'><a href='javascript:window.owned = 3'>a</a>";
  document.body.append(box);
  box.querySelector("a").click();
  await fetch("http://127.0.0.1:9/").catch(() => 0);
  await new Promise(done => setTimeout(done, 300));
  return [window.owned ?? 0, [...new Set(said)].sort()];
})()
"""


def test_a_script_that_came_into_the_served_page_would_not_run_and_no_other_site_reads_it(tmp_path, served):
    """The second wall, behind text that is no markup; other origins, by a name for this address and fetch."""
    name = f"http://evil.example:{served.server_port}/{served.token}/"
    with opened_tab(tmp_path / "profile", "--host-resolver-rules=MAP evil.example 127.0.0.1") as tab:
        tab.open(served.url)
        tab.wait_for("document.title.length > 0 && !!document.getElementById('panel')")
        owned, blocked = tab.value(BLOCKED)
        assert owned == 0
        assert {"connect-src", "img-src", "script-src-elem"} <= set(blocked)
        tab.open(name)  # a name of theirs that leads here
        tab.wait_for("document.body && document.body.innerText.length > 0")
        assert tab.value("document.body.innerText") == "This address serves 127.0.0.1 alone."
        tab.open(f"http://localhost:{served.server_port}/nothing")  # another origin than 127.0.0.1
        tab.wait_for("document.body && document.body.innerText.length > 0")
        for path in ("", "part/0/overview"):
            assert tab.value(FETCHED.format(served.url + path)) == "refused"
        own = f"http://localhost:{served.server_port}/{served.token}/part/0/overview"
        assert tab.value(FETCHED.format(own)).startswith("read: {"), "what is refused is read where it may be"
