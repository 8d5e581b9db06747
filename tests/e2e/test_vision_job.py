"""A vision model through the main job: images reach the ranks that need them, and the tower learns or not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import vision_cases as vision
from fixtures_tiny import write_parquet
from job_harness import Finished, run_example, run_job
from safetensors.torch import load_file, save_file

MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(set(solution_str.split()))) / 4
"""


def rows(count: int) -> list[dict]:
    """Prompts with no, one or two images of unequal sizes, some of equal tokens."""
    made = []
    for index in range(count):
        sizes = [(40, 40), (30, 90)][: index % 3]
        images = [{"bytes": vision.png(*size, seed=index), "path": None} for size in sizes]
        text = "<image>red " * len(images) + "colour ?"
        prompt = [{"role": "user", "content": text}]
        made.append(
            {"prompt": prompt, "images": images, "data_source": "s", "reward_model": {"ground_truth": "1"}}
        )
    return made


@pytest.fixture(scope="module", params=["qwen3_vl"])
def arguments(request, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = vision.make_vision_model(folder / "model", request.param)
    data = write_parquet(folder / "train.parquet", rows(24))
    (folder / "reward.py").write_text(REWARD)
    return [
        "data.dataset_type=vlm",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=6",
        "data.max_prompt_length=32",
        "data.max_response_length=5",
        "algorithm.adv_estimator=grpo",
        f"{MODEL}.path={model}",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.ppo_mini_batch_size=3",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=float32",
        "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=float32",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=3",
        f"custom_reward_function.path={folder}/reward.py",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
    ]


def megatron(**sizes: object) -> list[str]:
    """Actor and reference under Megatron-Core; the reference has the actor's sizes."""
    roles = (ACTOR, "actor_rollout_ref.ref")
    keys = [
        f"{role}.{key}" for role in roles for key in ("strategy=megatron", "megatron.param_dtype=float32")
    ]
    return [*keys, *(f"{ACTOR}.megatron.{key}={value}" for key, value in sizes.items())]


IN_TWO = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def model_of(arguments: list[str]) -> Path:
    return Path(next(text for text in arguments if text.startswith(f"{MODEL}.path=")).partition("=")[2])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("sampler", "trained"),
    [
        ("hf", "the text part"),
        pytest.param("vllm", "the text part", marks=pytest.mark.slow),
        pytest.param("vllm on both", "the text part", marks=pytest.mark.slow),
        pytest.param("hf", "adapters", marks=pytest.mark.slow),
        pytest.param("vllm", "adapters", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_on_images_and_what_is_frozen_stays_bit_equal(
    arguments, tmp_path, sampler, trained, strategy
):
    keys = [f"{ROLLOUT}.name={sampler.partition(' ')[0]}", f"trainer.output_dir={tmp_path}"]
    if sampler == "vllm on both":
        keys += [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    keys += megatron(**IN_TWO) if strategy == "megatron" else []
    keys += [f"{ACTOR}.freeze_vision_tower=true" if trained == "the text part" else f"{MODEL}.lora_rank=4"]
    job = run_job(2, [*arguments, *keys], deadline_s=500)
    assert max(job.values("actor/rollout_log_prob_diff")) < 1e-5
    before, after = weights(model_of(arguments)), weights(tmp_path / "hf_model")
    assert before.keys() == after.keys()
    parts = ("language_model.", "lm_head") if trained == "the text part" else ("_proj.weight",)
    wanted = {name for name in before if any(part in name for part in parts) and "visual." not in name}
    assert wanted and {name for name in before if not torch.equal(before[name], after[name])} == wanted
    for name in ("preprocessor_config.json", "config.json", "tokenizer.json"):
        assert (tmp_path / "hf_model" / name).is_file()
    config = json.loads((tmp_path / "hf_model" / "config.json").read_text())
    assert config["model_type"] == "qwen3_vl" and vision.hf_model(tmp_path / "hf_model")


PPO = (
    *("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.freeze_vision_tower=true"),
    *("critic.ppo_micro_batch_size_per_gpu=2", "critic.fsdp_config.mixed_precision.param_dtype=float32"),
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampler", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_critic_that_sees_learns_values_and_goes_on_from_a_checkpoint(arguments, tmp_path, sampler):
    keys = [*arguments, *PPO, f"{ROLLOUT}.name={sampler}", "trainer.save_freq=1"]
    whole = run_job(2, [*keys, f"trainer.output_dir={tmp_path / 'whole'}"], deadline_s=400)
    assert min(whole.values("critic/grad_norm")) > 0 and len(whole.values("critic/value_loss")) == 2
    before, after = weights(model_of(arguments)), weights(tmp_path / "whole" / "hf_critic")
    assert after.keys() - before.keys() == {"score.weight", "score.bias"}
    assert before.keys() - after.keys() == {"lm_head.weight"}
    moved = {name for name in before if name in after and not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "language_model." in name}
    config = json.loads((tmp_path / "whole" / "hf_critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForTokenClassification"]
    first = tmp_path / "whole" / "checkpoints" / "global_step_1"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}"]
    run_job(2, [*keys, *resume, f"trainer.output_dir={tmp_path / 'parts'}"], deadline_s=400)
    again = weights(tmp_path / "parts" / "hf_critic")
    assert again.keys() == after.keys() and all(torch.equal(again[name], after[name]) for name in after)


def scored_by(arguments: list[str], scorer: Path, output: Path, world: int, *more: str) -> Finished:
    keys = [
        *(one for one in arguments if not one.startswith("custom_reward")),
        *("reward_model.enable=true", f"reward_model.model.path={scorer}", *more),
        "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
        *("reward_model.micro_batch_size_per_gpu=4", "trainer.val_before_train=true"),
    ]
    return run_job(world, [*keys, f"trainer.output_dir={output}"], deadline_s=400)


@pytest.mark.timeout(900)
def test_a_reward_model_that_sees_scores_what_a_policy_says_of_images(arguments, tmp_path):
    scorer = vision.make_vision_model(tmp_path / "scorer", "qwen3_vl", layers=2, seed=3)
    tensors = weights(scorer)
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].contiguous()
    save_file(tensors, scorer / "model.safetensors", metadata={"format": "pt"})
    two = scored_by(arguments, scorer, tmp_path / "two", 2)
    one = scored_by(arguments, scorer, tmp_path / "one", 1)
    for name in ("reward/score", "reward/score_max", "val/reward/mean"):
        assert two.values(name)[0] == pytest.approx(one.values(name)[0], abs=1e-5), name
    assert min(two.values("actor/grad_norm")) > 0
    blind = {name: 0 * x if "visual.merger" in name else x for name, x in tensors.items()}
    save_file(blind, scorer / "model.safetensors", metadata={"format": "pt"})
    other = scored_by(arguments, scorer, tmp_path / "blind", 2, "trainer.total_training_steps=1")
    assert abs(other.values("reward/score")[0] - one.values("reward/score")[0]) > 1e-3


@pytest.mark.timeout(900)
def test_a_teacher_that_sees_says_of_its_own_tokens_what_the_policy_does(arguments, tmp_path):
    """As long as they are one model there is nothing to learn; of another one there is."""
    other = vision.make_vision_model(tmp_path / "teacher", "qwen3_vl", seed=5)
    norms = {}
    for name, teacher in (("same", model_of(arguments)), ("other", other)):
        precision = "teacher.fsdp_config.mixed_precision.param_dtype"
        node = f"{{teacher: {{teacher.model.path: {teacher}, {precision}: float32}}}}"
        keys = [
            *(
                f"{ACTOR}.policy_loss.loss_mode=distill",
                f"{ACTOR}.distill.top_k=-1",
                f"dag.node_config={node}",
            ),
            *(
                f"{ACTOR}.ppo_mini_batch_size=6",
                "trainer.total_training_steps=1",
                f"{ACTOR}.use_kl_loss=false",
            ),
        ]
        job = run_job(2, [*arguments, *keys, f"trainer.output_dir={tmp_path / name}"], deadline_s=300)
        norms[name] = job.values("actor/grad_norm")[0]
    assert norms["same"] < 1e-4 < 0.1 < norms["other"], norms


COMPARED = ("reward/score", "actor/loss", "actor/grad_norm", "actor/ref_kl", "actor/entropy")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampler", ["hf", "vllm"])
@pytest.mark.parametrize("sizes", [IN_TWO, {}, {"context_parallel_size": 2}], ids=["tp2 sp", "dp2", "cp2"])
def test_steps_under_megatron_are_those_under_fsdp(arguments, tmp_path, sampler, sizes):
    found = []
    for name, ranks, keys in (("fsdp", 1, []), ("megatron", 2, megatron(**sizes))):
        more = [
            f"{ROLLOUT}.name={sampler}",
            f"{ROLLOUT}.temperature=0.9",
            f"trainer.output_dir={tmp_path / name}",
        ]
        found.append(run_job(ranks, [*arguments, *keys, *more], deadline_s=500))
    theirs, ours = found
    assert max(ours.values("actor/rollout_log_prob_diff")) < 1e-5
    for name in COMPARED:
        assert ours.values(name) == pytest.approx(theirs.values(name), rel=1e-4, abs=2e-5), name
    if sizes:  # ranks with rows of their own compute a prompt that they share once each
        assert ours.values("flops/train") == pytest.approx(theirs.values("flops/train"))
    one, two = (weights(tmp_path / name / "hf_model") for name in ("fsdp", "megatron"))
    assert one.keys() == two.keys()


GALLERY = """
import base64

from siirl.agents.shown import Shown


class Gallery:
    def reset(self, task, seed):
        self.images, self.left = task["images"] or [IMAGE], 1 + seed % 3
        return ""

    def step(self, actions):
        self.left -= 1
        image = {"bytes": base64.b64decode(self.images[self.left % len(self.images)])}
        said = sum(map(len, actions.values()))
        return Shown(f"{self.left % 10} <image> ?", (image,)), float(said % 2), self.left <= 0
"""
PARTS = """
dag_id: gallery
nodes:
  - {node_id: talk, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: game, node_type: ENV_INTERACT, dependencies: [talk], loop: {to: talk, max_turns: 3},
     config: {env_path: "FOLDER/gallery.py:Gallery"}}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [game]}
  - {node_id: old, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [talk], only_forward_compute: true}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages, old]}
"""
PROGRAM = """
import base64
import io
import os

import openai
from PIL import Image


def shown(image):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + image}}


def play(session):
    'Two turns: the images of the row, if it has some, and one that the program draws.'
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    images = [shown(image) for image in session.task["images"]]
    messages, said = [{"role": "user", "content": [*images, {"type": "text", "text": "colour ?"}]}], ""
    for turn in range(2):
        reply = client.chat.completions.create(model="talk", messages=messages)
        said += reply.choices[0].message.content or ""
        drawn = io.BytesIO()
        size = (30, 90) if len(said) % 2 else (40, 40)
        Image.new("RGB", size, (len(said) * 9 % 256, 80, 160)).save(drawn, format="PNG")
        text = {"type": "text", "text": "and ?"}
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": [shown(base64.b64encode(drawn.getvalue()).decode()), text]},
        ]
    return float(len(said) % 5)
"""
BY_A_PROGRAM = """
dag_id: program
nodes:
  - {node_id: talk, node_type: MODEL_INFERENCE, node_role: ROLLOUT,
     config: {serve: {command: "FOLDER/program.py:play"}}}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [talk]}
  - {node_id: old, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [talk], only_forward_compute: true}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages, old]}
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampler", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_program_sends_images_in_its_requests(arguments, tmp_path, sampler):
    pytest.importorskip("openai")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "dag.yaml").write_text(BY_A_PROGRAM.replace("FOLDER", str(tmp_path)))
    given = [one for one in arguments if not one.startswith(("custom_reward", f"{ACTOR}.use_kl_loss"))]
    more = [f"dag.workflow_path={tmp_path}/dag.yaml", f"{ROLLOUT}.name={sampler}", "trainer.deadline_s=240"]
    turns = [f"{ROLLOUT}.agent.max_turn_tokens=5", "data.max_response_length=40"]
    job = run_job(2, [*given, *more, *turns, f"trainer.output_dir={tmp_path}/out"], deadline_s=500)
    assert max(job.values("interaction/failed")) == 0 and min(job.values("actor/grad_norm")) > 0
    assert max(job.values("actor/rollout_log_prob_diff_max")) < 1e-4
    assert max(job.values("interaction/turns_max")) == 2
    assert min(job.values("rollout/response_length")) > 12  # images between turns are in it


LAG = (
    *(f"{ROLLOUT}.max_lag=1", f"{ROLLOUT}.surplus=1"),
    *(f"{ACTOR}.optim.lr=0", "trainer.total_training_steps=3"),
)


VALUED = (
    PARTS.replace("dependencies: [game]", "dependencies: [game, values]")
    + """
  - {node_id: values, node_type: MODEL_TRAIN, node_role: CRITIC, dependencies: [talk],
     only_forward_compute: true}
  - {node_id: critic, node_type: MODEL_TRAIN, node_role: CRITIC, dependencies: [advantages]}
"""
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sampler", "keys"),
    [
        pytest.param("hf", (), marks=pytest.mark.slow),
        pytest.param("hf", LAG, marks=pytest.mark.slow),
        pytest.param("hf", PPO, marks=pytest.mark.slow),
        pytest.param("vllm", (), marks=pytest.mark.slow),
        pytest.param("hf", megatron(**IN_TWO), marks=pytest.mark.slow),
    ],
    ids=["hf", "with a lag", "with a critic", "vllm", "megatron"],
)
def test_an_environment_shows_an_image_each_turn(arguments, tmp_path, sampler, keys):
    (tmp_path / "gallery.py").write_text(GALLERY.replace("IMAGE", repr(vision.SMALL)))
    workflow = VALUED if keys == PPO else PARTS
    (tmp_path / "dag.yaml").write_text(workflow.replace("FOLDER", str(tmp_path)))
    given = [one for one in arguments if not one.startswith(("custom_reward", f"{ACTOR}.use_kl_loss"))]
    more = [f"dag.workflow_path={tmp_path}/dag.yaml", f"{ROLLOUT}.name={sampler}"]
    turns = [f"{ROLLOUT}.agent.max_turn_tokens=5", "data.max_response_length=40"]
    job = run_job(2, [*given, *more, *turns, *keys, f"trainer.output_dir={tmp_path}/out"], deadline_s=500)
    assert max(job.values("interaction/turns_max")) == 3 and max(job.values("interaction/failed")) == 0
    assert max(job.values("actor/rollout_log_prob_diff_max")) < 1e-4
    assert keys == LAG or min(job.values("actor/grad_norm")) > 0
    assert keys != LAG or max(job.values("rollout/staleness_max")) > 0
    assert keys != PPO or min(job.values("critic/grad_norm")) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_responses_to_images_go_on_in_the_next_step(arguments, tmp_path):
    keys = [f"{ROLLOUT}.max_lag=2", f"{ROLLOUT}.surplus=1", "trainer.total_training_steps=4"]
    still = [f"{ACTOR}.optim.lr=0", f"trainer.output_dir={tmp_path}"]
    job = run_job(2, [*arguments, *keys, *still], deadline_s=500)
    assert max(job.values("rollout/staleness_max")) > 0
    assert max(job.values("actor/rollout_log_prob_diff")) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keys", [[], megatron(**IN_TWO)], ids=["fsdp", "megatron"])
def test_a_run_on_one_rank_that_stops_and_goes_on_ends_as_one_on_two_ranks(arguments, tmp_path, keys):
    whole = [*arguments, *keys, f"trainer.output_dir={tmp_path / 'whole'}", "trainer.save_freq=1"]
    run_job(2, whole, deadline_s=300)
    parts = [*arguments, f"trainer.output_dir={tmp_path / 'parts'}", "trainer.save_freq=1"]
    run_job(1, [*parts, "trainer.total_training_steps=1"], deadline_s=300)
    shutil.rmtree(tmp_path / "parts" / "hf_model", ignore_errors=True)
    ranks = 2 if keys else 1
    run_job(ranks, [*parts, *keys, "trainer.resume_mode=auto", "trainer.resume_changed=true"], deadline_s=300)
    one, two = (weights(tmp_path / name / "hf_model") for name in ("parts", "whole"))
    before = weights(model_of(arguments))
    assert one.keys() == two.keys() and not all(torch.equal(one[name], before[name]) for name in one)
    gap = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    few = float((gap > 1e-4).float().mean())  # whose gradients are roundings, of which Adam takes the sign
    assert few < 1e-4 and float(gap.max()) < 2e-3, (few, gap.max())


PPO_OF_COLOURS = (
    "algorithm.adv_estimator=gae",
    *("critic.optim.lr=1e-3", "critic.use_dynamic_bsz=true"),
    "critic.fsdp_config.mixed_precision.param_dtype=float32",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sampler", "keys"),
    [("hf", ()), ("vllm", ()), ("hf", megatron(**IN_TWO)), ("hf", PPO_OF_COLOURS)],
    ids=["hf", "vllm", "megatron", "with a critic"],
)
def test_the_example_learns_to_name_the_colour_of_an_image(tmp_path, sampler, keys):
    run_example(tmp_path, f"{ROLLOUT}.name={sampler}", *keys, example="vision")
    learnt = Finished.read(tmp_path).values("val/colours/accuracy/mean")
    assert learnt[0] < 0.4 and learnt[-1] > 0.9, learnt
