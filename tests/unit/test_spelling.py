"""How sizes are written: never so that a need looks like its limit, or more than it."""

import pytest

from siirl.spelling import gib_texts, size_text


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((1.3, 1.4), ["1.3", "1.4"]),
        ((1.37, 1.4), ["1.37", "1.4"]),
        ((61.2, 139.8), ["61", "139.8"]),
        ((1.34, 1.4), ["1.3", "1.4"]),
        ((1.3, 1.3), ["1.3", "1.3"]),
        ((80.3, 80.0), ["80.3", "80"]),
        ((79.96, 80.0), ["79.96", "80"]),
        ((61.2, 80.0), ["61", "80"]),
        ((7.7, 139.8), ["7.7", "139.8"]),
        ((1100.0, 288.0), ["1100", "288"]),
    ],
)
def test_sizes_beside_each_other_can_be_told_apart(sizes, texts):
    assert [*gib_texts(*sizes)] == texts


def test_a_size_alone_has_the_unit_that_it_is_read_in():
    assert [size_text(n) for n in (2**40, 2**30, 2**26, 300_000, 3000)] == [
        "1024.0 GiB",
        "1.0 GiB",
        "64.0 MiB",
        "0.3 MiB",
        "2.9 KiB",
    ]
