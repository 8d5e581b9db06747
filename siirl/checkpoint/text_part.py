"""The text part of a model made of several, as a model of its own, and back (`siirl convert --text, --into`).

A model that sees has a language model inside, whose tensors its files have under a name before their own.
Of texts it computes what the whole does, so it is trained as any other; afterwards its tensors take the place
of those in the whole, of which all else stays as it was: towers, projectors, layers for further tokens.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from siirl.checkpoint.export import copy_hf_files, save_hf
from siirl.errors import ConfigError, DataError
from siirl.model_files.directory import check_weight_files, model_dir
from siirl.model_files.weight_slices import SafetensorsFolder
from siirl.models.families import TEXT_PARTS
from siirl.models.trained import why_not_plain

_INSIDE = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?=[a-z])")
"""What stands before the names of the text's tensors, other than of its output head, in the files of the
whole."""
_HEAD = "lm_head.weight"
_TOKENS = ("bos_token_id", "eos_token_id")


def write_text_part(whole: Path, out: Path) -> str:
    """Write the language model inside a model directory to `out`; return what was written, in words.

    ConfigError for a model that has none which was seen to compute what it does, or where `out` exists;
    DataError if its files are damaged, or have other tensors.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    whole = _whole(whole, out)
    config = AutoConfig.from_pretrained(whole)
    text = config.get_text_config()
    if config.model_type not in TEXT_PARTS or text is config or text.model_type not in CLASSES:
        raise ConfigError(
            f"{whole} is a {config.model_type}, which has no text part that was compared with the whole. "
            f"Give a model of {', '.join(TEXT_PARTS)}."
        )
    if problem := why_not_plain(text.model_type, config.to_dict()):
        raise ConfigError(f"{whole} is quantised, and {problem}. Give one of plain numbers.")
    with SafetensorsFolder(whole) as files:
        names = _text_names(files, whole)
        text.architectures, text.dtype = [CLASSES[text.model_type]], config.dtype
        text.tie_word_embeddings = _HEAD not in names or config.tie_word_embeddings
        for name in _TOKENS:
            if getattr(config, name, None) is not None:
                setattr(text, name, getattr(config, name))
        with tempfile.TemporaryDirectory() as folder:
            copy_hf_files(str(whole), Path(folder))
            text.save_pretrained(folder)
            save_hf(((own, _tensor(files, name)) for own, name in names.items()), folder, out, rank=0)
    return f"a {text.model_type}: its text part"


def write_whole(trained: Path, whole: Path, out: Path) -> str:
    """Write a model directory to `out` with the tensors of its text part, which was trained, in their places.

    Errors as write_text_part.
    """
    whole, trained = _whole(whole, out), model_dir(str(trained))
    check_weight_files(trained)
    with SafetensorsFolder(whole) as files, SafetensorsFolder(trained) as own:
        names, given = _text_names(files, whole), own.names()
        other = [name for name in {*names} ^ {*given} if ".experts." not in name]
        other += [x for x in {*names} & {*given} if files.like(names[x]).shape != own.like(x).shape]
        if other:
            raise DataError(
                f"{trained} is no text part of {whole}: {sorted(other)[:4]} differ. Give its own."
            )
        inside = next(match[0] for name in names.values() if (match := _INSIDE.match(name)))
        stays = [name for name in files.names() if name not in {*names.values()}]

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in given:
                place = names.get(name, inside + name.removeprefix("model."))
                yield place, _tensor(own, name)
            yield from ((name, _tensor(files, name)) for name in stays)

        save_hf(tensors(), str(whole), out, rank=0)
    return f"{whole} with the text part of {trained}"


def _whole(whole: Path, out: Path) -> Path:
    if out.exists():
        raise ConfigError(f"{out} exists already. Remove it, or choose another directory.")
    folder = model_dir(str(whole))
    check_weight_files(folder)
    return folder


def _text_names(files: SafetensorsFolder, folder: Path) -> dict[str, str]:
    """Name of a tensor in the text part -> in the whole; the embedding first, whose type is the model's."""
    found = {}
    for name in files.names():
        own = _INSIDE.sub("", name)
        if own == _HEAD:
            found[own] = name
        elif own != name:
            found[f"model.{own}"] = name
    if "model.embed_tokens.weight" not in found:
        raise DataError(f"{folder} has no tensor language_model...embed_tokens.weight: it has no text part.")
    return dict(sorted(found.items(), key=lambda pair: not pair[0].endswith("embed_tokens.weight")))


def _tensor(files: SafetensorsFolder, name: str) -> Tensor:
    shape = files.like(name).shape
    return files.part(name, 0, shape[0] if shape else 0)
