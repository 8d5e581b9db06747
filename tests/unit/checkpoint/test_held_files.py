"""Which checkpoint is whole on several machines together."""

import pytest

from siirl.checkpoint.held_files import Held, Version, newest_whole


def held(step: int, paths: str, digest: str = "a") -> Held:
    """Of a checkpoint of three files: a, b, c."""
    return Held(Version(step, digest), 3, frozenset(paths))


@pytest.mark.parametrize(
    ("machines", "step"),
    [
        ([], None),
        ([[]], None),
        ([[held(2, "abc")]], 2),
        ([[held(2, "ab")], [held(2, "bc")]], 2),
        ([[held(2, "ab")], [held(2, "b")]], None),
        ([[held(2, "abc"), held(4, "ab")], [held(2, "a"), held(4, "a")]], 2),
        ([[held(4, "ab")], [held(4, "bc"), held(2, "abc")]], 4),
        ([[held(4, "ab", "a")], [held(4, "c", "b"), held(2, "abc")]], 2),
    ],
    ids=[
        *("no machine", "nothing", "on one", "on two", "a file is lost", "the newer one is not whole"),
        *("the newer one", "of two attempts"),
    ],
)
def test_the_newest_is_taken_of_those_whose_every_file_is_somewhere(machines, step):
    found = newest_whole(machines)
    assert (found and found.step) == step
