"""Engines, and the links that carry weights from trainers to them.

Weight links (`siirl/engines/links.py`) copy the trainer's weights into a rollout engine: each tensor is
checked (name, shape, dtype, coverage), the sync is versioned and timed, and a failed one stops the run. To
ranks that hold no trainer tensors travel in buckets (`link_buckets.py`). The first sync announces each by a
header, and what it announced is the plan of the next ones: before a sync all ranks compare its digest, and
what the trainer says of its export; then only bytes travel, with a trailer that names the plan or says why
the sender gave up. All ranks take part in all broadcasts of a plan, so a rank that fails midway is heard of
at the end and not by a deadline. With `rollout.weight_link=spread` nothing is gathered (FSDP2 trainers of
up to four ranks, none of which samples): the first rank says before the first sync which rows each of them
has (`link_rows.py`), and that makes the plan. They take turns with the buckets, each in a group with the
ranks that hold no trainer, and the pieces are put together where they arrive, parts of fused tensors too.
Of any plan four buckets are in flight; two that were announced travel as one. A trainer that is alone, and
has its model whole on its rank, fills each by one copy with the cast from where it trains (`LiveWeights`).
"""
