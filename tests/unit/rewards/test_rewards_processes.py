"""Whatever processes and descriptors a reward function touches, each sample gets its own score."""

import contextlib
import textwrap
import time

import psutil
import pytest
from fixtures_tiny import make_tiny_tokenizer
from scored_rows import rows_of
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.rows import objects
from siirl.errors import RewardError
from siirl.rewards import scoring_process
from siirl.rewards.scorer import RewardScorer

pytestmark = pytest.mark.heavy

FORKS = {
    "the child returns": "if os.fork() == 0: return 500.0",
    "the child returns later": """
        if os.fork() == 0:
            time.sleep(0.3)
            return 500.0
    """,
    "the child raises": "if os.fork() == 0: raise ValueError('in the child')",
    "the child exits": "if os.fork() == 0: sys.exit(0)",
    "the child exits with a text": "if os.fork() == 0: sys.exit('enough')",
    "the child is interrupted": "if os.fork() == 0: raise KeyboardInterrupt",
    "the child leaves at once": "if os.fork() == 0: os._exit(3)",
    "the child forks and both return": "if os.fork() == 0: return 500.0 + os.fork()",
    "a daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 4096)
                time.sleep(0.2)
            sys.exit(0)
    """,
    "a terminal": """
        child, terminal = os.forkpty()
        if child == 0: return 500.0
        os.close(terminal)
    """,
    "a pool": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
    """,
    "a process of multiprocessing that exits": """
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(0,))
        process.start()
        process.join()
    """,
}
DESCRIPTORS = {
    "writes 3 bytes to every one": """
        for number in range(3, 300):
            with contextlib.suppress(OSError): os.write(number, b"abc")
    """,
    "writes a length to every one": """
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError): number > 2 and os.write(number, b"\\0\\0\\0\\7")
    """,
    "writes an answer to every one": """
        answer = b'{"outcome": {"score": 500.0}, "last": false}'
        for number in range(3, 300):
            with contextlib.suppress(OSError):
                os.write(number, len(answer).to_bytes(4, "big") + answer)
    """,
    "closes every one": "os.closerange(3, 4096)",
    "puts another in the place of every one": """
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3, 300):
            if number != null: os.dup2(null, number)
    """,
    "reads what is there from every one": """
        for number in range(3, 300):
            with contextlib.suppress(OSError):
                os.set_blocking(number, False)
                os.read(number, 1 << 20)
    """,
    "a thread writes to every one": """
        import threading
        def spoil():
            while True:
                for number in range(3, 100):
                    with contextlib.suppress(OSError): os.write(number, b"abc")
                time.sleep(0.001)
        if threading.active_count() == 1:
            threading.Thread(target=spoil, daemon=True).start()
    """,
}
MODULE = """
    import contextlib, os, sys, time

    def strange(solution_str):
    {deed}

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if int(solution_str) % 3 == 0:
            given = strange(solution_str)
            if given is not None: return given
        return float(solution_str)
"""
BATCH = """
    import contextlib, os, sys, time

    def strange():
    {deed}

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        given = strange()
        if given is not None: return [given] * len(solution_strs)
        return [float(text) for text in solution_strs]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=110))


@pytest.fixture
def scored(tmp_path, tokenizer):
    """Score texts by a module; on two workers that take several samples at a time."""
    with contextlib.ExitStack() as stack:

        def score(code, texts, *overrides):
            (tmp_path / "own.py").write_text(textwrap.dedent(code))
            keys = ["trainer.n_gpus_per_node=1", "reward_model.num_workers=2", *overrides]
            keys += [f"custom_reward_function.path={tmp_path / 'own.py'}"]
            scorer = RewardScorer(load_config(keys), tokenizer)
            stack.callback(scorer.close)
            scorer._pool._chunk = 4
            rows = scorer.submit(rows_of(tokenizer, texts, source="any")).result(90)
            return rows["score"].tolist(), objects(rows, "reward_info")

        yield score


def with_deed(module, deed):
    return textwrap.dedent(module).format(deed=textwrap.indent(textwrap.dedent(deed).strip("\n"), "    "))


TEXTS = [str(number) for number in range(24)]


@pytest.mark.parametrize("deed", [*FORKS.values(), *DESCRIPTORS.values()], ids=[*FORKS, *DESCRIPTORS])
def test_each_sample_has_its_own_score_whatever_its_function_forks_or_writes(scored, deed):
    scores, infos = scored(with_deed(MODULE, deed), TEXTS)
    assert scores == [float(text) for text in TEXTS]
    assert infos == [{}] * len(TEXTS)


@pytest.mark.parametrize("what", ["the child returns", "the child exits", "a thread writes to every one"])
def test_each_sample_of_a_batch_has_its_own_score(scored, what):
    code = with_deed(BATCH, (FORKS | DESCRIPTORS)[what])
    scores, _ = scored(code, TEXTS, "reward_model.reward_manager=batch")
    assert scores == [float(text) for text in TEXTS]


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise ValueError('in the child')"])
def test_a_module_that_forks_when_it_is_imported_is_one_worker(scored, end):
    code = f"import os, sys\nif os.fork() == 0:\n    {end}\n" + textwrap.dedent("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return float(solution_str)
    """)
    assert scored(code, TEXTS)[0] == [float(text) for text in TEXTS]


def test_children_that_came_back_are_gone(scored):
    code = with_deed(MODULE, FORKS["the child returns"])
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert scored(code, TEXTS)[0] == [float(text) for text in TEXTS]
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        scorers = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.pid not in before and is_scorer(process)
        ]
        if len(scorers) == 4:  # two workers, each with its keeper
            return
        time.sleep(0.1)
    raise AssertionError(scorers)


def is_scorer(process):
    with contextlib.suppress(psutil.Error):  # it has ended
        return "siirl.rewards.scoring_process" in process.cmdline()


def test_a_worker_that_is_told_to_exit_by_its_function_says_so_of_the_sample(scored):
    code = MODULE.format(deed="        sys.exit(0)")
    with pytest.raises(RewardError, match=r"compute_score of .*own.py failed on sample_index .*SystemExit"):
        scored(code, ["0"])


LEAKS = {
    "files": "kept.extend(open(os.devnull) for _ in range(100))",
    "sockets": "kept.extend(socket.socketpair() for _ in range(50))",
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_function_that_holds_ever_more_is_told_and_its_processes_renewed(scored, caplog, leak):
    code = f"""
        import os, socket, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
        kept = []

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            {leak}
            return float(solution_str)
    """
    assert scored(code, TEXTS)[0] == [float(text) for text in TEXTS]
    assert "a reward worker is replaced: it holds" in caplog.text
    assert "compute_score of" in caplog.text


@pytest.mark.parametrize(
    ("held_mib", "leaks"),
    [((3000, 3000, 3100), False), ((100, 700, 1200), False), ((100, 700, 1300), True), ((900, 2900), True)],
    ids=["what was loaded once", "what is kept a while", "more and more", "much at once"],
)
def test_memory_is_a_leak_where_it_grows_beyond_what_the_first_samples_took(monkeypatch, held_mib, leaks):
    held = iter(held_mib)
    monkeypatch.setattr(scoring_process, "_memory_bytes", lambda: next(held) << 20)
    leak = scoring_process.Leak()
    *before, last = [leak.found() for _ in held_mib]
    assert not any(before)
    assert bool(last) == leaks


@pytest.mark.parametrize(
    "values",
    [
        '{"score": 1.0, "what": "x" * (2 << 20)}',
        '{"score": 1.0, "x" * (2 << 20): 1}',
        '{"score": 1.0, **{str(i): "x" * 1000 for i in range(2000)}}',
        '{"x" * (2 << 20): 1}',
        '"x" * (2 << 20)',
        "exec(\"raise ValueError('x' * (2 << 20))\")",
    ],
)
def test_no_sample_carries_megabytes(scored, values):
    code = f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {values}\n"
    scores, (info,) = scored(code, ["7"], "custom_reward_function.on_error=zero")
    assert scores == [0.0]
    assert len(str(info)) < 4000
