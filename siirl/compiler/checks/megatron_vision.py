"""What must hold for a Megatron model that sees images, besides what must for its decoder. Pure."""

from collections.abc import Iterator

from siirl.compiler.checks.megatron_checks import MegatronModel
from siirl.compiler.memory.estimate import ModelShape
from siirl.errors import UserError
from siirl.parallel.pipeline_layers import FIRST, split_layers


def layers_beside_tower(model: MegatronModel, layers: int) -> Iterator[UserError]:
    """The first layers, so many of them, to which the tower adds inner states, are where the tower is."""
    shape, dims = model.shape, model.dims
    if not (layers and isinstance(shape, ModelShape)):
        return
    try:
        here = split_layers(shape.layers, dims.pp, dims.vpp, model.options)[0][0]
    except ValueError:  # which is reported by itself
        return
    if here >= layers:
        return
    first = f"the first stage of pp({dims.pp})" + f" has {dims.vpp} chunks, whose first one" * (dims.vpp > 1)
    key = f"{model.sizes}.pipeline_model_parallel_size"
    fits = [pp for pp in range(1, dims.pp + 1) if shape.layers % pp == 0 and shape.layers // pp >= layers]
    yield model.wrong(
        f"{first} holds {here} of the {shape.layers} layers, and the vision tower, which is there, adds its "
        f"inner states to the first {layers} (deepstack). Set {key}={'|'.join(map(str, reversed(fits)))}"
        + f" and {model.sizes}.virtual_pipeline_model_parallel_size=null" * (dims.vpp > 1)
        + f", without {FIRST} and its like."
    )
