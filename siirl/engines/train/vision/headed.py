"""Vision models whose text part has a value or score head, of which transformers has no classes."""

from typing import Any

from transformers import AutoModelForImageTextToText, PretrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

GENERIC = {
    "AutoModelForTokenClassification": GenericForTokenClassification,
    "AutoModelForSequenceClassification": GenericForSequenceClassification,
}


def register_headed(auto: Any, config: type[PretrainedConfig]) -> None:
    """Have an Auto class of transformers build a type that sees images: the same base as with a language
    head, `score` on top, and the files' names as with that; once. No communication."""
    if config in auto._model_mapping:
        return
    whole: Any = AutoModelForImageTextToText._model_mapping[config]
    generic = GENERIC[auto.__name__]
    name = whole.__name__.removesuffix("ConditionalGeneration") + generic.__name__.removeprefix("GenericFor")
    auto.register(config, type(name, (generic, whole.__bases__[0]), {}), exist_ok=True)
    register_checkpoint_conversion_mapping(name, get_checkpoint_conversion_mapping(whole.__name__) or [])
