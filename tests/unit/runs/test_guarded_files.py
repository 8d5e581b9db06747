"""Files that are written whole, also after a write that was cut."""

import stat

import pytest

from siirl.guarded_files import replaced, write_own, write_whole


@pytest.mark.parametrize("write", [write_whole, write_own])
def test_a_write_passes_over_what_a_cut_one_left_and_keeps_the_file_until_it_is_whole(write, tmp_path):
    path, left = tmp_path / "made" / "file", tmp_path / "made" / "file.tmp"
    write(path, "first")
    left.write_text("half of the sec")
    write(path, "second")
    assert path.read_text() == "second" and not left.exists()
    if write is write_own:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(RuntimeError, match="cut"), replaced(path) as aside:
        aside.write_text("half of the th")
        raise RuntimeError("cut")
    assert path.read_text() == "second"


def test_what_stands_where_a_file_is_written_is_not_followed(tmp_path):
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("somebody's")
    (tmp_path / "file.tmp").symlink_to(other)
    write_whole(path, "ours")
    assert other.read_text() == "somebody's" and path.read_text() == "ours" and not path.is_symlink()
