"""Every option of Megatron-Core that siirl passes on does something, and trains the same where it should.

For each of the table (siirl/compiler/checks/megatron_options.py) two engines make two steps, with and without
it. What the engine without does is held against plain Hugging Face by test_megatron_engine.py and its
neighbours.
"""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.compiler.checks.megatron_options import OPTIONS

pytestmark = pytest.mark.timeout(900)  # the first case runs all of them
ACTOR = "actor_rollout_ref.actor"
WHERE = {
    "transformer": f"+{ACTOR}.megatron.override_transformer_config",
    "ddp": f"+{ACTOR}.megatron.override_ddp_config",
    "optimizer": f"+{ACTOR}.optim.override_optimizer_config",
}
BF16 = f"{ACTOR}.megatron.param_dtype=bfloat16"
KEEP_ALL = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
LAYERS = 3


@dataclass(frozen=True)
class Case:
    """value: of the option. beside: options of both engines; instead: of the one without it; as in `text`.

    differs: what is seen of the steps (`watch`, `look_at`) that must not be as without the option. same:
    whether the weights after them are as without it; None: they may be either. sizes: parallel sizes.
    """

    value: Any
    differs: str = ""
    beside: tuple[Any, ...] = ()
    model: str = "dense"
    same: bool | None = True
    sizes: tuple[tuple[str, int], ...] = ()
    instead: tuple[Any, ...] = ()


PP2 = (("pp", 2),)
BLOCK = (("transformer", "recompute_method", "block"),)
SELECTIVE = (("transformer", "recompute_granularity", "selective"),)
EARLY = (("ddp", "overlap_grad_reduce", True),)
NARROW = (("optimizer", "use_precision_aware_optimizer", True),)
HOST = (("optimizer", "optimizer_cpu_offload", True), BF16)
FIRST_LARGE = (("transformer", "account_for_loss_in_pipeline_split", True),)
LAST_LARGE = (("transformer", "account_for_embedding_in_pipeline_split", True),)
NO_EPS = f"~{ACTOR}.optim.override_optimizer_config.eps"
CASES: dict[str, dict[str, Case]] = {
    "transformer": {
        "recompute_granularity": Case("selective", "layer_calls"),
        "recompute_method": Case("block", "layer_calls"),
        "recompute_num_layers": Case(2, "layer_calls", BLOCK),
        "recompute_modules": Case("[mlp]", "mlp_calls", SELECTIVE),
        "account_for_embedding_in_pipeline_split": Case(True, "layers", sizes=PP2, instead=FIRST_LARGE),
        "account_for_loss_in_pipeline_split": Case(True, "layers", sizes=PP2, instead=LAST_LARGE),
        "num_layers_in_first_pipeline_stage": Case(1, "layers", sizes=PP2, instead=FIRST_LARGE),
        "num_layers_in_last_pipeline_stage": Case(1, "layers", sizes=PP2, instead=LAST_LARGE),
        "pipeline_model_parallel_layout": Case("'Et|ttL'", "layers", sizes=PP2, instead=FIRST_LARGE),
        "moe_token_dispatcher_type": Case("allgather", "dispatcher", model="experts"),
        "moe_grouped_gemm": Case(True, "experts", model="experts"),
        "moe_aux_loss_coeff": Case(0.5, model="experts", same=False),
        "moe_z_loss_coeff": Case(0.5, model="experts", same=False),
        "moe_router_dtype": Case("fp32", "router_dtype", (BF16,), model="experts", same=None),
        "moe_layer_recompute": Case(True, "mlp_calls", (KEEP_ALL,), model="experts"),
    },
    "ddp": {
        "overlap_grad_reduce": Case(True, "reduced_early"),
        "overlap_param_gather": Case(True, "gathers_late", EARLY),
        "grad_reduce_in_fp32": Case(False, "grad_dtype", (BF16,), same=None),
        "bucket_size": Case(1000, "buckets", EARLY),
    },
    "optimizer": {
        "adam_eps": Case(1e-2, beside=(NO_EPS,), same=False),
        "eps": Case(1e-2, same=False),
        "use_precision_aware_optimizer": Case(
            True, "moments", (("optimizer", "exp_avg_dtype", "bf16"),), same=None
        ),
        "exp_avg_dtype": Case("bf16", "moments", NARROW, same=None),
        "exp_avg_sq_dtype": Case("bf16", "moments", NARROW, same=None),
        "optimizer_cpu_offload": Case(True, "on_host", (BF16,)),
        "optimizer_offload_fraction": Case(0.5, "on_host", HOST),
        "overlap_cpu_optimizer_d2h_h2d": Case(True, "overlaps", HOST),
    },
}


def text(override: Any) -> str:
    """An override, given as such or as (kind, name, value) of an option."""
    if isinstance(override, str):
        return override
    kind, name, value = override
    return f"{WHERE[kind]}.{name}={value}"


def scenarios(kind: str, name: str) -> tuple[Scenario, Scenario]:
    """With the option, and without it."""
    case = CASES[kind][name]
    options = {"strategy": "megatron", "sizes": case.sizes, "model": case.model}
    both = tuple(map(text, case.beside))
    with_it = (*both, text((kind, name, case.value)))
    without = (*both, *map(text, case.instead))
    world = 2 if kind == "ddp" or case.sizes else 1  # the others neither cut the model nor reduce or gather
    return tuple(Scenario("", world, overrides=overrides, **options) for overrides in (with_it, without))


def train_each(rank: int, world: int, wanted: list[Scenario], paths: dict[str, str]) -> dict:
    """Scenario -> (what was seen of two steps, weights after them)."""
    from siirl.engines.train.megatron.adamw import PlacedAdamW

    sent, send = [], PlacedAdamW._send
    PlacedAdamW._send = lambda self, params: sent.append(len(params)) or send(self, params)
    found = {}
    for scenario in wanted:
        engine, groups = cases.build_engine(scenario, paths[scenario.model])
        seen = watch(engine)
        sent.clear()
        cases.train_steps(engine, scenario, range(2))  # Megatron reduces the first one's gradients late
        seen |= look_at(engine) | {"overlaps": bool(sent)}
        weights = {name: weight.clone() for name, weight in engine.export_weights(torch.float32)}
        found[scenario] = (seen, weights)
        cases.release(groups)
    return found


def watch(engine: Any) -> dict[str, Any]:
    """What is filled in while the engine makes steps."""
    layers = engine._stages[0].decoder.layers
    seen: dict[str, Any] = {"layer_calls": [0] * len(layers), "mlp_calls": 0, "reduced_early": False}

    def count_layer(number: int) -> Any:
        def hook(*call: Any) -> None:
            seen["layer_calls"][number] += 1

        return hook

    def count_mlp(*call: Any) -> None:
        seen["mlp_calls"] += 1

    for number, layer in enumerate(layers):
        layer.register_forward_hook(count_layer(number))
    mlp = layers[0].mlp
    getattr(mlp, "experts", mlp).register_forward_hook(count_mlp)
    if hasattr(mlp, "router"):
        routing = mlp.router.routing

        def route(logits: torch.Tensor, *others: Any, **options: Any) -> Any:
            seen["router_dtype"] = logits.dtype
            return routing(logits, *others, **options)

        mlp.router.routing = route
    finalize = engine._config.finalize_model_grads_func

    def finalize_watched(*call: Any, **options: Any) -> Any:
        handles = [group.grad_reduce_handle for module in engine._modules for group in module.bucket_groups]
        seen["reduced_early"] = any(handle is not None for handle in handles)
        return finalize(*call, **options)

    engine._config.finalize_model_grads_func = finalize_watched
    return seen


def look_at(engine: Any) -> dict[str, Any]:
    """What is there after them."""
    mlp = engine._stages[0].decoder.layers[0].mlp
    owned = [engine._shards.tensors(param)[0] for param, _ in engine._params]
    optimizers = [part.optimizer for part in engine._optimizer.chained_optimizers]
    states = sum(len(optimizer.state) for optimizer in optimizers)
    return {
        "layers": len(engine._stages[0].decoder.layers),
        "dispatcher": type(getattr(mlp, "token_dispatcher", None)).__name__,
        "experts": type(getattr(mlp, "experts", None)).__name__,
        "gathers_late": engine._is_gathering,
        "grad_dtype": next(iter(engine._params))[0].main_grad.dtype,
        "buckets": sum(len(group.buckets) for module in engine._modules for group in module.bucket_groups),
        "moments": [
            sorted({str(held[kind].dtype) for held in owned if held}) for kind in ("exp_avg", "exp_avg_sq")
        ],
        "on_host": sum(len(getattr(optimizer, "_copies", ())) for optimizer in optimizers) / states,
    }


@functools.cache
def results() -> dict:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-options-"))
    shape = {"tie": False, "layers": LAYERS, "init_std": 0.15}
    paths = {
        "dense": str(make_tiny_model_dir(root / "dense", "qwen3", **shape)),
        "experts": str(make_tiny_model_dir(root / "experts", "qwen3_moe", **shape)),
    }
    every = dict.fromkeys(one for kind in CASES for name in CASES[kind] for one in scenarios(kind, name))
    found: dict = {}
    for world in (1, 2):
        wanted = [scenario for scenario in every if scenario.world == world]
        found |= run_workers(train_each, world, wanted, paths, deadline_s=900)[0]
    return found


def test_every_option_has_a_case():
    assert {kind: set(named) for kind, named in CASES.items()} == {
        kind: set(named) for kind, named in OPTIONS.items()
    }


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CASES for name in CASES[kind]])
def test_an_option_does_something_and_trains_the_same(kind, name):
    case = CASES[kind][name]
    (seen, weights), (seen_without, weights_without) = (results()[each] for each in scenarios(kind, name))
    if case.differs:
        assert seen[case.differs] != seen_without[case.differs]
    gap = max(float((weights[key] - weights_without[key]).abs().max()) for key in weights_without)
    assert case.same is not True or gap < 0.02 * cases.LR
    assert case.same is not False or gap > 0.1 * cases.LR
