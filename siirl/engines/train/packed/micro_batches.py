"""Which rows a micro-batch holds: within its limit, alike in cost, with those of one prompt together."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import TensorDict

from siirl.algorithms.row_cost import row_cost
from siirl.data.rows import prompt_images, seen_of
from siirl.errors import ConfigError

PAIRS = "pair_id"
LEAST_SAVING = 0.1
"""The share of tokens from which on sharing prompts pays: the attention of a response in two calls costs the
time of about 6% of the tokens on a CPU and on an H200; one call on a GPU less."""


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much a micro-batch may hold; exactly one of the limits is set."""

    max_tokens: int | None = None
    """A row with more makes a micro-batch of its own."""
    max_rows: int | None = None

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.max_tokens, self.max_rows) if limit is not None]
        if len(limits) != 1 or limits[0] < 1:
            raise ConfigError(
                f"micro-batch limit of {self.max_tokens} tokens and {self.max_rows} rows: set one, to 1 or "
                "more. Either use_dynamic_bsz=True and a token budget, or a micro-batch size."
            )

    @property
    def most(self) -> int:
        """Tokens or rows of a micro-batch."""
        most = self.max_tokens if self.max_rows is None else self.max_rows
        assert most is not None
        return most

    def size(self, bundle: "Bundle") -> int:
        """How much of that a bundle takes."""
        return bundle.tokens if self.max_rows is None else len(bundle.rows)


def row_lengths(rows: TensorDict) -> list[int]:
    """Real tokens of each row, prompt and response together, on the host."""
    return (rows["prompt_length"] + rows["response_length"]).tolist()


def prompt_numbers(rows: TensorDict) -> list[int]:
    """Which prompt each row has, by its tokens and images: 0, 1, ... in the order of their first rows.

    On the host.
    """
    ids_BP, width = rows["prompt_ids"].cpu().numpy(), rows["prompt_ids"].shape[1]
    images = prompt_images(rows)
    seen: dict[tuple[int, bytes, tuple[str, ...]], int] = {}
    return [
        seen.setdefault((length, ids_P[width - length :].tobytes(), images[row]), len(seen))
        for row, (ids_P, length) in enumerate(zip(ids_BP, rows["prompt_length"].tolist(), strict=True))
    ]


def repeated_prompts(rows: TensorDict) -> list[int]:
    """The rows that have the prompt of an earlier row."""
    seen: set[int] = set()
    return [row for row, number in enumerate(prompt_numbers(rows)) if number in seen or seen.add(number)]


def repeated_prompt_tokens(rows: TensorDict) -> list[int]:
    """Tokens of the prompts of these."""
    lengths = rows["prompt_length"].tolist()
    return [lengths[row] for row in repeated_prompts(rows)]


def images_seen(rows: TensorDict, share_prompts: bool) -> list[str]:
    """All images that a tower sees of the rows; with share_prompts those of a prompt once."""
    images, of_prompts = [seen.images for seen in seen_of(rows)], prompt_images(rows)
    for row in repeated_prompts(rows) if share_prompts else ():
        images[row] = images[row][len(of_prompts[row]) :]
    return [image for of_row in images for image in of_row]


def sharing_pays(rows: TensorDict) -> bool:
    """Whether enough tokens are saved where a prompt of several rows is computed once."""
    return sum(repeated_prompt_tokens(rows)) >= LEAST_SAVING * sum(row_lengths(rows))


@dataclass(frozen=True)
class Bundle:
    """Rows that are computed in one micro-batch: a row alone, or some that share a prompt."""

    rows: tuple[int, ...]
    """Their places among the rows of this rank."""
    tokens: int
    """Those of the prompt once."""
    cost: int
    """row_cost, that of the prompt once."""


def single_rows(lengths: Sequence[int], hidden_size: int) -> list[Bundle]:
    """Each row alone. Pure."""
    return [Bundle((row,), length, row_cost(length, hidden_size)) for row, length in enumerate(lengths)]


def bundles_of(
    rows: TensorDict, limit: MicroBatchLimit, hidden_size: int, share_prompts: bool
) -> list[Bundle]:
    """The rows, with share_prompts those of one prompt together, in runs that a micro-batch has room for.

    A prompt's rows are cut where that takes fewer micro-batches: its tokens are then computed again, where
    much of the room would stay empty, as of micro-batches that hold one and a half prompts.
    Rows with an equal `pair_id`, if they have the column, are one bundle.
    Where micro-batches hold a number of rows, and runs would need more of them than single rows do, it is
    single rows: those of one prompt that come together share it even so.
    """
    lengths = row_lengths(rows)
    if PAIRS in rows.keys():
        return _pairs(rows, lengths, hidden_size, share_prompts)
    alone = single_rows(lengths, hidden_size)
    if not share_prompts:
        return alone
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(prompt_numbers(rows)):
        groups.setdefault(number, []).append(row)
    prompt = rows["prompt_length"].tolist()
    whole, cut = (
        [
            _bundle(run, lengths, prompt[run[0]], hidden_size)
            for run in _runs(list(groups.values()), lengths, prompt, limit, may_cut)
        ]
        for may_cut in (False, True)
    )
    found = min(whole, cut, key=lambda bundles: count_bundles(bundles, limit))
    more = limit.max_rows is not None and count_bundles(found, limit) > -(-len(alone) // limit.max_rows)
    return alone if more else found


def _pairs(rows: TensorDict, lengths: list[int], hidden_size: int, share_prompts: bool) -> list[Bundle]:
    """The rows of each pair, whatever the limit: a loss couples them."""
    pairs: dict[int, list[int]] = {}
    for row, pair in enumerate(rows[PAIRS].tolist()):
        pairs.setdefault(pair, []).append(row)
    prompt = rows["prompt_length"].tolist() if share_prompts else [0] * len(rows)
    return [_bundle(pair, lengths, prompt[pair[0]], hidden_size) for pair in pairs.values()]


def _runs(
    groups: Sequence[list[int]],
    lengths: Sequence[int],
    prompt: Sequence[int],
    limit: MicroBatchLimit,
    may_cut: bool,
) -> list[list[int]]:
    """The rows of each prompt in runs within the limit, in their order.

    may_cut: one prompt after another fills a micro-batch, and a run ends where that is full; else only where
    a prompt alone has filled one.
    """
    runs: list[list[int]] = []
    room = limit.most
    for group in groups:
        run: list[int] = []
        room = room if may_cut else limit.most
        for row in group:
            first, next_one = lengths[row], lengths[row] - prompt[row]
            if limit.max_rows is not None:
                first = next_one = 1
            size = next_one if run else first
            if size > room:
                runs += [run] if run else []
                run, room, size = [], limit.most, first
            run.append(row)
            room -= size
        runs.append(run)
    return runs


def _bundle(rows: list[int], lengths: Sequence[int], prompt: int, hidden_size: int) -> Bundle:
    again = len(rows) - 1
    cost = sum(row_cost(lengths[row], hidden_size) for row in rows) - again * row_cost(prompt, hidden_size)
    return Bundle(tuple(rows), sum(lengths[row] for row in rows) - again * prompt, cost)


def count_bundles(bundles: Sequence[Bundle], limit: MicroBatchLimit) -> int:
    """How many micro-batches they need; 0 for none. Pure."""
    return len(_first_fit(bundles, limit))


def split_bundles(bundles: Sequence[Bundle], limit: MicroBatchLimit, num: int) -> list[list[int]]:
    """Row indices of `num` micro-batches of about equal cost, the dearest first; some may be empty. Pure.

    num: at least count_bundles(bundles, limit); the largest count of all ranks, so that the k-th
    micro-batches of all ranks run together and are alike. Longest-processing-time greedy: the next dearest
    bundle goes to the cheapest micro-batch with room.
    """
    assert num >= count_bundles(bundles, limit), (num, limit)
    bins = _balance(bundles, limit, num)
    if bins is None:
        bins = _first_fit(bundles, limit)
        bins += [[] for _ in range(num - len(bins))]
    bins.sort(key=lambda found: -sum(bundle.cost for bundle in found))
    return [sorted(row for bundle in found for row in bundle.rows) for found in bins]


def _balance(bundles: Sequence[Bundle], limit: MicroBatchLimit, num: int) -> list[list[Bundle]] | None:
    """Greedy balance under the limit; None when it paints itself into a corner."""
    bins: list[list[Bundle]] = [[] for _ in range(num)]
    room = [limit.most] * num
    heap = [(0, index) for index in range(num)]
    for bundle in sorted(bundles, key=lambda bundle: -bundle.cost):
        size = limit.size(bundle)
        full = []
        while heap and bins[heap[0][1]] and size > room[heap[0][1]]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index = heap[0]
        bins[index].append(bundle)
        room[index] -= size
        heapq.heapreplace(heap, (cost + bundle.cost, index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _first_fit(bundles: Sequence[Bundle], limit: MicroBatchLimit) -> list[list[Bundle]]:
    """First-fit decreasing bin packing by tokens, or rows."""
    bins: list[list[Bundle]] = []
    room: list[int] = []
    for bundle in sorted(bundles, key=lambda bundle: -limit.size(bundle)):
        size = limit.size(bundle)
        index = next((i for i, left in enumerate(room) if size <= left), None)
        if index is None:
            bins.append([])
            room.append(limit.most)
            index = len(bins) - 1
        bins[index].append(bundle)
        room[index] -= size
    return bins
