"""LoRA: which weights train, how they merge, and the frozen base that several adapters use.

**Adapters on one base** (siirl/compiler/interactions/adapters.py). A model of the plan names its `base`:
the model whose frozen weights it uses, or itself, if others use its own. Engines do not share modules: each
has a module tree of its own around the same tensors (`siirl/engines/train/adapters/frozen_base.py`), so
nothing is switched, and two streams may decode at once. For FSDP that means the same shards, gathered by
each engine for itself. A rollout engine on a base says what it takes next (`RolloutEngine.takes`): base and
adapter, once, then the adapter. vLLM has all adapters in one process
(`siirl/engines/rollout/served/lora_adapters.py`): the engines of the other agents are clients of the first
one's, and `StreamRouter` gives each stream its answers. A new base is loaded under the layers that vLLM
wraps for LoRA, which step aside for it.
"""
