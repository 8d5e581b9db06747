"""One of two processes of a machine that meet through gloo; its arguments: rank, port, deadline in s."""

import sys
from datetime import timedelta


def main() -> int:
    """Exit code 0 if the sum over both processes arrived."""
    import torch
    import torch.distributed as dist

    from siirl.launch.rendezvous import store_of_ranks

    rank, port, deadline = int(sys.argv[1]), int(sys.argv[2]), timedelta(seconds=float(sys.argv[3]))
    store = store_of_ranks("127.0.0.1", port, rank, 2, deadline)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=deadline)
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return 0 if numbers.item() == 3.0 else 1


if __name__ == "__main__":
    sys.exit(main())
