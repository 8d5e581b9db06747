"""The way of weights: from a trainer to an engine, and into the engine's process.

`bucket.py` packs tensors side by side, for all who send any. A link (`link.py`) copies the trainer's weights
into a rollout engine: each tensor is checked (name, shape, dtype, coverage, `target.py`), the sync is
versioned and timed, and a failed one stops the run. There are three ways. On its own rank an engine takes
what the trainer has there, or gathers. To ranks that hold no trainer tensors travel in buckets, each
announced by a header: in the first sync, and whenever weights are made to be sent (adapters, and those that
are merged). Or a folder gets what has changed (`folder.py`).

From its second sync on a link goes by shards where ranks hold no trainer, or an engine keeps less than all
(`shard_way.py`): each rank gets what it keeps from who has it, and no tensor is whole on the way.
`shard_plan.py` says who sends what to whom, and who sends on what several want; `shard_sync.py` does it for
the live rectangles of a training engine, in rounds in which all messages go at once. Engines that keep whole
tensors get these as ever. vLLM's loaders want whole tensors, too, but once its places are known
(`ParameterMap`) each worker says which rectangles of the files' tensors land in its parameters, those of
fused layers included, and parts of them are written there (`PartWriter`).

An engine in a process of its own reads chunks of memory that it maps (`shared_buffer.py`): its own loaders
take each tensor (`engine_loader.py`), or, from the second update on, it writes them where those put them
(`in_place.py`). A copy for a process that takes the place of a lost one is in host memory (`kept.py`).

An opponent's link has a pool of versions as its source (`opponent_pool.py`): those that a trainer had before.
"""
