"""Dynamic sampling with a lag that goes on in another layout: what it trains, and what comes of it.

Under constant weights, the groups of the run that nobody disturbed; under others, step by step what plain
Hugging Face computes in float64 from the rows, before the resume and after it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from job_harness import Finished, Inputs, overrides, run_job
from test_dapo_main_job import COIN, DAPO, LAG
from test_hf_replay import MARGIN, Row, clipped, log_probs, mean, normalised, over_tokens
from transformers import AutoTokenizer

from siirl.compiler.compile import TEMPLATES

ACTOR = "actor_rollout_ref.actor"
STEPS, SAVED, LR, MINI_BATCH, EPS = 4, 2, 2e-3, 8, 1e-6
PROMPTS, READ = 8, "data/arithmetic/prompts"
Group = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(prompt, response) of each sample."""
SAMPLED = (*LAG[2:], "actor_rollout_ref.rollout.n=2")
"""How responses are sampled with and without a lag."""
NOTE = '''
import json
import os
from pathlib import Path

COLUMNS = ("row_id", "group_id", "prompt_ids", "prompt_length", "response_ids", "response_length")
COLUMNS += ("rollout_log_prob", "weight_version")


def note(ctx, rows):
    """Writes down the rows that train in a step, those of each rank in a file."""
    folder = Path(ctx.cfg.trainer.output_dir) / "seen" / str(ctx.step)
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: rows[name].tolist() for name in COLUMNS}
    (folder / os.environ["RANK"]).write_text(json.dumps(columns))
    return rows.select()
'''
NODE = """
  - node_id: note
    node_type: COMPUTE
    dependencies: [dynamic_sampling]
    executable_ref: CODE:note
    reads: [row_id, group_id, prompt_ids, prompt_length, response_ids, response_length, rollout_log_prob,
            weight_version]
    writes: []
"""
LAYOUTS = {
    "one rank": (1, ()),
    "ranks share rows": (2, (f"{ACTOR}.ulysses_sequence_parallel_size=2",)),
    "megatron": (2, (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.param_dtype=float32")),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    made = Inputs.make(tmp_path_factory.mktemp("inputs"), rows=200)
    made.reward.write_text(COIN)
    return made


def run(
    inputs: Inputs, folder: Path, world: int, *more: str, steps: int = STEPS, template: str = "dapo"
) -> Finished:
    """Four steps, or what is left of them; `note` writes below the folder what trains."""
    code, dag = folder.parent / "note.py", folder.parent / "dag.yaml"
    code.write_text(NOTE)
    node = NODE if template == "dapo" else NODE.replace("dynamic_sampling", "function_reward")
    dag.write_text((TEMPLATES / f"{template}.yaml").read_text() + node.replace("CODE", str(code)))
    keys = (f"dag.workflow_path={dag}", f"trainer.total_training_steps={steps}", "trainer.test_freq=-1")
    with_lag = (*DAPO, *LAG) if template == "dapo" else ()
    return run_job(world, overrides(inputs, folder, *with_lag, *keys, *more), 200)


def resumed(inputs: Inputs, folder: Path, whole: Finished, layout: str, *more: str) -> Finished:
    world, keys = LAYOUTS[layout]
    checkpoint = whole.output / "checkpoints" / f"global_step_{SAVED}"
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    return run(inputs, folder, world, *where, *keys, *more)


def trained(folder: Path, step: int) -> list[tuple[Row, list[float], list[int]]]:
    """The rows of a step in their order, each with its rollout's log-probs and versions; each once."""
    rows = {}
    for part in (folder / "seen" / str(step)).iterdir():
        columns = json.loads(part.read_text())
        for at, number in enumerate(columns["row_id"]):
            num, long = columns["response_length"][at], columns["prompt_length"][at]
            prompt = columns["prompt_ids"][at][len(columns["prompt_ids"][at]) - long :]
            row = Row(columns["group_id"][at], prompt, columns["response_ids"][at][:num], 0.0, [], [], [])
            rows[number] = row, columns["rollout_log_prob"][at][:num], columns["weight_version"][at][:num]
    return [rows[number] for number in sorted(rows)]


def score(tokenizer, response: Sequence[int]) -> float:
    """What COIN says of a response, with the token of the key that stopped it."""
    return float(sum(letter.isdigit() for letter in tokenizer.decode(response)) % 2 == 0)


def whole_groups(folder: Path, steps: range) -> list[Group]:
    """The groups of some steps as what was asked and said."""
    found: dict[tuple[int, int], list] = {}
    for step in steps:
        for row, _, _ in trained(folder, step):
            found.setdefault((step, row.group), []).append((tuple(row.prompt), tuple(row.response)))
    return [tuple(sorted(group)) for group in found.values()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_constant_weights_each_prompt_is_sampled_as_without_a_lag_and_trained_once_in_any_layout(
    inputs, tmp_path
):
    """All prompts that were read are trained once, but those whose scores do not vary and the last few.

    Those are less than a batch of the loader; which ones depends on the layout.
    """
    constant = (f"{ACTOR}.optim.lr=0", "trainer.export_hf=False")
    whole = run(inputs, tmp_path / "whole", 2, f"trainer.save_freq={SAVED}", *constant)
    assert whole.values("rollout/in_flight")[SAVED - 1] > 0 and max(whole.values("sampling/rounds")) > 1
    assert max(whole.values("rollout/staleness_max")) > 0 and max(whole.values("rollout/partial")) > 0
    runs = {"undisturbed": whole} | {
        layout: resumed(inputs, tmp_path / layout.replace(" ", "_"), whole, layout, *constant)
        for layout in LAYOUTS
    }
    read = {name: sum(made.values(READ)) for name, made in runs.items()}
    before = sum(whole.values(READ)[:SAVED])
    read |= {name: before + read[name] for name in LAYOUTS}
    plainly = ("data.train_batch_size=5", f"{ACTOR}.ppo_mini_batch_size=5", "trainer.val_before_train=False")
    num = int(max(read.values())) // 5
    plain = run(inputs, tmp_path / "plain", 1, *constant, *plainly, *SAMPLED, steps=num, template="grpo")
    assert sum(plain.values(READ)) == 5 * num
    drawn = whole_groups(tmp_path / "plain", range(1, num + 1))
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    for name, made in runs.items():
        found = whole_groups(tmp_path / "whole", range(1, SAVED + 1))
        found += whole_groups(made.output, range(SAVED + 1, STEPS + 1))
        assert len(found) == STEPS * PROMPTS and len(set(found)) == len(found), name
        varied = [
            group for group in drawn[: int(read[name])] if len({score(tokenizer, r) for _, r in group}) > 1
        ]
        assert not Counter(found) - Counter(varied), f"{name} trains what nobody sampled"
        left = Counter(varied) - Counter(found)
        assert left.total() <= made.values("rollout/in_flight")[-1] < 5, name
        assert max(made.values("rollout/staleness_max")) <= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_with_a_lag_are_those_of_plain_hugging_face_before_a_resume_and_after_it(inputs, tmp_path):
    """Rows of older weights, weighed by the ratio to those that the step starts from, at most 2."""
    from transformers import AutoModelForCausalLM

    keys = (f"{ACTOR}.optim.lr={LR}", f"+{ACTOR}.optim.override_optimizer_config={{eps:{EPS}}}")
    before = run(inputs, tmp_path / "before", 2, f"trainer.save_freq={SAVED}", *keys)
    after = resumed(inputs, tmp_path / "after", before, "one rank", *keys)
    model = AutoModelForCausalLM.from_pretrained(
        inputs.model, dtype=torch.float64, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.01)
    furthest, oldest = 0.0, 0
    for step in range(1, STEPS + 1):
        job, folder = (before, "before") if step <= SAVED else (after, "after")
        noted = trained(tmp_path / folder, step)
        rows = [row for row, _, _ in noted]
        assert len(rows) == 2 * MINI_BATCH
        weights = []
        for row, sampled, versions in noted:
            row.score = score(tokenizer, row.response)
            with torch.no_grad():
                now = log_probs(model, row)
            row.old = now.tolist()
            apart = now - torch.tensor(sampled, dtype=torch.float64)
            weights.append(apart.exp().clamp(max=2.0))
            older = torch.tensor(versions) < 2 * (step - 1)
            assert not (~older).any() or float(apart[~older].abs().max()) < 1e-4
            furthest = max(furthest, float(apart.abs().max()))
            oldest = max(oldest, step - 1 - min(versions) // 2)
        normalised(rows)
        losses, norms = [], []
        for first in range(0, len(rows), MINI_BATCH):
            some = range(first, first + MINI_BATCH)
            loss = over_tokens(
                [weights[at] * clipped(rows[at], log_probs(model, rows[at]), 0.2, 0.28) for at in some]
            )
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            losses.append(float(loss))
        line = next(line for line in job.lines if line["step"] == step)
        assert line["actor/loss"] == pytest.approx(mean(losses), rel=1e-4, abs=MARGIN), step
        assert line["actor/grad_norm"] == pytest.approx(mean(norms), rel=1e-4), step
    assert furthest > 0.05 and 0 < oldest <= 2, "the lag has changed nothing in this test"
    theirs = model.state_dict()
    apart = torch.cat(
        [(one.double() - theirs[name]).abs().flatten() for name, one in after.weights().items()]
    )
    assert float(apart.max()) < LR / 10 and float(apart.mean()) < LR / 1e4
