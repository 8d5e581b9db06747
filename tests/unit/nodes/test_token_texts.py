"""What tokens say in their places, with tokenizers of any vocabulary."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from siirl.nodes.trained_tokens import token_texts


def words() -> PreTrainedTokenizerFast:
    """A vocabulary that lacks most text and has nothing for what it lacks, as that of the quickstart."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"1": 0, "+": 1, "<eos>": 2})))


def pieces() -> PreTrainedTokenizerFast:
    """Each piece has the space before it, which is lost where a text begins."""
    inner = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("\u2581one", -1.0), ("\u2581two", -1.0), ("s", -2.0)], 0)
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize(
    ("tokenizer", "ids", "texts"),
    [
        (words(), [1, 0, 2], [" +", " 1", " <eos>"]),
        (words(), [2], ["<eos>"]),
        (words(), [], []),
        (pieces(), [2, 3, 1], [" two", "s", " one"]),
    ],
)
def test_a_token_says_what_it_adds_to_the_text(tokenizer, ids, texts):
    assert token_texts(tokenizer, ids) == texts
