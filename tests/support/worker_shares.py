"""What each worker of a vLLM engine of two ranks has of a model's weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from updated_engines import SIZES

HEAD = SIZES["head_dim"]


def shares(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a worker of two has of a set of weights, by the rules of tensor parallelism alone."""
    rows = {name: half(tensor, rank) for name, tensor in weights.items()}
    columns = {name: half(tensor.t(), rank).t() for name, tensor in weights.items() if tensor.ndim == 2}
    found = {}
    for name, tensor in weights.items():
        place, _, kind = name.rpartition(".")
        start, _, part = place.rpartition(".")
        match part:
            case "q_proj":
                keys, values = f"{start}.k_proj.{kind}", f"{start}.v_proj.{kind}"
                of_heads = rows if len(weights[keys]) > HEAD else weights
                joined = [rows[name], of_heads[keys], of_heads[values]]
                found[f"{start}.qkv_proj.{kind}"] = torch.cat(joined)
            case "gate_proj":
                found[f"{start}.gate_up_proj.{kind}"] = torch.cat(
                    [rows[name], rows[f"{start}.up_proj.{kind}"]]
                )
            case "o_proj" | "down_proj":
                found[name] = columns[name]
            case "embed_tokens" | "lm_head":
                room = -(-len(tensor) // 64) * 64  # with rows of zeros at the end
                filled = torch.zeros(room, tensor.shape[1])
                filled[: len(tensor)] = tensor
                found[name] = half(filled, rank)
            case "k_proj" | "v_proj" | "up_proj":
                pass
            case _:
                found[name] = tensor
    if "lm_head.weight" not in found:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def half(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(2)[rank]


def check_parameters(
    engine: Any, weights: dict[str, Tensor], folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Both workers have their shares of the weights in this type, bit for bit.

    But those of experts, which vLLM joins, and of Gemma's head, which it has under another name.
    """
    weights = {name: tensor.cpu().to(dtype).float() for name, tensor in weights.items()}
    skipped = "lm_head" if "gemma3" in (folder / "config.json").read_text() else "experts"
    for name in (name for name in shares(weights, 0) if skipped not in name):
        for rank, held in enumerate(engine.read_tensor(name)):
            assert torch.equal(held, shares(weights, rank)[name]), (name, rank)
