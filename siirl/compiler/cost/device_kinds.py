"""What a device does in a second: the constants of the cost model, each with the files it was fitted to.

benchmarks/fit_costs.py prints the fitted values; a test holds the table against it.
"""

from dataclasses import dataclass, replace

from siirl.errors import ConfigError
from siirl.spelling import suggest


@dataclass(frozen=True)
class Constant:
    """How long an amount of one kind of work takes."""

    value: float
    unit: str
    """A rate ends with "/s"; others are seconds each."""
    what: str
    """As reports name the work."""
    source: str
    """The files in benchmarks/results that it was fitted to, or why there is none."""

    def seconds(self, amount: float) -> float:
        """The time of an amount."""
        return amount / self.value if self.unit.endswith("/s") else amount * self.value


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device: its data sheet, and its constants where it was measured."""

    name: str
    matmul: float
    """Dense bf16 FLOP/s of the data sheet."""
    bandwidth: float
    """Bytes/s of its memory, by the data sheet."""
    gib: float
    """Of memory."""
    constants: dict[str, Constant]
    scaled_from: str = ""
    """The device that the constants were measured on; empty: this one."""
    flops_of_a_byte: float = 180
    """A product of weights with more rows than so many halves of this is bound by arithmetic, not by the
    weights that it reads: FLOPs in the time in which a byte is read."""


_PASSES = "grpo_gpu_A_1, B_1, A_4, A_4_tp2, backends_gpu_speed_1.7B_1_tp1, 1.7B_4_tp4, 1.7B_1_shared"
_ROLLOUTS = "grpo_gpu_A_1, B_1, A_4, A_4_tp2, backends_gpu_vllm_1.7B_1_tp1"
_SHARED = "backends_gpu_speed_1.7B_1_shared"
_NONE = "not measured: 400 Gbit/s for each device"
_NCCL = "not measured: NCCL's own table of latencies, of a tree with LL128 (src/graph/tuning.cc)"
_NONE_CPU = "not measured"
_H200 = {
    "matmul": Constant(708e12, "FLOP/s", "matrix products", _PASSES),
    "experts": Constant(4.61e10, "bytes/s", "tokens to experts", "experts_gpu_30B-A3B-8_2_ep2"),
    "attention": Constant(162e12, "FLOP/s", "attention", _PASSES),
    "activations": Constant(2.01e12, "bytes/s", "activations", _PASSES),
    "activations_compiled": Constant(6.66e12, "bytes/s", "activations of compiled layers", _SHARED),
    "link": Constant(
        229e9, "bytes/s", "communication", "backends_gpu_speed_1.7B_4_tp4, grpo_gpu_A_4, A_4_tp2"
    ),
    "network": Constant(50e9, "bytes/s", "communication between machines", _NONE),
    "host": Constant(49.9e9, "bytes/s", "to the host and back", "memory_checkpoint_gpu_A_1"),
    "memory": Constant(3.23e12, "bytes/s", "weights and KV cache", _ROLLOUTS),
    "decode_layer": Constant(23.2e-6, "s of a layer and token", "kernels of each token", _ROLLOUTS),
    "decode_exchange": Constant(44.8e-6, "s of an all-reduce", "all-reduces", "grpo_gpu_A_4_tp2"),
    "decode_hop": Constant(8.5e-6, "s of a message between machines", "all-reduces", _NCCL),
    "sync_tensor": Constant(430e-6, "s of a tensor", "loading tensors", _ROLLOUTS),
    "sync_ranks": Constant(0.0813, "s of a sync", "synchronizing ranks", "grpo_gpu_A_4, A_4_tp2"),
    "wake": Constant(0.272, "s of a rollout", "waking and sleeping", "grpo_gpu_A_1, B_1, A_4, A_4_tp2"),
    "slowest": Constant(
        0.0115, "s of a rollout's second, for each doubling", "the slowest rank", "grpo_gpu_A_4, A_4_tp2"
    ),
}
"""Measured on H200s with torch 2.11 and vLLM 0.24; tokens to experts on H100s."""

_ARITHMETIC = ("matmul", "attention")
_MEMORY = ("activations", "activations_compiled", "memory")
_CPU = "what_if_cpu"
CPU = DeviceKind(
    "cpu",
    5e10,
    1e10,
    16.0,
    {
        "matmul": Constant(1.1e11, "FLOP/s", "matrix products", _CPU),
        "experts": Constant(1e10, "bytes/s", "tokens to experts", _NONE_CPU),
        "attention": Constant(1e10, "FLOP/s", "attention", _CPU),
        "activations": Constant(1e12, "bytes/s", "activations", _NONE_CPU),
        "activations_compiled": Constant(1e12, "bytes/s", "activations of compiled layers", _NONE_CPU),
        "link": Constant(1e9, "bytes/s", "communication", _NONE_CPU),
        "network": Constant(1e9, "bytes/s", "communication between machines", _NONE_CPU),
        "memory": Constant(4.49e09, "bytes/s", "weights and KV cache", _CPU),
        "decode_layer": Constant(0.000406, "s of a layer and token", "kernels of each token", _CPU),
        "decode_exchange": Constant(1e-3, "s of an all-reduce", "all-reduces", _NONE_CPU),
        "decode_hop": Constant(1e-3, "s of a message between machines", "all-reduces", _NONE_CPU),
        "sync_tensor": Constant(0.000148, "s of a tensor", "loading tensors", _CPU),
        "sync_ranks": Constant(0.02, "s of a sync", "synchronizing ranks", _NONE_CPU),
        "wake": Constant(0.0, "s of a rollout", "waking and sleeping", _NONE_CPU),
        "slowest": Constant(0.0, "s of a rollout's second, for each doubling", "the slowest rank", _NONE_CPU),
        "launch": Constant(0.00244, "s of a layer's pass over a micro-batch", "micro-batches", _CPU),
    },
    flops_of_a_byte=5,
)
"""A core of a machine without a GPU, in float32: tiny models, whose operations take longer to call than to
compute. Only the proportions count: times are those of a run on the user's machine (see calibration.py)."""

_SHEETS = {
    # dense bf16 FLOP/s, bytes/s and GiB of memory, by NVIDIA's data sheets
    "h100": (989e12, 3.35e12, 79.6),
    "h800": (989e12, 3.35e12, 79.6),
    "h20": (148e12, 4.0e12, 95.6),
    "a100": (312e12, 2.04e12, 79.3),
    "a800": (312e12, 2.04e12, 79.3),
    "b200": (2250e12, 8.0e12, 178.0),
}
H200 = DeviceKind("h200", 989e12, 4.8e12, 139.8, _H200)


def scaled(name: str, measured: DeviceKind = H200) -> DeviceKind:
    """A device of the table of data sheets: the H200's constants, by what the sheets say of both."""
    matmul, bandwidth, gib = _SHEETS[name]
    factors: dict[str, float] = dict.fromkeys(_ARITHMETIC, matmul / H200.matmul)
    factors |= dict.fromkeys(_MEMORY, bandwidth / H200.bandwidth)
    constants = {
        key: replace(constant, value=constant.value * factors.get(key, 1.0))
        for key, constant in measured.constants.items()
    }
    return DeviceKind(name, matmul, bandwidth, gib, constants, H200.name)


DEVICES = {"h200": H200} | {name: scaled(name) for name in _SHEETS}
"""Name -> kind."""


def device_kind(name: str) -> DeviceKind:
    """The kind of a name, as in "h200" or "NVIDIA H200". ConfigError for one that is not known."""
    words = name.lower().replace("-", " ").split()
    found = next((DEVICES[word] for word in words if word in DEVICES), None)
    if found is None:
        raise ConfigError(
            f"--device {name}: nothing is known of it: no step was measured on it, and its data sheet is not "
            f"in the table (siirl/compiler/cost/device_kinds.py). {suggest(name, DEVICES)} "
            f"Known: {', '.join(DEVICES)}."
        )
    return found


def chosen_device(named: str | None, here: str | None) -> tuple[DeviceKind, list[str]]:
    """The kind that a prediction is for, and what is to be said of the choice.

    named: by the user. here: the name of this machine's GPUs, if it has some.
    """
    if named is not None:
        return device_kind(named), []
    if here is None:
        return H200, ["devices are H200s: no GPU is here to ask (--device says another kind)"]
    try:
        return device_kind(here), []
    except ConfigError:
        return H200, [f"devices are H200s: nothing is known of those here ({here})"]
