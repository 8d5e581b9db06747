"""Reads prompts into a KV cache.

Shapes: D distinct prompts, B samples, P prompt width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from siirl.data.image_reader import ImageReader
from siirl.data.seen import NO_IMAGES, Seen
from siirl.engines.rollout.hf.kv_cache import Block, new_cache
from siirl.engines.train.experts.router_replay import RouterReplay
from siirl.engines.train.vision.tower import see


class Prompt(NamedTuple):
    """What a model reads before it answers."""

    ids: tuple[int, ...]
    seen: Seen = NO_IMAGES


class ReadPrompts(NamedTuple):
    """What there is after prompts."""

    logits_BV: Tensor
    position_B: Tensor
    """Of the token after each."""
    blocks: list[Block]
    """The caches of their tokens."""
    experts_D: list[Tensor]
    """What the tokens of each distinct prompt were computed by, [P, W] on the host, or nothing."""


@dataclass(frozen=True)
class PromptReader:
    """A model that reads prompts."""

    model: PreTrainedModel
    images: ImageReader | None
    """Of a vision model."""
    prefill_tokens: int
    """Bounds the padded tokens of one forward (at least one prompt goes through)."""
    replay: RouterReplay | None = None
    """Sees the experts that tokens are computed by."""

    def read(self, prompts: Sequence[Prompt], count_D: Tensor) -> "ReadPrompts":
        """What there is after each prompt, count_D[d] times for prompts[d], at the cost of D prompts. No
        communication.
        """
        blocks, logits, positions, experts = [], [], [], []
        for part in _parts([len(prompt.ids) for prompt in prompts], self.prefill_tokens):
            cache, last_logits, next_D = self._read(prompts[part])
            rows = torch.arange(len(last_logits)).repeat_interleave(count_D[part]).to(last_logits.device)
            blocks.append(Block(cache, rows))
            logits.append(last_logits.index_select(0, rows))
            positions.append(next_D.index_select(0, rows))
            experts += self._experts(prompts[part])
        return ReadPrompts(torch.cat(logits), torch.cat(positions), blocks, experts)

    def _experts(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Of each prompt that was read last, those of its tokens; empty where nobody sees them."""
        if self.replay is None:
            return []
        expert_DPW = self.replay.seen().unflatten(0, (len(prompts), -1)).cpu()
        return [expert_PW[-len(prompt.ids) :] for prompt, expert_PW in zip(prompts, expert_DPW, strict=True)]

    def _read(self, prompts: Sequence[Prompt]) -> tuple[Cache, Tensor, Tensor]:
        """One prefill forward of left-padded prompts.

        The cache, the logits after the last tokens, [D, V], and the positions of what follows, [D].
        """
        device = self.model.device
        length_D = torch.tensor([len(prompt.ids) for prompt in prompts])
        width = int(length_D.max())
        real_DP = torch.arange(width) >= width - length_D[:, None]
        ids_DP = torch.zeros(len(prompts), width, dtype=torch.int64)
        ids_DP[real_DP] = torch.tensor([token for prompt in prompts for token in prompt.ids])
        position_DP = (torch.arange(width) - (width - length_D[:, None])).clamp_(min=0)
        cache = new_cache(width, self.model.config.get_text_config())
        given = {
            "attention_mask": None if bool(real_DP.all()) else real_DP.to(device),
            "past_key_values": cache,
            "use_cache": True,
        }
        if not any(prompt.seen.images for prompt in prompts):
            output = self.model(
                input_ids=ids_DP.to(device),
                position_ids=position_DP.to(device),
                logits_to_keep=1,
                **given,
            )
            return cache, output.logits[:, -1], length_D.to(device)
        logits_DV, next_D = self._read_seeing(prompts, ids_DP, real_DP, given)
        return cache, logits_DV, next_D

    def _read_seeing(
        self, prompts: Sequence[Prompt], ids_DP: Tensor, real_DP: Tensor, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The same of prompts of which some have images: logits, and the positions of what follows."""
        assert self.images is not None, "images for a model that sees none"
        device = self.model.device
        place_3DP = torch.zeros(3, *ids_DP.shape, dtype=torch.int64)
        is_image_DP = torch.zeros_like(real_DP)
        for row, (ids, seen) in enumerate(prompts):
            grids = [self.images.read([image]).grids[0] for image in seen.images]
            place_3N = self.images.positions(ids, seen.starts, grids)
            place_3DP[:, row, real_DP[row]] = torch.from_numpy(place_3N)
            for start, grid in zip(seen.starts, grids, strict=True):
                first = ids_DP.shape[1] - len(ids) + start
                is_image_DP[row, first : first + self.images.tokens_of(grid)] = True
        patches = self.images.read([image for prompt in prompts for image in prompt.seen.images])
        read = see(
            self.model.model,
            ids_DP.to(device),
            patches.pixels_XC.to(device),
            torch.tensor(patches.grids),
            is_image_DP.flatten().nonzero().squeeze(1).to(device),
        )
        decoder = self.model.model.language_model
        hidden_DPH = decoder(**read, position_ids=place_3DP.to(device), **given).last_hidden_state
        logits_DV = self.model.get_output_embeddings()(hidden_DPH[:, -1])
        return logits_DV, (place_3DP.amax(dim=(0, 2)) + 1).to(device)


def _parts(lengths: list[int], max_tokens: int) -> list[slice]:
    """Consecutive prompts whose padded size stays within max_tokens (single prompts may exceed it)."""
    parts, start, width = [], 0, 0
    for index, length in enumerate(lengths):
        width = max(width, length)
        if index > start and width * (index + 1 - start) > max_tokens:
            parts.append(slice(start, index))
            start, width = index, length
    return [*parts, slice(start, len(lengths))]
