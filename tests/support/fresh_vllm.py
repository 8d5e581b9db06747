"""A model of vLLM that reads its files by itself, without an engine: what a worker has of each parameter.

`python fresh_vllm.py FOLDER RANK RANKS STORE ARGUMENTS` prints a line of JSON: parameter -> a digest of its
values. STORE: a file by which the ranks meet. ARGUMENTS: those of vLLM's engine, in JSON. A process of its
own, as vLLM keeps its groups in variables of its modules.
"""

import hashlib
import json
import os
import sys
from typing import Any


def digest(values: Any) -> str:
    """Of a tensor, in float32."""
    return hashlib.sha256(values.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def digests(folder: str, rank: int, ranks: int, store: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Of each parameter of a rank's share of the model, as its kernels read it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    torch.accelerator.empty_cache = lambda: None  # there is none; vLLM's workers on a CPU do so, too
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    vllm_config = EngineArgs(folder, tensor_parallel_size=ranks, **options | arguments).create_engine_config()
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
        ensure_model_parallel_initialized(ranks, 1)
        model = get_model(vllm_config=vllm_config)
    return {name: digest(as_read(model, name)) for name, _ in model.named_parameters()}


def as_read(model: Any, name: str) -> Any:
    """A parameter, or, of a CPU kernel that reads a packed copy alone, its product with the identity."""
    import torch

    layer, param = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if param.numel() or not hasattr(layer, "cpu_linear"):
        return param
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    eye = torch.eye(inputs, dtype=param.dtype)
    return layer.cpu_linear(eye, param, None).t()


if __name__ == "__main__":
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_DIST_IDENT": sys.argv[4].replace("/", "_")}
    rank, ranks = map(int, sys.argv[2:4])
    print(json.dumps(digests(sys.argv[1], rank, ranks, sys.argv[4], json.loads(sys.argv[5]))))
