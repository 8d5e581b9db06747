"""Names of Megatron-Core's options, read from its source without importing it: that would import torch.

`siirl check` so finds a misspelt option on a machine without devices. Without the package nothing is known,
and the engine finds it when it starts.
"""

import ast
import functools
import importlib.util
from pathlib import Path

_CLASSES = {
    "TransformerConfig": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "DistributedDataParallelConfig": (
        ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
    "OptimizerConfig": (
        ("optimizer/optimizer_config.py", "OptimizerConfig"),
        ("optimizer/optimizer_config.py", "AdamOptimizerConfig"),
    ),
}


@functools.cache
def option_names(name: str) -> frozenset[str]:
    """Fields of a configuration class of megatron.core; empty if the package is not installed."""
    found: set[str] = set()
    for file, class_name in _CLASSES[name]:
        path = _core_directory() / file
        if not path.is_file():
            return frozenset()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                found |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return frozenset(field for field in found if not field.startswith("_"))


def _core_directory() -> Path:
    spec = importlib.util.find_spec("megatron")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((Path(place) / "core" for place in locations if (Path(place) / "core").is_dir()), Path())
