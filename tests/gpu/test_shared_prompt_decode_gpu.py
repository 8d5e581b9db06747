"""Decode steps that read a prompt once for its responses: FlashAttention's function, then whole engines."""

import functools
import random

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.parallel.dims import ParallelDims

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.timeout(400),
]
BLOCK, SPLITS = 16, 32
SHAPES = {
    "Qwen3-1.7B": (16, 8, 128),
    "ratio 7": (14, 2, 64),
    "ratio 16": (32, 2, 128),
    "no groups": (4, 4, 128),
}
"""Query heads, heads of keys, width of a head."""


class Steps:
    """A KV cache, and decode steps on it: in one part as vLLM does them, and in two."""

    def __init__(self, shape, rows, width, pages, dtype=torch.bfloat16):
        from siirl.engines.rollout.vllm.shared_prompts import RunFinder

        self.heads, self.kv_heads, self.dim = shape
        self.rows, self.width, self.dtype = rows, width, dtype
        cache = torch.randn(pages, 2, BLOCK, self.kv_heads, self.dim, device="cuda", dtype=torch.bfloat16)
        self.cache = cache.to(dtype)
        self.query = torch.randn(rows, self.heads, self.dim, device="cuda", dtype=torch.bfloat16).to(dtype)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        self.whole_plan = torch.zeros(1 + (rows + 3) // 4 * 16, dtype=torch.int32, device="cuda")
        self.own_plan = torch.zeros_like(self.whole_plan)
        self.plan_size = 0
        self.scale = torch.full((1,), 0.5, device="cuda").expand(rows, self.kv_heads)
        self.finder = RunFinder(rows, self.heads // self.kv_heads, BLOCK, torch.device("cuda"))

    def set_batch(self, lines, lengths):
        """Rows of a step; others fill up the batch."""
        real = len(lines)
        host = torch.zeros(self.rows, self.width, dtype=torch.int32)
        for row, line in enumerate(lines):
            host[row, : len(line)] = torch.tensor(line)
        self.table.copy_(host)
        self.lengths.copy_(torch.tensor(lengths + [0] * (self.rows - real), dtype=torch.int32))
        self.starts.copy_(torch.arange(self.rows + 1, dtype=torch.int32).clamp(max=real))
        self.runs = self.finder.find(self.table, self.lengths)
        self._plan(self.whole_plan, self.lengths)
        self._plan(self.own_plan, self.runs.suffix_lens)

    def _plan(self, into, lengths):
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        made = get_scheduler_metadata(
            batch_size=self.rows,
            max_seqlen_q=1,
            max_seqlen_k=self.width * BLOCK,
            num_heads_q=self.heads,
            num_heads_kv=self.kv_heads,
            headdim=self.dim,
            cache_seqlens=lengths,
            qkv_dtype=self.dtype,
            cu_seqlens_q=self.starts,
            page_size=BLOCK,
            causal=True,
            window_size=(-1, -1),
            num_splits=SPLITS,
        )
        self.plan_size = len(made)
        into.zero_()
        into[: self.plan_size] = made

    def call(self, plan, **others):
        keys, values = self.cache.unbind(1)
        return {
            "q": self.query,
            "k": keys,
            "v": values,
            "out": torch.empty(self.rows, self.heads, self.dim, device="cuda", dtype=torch.bfloat16),
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": 1,
            "max_seqlen_k": self.width * BLOCK,
            "softmax_scale": self.dim**-0.5,
            "causal": True,
            "alibi_slopes": None,
            "window_size": [-1, -1],
            "softcap": 0.0,
            "scheduler_metadata": plan[: self.plan_size],
            "fa_version": 3,
            "q_descale": self.scale,
            "k_descale": self.scale,
            "v_descale": self.scale,
            "num_splits": SPLITS,
            "s_aux": None,
        } | others

    def whole(self):
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        call = self.call(self.whole_plan, seqused_k=self.lengths, block_table=self.table)
        flash_attn_varlen_func(**call)
        return call["out"]

    def own(self, **others):
        runs = self.runs
        return self.call(self.own_plan, seqused_k=runs.suffix_lens, block_table=runs.suffix_table) | others

    def in_two_parts(self):
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        from siirl.engines.rollout.vllm.shared_prompts import attend

        return attend(flash_attn_varlen_func, self.runs, **self.own())

    def exact(self):
        """In float32, row by row."""
        scale = 0.5 if self.dtype != torch.bfloat16 else 1.0
        result = torch.zeros(self.rows, self.heads, self.dim, device="cuda")
        for row, length in enumerate(self.lengths.tolist()):
            if length:
                pages = self.cache[self.table[row, : -(-length // BLOCK)].long()].float() * scale
                keys, values = (part.flatten(0, 1)[:length] for part in pages.unbind(1))
                keys, values = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (keys, values))
                score = torch.einsum("hd,thd->ht", self.query[row].float() * scale, keys) * self.dim**-0.5
                result[row] = torch.einsum("ht,thd->hd", score.softmax(-1), values)
        return result


def some_batch(rng, rows, width, pages):
    """Prompts of 1 to 16 samples, some after a system prompt; lengths at and off the borders of blocks."""
    fresh = iter(rng.sample(range(1, pages), pages - 1))
    system = [next(fresh) for _ in range(rng.choice([0, 2]))]
    lines, lengths = [], []
    while len(lines) < rows:
        prompt = system + [next(fresh) for _ in range(rng.randrange(1, width // 2))]
        for _ in range(rng.randint(1, 16)):
            line = prompt + [next(fresh) for _ in range(rng.randint(1, width - len(prompt)))]
            lines.append(line)
            least = max(len(line) - 1, len(prompt)) * BLOCK + 1
            lengths.append(rng.choice([least, len(line) * BLOCK, rng.randint(least, len(line) * BLOCK)]))
    return lines[:rows], lengths[:rows]


def errors(found, exact, real):
    off = (found.float() - exact)[:real]
    assert off.isfinite().all()
    return off.pow(2).mean().sqrt().item(), off.abs().max().item()


@torch.inference_mode()
def compare(steps, two_parts, real):
    exact = steps.exact()
    one_rms, one_max = errors(steps.whole(), exact, real)
    two_rms, two_max = errors(two_parts, exact, real)
    print(f"off float32: one part {one_rms:.2e} (most {one_max:.1e}), two {two_rms:.2e} ({two_max:.1e})")
    assert two_rms < 1.5 * one_rms and two_max < 3 * one_max


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@torch.inference_mode()
def test_two_parts_are_as_near_to_float32_as_one(shape):
    rng, rows, width, pages = random.Random(3), 48, 40, 2400
    torch.manual_seed(3)
    steps = Steps(shape, rows, width, pages)
    for real in (48, 41, 1):
        steps.set_batch(*some_batch(rng, real, width, pages))
        compare(steps, steps.in_two_parts(), real)


@torch.inference_mode()
def test_two_parts_of_an_fp8_cache():
    rng, rows, width, pages = random.Random(4), 32, 40, 2400
    torch.manual_seed(4)
    steps = Steps((16, 8, 128), rows, width, pages, dtype=torch.float8_e4m3fn)
    steps.set_batch(*some_batch(rng, rows, width, pages))
    compare(steps, steps.in_two_parts(), rows)


@torch.inference_mode()
def test_a_captured_graph_follows_other_batches():
    rng, rows, width, pages = random.Random(5), 48, 40, 2400
    torch.manual_seed(5)
    steps = Steps((16, 8, 128), rows, width, pages)
    steps.set_batch([[0]] * rows, [1] * rows)  # as vLLM captures: rows of one token
    steps.in_two_parts()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps.in_two_parts()
    for real in (48, 7, 48, 1, 33):
        steps.set_batch(*some_batch(rng, real, width, pages))
        steps.query.normal_()
        graph.replay()
        torch.cuda.synchronize()
        compare(steps, out, real)


def time_us(work, repeats=20):
    """Microseconds of a call, of a graph of ten."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats / 10


@torch.inference_mode()
def test_times_of_decode_steps():
    """Not a bound: prints what a layer's attention takes, of steps in the middle of a response."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from siirl.engines.rollout.vllm.shared_prompts import put_together

    print("\nmicroseconds of a layer; rows, samples, prompt + own tokens: one part, two (own, shared, merge)")
    for rows, samples, prompt, own in (
        *((256, 8, 256, 512), (512, 8, 256, 512), (256, 8, 256, 64), (256, 8, 256, 1000)),
        *((256, 1, 256, 512), (128, 16, 2048, 512), (64, 64, 4096, 512), (32, 8, 256, 512)),
    ):
        prompt_blocks, own_blocks = prompt // BLOCK - 1, -(-own // BLOCK) + 1  # the last is each row's own
        pages = 1 + rows // samples * prompt_blocks + rows * own_blocks
        steps = Steps((16, 8, 128), rows, prompt_blocks + own_blocks, pages)
        fresh = iter(random.Random(6).sample(range(1, pages), pages - 1))
        lines = []
        for _ in range(rows // samples):
            shared = [next(fresh) for _ in range(prompt_blocks)]
            lines += [shared + [next(fresh) for _ in range(own_blocks)] for _ in range(samples)]
        steps.set_batch(lines, [prompt + own - 3] * rows)
        runs = steps.runs
        first = steps.own(return_softmax_lse=True)
        second = first | {
            "out": None,
            "cu_seqlens_q": runs.starts,
            "max_seqlen_q": runs.most,
            "seqused_k": runs.prefix_lens,
            "block_table": runs.block_table,
            "causal": False,
            "scheduler_metadata": None,
            "num_splits": 1,
        }
        out, lse = flash_attn_varlen_func(**first)
        prefix, prefix_lse = flash_attn_varlen_func(**second)
        parts = [
            time_us(functools.partial(flash_attn_varlen_func, **first)),
            time_us(functools.partial(flash_attn_varlen_func, **second)),
            time_us(functools.partial(put_together, out, lse, prefix, prefix_lse, runs.shared)),
        ]
        one, two = time_us(steps.whole), time_us(steps.in_two_parts)
        find = time_us(functools.partial(steps.finder.find, steps.table, steps.lengths))
        print(
            f"{rows}, {samples}, {prompt} + {own}: {one:.0f}, {two:.0f} "
            f"({', '.join(f'{part:.0f}' for part in parts)}); once a step: {find:.0f}",
            flush=True,
        )
        del steps, first, second, out, prefix


PROMPTS = [[(7 * row + place * place) % 50 + 8 for place in range(70 + row)] for row in range(12)]


def engine_rows(path, folder, *keys):
    """Responses to 12 prompts x 8, more than fit at once, that end at different times."""
    rollout = "actor_rollout_ref.rollout"
    cfg = load_config(
        [
            f"{rollout}.name=vllm",
            f"actor_rollout_ref.model.path={path}",
            f"{rollout}.dtype=bfloat16",
            f"{rollout}.max_model_len=256",
            f"{rollout}.max_num_seqs=40",
            f"{rollout}.max_num_batched_tokens=512",
            f"{rollout}.gpu_memory_utilization=0.2",
            f"{rollout}.free_cache_engine=False",
            f"trainer.output_dir={folder}/outputs",
            *keys,
        ]
    )
    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout", ()
    )
    from transformers import AutoModelForCausalLM

    engine = make_rollout_engine(plan, cfg, None, torch.device("cuda", 0))
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().state_dict()
    engine.load_weights([(name, state[name]) for name in engine.weight_specs()], version=0)
    params = SamplingParams(n=8, max_tokens=100, stop_token_ids=(6, 7))
    rows = [one for row in engine.generate(PROMPTS, params, range(12)) for one in row]
    engine.close()
    return rows


@pytest.mark.parametrize(("family", "eager"), [("qwen3", False), ("qwen2", True)])
def test_engines_that_share_prompts_and_that_do_not_sample_alike(tmp_path, family, eager):
    """vLLM's second model runner with graphs, and its first one without."""
    shape = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "init_std": 0.08, "layers": 2}
    path = make_tiny_model_dir(
        tmp_path / "model", family, vocab=128, tokenizer=False, dtype="bfloat16", **shape
    )
    rollout = "actor_rollout_ref.rollout"
    keys = [f"{rollout}.enforce_eager={eager}"]
    if not eager:
        keys.append(f"+{rollout}.engine_kwargs.vllm.cudagraph_capture_sizes=[1,2,4,8,16,24,32,40]")
    alone, shared = (
        engine_rows(path, tmp_path, *keys, f"{rollout}.share_prompts_in_decode={shares}")
        for shares in (False, True)
    )
    off_alone, off_shared = (off_float32(path, rows) for rows in (alone, shared))
    lengths = sorted(len(one.token_ids) for one in shared)
    equal = sum(one.token_ids == other.token_ids for one, other in zip(alone, shared, strict=True))
    print(
        f"\n{equal} of {len(alone)} rows equal, of {lengths[0]} to {lengths[-1]} tokens; log-probs are off "
        f"float32 by {off_alone.mean():.4f} (most {off_alone.max():.3f}) and, with prompts shared, by "
        f"{off_shared.mean():.4f} ({off_shared.max():.3f})"
    )
    assert lengths[0] < lengths[len(lengths) // 2], "rows were to end at different times"
    assert off_shared.mean() < 1.2 * off_alone.mean() and off_shared.max() < 2 * off_alone.max()
    same = [one.log_probs[1:2] == other.log_probs[1:2] for one, other in zip(alone, shared, strict=True)]
    assert not all(same), "equal to the last bit: the second engine shared nothing"


@torch.inference_mode()
def off_float32(path, rows):
    """How far the log-prob of each token is from transformers' in float32; one number for each token."""
    from transformers import AutoModelForCausalLM

    model, offs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda(), []
    for row, one in enumerate(rows):
        prompt = PROMPTS[row // 8]
        ids = torch.tensor([prompt + one.token_ids], device="cuda")
        log_prob_TV = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted_T = log_prob_TV.gather(1, ids[0, len(prompt) :, None])[:, 0]
        offs.append((wanted_T - torch.tensor(one.log_probs, device="cuda")).abs())
    return torch.cat(offs)
