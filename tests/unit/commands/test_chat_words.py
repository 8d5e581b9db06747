"""`siirl chat` with words that a tokenizer made from scratch does not have."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from siirl.commands.chat_command import Sampling, Source, Speaker, Trained
from siirl.errors import ConfigError


def test_a_word_that_the_tokenizer_does_not_have_is_said_and_the_chat_goes_on():
    words = Tokenizer(WordLevel({"larger": 0, "of": 1}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    text = SimpleNamespace(max_position_embeddings=2)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    speaker = Speaker(Source(("agent_0",), "model"), model, tokenizer, Trained(), "")
    with pytest.raises(ConfigError, match="cannot read this: WordLevel error"):
        speaker.answer("smaller of", Sampling(0.0, 1, 0), print)
    with pytest.raises(ConfigError, match="takes 2 tokens, and the model reads 2"):
        speaker.answer("larger of", Sampling(0.0, 1, 0), print)


@pytest.mark.parametrize("asked, trained, room", [(None, 3, 3), (None, 99, 8), (5, 3, 5), (99, 3, 8)])
def test_an_answer_ends_at_the_length_of_training_unless_asked_otherwise(asked, trained, room):
    """Answers went on to 512 tokens, of a model that was trained to end by its second."""
    words = Tokenizer(WordLevel({"larger": 0, "of": 1}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="of")
    text, given = SimpleNamespace(max_position_embeddings=10), []
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        generate=lambda *_, max_new_tokens, **__: given.append(max_new_tokens),
    )
    speaker = Speaker(Source(("agent_0",), "model"), model, tokenizer, Trained(answer_tokens=trained), "")
    speaker.answer("larger of", Sampling(0.0, asked, 0), print)
    assert given == [room]
