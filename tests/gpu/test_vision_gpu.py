"""Vision models on a GPU: vLLM next to Hugging Face and the trainer, images in prompts and between turns."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vision_cases as vision
from fixtures_tiny import write_parquet
from gpu_share import IN_WORDS
from job_harness import ROOT, Finished
from proven_models import SAMPLED, record
from recorded_cases import case_of, on_cuda, type_of
from safetensors.torch import load_file
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.data.image_reader import ImageReader
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.train.vision.tower import tower_attention
from siirl.parallel.dims import ParallelDims

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SEEN = [(vision.SMALL,), (vision.WIDE,), (vision.OTHER,), (), (vision.WIDE, vision.TALL), (vision.WIDE,)]
ENGINE = (
    f"{ROLLOUT}.enforce_eager=true",
    *IN_WORDS,
    f"{ROLLOUT}.max_num_seqs=64",
)
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
TURNS = """
dag_id: gallery
nodes:
  - {node_id: talk, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: game, node_type: ENV_INTERACT, dependencies: [talk], loop: {to: talk, max_turns: 3},
     config: {env_path: "FOLDER/gallery.py:Gallery"}}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [game]}
  - {node_id: old, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [talk], only_forward_compute: true}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages, old]}
"""


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    return vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 4e-3), ("bfloat16", 0.1)])
def test_vllm_says_of_images_what_hugging_face_does(folder, tmp_path, dtype, bound):
    """In float32 vLLM's attention is in TF32."""
    keys = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype={dtype}", f"{ROLLOUT}.prompt_length=128", *ENGINE]
    model, output = f"actor_rollout_ref.model.path={folder}", f"trainer.output_dir={tmp_path}"
    cfg = load_config(["data.dataset_type=vlm", model, output, "trainer.device=cuda", *keys])
    dims = ParallelDims(1)
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), dims, "rollout_actor", ())
    engine = make_rollout_engine(plan, cfg, None, torch.device("cuda"))
    stored = {name: x.cuda() for name, x in load_file(folder / "model.safetensors").items()}
    engine.load_weights(stored.items(), 0)
    reader = ImageReader(str(folder))
    prompts = [vision.prompt_of(reader, seen) for seen in SEEN]
    placed = [vision.seen_in(reader, *one) for one in zip(prompts, SEEN, strict=True)]
    params = SamplingParams(max_tokens=6, n=8, temperature=1.0, ignore_eos=True)
    found = engine.generate(prompts, params, [1, 2, 3, 4, 5, 6], placed)
    engine.close()
    reference, distances = vision.hf_model(folder).to("cuda"), []
    for prompt, seen, samples in zip(prompts, SEEN, found, strict=True):
        for one in (sample for sample in samples if vision.TWIN not in sample.token_ids[:-1]):
            inputs = vision.hf_inputs(folder, prompt, one.token_ids, seen)
            with torch.no_grad():
                logits = reference(**{name: x.cuda() for name, x in inputs.items()}).logits[0]
            wanted = logits[len(prompt) - 1 : -1].log_softmax(-1).cpu()
            wanted = wanted.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
            distances.append((wanted - torch.tensor(one.log_probs)).abs())
    distance = torch.cat(distances)
    print(f"{folder.name} {dtype}: mean {distance.mean():.2e}, largest {distance.max():.2e}")
    assert float(distance.mean()) < bound / 4 and float(distance.max()) < bound
    ran = on_cuda(Scenario("", 1))
    record(case_of(type_of(folder), ran, SAMPLED, dtype), float(distance.max()))


@pytest.mark.parametrize("head", [16, 64, 80])
def test_attention_of_all_images_at_once_is_that_of_each(head):
    """Forward and backward, in bf16, against float32 image by image."""
    lengths = [784, 4, 196, 36]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    drawn = torch.randn(4, 1, 16, sum(lengths), head, device="cuda").bfloat16()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        qkv = [x.to(dtype).requires_grad_() for x in drawn[:3]]
        given = {"scaling": head**-0.5, "cu_seq_lens_q": bounds, "max_length_q": max(lengths)}
        out, _ = tower_attention(torch.nn.Identity(), *qkv, None, **given)
        out.backward(drawn[3].transpose(1, 2).to(dtype))
        found[dtype] = [x.float() for x in (out.detach(), *(x.grad for x in qkv))]
    for exact, rounded in zip(*found.values(), strict=True):
        assert exact.shape == rounded.shape
        assert float((exact - rounded).norm() / exact.norm()) < 0.02


def rows() -> list[dict]:
    made = []
    for index in range(24):
        images = [vision.png(*size, seed=index) for size in [(40, 40), (30, 90)][: index % 3]]
        prompt = [{"role": "user", "content": "<image>red " * len(images) + "colour ?"}]
        answer = {"data_source": "s", "reward_model": {"ground_truth": "1"}}
        made.append({"prompt": prompt, "images": [{"bytes": one, "path": None} for one in images], **answer})
    return made


@pytest.mark.timeout(450)
@pytest.mark.parametrize("turns", [False, True], ids=["prompts", "turns"])
def test_two_steps_of_the_job(folder, tmp_path, turns):
    data = write_parquet(tmp_path / "train.parquet", rows())
    reward = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    (tmp_path / "reward.py").write_text(reward + "    return float(len(set(solution_str.split()))) / 4\n")
    (tmp_path / "gallery.py").write_text(GALLERY.replace("IMAGE", repr(vision.SMALL)))
    (tmp_path / "dag.yaml").write_text(TURNS.replace("FOLDER", str(tmp_path)))
    ways = {
        False: [f"custom_reward_function.path={tmp_path}/reward.py", f"{ACTOR}.use_kl_loss=true"],
        True: [f"dag.workflow_path={tmp_path}/dag.yaml", f"{ROLLOUT}.agent.max_turn_tokens=5"],
    }
    arguments = [
        *("data.dataset_type=vlm", f"data.train_files={data}", f"data.val_files={data}"),
        *("data.train_batch_size=6", "data.max_prompt_length=32", "data.max_response_length=40"),
        *("algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={folder}"),
        *(f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.use_dynamic_bsz=true"),
        *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.n=3", *ENGINE),
        *("trainer.device=cuda", "trainer.n_gpus_per_node=1", "trainer.logger=[]", "trainer.deadline_s=240"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_training_steps=2"),
        f"trainer.output_dir={tmp_path}/out",
        *ways[turns],
    ]
    done = subprocess.run(
        [sys.executable, "-m", "siirl.main_dag", *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    job = Finished(tmp_path / "out", lines)
    distances = job.values("actor/rollout_log_prob_diff")
    print(f"{folder.name} {'turns' if turns else 'prompts'}: log-prob distances {distances}")
    assert len(distances) == 2 and max(distances) < 0.03
    assert min(job.values("actor/grad_norm")) > 0
    part = "job with vLLM, images between turns, mean" if turns else "job with vLLM, mean"
    record(case_of(type_of(folder), on_cuda(Scenario("", 1)), part, "bfloat16"), max(distances))
