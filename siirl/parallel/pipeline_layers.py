"""How Megatron-Core cuts the layers of a model into pipeline chunks, and which uneven cut fits. Pure numbers.

The rules are those of megatron-core 0.16: layers are counted for each pipeline rank first, and its count
is then cut into virtual_pipeline_model_parallel_size chunks.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
SPLIT_OPTIONS = (FIRST, LAST, EMBEDDING, LOSS, LAYOUT)
"""Options of TransformerConfig that decide the cut."""

Chunks = tuple[tuple[int, ...], ...]
"""Decoder layers of every chunk: [pipeline rank][chunk]."""

_NAMES = {"E": "embedding", "L": "loss", "t": "decoder", "m": "mtp"}


def split_layers(layers: int, pp: int, vpp: int, options: Mapping[str, Any]) -> Chunks:
    """Layers of every chunk. ValueError, in words, if the sizes and the options do not go together."""
    split = {name: options[name] for name in SPLIT_OPTIONS if options.get(name)}
    if LAYOUT in split:
        if len(split) > 1:
            others = ", ".join(name for name in split if name != LAYOUT)
            raise ValueError(f"{LAYOUT} decides the whole cut and does not go with {others}")
        return _from_layout(split[LAYOUT], layers, pp, vpp)
    if (FIRST in split or LAST in split) and (EMBEDDING in split or LOSS in split):
        raise ValueError(f"{FIRST} and {LAST} do not go with {EMBEDDING} and {LOSS}")
    stages = _stage_layers(layers, pp, split)
    for stage, count in enumerate(stages):
        if count % vpp:
            raise ValueError(
                f"pipeline rank {stage} gets {count} layers, which do not divide into vpp({vpp}) chunks"
            )
    chunks = [[count // vpp] * vpp for count in stages]
    chunks[0][0] -= bool(split.get(EMBEDDING))
    chunks[-1][-1] -= bool(split.get(LOSS))
    return tuple(map(tuple, chunks))


def suggest_split(layers: int, pp: int, vpp: int) -> dict[str, Any]:
    """Options under which so many layers can be cut into chunks that differ by one layer at most."""
    first = -(-layers // (pp * vpp)) * vpp
    rest = layers - first * (pp - 1)
    candidates: Iterator[dict[str, Any]] = iter(
        ({}, {LOSS: True}, {EMBEDDING: True}, {EMBEDDING: True, LOSS: True}, {LAST: rest}, {FIRST: rest})
    )
    for options in candidates:
        if pp > 1 and any(isinstance(value, int) and value < 1 for value in options.values()):
            continue
        try:
            chunks = split_layers(layers, pp, vpp, options)
        except ValueError:
            continue
        counts = [count for stage in chunks for count in stage]
        if min(counts) > 0 and max(counts) - min(counts) <= 1:
            return options
    return {LAYOUT: _layout_text(layers, pp * vpp)}


def _stage_layers(layers: int, pp: int, split: Mapping[str, Any]) -> list[int]:
    """Places of every pipeline rank; embedding and loss take a place each where they are counted."""
    if FIRST not in split and LAST not in split:
        places = layers + bool(split.get(EMBEDDING)) + bool(split.get(LOSS))
        if places % pp:
            counted = [name.split("_")[2] for name in (EMBEDDING, LOSS) if name in split]
            sum_of = " + ".join([f"{layers} layers", *counted]) + (f" = {places} places" if counted else "")
            raise ValueError(f"{sum_of} do not divide into pp({pp}) stages")
        return [places // pp] * pp
    ends = [int(split[name]) for name in (FIRST, LAST) if name in split]
    middle, left = pp - len(ends), layers - sum(ends)
    if min(left, middle) < 0 or bool(left) != bool(middle) or (middle and left % middle):
        named = ", ".join(f"{name}={split[name]}" for name in (FIRST, LAST) if name in split)
        raise ValueError(
            f"{named} leave {left} of {layers} layers for {max(middle, 0)} other stages of pp({pp})"
        )
    stages = [left // middle if middle else 0] * middle
    if FIRST in split:
        stages.insert(0, int(split[FIRST]))
    if LAST in split:
        stages.append(int(split[LAST]))
    return stages


def _from_layout(layout: Any, layers: int, pp: int, vpp: int) -> Chunks:
    chunks = parse_layout(layout)
    if len(chunks) != pp * vpp:
        raise ValueError(
            f"{LAYOUT} describes {len(chunks)} chunks, but pp({pp}) * vpp({vpp}) = {pp * vpp}: set "
            "virtual_pipeline_model_parallel_size to the chunks on each pipeline rank"
        )
    flat = [name for chunk in chunks for name in chunk]
    if not flat or flat[0] != "embedding" or flat[-1] != "loss":
        raise ValueError(f"{LAYOUT} must begin with the embedding (E) and end with the loss (L)")
    if flat.count("embedding") > 1 or flat.count("loss") > 1:
        raise ValueError(f"{LAYOUT} names the embedding or the loss twice")
    if flat.count("decoder") != layers:
        raise ValueError(f"{LAYOUT} has {flat.count('decoder')} layers (t), the model has {layers}")
    return tuple(
        tuple(chunks[chunk * pp + stage].count("decoder") for chunk in range(vpp)) for stage in range(pp)
    )


def parse_layout(layout: Any) -> list[list[str]]:
    """The chunks that a layout describes, in layer order. ValueError if it cannot be read.

    layout: a list of lists of names, or text as Megatron-Core has it: "Ett|(tt|)*6tL", | between chunks.
    """
    if isinstance(layout, str):
        text = layout.replace(",", "").replace(" ", "")
        for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        unknown = sorted(set(text) - set(_NAMES) - {"|"})
        if unknown:
            raise ValueError(f"{LAYOUT}={layout} has {unknown[0]!r}: known are E, t, m, L and |")
        return [[_NAMES[letter] for letter in chunk] for chunk in text.split("|")]
    if not isinstance(layout, list) or not all(isinstance(chunk, list) for chunk in layout):
        raise ValueError(f"{LAYOUT} is neither text such as 'Ett|tt|ttL' nor a list of lists")
    chunks = [[str(name).strip().lower() for name in chunk] for chunk in layout]
    for name in (name for chunk in chunks for name in chunk):
        if name not in _NAMES.values():
            raise ValueError(f"{LAYOUT} names {name!r}: known are {', '.join(_NAMES.values())}")
    return chunks


def _layout_text(layers: int, chunks: int) -> str:
    """A layout whose chunks differ by one layer at most; the ends, which hold more, get the smaller share."""
    small, larger = divmod(layers, chunks)
    counts = [small] * chunks
    for index in sorted(range(chunks), key=lambda i: (i in (0, chunks - 1), i))[:larger]:
        counts[index] += 1
    return "|".join(
        "E" * (index == 0) + "t" * count + "L" * (index == chunks - 1) for index, count in enumerate(counts)
    )
