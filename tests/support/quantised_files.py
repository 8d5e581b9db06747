"""Model directories in the quantised forms of released files, made by the formats' definitions, and what
their numbers stand for, in float64. Nothing here is transformers' or torch's conversion.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOUR_BITS = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""What the numbers of MXFP4 stand for; 32 of them share a power of two."""


def eight_bits() -> Tensor:
    """What each byte stands for in e4m3, float64: a sign, 4 bits of a power of two with bias 7, 3 of a
    fraction; without infinities."""
    found = []
    for byte in range(256):
        sign, power, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
        size = math.ldexp(fraction, -9) if power == 0 else math.ldexp(8 + fraction, power - 10)
        found.append(math.nan if byte & 127 == 127 else sign * size)
    return torch.tensor(found, dtype=torch.float64)


def in_fp8(
    folder: Path, block: tuple[int, int] | None, factor_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Give the matrices of a model's layers random numbers in FP8, with a factor for each block (None: one
    for a matrix), and make the rest bfloat16; what they stand for, float64, by name."""
    draw, table = torch.Generator().manual_seed(0), eight_bits()
    plain, stored = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = name.endswith("e_score_correction_bias")  # of ERNIE, a matrix of one row
        router = "router" in name or name.endswith("gate.weight")
        if tensor.ndim != 2 or ".layers." not in name or own or router:
            stored[name] = tensor.bfloat16().float() if own else tensor.bfloat16()
            plain[name] = stored[name].double()
            continue
        height, width = block or tensor.shape
        grid = [-(-tensor.shape[0] // height), -(-tensor.shape[1] // width)]
        factors = (torch.rand(grid, generator=draw) * 0.1 + 0.01).to(factor_dtype)
        codes = torch.randint(0, 256, tensor.shape, generator=draw)
        codes[codes % 128 > 0x48] &= 0x3F  # small numbers, and none that is NaN
        stored[name] = codes.byte().view(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = factors if block else factors.reshape(())
        if not block:
            stored[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(0.5)
        plain[name] = table[codes]
        for row in range(tensor.shape[0]):
            for column in range(tensor.shape[1]):
                plain[name][row, column] *= float(factors[row // height, column // width])
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block) if block else None}
    _write(folder, stored, {"activation_scheme": "dynamic" if block else "static", **said})
    return plain


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Give a gpt-oss experts of random MXFP4 numbers, and make the rest bfloat16; what they stand for."""
    draw, plain, stored = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor.bfloat16()
        plain[name] = stored[name].double()
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            shape, blocks = (experts, outer, inner // 32), f"{name}_blocks"
            del stored[name]
            stored[blocks] = torch.randint(256, (*shape, 16), generator=draw).byte()
            stored[f"{name}_scales"] = power = torch.randint(120, 128, shape, generator=draw).byte()
            pair = torch.stack([stored[blocks] % 16, stored[blocks] // 16], -1).long().flatten(-2)
            values = torch.tensor(FOUR_BITS, dtype=torch.float64)[pair]
            values = values * 2.0 ** (power.double() - 127).unsqueeze(-1)
            plain[name] = values.flatten(-2).transpose(1, 2)
    _write(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain


def _write(folder: Path, stored: Mapping[str, Tensor], said: Mapping[str, Any]) -> None:
    save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))


def rounded(plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What files of plain numbers have: rounded to float32 as products are, and to bfloat16."""
    return {
        name: x.float() if name.endswith("e_score_correction_bias") else x.float().bfloat16()
        for name, x in plain.items()
    }
