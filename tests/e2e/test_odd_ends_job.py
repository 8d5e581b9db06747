"""Runs whose folder or reader goes away, whose reward leaks or says too much: each ends as is expected."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from job_harness import ROOT, Finished, Inputs, overrides, run_job
from killed_jobs import start, steps_done, wait_until
from safetensors.torch import load_file
from transformers import AutoTokenizer

from siirl.cli import main
from siirl.main_dag import main as run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def test_a_folder_that_is_renamed_while_the_run_writes_to_it_ends_the_run_with_its_name(inputs, tmp_path):
    keys = ("trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.export_hf=false")
    output = tmp_path / "out"
    words = [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, output, *keys)]
    job = start(words, tmp_path / "console")
    wait_until(lambda: steps_done(output) >= 1, job, tmp_path / "console")
    output.rename(tmp_path / "elsewhere")
    assert job.wait(60) == 2
    assert f"{output} was removed or renamed while the run wrote to it" in (tmp_path / "console").read_text()


def test_a_reader_that_leaves_ends_no_run(inputs, tmp_path):
    """`siirl run ... | head -1` trains to its end, and ends well."""
    keys = ("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.progress=plain")
    words = [sys.executable, "-m", "siirl.cli", "run", *overrides(inputs, tmp_path / "out", *keys)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    first = job.stdout.readline()
    job.stdout.close()  # as head does when it has shown its line
    assert first.endswith("\n") and job.wait(200) == 0, first
    assert steps_done(tmp_path / "out") == 1


LEAKS = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    kept.extend(open(os.devnull) for _ in range(50))
    return sum(letter.isdigit() for letter in solution_str) / 8
"""
TELLS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "said": "x" * 200_000_000}
"""


@pytest.mark.slow
def test_a_reward_that_leaks_is_told_and_one_of_200_megabytes_refused_and_a_copied_checkpoint_goes_on(
    inputs, tmp_path, capfd
):
    for name, code in (("leaks", LEAKS), ("tells", TELLS)):
        (tmp_path / f"{name}.py").write_text(code)
    keys = ("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false")
    leaks = f"custom_reward_function.path={tmp_path / 'leaks.py'}"
    keys = (*keys, "trainer.export_hf=false", leaks)
    assert run(overrides(inputs, tmp_path / "out", *keys, "trainer.save_freq=1")) == 0
    log = (tmp_path / "out" / "logs" / "rank_0.log").read_text()
    assert re.search(r"a reward worker is replaced: it holds \d+ files and sockets", log), log
    assert f"compute_score of {tmp_path / 'leaks.py'}" in log
    assert Finished.read(tmp_path / "out").values("reward/worker_leak")[0] >= 2

    saved, copy = tmp_path / "out" / "checkpoints" / "global_step_1", tmp_path / "the best, so far"
    shutil.copytree(saved, copy)
    foreign = tmp_path / "theirs" / "global_step_7" / "actor"
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_1_rank_0.pt").write_bytes(b"PK")
    longer = [*overrides(inputs, tmp_path / "again", *keys), "trainer.total_training_steps=2"]
    resume = ("trainer.resume_mode=resume_path", "trainer.resume_from_path='{}'")
    capfd.readouterr()
    assert main(["check", *longer, resume[0], resume[1].format(foreign.parent)]) == 2
    told = capfd.readouterr()
    assert "verl" in told.out + told.err and str(foreign.parent) in told.out + told.err
    goes_on = [*longer, resume[0], resume[1].format(copy)]
    assert main(["check", *goes_on]) == 0
    tells = f"custom_reward_function.path={tmp_path / 'tells.py'}"
    assert run([*goes_on, tells, "trainer.resume_changed=true"]) == 1
    told = capfd.readouterr()
    assert re.search(r"compute_score of .*tells\.py.* MiB", told.err), told.err
    assert run([*goes_on, "trainer.overwrite=true"]) == 0
    assert [line["step"] for line in Finished.read(tmp_path / "again").lines] == [2]


def test_a_run_that_goes_on_another_day_has_the_prompts_of_the_day_on_which_it_began(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    template = inputs.model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }} " + template.read_text())
    keys = ["trainer.save_freq=1", f"trainer.dump_rollouts_dir={tmp_path / 'dumped'}"]
    keys += ["trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.resume_mode=auto"]
    for steps, date in ((1, ["data.template_date=2019-12-31"]), (2, [])):
        more = [*keys, f"trainer.total_training_steps={steps}", *date]
        run_job(1, overrides(inputs, tmp_path / "out", *more))
    files = sorted((tmp_path / "dumped").rglob("*.safetensors"))
    assert len(files) == 2
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    for rows in map(load_file, files):
        prompts = rows["prompt_ids"].split(rows["prompt_length"].tolist())
        assert prompts and all(tokenizer.decode(ids).startswith("2019-12-31") for ids in prompts)
