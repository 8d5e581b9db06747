"""Backends: what is known of each besides its code. Pure.

A new backend is its engine, its class here (`base.py` says what that can say), its row in one of the tables
below, which names both, and a choice of the key that picks it.
"""

from siirl.compiler.backends.base import Backend
from siirl.compiler.backends.fsdp import FSDP
from siirl.compiler.backends.megatron import Megatron
from siirl.compiler.backends.rollouts import HF, OpenAI, SGLang
from siirl.compiler.backends.vllm import VLLM
from siirl.compiler.plan import ModelPlan
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config.resolve import get
from siirl.config.roles import ROLES
from siirl.errors import ConfigError
from siirl.spelling import suggest

TRAIN_BACKENDS: dict[str, Backend] = {
    "fsdp": FSDP("siirl.engines.train.fsdp.fsdp_engine:FSDPEngine"),
    "megatron": Megatron("siirl.engines.train.megatron.engine:MegatronEngine"),
}
"""Strategy -> backend."""

ROLLOUT_BACKENDS: dict[str, Backend] = {
    "hf": HF("siirl.engines.rollout.hf.hf_rollout:HFRollout"),
    "vllm": VLLM("siirl.engines.rollout.vllm.vllm_rollout:VLLMRollout"),
    "openai": OpenAI("siirl.engines.rollout.openai_endpoint:OpenAIRollout"),
    "sglang": SGLang("siirl.engines.rollout.sglang.sglang_rollout:SGLangRollout"),
}
"""rollout.name -> backend. A replay has none."""


def backend_of(model: ModelPlan) -> Backend:
    """The backend that a model runs on."""
    return (ROLLOUT_BACKENDS if model.generates else TRAIN_BACKENDS)[model.backend]


def choose_backend(role: str, node: ResolvedNode) -> tuple[str, Backend]:
    """Name and backend that a node's configuration gives a role; ConfigError for one unknown."""
    key = ROLES[role].backend_key
    name, known = get(node.cfg, key) or "", ROLLOUT_BACKENDS if ROLES[role].generates else TRAIN_BACKENDS
    if name not in known:
        raise ConfigError(f"{node}: unknown {key}={name}. {suggest(name, known)} Known: {', '.join(known)}.")
    return name, known[name]
