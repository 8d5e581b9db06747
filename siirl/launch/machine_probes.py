"""What is tried in a process of its own, as it may crash or hang: `torch`; `gloo RANK PORT DEADLINE_S`."""

import importlib.util
import json
import sys
from datetime import timedelta


def torch_here() -> int:
    """What torch sees of this machine, as one JSON line."""
    import torch

    kernel = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    told = {
        "cuda": torch.version.cuda,
        "kernel": kernel,
        "devices": [[device.name, device.total_memory] for device in devices],
    }
    print(json.dumps(told))
    return 0


def one_of_two(rank: int, port: int, deadline: timedelta) -> int:
    """One of two processes that meet through gloo; 0 if the sum over both arrived."""
    import torch
    import torch.distributed as dist

    from siirl.launch.rendezvous import store_of_ranks

    store = store_of_ranks("127.0.0.1", port, rank, 2, deadline)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=deadline)
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return 0 if numbers.item() == 3.0 else 1


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        sys.exit(torch_here())
    sys.exit(one_of_two(int(sys.argv[2]), int(sys.argv[3]), timedelta(seconds=float(sys.argv[4]))))
