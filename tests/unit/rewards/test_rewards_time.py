"""Scores do not depend on how fast the machine is: what runs out of time is tried again, then a failure."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from fixtures_tiny import make_tiny_tokenizer
from launch_jobs import wait_until_dead
from scored_rows import rows_of
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.rows import objects
from siirl.errors import RewardError, ScoreTimeoutError
from siirl.rewards import math_answer
from siirl.rewards.cpu_limit import cpu_limit
from siirl.rewards.sample import Outcome
from siirl.rewards.scorer import RewardScorer

pytestmark = pytest.mark.heavy

SLOW = r"\boxed{\int_0^1 x^2 e^{x} dx}"  # about 2 s of processor time
SLOW_TRUTH = "e-2"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=110))


@pytest.fixture
def scorer_of(tmp_path, tokenizer):
    """Make scorers by keys, of a user function when its code is given."""
    with contextlib.ExitStack() as stack:

        def make(*overrides, code=None):
            overrides = ["trainer.n_gpus_per_node=1", "reward_model.num_workers=2", *overrides]
            if code is not None:
                (tmp_path / "own.py").write_text(textwrap.dedent(code))
                overrides += [f"custom_reward_function.path={tmp_path / 'own.py'}"]
            scorer = RewardScorer(load_config(overrides), tokenizer)
            stack.callback(scorer.close)
            return scorer

        yield make


def busy_worker(scorer):
    """The process that scores, not its keeper, as soon as it has something to score."""
    deadline = time.monotonic() + 30
    while True:
        busy = [worker for worker in scorer._pool._workers if worker.inbox]
        if busy:
            (process,) = psutil.Process(busy[0].process.pid).children()
            return process
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_math_answer_is_judged_the_same_on_a_machine_that_stands_still(scorer_of, tokenizer):
    scorer = scorer_of()
    warm = rows_of(tokenizer, [r"\boxed{\sin^2 x + \cos^2 x}"], truths=["1"], source="aime")
    assert scorer.submit(warm).result()["score"].tolist() == [1]
    future = scorer.submit(rows_of(tokenizer, [SLOW], truths=[SLOW_TRUTH], source="aime"))
    worker = busy_worker(scorer)
    time.sleep(0.3)  # it compares by now
    worker.suspend()
    time.sleep(3.5)
    assert not future.done()
    worker.resume()
    assert future.result()["score"].tolist() == [1]
    values = scorer.drain_metrics().values()
    assert values["reward/tried_again"] == 0 and "reward/failed" not in values


def test_an_answer_that_takes_too_long_to_compare_is_a_failure_by_the_users_policy(scorer_of, tokenizer):
    kwargs = "+reward_model.reward_kwargs.compare_timeout_s=0.3"
    answers, truths = [r"\boxed{1}", SLOW, r"\boxed{2}"], ["1", SLOW_TRUTH, "1"]
    rows = rows_of(tokenizer, answers, truths=truths, source="aime")
    scorer = scorer_of(kwargs)
    scored = scorer.submit(rows).result()
    assert scored["score"].tolist() == [1, 0, 0]
    error = objects(scored, "reward_info")[1]["error"]
    assert error == "comparing the answer with 'e-2' took more than 0.3 s of processor time, twice"
    assert objects(scored, "reward_info")[2] == {}  # wrong, which is no failure
    values = scorer.drain_metrics().values()
    assert (values["reward/failed"], values["reward/timeout"], values["reward/tried_again"]) == (1, 1, 1)
    assert values["reward/worker_death"] == 0

    strict = scorer_of(kwargs, "reward_model.on_error=raise")
    late = Outcome(error="no time", failure="timeout")
    strict._pool.run = lambda samples, is_fatal: [Outcome(1.0), late, Outcome(0.0)]
    with pytest.raises(RewardError, match=r"math_dapo failed on sample_index 101.*model\.on_error=zero"):
        strict.submit(rows).result()


def test_a_verdict_that_there_was_no_time_for_is_not_remembered(monkeypatch):
    for _ in range(2):
        with pytest.raises(ScoreTimeoutError, match=r"more than 0\.05 s of processor time"):
            math_answer.math("s", SLOW, SLOW_TRUTH, None, compare_timeout_s=0.05)
    monkeypatch.setattr(math_answer, "cpu_limit", lambda seconds, what: contextlib.nullcontext())
    assert math_answer.math("s", SLOW, SLOW_TRUTH, None, compare_timeout_s=0.05) == 1


def test_a_truth_that_takes_too_long_does_not_hide_one_that_is_right():
    right = r"\int_0^1 x^2e^{x} dx"
    assert math_answer.math("s", SLOW, right, None, compare_timeout_s=60.0) == 1  # a first parse loads much
    assert math_answer.math("s", SLOW, [SLOW_TRUTH, right], None, compare_timeout_s=0.5) == 1


def test_a_library_that_swallows_the_interruption_is_interrupted_again():
    num_swallowed = 0
    with pytest.raises(ScoreTimeoutError, match=r"it took more than 0\.1 s"), cpu_limit(0.1, "it"):
        end = time.process_time() + 5
        while time.process_time() < end:
            try:
                while time.process_time() < end:
                    pass
            except BaseException:
                num_swallowed += 1
                if num_swallowed == 2:
                    raise
    assert num_swallowed == 2
    with cpu_limit(0.1, "it"):
        time.sleep(0.3)  # no processor time


def test_a_sample_whose_worker_stands_still_is_scored_again_by_another(scorer_of, tokenizer, tmp_path):
    code = f"""
        import os, time

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            note = {str(tmp_path)!r} + "/begun"
            if solution_str == "9" and not os.path.exists(note):
                open(note, "w").close()
                time.sleep(60)
            return 1.0
    """
    scorer = scorer_of("custom_reward_function.timeout_s=3", code=code)
    future = scorer.submit(rows_of(tokenizer, list("0090")))
    assert future.result()["score"].tolist() == [1, 1, 1, 1]
    values = scorer.drain_metrics().values()
    assert values["reward/tried_again"] == 1 and "reward/failed" not in values


def test_a_sample_whose_worker_was_killed_is_scored_again_and_only_then_named(scorer_of, tokenizer, tmp_path):
    code = f"""
        import os, time

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            trace = {str(tmp_path)!r} + "/tries"
            tries = len(open(trace).read()) if os.path.exists(trace) else 0
            if solution_str == "9" and tries < ground_truth:
                open(trace, "a").write("x")
                os.kill(os.getpid(), 9)
            return 1.0
    """
    scorer = scorer_of(code=code)
    rows = rows_of(tokenizer, list("0009000"), truths=[1] * 7)
    assert scorer.submit(rows).result()["score"].sum() == 7
    values = scorer.drain_metrics().values()
    assert (values["reward/worker_death"], values["reward/tried_again"]) == (1, 1)

    os.remove(tmp_path / "tries")
    rows = rows_of(tokenizer, list("0009000"), truths=[2] * 7)
    with pytest.raises(RewardError, match=r"sample_index 103 .* it ended: SIGKILL, twice"):
        scorer.submit(rows).result()


def test_what_a_reward_function_starts_ends_with_its_worker(scorer_of, tokenizer, tmp_path):
    """A process in a session of its own, one that was orphaned, and one that a worker left in dying."""
    code = f"""
        import os, signal, subprocess, sys, time

        DAEMON = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
        NOTE = "open(sys.argv[1], 'a').write(str(os.getpid()) + ' '); time.sleep(600)"

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            note = {str(tmp_path)!r} + "/pids"
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            subprocess.run([sys.executable, "-c", DAEMON + NOTE, note])
            while not (os.path.exists(note) and open(note).read()):
                time.sleep(0.01)
            if solution_str == "9":
                os._exit(3)
            return 1.0
    """
    scorer = scorer_of("custom_reward_function.on_error=zero", code=code)
    keepers = [psutil.Process(worker.process.pid) for worker in scorer._pool._workers]
    assert scorer.submit(rows_of(tokenizer, ["1"])).result()["score"].tolist() == [1]
    started = [process for keeper in keepers for process in keeper.children(recursive=True)]
    assert {process.name() for process in started} >= {"sleep"}
    daemon = psutil.Process(int((tmp_path / "pids").read_text().split()[0]))
    assert os.getsid(daemon.pid) not in (os.getsid(0), os.getsid(keepers[0].pid))
    assert scorer.submit(rows_of(tokenizer, ["9"])).result()["score"].tolist() == [0]
    orphans = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split() if alive(int(pid))]
    scorer.close()
    _, left = psutil.wait_procs([*started, daemon, *orphans], timeout=60)
    assert not left


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_keeper_ends_everything_when_the_rank_is_killed(tmp_path):
    """The process that has the pool is killed with its group, as the launcher does it."""
    (tmp_path / "reward.py").write_text(
        "import subprocess\n"
        "def compute_score(**given):\n"
        "    subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    return 1.0\n"
    )
    code = f"""
        import os, time
        from siirl.rewards.pool import WorkerPool
        from siirl.rewards.sample import Sample

        custom = {{"path": {str(tmp_path / "reward.py")!r}, "name": "compute_score", "reward_kwargs": {{}}}}
        pool = WorkerPool(1, 30.0, {{"kwargs": {{}}, "custom": custom, "batch": False, "kept": {{}}}})
        assert pool.run([Sample((("custom", 1.0),), "s", "r", "t", None)])[0].score == 1.0
        print("scored", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, start_new_session=True
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"scored\n"
        started = psutil.Process(rank.pid).children(recursive=True)
        assert "sleep" in {process.name() for process in started}
        os.killpg(rank.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left


def test_a_worker_ends_with_its_keeper_whatever_it_computes(scorer_of, tokenizer, tmp_path):
    """It hears nothing of the keeper's end while it runs a user's function."""
    code = f"""
        import os, time

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if not os.path.exists({str(tmp_path / "again")!r}):
                open({str(tmp_path / "again")!r}, "w").close()
                time.sleep(600)
            return 1.0
    """
    scorer = scorer_of("custom_reward_function.on_error=zero", code=code)
    scores = scorer.submit(rows_of(tokenizer, ["1"]))
    worker = busy_worker(scorer)
    while not (tmp_path / "again").exists():
        time.sleep(0.01)
    worker.parent().kill()
    wait_until_dead([worker.pid], 60)
    assert scores.result()["score"].tolist() == [1], "by another worker"


@pytest.mark.parametrize(
    ("manager", "error", "message"),
    [
        (
            "naive",
            "class Stop(BaseException): pass\n    raise Stop('disk full')",
            "Stop: disk full",
        ),
        ("naive", "raise GeneratorExit('over')", "GeneratorExit: over"),
        ("batch", "raise KeyboardInterrupt('no licence')", "KeyboardInterrupt: no licence"),
    ],
)
def test_what_any_exception_says_is_kept(scorer_of, tokenizer, manager, error, message):
    code = f"def compute_score(**given):\n    {error}\n"
    scorer = scorer_of(f"reward_model.reward_manager={manager}", code=code)
    with pytest.raises(RewardError, match=message):
        scorer.submit(rows_of(tokenizer, ["1"])).result()


def test_what_a_module_says_when_it_exits_at_import_is_kept(scorer_of):
    with pytest.raises(RewardError, match="cannot start: SystemExit: set the licence key first"):
        scorer_of(code="raise SystemExit('set the licence key first')\ndef compute_score(**given): ...\n")
