"""The actor's update is the same however its rows are cut into micro-batches or spread over ranks.

For every policy loss and aggregation, and the terms added to it: loss and gradient of actor_train under FSDP
and Megatron-Core, on 1, 2 and 4 ranks, with rows dealt out at random, against plain Hugging Face on whole
mini-batches.
"""

import copy
import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as engines
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from tensordict import TensorDict
from torch import Tensor
from train_engine_cases import NUM_ROWS, TEMPERATURE, WIDTH, Scenario

from siirl.algorithms.policy_losses import POLICY_LOSSES
from siirl.algorithms.token_picks import high_entropy, pick_tokens, token_noise
from siirl.config import Config, load_config, with_overrides
from siirl.config.algorithm_table import AGGREGATIONS
from siirl.data.rows import take_rows
from siirl.engines.train.base import BatchCounts, TokenOutputs, TrainEngine
from siirl.nodes.actor_train import actor_train
from siirl.nodes.policy_loss import make_loss_fn, policy_loss_options
from siirl.nodes.teacher_rows import taught
from siirl.observe.metrics import Metrics

ACTOR = "actor_rollout_ref.actor"
STEP, PROMPTS, SAMPLES = 3, 3, 2  # two mini-batches: of 6 rows and of the other 4
TOKENS = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24")
STILL = (  # the weights stay as they are, and AdamW's first moment is the gradient of the last mini-batch
    f"{ACTOR}.optim.lr=0",
    f"{ACTOR}.optim.betas=[0.0,0.999]",
    f"{ACTOR}.grad_clip=0",
)
TERMS = {
    f"{ACTOR}.entropy_coeff": 0.05,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.2,
    f"{ACTOR}.rollout_correction.weight": "truncate",
    f"{ACTOR}.rollout_correction.level": "sequence",
    f"{ACTOR}.rollout_correction.reject": "token",
    f"{ACTOR}.rollout_correction.reject_low": 0.3,
    f"{ACTOR}.rollout_correction.reject_high": 3.0,
}
KL_TYPE = f"{ACTOR}.kl_loss_type"
FULL_KL = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.2, KL_TYPE: "full"}
PICKS = {  # enough tokens that a pick differs if one rank's rows are forgotten, or counted twice
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.15,
    f"{ACTOR}.policy_loss.clip_cov_lb": -9.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 9.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.15,
}
MASKS = {  # bounds that some tokens and rows of `columns` pass and some do not
    f"{ACTOR}.opsm_delta": 0.02,
    f"{ACTOR}.top_entropy_quantile": 0.6,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.2,
    f"{ACTOR}.kl_loss_weighted": True,
    f"{ACTOR}.rollout_correction.weight": "filter",
    f"{ACTOR}.rollout_correction.low": 0.6,
    f"{ACTOR}.rollout_correction.high": 1.7,
    f"{ACTOR}.rollout_correction.reject": "mean_k3",
    f"{ACTOR}.rollout_correction.reject_divergence": 0.08,
}
TEACHERS, TOP = ("one", "two"), 5
DISTILL = f"{ACTOR}.distill"
LOSSES = [name for name in POLICY_LOSSES.names() if name != "geo_mean"]


def case(loss: str, mode: str, more: str = "", **keys: Any) -> tuple[str, dict[str, Any]]:
    named = {f"{ACTOR}.policy_loss.loss_mode": loss, f"{ACTOR}.loss_agg_mode": mode}
    return f"{loss}, {mode}{more}", named | PICKS | keys


def distill(top_k: int, divergence: str = "reverse_kl", **more: Any) -> dict[str, Any]:
    return {f"{DISTILL}.top_k": top_k, f"{DISTILL}.divergence": divergence, f"{DISTILL}.coef": 0.5} | more


BESIDE = {f"{DISTILL}.enable": True}
TAUGHT = dict(
    [
        case("distill", "token-mean", ", sampled", **distill(0)),
        case("distill", "seq-mean-token-mean", ", likeliest words", **distill(TOP, "jsd")),
        case("distill", "token-mean", ", all words", **distill(-1, "forward_kl")),
        case("vanilla", "token-mean", ", all words beside", **distill(-1, "jsd", **BESIDE), **TERMS),
        case("vanilla", "prompt-mean", ", sampled beside", **distill(0, **BESIDE), **MASKS),
    ]
)
FEW = dict(
    [
        case("vanilla", "token-mean", ", terms, shuffled", **TERMS, **{f"{ACTOR}.shuffle": True}),
        case("gspo", "seq-mean-token-mean", ", full KL", **FULL_KL),
        case("vespo", "prompt-mean", ", masks", **MASKS),
        case("clip_cov", "seq-mean-token-sum"),
        case("kl_cov", "seq-mean-token-sum-norm"),
        *TAUGHT.items(),
    ]
)
OF_WORDS = {name: keys for name, keys in FEW.items() if name in TAUGHT or "full KL" in name}
"""Of whole rows of words, of which ranks may hold a part each; the rest is of tokens."""
BY_TOKENS_AND_ROWS = [mode for mode in AGGREGATIONS if mode != "prompt-mean"]
ALL = dict(case(loss, mode) for loss in LOSSES for mode in BY_TOKENS_AND_ROWS)
ALL |= dict(
    case("vanilla", "token-mean", f", {name} KL", **FULL_KL | {KL_TYPE: name}) for name in ("full", "full+")
)
ALL |= dict(
    case("vanilla", mode, ", terms", **TERMS, **{f"{ACTOR}.kl_loss_type": "k3+"}) for mode in AGGREGATIONS
)
ALL |= TAUGHT
ALL |= dict(case("vanilla", mode, ", masks", **MASKS) for mode in ("token-mean", "prompt-mean"))

LOG_PROB_RMS = 1e-6
"""How far log-probs of float32 are from those of float64: 0.8e-6 to 1.1e-6, Hugging Face's as engines'."""

KEEP_HEAD = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full", f"{DISTILL}.top_k={TOP}")


def scenario(
    name: str, world: int, strategy: str = "megatron", overrides: tuple[str, ...] = (), **sizes: int
):
    whole = {"fsdp_size": sizes.pop("fsdp_size", 0), "strategy": strategy, "sizes": tuple(sizes.items())}
    return Scenario(name, world, "model", overrides=(*STILL, *KEEP_HEAD, *overrides), **whole)


FSDP_ON_2, TP_2 = scenario("fsdp on 2", 2, "fsdp"), scenario("tp2", 2, tp=2, overrides=TOKENS)
SCENARIOS = [
    scenario("fsdp on 1", 1, "fsdp", (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)),
    scenario("fsdp on 1, whole", 1, "fsdp", (f"{ACTOR}.ppo_micro_batch_size_per_gpu=6",)),
    scenario("megatron on 1", 1, overrides=TOKENS),
    scenario("fsdp on 2", 2, "fsdp", TOKENS),
    scenario("dp2", 2),
    scenario("pp2", 2, pp=2),
    scenario("cp2", 2, cp=2),
    scenario("fsdp, cp2", 2, "fsdp", TOKENS, cp=2),
    scenario("fsdp on 4", 4, "fsdp"),
    scenario("fsdp, cp2, dp2", 4, "fsdp", TOKENS, cp=2),
    scenario("two copies of two shards", 4, "fsdp", TOKENS, fsdp_size=2),
    scenario("tp2, dp2", 4, tp=2, overrides=TOKENS),
    scenario("pp2, dp2", 4, pp=2),
]


@functools.cache
def model_dir() -> str:
    folder = Path(tempfile.mkdtemp(prefix="siirl-invariance-"))
    return str(make_tiny_model_dir(folder / "model", tie=False, hidden=64, init_std=0.15))


@functools.cache
def plain_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)


@functools.cache
def plain_outputs() -> tuple[Tensor, Tensor]:
    """(log_prob, entropy) [B, T] with their graph, a row at a time."""
    return engines.reference_outputs(plain_model(), engines.sample_rows(0))


@functools.cache
def plain_hidden() -> Tensor:
    """The last hidden state before each response token, with its graph, [B, T, D]."""
    rows, model = engines.sample_rows(0), plain_model()
    hidden_BTD = torch.zeros(NUM_ROWS, WIDTH, model.config.hidden_size)
    for row in range(NUM_ROWS):
        num_prompt, num = int(rows["prompt_length"][row]), int(rows["response_length"][row])
        ids = torch.cat([rows["prompt_ids"][row, -num_prompt:], rows["response_ids"][row, :num]])
        hidden_BTD[row, :num] = model.model(ids[None]).last_hidden_state[0, num_prompt - 1 : -1]
    return hidden_BTD


@functools.cache
def columns() -> dict[str, Tensor]:
    """What the earlier nodes would have written: log-probs and states at some distance from the policy's."""
    draw = torch.Generator().manual_seed(8)
    log_prob_BT, hidden_BTD = plain_outputs()[0].detach(), plain_hidden().detach()
    names = ("old_log_prob", "rollout_log_prob", "ref_log_prob")
    found = {name: log_prob_BT + 0.25 * torch.randn(NUM_ROWS, WIDTH, generator=draw) for name in names}
    found["old_entropy"] = plain_outputs()[1].detach() + 0.25 * torch.randn(NUM_ROWS, WIDTH, generator=draw)
    for name in TEACHERS:
        found |= said_by_teacher(name, draw)
    found["group_id"] = torch.arange(NUM_ROWS) // 4  # one prompt has rows in both mini-batches
    return found | {"ref_hidden": hidden_BTD + 0.3 * torch.randn(hidden_BTD.shape, generator=draw)}


def said_by_teacher(name: str, draw: torch.Generator) -> dict[str, Tensor]:
    """Its fields: "one" takes the rows but every third, "two" the odd ones, and these.

    Likeliest words are those of one teacher only, so a row of both has those of the first.
    """
    row_B = torch.arange(NUM_ROWS)
    weight_B = (row_B % 3 != 0).float() if name == "one" else 3.0 * ((row_B % 3 == 0) | (row_B % 2 == 1))
    shape = (NUM_ROWS, WIDTH, plain_model().config.vocab_size)
    log_q = (2 * torch.randn(shape, generator=draw)).log_softmax(-1)
    words = engines.sample_rows(0)["response_ids"]
    top, ids = log_q.topk(TOP)
    fields = {
        "weight": weight_B,
        "log_prob": log_q.gather(-1, words[..., None])[..., 0],
        "all": log_q,
        "top": top,
        "top_ids": ids,
    }
    return {f"{name}_teacher_{field}": value for field, value in fields.items()}


def of_teachers(rows: TensorDict, cfg: Config) -> TensorDict:
    """The rows with what teachers give under a configuration."""
    top_k = cfg.actor_rollout_ref.actor.distill.top_k
    rows = rows.clone(recurse=False)
    for name in TEACHERS:
        kinds = {kind: rows.pop(f"{name}_teacher_{kind}") for kind in ("all", "top")}
        if top_k:
            rows[f"{name}_teacher_top_log_prob"] = kinds["all" if top_k == -1 else "top"]
    return rows


def plain_words() -> Tensor:
    """Log-probs of all words at each response token, with their graph, [B, T, V]."""
    return (plain_hidden() @ plain_model().lm_head.weight.t() / TEMPERATURE).log_softmax(-1)


def exact_log_probs() -> Tensor:
    """[B, T] by the plain model in float64."""
    rows, model = engines.sample_rows(0), copy.deepcopy(plain_model()).double()
    log_prob_BT = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for row in range(NUM_ROWS):
            num_prompt, num = int(rows["prompt_length"][row]), int(rows["response_length"][row])
            words = rows["response_ids"][row, :num]
            logits_NV = model(torch.cat([rows["prompt_ids"][row, -num_prompt:], words])[None]).logits[0]
            log_p_NV = (logits_NV[num_prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
            log_prob_BT[row, :num] = log_p_NV.gather(-1, words[:, None])[:, 0]
    return log_prob_BT


@functools.cache
def plain_full_kl() -> Tensor:
    """KL over the whole vocabulary from what ref_hidden says, with its graph, [B, T]."""
    head = plain_model().lm_head.weight
    log_p = (plain_hidden() @ head.t() / TEMPERATURE).log_softmax(-1)
    log_q = (columns()["ref_hidden"] @ head.detach().t() / TEMPERATURE).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def rows_of(found: dict[str, Tensor]) -> TensorDict:
    rows = engines.sample_rows(0).exclude("raw_prompt")
    for name, value in found.items():
        rows[name] = value
    return rows


@functools.cache
def base_config() -> Config:
    sizes = (f"{ACTOR}.ppo_mini_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={SAMPLES}")
    return load_config([*sizes, f"actor_rollout_ref.rollout.temperature={TEMPERATURE}"])


@dataclass
class Update:
    """Means over the step's mini-batches, and the gradient of the last one."""

    loss: float
    grad_norm: float
    entropy: float
    grads: dict[str, Tensor]


def whole_update(keys: dict[str, Any]) -> Update:
    """The same in one process, on whole mini-batches, by plain Hugging Face."""
    outputs = (*plain_outputs(), plain_full_kl(), plain_words())
    losses, norms, metrics, model = [], [], Metrics(), plain_model()
    for loss, of_mini in whole_losses(keys, outputs):
        metrics.merge(of_mini)
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm(grads).item())
    named = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
    return Update(sum(losses) / 2, sum(norms) / 2, metrics.values()["entropy"], named)


def whole_losses(keys: dict[str, Any], outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
    """Loss and metrics of each mini-batch, from what the model says of all rows, in TokenOutputs' order."""
    cfg = with_overrides(base_config(), keys)
    rows = of_teachers(rows_of(columns()), cfg)
    if cfg.actor_rollout_ref.actor.distills:
        rows = taught(SimpleNamespace(cfg=cfg, node_id="train"), rows)
    order = torch.arange(NUM_ROWS)
    if cfg.actor_rollout_ref.actor.shuffle:
        seed = (cfg.actor_rollout_ref.actor.data_loader_seed * 1_000_003 + STEP) * 1_009
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed)).argsort()
    for number, index in enumerate(order.split(PROMPTS * SAMPLES)):
        mini, mask_BT = take_rows(rows, index), rows["response_mask"][index]
        actor = cfg.actor_rollout_ref.actor
        if actor.loss.picks_tokens:
            noise_BT = token_noise(mini["row_id"], WIDTH, cfg.trainer.seed * 1_000_003 + STEP)
            given = (mini["old_log_prob"], mini["advantage"], mask_BT, noise_BT, policy_loss_options(cfg))
            mini["picked"] = pick_tokens(actor.loss_name, *given)
        if actor.loss.kinked and number == 0:
            mini = mini.exclude("old_log_prob")
        if actor.picks_by_entropy:
            mini["high_entropy"] = high_entropy(mini["old_entropy"], mask_BT, actor.top_entropy_quantile)
        if actor.loss_agg_mode == "prompt-mean":
            mini["prompt_share"] = shares_of_prompts(mini["group_id"].tolist(), mask_BT.sum(-1).tolist())
        counts = BatchCounts(float(mask_BT.sum()), float(mask_BT.any(-1).sum()), cfg.data.max_response_length)
        *of_tokens, words = (x[index] for x in outputs)
        words = words.gather(-1, mini["top_ids"]) if "top_ids" in mini.keys() else words
        loss, of_mini = make_loss_fn(cfg)(TokenOutputs(*of_tokens, words), mini, counts)
        yield loss, of_mini.read()


@functools.cache
def rounding(name: str) -> float:
    """What rounding leaves unknown of a loss: its deviation where log-probs are drawn LOG_PROB_RMS apart.

    Near 2e-7 for most losses. vespo's multiplies the sum of a row's log-probs, some 40 here, by a weight that
    depends on them: 3e-6, which float32 cannot do better than, by whatever model.
    """
    draw, losses = torch.Generator().manual_seed(4), []
    log_prob_BT, *others = (x.detach().double() for x in (*plain_outputs(), plain_full_kl(), plain_words()))
    for _ in range(40):  # 100 times as far apart, so that float32 does not round here
        moved_BT = log_prob_BT + 100 * LOG_PROB_RMS * torch.randn(log_prob_BT.shape, generator=draw)
        parts = whole_losses((FEW | ALL)[name], (moved_BT, *others))
        losses.append(sum(float(loss) for loss, _ in parts) / 2)
    return float(torch.tensor(losses, dtype=torch.float64).std()) / 100


def shares_of_prompts(prompts: list[int], tokens: list[int]) -> Tensor:
    """What a trained token of each row counts where prompts count alike."""
    of = {p: sum(n for q, n in zip(prompts, tokens, strict=True) if q == p) for p in prompts}
    trained = sum(number > 0 for number in of.values())
    return torch.tensor([1 / (of[p] * trained) if of[p] else 0.0 for p in prompts], dtype=torch.float64)


def updates(
    rank: int,
    world: int,
    scenarios: list[Scenario],
    cases: dict[str, dict],
    path: str,
    found: dict[str, Tensor],
) -> dict[str, Update] | None:
    """Of every scenario and case, from rank 0."""
    hidden_BTD, word_BTV, exact_BT = (found.pop(name) for name in ("hidden", "words", "exact"))
    rows, results = rows_of(found), {}
    for one in scenarios:
        engine, _ = engines.build_engine(one, path)
        check_hidden(engine, rows, hidden_BTD)
        check_log_probs(engine, rows, exact_BT)
        check_words(engine, rows, word_BTV)
        shards = engines.dims_of(one, tuple(range(world)))[0].data_shards()
        is_shard_leader = shards.index(shards[rank]) == rank
        moments: dict[str, Tensor] = {}
        for number, (name, keys) in enumerate(cases.items()):
            owner = torch.randint(
                engine.dp_size, (NUM_ROWS,), generator=torch.Generator().manual_seed(number)
            )
            cfg = with_overrides(base_config(), keys)
            mine = take_rows(of_teachers(rows, cfg), (owner == engine.dp_rank).nonzero().squeeze(1))
            ctx = SimpleNamespace(
                cfg=cfg, node_id="train", step=STEP, group=dist.group.WORLD, trained=None, options={}
            )
            ctx.taken = None
            ctx.metrics, ctx.is_shard_leader = Metrics(), is_shard_leader
            actor_train(ctx, mine, engine)
            results[f"{one.name}: {name}"] = joined(ctx)
            state = engine.state_dict()["optimizer"].items()
            moments |= {f"{name}/{key[8:]}": m.clone() for key, m in state if key.startswith("exp_avg.")}
        for key, whole in engines.whole_tensors(moments).items():
            name, _, parameter = key.partition("/")
            results[f"{one.name}: {name}"].grads[parameter] = whole
    return results if rank == 0 else None


def check_hidden(engine: TrainEngine, rows: TensorDict, want_BTD: Tensor) -> None:
    """The states that a reference on this engine would hand to the actor."""
    mine = torch.arange(NUM_ROWS)[engine.dp_rank :: engine.dp_size]
    got_BTD = engine.compute(take_rows(rows, mine), ("log_prob", "hidden"), TEMPERATURE)["hidden"]
    torch.testing.assert_close(got_BTD, want_BTD[mine], rtol=1e-4, atol=1e-4)


def check_log_probs(engine: TrainEngine, rows: TensorDict, exact_BT: Tensor) -> None:
    """Of the rows of this rank, which may have few tokens."""
    mine = torch.arange(NUM_ROWS)[engine.dp_rank :: engine.dp_size]
    got_BT = engine.compute(take_rows(rows, mine), ("log_prob",), TEMPERATURE)["log_prob"]
    apart = (got_BT.double() - exact_BT[mine])[torch.arange(WIDTH) < rows["response_length"][mine, None]]
    assert apart.square().mean().sqrt() < 1.5 * LOG_PROB_RMS


def check_words(engine: TrainEngine, rows: TensorDict, want_BTV: Tensor) -> None:
    """The likeliest words that a teacher on this engine would name, with their log-probs."""
    mine = torch.arange(NUM_ROWS)[engine.dp_rank :: engine.dp_size]
    got = engine.compute(take_rows(rows, mine), ("top_log_prob", "top_ids"), TEMPERATURE)
    inside_BT = torch.arange(WIDTH) < rows["response_length"][mine, None]
    want = want_BTV[mine].topk(TOP)
    torch.testing.assert_close(got["top_log_prob"][inside_BT], want.values[inside_BT], rtol=1e-4, atol=1e-4)
    assert torch.equal(got["top_ids"][inside_BT], want.indices[inside_BT])


def joined(ctx: SimpleNamespace) -> Update:
    """The metrics of all ranks, those of each shard once."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, ctx.metrics.entries if ctx.is_shard_leader else {})
    metrics = Metrics()
    for part in parts:
        metrics.merge(Metrics(part))
    values = metrics.values()
    return Update(values["actor/loss"], values["actor/grad_norm"], values["actor/entropy"], {})


@functools.cache
def wanted(name: str) -> Update:
    return whole_update((FEW | ALL)[name])


def check(scenarios: list[Scenario], cases: dict[str, dict]) -> None:
    given = columns() | {"hidden": plain_hidden().detach(), "words": plain_words().detach()}
    given["exact"] = exact_log_probs()
    found = run_workers(updates, scenarios[0].world, scenarios, cases, model_dir(), given, deadline_s=400)[0]
    assert len(found) == len(scenarios) * len(cases)
    for key, got in found.items():
        name = key.partition(": ")[2]
        want = wanted(name)
        if got.loss != pytest.approx(want.loss, rel=1e-6, abs=2e-6):
            assert got.loss == pytest.approx(want.loss, rel=0, abs=3 * rounding(name)), key
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=2e-5), key
        assert got.entropy == pytest.approx(want.entropy, rel=1e-5), key
        largest = max(float(grad.abs().max()) for grad in want.grads.values())
        assert got.grads.keys() == want.grads.keys() and largest > 1e-4, key
        for parameter, grad in want.grads.items():
            apart = (got.grads[parameter] - grad).abs().max()
            assert apart < 1e-5 * largest, f"{key}: {parameter}"


def test_the_update_is_the_same_on_two_ranks():
    check(
        [FSDP_ON_2], {name: keys for name, keys in FEW.items() if name not in TAUGHT or "all words" in name}
    )
    check([TP_2], OF_WORDS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_loss_and_aggregation_gives_the_same_update_anywhere(world):
    check([one for one in SCENARIOS if one.world == world], ALL)
