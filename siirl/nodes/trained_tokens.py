"""What each token of the sampled rows was trained with, for readers of the run.

In a step of which that is written, the training op and the advantage op leave here what they have at hand, on
the ranks where it is (`TrainedTokens`). At the end of the step the first rank says which rows are shown as
samples (`ShownRow`), and gets what there is of these rows, and of no others.
"""

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.algorithms.turns import Turns

MOST_ROWS, MOST_ROW_TOKENS, MOST_TOKENS = 256, 2048, 16384
"""Of a step: rows, tokens of a row, and tokens of a rank and of the file."""

_COLUMNS = (
    *("row_id", "sample_index", "response_ids", "response_length", "response_mask", "rollout_log_prob"),
    *("advantage", "episode_id", "speaker", "turn_id"),
)
_NUMBERS = ("rollout_log_prob", "old_log_prob", "advantage", "ratio", "clip", "weight")
_SHARES = ("own", "team", "env", "shaping")


class ShownRow(NamedTuple):
    """A row that is shown as a sample, as its reward node saw it: later nodes may number rows anew."""

    agent: int
    """Whose rows it is among."""
    sample_index: int
    text: str
    """digest of what the agent said in it."""
    row_id: int
    episode_id: int | None
    """Of an interaction."""


class KeptRows:
    """The rows that a node trains on this rank, and what its loss said of them last."""

    def __init__(self, agent: int, rows: TensorDict, tokenizer: PreTrainedTokenizerBase):
        self.agent, self.tokenizer = agent, tokenizer
        self.rows = rows.select(*(name for name in _COLUMNS if name in rows.keys()))
        self._shape = rows["response_ids"].shape
        self._seen_B = torch.zeros(len(rows), dtype=torch.bool)
        self._found: dict[str, Tensor] = {}

    def __call__(self, place_b: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Keep what the loss says of a micro-batch, [b, T] each. place_b: where its rows are among these."""
        place_b = place_b.cpu()
        self._seen_B[place_b] = True
        for name, column_bT in columns.items():
            if name not in self._found:
                self._found[name] = torch.full(self._shape, torch.nan)
            self._found[name][place_b] = column_bT.detach().float().cpu()

    def matching(self, wanted: Sequence[ShownRow]) -> dict[int, ShownRow | None]:
        """Rows that were trained, and are wanted: by what they say; or by the episode, which gives None.

        By the episode where the agent has no rows among the wanted: others score it, and nobody has numbered
        its episodes anew.
        """
        texts = {(one.sample_index, one.text): one for one in wanted if one.agent == self.agent}
        episodes = {(one.sample_index, one.episode_id) for one in wanted if one.episode_id is not None}
        prompts = torch.tensor(sorted({one.sample_index for one in wanted}), dtype=torch.int64)
        near_R = (self._seen_B & torch.isin(self.rows["sample_index"], prompts)).nonzero().flatten()
        near, prompt = near_R.tolist(), self.rows["sample_index"][near_R].tolist()
        if texts:
            said = zip(prompt, digests(self.rows, near_R), strict=True)
            return {row: texts[key] for row, key in zip(near, said, strict=True) if key in texts}
        if "episode_id" not in self.rows.keys():
            return {}
        episode = zip(prompt, self.rows["episode_id"][near_R].tolist(), strict=True)
        return {row: None for row, key in zip(near, episode, strict=True) if key in episodes}

    def records(self, rows: Sequence[int], room: int = MOST_TOKENS) -> Iterator[dict[str, Any]]:
        """Rows as JSON values: of each trained token text and numbers, of each turn its mean advantage.

        Until they have more than `room` tokens.
        """
        picked = torch.tensor(rows, dtype=torch.int64)
        columns = {name: self.rows[name] for name in _NUMBERS if name in self.rows.keys()} | self._found
        columns = {name: columns[name][picked] for name in _NUMBERS if name in columns}
        about = self.rows[picked]
        turns = about["turn_id"] if "turn_id" in about.keys() else torch.zeros_like(about["response_ids"])
        in_episode = "episode_id" in about.keys()
        names = ("row_id", "sample_index", *(("speaker", "episode_id") if in_episode else ()))
        ids = {name: about[name].tolist() for name in names}
        known: dict[tuple[int, ...], str] = {}
        for place in range(len(rows)):
            mask_T = about["response_mask"][place].bool()
            token_N, turn_N = about["response_ids"][place][mask_T].tolist(), turns[place][mask_T].tolist()
            room -= min(len(token_N), MOST_ROW_TOKENS)
            if room < 0:
                return
            numbers = {
                name: column[place][mask_T][:MOST_ROW_TOKENS].tolist() for name, column in columns.items()
            }
            yield {
                "agent": self.agent,
                "speaker": ids["speaker"][place] if in_episode else self.agent,
                "sample_index": ids["sample_index"][place],
                "row_id": ids["row_id"][place],
                "episode_id": ids["episode_id"][place] if in_episode else None,
                "turns": _mean_advantages(turn_N, about["advantage"][place][mask_T].tolist()),
                "left_out": max(0, len(token_N) - MOST_ROW_TOKENS),
                "tokens": {
                    "text": token_texts(self.tokenizer, token_N[:MOST_ROW_TOKENS], known),
                    "id": token_N[:MOST_ROW_TOKENS],
                    "turn": turn_N[:MOST_ROW_TOKENS],
                    **{name: [_short(x) for x in column_N] for name, column_N in numbers.items()},
                },
            }


class Found(NamedTuple):
    """What a rank has of the wanted rows, or several ranks have; made of JSON values."""

    records: dict[tuple[int, int], dict[str, Any]]
    """(agent, row_id of the training) -> the row."""
    texts: dict[tuple[int, int], str]
    """The same, for rows that were found by what they say -> ShownRow.text."""
    shares: dict[tuple[int, int, int], dict[str, float]]
    """(agent, episode_id of the training, turn) -> the parts of the turn's reward."""
    seconds: float = 0.0
    """That the slowest of the ranks took for it."""

    def and_those(self, others: "Found") -> "Found":
        """Both; ranks that hold the same rows have said the same."""
        parts = (mine | theirs for mine, theirs in zip(self[:3], others[:3], strict=True))
        return Found(*parts, max(self.seconds, others.seconds))


class TrainedTokens:
    """What the ops of a step have left on this rank."""

    def __init__(self) -> None:
        self._kept: list[KeptRows] = []
        self._shares: list[tuple[int, TensorDict]] = []

    def keep(self, agent: int, rows: TensorDict, tokenizer: PreTrainedTokenizerBase) -> KeptRows:
        """For the training op: what its loss says of rows is given to the result."""
        self._kept.append(KeptRows(agent, rows, tokenizer))
        return self._kept[-1]

    def keep_shares(self, agent: int, rows: TensorDict, shares: Mapping[str, Tensor]) -> None:
        """For the advantage op, in an interaction: the parts of the reward of each token, [B, T] each."""
        columns = rows.select("sample_index", "episode_id", "turn_id")
        self._shares.append((agent, columns.update(dict(shares))))

    def found(self, wanted: Sequence[ShownRow]) -> Found:
        """What this rank has of these rows."""
        start_s = time.perf_counter()
        result, room = Found({}, {}, {}), MOST_TOKENS
        for kept in self._kept:
            rows = kept.matching(wanted)
            for record, one in zip(kept.records(list(rows), room), rows.values(), strict=False):
                room -= len(record["tokens"]["text"])
                key = (kept.agent, record["row_id"])
                result.records[key] = record
                if one is not None:
                    result.texts[key] = one.text
        prompts = torch.tensor(sorted({one.sample_index for one in wanted}), dtype=torch.int64)
        for agent, rows in self._shares:
            result.shares.update(_turn_shares(agent, rows[torch.isin(rows["sample_index"], prompts)]))
        return result._replace(seconds=time.perf_counter() - start_s)


def wanted_rows(agent: int, rows: TensorDict, episodes: Sequence[Mapping[str, Any] | None]) -> list[ShownRow]:
    """Rows as their reward node sees them; episodes: extra_info of each that is of an interaction."""
    numbers = (rows[name].tolist() for name in ("sample_index", "row_id"))
    each = zip(*numbers, digests(rows, torch.arange(len(rows))), episodes, strict=True)
    return [
        ShownRow(agent, sample, text, row, extra.get("episode_id") if extra else None)
        for sample, row, text, extra in each
    ]


def digests(rows: TensorDict, places: Tensor) -> list[str]:
    """Of each of these rows: equal where responses are equal, and the turns in them."""
    lengths = rows["response_length"][places.to(rows["response_length"].device)].tolist()
    names = [name for name in ("response_ids", "turn_id") if name in rows.keys()]
    columns = [rows[name][places.to(rows[name].device)].cpu().long().numpy() for name in names]
    return [
        hashlib.blake2b(
            b"/".join(column[row, :length].tobytes() for column in columns), digest_size=12
        ).hexdigest()
        for row, length in enumerate(lengths)
    ]


def sample_records(wanted: Iterable[ShownRow], found: Found) -> list[dict[str, Any]]:
    """The wanted rows that were found, as lines of a file: under the ids that their samples have.

    Rows of a prompt that say the same are told apart by their numbers; where a node has numbered them anew,
    each stands for one of the samples, in their order.
    """
    by_text: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for key, text in sorted(found.texts.items()):
        record = found.records[key]
        by_text.setdefault((record["agent"], record["sample_index"], text), []).append(record)
    lines = []
    for one in wanted:
        if same := by_text.get((one.agent, one.sample_index, one.text)):
            record = next((record for record in same if record["row_id"] == one.row_id), same[0])
            if len(same) > 1:
                same.remove(record)
            ids = {"row_id": one.row_id, "episode_id": one.episode_id}
            lines.append(_with_shares(record, found) | ids)
    by_episode = sorted(found.records.keys() - found.texts.keys())
    lines += [_with_shares(found.records[key], found) for key in by_episode]
    room, kept = MOST_TOKENS, []
    for line in lines:
        room -= len(line["tokens"]["text"])
        if room >= 0:
            kept.append(line)
    return kept


def _with_shares(record: dict[str, Any], found: Found) -> dict[str, Any]:
    key = (record["agent"], record["episode_id"])
    return record | {"turns": [turn | found.shares.get((*key, turn["turn"]), {}) for turn in record["turns"]]}


def _turn_shares(agent: int, rows: TensorDict) -> dict[tuple[int, int, int], dict[str, float]]:
    turns = Turns.of(rows["turn_id"])
    sums = {name: turns.sum(rows[name].double()).tolist() for name in _SHARES}
    places = zip(rows["episode_id"][turns.row_U].tolist(), turns.number_U.tolist(), strict=True)
    return {
        (agent, episode, turn): {name: _short(sums[name][unit]) for name in _SHARES}
        for unit, (episode, turn) in enumerate(places)
    }


def _mean_advantages(turn_N: list[int], advantage_N: list[float]) -> list[dict[str, Any]]:
    """Of each turn, in their order: how many tokens it has, and the mean advantage of these."""
    each: dict[int, list[float]] = {}
    for turn, advantage in zip(turn_N, advantage_N, strict=True):
        each.setdefault(turn, []).append(advantage)
    return [
        {"turn": turn, "tokens": len(some), "advantage": _short(math.fsum(some) / len(some))}
        for turn, some in sorted(each.items())
    ]


def token_texts(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], known: dict[tuple[int, ...], str] | None = None
) -> list[str]:
    """What each token says in its place. Of a character that several tokens spell the first has all.

    known: texts of tokens that calls for other rows have found; this one adds to them.
    """
    found = {} if known is None else known

    def text_of(some: Sequence[int]) -> str:
        key = tuple(some)
        if key not in found:
            found[key] = str(
                tokenizer.decode(list(some), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
        return found[key]

    # a word of its own, as no text need be in the vocabulary
    before = next(([one] for one in ids if text_of([one]).strip().isalnum()), [])
    begin = text_of(before)
    after = {one: text_of([*before, one]) for one in set(ids)}  # alone, a first space of it may be lost
    texts = [
        after[one].removeprefix(begin) if after[one].startswith(begin) else text_of([one]) for one in ids
    ]
    place = 0
    while place < len(ids):
        end = place
        while end < len(ids) and "\ufffd" in texts[end]:
            end += 1
        if end > place + 1:
            texts[place:end] = [text_of(ids[place:end]), *[""] * (end - place - 1)]
        place = end + 1
    return texts


def _short(value: float) -> float | None:
    """A number in JSON, to seven digits; None for what is none."""
    return float(f"{value:.7g}") if value == value and abs(value) != float("inf") else None
