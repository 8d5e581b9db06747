"""What torch sees of this machine, as one JSON line: for a process of its own, as it may crash."""

import importlib.util
import json


def main() -> None:
    import torch

    kernel = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    told = {
        "cuda": torch.version.cuda,
        "kernel": kernel,
        "devices": [[device.name, device.total_memory] for device in devices],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
