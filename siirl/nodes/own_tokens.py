"""A teacher with another tokenizer: the rows in its own tokens, and what it says of them in the policy's."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.algorithms.distillation import TeacherSpans
from siirl.config import Config
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.dag.fields_read import Names
from siirl.data.chat import encode_prompts, read_tokenizer
from siirl.data.rows import make_rows, objects
from siirl.data.text_spans import Span, aligned, as_text, shared_words, token_bytes
from siirl.dialect.dialect import Dialect, dialect_of_model
from siirl.dialect.template import template_options
from siirl.model_files.directory import num_positions
from siirl.models.config_json import as_built
from siirl.observe.metrics import Metrics

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
        begin = self._own("a", add_special_tokens=False)["input_ids"]
        self._adds_space = bool(begin) and self._own_pieces[begin[0]][:1] == b" "  # SentencePiece
        self._top_k = cfg.teacher.top_k
        self._num_words, self._num_own = (
            as_built(one).get("vocab_size") or len(pieces)
            for one, pieces in ((cfg.actor_rollout_ref.model, self._pieces), (model, self._own_pieces))
        )
        kinds = (False, True) if self._adds_space else (False,)
        self._tables = [] if self._top_k == SAMPLED else [self._policy_of(cut) for cut in kinds]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The teacher's."""
        return self._own

    def said(
        self, rows: TensorDict, compute: Callable[[TensorDict, Names], Any], metrics: Metrics
    ) -> dict[str, Tensor]:
        """span [B, T]: of each token, 1 + the place of the last token of its span; 0: it is in none. log_prob
        [B, T]: of each span, at its last token, the sum of what the teacher says of its tokens there.

        With teacher.top_k also top_log_prob, and of the K likeliest top_ids, at its first: see
        span_divergence. compute: rows -> outputs of the teacher.
        """
        outputs = {SAMPLED: ("log_prob",), WHOLE: ("log_prob", "top_log_prob")}
        asked, spans, cut = self._rewritten(rows)
        found = compute(asked, outputs.get(self._top_k, ("log_prob", "top_log_prob", "top_ids")))
        own_BT = found["log_prob"].double()
        log_prob_BT = torch.zeros(rows["response_ids"].shape, dtype=torch.float64, device=own_BT.device)
        span_BT = torch.zeros_like(log_prob_BT, dtype=torch.int64)
        for row, of_row in enumerate(spans):
            for (begin, end), (first, last) in of_row:
                log_prob_BT[row, end - 1] = own_BT[row, first:last].sum()
                span_BT[row, begin:end] = end
        said = {"log_prob": log_prob_BT.float(), "span": span_BT}
        mask_BT = rows["response_mask"]
        metrics.mean("teacher/aligned", int(((span_BT > 0) & mask_BT).sum()), int(mask_BT.sum()))
        if self._top_k == SAMPLED:
            return said
        at = [(row, *one, *other, cut[row]) for row, of_row in enumerate(spans) for one, other in of_row]
        places = torch.tensor(at, dtype=torch.int64, device=own_BT.device).view(-1, 6)
        row_M, begin_M, *_ = places.unbind(1)
        columns = self._in_policy_words(rows, asked, found, said["log_prob"], places)
        top_MK = columns["top_log_prob"][:, : self._num_words]
        metrics.mean("teacher/shared", float(top_MK[top_MK < torch.inf].exp().sum()), len(top_MK))
        for name, value_MK in columns.items():
            said[name] = value_MK.new_zeros(*mask_BT.shape, value_MK.shape[1])
            said[name][row_M, begin_M] = value_MK
        return said

    def _in_policy_words(
        self, rows: TensorDict, asked: TensorDict, found: Any, text_BT: Tensor, places: Tensor
    ) -> dict[str, Tensor]:
        """top_log_prob and top_ids [M, K] at the first token of each span, by the words of the policy.

        places: of each span its row, both its ranges, and whether its row's text is read without the space
        that the teacher's tokenizer begins it with.
        """
        row_M, begin_M, end_M, first_M, last_M, cut_M = places.unbind(1)
        spans = TeacherSpans(
            top_log_prob_MK=found["top_log_prob"][row_M, first_M],
            top_ids_MK=found["top_ids"][row_M, first_M] if "top_ids" in found.keys() else None,
            own_token_M=asked["response_ids"][row_M, first_M],
            token_M=rows["response_ids"][row_M, begin_M],
            log_prob_M=text_BT[row_M, end_M - 1],
            is_long_M=(end_M - begin_M > 1) | (last_M - first_M > 1),
        )
        tables = [table.to(row_M.device) for table in self._tables]
        return spans.in_policy_words(tables, cut_M * (first_M == 0), self._num_words)

    def _policy_of(self, cut: bool) -> Tensor:
        """The policy's word of each of the teacher's, of equal text, [V]; -1: it has none. cut: of the words
        that begin texts with a space, which is left out. Words beyond both tokenizers are paired in order."""
        own = (
            [piece[1:] if piece[:1] == b" " else None for piece in self._own_pieces]
            if cut
            else self._own_pieces
        )
        found = torch.full((self._num_own,), -1)
        for word, its in shared_words(self._pieces[: self._num_words], own[: self._num_own]):
            found[its] = word
        padding = found[len(own) :]
        padding.copy_(torch.arange(len(padding)) + len(self._pieces))
        padding[padding >= self._num_words] = -1
        if self._end is not None and self._dialect.end_id is not None:
            found[found == self._dialect.end_id] = -1
            found[self._end] = self._dialect.end_id
        return found

    def _rewritten(self, rows: TensorDict) -> tuple[TensorDict, list[list[Span]], list[bool]]:
        """(the rows as the teacher reads them, the spans of each, whether the first space is its own)."""
        different = {id(prompt): prompt for prompt in objects(rows, "raw_prompt")}
        encoded = encode_prompts(self._own, list(different.values()), self._options)
        prompt_of = dict(zip(different, encoded, strict=True))
        prompts = [prompt_of[id(prompt)][: self._positions] for prompt in objects(rows, "raw_prompt")]
        lengths = rows["response_length"].tolist()
        responses = [ids[:length] for ids, length in zip(rows["response_ids"].tolist(), lengths, strict=True)]
        written, spans, cut = [], [], []
        for prompt, response in zip(prompts, responses, strict=True):
            ids, found, is_cut = self._in_own(response)
            room = len(ids) if self._positions is None else self._positions - len(prompt)
            written.append(ids[:room])
            spans.append([span for span in found if span.other[1] <= room])
            cut.append(is_cut)
        response_length = torch.tensor([len(ids) for ids in written])
        columns = {
            "prompt_ids": prompts,
            "prompt_length": [len(ids) for ids in prompts],
            "response_ids": written,
            "response_length": response_length,
        }
        asked = make_rows(columns)
        places_T = torch.arange(asked["response_ids"].shape[1])
        asked["response_mask"] = places_T < response_length[:, None]
        return asked.to(rows["response_ids"].device), spans, cut

    def _in_own(self, response: list[int]) -> tuple[list[int], list[Span], bool]:
        """(the response in the teacher's tokens, which of its tokens are which of these, whether the first of
        these begins with a space that the text does not have)."""
        ended = self._dialect.unsaid_end(response) is not None
        body = response[:-1] if ended else response
        text, pieces = as_text([self._pieces[one] if one < len(self._pieces) else NO_TEXT for one in body])
        read = text[1:] if self._adds_space and text[:1] == " " else text
        own: list[int] = self._own(read, add_special_tokens=False)["input_ids"] if read else []
        own_pieces = [self._own_pieces[one] for one in own]
        cut = bool(own) and self._adds_space and text[:1] != " "
        if cut:
            own_pieces[0] = own_pieces[0][1:]
        spans = aligned(pieces, own_pieces)
        whole = spans[-1] if spans else Span((0, 0), (0, 0))
        if not ended or self._end is None:
            return own, spans, cut
        if (whole.one[1], whole.other[1]) == (len(body), len(own)):
            spans.append(Span((len(body), len(response)), (len(own), len(own) + 1)))
        return [*own, self._end], spans, cut
