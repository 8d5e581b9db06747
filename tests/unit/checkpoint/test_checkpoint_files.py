"""Checkpoint folders on disk: completeness, the pointer, what a resume picks, what is kept."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from siirl.checkpoint import files
from siirl.checkpoint.together import Together
from siirl.config import load_config
from siirl.disk import naming
from siirl.errors import CheckpointError, ConfigError, StorageError
from siirl.findings import Findings
from siirl.launch.failure import describe_exception
from siirl.launch.preflight import check_resumed


def refuse_resumed(*keys: str) -> None:
    found = Findings()
    check_resumed(load_config(keys), None, found)
    found.close()


def write_checkpoint(root: Path, step: int, keep: int = 100) -> Path:
    aside = files.prepare_aside(root, step)
    (aside / "agent_0.actor").mkdir()
    (aside / "agent_0.actor" / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    (aside / "agent_0.actor" / files.STATE_FILE).write_text("{}")
    (aside / files.EXTRA_FILE).write_text(json.dumps({"step": step}))
    (aside / "ranks").mkdir()
    for suffix in (".json", ".safetensors"):
        (aside / "ranks" / f"rank_0{suffix}").write_text("{}")
    written = [path for path in aside.rglob("*") if path.is_file()]
    about = {"models": ["agent_0.actor"], "world_size": 1}
    files.write_manifest(aside, step, files.records_of(aside, written), about)
    files.publish(aside, root, step)
    files.prune(root, keep, step)
    return files.step_folder(root, step)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE = {
    "a flipped bit": (
        lambda c: flip_a_byte(c / "agent_0.actor" / "__0_0.distcp"),
        "__0_0.distcp have changed",
    ),
    "a file cut short": (
        lambda c: cut_short(c / "agent_0.actor" / "__0_0.distcp"),
        "10239 bytes instead of 10240",
    ),
    "a missing file": (lambda c: (c / "extra.json").unlink(), "extra.json is missing"),
    "a missing manifest": (lambda c: (c / "manifest.json").unlink(), "no manifest.json"),
    "a manifest cut short": (lambda c: cut_short(c / "manifest.json"), "cannot be read"),
    "another format": (lambda c: (c / "manifest.json").write_text('{"format": 99}'), "format 1"),
}


def test_the_newest_checkpoint_is_current_and_resumed(tmp_path):
    for step in (10, 9, 20):
        write_checkpoint(tmp_path, step)
    assert (tmp_path / files.POINTER).read_text() == "20"
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_20"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one_and_says_why(tmp_path, caplog, damage):
    act, reason = DAMAGE[damage]
    previous, newest = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)
    act(newest)
    with caplog.at_level(logging.WARNING):
        assert files.find_resume(tmp_path, "auto", None) == previous
    assert reason in caplog.text and "step 2" in caplog.text


def test_only_damaged_checkpoints_are_an_error_of_the_users_that_names_each(tmp_path):
    flip_a_byte(write_checkpoint(tmp_path, 3) / "extra.json")
    cut_short(write_checkpoint(tmp_path, 4) / "extra.json")
    named = r"(?s)global_step_4: .*bytes instead.*global_step_3: .*extra\.json.*resume_mode=disable"
    with pytest.raises(StorageError, match=named):
        files.find_resume(tmp_path, "auto", None)
    assert files.find_resume(tmp_path, "disable", None) is None
    with pytest.raises(StorageError) as raised, Together(tmp_path, None).stage(None, "looking"):
        files.find_resume(tmp_path, "auto", None)
    failure = describe_exception(raised.value, 0, None)
    assert failure.user_error and failure.error.startswith(f"no complete checkpoint under {tmp_path}")


def test_damage_that_sizes_show_is_refused_before_anything_starts(tmp_path):
    auto = (f"trainer.default_local_dir={tmp_path}", f"trainer.output_dir={tmp_path / 'out'}")
    flip_a_byte(write_checkpoint(tmp_path, 3) / "extra.json")
    refuse_resumed(*auto)
    cut_short(tmp_path / "global_step_3" / "extra.json")
    with pytest.raises(
        StorageError, match=r"(?s)global_step_3: .*resume_mode=disable trainer\.overwrite=true"
    ):
        refuse_resumed(*auto)
    given = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_3'}")
    with pytest.raises(StorageError, match=r"corrupted: extra\.json has .* beside it: none"):
        refuse_resumed(*auto, *given)


def test_a_write_that_fails_names_its_file_whoever_made_it(tmp_path):
    """A library whose errors are no OSErrors says the number of the system's error in its text."""
    with (
        pytest.raises(OSError, match=r"No space left on device: .*shard-0'") as raised,
        naming(tmp_path / "shard-0"),
    ):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert raised.value.errno == 28
    with pytest.raises(SafetensorError, match="another"), naming(tmp_path / "shard-0"):
        raise SafetensorError("another")
    with pytest.raises(StorageError, match=r"the disk is full: .*/a: No space.*global_step_7"):
        write_checkpoint(tmp_path, 7)
        with Together(tmp_path, None).stage(8, "writing"), naming(tmp_path / "a"):
            raise OSError(28, "No space left on device")
    read_only = r"the disk is read-only: .*/a: Read-only.*global_step_7.*take files again"
    with pytest.raises(StorageError, match=read_only), Together(tmp_path, None).stage(8, "writing"):
        raise OSError(30, "Read-only file system", str(tmp_path / "a"))


def test_nothing_or_a_killed_first_save_starts_from_the_beginning(tmp_path):
    assert files.find_resume(tmp_path / "absent", "auto", None) is None
    files.prepare_aside(tmp_path, 5)
    assert files.find_resume(tmp_path, "auto", None) is None


def test_a_pointer_set_back_by_hand_is_followed_and_later_steps_stay(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (tmp_path / files.POINTER).write_text("2")
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_2"
    files.prune(tmp_path, 1, current=2)
    assert files.saved_steps(tmp_path) == [3, 2]


@pytest.mark.parametrize("pointer", [None, "", "garbage"])
def test_without_a_readable_pointer_the_newest_complete_checkpoint_is_taken(tmp_path, pointer):
    newest = [write_checkpoint(tmp_path, step) for step in (1, 2)][-1]
    (tmp_path / files.POINTER).unlink()
    if pointer is not None:
        (tmp_path / files.POINTER).write_text(pointer)
    assert files.find_resume(tmp_path, "auto", None) == newest


def test_a_given_path_is_checked_and_never_replaced_by_another(tmp_path):
    good, bad = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)
    cut_short(bad / "extra.json")
    assert files.find_resume(tmp_path, "resume_path", str(good)) == good
    with pytest.raises(CheckpointError, match="corrupted"):
        files.find_resume(tmp_path, "resume_path", str(bad))
    with pytest.raises(ConfigError, match="no such folder"):
        files.find_resume(tmp_path, "resume_path", str(tmp_path / "global_step_7"))
    with pytest.raises(ConfigError, match="it has no manifest"):
        files.find_resume(tmp_path, "resume_path", str(tmp_path))
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path"):
        files.find_resume(tmp_path, "resume_path", False)


@pytest.mark.parametrize("name", ["best", "global_step_900", "best of all, 2", "global_step_3 (copy)"])
def test_a_copy_of_a_checkpoint_may_have_any_name(tmp_path, name):
    """Its step is that of the manifest, also where the name says another."""
    copy = tmp_path / "kept" / name
    shutil.copytree(write_checkpoint(tmp_path, 3), copy)
    assert files.find_resume(tmp_path, "resume_path", str(copy)) == copy
    assert files.step_of(copy) == 3
    cut_short(copy / "extra.json")
    with pytest.raises(CheckpointError, match="corrupted"):
        files.find_resume(tmp_path, "resume_path", str(copy))


@pytest.mark.parametrize("step", [None, -1, "3", True, 2.5])
def test_a_manifest_without_a_step_is_corrupted(tmp_path, step):
    checkpoint = write_checkpoint(tmp_path, 3)
    manifest = json.loads((checkpoint / files.MANIFEST).read_text())
    (checkpoint / files.MANIFEST).write_text(json.dumps(manifest | {"step": step}))
    with pytest.raises(CheckpointError, match="step = "):
        files.step_of(checkpoint)


FOREIGN = {
    "actor/model_world_size_8_rank_0.pt": "verl",
    "actor/dist_ckpt/x": "verl",
    "iter_0000100/mp_rank_00/model_optim_rng.pt": "Megatron-LM",
    "global_step100/mp_rank_00_model_states.pt": "DeepSpeed",
    "zero_pp_rank_0_mp_rank_00_model_states.pt": "DeepSpeed",
    ".metadata": "torch.distributed.checkpoint",
    "trainer_state.json": "transformers",
}


@pytest.mark.parametrize(("file", "whose"), FOREIGN.items())
def test_a_checkpoint_of_another_program_is_named_as_that(tmp_path, file, whose):
    path = tmp_path / "global_step_100" / file
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / files.POINTER).write_text("100")
    with pytest.raises(ConfigError, match=f"as .*{whose}.* writes it"):
        files.find_resume(tmp_path, "resume_path", str(tmp_path / "global_step_100"))
    with pytest.raises(CheckpointError, match=f"as .*{whose}.* writes it"):
        files.newest_complete(tmp_path, contents=False)


def test_the_newest_n_are_kept_and_a_step_can_be_saved_again(tmp_path):
    for step in (5, 10, 15, 20):
        write_checkpoint(tmp_path, step, keep=2)
    assert files.saved_steps(tmp_path) == [20, 15]
    write_checkpoint(tmp_path, 20, keep=2)
    files.verify(tmp_path / "global_step_20")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_15",
        "global_step_20",
        files.POINTER,
    ]


def test_the_next_save_removes_what_a_killed_save_left(tmp_path):
    write_checkpoint(tmp_path, 1)
    for name in ("global_step_2.tmp", "global_step_1.old", "global_step_0.deleted", "notes.tmp"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", files.POINTER, "notes.tmp"]


def test_a_kill_between_the_two_renames_of_a_second_save_of_a_step_loses_nothing(tmp_path, caplog):
    good = write_checkpoint(tmp_path, 1)
    good.rename(tmp_path / "global_step_1.old")
    files.aside_folder(tmp_path, 1).mkdir()
    with caplog.at_level(logging.WARNING):
        assert files.find_resume(tmp_path, "auto", None) == good
    assert "global_step_1.old goes back to its place" in caplog.text
    good.rename(tmp_path / "global_step_1.old")
    write_checkpoint(tmp_path, 2)
    files.verify(good)


@pytest.mark.parametrize("fails_at", ["rename", "pointer"])
def test_a_crash_while_publishing_leaves_a_pointer_to_a_complete_checkpoint(tmp_path, monkeypatch, fails_at):
    write_checkpoint(tmp_path, 1)
    replace = os.replace

    def crash(source, target):
        if Path(target).name == {"rename": "global_step_2", "pointer": files.POINTER}[fails_at]:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2)
    monkeypatch.undo()
    assert (tmp_path / files.POINTER).read_text() == "1"
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"


def test_a_root_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*cannot be written"):
        files.check_writable(tmp_path / "file" / "checkpoints")
    files.check_writable(tmp_path / "new" / "checkpoints")
    assert list((tmp_path / "new" / "checkpoints").iterdir()) == []


def rewrite_manifest(checkpoint: Path, change) -> None:
    manifest = json.loads((checkpoint / files.MANIFEST).read_text())
    change(manifest)
    (checkpoint / files.MANIFEST).write_text(json.dumps(manifest))


def test_a_manifest_that_leaves_out_any_file_or_key_is_refused(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1)
    whole = (checkpoint / files.MANIFEST).read_text()
    entries = json.loads(whole)["files"]
    cases = [lambda m, i=i: m["files"].pop(i) for i in range(len(entries))]
    cases += [lambda m, key=key: m.pop(key) for key in ("files", "models", "world_size")]
    cases += [lambda m, value=value: m.update(files=value) for value in ([], None, {}, ["x"], [{}], 3)]
    cases += [lambda m, value=value: m.update(models=value) for value in ([], None, ["other"])]
    for change in cases:
        (checkpoint / files.MANIFEST).write_text(whole)
        rewrite_manifest(checkpoint, change)
        with pytest.raises(CheckpointError, match=r"is corrupted: manifest\.json"):
            files.verify(checkpoint)
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            files.find_resume(tmp_path, "auto", None)
    (checkpoint / files.MANIFEST).write_text(whole)
    files.verify(checkpoint)


def test_a_pointer_below_all_steps_is_refused_with_the_steps_that_are_there(tmp_path):
    for step in (20, 40):
        write_checkpoint(tmp_path, step)
    (tmp_path / files.POINTER).write_text("10")
    with pytest.raises(CheckpointError, match=r"names step 10, but .* global_step_40, global_step_20"):
        files.find_resume(tmp_path, "auto", None)
    with pytest.raises(ConfigError, match="names step 10"):
        refuse_resumed(f"trainer.default_local_dir={tmp_path}")
    (tmp_path / files.POINTER).write_text("30")
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_20"


def test_a_pointer_that_is_a_folder_is_refused_before_training(tmp_path):
    (tmp_path / files.POINTER).mkdir()
    with pytest.raises(CheckpointError, match="is no file"):
        files.find_resume(tmp_path, "auto", None)
    for keys in (("trainer.resume_mode=auto",), ("trainer.resume_mode=disable", "trainer.save_freq=1")):
        with pytest.raises(ConfigError, match=r"is no file: .* Remove it"):
            refuse_resumed(f"trainer.default_local_dir={tmp_path}", *keys)
