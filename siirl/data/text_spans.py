"""Two tokenizations of one text, span by span: where both have a boundary, and what lies between. Byte-exact.

Spans of equal text are what models with different tokenizers can be compared by: Boizard et al., "Towards
Cross-Tokenizer Distillation: the Universal Logit Distillation Loss for LLMs" (2024); Patiño et al.,
"Unlocking On-Policy Distillation for Any Model Family" (2025), whose GOLD multiplies the probabilities of the
tokens of a span.
"""

import itertools
import json
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from siirl.errors import ConfigError
from siirl.model_files.vocabulary import SLOW, decoder_kinds, why_no_pieces

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What is read where bytes are no text."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""That of SentencePiece."""


class Span(NamedTuple):
    """Tokens [begin, end) of each of two tokenizations, whose texts are the same bytes."""

    one: tuple[int, int]
    other: tuple[int, int]


def aligned(one: Sequence[bytes], other: Sequence[bytes]) -> list[Span]:
    """The shortest spans, in order, that cover both from their beginning on, as far as they are equal.

    A token of no bytes belongs to the span that ends with it.
    """
    text, another = b"".join(one), b"".join(other)
    different = (at for at, (a, b) in enumerate(zip(text, another, strict=False)) if a != b)
    common = next(different, min(len(text), len(another)))
    ends, others = ({end: at for at, end in _ends(pieces) if end <= common} for pieces in (one, other))
    cuts = [(0, 0), *((ends[end], others[end]) for end in sorted(ends.keys() & others.keys()))]
    return [Span((a, c), (b, d)) for (a, b), (c, d) in itertools.pairwise(cuts)]


def _ends(pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """(number of tokens, where they end) of each prefix but the empty one."""
    return list(enumerate(itertools.accumulate(map(len, pieces)), 1))


def as_text(pieces: Sequence[bytes]) -> tuple[str, list[bytes]]:
    """The text of tokens, and the tokens as bytes of that. What is no UTF-8 is UNKNOWN in both, as part of
    the token in which it begins."""
    raw, bad = b"".join(pieces), []
    text, at = [], 0
    while at < len(raw):
        try:
            text.append(raw[at:].decode())
            break
        except UnicodeDecodeError as error:
            bad.append((at + error.start, at + error.end))
            text.append(raw[at : at + error.start].decode() + UNKNOWN)
            at += error.end
    if not bad:
        return "".join(text), list(pieces)
    mark, made, begin = UNKNOWN.encode(), [], 0
    for piece in pieces:
        end, out, at = begin + len(piece), b"", begin
        for first, last in bad:
            if first < end and last > begin:
                out += raw[at : max(at, first)] + (mark if first >= begin else b"")
                at = min(max(at, last), end)
        made.append(out + raw[at:end])
        begin = end
    return "".join(text), made


def shared_words(one: Sequence[bytes], other: Sequence[bytes | None]) -> list[tuple[int, int]]:
    """Pairs of a token of each that stand for the same text; None: for none. Each token is in one at most.

    Of several of one text the last are paired: SentencePiece's bytes, which it falls back to, come first.
    """
    ids: tuple[dict[bytes | None, list[int]], ...] = ({}, {})
    for of_text, pieces in zip(ids, (one, other), strict=True):
        for token, piece in enumerate(pieces):
            of_text.setdefault(piece, []).append(token)
    both = ((ids[0][piece], ids[1][piece]) for piece in ids[0].keys() & ids[1].keys())
    return [pair for a, b in both for pair in zip(reversed(a), reversed(b), strict=False)]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """What each token stands for in a text, by its id.

    ConfigError for a tokenizer whose tokens are no parts of its text, such as WordPiece, which drops spaces.
    """
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] if tokenizer.is_fast else SLOW
    kinds = decoder_kinds(decoder)
    if why := why_no_pieces(kinds):
        raise ConfigError(f"the tokenizer of {tokenizer.name_or_path}: {why}")
    added = {token: text for text, token in tokenizer.get_added_vocab().items()}
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def read(name: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(byte_of[character] for character in name)
        if "ByteFallback" in kinds and len(name) == 6 and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        return (name.replace(SPACE, " ") if kinds else name).encode()

    return [added[token].encode() if token in added else read(name or "") for token, name in enumerate(names)]
