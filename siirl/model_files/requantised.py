"""Plain weights in the FP8 of a released model's files: of the same tensors, in blocks of the same size."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from siirl.errors import ConfigError
from siirl.model_files.directory import model_dir
from siirl.model_files.quantised import FACTORS
from siirl.model_files.weight_slices import SafetensorsFolder


class Released:
    """The form of a released model's files. ConfigError for one that is not FP8 in blocks."""

    def __init__(self, folder: Path):
        self.folder = model_dir(str(folder), "--quantised-as")
        config = json.loads((self.folder / "config.json").read_text())
        self.config = {"quantization_config": config.get("quantization_config"), "dtype": config.get("dtype")}
        self.config["dtype"] = self.config["dtype"] or config.get("torch_dtype") or "bfloat16"
        said: dict[str, Any] = self.config["quantization_config"] or {}
        self._block, self._form = said.get("weight_block_size") or [], said.get("scale_fmt")
        method, inputs = said.get("quant_method"), said.get("activation_scheme", "dynamic")
        if method != "fp8" or not self._block or inputs != "dynamic":
            raise ConfigError(
                f"{folder} has the quantization_config {said or 'of plain numbers'}: exports are quantised "
                "again in FP8 with a factor for each block, as of DeepSeek-V3 and Qwen3-FP8 "
                "(weight_block_size). With a factor for a whole matrix goes one for its inputs, which nobody "
                "has measured; MXFP4 was trained with its rounding. Name a release in such blocks, or leave "
                "out --quantised-as."
            )

    def again(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as the release has them: numbers and factors, or plain. ConfigError for weights that it
        does not have, or if it has none of them quantised."""
        num_quantised = 0
        with SafetensorsFolder(self.folder) as files:
            known = set(files.names())
            for name, tensor in weights:
                if name not in known:
                    raise ConfigError(
                        f"{self.folder} has no tensor {name}: it is no release of this model. Name the "
                        "directory of one (--quantised-as)."
                    )
                factors = files.stored_type(name + FACTORS)
                if factors is None:
                    yield name, tensor
                    continue
                num_quantised += 1
                numbers, scales = self._in_blocks(tensor)
                yield name, numbers
                yield name + FACTORS, scales.to(factors)
        if not num_quantised:
            raise ConfigError(f"{self.folder} has no weights of these in FP8. Leave out --quantised-as.")

    def _in_blocks(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """(numbers in e4m3, the factor of each block), by transformers, which takes whole blocks."""
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        (rows, columns), (height, width) = tensor.shape, self._block
        padded = torch.nn.functional.pad(tensor, (0, -columns % width, 0, -rows % height))
        config = SimpleNamespace(weight_block_size=self._block, scale_fmt=self._form)
        made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": padded})
        return made["x.weight"][:rows, :columns].contiguous(), made["x.weight_scale_inv"]
