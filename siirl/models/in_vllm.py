"""What was seen of a model family in vLLM: a part of its row in families.py. Pure, imports nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class InVLLM:
    """What was seen of a family in vLLM (0.32)."""

    why_not: str = ""
    """What is the matter with it there; empty: it samples what is trained."""
    windows: Literal["any layers", "all above", "every second below", "every second"] = "any layers"
    """Which layers may have a sliding window. Otherwise all have one there, or none has, and this says which
    layers config.json gives one by max_window_layers where it does not list them; or each second has one,
    from the first on."""
    shares_hidden: bool = False
    """A head is the share of the hidden size, whatever head_dim says: larger ones are cut silently."""
    in_place: bool = False
    """Updates in place were held against those by its loaders (rollout.replace_weights)."""
    vision_class: str = ""
    """ "module:Class" of one that sees images."""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What config.json has to say so that it computes what transformers does whatever the file says."""
    only: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of config.json that it computes with whatever the file says: other ones are refused."""
    by_expert: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the files call tensors of all experts of a layer -> its name for that of one, by which its loader
    tells what takes weights into an engine that runs; others it copies past that."""
    copied: tuple[str, ...] = ()
    """Ends of the names of other tensors that its loader copies past that."""
    cpu_dtype: str = ""
    """The only type in which its kernels on a CPU compute it; "": they do in any."""
    package: str = ""
    """What the code of its model imports there besides what vLLM brings on a CPU."""
    on_gpu: bool = True
    """What it computes of it on a GPU is no kind of layer that was not seen there."""
    since: int = 24
    """Minor version 0.x that takes weights into a running engine as it has to, CUDA graphs included."""


LATENT = InVLLM(
    values={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    only={"attention_bias": False, "rope_interleave": True, "hidden_act": "silu"},
    since=32,
)
"""Its routers have a bias, and sigmoids, if config.json says so; transformers' always have."""
LATENT_SOFTMAX = InVLLM(
    values={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
    only={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    since=32,
)
SINKS = InVLLM(
    windows="every second",
    only={
        **{"attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        "tie_word_embeddings": False,
    },
    by_expert={
        **{"gate_up_proj": "w13_weight", "gate_up_proj_bias": "w13_bias"},
        **{"down_proj": "w2_weight", "down_proj_bias": "w2_bias"},
    },
    copied=(".sinks",),
    since=32,
)
