"""Losses, gradients and steps of training clients, against the protocol's own definitions in float64."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from siirl.config import with_overrides
from siirl.data.completions import SamplingParams
from siirl.engines.train.adapters.adapted_layers import AdaptedLayers
from siirl.engines.train.base import AdamStep
from siirl.engines.train.packed.micro_batches import MicroBatchLimit
from siirl.service.commands import (
    BASE,
    AdapterSpec,
    Cells,
    CreateModel,
    Datum,
    ForwardBackward,
    LoadState,
    OptimStep,
    Refused,
    Sample,
    SaveSampler,
    SaveState,
)
from siirl.service.saved_weights import OPERATOR

pytestmark = pytest.mark.heavy
ALPHA = 32
STILL = AdamStep(0.0, 0.0, 0.9, 1e-8, 0.0, 0.0)
"""Its first moment is the gradient, and no weight moves."""
OPTIONS = {"ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "dro": {"beta": 0.3}}
ROUNDING = 3e-6
"""Of float32 through all layers, in units of the largest value of a gradient."""
SOURCES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def created(tenants, model: str, rank: int = 4, seed: int = 3) -> None:
    """A model whose adapter is no longer zero."""
    tenants.create(CreateModel(model, AdapterSpec(rank, seed)))
    draw = torch.Generator().manual_seed(seed)
    adapter = tenants._tenants[model].trained.adapter
    adapter.vector.add_(0.05 * torch.randn(adapter.vector.shape, generator=draw))
    adapter.changed()


def train(tenants, *commands: ForwardBackward):
    """What comes of them; raises what one is refused for."""
    found = tenants.train(commands)
    for one in found:
        if isinstance(one, Refused):
            raise one
    return found[0] if len(found) == 1 else found


def stepped(tenants, model: str, adam: AdamStep) -> float:
    """The norm of the gradient; raises what it is refused for."""
    (norm,) = tenants.step([OptimStep(model, adam)])
    if isinstance(norm, Refused):
        raise norm
    return norm


def data_of(seed: int, follows: bool = True, num_targets: int = 0) -> list[Datum]:
    """Three sequences; follows: the targets are the tokens that come next. num_targets: K; 0: one each."""
    draw, data = np.random.default_rng(seed), []
    for count in (7, 1, 4):
        tokens = draw.integers(2, 64, count + 1)
        target = (
            tokens[1:] if follows else draw.integers(2, 64, (count, num_targets) if num_targets else count)
        )
        shape = target.shape
        inputs = {
            "target_tokens": target.astype(np.int64),
            "weights": draw.random(shape).astype(np.float32),
            "logprobs": (-4.2 - draw.random(shape)).astype(np.float32),
            "advantages": draw.standard_normal(shape).astype(np.float32),
        }
        data.append(Datum(tokens[:-1].tolist(), inputs))
    return data


def terms_of(name: str, lp, q, w, adv) -> torch.Tensor:
    """What the loss sums up, by the protocol's own words."""
    ratio = torch.exp(lp - q)
    if name == "cross_entropy":
        return -w * lp
    if name == "importance_sampling":
        return -ratio * adv
    if name == "ppo":
        return -torch.min(ratio * adv, torch.clip(ratio, 0.9, 1.1) * adv)
    if name == "cispo":
        return -torch.clip(ratio, 0.0, 4.0).detach() * lp * adv
    return -(lp * adv - 0.3 / 2 * (lp - q) ** 2)


class ByHand:
    """The model in float64, its adapter as A and B."""

    def __init__(self, service, weights: dict[str, torch.Tensor], rank: int) -> None:
        path = service._cfg.actor_rollout_ref.model.path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).requires_grad_(False)
        self.parts = {name: one.double().requires_grad_() for name, one in weights.items()}
        self.scale = ALPHA / rank
        self.weights = dict(self.model.named_parameters())

    def log_probs(self, datum: Datum) -> torch.Tensor:
        merged = {}
        for name, a in self.parts.items():
            if ".lora_A" in name:
                layer, b = name.replace(".lora_A", ""), self.parts[name.replace(".lora_A", ".lora_B")]
                merged[layer] = self.weights[layer] + self.scale * b @ a
        out = torch.func.functional_call(self.model, merged, (torch.tensor([datum.tokens]),))
        target = torch.from_numpy(datum.inputs["target_tokens"])
        whole = torch.log_softmax(out.logits[0], -1)
        return whole.gather(-1, target.reshape(len(target), -1)).reshape(target.shape)

    def terms(self, name: str, data: list[Datum]) -> torch.Tensor:
        columns = ("logprobs", "weights", "advantages")
        found = [
            terms_of(
                name,
                self.log_probs(one),
                *(torch.from_numpy(one.inputs[column]).double() for column in columns),
            )
            for one in data
        ]
        return torch.cat([one.flatten() for one in found])

    def loss(self, name: str, data: list[Datum]) -> torch.Tensor:
        return self.terms(name, data).sum()


def gradient_of(tenants, model: str) -> dict[str, torch.Tensor]:
    """The gradient so far, which is then gone."""
    stepped(tenants, model, STILL)
    tenants.save(SaveState(model, f"tinker://{model}/weights/still", True))
    _, stored = tenants.read(f"tinker://{model}/weights/still")
    prefix = "optimizer/exp_avg."
    return {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}


def adapter_of(tenants, model: str) -> dict[str, torch.Tensor]:
    tenants.save_sampler(SaveSampler(model, None, f"{model}:now"))
    return tenants.snapshot(f"{model}:now").weights


def off(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference, in units of the largest value."""
    assert found.keys() == wanted.keys()
    size = max(one.abs().max().item() for one in wanted.values())
    return max((found[name].double() - one).abs().max().item() for name, one in wanted.items()) / size


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("follows", "num_targets"), [(True, 0), (False, 0), (False, 3)])
def test_losses_and_gradients_are_those_of_the_protocol_in_float64(
    service, tenants, name, follows, num_targets
):
    created(tenants, "a:train:0")
    data = data_of(1, follows, num_targets)
    by_hand = ByHand(service, adapter_of(tenants, "a:train:0"), 4)
    terms = by_hand.terms(name, data)
    (wanted := terms.sum()).backward()
    command = ForwardBackward("a:train:0", name, OPTIONS.get(name, {}), data, False)
    looked = train(tenants, ForwardBackward("a:train:0", name, OPTIONS.get(name, {}), data, True))
    trained = train(tenants, command)
    for found in (looked, trained):
        assert found.loss == pytest.approx(wanted.item(), abs=1e-6 * terms.abs().sum().item())
        for one, datum in zip(found.log_probs, data, strict=True):
            np.testing.assert_allclose(one, by_hand.log_probs(datum).detach().numpy(), atol=2e-6)
    grads = {name: one.grad for name, one in by_hand.parts.items()}
    far = off(gradient_of(tenants, "a:train:0"), grads)
    assert far < ROUNDING


def test_gradients_of_several_requests_and_losses_add_up_until_the_step(service, tenants):
    created(tenants, "a:train:0")
    by_hand = ByHand(service, adapter_of(tenants, "a:train:0"), 4)
    parts = [("cross_entropy", data_of(1)), ("ppo", data_of(2)), ("cross_entropy", data_of(3, False, 2))]
    for name, data in parts:
        by_hand.loss(name, data).backward()
        train(tenants, ForwardBackward("a:train:0", name, OPTIONS.get(name, {}), data, False))
        train(tenants, ForwardBackward("a:train:0", name, OPTIONS.get(name, {}), data, True))
    assert off(gradient_of(tenants, "a:train:0"), {n: p.grad for n, p in by_hand.parts.items()}) < ROUNDING
    assert stepped(tenants, "a:train:0", STILL) == 0, "the step before has cleared it"


def test_a_step_is_adamw_by_the_parameters_of_its_request(service, tenants):
    created(tenants, "a:train:0")
    names = list(adapter_of(tenants, "a:train:0"))
    mine = [torch.nn.Parameter(one.clone()) for one in adapter_of(tenants, "a:train:0").values()]
    adam = torch.optim.AdamW(mine)
    steps = [AdamStep(1e-2, 0.9, 0.95, 1e-12, 0.0, 0.0), AdamStep(3e-3, 0.8, 0.99, 1e-8, 0.1, 0.5)]
    for number, step in enumerate(steps):
        by_hand = ByHand(service, {n: p.detach() for n, p in zip(names, mine, strict=True)}, 4)
        by_hand.loss("cross_entropy", data_of(number)).backward()
        for one, name in zip(mine, names, strict=True):
            one.grad = by_hand.parts[name].grad.float()
        norm = torch.nn.utils.clip_grad_norm_(mine, step.max_norm or math.inf)
        adam.param_groups[0].update(
            lr=step.learning_rate,
            betas=(step.beta1, step.beta2),
            eps=step.eps,
            weight_decay=step.weight_decay,
        )
        adam.step()
        train(tenants, ForwardBackward("a:train:0", "cross_entropy", {}, data_of(number), False))
        assert stepped(tenants, "a:train:0", step) == pytest.approx(norm.item(), rel=1e-5)
        found = adapter_of(tenants, "a:train:0")
        far = max((found[n] - p.detach()).abs().max().item() for n, p in zip(names, mine, strict=True))
        assert far < 1e-4, "of a first step a sign is all that counts, also of a number that is nearly 0"


SPECS = {"a:train:0": (4, 3), "b:train:0": (8, 5), "c:train:0": (2, 3)}
ASKED = {
    "a:train:0": ("ppo", True, 0),
    "b:train:0": ("cross_entropy", False, 3),
    "c:train:0": ("dro", False, 0),
}


ADAM = dict.fromkeys(SPECS, AdamStep(1e-2, 0.9, 0.95, 1e-12, 0.1, 1.0))
ADAM["c:train:0"] = AdamStep(3e-3, 0.8, 0.95, 1e-12, 0.0, 0.0)


def asked_of(model: str, step: int) -> ForwardBackward:
    """Of another loss for each model, and more data for some."""
    name, follows, num_targets = ASKED[model]
    rank, seed = SPECS[model]
    data = [one for number in range(rank) for one in data_of(step + seed + number, follows, num_targets)]
    return ForwardBackward(model, name, {}, data, False)


def trained(tenants, models: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Steps of models, whose requests go through the base together; the whole state of each, and all that
    they are told."""
    for model in models:
        tenants.create(CreateModel(model, AdapterSpec(*SPECS[model])))
    told: dict[str, dict[str, torch.Tensor]] = {model: {} for model in models}
    for step in range(2):
        for time in range(2):
            for model, one in zip(models, tenants.train([asked_of(x, step) for x in models]), strict=True):
                told[model] |= {
                    f"{step} {time} {row}": torch.tensor(x) for row, x in enumerate(one.log_probs)
                }
                told[model][f"{step} {time} loss"] = torch.tensor(one.loss, dtype=torch.float64)
        tenants.step([OptimStep(model, ADAM[model]) for model in models])
    for model in models:
        tenants.save(SaveState(model, f"tinker://{model}/weights/end", True))
        told[model] |= tenants.read(f"tinker://{model}/weights/end")[1]
    return told


@pytest.mark.parametrize("most_tokens", [1 << 14, 40], ids=["in one pass", "in several"])
def test_clients_in_one_pass_are_bit_for_bit_what_each_is_alone(tenants, monkeypatch, most_tokens):
    monkeypatch.setattr(tenants.engine, "_limit", MicroBatchLimit(max_tokens=most_tokens))
    models = list(SPECS)
    together = trained(tenants, models)
    for model in models:
        tenants.release(model.partition(":")[0])
    for model in models:
        (alone,) = trained(tenants, [model]).values()
        assert alone.keys() == together[model].keys()
        assert all(torch.equal(alone[name], one) for name, one in together[model].items())


def beside(engine, monkeypatch) -> None:
    """As on a GPU."""
    for layer in engine.layers._layers.values():
        monkeypatch.delattr(layer, "forward")
    own = AdaptedLayers(engine._model.hf, "all-linear", torch.float32, apart=False)
    monkeypatch.setattr(engine, "layers", own)


def test_adapters_side_by_side_in_one_product_as_on_a_gpu_are_the_same_but_for_rounding(tenants, monkeypatch):
    apart = trained(tenants, list(SPECS))
    for model in SPECS:
        tenants.release(model.partition(":")[0])
    beside(tenants.engine, monkeypatch)
    for model, found in trained(tenants, list(SPECS)).items():
        for name, one in found.items():
            if name.startswith("0 "):
                torch.testing.assert_close(one, apart[model][name], rtol=1e-5, atol=1e-5)
            elif "exp_avg." in name:
                torch.testing.assert_close(one, apart[model][name], rtol=1e-2, atol=1e-4)


def test_a_saved_state_goes_on_bit_for_bit_in_a_new_model(tenants):
    (before,) = trained(tenants, ["a:train:0"]).values()
    before = {name: one for name, one in before.items() if "/" in name}
    tenants.load(LoadState("b:train:1", "tinker://a:train:0/weights/end", True, True))
    for model in ("a:train:0", "b:train:1"):
        train(tenants, ForwardBackward(model, "cross_entropy", {}, data_of(9), False))
        stepped(tenants, model, AdamStep(1e-2, 0.9, 0.95, 1e-12, 0.1, 1.0))
        tenants.save(SaveState(model, f"tinker://{model}/weights/on", True))
    one, other = (tenants.read(f"tinker://{m}/weights/on")[1] for m in ("a:train:0", "b:train:1"))
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    assert not any(torch.equal(one[name], before[name]) for name in one if ".lora_B" in name)


def sampled(service, source: str, **more):
    params = SamplingParams(max_tokens=6, temperature=more.pop("temperature", 1.0), stop_token_ids=(1,))
    command = Sample(source, [5, 9, 11], params, more.pop("num_samples", 2), 7, **more)
    (found,) = service.sampler.sample([command], speaks=True)
    return found


@pytest.mark.parametrize("only_forward", [True, False])
def test_the_base_is_given_to_samplers_after_any_pass(service, tenants, only_forward):
    created(tenants, "a:train:0")
    asked, base = (
        ForwardBackward("a:train:0", "cross_entropy", {}, data_of(1), only_forward),
        service.sampler._base,
    )
    before = {name: one.clone() for name, one in base.export_weights()}
    first, again = train(tenants, asked), train(tenants, asked)
    assert all(torch.equal(before[name], one) for name, one in base.export_weights())
    after = train(tenants, asked)  # the weights are gathered anew
    assert first.loss == again.loss == after.loss
    assert all(map(np.array_equal, first.log_probs, after.log_probs))


def test_a_service_that_listens_loads_nothing_for_its_first_client(service, monkeypatch):
    monkeypatch.setattr(service.tenants, "on_first", lambda _: [])  # nobody listens
    service.start(speaks=True)
    monkeypatch.delattr(type(service.sampler._engine), "load_weights")
    assert sampled(service, BASE).sequences


def test_samples_are_of_the_snapshot_that_is_asked_for_and_so_are_their_log_probs(service, tenants):
    created(tenants, "a:train:0", rank=4)
    tenants.save_sampler(SaveSampler("a:train:0", None, "a:sample:0"))
    first = sampled(service, "a:sample:0", prompt_log_probs=True, top_prompt=3, top_samples=4)
    base = sampled(service, BASE)
    train(tenants, ForwardBackward("a:train:0", "cross_entropy", {}, data_of(1), False))
    stepped(tenants, "a:train:0", AdamStep(0.1, 0.9, 0.95, 1e-12, 0.0, 0.0))
    tenants.save_sampler(SaveSampler("a:train:0", "tinker://a:train:0/sampler_weights/on", None))
    later = sampled(service, "tinker://a:train:0/sampler_weights/on")
    assert sampled(service, "a:sample:0", prompt_log_probs=True).sequences == first.sequences
    assert len({str(one.sequences) for one in (first, base, later)}) == 3
    by_hand = ByHand(service, tenants.snapshot("a:sample:0").weights, 4)
    for number, (tokens, log_probs, _) in enumerate(first.sequences):
        whole = [5, 9, 11, *tokens]
        datum = Datum(whole[:-1], {"target_tokens": np.array(whole[1:])})
        wanted = by_hand.log_probs(datum).detach().numpy()
        np.testing.assert_allclose(log_probs, wanted[2:], atol=2e-5)
        np.testing.assert_allclose(first.prompt_log_probs[1:], wanted[:2], atol=2e-5)
        for top, places in ((first.top_prompt[0], slice(2)), (first.top_samples[number], slice(2, None))):
            every = np.tile(np.arange(64), (len(whole) - 1, 1))
            likely = by_hand.log_probs(Datum(whole[:-1], {"target_tokens": every})).detach()[places]
            best, words = likely.topk(top.words.shape[1])
            np.testing.assert_array_equal(top.words, words)
            np.testing.assert_allclose(top.log_probs, best, atol=2e-5)
    assert math.isnan(first.prompt_log_probs[0])


def test_words_of_a_prompt_that_are_named_or_drawn_have_the_log_probs_of_a_forward_pass(service, tenants):
    created(tenants, "a:train:0", rank=4)
    tenants.save_sampler(SaveSampler("a:train:0", None, "a:sample:0"))
    every = np.tile(np.arange(64), (2, 1))
    by_hand = ByHand(service, tenants.snapshot("a:sample:0").weights, 4)
    wanted = by_hand.log_probs(Datum([5, 9], {"target_tokens": every})).detach().numpy()
    ragged = Cells(np.array([3, 60, -1, 9]), (2, 99), np.array([0, 1, 4]), np.array([7, 0, 1, 98]))
    names = {"targets": ragged, "drawn_prompt": 4096, "temperature": 0.5, "prompt_log_probs": True, "last": 1}
    found = sampled(service, "a:sample:0", **names)
    np.testing.assert_allclose(
        found.targets[0].values, [wanted[0, 3], wanted[1, 60], 0, wanted[1, 9]], atol=2e-5
    )
    assert np.isnan(found.prompt_log_probs[:2]).all()
    np.testing.assert_allclose(found.prompt_log_probs[2], wanted[1, 11], atol=2e-5)
    (drawn,) = found.drawn_prompt
    np.testing.assert_allclose(drawn.log_probs, np.take_along_axis(wanted, drawn.words, 1), atol=2e-5)
    chance = np.exp(2 * wanted) / np.exp(2 * wanted).sum(1, keepdims=True)
    share = np.stack([np.bincount(row, minlength=64) / 4096 for row in drawn.words])
    assert (abs(share - chance) < 5 * np.sqrt(chance / 4096) + 1e-3).all(), "at the temperature"
    again = sampled(service, "a:sample:0", drawn_prompt=4096, temperature=0.5).drawn_prompt[0]
    np.testing.assert_array_equal(again.words, drawn.words)
    greedy = sampled(service, "a:sample:0", drawn_prompt=2, temperature=0.0).drawn_prompt[0]
    np.testing.assert_array_equal(greedy.words, wanted.argmax(1)[:, None].repeat(2, 1))
    others = sampled(service, "a:sample:0", targets=Cells(np.array([64, -1]), (2, 1)))
    assert isinstance(others, Refused) and "ids below 64" in str(others)


def test_a_text_that_stops_ends_a_response_where_it_is_complete(service):
    (tokens, log_probs, _), *_ = sampled(service, BASE, num_samples=1).sequences
    text = service.sampler._tokenizer.decode(tokens[:3])
    (cut, cut_log_probs, stopped), *_ = sampled(
        service, BASE, num_samples=1, stops=("nothing", text)
    ).sequences
    assert stopped and cut == tokens[: len(cut)] and cut_log_probs == log_probs[: len(cut)]
    assert service.sampler._tokenizer.decode(cut).endswith(text) and len(cut) <= 3


def refusal(tenants, command) -> str:
    kinds = {CreateModel: "create", SaveState: "save", LoadState: "load"}
    with pytest.raises(Refused) as refused:
        if isinstance(command, ForwardBackward):
            train(tenants, command)
        if isinstance(command, OptimStep):
            stepped(tenants, command.model, command.adam)
        getattr(tenants, kinds[type(command)])(command)
    return str(refused.value)


def changed(**inputs) -> list[Datum]:
    one = data_of(1)[0]
    return [Datum(inputs.pop("tokens", one.tokens), one.inputs | inputs)]


WRONG = [
    ("stable_reinforce", {}, data_of(1), "no public definition"),
    ("ppo", {"clip": 0.2}, data_of(1), "clip_low_threshold"),
    ("ppo", {}, [], "no data"),
    ("ppo", {}, changed(tokens=[]), "0 tokens"),
    ("ppo", {}, changed(tokens=[5] * 65), "65 tokens"),
    ("ppo", {}, changed(tokens=[5, 6, 7, 8, 9, 10, 64]), "ids below 64"),
    ("ppo", {}, changed(tokens=[5, 6, 7, 8, 9, 10, -1]), "ids below 64"),
    ("ppo", {}, changed(target_tokens=np.arange(3)), "target_tokens are 7"),
    ("ppo", {}, changed(advantages=np.ones(3, np.float32)), "advantages has shape"),
    ("ppo", {}, changed(logprobs=np.full(7, np.nan, np.float32)), "not finite"),
    ("ppo", {}, [Datum([5], {"target_tokens": np.array([6])})], "has no logprobs"),
]


@pytest.mark.parametrize(("loss", "options", "data", "said"), WRONG, ids=[row[3] for row in WRONG])
def test_what_cannot_be_trained_on_is_refused_and_changes_nothing(tenants, loss, options, data, said):
    created(tenants, "a:train:0")
    train(tenants, ForwardBackward("a:train:0", "cross_entropy", {}, data_of(1), False))
    assert said in refusal(tenants, ForwardBackward("a:train:0", loss, options, data, False))
    with_refusal = gradient_of(tenants, "a:train:0")
    train(tenants, ForwardBackward("a:train:0", "cross_entropy", {}, data_of(1), False))
    assert all(torch.equal(with_refusal[n], one) for n, one in gradient_of(tenants, "a:train:0").items())


def test_names_that_there_are_not_are_refused(service, tenants):
    for source in ("a:sample:9", "tinker://a:train:0/sampler_weights/none", "tinker://../weights/x", "../x"):
        with pytest.raises(Refused):
            sampled(service, source)
    assert "no model" in refusal(tenants, OptimStep("a:train:7", STILL))
    created(tenants, "a:train:0")
    path = "tinker://a:train:0/weights/{}"
    assert "nothing was saved" in refusal(tenants, LoadState("a:train:0", path.format("none"), True, False))
    assert "is no path" in refusal(tenants, SaveState("a:train:0", "tinker://a:train:0/weights/..", False))
    tenants.save(SaveState("a:train:0", path.format("one"), True))
    assert "is there already" in refusal(tenants, SaveState("a:train:0", path.format("one"), False))
    created(tenants, "a:train:1", rank=2)
    assert "another shape" in refusal(tenants, LoadState("a:train:1", path.format("one"), True, False))
    assert "ranks 1 to 8" in refusal(tenants, CreateModel("a:train:2", AdapterSpec(9, 0)))
    assert "nothing would be trained" in refusal(
        tenants, CreateModel("a:train:2", AdapterSpec(2, 0, False, False))
    )
    for number in range(2, 6):
        tenants.create(CreateModel(f"a:train:{number}", AdapterSpec(2, 0, mlp=False)))
    assert "service.max_models" in refusal(tenants, CreateModel("a:train:9", AdapterSpec(2, 0)))


def test_a_gradient_that_is_not_finite_takes_no_step(tenants):
    created(tenants, "a:train:0")
    before = adapter_of(tenants, "a:train:0")
    huge = changed(logprobs=np.full(7, -1e4, np.float32))
    train(tenants, ForwardBackward("a:train:0", "importance_sampling", {}, huge, False))
    said = refusal(tenants, OptimStep("a:train:0", AdamStep(1.0, 0.9, 0.9, 1e-8, 0.0, 0.0)))
    assert "no step was taken" in said
    after = adapter_of(tenants, "a:train:0")
    assert all(torch.equal(before[name], one) for name, one in after.items())


def test_a_step_that_is_refused_costs_those_beside_it_nothing(tenants):
    broken, whole, gone = "a:train:0", "b:train:0", "c:train:0"
    for model in (broken, whole):
        created(tenants, model)
    before, huge = adapter_of(tenants, whole), changed(logprobs=np.full(7, -1e4, np.float32))
    train(tenants, ForwardBackward(broken, "importance_sampling", {}, huge, False))
    train(tenants, ForwardBackward(whole, "cross_entropy", {}, data_of(1), False))
    adam = AdamStep(1e-2, 0.9, 0.9, 1e-8, 0.0, 0.0)
    first, norm, last = tenants.step([OptimStep(model, adam) for model in (broken, whole, gone)])
    assert "no step was taken" in str(first) and "no model" in str(last) and 0 < norm < math.inf
    after = adapter_of(tenants, whole)
    assert not any(torch.equal(before[name], one) for name, one in after.items())


def test_tenants_of_the_file_have_their_keys_beside_the_servers_own(service, tmp_path, monkeypatch):
    file = tmp_path / "tenants"
    file.touch(mode=0o600)
    file.write_text("ann tml-ann-0123456789")
    monkeypatch.setattr(service, "_cfg", with_overrides(service._cfg, {"service.tenants_file": str(file)}))
    keys = service._keys()
    assert keys.keys() == {OPERATOR, "ann"} and keys["ann"] == "tml-ann-0123456789"
    assert keys[OPERATOR].startswith("tml-") and len(keys[OPERATOR]) > 40
