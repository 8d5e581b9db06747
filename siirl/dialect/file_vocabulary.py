"""The tokenizer of a model's directory without transformers, whose import takes seconds."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from siirl.dialect.template import CLOCK, today
from siirl.errors import DataError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates know by these names."""


class FileVocabulary:
    """What tokenizer.json, tokenizer_config.json and chat_template.jinja say, as `Marked` has it."""

    def __init__(self, path: Path) -> None:
        """OSError or ValueError where the files are missing or no JSON."""
        from tokenizers import Tokenizer  # a tenth of a second, which only checks of models need

        self.name_or_path = str(path)
        try:
            self._core = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower for a damaged file
            raise ValueError(f"{path / 'tokenizer.json'}: {error}") from error
        config = _object(path / "tokenizer_config.json") | _object(path / "special_tokens_map.json")
        self._named = {name: _content(config[name]) for name in NAMED if config.get(name)}
        self.chat_template: Any = _templates_of(path, config)
        eos = self._named.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self._core.token_to_id(eos)
        self._compiled: dict[str, jinja2.Template] = {}

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: id for id, token in self._core.get_added_tokens_decoder().items()}

    def encode(self, text: str, **options: Any) -> list[int]:
        """DataError for a text that has no tokens: a vocabulary of words, and none for those it lacks."""
        try:
            return self._core.encode(text, add_special_tokens=options.get("add_special_tokens", True)).ids
        except Exception as error:  # the edge to tokenizers, which raises nothing narrower
            raise DataError(
                f"the tokenizer of {self.name_or_path} has no tokens for {textwrap.shorten(text, 60)!r} "
                f"({error}). Write texts in its words, or take a tokenizer that knows others "
                "(data.tokenizer)."
            ) from error

    def decode(self, token_ids: Any, **options: Any) -> str:
        skip = options.get("skip_special_tokens", False)
        return self._core.decode(list(token_ids), skip_special_tokens=skip)

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        """The text of a conversation, as transformers renders it."""
        given = {name: value for name, value in options.items() if name != "tokenize"}
        named = {"tools": None, "documents": None, **self._named, "messages": conversation, **given}
        source = named.pop("chat_template", self.chat_template)
        if source not in self._compiled:
            self._compiled[source] = environment().from_string(source)
        return self._compiled[source].render(**named)


class _Transparent(Extension):
    """{% generation %} blocks, which mark what an assistant said for training, as their content."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """That in which chat templates are written: blocks trimmed, JSON as it is, loops that can be left."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Transparent, loopcontrols]
    )
    found.filters["tojson"] = _as_json
    found.globals["raise_exception"] = _refuse
    found.globals[CLOCK] = today
    return found


def _as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _templates_of(path: Path, config: Mapping[str, Any]) -> Any:
    """That of a file of its own, else those of tokenizer_config.json: a text, texts by name, or None."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (path / name).is_file():
            text = (path / name).read_text(encoding="utf-8")
            own = text if name.endswith(".jinja") else json.loads(text)["chat_template"]
            more = {
                file.stem: file.read_text() for file in (path / "additional_chat_templates").glob("*.jinja")
            }
            return {"default": own, **more} if more else own
    found = config.get("chat_template")
    if isinstance(found, Sequence) and not isinstance(found, str):
        return {x["name"]: x["template"] for x in found}
    return found


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> str:
    """The text of a token, which may be written with how it is matched."""
    return str(token["content"]) if isinstance(token, Mapping) else str(token)
