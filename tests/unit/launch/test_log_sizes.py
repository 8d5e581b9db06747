"""Logs that are full: what they held is beside them, and who writes them goes on."""

from siirl.launch.log_sizes import LogSizes
from siirl.observe.logs import last_lines


def test_a_full_log_is_moved_aside_and_its_writer_goes_on_in_it(tmp_path):
    log, other = tmp_path / "rank_1.log", tmp_path / "rank_2.log"
    other.write_text("short\n")
    with log.open("ab", buffering=0) as writer:
        for number in range(3):
            writer.write(f"line {number}\n".encode())
        began_at = log.stat().st_size
        LogSizes(tmp_path, most_bytes=20).look()
        writer.write(b"line 3\n")
    assert log.read_text() == "line 3\n" and other.read_text() == "short\n"
    assert (tmp_path / "rank_1.log.1").read_text() == "line 0\nline 1\nline 2\n"
    assert last_lines(log, began_at) == ["line 3"], "where an attempt began is no more"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_1.log", "rank_1.log.1", "rank_2.log"]


def test_logs_take_twice_their_bound_at_most(tmp_path):
    log = tmp_path / "rank_0.log"
    for _ in range(30):
        with log.open("ab") as writer:
            writer.write(b"x" * 50)
        LogSizes(tmp_path, most_bytes=100).look()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 300
