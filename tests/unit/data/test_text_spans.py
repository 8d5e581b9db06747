"""Spans of two tokenizations: hand-made ones, all kinds of tokenizers, and random cuts of random bytes."""

import itertools
import random

import pytest
from bpe_tokenizers import SAMPLE, byte_level, characters, sentencepiece_like
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from siirl.data.text_spans import Span, aligned, as_text, token_bytes
from siirl.errors import ConfigError

CASES = {
    "equal": ("a|b|c", "a|b|c", "a=a b=b c=c"),
    "one is finer": ("straw|berry|!", "strawberry|!", "straw|berry=strawberry !=!"),
    "crossing": ("ab|cd|e", "a|bc|de", "ab|cd|e=a|bc|de"),
    "crossing, then equal": ("ab|c|d", "a|bc|d", "ab|c=a|bc d=d"),
    "nothing in common": ("a|b", "c|d", ""),
    "as far as they are equal": ("a|b|x", "a|b|y", "a=a b=b"),
    "one goes on": ("a|b", "a", "a=a"),
    "no boundary where they part": ("ab|cd", "ab|ce", "ab=ab"),
    "a token of nothing": ("a||b", "a|b", "a|=a b=b"),
    "nothing at the beginning": ("|a", "a", "|a=a"),
    "empty": ("", "", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_spans_end_where_both_have_a_boundary(case):
    one, other, want = CASES[case]
    pieces = [[part.encode() for part in text.split("|")] if text else [] for text in (one, other)]
    found = [
        tuple(b"|".join(side[begin:end]).decode() for side, (begin, end) in zip(pieces, span, strict=True))
        for span in aligned(*pieces)
    ]
    assert [f"{a}={b}" for a, b in found] == want.split(), found


def check_spans(spans: list[Span], one: list[bytes], other: list[bytes]) -> None:
    """They cover both from the beginning on, are of equal bytes, and none can be cut."""
    for side, pieces in enumerate((one, other)):
        places = [span[side] for span in spans]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert not places or (places[0][0] == 0 and places[-1][1] <= len(pieces))
    for (a, b), (c, d) in spans:
        assert b"".join(one[a:b]) == b"".join(other[c:d])
        inner = [{sum(map(len, p[x:k])) for k in range(x + 1, y)} for p, x, y in ((one, a, b), (other, c, d))]
        inside = (inner[0] & inner[1]) - {0, sum(map(len, one[a:b]))}
        assert not inside, "a boundary of both lies within a span"


def cut(draw: random.Random, text: bytes) -> list[bytes]:
    ends = sorted(draw.sample(range(1, len(text)), draw.randrange(len(text)))) if len(text) > 1 else []
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


def test_random_cuts_of_random_bytes_are_covered_to_the_end():
    """Characters of up to four bytes are cut anywhere, and some bytes are no text."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("ab ß日😀", k=draw.randrange(1, 12))).encode()
        if draw.random() < 0.5:
            at = draw.randrange(len(text))
            text = text[:at] + bytes([draw.choice((0xFF, 0x80, 0xE6, 0xF0))]) + text[at:]
        one, other = cut(draw, text), cut(draw, text)
        spans = aligned(one, other)
        check_spans(spans, one, other)
        assert spans[-1] == Span((spans[-1].one[0], len(one)), (spans[-1].other[0], len(other)))
        read, pieces = as_text(one)
        assert read == text.decode("utf-8", "replace") and b"".join(pieces).decode() == read
        assert len(pieces) == len(one) and (pieces == one or "\N{REPLACEMENT CHARACTER}" in read)
        assert aligned(one, one) == [Span((k, k + 1), (k, k + 1)) for k in range(len(one))]


def test_bytes_of_a_character_that_stays_incomplete_are_one_span():
    """The mark that stands for them is in the token in which they begin: all are compared with it."""
    mark = "\N{REPLACEMENT CHARACTER}".encode()
    read, pieces = as_text([b"a", b"\xe6", b"\x97", b"b"])
    assert read.encode() == b"a" + mark + b"b" and pieces == [b"a", mark, b"", b"b"]
    other = [b"a", mark[:1], mark[1:], b"b"]
    assert aligned(pieces, other) == [Span((0, 1), (0, 1)), Span((1, 3), (1, 3)), Span((3, 4), (3, 4))]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {
        "bytes": byte_level(folder / "bytes", 256),
        "words": byte_level(folder / "words", 330),
        "sentencepiece": sentencepiece_like(folder / "spm", 400),
        "characters": characters(folder / "characters", "".join(SAMPLE)),
    }
    return {name: AutoTokenizer.from_pretrained(path) for name, path in made.items()}


@pytest.mark.parametrize("name", ["bytes", "words", "sentencepiece", "characters"])
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizers, name):
    tokenizer = tokenizers[name]
    known = token_bytes(tokenizer)
    assert len(known) == len(tokenizer)
    for text in (*SAMPLE, " two  spaces", "<o>a mark", "x" if name == "characters" else "\u00e9\n\tß"):
        if name == "characters":
            text = "".join(character for character in text if character in "".join(SAMPLE))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        spelled = b"".join(known[one] for one in ids).decode()
        assert spelled == (" " if name == "sentencepiece" else "") + text, (name, text)


def test_pairs_of_tokenizers_are_aligned_on_any_text(tokenizers):
    draw = random.Random(3)
    known = {name: token_bytes(tokenizer) for name, tokenizer in tokenizers.items()}
    cuts_characters = 0
    for _ in range(60):
        text = "".join(draw.choice(SAMPLE)[: draw.randrange(1, 30)] for _ in range(2))
        a, b = draw.sample(["bytes", "words", "characters"], 2)
        one, other = (
            [known[x][token] for token in tokenizers[x](text, add_special_tokens=False)["input_ids"]]
            for x in (a, b)
        )
        spans = aligned(one, other)
        check_spans(spans, one, other)
        assert spans[-1].one[1] == len(one) and spans[-1].other[1] == len(other)
        cuts_characters += any(
            as_text([piece])[0].count("\N{REPLACEMENT CHARACTER}") for piece in one + other
        )
    assert cuts_characters > 10


def test_tokens_that_are_no_parts_of_their_text_are_refused():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"no parts of a text .WordPiece."):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
