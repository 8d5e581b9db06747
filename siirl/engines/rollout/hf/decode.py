"""The decode loop of the HF engine: prompts and per-row seeds in, sampled tokens out, for one batch.

Each distinct prompt is prefilled once and its cache repeated for its samples; rows that ended leave the
batch when that pays. Shapes: D distinct prompts, B samples, S positions, T response tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from siirl.data.completions import SamplingParams
from siirl.engines.rollout.hf.kv_cache import gather, keep_rows
from siirl.engines.rollout.hf.prefill import Prompt, PromptReader
from siirl.engines.rollout.sampling import sample_tokens, uniforms
from siirl.observe.spans import note, phase

KEEP_SHARE = 0.8
"""Ended rows leave the batch once no more than this share of it still runs: the cache is copied for it."""
CHECK_EVERY = {"cpu": 1, "cuda": 8}
"""Steps between two looks at which rows ended: a look waits for the device."""


@dataclass(frozen=True)
class Samples:
    """What was sampled, on the host.

    Rows that were interrupted are shorter than their limit, and did not stop.
    """

    token_BT: Tensor
    """Garbage past length_B."""
    log_prob_BT: Tensor
    """In nats; garbage past length_B."""
    length_B: Tensor
    stopped_B: Tensor
    """Whether the row ended with a stop token."""
    experts_B: list[Tensor]
    """Of each row, what all its tokens but the last were computed by, int16 [N, W]; or nothing."""


@dataclass
class _Running:
    """The rows that still run, and the cache of what they have read."""

    cache: Cache
    mask_BS: Tensor | None
    """1 for real tokens of prompts, 0 for left padding, 1 for responses; None: no padding."""
    position_B: Tensor
    """Position of the next token."""
    row_B: Tensor
    """Index of the row among the samples."""
    ended_B: Tensor

    def drop_ended(self) -> None:
        keep = (~self.ended_B).nonzero()[:, 0]
        keep_rows(self.cache, keep)
        self.mask_BS = None if self.mask_BS is None else self.mask_BS[keep]
        self.position_B, self.row_B, self.ended_B = (
            self.position_B[keep],
            self.row_B[keep],
            self.ended_B[keep],
        )


def decode(
    model: PreTrainedModel,
    reader: PromptReader,
    prompts: Sequence[Prompt],
    counts: Sequence[int],
    seeds: list[int],
    params: SamplingParams,
    limits: Sequence[int] | None = None,
    interrupt: Callable[[list[int]], bool] | None = None,
) -> Samples:
    """Sample counts[d] responses of prompts[d]; seeds: one per sample, in that order. No communication.

    limits: most tokens of each sample, at most params.max_tokens, which is the default. interrupt: is told
    which samples have ended since it was asked last, maybe none; true ends all.
    """
    device = model.device
    length_D = torch.tensor([len(prompt.ids) for prompt in prompts])
    count_D = torch.tensor(counts)
    with phase("prefill", prompts=len(prompts), tokens=int(length_D.sum())):
        logits_BV, run, experts_D = _prefill(reader, prompts, length_D, count_D, params.max_tokens)
    uniform_TB = torch.from_numpy(uniforms(seeds, params.max_tokens)).to(device)
    token_TB = torch.zeros(params.max_tokens, len(seeds), dtype=torch.int64, device=device)
    log_prob_TB = torch.zeros(params.max_tokens, len(seeds), device=device)
    stops_V = torch.zeros(logits_BV.shape[1], dtype=torch.bool, device=device)
    if not params.ignore_eos:
        stops_V[[stop for stop in params.stop_token_ids if stop < len(stops_V)]] = True
    limit_B = torch.full((len(seeds),), params.max_tokens) if limits is None else torch.tensor(limits)
    limit_B = limit_B.to(device)
    told: set[int] = set()
    replay, passes = reader.replay, []
    width, check_every = run.cache.get_seq_length(), CHECK_EVERY.get(device.type, 8)

    with phase("decode", rows=len(seeds)):
        for step in range(params.max_tokens):
            token_B, log_prob_B = sample_tokens(logits_BV, uniform_TB[step, run.row_B], params)
            token_TB[step, run.row_B], log_prob_TB[step, run.row_B] = token_B, log_prob_B
            run.ended_B |= stops_V[token_B] | (step + 1 >= limit_B[run.row_B])
            if step + 1 == params.max_tokens:
                break
            if (step + 1) % check_every == 0:
                running = int((~run.ended_B).sum())
                if running == 0:
                    break
                if interrupt is not None:
                    some = running < len(run.row_B)
                    ended = (
                        [row for row in run.row_B[run.ended_B].tolist() if row not in told] if some else []
                    )
                    told.update(ended)
                    if interrupt(ended):
                        break
                if running <= KEEP_SHARE * len(run.row_B):
                    token_B = token_B[~run.ended_B]
                    run.drop_ended()
            logits_BV = model(
                input_ids=token_B[:, None],
                position_ids=run.position_B[:, None],
                attention_mask=None if run.mask_BS is None else run.mask_BS[:, : width + step + 1],
                past_key_values=run.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            if replay is not None:
                passes.append((run.row_B, replay.seen()))
            run.position_B += ~run.ended_B  # of a row that has ended it may be past the model's last
        note(steps=step + 1)
    found = _collect(token_TB.T.cpu(), log_prob_TB.T.cpu(), stops_V.cpu(), limit_B.cpu(), step + 1)
    return replace(found, experts_B=_experts(experts_D, count_D, passes, found.length_B)) if replay else found


def _prefill(
    reader: PromptReader,
    prompts: Sequence[Prompt],
    length_D: Tensor,
    count_D: Tensor,
    max_tokens: int,
) -> tuple[Tensor, _Running, list[Tensor]]:
    """Read each prompt once; logits of the first response token and the cache, both repeated per sample, and
    the experts of the prompts."""
    width = int(length_D.max())
    limit = width + max_tokens
    logits_BV, position_B, blocks, experts_D = reader.read(prompts, count_D)
    device = logits_BV.device
    length_B = length_D.repeat_interleave(count_D)
    padded = bool((length_D < width).any())
    slot_S = torch.arange(limit)
    running = _Running(
        cache=gather(blocks, limit),
        mask_BS=(slot_S >= width - length_B[:, None]).to(device) if padded else None,
        position_B=position_B,
        row_B=torch.arange(len(length_B), device=device),
        ended_B=torch.zeros(len(length_B), dtype=torch.bool, device=device),
    )
    return logits_BV, running, experts_D


def _collect(token_BT: Tensor, log_prob_BT: Tensor, stops_V: Tensor, limit_B: Tensor, steps: int) -> Samples:
    """Cut each row behind its first stop token, at its limit, or at the last step."""
    token_BT, log_prob_BT = token_BT[:, :steps], log_prob_BT[:, :steps]
    stop_BT = stops_V[token_BT] & (torch.arange(steps) < limit_B[:, None])
    stopped_B = stop_BT.any(1)
    length_B = torch.where(stopped_B, stop_BT.int().argmax(1) + 1, limit_B.clamp(max=steps))
    return Samples(token_BT, log_prob_BT, length_B, stopped_B, [])


def _experts(
    experts_D: Sequence[Tensor], count_D: Tensor, passes: Sequence[tuple[Tensor, Tensor]], length_B: Tensor
) -> list[Tensor]:
    """Of each row, those of its prompt and of the response tokens that were read.

    passes: of each decode step, the rows that ran, and theirs.
    """
    prompts = [experts_D[prompt] for prompt, count in enumerate(count_D.tolist()) for _ in range(count)]
    if not passes:
        return prompts
    expert_TBW = passes[0][1].new_empty(len(passes), len(prompts), prompts[0].shape[1])
    for step, (row_B, expert_BW) in enumerate(passes):
        expert_TBW[step, row_B] = expert_BW
    expert_BTW = expert_TBW.transpose(0, 1).cpu()
    rows = zip(prompts, expert_BTW, (length_B - 1).tolist(), strict=True)
    return [torch.cat([prompt_PW, expert_TW[:num_read]]) for prompt_PW, expert_TW, num_read in rows]


DECODE_ATTENTION = "siirl_decode"
"""Name under which transformers finds `decode_attention`."""


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Query [B, H, T, D], key and value [B, K, S, D] -> [B, T, H, D], as transformers' "sdpa" has it.

    One token that may see all of S has no order among its heads: those of a key-value head are its queries.
    """
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] > 1 or heads == groups or extra.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **extra)
    grouped = query.unflatten(1, (groups, heads // groups)).squeeze(3)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.flatten(1, 2).unsqueeze(1), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


def use_decode_attention(model: PreTrainedModel) -> None:
    """Have the text of a model that attends by "sdpa" do it; others, as those with sinks, and towers stay."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa":
        config._attn_implementation = DECODE_ATTENTION
