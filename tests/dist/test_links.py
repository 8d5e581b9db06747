"""Weight links between HF rollouts and fake trainers, which communicate per tensor as sharded ones do."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from some_cases import some
from transformers import AutoModelForCausalLM

from siirl.compiler.plan import LinkPlan, ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.served import served_rollout
from siirl.engines.rollout.served.engine_process import EngineLost
from siirl.engines.rollout.served.messages import Call
from siirl.engines.weights import folder as weight_folder
from siirl.engines.weights import in_place
from siirl.engines.weights import link as links
from siirl.engines.weights.bucket import LiveWeights
from siirl.engines.weights.link import make_link
from siirl.errors import RolloutError, WeightSyncError
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return str(make_tiny_model_dir(path, vocab=24, head_dim=32, init_std=0.3, tokenizer=False))


@functools.cache
def tied_once(model_dir):
    weights = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}


class FakeTrainer:
    """Exports the weights of a model directory times `scale`; each tensor is a collective of its ranks."""

    def __init__(self, model_dir, groups, ranks, version=0):
        self.weights = tied_once(model_dir)
        self.group = groups.get(ranks)
        self.version = version
        self.scale = 1.0
        self.edit = lambda tensors: tensors
        self.fail_at = None
        self.exported_dtypes = []
        self.meets = True
        self.specs_of = None  # as what is exported
        self.lives = False

    def weight_specs(self):
        said = (self.specs_of or self.edit)(self.weights)
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in said.items()}

    def export_weights(self, dtype=None):
        self.exported_dtypes.append(dtype)
        for position, (name, tensor) in enumerate(self.edit(self.weights).items()):
            if position == self.fail_at:
                raise RuntimeError("out of memory")
            if self.meets:
                total = torch.tensor([float(position)])
                dist.all_reduce(total, group=self.group)
                assert total == position * dist.get_world_size(self.group), "collectives of two tensors met"
            yield name, (tensor * self.scale).to(dtype or tensor.dtype)

    def held_pieces(self):
        """It exports what it makes, not what it has: see test_weights_by_shards.py."""

    def live_weights(self):
        if not self.lives:
            return None
        return LiveWeights({name: tensor * self.scale for name, tensor in self.edit(self.weights).items()})


@functools.cache
def config(model_dir, dtype):
    return load_config(
        [
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.model.path={model_dir}",
            f"actor_rollout_ref.rollout.dtype={dtype}",
        ]
    )


def build_rollout(model_dir, dtype="float32"):
    plan = ModelPlan("rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
    return make_rollout_engine(plan, config(model_dir, dtype), None, torch.device("cpu"))


def all_groups(places):
    """The process groups of several links, created on every rank of the world."""
    tuples = []
    for sources, targets in places:
        tuples += [tuple(sources), ranks_of(sources, targets)]
    return ProcessGroupManager(list(dict.fromkeys(tuples)), "gloo", 20)


def ranks_of(sources, targets):
    return tuple(sorted({*sources, *targets}))


def build_link(rank, model_dir, groups, sources, targets, dtype="float32", folder=None):
    ranks = ranks_of(sources, targets)
    trainer = FakeTrainer(model_dir, groups, tuple(sources)) if rank in sources else None
    rollout = build_rollout(model_dir, dtype) if rank in targets else None
    kind = "local" if set(targets) == set(sources) else "broadcast"
    kind = "checkpoint" if folder else kind
    folder = Path(folder or "never", "-".join(map(str, ranks)))
    plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", ranks, kind)
    return trainer, rollout, make_link(plan, trainer, rollout, groups, folder)


def everywhere(rank, world_size, check, model_dir, places, *args):
    """check(rank, model_dir, groups, sources, targets, *args) on each place that this rank is in."""
    groups = all_groups(places)
    return [
        check(rank, model_dir, groups, *place, *args) if rank in ranks_of(*place) else None
        for place in places
    ]


def log_probs(rollout):
    (sample,) = rollout.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), [0])[0]
    return sample.token_ids, sample.log_probs


PLACES = [
    ([0], [0]),
    ([0, 1], [0, 1]),
    ([1], [0]),
    ([0, 1], [2]),
    ([0, 1], [1, 2]),
    ([1, 2], [0, 3]),
]


def two_syncs(rank, model_dir, groups, sources, targets, folder):
    links.BUCKET_BYTES = 3000  # several tensors in a bucket, several buckets, and tensors larger than one
    weight_folder.FILE_BYTES = 3000
    trainer, rollout, link = build_link(rank, model_dir, groups, sources, targets, folder=folder)
    first = link.push().values()
    results = [log_probs(rollout) if rollout else None]
    skipped = link.push().values()
    if trainer:
        trainer.scale, trainer.version = 0.5, 1
    second = link.push().values()
    results.append(log_probs(rollout) if rollout else None)
    return first, skipped, second, results, rollout and rollout.weight_version


@pytest.mark.parametrize("kind", some(["auto", "checkpoint"], "auto"))
def test_every_target_gets_the_trainers_weights_and_version_wherever_it_is(model_dir, kind, tmp_path):
    state = tied_once(model_dir)
    rollout = build_rollout(model_dir)
    expected = []
    for scale in (1.0, 0.5):
        rollout.load_weights([(name, tensor * scale) for name, tensor in state.items()], 0)
        expected.append(log_probs(rollout))
    assert expected[0] != expected[1]
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    folder = str(tmp_path) if kind == "checkpoint" else None
    out = run_workers(everywhere, 4, two_syncs, model_dir, PLACES, folder)
    for index, (sources, targets) in enumerate(PLACES):
        for rank in ranks_of(sources, targets):
            first, skipped, second, results, version = out[rank][index]
            for metrics in (first, second):
                beside = 20_000 if folder else 0  # the index, and the heads of files
                assert 0 <= metrics["weight_sync/bytes"] - num_bytes <= beside
                assert metrics["time/weight_sync_s"] > 0
            (name,) = skipped
            assert name.endswith("_version") and (first[name], skipped[name], second[name]) == (0, 0, 1)
            if rank in targets:
                assert results == expected and version == 1
    left = sorted(path.name for path in tmp_path.glob("*/*"))
    assert left == (["version_1"] * len({ranks_of(*place) for place in PLACES}) if folder else [])


def in_rollout_dtype(rank, model_dir, groups, sources, targets):
    """Twice; from where it is trained, too, only where that is."""
    trainer, rollout, link = build_link(rank, model_dir, groups, sources, targets, "bfloat16")
    found, sent = [], {}
    broadcast = dist.broadcast

    def counted(tensor, **options):
        sent[version] = sent.get(version, 0) + tensor.nbytes
        return broadcast(tensor, **options)

    links.dist.broadcast = counted
    try:
        for version in (1, 2):
            if trainer:
                trainer.version, trainer.scale, trainer.lives = version, 1.0 + version / 7, version == 2
            found.append(link.push().values()["weight_sync/bytes"])
            if rollout:
                state = rollout._model.state_dict()
                for name, tensor in tied_once(model_dir).items():
                    assert torch.equal(state[name], (tensor * (1.0 + version / 7)).bfloat16()), name
    finally:
        links.dist.broadcast = broadcast
    return trainer and trainer.exported_dtypes, found, sent[2]


def test_weights_are_exported_and_sent_in_the_rollouts_dtype(model_dir):
    num_bytes = 2 * sum(tensor.numel() for tensor in tied_once(model_dir).values())
    (of_trainer,), (of_target,) = run_workers(everywhere, 2, in_rollout_dtype, model_dir, [([0], [1])])
    assert of_trainer[0] == [torch.bfloat16] * 2 and of_target[0] is None
    for _, told, sent in (of_trainer, of_target):
        assert told == [num_bytes] * 2 and num_bytes <= sent < num_bytes + 4096


def one_target_behind(rank, model_dir, groups, sources, targets):
    _, rollout, link = build_link(rank, model_dir, groups, sources, targets)
    link.push()
    if rank == targets[-1]:
        rollout.weight_version = -1
    return "weight_sync/bytes" in link.push().values(), rollout and rollout.weight_version


def trainers_disagree(rank, model_dir, groups, sources, targets):
    trainer, _, link = build_link(rank, model_dir, groups, sources, targets)
    trainer.version = rank
    with pytest.raises(WeightSyncError, match="different steps"):
        link.push()


def rollout_missing(rank, model_dir, groups, sources, targets):
    plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", (0, 1), "local")
    with pytest.raises(WeightSyncError, match=r"holds no agent_0\.rollout"):
        make_link(plan, FakeTrainer(model_dir, groups, (0, 1)), None, groups, Path("never"))


def several_decisions(rank, world_size, model_dir):
    (behind,) = everywhere(rank, world_size, one_target_behind, model_dir, [([0], [1, 2])])
    everywhere(rank, world_size, trainers_disagree, model_dir, [([0, 1], [0, 1])])
    everywhere(rank, world_size, rollout_missing, model_dir, [([0, 1], [0, 1])])
    return behind


def test_ranks_decide_alike(model_dir):
    """One target behind makes all sync; trainers at different steps, and a missing engine, are errors."""
    assert run_workers(several_decisions, 3, model_dir) == [(True, None), (True, 0), (True, 0)]


def without_norm(weights):
    return {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}


def with_extra(weights):
    return weights | {"model.extra.weight": torch.zeros(3)}


def with_cut_norm(weights):
    return weights | {"model.norm.weight": weights["model.norm.weight"][:-1]}


BROKEN = [
    (without_norm, ["model.norm.weight", "did not arrive"]),
    (with_extra, ["model.extra.weight", "unknown"]),
    (with_cut_norm, ["model.norm.weight", "[31]", "[32]"]),
]


def broken_exports(rank, model_dir, groups, sources, targets, folder):
    trainer, rollout, link = build_link(rank, model_dir, groups, sources, targets, folder=folder)
    link.push()
    messages = []
    for version, (edit, _) in enumerate(BROKEN, start=1):
        if trainer:
            trainer.edit, trainer.version = edit, version
        with pytest.raises(WeightSyncError) as caught:
            link.push()
        messages.append(str(caught.value))
        if rollout:
            with pytest.raises(RolloutError, match="did not complete"):
                rollout.generate([[5]], SamplingParams(max_tokens=1), [0])
    if trainer:
        trainer.edit = lambda tensors: tensors
    link.push()
    return messages, rollout and rollout.weight_version


@pytest.mark.parametrize("kind", some(["auto", "checkpoint"], "auto"))
def test_a_wrong_tensor_fails_the_sync_on_every_rank_and_the_next_one_can_succeed(model_dir, kind, tmp_path):
    folder = str(tmp_path) if kind == "checkpoint" else None
    places = [([0, 1], [0, 1]), ([0, 1], [1, 2])]
    out = run_workers(everywhere, 3, broken_exports, model_dir, places, folder)
    for index, (sources, targets) in enumerate(places):
        for rank in ranks_of(sources, targets):
            messages, version = out[rank][index]
            for number, (message, (_, words)) in enumerate(zip(messages, BROKEN, strict=True), start=1):
                assert all(word in message for word in [*words, "agent_0.sync", f"version {number}"]), message
            assert version == (len(BROKEN) if rank in targets else None)


def last_target_fails(rank, model_dir, groups, sources, targets):
    _, rollout, link = build_link(rank, model_dir, groups, sources, targets)
    if rank == targets[-1]:
        rollout._specs["model.layers.0.mlp.up_proj.weight"] = ((1, 2), torch.float32)
    with pytest.raises(WeightSyncError) as caught:
        link.push()
    return str(caught.value)


def test_one_failing_target_fails_all_ranks(model_dir):
    places = [([0, 1], [0, 1]), ([0], [1, 2]), ([0, 1], [1, 2]), ([0, 2], [2, 0, 1])]
    out = run_workers(everywhere, 3, last_target_fails, model_dir, places)
    for index, place in enumerate(places):
        for rank in ranks_of(*place):
            message = out[rank][index]
            assert f"rank {place[1][-1]}: " in message and "up_proj" in message


def export_fails(rank, model_dir, groups, sources, targets, folder):
    links.BUCKET_BYTES = 3000
    trainer, rollout, link = build_link(rank, model_dir, groups, sources, targets, folder=folder)
    if trainer:
        trainer.fail_at = 7
    with pytest.raises(WeightSyncError) as caught:
        link.push()
    return str(caught.value), rollout and rollout.weight_version


@pytest.mark.parametrize("kind", some(["auto", "checkpoint"], "auto"))
def test_an_export_that_raises_fails_all_ranks_and_nobody_hangs(model_dir, kind, tmp_path):
    folder = str(tmp_path) if kind == "checkpoint" else None
    places = [([0], [0]), ([0], [1, 2]), ([0, 1], [0, 1])]
    out = run_workers(everywhere, 3, export_fails, model_dir, places, folder, deadline_s=30)
    for index, (sources, targets) in enumerate(places):
        for rank in ranks_of(sources, targets):
            message, version = out[rank][index]
            assert "out of memory" in message
            assert version == (-1 if rank in targets else None)


class LostProcess:
    """In the place of a vLLM process: answers, until it is lost in one of the calls of a sync."""

    def __init__(self, *args):
        LostProcess.called, self.writes_in_place = [], False

    def tell(self, event):
        return event.tell(self)

    def post(self, message):
        self.call(message.method)

    def settle(self, but_last=0):
        pass

    def call(self, method, **arguments):
        LostProcess.called.append(method)
        if method == LostProcess.lost_in:
            raise EngineLost("rollout engine 'agent_0.rollout' (pid 5) died: killed by SIGKILL.", "")

    def ask(self, message):
        if isinstance(message, Call):
            self.call(message.method)


def shared_engine_is_lost(rank, world_size, model_dir, way, calls):
    """What each rank of one engine raises, for each call in which the engine is lost; its metrics if None."""
    served_rollout.RecoveringEngine = LostProcess
    in_place.BUCKET_BYTES = 9000
    groups = ProcessGroupManager([(0, 1)], "gloo", 20)
    dims = ParallelDims(2, tp=2)
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0, 1), dims, "rollout", ())
    cfg = load_config(
        [
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.model.path={model_dir}",
            "actor_rollout_ref.rollout.dtype=float32",
            f"actor_rollout_ref.rollout.replace_weights={way}",
            f"trainer.output_dir={model_dir}/outputs",
        ]
    )
    trainer = FakeTrainer(model_dir, groups, (0, 1))
    link_plan = LinkPlan("agent_0.sync", "agent_0.actor", "agent_0.rollout", (0, 1), "local")
    rollout = make_rollout_engine(plan, cfg, groups, torch.device("cpu"))
    link = make_link(link_plan, trainer, rollout, groups, Path("never"))
    said = []
    for LostProcess.lost_in in calls:
        trainer.version += 1
        try:
            said.append(link.push().values())
        except WeightSyncError as error:
            said.append(str(error))
    return said, rollout.weight_version, rank > 0 or LostProcess.called[-1]


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("by_loaders", ["begin_update", "update", "finish_update", None]),
        (
            "auto",
            ["begin_update", "update", "finish_update", None]
            + [lost for call in ("begin_writing", "write", "finish_writing") for lost in (call, None)]
            + [None],
        ),
    ],
)
def test_an_engine_of_two_ranks_that_is_lost_in_a_sync_fails_it_on_both_and_nobody_waits(
    way, calls, model_dir
):
    pytest.importorskip("vllm")
    out = run_workers(shared_engine_is_lost, 2, model_dir, way, calls, deadline_s=60)
    lost = "rank 0: rollout engine 'agent_0.rollout' (pid 5) died: killed by SIGKILL"
    for said, version, last in out:
        for call, told in zip(calls, said, strict=True):
            assert (lost if call else "weight_sync/bytes") in told
        assert version == len(calls)
        assert last in (True, "finish_update" if way == "by_loaders" else "finish_writing")
