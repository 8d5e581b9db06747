"""The way of weights: from a trainer to an engine, and into the engine's process.

`bucket.py` packs tensors side by side, for all who send any. A link (`link.py`) copies the trainer's weights
into a rollout engine: each tensor is checked (name, shape, dtype, coverage, `target.py`), the sync is
versioned and timed, and a failed one stops the run. To ranks that hold no trainer tensors travel in buckets.
The first sync announces each by a header, and what it announced is the plan of the next ones
(`planned_sync.py`): before a sync all ranks compare its digest, and what the trainer says of its export; then
only bytes travel, with a trailer that names the plan or says why the sender gave up. All ranks take part in
all broadcasts of a plan, so a rank that fails midway is heard of at the end and not by a deadline. Of a plan
four buckets are in flight; two that were announced travel as one. A trainer that is alone, and has its model
whole on its rank, fills each by one copy with the cast from where it trains (`bucket.py`). Or a folder gets
what has changed (`folder.py`).

From its second sync on a link goes by shards where the fullest link then has fewer bytes (`shard_way.py`):
each rank gets what it keeps from who has it, and no tensor is whole on the way. `shard_plan.py` says who
sends what to whom, `shard_sync.py` does it for the live rectangles of a training engine. Engines that keep
whole tensors get these as ever. vLLM's loaders want whole tensors, too, but once its places are known
(`ParameterMap`) each worker says which rectangles of the files' tensors land in its parameters, those of
fused layers included, and parts of them are written there (`PartWriter`). Adapters, merged ones also, and
engines that do not know their places go the other way.

An engine in a process of its own reads chunks of memory that it maps (`shared_buffer.py`): its own loaders
take each tensor (`engine_loader.py`), or, from the second update on, it writes them where those put them
(`in_place.py`). A copy for a process that takes the place of a lost one is in host memory (`kept.py`).

An opponent's link has a pool of versions as its source (`opponent_pool.py`): those that a trainer had before.
"""
