"""What every worker does before its entry."""

import gc
import os

import pytest

from siirl.launch import worker_entry
from siirl.launch.worker_entry import no_collection


def test_imports_are_not_looked_through_for_garbage_and_what_follows_is():
    with pytest.raises(ImportError), no_collection():
        assert not gc.isenabled()
        raise ImportError("a module that is not there")
    assert gc.isenabled()


FOREIGN_CACHES = {
    "a folder that others may write to": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a link": lambda path: (path.with_name("theirs").mkdir(), path.symlink_to(path.with_name("theirs"))),
    "a folder of another user": lambda path: (path.mkdir(), os.chown(path, 12345, 12345)),
    "a file": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("name", FOREIGN_CACHES)
def test_compiled_code_is_never_read_from_a_folder_that_somebody_else_has_made(name, tmp_path, monkeypatch):
    """Torch runs what lies in /tmp/torchinductor_USER, whoever has put it there."""
    if "another user" in name and os.geteuid():
        pytest.skip("only root gives files away")
    for folder in ("tmp", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(worker_entry.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    default = tmp_path / "tmp" / f"torchinductor_{worker_entry.user_id()}"
    kernels = tmp_path / "home" / ".triton" / "cache"
    told = {worker_entry.CODE_CACHE: "/mine", worker_entry.KERNEL_CACHE: "/mine"}
    assert worker_entry.compile_cache(told) == {}
    assert worker_entry.compile_cache({}) == dict(zip(told, (str(default), str(kernels)), strict=True))
    assert default.stat().st_mode & 0o077 == 0
    for folder in (default, kernels):
        folder.rmdir()
        FOREIGN_CACHES[name](folder)
    own = tmp_path / "home" / ".cache" / default.name
    assert worker_entry.compile_cache({}) == dict(zip(told, (str(own), f"{own}/triton"), strict=True))
    assert own.is_dir()


def test_the_folder_of_compiled_code_is_torchs_own_where_nobody_has_taken_it(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv(worker_entry.CODE_CACHE, raising=False)
    assert worker_entry.compile_cache({})[worker_entry.CODE_CACHE] == default_cache_dir()


def test_kernels_that_are_compiled_and_tuned_lie_where_triton_has_them_by_itself(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    for at in (None, tmp_path):
        monkeypatch.setenv("TRITON_HOME", str(at)) if at else monkeypatch.delenv("TRITON_HOME", raising=False)
        monkeypatch.delenv(worker_entry.KERNEL_CACHE, raising=False)
        found = worker_entry.compile_cache(dict(os.environ))
        assert found[worker_entry.KERNEL_CACHE] == triton.knobs.cache.dir
