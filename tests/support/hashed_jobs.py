"""Small jobs of all kinds, and hashes of the weights that they export: what a refactoring must not change."""

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vision_cases
from fixtures_tiny import make_tiny_model_dir, write_parquet
from job_harness import ROOT, Inputs, overrides, run_job
from safetensors.torch import load_file

HELD = ROOT / "tests" / "e2e" / "weight_hashes.json"
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
MEGATRON = (f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.param_dtype=float32")
LONG = ("data.max_response_length=48", f"{ROLLOUT}.stop_token_ids=[5,6,7,8]")
ONE_MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size=8"
PROGRAM = '''
import openai


def play(session):
    """Two questions, the second with the answer to the first; worth the share of digits in both."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages, said = list(session.task["raw_prompt"]), []
    for _ in range(2):
        reply = client.chat.completions.create(model="solver", messages=messages)
        said.append(reply.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "and"}]
    return sum(letter.isdigit() for letter in "".join(said)) / 16
'''
WORKFLOWS = {
    "debate": """
dag_id: debate
nodes:
  - {node_id: solver, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: verifier, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 1,
     dependencies: [solver], config: {model.path: OTHER}, loop: {to: solver, max_turns: 2}}
  - {node_id: reward_0, node_type: COMPUTE, node_role: REWARD, dependencies: [verifier]}
  - {node_id: reward_1, node_type: COMPUTE, node_role: REWARD, agent_group: 1, dependencies: [verifier]}
  - {node_id: advantage_0, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [reward_0]}
  - {node_id: advantage_1, node_type: COMPUTE, node_role: ADVANTAGE, agent_group: 1,
     dependencies: [reward_1]}
  - {node_id: old_0, node_type: MODEL_TRAIN, node_role: ACTOR, only_forward_compute: true,
     dependencies: [solver]}
  - {node_id: old_1, node_type: MODEL_TRAIN, node_role: ACTOR, only_forward_compute: true, agent_group: 1,
     dependencies: [verifier]}
  - {node_id: train_0, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantage_0, old_0]}
  - {node_id: train_1, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 1,
     dependencies: [advantage_1, old_1]}
""",
    "program": """
dag_id: program
nodes:
  - {node_id: solver, node_type: MODEL_INFERENCE, node_role: ROLLOUT,
     config: {serve: {command: "FOLDER/program.py:play"}}}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [solver]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages]}
""",
    "distill": """
dag_id: distill
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout]}
  - {node_id: teacher, node_type: MODEL_INFERENCE, node_role: TEACHER,
     dependencies: [rollout], config: {model.path: TEACHER}}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [reward, teacher],
     config: {actor.policy_loss.loss_mode: distill}}
""",
}
"""Workflows that no template is; words in capitals are paths."""


@dataclass(frozen=True)
class HashedJob:
    """A small job: its ranks, and its keys beside those of all."""

    ranks: int
    keys: tuple[str, ...] = ()
    make_model: Callable[[Path], Any] = lambda path: make_tiny_model_dir(path, init_std=0.2)
    images: bool = False


JOBS: dict[str, HashedJob] = {
    "grpo": HashedJob(2, (f"{ACTOR}.use_kl_loss=True",)),
    "ppo": HashedJob(
        1,
        (
            *("algorithm.adv_estimator=gae", "algorithm.lam=0.95", "critic.optim.lr=1e-2"),
            *("critic.fsdp_config.mixed_precision.param_dtype=float32", "algorithm.use_kl_in_reward=True"),
        ),
    ),
    "dapo": HashedJob(
        2,
        (
            *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"),
            *("data.gen_batch_size=5", f"{ROLLOUT}.n=2", f"{ACTOR}.clip_ratio_high=0.28"),
        ),
    ),
    "lag": HashedJob(2, (f"{ROLLOUT}.max_lag=2", f"{ROLLOUT}.surplus=1.5", f"{ROLLOUT}.n=2", *LONG)),
    "debate": HashedJob(2, ("data.max_prompt_length=128",)),
    "program": HashedJob(1, ("data.max_prompt_length=128", f"{ROLLOUT}.n=2", ONE_MINI_BATCH)),
    "vllm": HashedJob(
        1,
        (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=64", "data.max_response_length=24"),
        lambda path: make_tiny_model_dir(path, init_std=0.5, head_dim=32),
    ),
    "megatron": HashedJob(2, (*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=2")),
    "lora": HashedJob(2, (f"{MODEL}.lora_rank=4",)),
    "moe": HashedJob(
        2,
        (f"{ACTOR}.fsdp_config.expert_parallel_size=2",),
        lambda path: make_tiny_model_dir(path, "mixtral", tie=False, init_std=0.2, head_dim=32),
    ),
    "distill": HashedJob(
        2,
        (
            *(f"{ACTOR}.distill.top_k=8", f"{ACTOR}.distill.divergence=forward_kl"),
            *("teacher.fsdp_config.mixed_precision.param_dtype=float32", ONE_MINI_BATCH),
        ),
    ),
    "vision": HashedJob(
        2,
        ("data.dataset_type=vlm", "data.max_response_length=5"),
        lambda path: vision_cases.make_vision_model(path, "qwen3_vl"),
        images=True,
    ),
}
ALL = (
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.deadline_s=240"),
    *(f"{ACTOR}.optim.lr=1e-3", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"),
)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a job below `folder`; a hash of the bits that it exported, and the size of each tensor."""
    job = JOBS[name]
    folder.mkdir(parents=True)
    inputs = Inputs.make(folder / "inputs")
    job.make_model(inputs.model)
    keys = [*ALL, *job.keys]
    if job.images:
        write_parquet(inputs.train, _image_rows(32))
        write_parquet(inputs.val, _image_rows(6))
    if name in WORKFLOWS:
        (folder / "program.py").write_text(PROGRAM)
        other = make_tiny_model_dir(folder / "other", "llama", tie=False, vocab=80, init_std=0.2, seed=5)
        teacher = make_tiny_model_dir(folder / "teacher", init_std=0.3, seed=6)
        paths = {"OTHER": other, "TEACHER": teacher, "FOLDER": folder}
        text = WORKFLOWS[name]
        for word, path in paths.items():
            text = text.replace(f"{{model.path: {word}}}", f"{{model.path: {path}}}").replace(
                f'"{word}/', f'"{path}/'
            )
        (folder / "workflow.yaml").write_text(text)
        keys.append(f"dag.workflow_path={folder}/workflow.yaml")
    run_job(job.ranks, overrides(inputs, folder / "out", *keys), deadline_s=280)
    return exported(folder / "out" / "hf_model")


def exported(folder: Path) -> dict[str, Any]:
    """Of models below a folder: the hash of names, types, shapes and bits; each tensor's mean size."""
    digest, sizes = hashlib.sha256(), {}
    for file in sorted(folder.rglob("*.safetensors")):
        for tensor_name, tensor in sorted(load_file(file).items()):
            place = f"{file.parent.relative_to(folder)}/{tensor_name}"
            digest.update(f"{place} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            sizes[place] = float(f"{tensor.double().abs().mean():.7g}")
    assert sizes, f"{folder} has no weights"
    return {"sha256": digest.hexdigest(), "sizes": sizes}


def machine() -> str:
    """What bits depend on besides the code: the CPU's kind and torch."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{(models or [platform.machine()])[0]}, {kernels}, torch {torch.__version__}"


def _image_rows(count: int) -> list[dict[str, Any]]:
    """Prompts with no, one or two images of unequal sizes."""
    made = []
    for index in range(count):
        sizes = [(40, 40), (30, 90)][: index % 3]
        images = [{"bytes": vision_cases.png(*size, seed=index), "path": None} for size in sizes]
        prompt = [{"role": "user", "content": "<image>red " * len(images) + "colour ?"}]
        made.append(
            {"prompt": prompt, "images": images, "data_source": "s", "reward_model": {"ground_truth": "1"}}
        )
    return made
