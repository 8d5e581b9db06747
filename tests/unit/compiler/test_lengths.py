"""How long rows are taken to be, by a mean or by a run's folder; and what decoding them takes."""

import heapq
import json
import random
from statistics import fmean

import pytest

from siirl.compiler.cost.flow import Flow, Group, flow, may_end
from siirl.compiler.cost.lengths import RowTokens, decoding, lengths_of
from siirl.errors import ConfigError
from siirl.nodes.in_flight import is_enough


def geometric(rng: random.Random, mean: int, most: int) -> int:
    return min(most, 1 + int(rng.expovariate(1 / mean)))


@pytest.mark.parametrize(
    ("mean", "most"), [(1, 8), (600, 8192), (3000, 4096), (4095, 4096), (4096, 4096), (9000, 4096)]
)
def test_geometric_lengths_have_the_mean_that_is_said_up_to_the_longest(mean, most):
    rows = lengths_of(f"256+{mean}").up_to(most)
    assert (rows.prompt, rows.response) == (256, min(mean, most))
    if mean >= most:
        assert not rows.lengths and rows.response_square == most**2
    else:
        assert fmean(rows.lengths) == pytest.approx(mean, rel=0.01, abs=1)
        assert list(rows.lengths) == sorted(rows.lengths) and 1 <= rows.lengths[0] <= rows.lengths[-1] <= most


def test_the_longest_of_many_is_that_of_so_many_drawn_ones():
    rows, rng = lengths_of("8+500").up_to(100_000), random.Random(0)
    for number in (1, 16, 256):
        drawn = fmean(max(geometric(rng, 500, 100_000) for _ in range(number)) for _ in range(400))
        assert rows.longest(number) == pytest.approx(drawn, rel=0.15 if number > 1 else 0.25)


@pytest.mark.parametrize(
    ("rows", "at_once", "engines"), [(256, 256, 1), (64, 64, 8), (256, 32, 1), (128, 100, 4)]
)
def test_decoding_takes_as_many_steps_as_drawn_lengths_do(rows, at_once, engines):
    """Of engines that each begin a row when another one ends, the one that ends last."""
    rng, slowest = random.Random(1), []
    for _ in range(200):
        ends = []
        for _ in range(engines):
            busy = [0] * at_once
            for _ in range(rows):
                heapq.heapreplace(busy, busy[0] + geometric(rng, 600, 8192))
            ends.append(max(busy))
        slowest.append(max(ends))
    tokens = lengths_of("128+600").up_to(8192)
    spans = decoding(tokens, rows, at_once, engines)
    assert sum(steps for steps, _ in spans) == pytest.approx(fmean(slowest), rel=0.12)
    assert max(live for _, live in spans) <= at_once
    assert sum(steps * live for steps, live in spans) == pytest.approx(rows * 600, rel=0.12)


def decoded(found: Flow) -> tuple[float, float]:
    """(tokens one after the other, tokens of all rows) of a step."""
    return sum(steps for steps, _ in found.spans), sum(steps * live for steps, live in found.spans)


def test_batches_in_work_at_once_share_the_wait_for_the_longest():
    tokens = lengths_of("128+600").up_to(8192)
    alone = sum(steps for steps, _ in decoding(tokens, 256, 256, 1))
    for lag in (1, 2):
        steps, all_tokens = decoded(flow(tokens, 32, 8, 256 * (1 + lag), 1, lag, lag))
        assert steps == pytest.approx(alone / (1 + lag), rel=0.05)
        assert all_tokens == pytest.approx(256 * 600, rel=0.05)
    found = flow(tokens, 32, 8, 16, 1, 1, 1)
    assert all(live <= 16 for _, live in found.spans)  # no more than fit decode at once
    assert decoded(found)[0] == pytest.approx(256 * 600 / 16, rel=0.05)


def test_alike_rows_of_two_batches_end_together_and_half_of_them_wait_a_step():
    found = flow(RowTokens(128, 600), 32, 8, 512, 1, 1, 1)
    assert decoded(found) == pytest.approx((300, 256 * 600)) and {live for _, live in found.spans} == {512}
    assert (found.read_again, found.staleness) == (0, 0.5)


def test_what_goes_on_is_read_again_in_each_step():
    tokens = lengths_of("128+600").up_to(8192)
    read = [flow(tokens, 32, 8, 1024, 1, lag, lag).read_again for lag in (1, 2, 3)]
    assert 128 < read[0] < read[1] < read[2]
    assert flow(tokens, 32, 8, 1024, 1, 0, 1).read_again == 0


def test_a_step_ends_when_the_engine_ends_it():
    rng = random.Random(0)
    for _ in range(300):
        lag, batch, step = rng.randint(1, 3), rng.randint(1, 4), 9
        line = [Group(rng.randint(0, 1), rng.choice([None, *range(step - lag, step + 1)])) for _ in range(10)]
        line.sort(key=lambda group: step if group.begun is None else group.begun)
        if sum(not group.left for group in line) < batch:
            continue
        num_open = {number: group.left for number, group in enumerate(line)}
        oldest = {n: step if group.begun is None else group.begun for n, group in enumerate(line)}
        ends = is_enough(num_open, oldest, batch, batch, step, lag)
        assert ends == (may_end(line, batch, step, lag) or not any(num_open.values())), line


def run_folder(folder, steps, kept=()):
    folder.mkdir(exist_ok=True)
    lines = [
        {
            "step": step,
            "rollout/response_length": mean,
            "rollout/tokens": 32 * mean,
            "perf/tokens": 32 * (mean + 100),
        }
        for step, mean in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = folder / "rollouts" / "train"
    samples.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"step": 1, "response_length": length}) for length in kept]
    (samples / "step_1.jsonl").write_text("\n".join([*rows, '{"half of a']))
    return str(folder)


def test_a_run_tells_its_last_means_and_how_the_responses_that_it_kept_differ(tmp_path):
    halves = [100] * 30 + [700] * 10  # mean 250, the longest 2.8 times it
    told = lengths_of(run_folder(tmp_path / "run", [90] * 20 + [500] * 10, halves))
    assert (told.prompt, told.response) == (100, 500) and "as 40 responses of" in told.source
    rows = told.up_to(4096)
    assert set(rows.lengths) == {200, 1400} and rows.longest(64) == 1400
    cut = told.up_to(1000).lengths
    assert cut[-1] == 1000 and fmean(cut) == pytest.approx(500, rel=0.01)
    few = lengths_of(run_folder(tmp_path / "few", [500] * 3, [9] * 8))
    assert few.source.startswith("geometric") and (few.prompt, few.response) == (100, 500)


@pytest.mark.parametrize(
    ("text", "said"),
    [("run", "nothing was sampled"), ("256", "as in 256+600"), ("nowhere/run", "the folder of a run")],
)
def test_what_tells_no_lengths_is_refused_with_what_to_write(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "agent_0/rollout/response_length": 9}\n')
    with pytest.raises(ConfigError, match="--tokens") as found:
        lengths_of(text)
    assert said in str(found.value)
