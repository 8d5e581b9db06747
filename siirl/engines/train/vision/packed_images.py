"""The images of packed rows: their patches, and where their tokens and positions are.

Legend: N packed tokens, X patches, C numbers of a patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.image_reader import ImageReader
from siirl.data.rows import seen_of
from siirl.engines.train.transfers import sent

Segment = tuple[int, int, int]
"""A row that has it, its first column in [prompt | response], its tokens."""


@dataclass(frozen=True)
class PackedImages:
    """The images of a packed batch, at least one: a vision tower runs in every pass of every rank."""

    pixels: Tensor
    """float32 [patches, numbers of each], one image after the other."""
    grids: Tensor
    """int64 [images, 3], on the host: frames, rows and columns of patches."""
    index: Tensor
    """int64, the packed tokens that are of images, in the order of the patches."""


def with_images_read(
    rows: TensorDict, segments: Sequence[Segment], ids_N: Tensor, reader: ImageReader, device: torch.device
) -> tuple[Tensor, Tensor, PackedImages, int]:
    """Tokens, their positions [3, N], and the images of the segments; last, how many tokens were added.

    segments: how the rows are packed. One black image is added where none has any.
    """
    num_prompt = rows["prompt_ids"].shape[1]
    prompt, response = rows["prompt_length"].tolist(), rows["response_length"].tolist()
    of_rows, patches, places, at = seen_of(rows), [], [], 0
    known: dict[int, np.ndarray] = {}
    index: list[np.ndarray] = []
    for row, column, length in segments:
        own = [reader.read([image]) for image in of_rows[row].images]
        if row not in known:
            ids = rows["prompt_ids"][row, num_prompt - prompt[row] :].tolist()
            ids += rows["response_ids"][row, : response[row]].tolist()
            grids = [one.grids[0] for one in own]
            known[row] = reader.positions(ids, of_rows[row].starts, grids)
        first = column - num_prompt + prompt[row]
        places.append(known[row][:, first : first + length])
        for start, one in zip(of_rows[row].starts, own, strict=True):
            if first <= start < first + length:  # a segment never ends inside an image
                patches.append(one)
                index.append(at + start - first + np.arange(reader.tokens_of(one.grids[0])))
        at += length
    extra = 0
    if not patches:
        blank = reader.read(())
        extra = reader.tokens_of(blank.grids[0])
        token_E = np.full(extra, reader.image_token_id)
        patches.append(blank)
        index.append(at + np.arange(extra))
        places.append(reader.positions(token_E, [0], blank.grids))
        ids_N = torch.cat([ids_N, torch.from_numpy(token_E).to(ids_N)])
    images = PackedImages(
        sent(torch.cat([one.pixels_XC for one in patches]), device),
        torch.tensor([grid for one in patches for grid in one.grids]),
        sent(torch.from_numpy(np.concatenate(index)), device),
    )
    return ids_N, torch.from_numpy(np.concatenate(places, axis=1)), images, extra


def black_image(reader: ImageReader, index: Tensor) -> PackedImages:
    """What a tower sees on a rank without rows. index: int64, the packed tokens that are of it."""
    blank = reader.read(())
    return PackedImages(blank.pixels_XC.to(index.device), torch.tensor(blank.grids), index)
