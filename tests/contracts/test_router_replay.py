"""Experts that were chosen once are used again: against a replay by hand in plain Hugging Face."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import causal_lms
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import largest_gap, names_on_disk
from recorded_cases import case_of, distance, record_gaps
from tensordict import TensorDict
from torch import Tensor
from train_engine_cases import Scenario

from siirl.config.common import STRATEGIES
from siirl.data.completions import expert_columns, longer
from siirl.data.rows import make_rows, take_rows
from siirl.models.families import types_with
from siirl.models.sizes import RouterChoices, router_choices
from siirl.types import EXPERT_FIELDS

LATENT = types_with(lambda row: row.latent)
REPLAYED = types_with(lambda row: row.experts and row.experts.replayed)

ACTOR = "actor_rollout_ref.actor"
R2, R3 = (f"{ACTOR}.router_replay.mode={mode}" for mode in ("R2", "R3"))
SOME = ("qwen3_moe", "gpt_oss")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = (
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
    f"actor_rollout_ref.model.target_modules=[{','.join(ATTENTION)}]",
)
ON_DISK = ("deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss")
"""Whose gradients are compared tensor by tensor; of the others by their norm."""


def drawn_experts(rows: TensorDict, choices: RouterChoices) -> list[bytes]:
    """Any experts for the tokens of each row but the last, no two of a layer alike."""
    draw = torch.Generator().manual_seed(7)
    found = []
    for num in (rows["prompt_length"] + rows["response_length"] - 1).tolist():
        order = torch.rand(num, choices.layers, choices.experts, generator=draw).argsort(-1)
        found.append(order[..., : choices.top_k].short().flatten(1).numpy().tobytes())
    return found


def replayed_by_hand(
    folder: Path, rows: TensorDict, experts: list[bytes], adapts: bool
) -> tuple[Any, Tensor, Tensor]:
    """A model of transformers, and (log-prob, entropy) [B, T], a row at a time, of the given experts.

    The weights of a token's experts are computed from the logits of the router of the model's layer, as the
    family's own documentation has it. adapts: with adapters of peft, which alone train then.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    choices = router_choices(model.config.to_dict())
    given: list[Tensor] = []
    recorder = model._can_record_outputs["router_logits"]
    routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]

    def given_instead(layer: int, router: Any, _: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits_NE = found[recorder.index].float()
        chosen_NK = given[0].view(-1, choices.layers, choices.top_k)[:, layer]
        own_NK = logits_NE[len(chosen_NK) :].topk(choices.top_k).indices  # of the last token: nobody reads it
        chosen_NK = torch.cat([chosen_NK, own_NK])
        if hasattr(router, "e_score_correction_bias"):
            weight_NK = logits_NE.sigmoid().gather(1, chosen_NK)
            if router.norm_topk_prob:
                weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
            weight_NK = weight_NK * model.config.routed_scaling_factor
        elif getattr(router, "norm_topk_prob", True):
            weight_NK = logits_NE.gather(1, chosen_NK).softmax(-1)
        else:
            weight_NK = logits_NE.softmax(-1).gather(1, chosen_NK)
        if recorder.index == 2:
            return chosen_NK, weight_NK, found[2]
        return found[0], weight_NK, chosen_NK

    for layer, router in enumerate(routers):
        router.register_forward_hook(partial(given_instead, layer))
    model = cases.plain_lora(model, ATTENTION) if adapts else model
    log_prob_BT, entropy_BT = (torch.zeros(len(rows), cases.WIDTH) for _ in range(2))
    for row, said in enumerate(experts):
        if (num := int(rows["response_length"][row])) > 0:
            given[:] = [torch.frombuffer(bytearray(said), dtype=torch.int16).long()]
            log_prob_BT[row, :num], entropy_BT[row, :num] = cases.one_row_outputs(model, rows, row)
    return model, log_prob_BT, entropy_BT


def replays(
    rank: int, world: int, folder: Path, kinds: list[str], scenarios: list[Scenario]
) -> dict[str, str]:
    """Model type and scenario -> what is wrong with how the engine computes with given experts."""
    found = {}
    for kind in kinds:
        for scenario in scenarios:
            adapts, gaps = set(LORA) <= set(scenario.overrides), {}
            if adapts and kind in LATENT:
                continue
            problem = wrong(folder / kind, kind, scenario, gaps)
            case = case_of(kind, scenario, "replay" + " of adapters" * adapts)
            record_gaps(case, {} if problem else gaps)
            found |= {f"{kind} {scenario.name}": problem} if problem else {}
    return found


def with_columns(rows: TensorDict, columns: dict[str, Tensor]) -> TensorDict:
    return TensorDict({name: rows.get(name) for name in rows.keys()} | columns, batch_size=rows.batch_size)


def wrong(folder: Path, kind: str, scenario: Scenario, gaps: dict[str, float]) -> str:
    """What is wrong; the distances that are found go into gaps."""
    scenario = replace(scenario, overrides=(*scenario.overrides, R2))
    engine, _ = cases.build_engine(scenario, folder)
    mine = cases.rows_of_rank(engine.dp_rank, engine.dp_size, "uneven")
    choices = router_choices(json.loads((folder / "config.json").read_text()))
    rows = cases.sample_rows(0)
    experts = drawn_experts(rows, choices)
    model, log_prob_BT, entropy_BT = replayed_by_hand(
        folder, rows, experts, set(LORA) <= set(scenario.overrides)
    )
    rows = with_columns(rows, expert_columns(rows, experts, choices))
    given, bare = take_rows(rows, mine), take_rows(cases.sample_rows(0), mine)

    own = engine.compute(bare, ("log_prob", "experts"), cases.TEMPERATURE)
    kept = {name: own[name] for name in EXPERT_FIELDS}
    again = engine.compute(with_columns(bare, kept), ("log_prob",), cases.TEMPERATURE)
    if not (again["log_prob"] - own["log_prob"]).abs().max() < 1e-6:
        return "its own experts give other log-probs"
    found = engine.compute(given, ("log_prob", "entropy", "experts"), cases.TEMPERATURE)
    for name, expected_BT in (("log_prob", log_prob_BT), ("entropy", entropy_BT)):
        gaps[name] = float((found[name] - expected_BT[mine]).abs().max())
        if not gaps[name] < 1e-5:
            return f"{name} is off by {gaps[name]}"
    if (found["log_prob"] - own["log_prob"]).abs().max() < 0.01:
        return "other experts give the same log-probs"
    answered_B = given["response_length"] > 0  # rows without a response are not computed
    for name in EXPERT_FIELDS:
        if not torch.equal(found[name][answered_B], given[name][answered_B]):
            return f"{name} are not those that were given"
    mask_BT = rows["response_mask"]
    loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
    ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP))
    outputs = ("log_prob", "entropy")
    metrics = engine.train_mini_batch(given, cases.policy_loss, outputs, cases.TEMPERATURE)
    if metrics.values()["grad_norm"] != pytest.approx(norm, rel=1e-5):
        return f"grad_norm is {metrics.values()['grad_norm']} instead of {norm}"
    grads = cases.first_step_gradients(engine)
    if kind in ON_DISK:
        theirs = {
            cases.plain_name(name): param.grad
            for name, param in model.named_parameters()
            if param.requires_grad
        }
        theirs = names_on_disk(theirs, kind)
        gap, name = largest_gap(grads, theirs)
        if not gap < 1e-6:
            return f"the gradient of {name} is off by {gap}"
        gaps["gradient"] = distance(grads, theirs)
    return ""


@pytest.mark.parametrize("kinds", [SOME, pytest.param(REPLAYED, marks=pytest.mark.slow)], ids=("some", "all"))
def test_given_experts_compute_what_a_replay_by_hand_does(kinds, tmp_path):
    for kind in kinds:
        causal_lms.write_model(tmp_path / kind, causal_lms.tiny_config(kind))
    cuts = [Scenario("fsdp", 2), *(Scenario(axis, 2, sizes=((axis, 2),)) for axis in ("cp", "ep"))]
    found = run_workers(replays, 2, tmp_path, list(kinds), cuts, deadline_s=300)
    assert found == [{}, {}]


def megatron(name: str, world: int = 4, *overrides: str, **sizes: int) -> Scenario:
    one_row = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)
    return Scenario(
        name, world, "", strategy="megatron", sizes=tuple(sizes.items()), overrides=one_row + overrides
    )


SP = f"{ACTOR}.megatron.sequence_parallel=True"
LAYOUTS = [
    megatron("alone", 1),
    megatron("adapters", 1, *LORA),
    megatron("ep 2, dp 2", 2, ep=2),
    megatron("pp 2", 2, pp=2),
    megatron("tp 2", 2, SP, tp=2),
    megatron("cp 2", 2, cp=2),
    megatron("tp 2, ep 2, pp 2", 4, SP, tp=2, ep=2, pp=2),
    megatron("adapters, tp 2, ep 2, pp 2", 4, SP, *LORA, tp=2, ep=2, pp=2),
    megatron("cp 2, pp 2, ep 2", 4, cp=2, pp=2, ep=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_given_experts_compute_the_same_in_every_layout_of_megatron(world, tmp_path):
    kinds = ["qwen2_moe", "glm4_moe", "deepseek_v3", "olmoe"]
    if world > 1:
        kinds += ["qwen3_moe", "mixtral", "granitemoe"]
    for kind in (*kinds, "gpt_oss"):
        own = {"num_hidden_layers": 4, "tie_word_embeddings": False, "sliding_window": None}
        if kind == "gpt_oss":
            own["sliding_window"] = 128
        if kind == "qwen2_moe":  # has dense layers among those of experts
            own |= {"mlp_only_layers": [1], "shared_expert_intermediate_size": 24}
        causal_lms.write_model(tmp_path / kind, causal_lms.tiny_config(kind, **own))
    scenarios = [scenario for scenario in LAYOUTS if scenario.world == world]
    assert run_workers(replays, world, tmp_path, kinds, scenarios, deadline_s=300) == [{}] * world
    scenarios = [scenario for scenario in scenarios if dict(scenario.sizes).get("cp", 1) == 1]
    assert run_workers(replays, world, tmp_path, ["gpt_oss"], scenarios, deadline_s=300) == [{}] * world


def sampler(folder: Path) -> Any:
    from siirl.compiler.plan import ModelPlan
    from siirl.config import load_config
    from siirl.engines.rollout.hf.hf_rollout import HFRollout
    from siirl.parallel.dims import ParallelDims

    plan = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
    keys = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.dtype=float32"]
    return HFRollout(plan, load_config(["actor_rollout_ref.rollout.name=hf", R3, *keys]), None, "cpu")


def sampled_rows(completions: list[Any], prompts: list[list[int]], choices: RouterChoices) -> TensorDict:
    from siirl.nodes.generate import response_columns

    lengths = [len(prompt) for prompt in prompts]
    rows = make_rows({"prompt_ids": prompts, "prompt_length": lengths} | response_columns(completions))
    return with_columns(rows, expert_columns(rows, [one.experts for one in completions], choices))


def distances(rank: int, world: int, folder: Path, strategy: str) -> dict[str, float]:
    """Mean distance of the trainer's log-probs from those of an engine whose routers are a little off."""
    from siirl.data.completions import SamplingParams

    engine, _ = cases.build_engine(Scenario("", 1, overrides=(R3,), strategy=strategy), folder)
    choices = router_choices(json.loads((folder / "config.json").read_text()))
    rollout, draw = sampler(folder), torch.Generator().manual_seed(0)
    weights = dict(engine.export_weights())
    for name in (name for name in weights if name.endswith("gate.weight")):
        weights[name] = weights[name] + 1e-3 * torch.randn(weights[name].shape, generator=draw)
    rollout.load_weights(weights.items(), version=0)
    prompts = [torch.randint(3, 64, (num,), generator=draw).tolist() for num in (3, 9, 5, 9, 1, 7, 7, 4)]
    found = rollout.generate(prompts, SamplingParams(max_tokens=24, n=2, stop_token_ids=(5,)), list(range(8)))
    several = [prompt for prompt in prompts for _ in range(2)]
    rows = sampled_rows([one for samples in found for one in samples], several, choices)
    mask_BT = rows["response_mask"]

    def distance(given: TensorDict) -> float:
        log_prob_BT = engine.compute(given, ("log_prob",), 1.0)["log_prob"]
        return float((log_prob_BT - rows["rollout_log_prob"]).abs()[mask_BT].mean())

    return {"own": distance(rows.exclude(*EXPERT_FIELDS)), "replayed": distance(rows)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trainer_is_ten_times_closer_to_an_engine_whose_experts_it_uses(tmp_path, strategy):
    many = {"num_experts": 32, "num_local_experts": 32, "num_hidden_layers": 4, "norm_topk_prob": True}
    causal_lms.write_model(tmp_path, causal_lms.tiny_config("qwen3_moe", tie_word_embeddings=False, **many))
    found = run_workers(distances, 1, tmp_path, strategy)[0]
    assert found["replayed"] < found["own"] / 10
    assert found["own"] > 1e-3


def test_a_response_that_was_interrupted_names_the_experts_that_it_would_have_named(tmp_path):
    from safetensors.torch import load_file

    from siirl.data.completions import Request, SamplingParams

    rollout = sampler(causal_lms.write_model(tmp_path, causal_lms.tiny_config("olmoe")))
    rollout.load_weights(load_file(tmp_path / "model.safetensors").items(), version=0)
    prompts, params = [[5, 6, 7], [9, 8, 7, 6, 5], [11]], SamplingParams(max_tokens=9, ignore_eos=True)
    whole = [one for (one,) in rollout.generate(prompts, params, range(3))]
    asked = iter([False, True, False, False, True] + [False] * 100)
    stream = rollout.stream(interrupt=lambda keys: next(asked))
    stream.submit([Request(key, prompt, params, key) for key, prompt in enumerate(prompts)])
    parts: dict[int, Any] = {}
    while stream.num_pending:
        parts |= stream.collect(1.0)
    for key, one in enumerate(whole):
        assert len(one.experts) == (len(prompts[key]) + 9 - 1) * 2 * 2 * 2
        assert (parts[key].token_ids, parts[key].experts) == (one.token_ids, one.experts)


def test_what_is_known_of_tokens_is_kept_as_more_comes():
    assert longer(None, b"ab") == b"ab"
    assert longer(b"ab", b"xyz") == b"abz"
    assert longer(None, None) is None and longer(b"ab", None) is None
