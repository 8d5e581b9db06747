"""What models and users write reaches terminals, files and reports as text that nothing obeys."""

import json
import logging
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from siirl.launch.failure import describe_exception, read_failure, write_failure
from siirl.observe.loggers import make_sinks
from siirl.observe.logs import last_lines
from siirl.observe.printable import printable
from siirl.observe.sinks import RunInfo, samples_text
from siirl.rewards.sample import describe
from siirl.show.conversation_text import ShownEpisode, episode_text, shown_text

EVIL = "red \x1b[31m title \x1b]0;x\x07 back \x08\x08 c1 \x9b2J bidi \u202e half \ud83d, nul \x00 end"
SHOWN = r"red \x1b[31m title \x1b]0;x\x07 back \x08\x08 c1 \x9b2J bidi \u202e half \ud83d, nul \x00 end"


def test_every_character_is_either_harmless_or_an_escape_that_names_it():
    for code in range(0x110000):
        char = chr(code)
        text = printable(char)
        if text == char:
            assert unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp") or char in "\n\t", hex(code)
            assert unicodedata.bidirectional(char) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI")
            char.encode()
        else:
            assert text.isprintable() and text.isascii(), hex(code)
            assert text.encode().decode("unicode_escape") == char
    plain = "Größe 字\u3000幅 \U0001f469\u200d\U0001f52c\tx\na\u00a0b"
    assert printable(plain) is plain
    assert printable("a\r\nb\rc") == "a\nb\\rc"
    assert printable(EVIL) == SHOWN


@pytest.fixture
def rows():
    info = {"judge": EVIL, f"key {EVIL}": 1.0}
    return [{"prompt": EVIL, "response": "字 " + EVIL, "score": 1.0, **info, "list": [EVIL]}]


def test_samples_reach_files_and_tensorboard_as_printable_text(tmp_path, monkeypatch, rows):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    sinks = make_sinks(["tensorboard"], RunInfo(tmp_path, "p", "e", 3, 0, {}, {}))
    sinks.text(1, "train", rows)
    sinks.close()
    written = (tmp_path / "rollouts/train/step_1.txt").read_text(encoding="utf-8")
    assert written.count(SHOWN) == 4 and written == printable(written) and "字" in written
    lines = (tmp_path / "rollouts/train/step_1.jsonl").read_bytes()
    assert b"\x1b" not in lines and json.loads(lines) == {"step": 1, **rows[0]}
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    text = events.Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.count(SHOWN) == 4 and text == printable(text)


def test_what_breaks_a_line_elsewhere_breaks_none_of_a_sample():
    text = samples_text([{"prompt": "a\x0cb\u2028c\x85d"}])
    assert text == "[0] \n  prompt:\n    a\\x0cb\\u2028c\\x85d\n"


def test_the_text_of_a_message_is_printable():
    assert shown_text(f"a {EVIL}") == f"a {SHOWN}" and shown_text([EVIL]) == str([EVIL])


def test_conversations_are_printable():
    message = {"speaker": EVIL, "content": EVIL, "error": EVIL, "reward": 1.0}
    text = episode_text(ShownEpisode(EVIL, [message], {0: 1.0}, note=EVIL, ended=EVIL))
    assert text == printable(text) and text.count(SHOWN) >= 4


def test_failure_reports_are_printable(tmp_path):
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        failure = describe_exception(error, 0, None)
        assert describe(error).startswith(f"ValueError: {SHOWN} (at ")
    write_failure(tmp_path / "failure.json", failure)
    read = read_failure(tmp_path / "failure.json")
    assert read == failure and read.error == f"ValueError: {SHOWN}"
    assert SHOWN in read.traceback and read.traceback == printable(read.traceback)
    (tmp_path / "log").write_bytes(b"before\n" + EVIL.encode("utf-8", "surrogatepass") + b"\n")
    assert all(line == printable(line) for line in last_lines(tmp_path / "log"))


def test_log_lines_are_printable(tmp_path):
    code = (
        "import logging, sys; from pathlib import Path; from siirl.observe.logs import setup_logging\n"
        "setup_logging(0, Path(sys.argv[1]))\n"
        "logging.getLogger('x').warning('the answer is %s', '\\x1b[2J')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, check=True, text=True
    )
    assert done.stderr.endswith(r"W x: the answer is \x1b[2J" + "\n")
    assert logging.getLogger("x").handlers == []


def test_a_surrogate_in_what_a_reward_function_returns_reaches_the_files(tmp_path):
    """The user's way: a function, its process, the scorer's rows, the sample files."""
    from fixtures_tiny import make_tiny_tokenizer
    from scored_rows import rows_of
    from transformers import AutoTokenizer

    from siirl.config import load_config
    from siirl.data.rows import objects
    from siirl.rewards.scorer import RewardScorer

    (tmp_path / "own.py").write_text(
        "def compute_score(**given):\n    return {'score': 1, 'why': 'half \\ud83d', '\\ud83d': 2.0}\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path / "tokenizer", vocab=110))
    path = f"custom_reward_function.path={tmp_path / 'own.py'}"
    scorer = RewardScorer(load_config(["trainer.n_gpus_per_node=1", path]), tokenizer)
    try:
        scored = scorer.submit(rows_of(tokenizer, ["1"]), by_domain=True).result()
    finally:
        scorer.close()
    (info,) = objects(scored, "reward_info")
    assert info == {"why": "half \ud83d", r"\ud83d": 2.0}
    assert all(name == printable(name) for name in scorer.drain_metrics().values())
    sinks = make_sinks([], RunInfo(Path(tmp_path), "p", "e", 3, 0, {}, {}))
    sinks.text(1, "train", [{"response": "1", **info}])
    sinks.close()
    assert r"half \ud83d" in (tmp_path / "rollouts/train/step_1.txt").read_text()
