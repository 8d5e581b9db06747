"""FP8 on a GPU: the kernel and its products, the trainer on them, and vLLM on weights that it rounds."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import float8_reference as reference
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from gpu_share import IN_WORDS
from torch import Tensor, nn
from train_engine_cases import Scenario
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.parallel.dims import ParallelDims

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(500),
]
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SHAPE = {"hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "mlp": 256, "init_std": 0.1}
PROMPTS = [[(7 * row + place) % 20 + 2 for place in range(9 + row % 5)] for row in range(32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(41, 16), (41, 640), (300, 6144), (7, 28672)])
def test_the_kernel_rounds_as_the_formula_does_bit_for_bit(shape, dtype):
    from siirl.engines.train.fsdp.float8 import rounded

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw) * torch.logspace(-20, 20, shape[0])[:, None]
    x[1], x[2, 3], x[3, 5] = 0.0, torch.nan, torch.inf
    x, by = x.to(dtype), torch.exp2(torch.randint(-9, 9, shape[1:], generator=draw).float())
    for factor in (None, by):
        theirs, scale = rounded(x, factor)
        ours, found = rounded(x.cuda(), None if factor is None else factor.cuda())
        rows = [row for row in range(shape[0]) if row not in (2, 3)]
        assert torch.equal(found.cpu()[rows], scale[rows])
        assert torch.equal(ours.cpu().float()[rows], theirs.float()[rows])
        assert ours[2].isnan().any() and found[3].isinf(), "numbers that are none do not become some"


@pytest.mark.parametrize("sides", [(2048, 6144), (6144, 2048), (128, 48)])
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_products_and_gradients_are_those_by_hand(tokens, sides):
    from siirl.engines.train.fsdp.float8 import Float8Product

    torch.manual_seed(tokens)
    x, grad = torch.randn(tokens, sides[0]), torch.randn(tokens, sides[1])
    weight = torch.randn(sides[1], sides[0]) * torch.logspace(-2, 0, sides[1])[:, None]
    results = []
    for product, dtype in ((Float8Product, torch.bfloat16), (reference._Product, torch.float64)):
        mine, its, up = (tensor.bfloat16().cuda().to(dtype) for tensor in (x, weight, grad))
        out = product.apply(mine.requires_grad_(), its.requires_grad_())
        out.backward(up)
        results.append((out.detach().double(), mine.grad.double(), its.grad.double()))
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    print(f"\n{tokens} tokens, {sides}: output, gradients of input and weight off by {apart}")
    # sums of FP8 products keep 14 digits of their largest: more than bf16's rounding where one token has all
    assert max(apart) < (5e-3 if tokens > 1 else 1e-2), "bf16 rounds by 2e-3; FP8 loses ten times as much"


def test_products_in_fp8_are_faster_than_in_bf16():
    """At the sides of workload A. Prints what a layer takes forward, and forward and backward."""
    from siirl.engines.train.fsdp.float8 import use_float8

    for sides in ((2048, 6144), (6144, 2048), (2048, 2048)):
        x = torch.randn(40960, sides[0], dtype=torch.bfloat16, device="cuda", requires_grad=True)
        layers = [nn.Linear(*sides, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        use_float8([nn.Sequential(layers[1])], torch.device("cuda"))
        grad = torch.randn(40960, sides[1], dtype=torch.bfloat16, device="cuda")
        times = [(milliseconds(layer, x, None), milliseconds(layer, x, grad)) for layer in layers]
        print(f"\n{sides}: bf16 {times[0]} ms, FP8 {times[1]} ms (forward; forward and backward)")
        if max(sides) > 2048:
            assert times[1][0] < 0.85 * times[0][0] and times[1][1] < 0.95 * times[0][1]


def milliseconds(layer: nn.Module, x: Tensor, grad: Tensor | None) -> float:
    """Of a layer forward, and with a gradient backward."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(13):
        if number == 3:
            begin.record()
        out = layer(x.detach() if grad is None else x)
        if grad is not None:
            out.backward(grad)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10


def train_on_cuda(rank: int, world: int, scenario: Scenario, path: str) -> cases.Outcome:
    return cases.run_scenario(replace(scenario, device=f"cuda:{rank}"), path)


def test_the_trainer_stays_near_layers_rounded_by_hand(tmp_path):
    path = make_tiny_model_dir(tmp_path, **SHAPE)
    keys = ("mixed_precision.param_dtype=bfloat16", "float8=True")
    scenario = Scenario("", 1, overrides=tuple(f"{ACTOR}.fsdp_config.{key}" for key in keys))
    backend = "cpu:gloo,cuda:nccl"
    ours = run_workers(train_on_cuda, 1, scenario, str(path), deadline_s=120, backend=backend)[0]
    load = AutoModelForCausalLM.from_pretrained
    plain = cases.run_reference(Path(path))
    with patch.object(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: reference.with_reference_layers(load(*args, **kwargs)),
    ):
        theirs = cases.run_reference(Path(path))
    apart, rounding = (float((one.log_prob - theirs.log_prob).abs().mean()) for one in (ours, plain))
    print(f"\nlog-probs: {apart:.4f} from layers rounded by hand, which are {rounding:.4f} from fp32")
    assert apart < 1.2 * rounding, "bf16 moves numbers of so small a model over the middle of two, no further"
    assert ours.grad_norms[0] == pytest.approx(theirs.grad_norms[0], rel=0.15)


class RoundedByVllm(nn.Linear):
    """Its way: a scale for each output feature and each token, which brings the largest number to 448."""

    def forward(self, input: Tensor) -> Tensor:
        out = self._rounded(input) @ self._rounded(self.weight).t()
        return out if self.bias is None else out + self.bias

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def distances(engine, model: nn.Module) -> tuple[float, float]:
    """Mean distance of the engine's log-probs from a model's with rounded layers, and from the model's."""
    answers = [row[0] for row in engine.generate(PROMPTS, SamplingParams(max_tokens=24), range(len(PROMPTS)))]
    found = []
    for kind in (RoundedByVllm, nn.Linear):
        for block in model.model.layers:
            for layer in block.modules():
                if isinstance(layer, nn.Linear):
                    layer.__class__ = kind
        total, num = 0.0, 0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
            with torch.no_grad():
                log_probs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            own = log_probs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).cpu()
            total += float((own - torch.tensor(answer.log_probs)).abs().sum())
            num += len(own)
        found.append(total / num)
    return found[0], found[1]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_vllm_rounds_the_weights_of_each_sync(tmp_path, family):
    """Log-probs are those of the rounded weights that were sent last, also after sleep and a restart."""
    path = make_tiny_model_dir(tmp_path / "model", family, vocab=128, tokenizer=False, **SHAPE)
    cfg = load_config(
        [
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.quantization=fp8",
            f"{ROLLOUT}.max_log_prob_diff=0.1",
            f"actor_rollout_ref.model.path={path}",
            f"{ROLLOUT}.dtype=bfloat16",
            f"{ROLLOUT}.max_model_len=128",
            f"{ROLLOUT}.max_num_seqs=64",
            *IN_WORDS,
            f"{ROLLOUT}.enforce_eager={family == 'qwen2'}",
            f"trainer.output_dir={tmp_path}/outputs",
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout", ()
    )
    engine = make_rollout_engine(plan, cfg, None, torch.device("cuda", 0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().cuda()
    try:
        for version in range(3):
            torch.manual_seed(version)
            with torch.no_grad():
                for param in model.parameters():
                    if param.ndim == 2:
                        param.add_(0.03 * torch.randn_like(param))
            state = model.state_dict()
            engine.load_weights([(name, state[name]) for name in engine.weight_specs()], version)
            rounded, plain = distances(engine, model.float())
            model.bfloat16()
            print(
                f"\n{family}, sync {version}: {rounded:.4f} from rounded layers, {plain:.4f} from plain ones"
            )
            assert rounded < 0.15 and rounded < 0.7 * plain
            engine.sleep()
        engine.load_weights([(name, state[name]) for name in engine.weight_specs()], 3)
        params = SamplingParams(max_tokens=16)
        before = engine.generate(PROMPTS, params, range(len(PROMPTS)))
        os.kill(engine._process.pid, signal.SIGKILL)
        after = engine.generate(PROMPTS, params, range(len(PROMPTS)))
        assert engine.drain_restarts() == 1
        tokens = [[one.token_ids for one in row] for row in before]
        same = sum(a == [one.token_ids for one in row] for a, row in zip(tokens, after, strict=True))
        assert same >= 0.9 * len(PROMPTS), "a new process has the weights of the last sync, rounded again"
    finally:
        engine.close()
