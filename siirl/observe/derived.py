"""Metrics from joined ones, as they do not add up over micro-batches and ranks; peaks of devices, for MFU."""

from collections.abc import Mapping


def derived_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Of joined values: <path>/std from mean and square_mean, <path>/ess from weight and weight_square.

    ess is the effective sample size as a share of the samples, (sum w)^2 / (n sum w^2). Source: Kong, "A note
    on importance sampling using standardized weights" (1992).
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        path, _, last = name.rpartition("/")
        if last == "square_mean" and f"{path}/mean" in values:
            found[f"{path}/std"] = max(value - values[f"{path}/mean"] ** 2, 0.0) ** 0.5
        if last == "weight_square" and f"{path}/weight" in values:
            found[f"{path}/ess"] = values[f"{path}/weight"] ** 2 / value if value else 0.0
    return found


_PEAK_BF16 = {
    # dense bf16 FLOP/s by NVIDIA's data sheets, without sparsity; the first name that matches counts
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its CUDA name; None where unknown, as for a CPU."""
    return next((peak for name, peak in _PEAK_BF16.items() if name.lower() in device_name.lower()), None)


def mfu(flops: float, seconds: float, num_devices: int, device_name: str) -> float | None:
    """`flops` of all devices in `seconds` as a share of their peak; None where the peak is unknown."""
    peak = peak_flops(device_name)
    if peak is None or seconds <= 0 or num_devices < 1:
        return None
    return flops / (seconds * num_devices * peak)
