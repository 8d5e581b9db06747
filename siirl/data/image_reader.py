"""What a vision model reads of an image: patches of pixels, by its own processor, and its tokens' positions.

Legend: I images, X patches of all images, C numbers of a patch, N tokens of a row.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from siirl.config import Config
from siirl.config.common import ModelConfig
from siirl.data.images import image_size, open_image
from siirl.data.seen import Seen
from siirl.errors import DataError

KEPT_BYTES = 256 << 20
"""Patches of images that were read last, which several passes and samples of a prompt have."""
Grid = tuple[int, int, int]
"""Patches of an image: frames (1), rows, columns."""


@dataclass(frozen=True)
class ImagePatches:
    """Images as the vision tower takes them."""

    pixels_XC: Tensor
    """float32, one image after the other."""
    grids: tuple[Grid, ...]
    """Of each image."""


class ImageReader:
    """The processor of a vision model's directory. PIL resizes whatever is installed, so that all ranks and
    machines read the same numbers. No communication."""

    def __init__(self, model_path: str):
        """DataError unless the directory has a preprocessor_config.json."""
        folder = Path(model_path).expanduser()
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
            self.image_token_id = int(config["image_token_id"])
            self.merge = int(config["vision_config"]["spatial_merge_size"])
        except ImportError as error:
            raise DataError(
                f"{folder}: its processor of images needs a package that is not installed: {error}. "
                "Install it (transformers 5.17 wants torchvision, 5.19 does not)."
            ) from error
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} has no processor of images that can be loaded: {error}. A vision model has a "
                "preprocessor_config.json, and names its image_token_id. Restore its files."
            ) from error
        self._kept: OrderedDict[str, ImagePatches] = OrderedDict()
        self._kept_bytes = 0

    @classmethod
    def from_config(cls, cfg: Config, model: ModelConfig | None = None) -> "ImageReader | None":
        """The reader of a model, or of the policy's, if prompts may have images."""
        return cls((model or cfg.actor_rollout_ref.model).path) if cfg.data.has_images else None

    @property
    def most_tokens(self) -> int:
        """Of an image, whatever its size."""
        return self._processor.size["longest_edge"] // (self._processor.patch_size * self.merge) ** 2

    def num_tokens(self, image: str) -> int:
        """Of the model's text that an image takes, from its size alone."""
        patches = self._processor.get_number_of_image_patches(*image_size(image))
        return int(patches) // self.merge**2

    def read(self, images: Sequence[str]) -> ImagePatches:
        """The patches of all images; without any, those of a black one of one token."""
        if not images:
            return self._blank()
        found = [self._read(image) for image in images]
        if len(found) == 1:
            return found[0]
        grids = tuple(grid for one in found for grid in one.grids)
        return ImagePatches(torch.cat([one.pixels_XC for one in found]), grids)

    def tokens_of(self, grid: Grid) -> int:
        """Tokens that an image of so many patches takes."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def num_patches(self, images: Iterable[str]) -> int:
        """Patches of all these images."""
        return sum(map(self.num_tokens, images)) * self.merge**2

    def positions(self, ids: Sequence[int], starts: Sequence[int], grids: Sequence[Grid]) -> np.ndarray:
        """Frame, row and column of each token of a row for its rotary embedding, int64 [3, N].

        Text counts on in all three. The tokens of an image, which begin at its start, have the position
        there plus their place in the image, and what follows it begins after the larger of its sides. Image
        tokens elsewhere are sampled text. DataError where an image takes other tokens than the row has.
        """
        ids_N = np.asarray(ids)
        place_3N = np.empty((3, len(ids_N)), dtype=np.int64)
        at = start = 0
        for first, grid in zip(starts, grids, strict=True):
            self._check_tokens(ids_N, first, self.tokens_of(grid), starts)
            place_3N[:, at:first] = start + np.arange(first - at)
            start += first - at
            rows, columns = grid[1] // self.merge, grid[2] // self.merge
            at = first + self.tokens_of(grid)
            place_3N[:, first:at] = start + np.indices((grid[0], rows, columns)).reshape(3, -1)
            start += max(rows, columns)
        place_3N[:, at:] = start + np.arange(len(ids_N) - at)
        return place_3N

    def expand(
        self, ids: Sequence[int], images: Sequence[str], where: str, said_behind: bool = False
    ) -> tuple[list[int], Seen]:
        """Token ids of rendered messages with each image's token as often as the image takes, and where.

        said_behind: what a policy has said, which may be any tokens, is behind all images. DataError unless
        there is one for each image.
        """
        found = sum(token == self.image_token_id for token in ids)
        if found < len(images) or (found > len(images) and not said_behind):
            raise DataError(
                f"{where}: the prompt as its chat template writes it has {found} places for {len(images)} "
                "images: the template must write one for each, and the text of a message none. Use the chat "
                "template of a vision model, and keep the image token out of texts."
            )
        at = -1
        ones = [at := ids.index(self.image_token_id, at + 1) for _ in images]
        return self.resized(ids, Seen(tuple(images), tuple(ones)), lambda image: 1)

    def resized(self, ids: Sequence[int], seen: Seen, length: Callable[[str], int]) -> tuple[list[int], Seen]:
        """Token ids in which each image has the tokens that it takes here, and where.

        length: of the tokens that an image has in `ids`.
        """
        made: list[int] = []
        starts: list[int] = []
        at = 0
        for image, start in zip(seen.images, seen.starts, strict=True):
            made += ids[at:start]
            starts.append(len(made))
            made += [self.image_token_id] * self.num_tokens(image)
            at = start + length(image)
        return [*made, *ids[at:]], Seen(seen.images, tuple(starts))

    def _check_tokens(self, ids_N: np.ndarray, start: int, count: int, starts: Sequence[int]) -> None:
        """DataError unless an image that takes `count` tokens has just these from `start` on."""
        behind = start + count not in starts
        is_image_N = ids_N[start : start + count + behind] == self.image_token_id
        found = int(is_image_N.cumprod().sum())
        if found != count:
            more = " or more" if found > count else ""
            raise DataError(
                f"an image of a row has {found}{more} tokens, and takes {count}: the row was encoded for "
                "another processor of images. Give all agents models with the same preprocessor_config.json."
            )

    def _read(self, image: str) -> ImagePatches:
        if image in self._kept:
            self._kept.move_to_end(image)
            return self._kept[image]
        made = self._processor(images=[open_image(image)], return_tensors="pt")
        frames, rows, columns = made["image_grid_thw"][0].tolist()
        found = ImagePatches(made["pixel_values"].float(), ((frames, rows, columns),))
        self._kept[image] = found
        self._kept_bytes += found.pixels_XC.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.pixels_XC.nbytes
        return found

    def _blank(self) -> ImagePatches:
        size = self._processor
        width = 3 * size.temporal_patch_size * size.patch_size**2
        return ImagePatches(torch.zeros(self.merge**2, width), ((1, self.merge, self.merge),))
