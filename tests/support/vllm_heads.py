"""Models of vLLM on a CPU, built without an engine: features of their heads, and how many weights they have.

`python vllm_heads.py FOLDER ...` prints a line of JSON: folder -> [sizes of heads, weights, what is wrong]. A
process of its own, as vLLM keeps its groups and the model that it builds in variables of its modules.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def built(folders: list[str]) -> dict[str, tuple[list[int], int, str]]:
    """Build the model of each folder and load its weights. The first is a mixture of experts, if any is."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import initialize_model

    from siirl.engines.rollout.vllm.arguments import values_read

    found = {}
    for folder in folders:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
        options |= {"load_format": "dummy", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 26}
        options["hf_overrides"] = values_read(AutoConfig.from_pretrained(folder))
        vllm_config = EngineArgs(model=folder, **options).create_engine_config()
        with set_current_vllm_config(vllm_config):
            if not found:
                store = f"file://{tempfile.mkdtemp()}/store"
                init_distributed_environment(1, 0, store, 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            torch.set_default_dtype(torch.float32)
            model = initialize_model(vllm_config)
            sizes = {part.head_size for part in model.modules() if isinstance(part, Attention)}
            try:
                model.load_weights(load_file(Path(folder) / "model.safetensors").items())
                problem = ""
            except (RuntimeError, AssertionError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        found[folder] = (sorted(sizes), sum(weight.numel() for weight in model.parameters()), problem)
    return found


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    print(json.dumps(built(sys.argv[1:])))
