"""Responses in flight on engines that draw tokens from seeds alone."""

import pickle
from dataclasses import replace

from in_flight_cases import Run

from siirl.data.completions import Completion, SamplingParams
from siirl.engines.rollout.base import RolloutEngine, RolloutStream, WaveStream
from siirl.engines.rollout.sampling import derive_seed, later_seed, uniforms
from siirl.nodes.rollouts_in_flight import RolloutsInFlight

MOST = 40
PARAMS = SamplingParams(max_tokens=MOST)


def cut(completion, length):
    if len(completion.token_ids) <= length:
        return completion
    return replace(
        completion,
        token_ids=completion.token_ids[:length],
        log_probs=completion.log_probs[:length],
        finish_reason="paused",
    )


class FakeEngine(RolloutEngine):
    """Draws tokens from the seed alone; a response ends at a token below its prompt's chance to stop."""

    name, weight_version, num_steps, works_alone = "fake", 0, 0, False

    def new_stream(self, interrupt):
        """Of an engine that works alone, what has completed is told at once."""
        return WaveStream(self, self.wave, (lambda keys: True) if self.works_alone else interrupt)

    def __init__(self):
        self.sampled = {}  # (prompt, number of the response) -> the version of each token

    def wave(self, requests, interrupt):
        """See SampleWave."""
        parts = self.parts(requests, interrupt)
        for request, part in zip(requests, parts, strict=True):
            versions = self.sampled.setdefault((request.prompt[0], request.sample), [])
            versions += [self.weight_version] * len(part.token_ids)
        return parts

    def parts(self, requests, interrupt):
        """One token of each at a time."""
        whole = [self.one(request) for request in requests]
        for done in range(1, MOST + 1):
            self.num_steps += any(len(one.token_ids) >= done for one in whole)
            both = zip(requests, whole, strict=True)
            ended = [request.key for request, one in both if len(one.token_ids) == done]
            if ended and interrupt(ended):
                return [cut(one, done) for one in whole]
        return whole

    def one(self, request):
        most = request.params.max_tokens
        seed = later_seed(derive_seed(request.seed, request.sample), request.start)
        numbers = uniforms([seed], most)[:, 0]
        chance = 0.02 if request.prompt[0] % 5 == 0 else 0.3  # a long tail
        length = next((i + 1 for i, u in enumerate(numbers) if u < chance), None)
        tokens = [int(u * 1e9) for u in numbers[:length]]
        reason = "length" if length is None else "stop"
        return Completion(tokens, [0.0] * len(tokens), reason, self.weight_version)

    def weight_specs(self):
        return {}

    def load_weights(self, weights, version):
        self.weight_version = version


class OwnDevices(FakeEngine):
    """Decodes whether or not anybody collects, and tells of a response when it is complete."""

    def new_stream(self, interrupt):
        return Decoding(self)


class Decoding(RolloutStream):
    def __init__(self, engine):
        super().__init__()
        self.engine, self.running = engine, {}

    @property
    def num_pending(self):
        return len(self.running)

    def submit(self, requests):
        self.running |= {r.key: (self.engine.one(r), r, []) for r in requests}

    def decode(self):
        """A token of each request that is not complete."""
        for whole, _, versions in self.running.values():
            if len(versions) < len(whole.token_ids):
                versions.append(self.engine.weight_version)

    def collect(self, timeout_s):
        self.decode()
        ended = [key for key, (whole, _, done) in self.running.items() if len(done) == len(whole.token_ids)]
        return [self.told(key, None) for key in ended]

    def told(self, key, reason):
        whole, request, versions = self.running.pop(key)
        self.engine.sampled.setdefault((request.prompt[0], request.sample), []).extend(versions)
        part = cut(whole, len(versions))
        return key, replace(part, versions=versions, finish_reason=reason or whole.finish_reason)

    def pause(self, keys=None):
        return [self.told(key, "paused") for key in list(self.running) if keys is None or key in keys]

    def close(self):
        self.running = {}


class Rollouts(Run):
    """Of responses. chance: with dynamic sampling, that a group is kept; more: of RolloutsInFlight."""

    def __init__(self, shards, batch, n, max_lag, surplus, steps, prompts=64, read=None, chance=None, **more):
        super().__init__(shards, batch, n, steps, prompts, read or batch)
        self.lag, self.chance = (n, max_lag, surplus, read or batch, batch), chance
        self.engines = [FakeEngine() for _ in range(shards)]
        self.kept = [RolloutsInFlight(engine, *self.lag, **more) for engine in self.engines]
        for engine in self.engines:
            engine.works_alone = more.get("runs_in_background", False)

    def advance(self):
        """One step, in as many rounds as it takes."""
        self.step += 1
        end = len(self.trained) + self.batch
        while len(self.trained) < end:
            self.sample(end - len(self.trained))
        assert len(self.trained) == end, "a group would wait for the next step"

    def sample(self, wanted):
        """One round; the rows of all shards, as (prompt, tokens of each response)."""
        ids, both = [], list(zip(self.loaders, self.kept, strict=True))
        missing = max(kept.num_missing(loader, self.step, self.steps, wanted) for loader, kept in both)
        for loader, kept, engine in zip(self.loaders, self.kept, self.engines, strict=True):
            engine.weight_version = self.step
            rows = kept.load(loader, missing)
            self.given_up += len(kept.drain_dropped())
            kept.admit(rows, self.step, lambda batch, slot: 1000 * batch + slot)
            taken = pickle.loads(pickle.dumps(kept.sample(PARAMS, self.step)))
            self.restarted += taken.num_restarted
            groups = kept.give(taken)
            ids += groups["group_id"].tolist()
            n = self.n
            for at, prompt in enumerate(groups["sample_index"].tolist()):
                responses = taken.responses[at * n : at * n + n]
                group = (prompt, *(tuple(one.token_ids) for one in responses))
                (self.trained if is_kept(group, self.chance) else self.dropped).append(group)
                self.lags += [self.step - one.first_step for one in responses]
                self.partial += sum(one.first_step < self.step for one in responses)
                for one in responses:
                    assert one.versions == sorted(one.versions) == one.steps
        assert sorted(ids) == list(range(wanted)), "group ids of a round are those of what it gives"


def is_kept(group, chance):
    """Whether dynamic sampling keeps it: as its tokens say."""
    return chance is None or hash(group) % 100 < 100 * chance
