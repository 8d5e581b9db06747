"""Quantised tensors of released files, read as plain numbers: FP8 with scales, and MXFP4. No communication.

A tensor of FP8 (e4m3) has its numbers under its own name and beside it the factors of blocks of them: of
weight_block_size in config.json, cut at the edges, or one of all. Source: DeepSeek-AI, "DeepSeek-V3 Technical
Report" (2024), 3.3. Of MXFP4, 32 numbers of a row share a power of two, a byte has two of them, and files
have the matrices turned. Source: Open Compute Project, "Microscaling Formats (MX) Specification" 1.0 (2023).

transformers makes plain numbers of MXFP4. Those of FP8 are multiplied here: it (5.19) cuts a matrix into as
many equal blocks as there are factors, and so refuses, or scales wrongly, what is no whole number of blocks,
as DeepSeek-V3's kv_a_proj_with_mqa.
"""

from collections.abc import Callable, Iterable, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from siirl.errors import DataError

FACTORS = "_scale_inv"
NUMBERS, POWERS = "_blocks", "_scales"
OF_INPUTS = ".activation_scale"
"""By which an engine in FP8 would divide what it multiplies a matrix by."""
MEANINGLESS = ("F8_E4M3", "F8_E5M2", "F4")
"""Types of numbers, as safetensors calls them, that mean nothing without factors."""
SHARED = 32
"""Numbers of MXFP4 that share a power of two."""

Index = EllipsisType | slice | tuple[slice, slice]


def plain_names(names: Iterable[str]) -> list[str]:
    """The tensors of a model whose files have tensors of these names, in their order."""
    there = dict.fromkeys(names)
    found = (x.removesuffix(NUMBERS) if _is_shared(x.removesuffix(NUMBERS), there) else x for x in there)
    return [name for name in found if not _belongs(name, there)]


def _belongs(name: str, there: Mapping[str, Any]) -> bool:
    """Whether it says of another tensor how its numbers are meant."""
    if name.endswith(OF_INPUTS):
        return f"{name.removesuffix(OF_INPUTS)}.weight{FACTORS}" in there
    if name.endswith(FACTORS):
        return name.removesuffix(FACTORS) in there
    return name.endswith(POWERS) and _is_shared(name.removesuffix(POWERS), there)


def _is_shared(name: str, there: Mapping[str, Any]) -> bool:
    return name + NUMBERS in there and name + POWERS in there


class PlainSlice:
    """A quantised tensor as safetensors' slices of plain ones are; only what is asked for is computed."""

    def __init__(self, shape: list[int], dtype: torch.dtype, rows: Callable[[int, int], Tensor]):
        self._shape, self._dtype, self._rows = shape, dtype, rows

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Index) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        first, last, _ = (slice(None) if rows is ... else rows).indices(self._shape[0])
        if first >= last:
            return torch.empty(0, *self._shape[1:], dtype=self._dtype)
        return self._rows(first, last).to(self._dtype)[(slice(None), *columns)]


def slice_of(
    name: str, stored: Callable[[str], Any], dtype: torch.dtype, block: tuple[int, int] | None
) -> Any:
    """A tensor of the model, as slices of it are read; None if the files have none of that name.

    stored: what safetensors gives of a tensor of the files, None for one that is not there. dtype: of what
    was quantised. block: rows and columns that a factor is of; None: one is of a whole tensor. DataError for
    numbers that nothing says the meaning of.
    """
    values = stored(name)
    if values is None:
        numbers, powers = stored(name + NUMBERS), stored(name + POWERS)
        return None if numbers is None or powers is None else _of_shared_powers(numbers, powers, dtype)
    factors = stored(name + FACTORS)
    if factors is not None:
        return _of_factors(name, values, factors, dtype, block)
    if values.get_dtype() in MEANINGLESS:
        raise DataError(
            f"{name} is stored as {values.get_dtype()} without a tensor {name}{FACTORS}: what its numbers "
            "stand for is not known. Give files with plain numbers, or FP8 with such factors."
        )
    return values


def _of_factors(
    name: str, values: Any, factors: Any, dtype: torch.dtype, block: tuple[int, int] | None
) -> PlainSlice:
    shape, grid = values.get_shape(), factors.get_shape()
    if torch.Size(grid).numel() == 1:
        return PlainSlice(shape, dtype, lambda a, b: values[a:b].float() * factors[...].float().reshape(()))
    height, width = block or (0, 0)
    if not block or len(shape) != 2 or grid != [-(-shape[0] // height), -(-shape[1] // width)]:
        raise DataError(
            f"{name} has the shape {shape} and {grid} factors ({name}{FACTORS}) for "
            f"weight_block_size={block and list(block)} of config.json: they do not fit. Check the files."
        )

    def rows(first: int, last: int) -> Tensor:
        low = first // height
        own = factors[low : -(-last // height)].float()
        down = torch.arange(first, last) // height - low
        return values[first:last].float() * own[down][:, torch.arange(shape[1]) // width]

    return PlainSlice(shape, dtype, rows)


def _of_shared_powers(numbers: Any, powers: Any, dtype: torch.dtype) -> PlainSlice:
    experts, outer, groups, _ = numbers.get_shape()

    def rows(first: int, last: int) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(numbers[first:last], powers[first:last])

    return PlainSlice([experts, groups * SHARED, outer], dtype, rows)
