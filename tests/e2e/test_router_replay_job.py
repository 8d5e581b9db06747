"""The main job trains a mixture of experts by the experts that were chosen before: R3, and R2."""

import json
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
ACTOR = "actor_rollout_ref.actor"
R2, R3 = (f"{ACTOR}.router_replay.mode={mode}" for mode in ("R2", "R3"))
TALK = "dependencies: [solver], config: {model.path: MODEL_B}}"
BACK = "dependencies: [solver], config: {model.path: MODEL_B}, loop: {to: solver, max_turns: 2}}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    sizes = {"tie": False, "init_std": 0.2, "head_dim": 32, "layers": 4, "experts": 16, "mlp": 48}
    make_tiny_model_dir(made.model, "qwen3_moe", **sizes)
    return made


NOTE = '''
import json
import os
from pathlib import Path

COLUMNS = ("row_id", "prompt_ids", "prompt_length", "response_ids", "response_length", "prompt_experts")


def note(ctx, rows):
    """Writes down the rows of the first step, with the experts by which they are trained."""
    columns = {name: rows[name].tolist() for name in (*COLUMNS, "response_experts")}
    if ctx.step == 1:
        folder = Path(ctx.cfg.trainer.output_dir) / "noted"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{ctx.agent}_{os.environ['RANK']}.json").write_text(json.dumps(columns))
    return rows.select()
'''
NOTE_NODE = """
  - {node_id: note_NAME, node_type: COMPUTE, agent_group: AGENT, dependencies: [advantage_NAME],
     executable_ref: "CODE:note", writes: [], reads: [row_id, prompt_ids, prompt_length, response_ids,
     response_length, prompt_experts, response_experts]}
"""


def check_experts(noted: list[Path], model_dir: Path, layers: int) -> None:
    """Each token of each row has the experts of its router's largest logits in plain Hugging Face.

    Of the last token nothing is known: it was drawn, and not read.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    num, distinct = 0, set()
    for columns in (json.loads(path.read_text()) for path in noted):
        for at in range(len(columns["row_id"])):
            long, said = columns["prompt_length"][at], columns["response_length"][at]
            start = len(columns["prompt_ids"][at]) - long
            ids = columns["prompt_ids"][at][start:] + columns["response_ids"][at][:said]
            given = columns["prompt_experts"][at][start:] + columns["response_experts"][at][:said]
            with torch.no_grad():
                of_layers = model(torch.tensor([ids]), output_router_logits=True).router_logits
            chosen_NLK = torch.tensor(given).view(len(ids), layers, -1)[:-1]
            for layer, logits_NE in enumerate(of_layers):
                theirs_NK = logits_NE[:-1].topk(chosen_NLK.shape[-1]).indices.sort().values
                assert torch.equal(chosen_NLK[:, layer].sort().values, theirs_NK), (at, layer)
                distinct |= set(map(tuple, theirs_NK.tolist()))
            num += len(ids) - 1
    assert num > 100 and len(distinct) > 5, "too little was chosen to tell tokens apart"


def arguments_of_two_agents(inputs: Inputs, folder: Path, other: Path, *more: str) -> list[str]:
    """Two that speak twice, each with its own mixture of experts."""
    text = (HERE / "solver_verifier.yaml").read_text()
    assert TALK in text
    (folder / "note.py").write_text(NOTE)
    for agent, name in enumerate(("solver", "verifier")):
        node = NOTE_NODE.replace("NAME", name).replace("AGENT", str(agent))
        text += node.replace("CODE", str(folder / "note.py"))
    (folder / "dag.yaml").write_text(text.replace(TALK, BACK).replace("MODEL_B", str(other)))
    return overrides(
        inputs,
        folder / "out",
        f"dag.workflow_path={folder / 'dag.yaml'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.agent.max_turn_tokens=5",
        f"{ACTOR}.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        *more,
    )


def test_turns_are_trained_by_the_experts_that_sampled_them(inputs, tmp_path):
    """In fp32 trainer and engine choose alike: an expert given to the wrong token or layer would be seen.

    By the log-probs, and token by token by routers of plain Hugging Face; that the trainer computes by
    what it is given, whatever that is, is held in tests/contracts/test_router_replay.py.
    """
    other = make_tiny_model_dir(tmp_path / "other", "mixtral", tie=False, init_std=0.2, seed=5)
    finished = run_job(2, arguments_of_two_agents(inputs, tmp_path, other, R3))
    for agent in (0, 1):
        assert len(finished.values(f"agent_{agent}/actor/grad_norm")) == 2
        assert min(finished.values(f"agent_{agent}/actor/grad_norm")) > 0
        assert max(finished.values(f"agent_{agent}/actor/rollout_log_prob_diff_max")) < 1e-3
    assert finished.values("agent_0/interaction/turns") == [4, 4]
    for agent, (model_dir, layers) in enumerate(((inputs.model, 4), (other, 2))):
        noted = list((tmp_path / "out" / "noted").glob(f"{agent}_*.json"))
        assert len(noted) == 2
        check_experts(noted, model_dir, layers)


CUT = (f"{ACTOR}.megatron.pipeline_model_parallel_size=2", f"{ACTOR}.megatron.param_dtype=float32")
BF16 = ("actor_rollout_ref.rollout.dtype=bfloat16", "trainer.total_training_steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_trainer_and_rollout_in_bf16_are_closer_by_the_same_experts(inputs, tmp_path, strategy):
    distances = {}
    trainer = (f"{ACTOR}.strategy={strategy}", *(CUT if strategy == "megatron" else ()))
    for mode, keys in (("disabled", ()), ("R3", (R3,))):
        finished = run_job(2, overrides(inputs, tmp_path / mode, *BF16, *trainer, *keys))
        (distances[mode],) = finished.values("actor/rollout_log_prob_diff_max")
    assert distances["R3"] < distances["disabled"] / 3


@pytest.mark.slow
def test_the_update_uses_the_experts_of_the_pass_before_it(inputs, tmp_path):
    """The first optimizer step of a step is as without; the later ones differ, as routers have moved."""
    steps = ("trainer.total_training_steps=1", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.use_kl_loss=True")
    without = run_job(2, overrides(inputs, tmp_path / "without", *steps))
    replayed = run_job(2, overrides(inputs, tmp_path / "replayed", *steps, R2))
    assert replayed.values("actor/rollout_log_prob_diff_max")[0] < 1e-3
    assert replayed.values("reward/score") == without.values("reward/score")
    (ours,), (theirs,) = replayed.values("actor/loss"), without.values("actor/loss")
    assert ours != pytest.approx(theirs, rel=1e-6)
    assert ours == pytest.approx(theirs, rel=0.5, abs=0.05)


LAG = (
    *("actor_rollout_ref.rollout.max_lag=2", "actor_rollout_ref.rollout.surplus=1.5", f"{ACTOR}.optim.lr=0"),
    *("actor_rollout_ref.rollout.stop_token_ids=[5,6,7,8]", "trainer.total_training_steps=3"),
)
LONG_TURNS = ("data.max_response_length=192", "actor_rollout_ref.rollout.agent.max_turn_tokens=48")


@pytest.mark.slow
@pytest.mark.parametrize("talks", [False, True], ids=("responses", "episodes"))
def test_what_goes_on_from_step_to_step_keeps_its_experts(inputs, tmp_path, talks):
    """Under constant weights, in fp32: an expert given to the wrong token would be seen."""
    if talks:
        other = make_tiny_model_dir(tmp_path / "other", "mixtral", tie=False, init_std=0.2, seed=5)
        arguments = arguments_of_two_agents(inputs, tmp_path, other, R3, *LAG, *LONG_TURNS)
    else:
        dump = f"trainer.dump_rollouts_dir={tmp_path / 'dump'}"
        arguments = overrides(inputs, tmp_path / "out", R3, *LAG, dump, "data.max_response_length=64")
    finished = run_job(2, arguments)
    for agent in ("agent_0/", "agent_1/") if talks else ("",):
        differences = finished.values(f"{agent}actor/rollout_log_prob_diff_max")
        assert len(differences) == 3 and max(differences) < 1e-3
    partial = f"{'agent_0/' if talks else ''}rollout/partial"
    assert max(finished.values(partial)) > 0
