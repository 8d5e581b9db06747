"""Model FLOPs utilisation: FLOPs of the model over what the device could do in the same time."""

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
