"""`siirl chat` with words that a tokenizer made from scratch does not have."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from siirl.commands.chat_command import Sampling, Source, Speaker
from siirl.errors import ConfigError


def test_a_word_that_the_tokenizer_does_not_have_is_said_and_the_chat_goes_on():
    words = Tokenizer(WordLevel({"larger": 0, "of": 1}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    text = SimpleNamespace(max_position_embeddings=2)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    speaker = Speaker(Source(("agent_0",), "model"), model, tokenizer, {}, "")
    with pytest.raises(ConfigError, match="cannot read this: WordLevel error"):
        speaker.answer("smaller of", Sampling(0.0, 1, 0), print)
    with pytest.raises(ConfigError, match="takes 2 tokens, and the model reads 2"):
        speaker.answer("larger of", Sampling(0.0, 1, 0), print)
