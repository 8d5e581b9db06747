"""The documentation as a site: every link leads somewhere, the list of keys is true, guides are short."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from page_browser import opened_tab

from siirl.config.resolve import FOLLOWS
from siirl.config.root import all_keys
from siirl.config.values import show

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built without a warning."""
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
        elif path.name not in ("docs", "outputs"):
            (folder / path.name).symlink_to(path)
    return make_site(folder)


def make_site(folder: Path) -> Path:
    """`make site` in a copy of the repository, whose packages are installed."""
    command = ["make", "-o", ".venv/.python", "site", "UV=true", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "outputs/site"


@pytest.mark.slow
def test_the_site_has_every_page_and_needs_no_network(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    index = (site / "index.html").read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', index)


def searched() -> dict[str, list[str]]:
    """What docs/conf.py promises: words of readers -> the pages that the search shows first."""
    spec = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs/conf.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module.SEARCHED


def test_a_page_that_the_search_shows_first_says_the_word():
    for word, pages in searched().items():
        for page in pages:
            text = (ROOT / "docs" / f"{page}.md").read_text()
            assert word.lower() in " ".join(text.lower().split()), f"{page}: {word}"


@pytest.mark.slow
def test_a_second_build_keeps_the_words_of_the_search_and_drops_pages_that_are_gone(site):
    def entries() -> dict[str, list]:
        return json.loads((site / "searchindex.js").read_text()[len("Search.setIndex(") : -1])["indexentries"]

    before, docs = entries(), site.parents[1] / "docs"
    assert before.keys() >= {word.lower() for word in searched()}
    (site / "older_page.html").write_text("of a page that is gone")
    (docs / "lora.md").write_text((docs / "lora.md").read_text() + "\nOne more line.\n")
    make_site(site.parents[1])
    assert entries() == before
    assert not (site / "older_page.html").exists()


ASKED = (
    *("colocated", "staleness", "packing", "LoRA", "GRPO", "checkpoint", "weight sync", "reward function"),
    *("multi-turn", "async", "off-policy", "sequence packing", "early stopping", "OOM"),
)


@pytest.mark.slow
def test_the_search_shows_the_page_of_a_word_among_the_first_three(site, tmp_path):
    assert set(ASKED) <= set(searched())
    rows = "[...document.querySelectorAll('#search-results ul.search > li > a')]"
    with opened_tab(tmp_path, "--allow-file-access-from-files") as tab:
        for word, pages in searched().items():
            tab.open(f"{(site / 'search.html').as_uri()}?q={quote(word)}")
            tab.wait_for(f"document.querySelector('#search-results') && {rows}.length > {len(pages) - 1}", 20)
            first = tab.value(f"{rows}.slice(0, 3).map(row => row.getAttribute('href').split('.html')[0])")
            assert set(pages) <= set(first), f"{word}: {first}"


def test_the_keys_that_matter_have_the_defaults_of_the_schema():
    rows = re.findall(
        r"^\| (`\S+`(?:, `\S+`)*) \| ([^|]*) \| [^|]+ \|$", (ROOT / "docs/keys.md").read_text(), re.M
    )
    stated = {}
    for names, defaults in rows:
        names, defaults = re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", defaults)
        assert len(defaults) in (0, len(names)), names
        stated |= dict(zip(names, defaults or [None] * len(names), strict=True))
    assert 30 <= len(stated) <= 45
    for name, default in stated.items():
        key = all_keys()[name]
        auto = "auto" if key.rule.auto else show(key, key.default)
        assert default in (None, FOLLOWS.get(name, auto)), name


GUIDES = {  # page -> most words; what is looked up, and what was measured, is on other pages
    "install": 350,
    "quickstart": 550,
    "your_task": 1170,
    "data": 1500,
    "rewards": 1550,
    "given_responses": 1450,
    "distillation": 1650,
    "algorithms": 1250,
    "multi_agent": 2100,
    "environments": 1500,
    "agents_elsewhere": 1700,
    "async": 1400,
    "vision": 1000,
    "lora": 800,
    "backends": 2000,
    "launch": 1600,
    "view": 1500,
    "checkpoints": 1600,
    "migration": 1300,
    "tuning": 2230,
    "security": 1900,
    "troubleshooting": 1500,
}
FIRST_SCREEN = 15
"""Lines of a page within which its reader finds a command to begin with."""


def words(page: Path) -> int:
    return len(page.read_text().split())


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_a_task_with_a_command_in_its_first_screen_and_what_goes_wrong(name):
    page = ROOT / "docs" / f"{name}.md"
    lines = page.read_text().splitlines()
    assert re.match(r"# \S+( \S+){1,11}$", lines[0]), lines[0]
    assert "```bash" in lines[:FIRST_SCREEN]
    assert re.search(r"^## .*What goes wrong", page.read_text(), re.M)
    assert words(page) <= GUIDES[name], "shorten it, or move a table to docs/evidence/ or a reference"


def test_the_site_lists_the_guides_apart_from_the_reference():
    index = (ROOT / "docs/index.md").read_text()
    begin = index.partition(":caption: Reference")[0]
    listed = set(re.findall(r"^(?:[^`\n]+ <)?(\w+)>?$", begin, re.M))
    assert listed == set(GUIDES), "a page of the navigation is a guide (GUIDES), or stands below Reference"


def test_there_are_at_most_22_guides_of_40000_words_with_the_first_page_and_tutorials():
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in GUIDES)]
    assert len(GUIDES) <= 22
    assert sum(map(words, [*pages, *(ROOT / "docs" / "tutorials").glob("*.md")])) <= 40_000


@pytest.mark.parametrize(
    "word", ["staleness", "colocated", "disaggregated", "sequence packing", "weight sync"]
)
def test_the_first_page_says_it_in_the_words_of_the_field(word):
    assert word in (ROOT / "README.md").read_text()


def test_the_first_page_is_one_screen():
    assert words(ROOT / "README.md") <= 600


@pytest.mark.parametrize(
    "word", ["early stopping", "out of memory", "OOM", "off-policy", "Asynchronous rollouts"]
)
def test_a_word_that_readers_search_for_is_on_a_guide(word):
    assert any(word in (ROOT / "docs" / f"{name}.md").read_text() for name in GUIDES)


MEASURED = re.compile(
    r"\b\d+\.\d+x\b|within \d+%|\d times as|[Ff]rom \d[\d.]*%? to \d[\d.]*|\b\d[\d,]* tokens (?:a|per) second"
    r"|\b\d[\d.]* (?:ms|s|GiB)\b[^.|]*instead of \d|\b\d+\.\d+ s\b"
)
REPEATED_BY = {"environments": "bash examples/environments/run.sh"}
"""Guides whose numbers are those of an example that a reader repeats in minutes, on a CPU."""


def unproven(page: Path) -> list[str]:
    """Sentences and rows of tables with a measured number, and without a link to its evidence."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\||\s*- |#)", text):
        sentences = re.split(r"(?<=[.:;]) (?=[A-Z*`\[])", " ".join(block.split()))
        proven = [bool(re.search(r"\]\((docs/)?(evidence/|scaling\.md)", one)) for one in sentences]
        found += [
            one
            for one, link in zip(sentences, proven, strict=True)
            if not link and MEASURED.search(re.sub(r"`[^`]*`", "", one))
        ]
    return found


@pytest.mark.parametrize("name", ["../README", *GUIDES])
def test_a_measured_number_of_a_guide_links_to_its_evidence(name):
    page = ROOT / "docs" / f"{name}.md"
    if name in REPEATED_BY:
        assert REPEATED_BY[name] in page.read_text()
        return
    assert unproven(page) == [], "link the number to docs/evidence/, or leave it out"


def test_a_measured_number_without_a_link_is_found(tmp_path):
    page = tmp_path / "guide.md"
    page.write_text("A step is 1.3x faster. It took 4 s instead of 42. See [it](evidence/gpu.md).\n")
    assert len(unproven(page)) == 2


def measured_tables(page: Path) -> list[tuple[str, str]]:
    """(section, first row) of each table of a page that has numbers in a third of its cells or more."""
    found = []
    for section in re.split(r"^(?=##+ )", page.read_text(), flags=re.M):
        for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
            rows = table.splitlines()[2:]
            cells = [cell.strip() for row in rows for cell in row.split("|")[2:-1]]
            numbers = [cell for cell in cells if re.match(r"[~<]?\d[\d,.]*($|[ ,%x(])", cell)]
            if len(numbers) >= max(2, len(cells) // 3):
                found.append((section, rows[0]))
    return found


@pytest.mark.parametrize("page", sorted((ROOT / "docs/evidence").glob("*.md")), ids=lambda page: page.stem)
def test_a_measured_table_names_the_file_of_its_numbers_or_says_that_there_is_none(page):
    for section, row in measured_tables(page):
        assert re.search(r"\w\.json\b", section) or re.search(r"\bno\s+file\b", section), row
    for name in re.findall(r"`(?:benchmarks/results/)?(\w[\w.-]*\.json)`", page.read_text()):
        kept = (ROOT / "benchmarks/results" / name).is_file()
        assert kept or name in FILES_OF_A_RUN, f"benchmarks/results has no {name}"


FILES_OF_A_RUN = ("job.json",)
