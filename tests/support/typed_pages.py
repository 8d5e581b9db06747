"""A page of the documentation as its reader follows it: files written, commands typed, their output compared.

The code blocks of such a page, in order:
- a file: its first line, or the second of a script, is a comment with its name, as `# my_reward.py`;
- `bash`: commands, typed in the folder where the block before ended. With `# refused` at its end it fails;
- `text`: what the commands above it print, shortened: these lines in this order, others between them;
  `...` stands for anything within a line.
A block without a language is looked at only. Below `<!-- trains -->` blocks take a minute, and a number in
a `text` block stands for any number.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BEGIN = """\
make quickstart                # once: makes the environment, and trains a first model in about a minute
source .venv/bin/activate      # in each new shell"""
"""The first commands of each page. The environment that they make is the one that runs the test."""
BLOCK = re.compile(r"(<!-- trains -->\n)?^```(\w*)\n(.*?)\n```$", re.M | re.S)
NAMED = re.compile(r"(?:#!.*\n)?# (\w+\.(?:py|yaml|sh))\n")
KINDS = {"bash": "commands", "text": "printed"}
NUMBER = re.compile(r"\d[\d.,]*(?:e-?\d+)?")
DONE = "\x01done"


@dataclass(frozen=True)
class Block:
    """A code block. kind: "file", "commands" or "printed"; name: of a file; trains: see above."""

    kind: str
    text: str
    name: str = ""
    trains: bool = False


def blocks(page: Path) -> list[Block]:
    """The blocks of a page below the first. AssertionError: it begins otherwise, or a block runs nowhere."""
    found: list[Block] = []
    trains = False
    for mark, language, text in BLOCK.findall(page.read_text()):
        trains = trains or bool(mark)
        if named := NAMED.match(text):
            found.append(Block("file", text, named[1], trains))
        elif language:
            assert language in KINDS, f"{page.name}: a {language} block without the name of a file:\n{text}"
            found.append(Block(KINDS[language], text, trains=trains))
    assert found[0] == Block("commands", BEGIN), page.name
    return found[1:]


def follow(page: list[Block], folder: Path, timeout_s: float) -> None:
    """Write the files and type the commands of a page in a new folder.

    AssertionError: a command failed that should not, or the reverse, or something else was printed.
    """
    typed = [block for block in page if block.kind != "printed"]
    script = [f"trap 'failed=$BASH_COMMAND' ERR\ncd {folder}"]
    for block in typed:
        if block.kind == "file":
            script.append(f"cat > {block.name} <<'END_OF_FILE'\n{block.text}\nEND_OF_FILE")
        else:
            script.append(f"failed=\n{block.text}\nprintf '%s %s\\n' '{DONE}' \"${{failed//$'\\n'/ }}\"")
    (folder / "typed.sh").write_text("\n".join(script))
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SIIRL")}
    known |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(folder / "typed.sh")],
        env=known | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    parts = re.split(rf"{DONE} (.*)\n", done.stdout)
    results = iter(zip(parts[::2], parts[1::2], strict=False))
    printed = ""
    for block in page:
        if block.kind == "commands":
            printed, failed = next(results)
            assert bool(failed) == block.text.endswith("# refused"), f"{failed}\n{printed}"
        elif block.kind == "printed":
            compare(block, printed)


def compare(block: Block, printed: str) -> None:
    """AssertionError: a line of the page was not printed, or not below the one before it."""
    lines = iter(printed.splitlines())
    for wanted in filter(None, map(str.strip, block.text.splitlines())):
        pattern = line_pattern(wanted, block.trains)
        assert any(pattern.search(line) for line in lines), f"not printed: {wanted}\n{printed}"


def line_pattern(wanted: str, any_number: bool) -> re.Pattern[str]:
    """What a line of a page stands for: spaces are of any width."""
    parts = []
    for part in wanted.split("..."):
        pieces = NUMBER.split(part) if any_number else [part]
        words = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", piece)) for piece in pieces]
        parts.append(NUMBER.pattern.join(words))
    return re.compile(".*".join(parts))
