"""Places where siirl was wrong once, or tests saw nothing: each is broken in a copy, and must be seen.

    python tools/mutations.py [--only WORD]

Prints a row for each. Exit code 1: a test stayed green, or was red before anything was broken. Run it after
tests were made fewer or shorter.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_S = 900


@dataclass(frozen=True)
class Mutation:
    """One place."""

    what: str
    """What goes wrong then."""
    file: str
    old: str
    """A piece of the file that is there once."""
    new: str
    tests: str
    """Those of `make test` that must be red, as pytest takes them."""


MUTATIONS = (
    Mutation(
        "a worker that passes over SIGTERM stays",
        "siirl/launch/process.py",
        "    for worker in workers:\n        worker.signal_group(signal.SIGKILL)\n",
        "",
        "tests/unit/launch/test_health.py::test_who_passes_over_sigterm_is_killed_and_all_that_it_started",
    ),
    Mutation(
        "an attempt begins beside what the one before has started",
        "siirl/launch/local.py",
        "        await_groups(self.workers)  #",
        "        #",
        "tests/dist/test_launch_local.py::test_an_attempt_begins_when_all_that_the_one_before_has_started_is_gone",
    ),
    Mutation(
        "an engine outlives its worker",
        "siirl/engines/rollout/served/server.py",
        "    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        "tests/unit/engines/test_vllm_process.py::test_an_engine_ends_with_its_worker_also_where_its_connection_lasts",
    ),
    Mutation(
        "an engine joins the process group of its worker",
        "siirl/engines/rollout/served/engine_process.py",
        " if key not in LAUNCHER_VARIABLES}",
        "}",
        "tests/unit/engines/test_vllm_process.py"
        "::test_an_engine_sees_nothing_of_the_launchers_variables_and_what_is_its_own",
    ),
    Mutation(
        "a worker of rewards outlives its keeper",
        "siirl/sandbox/keeper.py",
        "        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        "tests/unit/rewards/test_rewards_time.py::test_a_worker_ends_with_its_keeper_whatever_it_computes",
    ),
    Mutation(
        "a right answer of 7.00 is text",
        "siirl/data/row_values.py",
        "        return int(value)\n",
        "        return str(value)\n",
        "tests/unit/data/test_data_forms.py::test_a_decimal_that_a_file_holds_is_right_for_its_number",
    ),
    Mutation(
        "a mark that was closed opens reasoning",
        "siirl/dialect/parts.py",
        "prompt_end.rfind(marks.begin) <= prompt_end.rfind(marks.end)",
        "marks.begin not in prompt_end",
        "tests/unit/dialect/test_dialect.py",
    ),
    Mutation(
        "what was begun waits behind what nobody has begun, on other shards",
        "siirl/nodes/in_flight.py",
        "sorted(self._in_turn(self._orders())[: self._num_active])",
        "self._orders()[: self._num_active]",
        "tests/unit/nodes/test_in_flight.py::test_what_was_begun_leaves_first_when_it_is_dealt_to_other_shards",
    ),
    Mutation(
        "a resumed run forgets how many groups have left",
        "siirl/nodes/in_flight.py",
        'max((state.get("num_given", 0) for state in states), default=0)',
        "0",
        "tests/unit/nodes/test_in_flight.py",
    ),
    Mutation(
        "groups that were left over change their shard in a resume on as many",
        "siirl/data/buffer.py",
        "        if len(states) == num_shards and shard in parts:\n",
        "        if len(states) == num_shards == 1:\n",
        "tests/unit/data/test_dapo_buffer.py::test_as_many_shards_as_before_go_on_with_the_rows_that_each_had",
    ),
    Mutation(
        "of several modules to adapt those that the model has not are left out in silence",
        "siirl/model_files/directory.py",
        "    missing = [name for name in targets if not any(module.endswith",
        "    missing = [name for name in targets[:1] if not any(module.endswith",
        "tests/unit/model_files/test_adapted_modules.py",
    ),
    Mutation(
        "a link of somebody else is followed where leftovers are removed",
        "siirl/cleanup.py",
        "FOLDER | (0 if links else os.O_NOFOLLOW)",
        "FOLDER",
        "tests/unit/test_leftovers.py tests/unit/engines/test_temporary.py",
    ),
    Mutation(
        "a layer without a sliding window takes its module's",
        "siirl/engines/train/attention/packed_attention.py",
        'getattr(module, "sliding_window", None) if sliding_window is ... else sliding_window',
        'getattr(module, "sliding_window", None) if sliding_window in (..., None) else sliding_window',
        "tests/unit/engines/test_fsdp_packed_attention.py",
    ),
    Mutation(
        "compiled code is taken from a folder that somebody else has made",
        "siirl/guarded_files.py",
        "        if stat.S_ISDIR(about.st_mode) and is_own(about):\n",
        "        if stat.S_ISDIR(about.st_mode):\n",
        "tests/unit/launch/test_worker_entry.py",
    ),
    Mutation(
        "a checkpoint whose bytes have changed is taken",
        "siirl/checkpoint/files.py",
        "        if record.sha256 != now.sha256:\n",
        "        if not record.sha256:\n",
        "tests/unit/checkpoint/test_checkpoint_files.py",
    ),
    Mutation(
        "the loss depends on how rows are split",
        "siirl/algorithms/aggregate.py",
        "            return (loss_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)).sum() / rows\n",
        "            return (loss_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)).mean()\n",
        "tests/unit/algorithms/test_algorithms_terms.py",
    ),
    Mutation(
        "k3 has no bound",
        "siirl/algorithms/kl.py",
        "(torch.expm1(log_ratio_BT) - log_ratio_BT).clamp(max=10.0)",
        "(torch.expm1(log_ratio_BT) - log_ratio_BT)",
        "tests/unit/algorithms/test_algorithms_terms.py",
    ),
    Mutation(
        "a prompt that is cut loses its generation prompt",
        "siirl/data/dataset.py",
        "tail = min(limit, self._num_last if is_chat else 0)",
        "tail = 0",
        "tests/unit/data/test_prompts.py",
    ),
    Mutation(
        "an engine goes on with old and new weights mixed",
        "siirl/engines/weights/target.py",
        "    if missing:\n        some = ",
        "    if len(missing) > 1:\n        some = ",
        "tests/unit/engines/test_lora_rollout.py tests/dist/test_links.py",
    ),
    Mutation(
        "who shows no token is never sent away",
        "siirl/access.py",
        "gone = [who for who, one in self._waiting.items() if one.until_s <= now_s]",
        "gone = list(self._waiting)[:0]",
        "tests/unit/test_unauthenticated_connections.py",
    ),
    Mutation(
        "episodes of a step begin before all engines have its weights",
        "siirl/nodes/streams.py",
        "            dist.all_gather_object(found, versions, group=self._peers)\n",
        "            found = [dict.fromkeys(self._plan.policies, max(versions.values(), default=0))]\n",
        "tests/dist/test_agent_streams.py"
        "::test_episodes_go_on_wherever_their_engines_are_and_are_trained_once_within_the_bound",
    ),
    Mutation(
        "who waits at a gate asks a client that is closed",
        "siirl/agents/policy.py",
        "        while not self._opened.is_set():",
        "        if not self._opened.is_set():",
        "tests/unit/agents/test_pump.py",
    ),
    Mutation(
        "a turn is taken back while its engine takes weights",
        "siirl/engines/rollout/base.py",
        """        with self.guard.used():
            answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused.items())
            version,""",
        """        if True:
            answers: list[tuple[Key, Completion | EpisodeFailed]] = list(self._refused.items())
            version,""",
        "tests/unit/nodes/test_episodes_in_flight.py"
        "::test_a_turn_is_taken_back_when_its_engine_has_its_new_weights",
    ),
    Mutation(
        "a rank that only answers does not say that its engine has failed",
        "siirl/nodes/streams.py",
        "        while not over.is_completed():",
        "        while False:",
        "tests/dist/test_agent_streams.py::test_who_fails_tells_all_others_why",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="break siirl in places; the tests must be red")
    parser.add_argument("--only", default="", help="those whose description or file has this word")
    wanted = parser.parse_args().only
    chosen = [one for one in MUTATIONS if wanted in one.what or wanted in one.file]
    with tempfile.TemporaryDirectory(prefix="siirl_mutations_") as folder:
        tree = _copied(Path(folder))
        print("| what goes wrong | file | tests | red |\n|---|---|---|---|", flush=True)
        seen = [_shown(one, tree) for one in chosen]
    print(f"{sum(seen)} of {len(chosen)} are red")
    return int(not all(seen))


def _copied(folder: Path) -> Path:
    """The files of the tree that git does not ignore, with the environment of this one."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, os.fsdecode(names).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def _shown(mutation: Mutation, tree: Path) -> bool:
    """Break it, run its tests, mend it, and print the row; whether the tests saw it and are green without."""
    file = tree / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, (
        f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times"
    )
    sound = _run(mutation.tests, tree)
    file.write_text(text.replace(mutation.old, mutation.new))
    broken = _run(mutation.tests, tree, "-x")
    file.write_text(text)
    red = re.findall(r"^FAILED \S*?::(\w+)", broken.stdout, re.MULTILINE)
    green = sound.returncode == 0
    seen = f"`{red[0]}`" if red else "NO"
    seen += "" if green else ", and not green without it"
    files = ", ".join(sorted({Path(name.split("::")[0]).name for name in mutation.tests.split()}))
    print(f"| {mutation.what} | {mutation.file} | {files} | {seen} |", flush=True)
    if not (red and green):
        print((broken if green else sound).stdout[-2000:], file=sys.stderr)
    return bool(red) and green


def _run(tests: str, tree: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run these tests with the code of the tree."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    return subprocess.run(
        [*words, *tests.split(), *more],
        cwd=tree,
        env=os.environ | quiet | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )


if __name__ == "__main__":
    sys.exit(main())
