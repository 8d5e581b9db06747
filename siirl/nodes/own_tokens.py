"""A teacher with another tokenizer: the rows in its own tokens, and what it says of them in the policy's."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.chat import encode_prompts, read_tokenizer
from siirl.data.rows import make_rows, objects
from siirl.data.text_spans import Span, aligned, as_text, token_bytes
from siirl.dialect.dialect import Dialect, dialect_of_model
from siirl.dialect.template import template_options
from siirl.model_files.directory import num_positions
from siirl.models.config_json import as_built

NO_TEXT = b"\xff"
"""Of a token that the tokenizer does not have, as embeddings may be padded."""


class OwnTokens:
    """Rewrites rows for a teacher: the prompt by its own chat template, the response as the same text in its
    own tokens, with its own end of a turn where it has ended."""

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, dialect: Dialect):
        """tokenizer and dialect: the policy's. DataError or ConfigError for a tokenizer that cannot do."""
        model = cfg.teacher.model
        self._own = read_tokenizer(
            model.path, model.trust_remote_code, "Set teacher.model.path to the directory of its tokenizer"
        )
        self._dialect, self._options = dialect, template_options(cfg)
        self._end = dialect_of_model(model, self._own, self._options).end_id
        self._pieces, self._own_pieces = token_bytes(tokenizer), token_bytes(self._own)
        self._positions = num_positions(as_built(model))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's."""
        return self._own

    def said(self, rows: TensorDict, compute: Callable[[TensorDict], Any]) -> dict[str, Tensor]:
        """log_prob [B, T]: of each span, at its last token, the sum of what the teacher says of its tokens
        there. span [B, T]: of each token, 1 + the place of that last token; 0: it is in none.

        compute: rows -> what the teacher says of their sampled tokens, as "log_prob".
        """
        asked, spans = self._rewritten(rows)
        own_BT = compute(asked)["log_prob"].double()
        log_prob_BT = torch.zeros(rows["response_ids"].shape, dtype=torch.float64, device=own_BT.device)
        span_BT = torch.zeros_like(log_prob_BT, dtype=torch.int64)
        for row, of_row in enumerate(spans):
            for (begin, end), (first, last) in of_row:
                log_prob_BT[row, end - 1] = own_BT[row, first:last].sum()
                span_BT[row, begin:end] = end
        return {"log_prob": log_prob_BT.float(), "span": span_BT}

    def _rewritten(self, rows: TensorDict) -> tuple[TensorDict, list[list[Span]]]:
        """(the rows as the teacher reads them, the spans of each)."""
        different = {id(prompt): prompt for prompt in objects(rows, "raw_prompt")}
        encoded = encode_prompts(self._own, list(different.values()), self._options)
        prompt_of = dict(zip(different, encoded, strict=True))
        prompts = [prompt_of[id(prompt)][: self._positions] for prompt in objects(rows, "raw_prompt")]
        lengths = rows["response_length"].tolist()
        responses = [ids[:length] for ids, length in zip(rows["response_ids"].tolist(), lengths, strict=True)]
        written = [self._in_own(response) for response in responses]
        spans = []
        for row, (ids, found) in enumerate(written):
            room = len(ids) if self._positions is None else self._positions - len(prompts[row])
            written[row] = (ids[:room], found)
            spans.append([span for span in found if span.other[1] <= room])
        response_length = torch.tensor([len(ids) for ids, _ in written])
        columns = {
            "prompt_ids": prompts,
            "prompt_length": [len(ids) for ids in prompts],
            "response_ids": [ids for ids, _ in written],
            "response_length": response_length,
        }
        asked = make_rows(columns)
        places_T = torch.arange(asked["response_ids"].shape[1])
        asked["response_mask"] = places_T < response_length[:, None]
        return asked.to(rows["response_ids"].device), spans

    def _in_own(self, response: list[int]) -> tuple[list[int], list[Span]]:
        """(the response in the teacher's tokens, which of its tokens are which of these)."""
        ended = self._dialect.unsaid_end(response) is not None
        body = response[:-1] if ended else response
        text, pieces = as_text([self._pieces[one] if one < len(self._pieces) else NO_TEXT for one in body])
        own: list[int] = self._own(text, add_special_tokens=False)["input_ids"] if text else []
        own_pieces = [self._own_pieces[one] for one in own]
        if own and own_pieces[0][:1] == b" " and text[:1] != " ":  # SentencePiece begins texts with a space
            own_pieces[0] = own_pieces[0][1:]
        spans = aligned(pieces, own_pieces)
        whole = spans[-1] if spans else Span((0, 0), (0, 0))
        if not ended or self._end is None:
            return own, spans
        if (whole.one[1], whole.other[1]) == (len(body), len(own)):
            spans.append(Span((len(body), len(response)), (len(own), len(own) + 1)))
        return [*own, self._end], spans
