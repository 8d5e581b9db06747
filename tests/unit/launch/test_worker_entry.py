"""What every worker does before its entry."""

import gc

import pytest

from siirl.launch.worker_entry import no_collection


def test_imports_are_not_looked_through_for_garbage_and_what_follows_is():
    with pytest.raises(ImportError), no_collection():
        assert not gc.isenabled()
        raise ImportError("a module that is not there")
    assert gc.isenabled()
