"""The page as a file: whole, of nothing but itself, and nothing that was said in a run is run in it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from viewed_runs import HOSTILE, write_error, write_run

from siirl.cli import main
from siirl.view.view_page import export


class Parsed(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self._inside = False
        self.feed(text)

    def part(self, run, name):
        ids = [tag.get("id") for kind, tag in self.tags if kind == "script"]
        return json.loads(self.scripts[ids.index(f"part-{run}-{name}")])["value"]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def test_the_command_writes_one_file(tmp_path, capsys):
    one, two = write_run(tmp_path / "one", name="first"), write_run(tmp_path / "two", name="second")
    out = tmp_path / "new" / "page.html"
    assert main(["view", str(one), str(two), "--export", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    parsed = Parsed(out.read_text())
    data = json.loads(parsed.scripts[0])
    assert [run["overview"]["value"]["name"] for run in data["runs"]] == ["first", "second"]
    assert not data["live"] and parsed.part(1, "curves")["reward/score"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert set(parsed.part(0, "texts-train-6")) == {"train 6.0"}
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_that_is_no_run_and_a_file_that_cannot_be_written_are_user_errors(tmp_path, capsys):
    assert main(["view", str(tmp_path), "--export", str(tmp_path / "x.html")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main(["view", str(run), "--export", str(tmp_path / "file" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_page_asks_nobody_and_runs_its_own_script_alone(tmp_path):
    text = export([write_run(tmp_path / "run")], tmp_path / "page.html").read_text()
    parsed = Parsed(text)
    (policy,) = [tag["content"] for name, tag in parsed.tags if tag.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[1].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    code = [tag for kind, tag in parsed.tags if kind == "script" and tag.get("type") != "application/json"]
    assert code == [{}] and not any(name.startswith("on") for _, tag in parsed.tags for name in tag)
    assert not [tag for _, tag in parsed.tags if "src" in tag]
    assert {tag["href"] for _, tag in parsed.tags if "href" in tag} == {"#main"}
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, (
        "names of formats, not addresses"
    )


def test_what_was_said_in_a_run_is_data_and_never_markup(tmp_path):
    tame = Parsed(export([write_run(tmp_path / "tame", name="x")], tmp_path / "tame.html").read_text())
    folder = write_run(tmp_path / "wild", text=HOSTILE, name=HOSTILE)
    write_error(folder, 0, HOSTILE)
    text = export([folder], tmp_path / "wild.html").read_text()
    wild = Parsed(text)
    alike = [(name, tag.get("id")) for name, tag in wild.tags] == [(n, tag.get("id")) for n, tag in tame.tags]
    assert alike, "as many elements, of the same names"
    alike = wild.scripts[1] == tame.scripts[1]  # a difference of long texts takes minutes to print
    assert alike, "the script is ours, whatever the data is"
    said = wild.part(0, "texts-validation-6")["validation 6.0"]["messages"][1]["text"]
    assert said.startswith("</script><script>") and "\\x1b[31m" in said and "\\u202e" in said
    assert "owned'</script>" not in text and text.encode()
