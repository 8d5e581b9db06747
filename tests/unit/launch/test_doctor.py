"""`siirl doctor`: a line for each thing, what to do, and the exit code."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from siirl.cli import main
from siirl.errors import SandboxError
from siirl.launch import doctor

SEEN = {"cuda": "13.0", "kernel": True, "devices": [["H200", 150 << 30]]}


def lines(check, output=Path("outputs")) -> dict[str, doctor.Line]:
    return {line.what: line for line in check(output)}


@pytest.mark.heavy
def test_this_machine_is_well_and_the_exit_code_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.versions, doctor.devices, doctor.ports, doctor.gloo))
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ok    gloo:           two processes of this machine meet" in out
    assert all(line.startswith(("ok  ", "warn")) for line in out.splitlines()[:-1])


def test_one_bad_line_makes_the_exit_code_1_and_a_warning_does_not(tmp_path, capsys, monkeypatch):
    for grade, code in (("ok", 0), ("warn", 0), ("bad", 1)):
        line = doctor.Line(grade, "thing", "is so\x1b[2J", "Do that.")
        monkeypatch.setattr(doctor, "CHECKS", (lambda _output, line=line: iter([line]),))
        assert main(["doctor", str(tmp_path)]) == code
        assert rf"{grade:<5} thing:          is so\x1b[2J. Do that." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("package", "grade"), [("torch", "bad"), ("ray", "bad"), ("megatron-core", "warn"), ("mbridge", "warn")]
)
def test_a_missing_package_is_named_with_how_to_install_it(package, grade, monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == package else real(name) or "1")
    line = lines(doctor.versions)["megatron" if grade == "warn" else package]
    assert line.grade == grade and "not installed" in line.found and "pip install" in line.remedy


def test_a_python_that_siirl_does_not_know_is_bad(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert lines(doctor.versions)["python"].grade == "bad"


@pytest.mark.parametrize(
    ("seen", "offered", "grades"),
    [
        (SEEN, 1, ("ok", "ok")),
        (SEEN | {"devices": []}, 0, ("ok", "ok")),
        (SEEN | {"devices": []}, 8, ("bad", "ok")),
        (SEEN | {"devices": [], "cuda": None}, 8, ("bad", "ok")),
        (SEEN | {"kernel": False}, 1, ("ok", "bad")),
        (SEEN | {"kernel": False, "devices": []}, 0, ("ok", "warn")),
    ],
)
def test_gpus_that_torch_does_not_see_are_bad(seen, offered, grades, monkeypatch):
    monkeypatch.setattr(doctor, "_probe_torch", lambda: seen)
    monkeypatch.setattr(doctor, "count_gpus", lambda _env, _dev: offered)
    found = lines(doctor.devices)
    assert (found["devices"].grade, found["attention"].grade) == grades


def broken(folder: Path, code: str) -> str:
    """A python that is not one."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sleep 60", "no answer in 0.5 s"),
        ("echo 'libcudart: no such file' >&2; exit 1", "libcudart"),
        ("kill -SEGV $$", "exit code -11"),
    ],
)
def test_a_torch_that_hangs_or_crashes_is_told_within_the_deadline(code, why, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_S", 0.5 if "sleep" in code else 60.0)
    monkeypatch.setattr(doctor.sys, "executable", broken(tmp_path, code.replace("sleep", "exec sleep")))
    for line in (lines(doctor.devices)["devices"], lines(doctor.gloo)["gloo"]):
        assert line.grade == "bad" and why in line.found and line.remedy


@pytest.mark.parametrize(("free", "grade"), [(100, "ok"), (5, "warn"), (0.1, "bad")])
def test_the_disk_of_the_outputs_is_judged_by_its_room(free, grade, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free * doctor.GIB, total=1))
    line = lines(doctor.disk, tmp_path / "not" / "there")["disk"]
    assert line.grade == grade and str(tmp_path) in line.found
    assert not os.listdir(tmp_path)


def test_a_disk_that_cannot_be_written_is_bad():
    line = lines(doctor.disk, Path("/proc/outputs"))["disk"]
    assert line.grade == "bad" and "/proc cannot be written" in line.found


@pytest.mark.parametrize(("mib", "grade"), [(64, "warn"), (16384, "ok")])
def test_little_shared_memory_is_a_warning(mib, grade, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=mib << 20))
    assert lines(doctor.shared_memory)["shared memory"].grade == grade


@pytest.mark.heavy
def test_the_sandbox_modes_are_tried(monkeypatch):
    from siirl.sandbox import box

    line = lines(doctor.sandbox)["sandbox"]
    assert box.strongest_isolation().mode in line.found.split(";")[0]

    def no_box(_mode):
        raise SandboxError("not here")

    monkeypatch.setattr(box, "Box", no_box)
    assert "none works" in lines(doctor.sandbox)["sandbox"].found
