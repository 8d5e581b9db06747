"""Weight links of all kinds, with ranks that are threads and collectives that go through memory."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from some_cases import some

from siirl.compiler.plan import LinkPlan
from siirl.engines.weights import link as links
from siirl.engines.weights.bucket import LiveWeights
from siirl.engines.weights.folder import WeightFolder
from siirl.engines.weights.link import make_link
from siirl.errors import WeightSyncError


class Place:
    """The process groups of one rank."""

    def __init__(self, rank, network):
        self.rank, self.network, self.counts = rank, network, {}

    def get(self, ranks):
        assert self.rank in ranks
        return (self, tuple(ranks))


class Network:
    """Collectives of threads: each of a group has a number, by the order in which a rank comes to them."""

    def __init__(self):
        self.changed, self.given = threading.Condition(), {}
        self.bytes_of = {}

    def _number(self, group):
        place, ranks = group
        place.counts[ranks] = place.counts.get(ranks, 0) + 1
        return ranks, place.counts[ranks]

    def _await(self, key, count):
        with self.changed:
            came = self.changed.wait_for(lambda: len(self.given.get(key, ())) == count, timeout=10)
        assert came, f"a rank waits for {key}, and not all come"
        return self.given[key]

    def _give(self, key, rank, value):
        with self.changed:
            self.given.setdefault(key, {})[rank] = value
            self.changed.notify_all()

    def all_gather(self, rows, mine, group):
        key, rank = self._number(group), group[0].rank
        self._give(key, rank, mine.clone())
        for row, value in zip(rows, (self._await(key, len(rows))[r] for r in group[1]), strict=True):
            row.copy_(value)

    def broadcast(self, flat, src, group, async_op=False):
        key, rank = self._number(group), group[0].rank
        if rank == src:
            self._give(key, src, flat.clone())
            self.bytes_of[rank] = self.bytes_of.get(rank, 0) + flat.nbytes

        def wait():
            flat.copy_(self._await(key, 1)[src])

        return SimpleNamespace(wait=wait) if async_op else wait()


class Trainer:
    def __init__(self, rank=0, ranks=(0,)):
        self.place, self.ranks = ranks.index(rank), ranks
        self.version, self.scale, self.fails_at, self.more, self.lives = 0, 1.0, None, False, False
        draw = torch.Generator().manual_seed(0)
        self.weights = {f"w{n}": torch.randn(n % 5 + 1, 7, generator=draw) for n in range(30)}
        self.weights["count"] = torch.arange(4)

    def weight_specs(self):
        return {name: (tuple(x.shape), x.dtype) for name, x in self.weights.items()}

    def made(self):
        return {"more": torch.ones(2)} | self.weights if self.more else self.weights

    def held_pieces(self):
        """It exports what it makes."""

    def live_weights(self):
        return LiveWeights(dict(self.export_weights())) if self.lives else None

    def export_weights(self, dtype=None):
        for number, (name, tensor) in enumerate(self.made().items()):
            if number == self.fails_at:
                raise RuntimeError("out of memory")
            yield name, tensor * self.scale if tensor.is_floating_point() else tensor


class Target:
    takes, keeps, reads_live, weight_version = "merged", "all", False, -1

    def __init__(self, specs):
        self.specs, self.held, self.fails = specs, {}, False

    def weight_specs(self):
        return self.specs

    def expect_weights(self):
        pass

    def load_weights(self, weights, version):
        self.weight_version, self.held = -1, {}
        for name, tensor in weights:
            if self.fails and len(self.held) == 9:
                raise RuntimeError("no room")
            self.held[name] = tensor.clone()
        self.weight_version = version


TROUBLES = ("none", "none", "none", "export", "target", "more")


@pytest.mark.parametrize("seed", some(range(25), *range(12)))
def test_a_link_brings_all_weights_or_fails_on_all_ranks_and_goes_on(seed, monkeypatch):
    """Exports that fail on all ranks, targets that fail on one, and exports that change."""
    rng, network = random.Random(seed), Network()
    monkeypatch.setattr(links, "dist", network)
    monkeypatch.setattr(links, "BUCKET_BYTES", 300)
    ranks = tuple(range(rng.randint(2, 5)))
    sources = tuple(sorted(rng.sample(ranks, rng.randint(1, len(ranks) - 1))))
    targets = {rank for rank in ranks if rank not in sources or rng.random() < 0.4}
    turns = [rng.choice(TROUBLES) for _ in range(10)]
    if "export" in turns:  # ranks of the trainer do not hear of each other's failure in order
        turns = turns[: turns.index("export") + 1]
    culprits = [rng.choice(sorted(targets)) for _ in turns]
    plan = LinkPlan("link", "trainer", "rollout", ranks, "broadcast")

    def run(rank):
        trainer = Trainer(rank, sources) if rank in sources else None
        target = Target(Trainer().weight_specs()) if rank in targets else None
        link = make_link(plan, trainer, target, Place(rank, network), Path("never"))
        for version, (trouble, failing) in enumerate(zip(turns, culprits, strict=True), 1):
            if trainer:
                trainer.version, trainer.scale = version, 0.5**version
                trainer.fails_at = 11 if trouble == "export" else None
                trainer.more = trouble == "more"
            if target:
                target.fails = trouble == "target" and rank == failing
            if words := {"export": "out of memory", "target": "no room"}.get(trouble, ""):
                with pytest.raises(WeightSyncError, match=words):
                    link.push()
            else:
                link.push()
                check(target, version)

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, ranks))


def check(target, version):
    if target is None:
        return
    assert target.weight_version == version and {*target.held} - {"more"} == {*Trainer().weights}
    for name, tensor in Trainer().weights.items():
        exact = tensor * 0.5**version if tensor.is_floating_point() else tensor
        assert torch.equal(target.held[name].to(exact.dtype), exact)


class DamagedFolder(WeightFolder):
    """The first time that a version of `damages` is written, a byte of it is another one."""

    damages = frozenset()
    bases = ()

    def write(self, version, tensors, base):
        written = super().write(version, tensors, base)
        if version in self.damages and version not in dict(self.bases):
            for path in self._root.glob("version_*/*.safetensors"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        self.bases.append((version, base != 0))
        return written


def written_to_folder(events):
    """(which versions are written, and whether changes alone; the words of each sync that fails)."""
    written, words, all_hold = [], [], False
    for version, event in enumerate(events, 1):
        all_hold = all_hold and event != "restarted"
        is_damaged = event == "damaged"
        written += [(version, True), (version, False)] if is_damaged and all_hold else [(version, all_hold)]
        failed = is_damaged and not all_hold
        words.append("is not what was written" if failed else "no room" if event == "engine" else "")
        all_hold = not failed
    return written, words


@pytest.mark.parametrize("seed", some(range(12), *range(6)))
def test_a_folder_gets_changes_and_all_where_a_target_has_others_or_could_not_read_them(
    seed, monkeypatch, tmp_path
):
    """Targets that are restarted, engines that fail, and files that are not what was written."""
    rng, network = random.Random(seed), Network()
    monkeypatch.setattr(links, "dist", network)
    monkeypatch.setattr(links, "WeightFolder", DamagedFolder)
    ranks = tuple(range(rng.randint(2, 4)))
    sources = tuple(sorted(rng.sample(ranks, rng.randint(1, len(ranks) - 1))))
    targets = {rank for rank in ranks if rank not in sources or rng.random() < 0.4}
    events = [rng.choice(["", "", "restarted", "engine", "damaged"]) for _ in range(8)]
    written, words = written_to_folder(events)
    monkeypatch.setattr(
        DamagedFolder, "damages", {n for n, event in enumerate(events, 1) if event == "damaged"}
    )
    monkeypatch.setattr(DamagedFolder, "bases", [])
    who = rng.choice([rank for rank in sorted(targets) if rank != sources[0]])
    plan = LinkPlan("link", "trainer", "rollout", ranks, "checkpoint")

    def run(rank):
        trainer = Trainer(rank, sources) if rank in sources else None
        target = Target(Trainer().weight_specs()) if rank in targets else None
        place, exact = Place(rank, network), Trainer().weights
        link = make_link(plan, trainer, target, place, tmp_path)
        for version, (event, failure) in enumerate(zip(events, words, strict=True), 1):
            if event == "restarted" and rank == who:
                link = make_link(plan, trainer, target, place, tmp_path)
            exact["w4"][0, version % 7] += 1.0
            if trainer:
                trainer.version, trainer.weights = version, exact
            if target:
                target.fails = event == "engine" and rank == who
            if failure:
                with pytest.raises(WeightSyncError, match=failure):
                    link.push()
            else:
                link.push()
                assert target is None or target.weight_version == version
                assert target is None or all(torch.equal(target.held[name], exact[name]) for name in exact)

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, ranks))
    assert DamagedFolder.bases == written


@pytest.mark.parametrize("fails", ["", "gets ready", "loads"])
def test_within_one_rank_the_target_gets_ready_before_the_trainer_looks_and_nobody_meets(fails, monkeypatch):
    """Where a target fails the trainer exports to the end, as its other ranks would."""
    monkeypatch.setattr(links, "dist", None)
    trainer, log = Trainer(), []
    target, export, looks = Target(trainer.weight_specs()), trainer.export_weights, trainer.live_weights
    target.reads_live = trainer.lives = not fails

    def does(what):
        log.append(what)
        if what == fails:
            raise RuntimeError("no room")

    def exports(*args):
        yield from export(*args)
        log.append("is exported")

    load = target.load_weights
    target.expect_weights = lambda: does("gets ready")
    target.load_weights = lambda *args: (does("loads"), load(*args))
    trainer.live_weights = lambda: (log.append("looks"), looks())[1]
    if fails:
        trainer.export_weights = exports
    plan = LinkPlan("link", "trainer", "rollout", (0,), "local")
    link = make_link(plan, trainer, target, Place(0, None), Path("never"))
    trainer.version = 1
    if not fails:
        link.push()
        assert log == ["gets ready", "looks", "loads"] and target.weight_version == 1
        link.push()
        assert len(log) == 3
        return
    with pytest.raises(WeightSyncError, match="rank 0: no room"):
        link.push()
    told = ["gets ready"] if fails == "gets ready" else ["gets ready", "loads"]
    assert log == [*told, "is exported"]
