"""What clients of Tinker's API send and read: forward_backward and sample in protobuf, the rest in JSON.

The fields are those that the client `tinker` 0.38.0 sends and reads; there is no public schema. Others are
passed over, as protobuf does.
"""

import functools
import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from siirl.data.completions import SamplingParams
from siirl.engines.train.base import AdamStep
from siirl.service.commands import Cells, Datum, Refused, Sample, Sampled, Trained

PROTOBUF = "application/x-protobuf"
_SCHEMA = {
    "SparseCsr": "values=1:bytes crow_indices=2:bytes col_indices=3:bytes",
    "Tensor": "dense=1:bytes sparse_csr=2:SparseCsr dtype=3:int32 shape=4:int64*",
    "EncodedTextChunk": "tokens=1:bytes",
    "Other": "",
    "Chunk": "encoded_text=1:EncodedTextChunk image=2:Other dmel=3:Other",
    "InputEntry": "key=1:string value=2:Tensor",
    "Datum": "model_input=1:Chunk* loss_fn_inputs=2:InputEntry*",
    "NumberEntry": "key=1:string value=2:double",
    "OptionValue": "number=1:double text=2:string",
    "OptionEntry": "key=1:string value=2:OptionValue",
    "ForwardBackwardRequest": "model_id=1:string seq_id=2:int32 data=3:Datum* loss_fn=4:string "
    "loss_fn_config=5:NumberEntry* forward_only=6:bool loss_fn_config_v2=7:OptionEntry*",
    "BatchedTensor": "data=1:bytes offsets=2:bytes dtype=3:int32 trailing_shape=4:int64*",
    "FieldEntry": "key=1:string value=2:BatchedTensor",
    "ArrayRecord": "type_tag=1:string fields=2:FieldEntry* num_datums=3:int64",
    "ForwardBackwardOutput": "loss_fn_output_type=1:string loss_fn_outputs=2:ArrayRecord* "
    "metrics=3:NumberEntry*",
    "TopkLogprobs": "token_ids=1:bytes logprobs=2:bytes k=3:int32 length=4:int32",
    "SampledSequence": "stop_reason=1:int32 tokens=2:bytes logprobs=3:bytes "
    "topk_sampled_logprobs=4:TopkLogprobs",
    "PromptAltTokens": "tokens=1:Tensor logprobs=2:Tensor",
    "SampleResponse": "sequences=1:SampledSequence* prompt_logprobs=2:bytes "
    "topk_prompt_logprobs=3:TopkLogprobs target_prompt_logprobs=5:Tensor prompt_alt_tokens=6:PromptAltTokens",
}
"""Message -> its fields, name=number:type, * for several. A map is a list of entries; an enum a number."""
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _ONE, _SEVERAL = 11, 1, 3
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.float32, _INT64: np.int64, 3: np.int32}
_STOP, _LENGTH = 0, 1
MOST_NUMBERS = 1 << 24
"""Of one tensor that is sent as a sparse one."""
MOST_SAMPLES = 1024
"""Of one prompt."""
MOST_TOP = 128
"""Words at a token whose log-probs are told."""
NOT_THERE = -99999.0
"""What the client takes for no log-prob."""
_NUMBERS_OF_WORDS = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
_ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""What the client's AdamParams have where nothing is set."""


@functools.cache
def messages() -> dict[str, Any]:
    """Name -> class of the protobuf messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="siirl/service.proto", package="siirl", syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, _, rest = text.partition("=")
            number, _, kind = rest.partition(":")
            label, kind = (_SEVERAL if kind.endswith("*") else _ONE), kind.rstrip("*")
            told = {"type": _TYPES[kind]} if kind in _TYPES else {"type": _MESSAGE}
            made = message.field.add(name=field, number=int(number), label=label, **told)
            if kind not in _TYPES:
                made.type_name = f".siirl.{kind}"
            elif label == _SEVERAL:
                made.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"siirl.{name}")) for name in _SCHEMA
    }


class TrainingRequest:
    """A request of forward_backward, of which only the head has been looked at. Refused if it is none."""

    def __init__(self, body: bytes) -> None:
        self._message = messages()["ForwardBackwardRequest"]()
        try:
            self._message.ParseFromString(body)
        except Exception as error:  # the edge to what others sent; DecodeError is not the only one
            raise Refused(f"the body is no request of forward_backward: {error}") from error
        self.model, self.number = str(self._message.model_id), int(self._message.seq_id)
        self.loss, self.forward_only = str(self._message.loss_fn), bool(self._message.forward_only)

    def options(self) -> dict[str, float | str]:
        """loss_fn_config."""
        found: dict[str, float | str] = {one.key: one.value for one in self._message.loss_fn_config}
        for one in self._message.loss_fn_config_v2:
            found[one.key] = one.value.text if one.value.HasField("text") else one.value.number
        return found

    def data(self) -> list[Datum]:
        """Refused for what cannot be read, or trained on."""
        return [
            Datum(
                [token for chunk in one.model_input for token in _tokens(chunk, f"datum {number}")],
                {x.key: _array(x.value, f"datum {number}: {x.key}") for x in one.loss_fn_inputs},
            )
            for number, one in enumerate(self._message.data)
        ]


def _tokens(chunk: Any, where: str) -> list[int]:
    if not chunk.HasField("encoded_text"):
        raise Refused(f"{where} has a part that is no text: images and sounds are not trained on here")
    data = chunk.encoded_text.tokens
    if len(data) % 4:
        raise Refused(f"{where}: {len(data)} bytes of tokens are no int32 numbers")
    return np.frombuffer(data, np.int32).tolist()


def _array(tensor: Any, where: str) -> np.ndarray:
    shape = tuple(tensor.shape)
    kind = _DTYPES.get(tensor.dtype)
    if kind is None:
        raise Refused(f"{where} has dtype {tensor.dtype}: float32, int64 and int32 are read")
    if min(shape, default=0) < 0 or len(shape) > 2 or math.prod(shape) > MOST_NUMBERS:
        raise Refused(f"{where} has shape {list(shape)}: [N] and [N, K] are read")
    try:
        if not tensor.HasField("sparse_csr"):
            return np.frombuffer(tensor.dense, kind).reshape(shape or -1)
        sparse, found = tensor.sparse_csr, np.zeros(shape, kind)
        starts = np.frombuffer(sparse.crow_indices, np.int64)
        row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        found[row, np.frombuffer(sparse.col_indices, np.int64)] = np.frombuffer(sparse.values, kind)
        return found
    except (ValueError, IndexError) as error:
        raise Refused(f"{where} of shape {list(shape)} cannot be read: {error}") from error


def sample_of(asked: dict, source: str, longest: int, stops: Sequence[int]) -> Sample:
    """A request for samples from `source`. longest: tokens of a sequence. stops: where it names none."""
    if asked.get("record_stability_info"):
        raise Refused(
            "record_stability_info is not served: stable_reinforce, which reads it, has no public definition "
            "here. Choose another loss (in recipes loss_fn=importance_sampling)"
        )
    prompt: list[int] = []
    for chunk in asked["prompt"]["chunks"]:
        if "tokens" not in chunk:
            raise Refused("the prompt has a part that is no text: images are not served")
        prompt += [int(token) for token in chunk["tokens"]]
    params, count = asked.get("sampling_params") or {}, int(asked.get("num_samples", 1))
    if not 1 <= count <= MOST_SAMPLES:
        raise Refused(f"num_samples {count}: 1 to {MOST_SAMPLES} are served")
    stop = params.get("stop")
    asked_stops = [stop] if isinstance(stop, str) else stop or []
    ids = tuple(int(one) for one in asked_stops if not isinstance(one, str))
    most, room = params.get("max_tokens"), longest - len(prompt)
    if not prompt or room < 1:
        raise Refused(f"the prompt has {len(prompt)} tokens: 1 to {longest - 1} are served")
    seed = params.get("seed")
    found = SamplingParams(
        max_tokens=room if most is None else min(int(most), room),
        temperature=float(params.get("temperature", 1.0)),
        top_k=int(params.get("top_k", -1)),
        top_p=float(params.get("top_p", 1.0)),
        stop_token_ids=(*stops, *ids),
        ignore_eos=stop == [],
    )
    texts = tuple(one for one in asked_stops if isinstance(one, str) and one)
    seed = secrets.randbits(62) if seed is None else int(seed)
    of_prompt, of_samples, drawn = words = [int(asked.get(name) or 0) for name in _NUMBERS_OF_WORDS]
    if not all(0 <= one <= MOST_TOP for one in words):
        raise Refused(f"{', '.join(_NUMBERS_OF_WORDS)} {words}: 0 to {MOST_TOP} are served")
    told, last, targets = bool(asked.get("prompt_logprobs")), asked.get("prompt_logprobs_last_n"), None
    if last is not None and not (told and 1 <= (last := int(last)) < len(prompt)):
        raise Refused(
            f"prompt_logprobs_last_n {last} of {len(prompt)} tokens: 1 to {len(prompt) - 1} are served, with "
            "prompt_logprobs"
        )
    if asked.get("target_prompt_logprobs") is not None:
        targets = _targets(asked["target_prompt_logprobs"], len(prompt) - 1)
    return Sample(
        source, prompt, found, count, seed, texts, told, of_prompt, of_samples, last, drawn, targets
    )


def _targets(asked: dict, num_rows: int) -> Cells:
    """target_prompt_logprobs, dense or in compressed rows. Refused for what is no such tensor."""
    if asked["dtype"] != "int64":
        raise Refused(f"target_prompt_logprobs has dtype {asked['dtype']!r:.20}: ids are int64")
    values, shape = np.asarray(asked["data"], np.int64).reshape(-1), tuple(map(int, asked["shape"]))
    starts, columns = (asked.get(f"sparse_{name}_indices") for name in ("crow", "col"))
    if len(shape) != 2 or shape[0] != num_rows:
        raise Refused(
            f"target_prompt_logprobs has shape {list(shape)}: [{num_rows}, K], a row for each token but one"
        )
    if starts is None:
        good, found = len(values) == shape[0] * shape[1], Cells(values, (shape[0], shape[1]))
    else:
        found = Cells(values, (shape[0], shape[1]), *(np.asarray(one, np.int64) for one in (starts, columns)))
        ends = (len(found.starts), found.starts[0], found.starts[-1])  # type: ignore[arg-type, index]
        good = ends == (num_rows + 1, 0, len(values)) and (np.diff(found.starts) >= 0).all()  # type: ignore[arg-type]
        good = good and found.columns.shape == values.shape  # type: ignore[union-attr]
    if not good or values.min(initial=0) < -1 or values.max(initial=-1) < 0:
        raise Refused("target_prompt_logprobs names no ids, negative ones, or not as many as its shape says")
    if (most := np.bincount(found.rows[values >= 0]).max()) > MOST_TOP:
        raise Refused(f"target_prompt_logprobs names {most} ids at a token: up to {MOST_TOP} are served")
    return found


def adam_step(params: dict) -> AdamStep:
    """The adam_params of an optim_step. Refused for what is no number from 0 on."""
    given = {name: value for name, value in params.items() if value is not None}
    if unknown := sorted(given.keys() - _ADAM.keys()):
        raise Refused(f"adam_params has {', '.join(unknown)}, which is not served")
    values = [float(value) for value in (_ADAM | given).values()]
    if not (all(value >= 0 for value in values) and values[1] < 1 and values[2] < 1):
        raise Refused(f"adam_params {given}: numbers from 0 on, betas below 1")
    return AdamStep(*values)


def trained_bytes(found: Trained) -> bytes:
    """The answer to forward_backward."""
    out = messages()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = out.loss_fn_outputs.add(num_datums=len(found.log_probs))
    parts = [np.ascontiguousarray(one, np.float32) for one in found.log_probs]
    offsets = np.cumsum([0, *(one.nbytes for one in parts)], dtype=np.int64)
    trailing = parts[0].shape[1:] if parts else ()
    entry = record.fields.add(key="logprobs")
    entry.value.data, entry.value.offsets = b"".join(one.tobytes() for one in parts), offsets.tobytes()
    entry.value.dtype = _FLOAT32
    entry.value.trailing_shape.extend(trailing)
    out.metrics.add(key="loss:sum", value=found.loss)
    return out.SerializeToString()


def sampled_bytes(found: Sampled) -> bytes:
    """The answer to a request for samples."""
    out = messages()["SampleResponse"]()
    for tokens, log_probs, stopped in found.sequences:
        out.sequences.add(
            stop_reason=_STOP if stopped else _LENGTH,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=_floats(log_probs),
        )
    for sequence, top in zip(out.sequences, found.top_samples, strict=False):
        sequence.topk_sampled_logprobs.CopyFrom(_top(top.words, top.log_probs))
    if found.prompt_log_probs:
        out.prompt_logprobs = _floats(found.prompt_log_probs)
    for top in found.top_prompt:  # nothing is said of the first token, nor of others that were not asked for
        before = (((len(found.prompt_log_probs) or len(top.words) + 1) - len(top.words), 0), (0, 0))
        log_probs = np.pad(top.log_probs, before, constant_values=NOT_THERE)
        out.topk_prompt_logprobs.CopyFrom(_top(np.pad(top.words, before), log_probs))
    for top in found.drawn_prompt:
        out.prompt_alt_tokens.tokens.CopyFrom(_tensor(_INT64, Cells(top.words, top.words.shape)))
        out.prompt_alt_tokens.logprobs.CopyFrom(_tensor(_FLOAT32, Cells(top.log_probs, top.words.shape)))
    for cells in found.targets:
        out.target_prompt_logprobs.CopyFrom(_tensor(_FLOAT32, cells))
    return out.SerializeToString()


def _tensor(dtype: int, cells: Cells) -> Any:
    made = messages()["Tensor"](dtype=dtype, shape=cells.shape)
    values = cells.values.astype(_DTYPES[dtype]).tobytes()
    if cells.starts is None or cells.columns is None:
        made.dense = values
        return made
    sparse = made.sparse_csr
    sparse.values, sparse.crow_indices, sparse.col_indices = (
        values,
        cells.starts.tobytes(),
        cells.columns.tobytes(),
    )
    return made


def _top(words: np.ndarray, log_probs: np.ndarray) -> Any:
    length, k = words.shape
    made = messages()["TopkLogprobs"](k=k, length=length, logprobs=_floats(log_probs))
    made.token_ids = words.astype(np.int32).tobytes()
    return made


def _floats(values: Sequence[float] | np.ndarray) -> bytes:
    return np.asarray(values, np.float32).tobytes()
