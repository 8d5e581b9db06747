"""Tiny tokenizers whose tokens cut words, and characters, in different places."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}OPEN{{ m['role'] }}: {{ m['content'] }}CLOSE{% endfor %}"
    "{% if add_generation_prompt %}OPENassistant: {% endif %}"
)
SAMPLE = (
    "the larger of 3 and 7 is 7",
    "straße, naïve café",
    "日本語のテキスト",
    "emoji 😀😃 and 12345 + 67890",
)


def byte_level(
    path: Path, size: int, texts: Iterable[str] = SAMPLE, marks: tuple[str, str] = ("<o>", "<c>")
) -> Path:
    """Byte-level BPE, as of Qwen and Llama 3, of `size` tokens at most; of 256: bytes. Returns path."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    return _saved(tokenizer, path, marks)


def sentencepiece_like(path: Path, size: int, texts: Iterable[str] = SAMPLE) -> Path:
    """BPE of characters, and bytes of rare ones, with a space before texts, as of Llama 2. Returns path."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [AddedToken("<unk>", special=True), *map(AddedToken, names)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = [token for token in said["added_tokens"] if token["content"] not in names]
    tokenizer = Tokenizer.from_str(json.dumps(said))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _saved(tokenizer, path, ("<s>", "</s>"))


def _saved(tokenizer: Tokenizer, path: Path, marks: tuple[str, str]) -> Path:
    opening, closing = marks
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", eos_token=closing, pad_token=closing
    )
    fast.chat_template = TEMPLATE.replace("OPEN", opening).replace("CLOSE", closing)
    fast.save_pretrained(str(path))
    return path


def characters(path: Path, text: str, marks: tuple[str, str] = ("<o>", "<c>")) -> Path:
    """One token for each character of `text`. Returns path."""
    words = {"<unk>": 0} | {character: at for at, character in enumerate(dict.fromkeys(text), 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _saved(tokenizer, path, marks)
