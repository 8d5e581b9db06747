"""Prompts from files of rows, or made, tokenised when a step needs them."""

import bisect
import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.chat import Prompt, as_messages, encode_prompts
from siirl.data.check_files import check_columns
from siirl.data.data_files import UNREADABLE, DataFile, list_files, read_columns
from siirl.data.dataset_columns import EXTRA_KEY, GROUND_TRUTH_KEY, Columns, ResponseColumns
from siirl.data.image_reader import ImageReader
from siirl.data.images import num_images, read_images, with_image_parts
from siirl.data.prompt_lengths import TEMPLATE_TOKENS, token_bounds
from siirl.data.row_checks import response_problems
from siirl.data.row_values import chat_of, is_blank, is_json, is_list, is_text, plain, truth_of, values_of
from siirl.data.seen import NO_IMAGES, Seen
from siirl.dialect.dialect import dialect_of
from siirl.dialect.template import ROW_OPTIONS, ChatTemplate, row_options, template_options
from siirl.errors import DataError

log = logging.getLogger(__name__)

SCAN_ROWS = 1024  # prompts tokenised in one call when lengths are checked
UNBOUNDED = sys.maxsize
NO_SOURCE = "no source"


class PromptDataset:
    """Prompts of one or several files, one after the other; each row is read and tokenised when asked for.

    Only the columns that training reads are decoded; they stay in Arrow buffers until a row is asked for.
    Row `index` of the dataset counts kept rows; `sample_index` of a row counts the rows of the files, from
    0, so that messages name the same row whatever was filtered. No communication: every rank opens the
    files itself.

    A prompt longer than max_prompt_length: dropped before training if filter_overlong; else `truncation`
    cuts it (left keeps the end, right the beginning and the generation prompt, middle both halves) or,
    "error", refuses the dataset at once.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        columns: Columns | None = None,
        max_prompt_length: int = 512,
        truncation: Literal["error", "left", "right", "middle"] = "error",
        filter_overlong: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        response_keys: Sequence[str] = (),
        max_response_length: int = UNBOUNDED,
        end_ids: Sequence[int | None] = (),
        image_reader: ImageReader | None = None,
    ):
        """response_keys: columns of responses that come with the prompts (rollout.name=dataset).

        tools: those that the template tells the model of. end_ids: tokens that end given responses, first
        the one that is added; none: the tokenizer's end of sequence.

        image_reader: of the model that sees the images of the column of images; None: there are none.
        """
        self.tokenizer = tokenizer
        self.columns = columns or Columns()
        self.prompt_key, self.data_source_key = self.columns.prompt, self.columns.source
        self.max_prompt_length, self.truncation = max_prompt_length, truncation
        self.template_kwargs, self.tools = template_kwargs or {}, tools
        self.responses = ResponseColumns(response_keys, tokenizer, max_response_length, end_ids)
        self.max_response_length = max_response_length
        self.image_key, self.image_reader = self.columns.images, image_reader
        self._num_template, self._num_last = self._template_tokens()
        self.files = list_files(files)
        self._tables = [self._read(path) for path in self.files]
        self._starts = [0, *itertools.accumulate(table.num_rows for table in self._tables)]
        self._kept = np.arange(self._starts[-1])
        self._counts, self._dropped = Counter[str](), Counter[str]()
        if len(self._kept) == 0:
            names = ", ".join(map(str, self.files))
            raise DataError(f"no rows in {names}: the dataset is empty. Check how the files were written.")
        for start, table in zip(self._starts, self._tables, strict=False):
            names = self.responses.names
            for problem in response_problems(table, names, lambda row, start=start: self.where(start + row)):
                raise problem
        if filter_overlong:
            self._drop_overlong()
        elif truncation == "error":
            self._refuse_overlong()

    @classmethod
    def from_config(
        cls,
        cfg: Config,
        split: Literal["train", "val"],
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> "PromptDataset":
        """The dataset of data.train_files or data.val_files. tools: those that a prompt tells of."""
        data = cfg.data
        gives = cfg.actor_rollout_ref.rollout.gives_data
        dialect = dialect_of(cfg, tokenizer) if gives else None
        return cls(
            data.train_files if split == "train" else data.val_files,
            tokenizer,
            columns=Columns.of(data),
            max_prompt_length=data.max_prompt_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_prompts,
            template_kwargs=template_options(cfg),
            tools=tools,
            response_keys=data.response_keys if gives else (),
            end_ids=() if dialect is None else (dialect.end_id, *dialect.stop_ids),
            max_response_length=data.max_response_length,
            image_reader=ImageReader.from_config(cfg),
        )

    def __len__(self) -> int:
        return len(self._kept)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows at `indices`: every field of LOADED_FIELDS but row_id and group_id.

        ground_truth and extra_info are None where the file has none, given_responses too; data_source is
        NO_SOURCE then;
        images and image_starts are [] where there are none.
        """
        sample_indices = [int(self._kept[index]) for index in indices]
        records = [self._record(sample_index) for sample_index in sample_indices]
        prompts = [record[self.prompt_key] for record in records]
        images = [self._images(index, record) for index, record in zip(sample_indices, records, strict=True)]
        ids = self._encode(sample_indices, prompts, images, list(map(self._options, records)))
        given = self.responses.encode(records, [self.where(index) for index in sample_indices])
        rows = []
        for sample_index, record, prompt, (prompt_ids, seen), responses in zip(
            sample_indices, records, prompts, ids, given, strict=True
        ):
            whole, prompt_ids = prompt_ids, self._fit(prompt_ids, sample_index, not isinstance(prompt, str))
            source = record.get(self.data_source_key) or NO_SOURCE
            truth = truth_of(record.get(GROUND_TRUTH_KEY))
            self._counts[f"{source}/prompts"] += 1
            self._counts[f"{source}/truncated"] += len(prompt_ids) < len(whole)
            self._counts[f"{source}/without_truth"] += is_blank(truth)
            rows.append(
                {
                    "sample_index": sample_index,
                    "prompt_ids": prompt_ids,
                    "prompt_length": len(prompt_ids),
                    "raw_prompt": as_messages(prompt),
                    "data_source": source,
                    "ground_truth": truth,
                    "extra_info": record.get(EXTRA_KEY),
                    "given_responses": responses or None,
                    "images": list(seen.images),
                    "image_starts": list(seen.starts),
                }
            )
        return rows

    def _template_tokens(self) -> tuple[int, int]:
        """Most tokens that the chat template adds to any prompt, and those of the generation prompt."""
        if not self.tokenizer.chat_template:
            return TEMPLATE_TOKENS, 0
        template, asked = (
            ChatTemplate(self.tokenizer, self.template_kwargs),
            [{"role": "user", "content": ""}],
        )
        texts = (template.attempt(asked, self.tools, generation) for generation in (True, False))
        whole, before = (len(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return TEMPLATE_TOKENS + whole, max(0, whole - before)

    def _images(self, sample_index: int, record: dict[str, Any]) -> list[str]:
        """The images of a row, in base64."""
        if self.image_reader is None:
            return []
        return read_images(record[self.image_key], self.where(sample_index))

    def drain_counts(self) -> dict[str, int]:
        """ "SOURCE/prompts", "/truncated", "/without_truth": of the rows that were read since the last call.

        "SOURCE/dropped": of the files, as too long. What is 0 is left out.
        """
        counts, self._counts = self._counts + self._dropped, Counter()
        return {name: count for name, count in counts.items() if count}

    def _encode(
        self,
        sample_indices: Sequence[int],
        prompts: Sequence[Prompt],
        images: Sequence[list[str]],
        options: Sequence[Mapping[str, Any]],
    ) -> list[tuple[list[int], Seen]]:
        """Token ids of prompts with their images; DataError where images have no place in the prompt.

        options: of each prompt, the arguments of the template that its row has.
        """
        if self.image_reader is None:
            ids = self._token_ids(prompts, options)
            return [(of_row, NO_IMAGES) for of_row in ids]
        wheres = [self.where(index) for index in sample_indices]
        written = [
            with_image_parts(prompt, len(seen), where)
            for prompt, seen, where in zip(prompts, images, wheres, strict=True)
        ]
        ids = self._token_ids(written, options)
        return [
            self.image_reader.expand(of_row, seen, where)
            for of_row, seen, where in zip(ids, images, wheres, strict=True)
        ]

    def _token_ids(self, prompts: Sequence[Prompt], options: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Token ids of prompts, those of equal options in one batched call."""
        groups: dict[str, list[int]] = {}
        for place, one in enumerate(options):
            groups.setdefault(json.dumps(one, sort_keys=True, default=str), []).append(place)
        ids: list[list[int]] = [[] for _ in prompts]
        for places in groups.values():
            kwargs = {**self.template_kwargs, **options[places[0]]}
            encoded = encode_prompts(self.tokenizer, [prompts[p] for p in places], kwargs, self.tools)
            for place, of_row in zip(places, encoded, strict=True):
                ids[place] = of_row
        return ids

    @staticmethod
    def _options(record: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the template that a row has of its own."""
        return row_options(record.get(EXTRA_KEY))

    def extra_infos(self) -> list[Any]:
        """extra_info of every row, in order; None where the file has none."""
        return self._column(EXTRA_KEY)

    def sources(self) -> list[str]:
        """The data source of every row, in order."""
        return [source or NO_SOURCE for source in self._column(self.data_source_key)]

    def _column(self, name: str) -> list[Any]:
        columns = [
            values_of(table, name, str(file)) if name in table.column_names else [None] * len(table)
            for file, table in zip(self.files, self._tables, strict=True)
        ]
        everything = [value for column in columns for value in column]
        return [everything[sample_index] for sample_index in self._kept]

    def file_starts(self) -> list[tuple[str, int]]:
        """Each file, and the sample_index of its first row."""
        return list(zip(map(str, self.files), self._starts, strict=False))

    def where(self, sample_index: int) -> str:
        """The file and row of a sample, for messages."""
        file = bisect.bisect_right(self._starts, sample_index) - 1
        return f"{self.files[file]}, row {sample_index - self._starts[file]}"

    def _read(self, path: DataFile) -> pa.Table:
        rows = self.columns.open(path)
        given = self.responses.names
        images = (self.image_key,) if self.image_reader else ()
        check_columns(path, rows, self.columns, (), given, bool(images))
        wanted = dict.fromkeys(
            (self.prompt_key, self.data_source_key, GROUND_TRUTH_KEY, EXTRA_KEY, *given, *images)
        )
        return read_columns(path, rows, [name for name in wanted if name in rows.schema.names])

    def _record(self, sample_index: int) -> dict[str, Any]:
        file = bisect.bisect_right(self._starts, sample_index) - 1
        row = self._tables[file].slice(sample_index - self._starts[file], 1)
        try:
            cells = row.to_pylist()[0]
        except UNREADABLE as error:
            raise DataError(
                f"{self.where(sample_index)} is corrupt: {error}. Write the file again."
            ) from error
        where = self.where(sample_index)
        record = {name: plain(cell, f"{where}: column {name!r}") for name, cell in cells.items()}
        prompt = record[self.prompt_key]
        if not prompt:
            raise DataError(
                f"{where}: the prompt in column {self.prompt_key!r} is empty. Remove the row or fill it in."
            )
        record[self.prompt_key] = chat_of(prompt, f"{where}: the prompt", self.image_reader is not None)
        return record

    def _fit(self, ids: list[int], sample_index: int, is_chat: bool) -> list[int]:
        limit = self.max_prompt_length
        if len(ids) <= limit:
            return ids
        match self.truncation:
            case "left":
                return ids[-limit:]
            case "right":
                tail = min(limit, self._num_last if is_chat else 0)
                return ids[: limit - tail] + ids[len(ids) - tail :]
            case "middle":
                head = limit // 2
                return ids[:head] + ids[head - limit :]
        raise self._overlong_error(sample_index, str(len(ids)))

    def _overlong_error(self, sample_index: int, length: str) -> DataError:
        return DataError(
            f"{self.where(sample_index)}: the prompt has {length} tokens, data.max_prompt_length is "
            f"{self.max_prompt_length}, and data.truncation=error. Raise max_prompt_length, drop such rows "
            "by data.filter_overlong_prompts=True, or cut them by data.truncation=left|right|middle."
        )

    def _drop_overlong(self) -> None:
        total = len(self._kept)
        overlong = [index for index, _ in self._overlong()] + [index for index, *_ in self._overlong_given()]
        self._kept = np.setdiff1d(self._kept, np.array(overlong, dtype=np.int64), assume_unique=True)
        for index in overlong:
            source = self._record(index).get(self.data_source_key) or NO_SOURCE
            self._dropped[f"{source}/dropped"] += 1
        log.info(
            "filter_overlong_prompts: kept %d of %d prompts, those of at most %d tokens%s",
            len(self),
            total,
            self.max_prompt_length,
            f", and {self.max_response_length} of each response" if self.responses.names else "",
        )
        if len(self) == 0:
            raise DataError(
                f"all {total} prompts have more than data.max_prompt_length={self.max_prompt_length} tokens: "
                "data.filter_overlong_prompts leaves none. Raise max_prompt_length."
            )

    def _refuse_overlong(self) -> None:
        for sample_index, length in self._overlong():
            raise self._overlong_error(sample_index, length)
        for sample_index, name, length in self._overlong_given():
            raise DataError(
                f"{self.where(sample_index)}: the response in column {name!r} has {length} tokens with its "
                f"end, data.max_response_length is {self.max_response_length}, and data.truncation=error. "
                "Raise max_response_length, drop such rows by data.filter_overlong_prompts=True, or let "
                "their end be cut by data.truncation=right."
            )

    def _overlong(self) -> Iterator[tuple[int, str]]:
        """(sample_index, number of tokens in words) of each prompt above the limit, in order.

        A tokenizer makes at most one token of a byte of text, so that only prompts whose bytes, with an
        allowance for the chat template, exceed the limit are tokenised: as a rule few. One whose characters
        would not fit if all tokens were as long as the longest is not tokenised either: megabytes of text
        take minutes.
        """
        longest = _longest_token(self.tokenizer)
        suspects = [
            start + int(row)
            for start, table in zip(self._starts, self._tables, strict=False)
            for row in np.flatnonzero(self._most_tokens(table) > self.max_prompt_length)
        ]
        for first in range(0, len(suspects), SCAN_ROWS):
            chunk = suspects[first : first + SCAN_ROWS]
            records = {index: self._record(index) for index in chunk}
            prompts = {index: record[self.prompt_key] for index, record in records.items()}
            fewest = {index: _num_characters(prompt) // longest for index, prompt in prompts.items()}
            near = [index for index in chunk if fewest[index] <= self.max_prompt_length]
            images = [self._images(index, records[index]) for index in near]
            options = [self._options(records[index]) for index in near]
            ids = self._encode(near, [prompts[index] for index in near], images, options)
            lengths = {index: len(of_row) for index, (of_row, _) in zip(near, ids, strict=True)}
            for index in chunk:
                if index not in lengths:
                    yield index, f"at least {fewest[index]}"
                elif lengths[index] > self.max_prompt_length:
                    yield index, str(lengths[index])

    def _most_tokens(self, table: pa.Table) -> np.ndarray:
        """An upper bound of the number of tokens of each prompt."""
        bounds = token_bounds(table[self.prompt_key], self._num_template)
        if EXTRA_KEY in table.column_names and _may_name(ROW_OPTIONS, table[EXTRA_KEY]):
            return np.full(len(bounds), UNBOUNDED)
        if self.image_reader is None:
            return bounds
        column = table[self.image_key]
        if is_json(column.type):
            cells = values_of(table, self.image_key)
            return bounds + self.image_reader.most_tokens * np.array([num_images(cell) for cell in cells])
        counts = pc.list_value_length(column) if is_list(column.type) else pc.is_valid(column)
        counts = pc.fill_null(counts.cast(pa.int64()), 0).to_numpy()
        return bounds + counts * self.image_reader.most_tokens

    def _overlong_given(self) -> Iterator[tuple[int, str, int]]:
        """(sample_index, column, tokens) of each row with a response above the limit, in order."""
        for start, table in zip(self._starts, self._tables, strict=False):
            bounds = [token_bounds(table[name], TEMPLATE_TOKENS) for name in self.responses.names]
            longest = np.max(bounds, axis=0) if bounds else np.zeros(0)
            suspects = [start + int(row) for row in np.flatnonzero(longest > self.max_response_length)]
            for first in range(0, len(suspects), SCAN_ROWS):
                chunk = suspects[first : first + SCAN_ROWS]
                records, wheres = map(self._record, chunk), map(self.where, chunk)
                lists = self.responses.encode_whole(list(records), list(wheres))
                for place, name, length in self.responses.too_long(lists):
                    yield chunk[place], name, length


def _may_name(name: str, column: pa.ChunkedArray) -> bool:
    """Whether values of a column may have this key."""
    if is_json(column.type):
        column = pc.struct_field(column, [0])
    if pa.types.is_struct(column.type):
        return column.type.get_field_index(name) >= 0
    if is_text(column.type):
        return bool(pc.any(pc.match_substring(column, name)).as_py())
    return not pa.types.is_null(column.type)


def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The most characters of a text that one token stands for; a huge number where that is not bounded.

    Bounded by the vocabulary for byte-level BPE and BPE that falls back to bytes, unless the text is changed
    before by more than NFC, which makes at most four characters one, or by writing blanks in another way.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    model, normalizer = parts.get("model") or {}, parts.get("normalizer")
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    removes = '"Removed"' in json.dumps(parts.get("pre_tokenizer"))
    bytes_of_text = model.get("byte_fallback") or '"ByteLevel"' in json.dumps(parts.get("pre_tokenizer"))
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    known = all(step["type"] in ("NFC", "Prepend") or step == blanks for step in steps)
    swallows = any(token["lstrip"] or token["rstrip"] for token in parts.get("added_tokens", ()))
    if model.get("type") != "BPE" or not bytes_of_text or not known or swallows or removes:
        return UNBOUNDED
    composed = 4 if any(step["type"] == "NFC" for step in steps) else 1
    return composed * max(map(len, tokenizer.get_vocab()))


def _num_characters(prompt: Prompt) -> int:
    """Of its text, without what a chat template adds or may leave out (blanks, earlier thoughts)."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len((turn.get("content") or "").strip()) for turn in prompt if turn["role"] != "assistant")
