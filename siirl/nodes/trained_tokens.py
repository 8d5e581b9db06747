"""What each token of the sampled rows was trained with, for readers of the run.

In a step of which that is written, the training op and the advantage op leave here what they have at hand, on
the ranks where it is (`TrainedTokens`). At the end of the step the first rank says which rows are shown as
samples (`Wanted`), and gets what there is of these rows, and of no others.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.algorithms.turns import Turns

MOST_ROWS, MOST_ROW_TOKENS, MOST_TOKENS = 64, 2048, 16384
"""Of a step: rows, tokens of a row, and tokens of a rank and of the file."""

_COLUMNS = (
    *("row_id", "sample_index", "response_ids", "response_length", "response_mask", "rollout_log_prob"),
    *("advantage", "episode_id", "speaker", "turn_id"),
)
_NUMBERS = ("rollout_log_prob", "old_log_prob", "advantage", "ratio", "clip", "weight")
_SHARES = ("own", "team", "env", "shaping")


class Wanted(NamedTuple):
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

    def matching(self, wanted: Sequence[Wanted]) -> dict[int, Wanted | None]:
        """Rows that were trained, and are wanted: by what they say; or by the episode, which gives None.

        By the episode where the agent has no rows among the wanted: others score it, and nobody has numbered
        its episodes anew.
        """
        texts = {(one.sample_index, one.text): one for one in wanted if one.agent == self.agent}
        episodes = {(one.sample_index, one.episode_id) for one in wanted if one.episode_id is not None}
        prompts = torch.tensor(sorted({one.sample_index for one in wanted}), dtype=torch.int64)
        near_B = self._seen_B & torch.isin(self.rows["sample_index"], prompts)
        found: dict[int, Wanted | None] = {}
        for row in near_B.nonzero().flatten().tolist():
            prompt = int(self.rows["sample_index"][row])
            if texts:
                if one := texts.get((prompt, digest(self.rows, row))):
                    found[row] = one
            elif "episode_id" in self.rows.keys() and (prompt, int(self.rows["episode_id"][row])) in episodes:
                found[row] = None
        return found

    def record(self, row: int) -> dict[str, Any]:
        """A row as JSON values: of each trained token text and numbers, of each turn its mean advantage."""
        mask_T = self.rows["response_mask"][row].bool()
        columns = {name: self.rows[name] for name in _NUMBERS if name in self.rows.keys()} | self._found
        columns_N = {
            name: columns[name][row][mask_T][:MOST_ROW_TOKENS] for name in _NUMBERS if name in columns
        }
        ids = self.rows["response_ids"][row][mask_T].tolist()
        turn_N = self._turns(row)[mask_T]
        numbers, index_N, count = turn_N.unique(return_inverse=True, return_counts=True)
        total = torch.zeros(len(numbers), dtype=torch.float64)
        total.index_add_(0, index_N, self.rows["advantage"][row][mask_T].double())
        turns = zip(numbers.tolist(), count.tolist(), (total / count).tolist(), strict=True)
        in_episode = "episode_id" in self.rows.keys()
        return {
            "agent": self.agent,
            "speaker": int(self.rows["speaker"][row]) if in_episode else self.agent,
            "sample_index": int(self.rows["sample_index"][row]),
            "row_id": int(self.rows["row_id"][row]),
            "episode_id": int(self.rows["episode_id"][row]) if in_episode else None,
            "turns": [{"turn": x, "tokens": n, "advantage": _short(mean)} for x, n, mean in turns],
            "left_out": max(0, len(ids) - MOST_ROW_TOKENS),
            "tokens": {
                "text": token_texts(self.tokenizer, ids[:MOST_ROW_TOKENS]),
                "id": ids[:MOST_ROW_TOKENS],
                "turn": turn_N[:MOST_ROW_TOKENS].tolist(),
                **{name: [_short(x) for x in column_N.tolist()] for name, column_N in columns_N.items()},
            },
        }

    def _turns(self, row: int) -> Tensor:
        """The turn of each token of a row, [T]; all are the first one without an interaction."""
        mask_T = self.rows["response_mask"][row]
        return self.rows["turn_id"][row] if "turn_id" in self.rows.keys() else torch.zeros_like(mask_T).long()


class Found(NamedTuple):
    """What a rank has of the wanted rows, or several ranks have; made of JSON values."""

    records: dict[tuple[int, int], dict[str, Any]]
    """(agent, row_id of the training) -> the row."""
    texts: dict[tuple[int, int], str]
    """The same, for rows that were found by what they say -> Wanted.text."""
    shares: dict[tuple[int, int, int], dict[str, float]]
    """(agent, episode_id of the training, turn) -> the parts of the turn's reward."""

    def and_those(self, others: "Found") -> "Found":
        """Both; ranks that hold the same rows have said the same."""
        return Found(*(mine | theirs for mine, theirs in zip(self, others, strict=True)))


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

    def found(self, wanted: Sequence[Wanted]) -> Found:
        """What this rank has of these rows."""
        result, room = Found({}, {}, {}), MOST_TOKENS
        for kept in self._kept:
            for row, one in kept.matching(wanted).items():
                record = kept.record(row)
                room -= len(record["tokens"]["text"])
                if room < 0:
                    break
                key = (kept.agent, record["row_id"])
                result.records[key] = record
                if one is not None:
                    result.texts[key] = one.text
        prompts = torch.tensor(sorted({one.sample_index for one in wanted}), dtype=torch.int64)
        for agent, rows in self._shares:
            result.shares.update(_turn_shares(agent, rows[torch.isin(rows["sample_index"], prompts)]))
        return result


def wanted_row(agent: int, rows: TensorDict, row: int) -> Wanted:
    """A row as its reward node sees it."""
    extra = rows["extra_info"][row] if "extra_info" in rows.keys() else None
    episode = extra.get("episode_id") if isinstance(extra, dict) and "conversation" in extra else None
    return Wanted(agent, int(rows["sample_index"][row]), digest(rows, row), int(rows["row_id"][row]), episode)


def digest(rows: TensorDict, row: int) -> str:
    """Equal for rows with equal responses, and equal turns in them."""
    length = int(rows["response_length"][row])
    names = [name for name in ("response_ids", "turn_id") if name in rows.keys()]
    content = b"/".join(rows[name][row, :length].cpu().long().numpy().tobytes() for name in names)
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def sample_records(wanted: Iterable[Wanted], found: Found) -> list[dict[str, Any]]:
    """The wanted rows that were found, as lines of a file: under the ids that their samples have.

    Of rows of a prompt that say the same, which only nodes that number rows anew mix up, the first.
    """
    by_text: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for key, text in sorted(found.texts.items()):
        record = found.records[key]
        by_text.setdefault((record["agent"], record["sample_index"], text), []).append(record)
    lines = []
    for one in wanted:
        if same := by_text.get((one.agent, one.sample_index, one.text)):
            exact = [record for record in same if record["row_id"] == one.row_id]
            ids = {"row_id": one.row_id, "episode_id": one.episode_id}
            lines.append(_with_shares((exact or same)[0], found) | ids)
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


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token says in its place. Of a character that several tokens spell the first has all."""

    def text_of(some: Sequence[int]) -> str:
        return str(
            tokenizer.decode(list(some), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

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
