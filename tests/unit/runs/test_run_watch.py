"""`siirl watch`: one screen about a run, live, ended or copied."""

import json
import os
import re
import shutil
import time

import pytest
from run_folders import rewards, written

from siirl.cli import main
from siirl.launch.run_folder import held
from siirl.observe.position import AT_END, PositionFile
from siirl.runs import run_watch
from siirl.runs.run_state import read_run
from siirl.runs.run_watch import run_text, watch

pytestmark = pytest.mark.heavy


def shown(folder, capsys) -> str:
    assert main(["watch", str(folder), "--once"]) == 0
    return capsys.readouterr().out


def test_a_running_run_shows_its_pace_and_what_each_rank_does(tmp_path, capsys):
    now_s = float(int(time.time()))
    run = written(tmp_path, num_ranks=8, began_s=now_s - 130).start().steps(rewards(range(1, 13)))
    run.positions(
        {rank: (13, "rollout", now_s - 9.0) for rank in range(6)}
        | {6: (13, "actor_train", now_s), 7: (0, "start", now_s - 130)}
    )
    with held(run.cfg, "id"):
        text = run_text(read_run(tmp_path), now_s)
        assert "running" in shown(tmp_path, capsys).splitlines()[0]
    assert "step 12 of 40, 2 min 10 s since its start, 10.0 s a step, 4 min 40 s left" in text
    assert f"process {os.getpid()}" in text
    ranks = text[text.index("ranks now") :].splitlines()[1:4]
    assert [line.split()[0] for line in ranks] == ["7", "0-5", "6"]  # who is behind comes first
    assert ranks[1].split(maxsplit=1)[1] == "step 13, rollout  for 9.0 s"
    assert "validation reward 0.200, best 0.200 @10" in text
    assert re.search(r"last metrics\n  reward 0\.120, val 0\.200, entropy 2\.000", text)


def test_the_screen_says_who_waits_for_whom_and_who_is_idle(tmp_path):
    run = written(tmp_path, num_ranks=4).start().steps(rewards(range(1, 4)))
    for rank, (node, part, order) in {
        0: ("end of step", AT_END, (1,)),
        1: ("report", "report", (2,)),
        2: ("rollout", "step", (0, 3)),
        3: ("rollout", "step", (0, 3)),
    }.items():
        file = PositionFile(run.job.position_path(rank))
        file.set(4, node, part, order)
        file.close()
    with held(run.cfg, "id"):
        text = run_text(read_run(tmp_path), time.time())
    assert re.search(r"0 +step 4, end of step  for \S+ s  idle until 2-3 are done\n", text)
    assert re.search(r"1 +step 4, report  for \S+ s  waits for 0, ?2-3\n", text)
    assert re.search(r"2-3 +step 4, rollout  for \S+ s\n", text)


def test_the_screen_says_that_a_rank_waits_for_somebody_outside_of_the_run(tmp_path):
    run = written(tmp_path, num_ranks=1).start().steps(rewards(range(1, 4)))
    file = PositionFile(run.job.position_path(0))
    file.set(4, "rollout", "step", (0, 3))
    file.wait("waits for clients: 8 episodes are not taken")
    with held(run.cfg, "id"):
        assert "waits for clients: 8 episodes are not taken" in run_text(read_run(tmp_path), time.time())
        file.wait("")
        assert "waits for" not in run_text(read_run(tmp_path), time.time())
    file.close()


def test_a_failed_run_shows_who_failed_and_one_that_was_copied_the_same(tmp_path, capsys):
    run = written(tmp_path / "run").start().steps(rewards(range(1, 4)))
    run.positions({0: (4, "reshard", 1e9), 1: (4, "actor_train", 1e9)})
    run.failure(1, RuntimeError("CUDA out of memory"), 4, "actor_train")
    text = shown(run.folder, capsys)
    assert "last problem\n  rank 1, step 4, actor_train: RuntimeError: CUDA out of memory" in text
    assert re.search(r"ranks at the end\n  1 +step 4, actor_train  failed: RuntimeError", text)
    shutil.copytree(run.folder, tmp_path / "copy")
    assert shown(tmp_path / "copy", capsys).replace("copy", "run") == text


def test_the_attempts_of_the_last_start_are_shown_with_their_causes(tmp_path, capsys):
    run = written(tmp_path).start().steps(rewards(range(1, 4)))
    told = [
        {
            "run_id": "id",
            "attempt": number,
            "ended_s": time.time() - 600,
            "rank": 1,
            "host": "a",
            "step": number,
        }
        | {"node": "rollout", "cause": f"killed by \x1b[2JSIG{number}", "next": "global_step_2"}
        for number in range(2, 7)
    ]
    lines = [
        json.dumps({"run_id": "an older start"}),
        *map(json.dumps, told),
        json.dumps({"run_id": "id"}),
        "{",
    ]
    (run.folder / "attempts.jsonl").write_text("\n".join([*lines, "[]", ""]))
    text = shown(tmp_path, capsys)
    assert "attempt 1, after 6 that failed\n" in text  # the damaged one says nothing of its number
    assert re.search(
        r"\n    6  10 min ago, rank 1, step 6, rollout: killed by \S+SIG6; went on from global_step_2", text
    )
    assert "\x1b" not in text and "SIG3" not in text, "the last few"
    assert main(["ls", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert [attempt["attempt"] for attempt in listed["attempts"]] == [2, 3, 4, 5, 6, 0]
    assert main(["ls", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert row[head.index("restarts") :].split()[0] == "6"


def test_the_table_shows_how_many_ranks_each_attempt_had(tmp_path, capsys):
    run = written(tmp_path).start().steps(rewards(range(1, 4))).positions({0: (4, "rollout", 1e9)})
    lines = [{"run_id": "id", "attempt": number, "world_size": size} for number, size in enumerate((4, 4, 2))]
    (run.folder / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["ls", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert row[head.index("ranks") : head.index("size")].strip() == "4, 2, 1"


def test_the_last_warning_of_the_log_is_the_last_problem_of_a_run_without_failures(tmp_path, capsys):
    run = written(tmp_path).start()
    said = ("W siirl.a: first", "E siirl.b: second", "I siirl: third")
    log = "".join(f"12:00:0{index + 1} [rank 0] {text}\n" for index, text in enumerate(said))
    (run.folder / "logs" / "rank_0.log").write_text(log)
    assert "last problem\n  12:00:02 [rank 0] E siirl.b: second\n" in shown(tmp_path, capsys)


@pytest.mark.slow
def test_four_thousand_ranks_fit_a_screen(tmp_path):
    run = written(tmp_path, num_ranks=4096).start()
    run.positions({rank: (rank % 40, f"node_{rank % 3}", 1e9) for rank in range(4096)})
    lines = run_text(read_run(tmp_path), time.time(), 100).splitlines()
    assert len(lines) < 25 and max(map(len, lines)) <= 100
    assert "more ranks elsewhere" in lines[-1]


def test_a_path_longer_than_the_line_leaves_room_for_the_status(tmp_path):
    run = written(tmp_path / "folder_with_a_long_name" / "x" / "my_run").start().steps(rewards(range(1, 4)))
    with held(run.cfg, "id"):
        title = run_text(read_run(run.folder), time.time(), 40).splitlines()[0]
    assert title.startswith("...") and title.endswith("/x/my_run: running") and len(title) == 40


def test_a_terminal_is_refreshed_until_the_run_is_over(tmp_path, capsys, monkeypatch):
    run = written(tmp_path).start().steps(rewards(range(1, 4)))
    holding = held(run.cfg, "id")
    holding.__enter__()
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            holding.__exit__(None, None, None)
            run.steps(rewards(range(4, 41))).end()

    monkeypatch.setattr(run_watch.time, "sleep", sleep)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    watch(tmp_path, 0.5, once=False)
    screens = capsys.readouterr().out.split(run_watch.CLEAR)[1:]
    assert looks == [0.5] * 3
    assert [screen.split("\n")[0].rpartition(": ")[2] for screen in screens] == ["running"] * 3 + ["ended"]


@pytest.mark.parametrize(("seconds_ago", "status"), [(20, "running"), (600, "interrupted")])
def test_a_run_of_another_machine_is_judged_by_its_last_sign_of_life(
    seconds_ago, status, tmp_path, monkeypatch
):
    run = written(tmp_path).start().positions({0: (1, "rollout", time.time() - seconds_ago)})
    with held(run.cfg, "id"):
        pass
    assert read_run(tmp_path).status == "interrupted"
    monkeypatch.setattr("siirl.runs.run_state.socket.gethostname", lambda: "elsewhere")
    assert read_run(tmp_path).status == status
