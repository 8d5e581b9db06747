"""Rollout engines: vLLM and SGLang in processes of their own, transformers as the plain reference.

The engines of vLLM and SGLang (`siirl/engines/rollout/served/served_rollout.py`) are clients: the engine
runs in a process that the first rank of each shard starts (`siirl/engines/rollout/served/`:
`engine_process.py`, `server.py`), and talks to it over a socket pair in typed messages (`messages.py`). Our
torch.distributed and the engine's never meet, a dead or silent engine is noticed by whoever waits for it,
and `native*.py` alone know its interfaces. Weights go through vLLM's weight-transfer interface with an
engine of ours, and through SGLang's update interface with a loader of ours; for both a bucket is a piece of
shared memory, of the GPU or of the host. SGLang's scheduler is a further process, where
`native_scheduler.py` has it draw by seeds (`served/draws.py`). `sleep` discards the weights and says so
(version -1), so the next sync sends them again. vLLM's scheduler, where it is in the engine's process and
keeps no statistics, is asked for what a step sampled as a whole: tokens and log-probs wait in lists until
their response ends (`vllm/native_steps.py`), past vLLM's cutting and streaming of each token. A request that
runs asks it for slots of the KV cache once a block; what it decides is the same.

**Weights in place** (`rollout.replace_weights`, `engines/weights/in_place.py`). In a process's first update
vLLM's loaders take each tensor. Meanwhile they are run once more on tensors without values, and which
elements each copies whereto is noted (`vllm/native_places.py`); then the parameters are held against what
came, element by element, and every element must belong to one piece (rows of padding are remembered). From
there on the worker fills a buffer of 512 MiB that stays mapped, by one fused copy with the cast
(`weights/bucket.py`), and the process writes it into its parameters by another: into the memory that
kernels and CUDA graphs read, as after a load. That this is still the memory, in the same layout, is checked
before each sync. Of each buffer a sample of the bytes is added up on both sides and a piece is read again;
all of them with `in_place_checked`; each row must have come once. The worker tells the process to begin and
goes on: it finds the weights and fills the buffer meanwhile, and hears how the begin went after the first
write, which the process refuses if that failed. The last write is the end of the update; what the prefix
cache has of older weights is dropped after its answer (`NativeEngine.rest`), before anything can be
sampled. An engine of several ranks does all that in each of its workers, for its own share of each tensor,
from the buffer of its rank; if one cannot, none does. Where something cannot be followed (weights that are
computed from those that come, experts in another order than in the files) the log says why, once, and each
update goes through the loaders. On a CPU, whose kernels read packed copies, layers are packed again after
the last write. An FSDP2 trainer that has a model whole on its rank gives its weights where they are trained
(`LiveWeights`), without a gather, a cast or a copy per tensor. What is kept for an engine that comes back
(`weights/kept.py`) is copied then while the engine generates: the trainer waits for that before its weights
change. Weights take turns with the halves of the buffer: the process writes one while the other is filled,
and is done with it before its turn comes again; each half is copied to host memory meanwhile, on a stream
of its own. A buffer that has room for the whole model (`rollout.weight_buffer_gib`) is filled once and
written once, and what lies in it is copied to host memory when the engine samples, or when its process is
lost: the buffer is the worker's.

**Engines come back** (`siirl/engines/rollout/served/recovery.py`). The state of an engine follows from what
it was told: weights, adapters, sleep, and the requests without an answer. `RecoveringEngine`, which stands
between the worker and the process, notes that (`journal.py`: events of a type each, from which what is
undone drops out) and says it again to a new process when one is lost, whatever it was doing: no phase is
a special case, and nobody above is told. The weights for it lie in host memory (`weights/kept.py`): no
link is asked, which would need the trainers, who are elsewhere in the step. On a CPU that memory is the
worker's own; on a GPU each bucket is copied while the engine loads it. A process is lost when it ends,
when no heartbeat comes for 20 s of waiting (it beats once a second from a thread of its own,
`server.py`), or when its engine makes no progress for `trainer.deadline_s`. The first start is not
tried again. An engine ends with its worker: an attempt that follows another starts new ones.

**Streams.** An engine is a stream: `RolloutEngine.stream()` takes requests while others run and answers each
as it completes. `generate` is a stream of its own that is drained, written once in the base class. vLLM's
process admits requests between its steps and caches prefixes. The HF engine, the plain reference for small
models, runs in waves: what has come in is decoded together (`WaveStream`), whose prompts are read anew in
each turn. Batching between decode steps and slots that kept
what they had read were worth 1.1x in conversations on a GPU, and took 690 lines: who wants throughput takes
vLLM, on a CPU too. `siirl/agents/stream_client.py` turns a stream into the awaitable policy of an episode.
`remote.py` serves a stream to other ranks over TCP, behind a random token of the run; `openai_endpoint.py`
makes an engine of a chat service, whose "tokens" are characters from which the messages can be read back.

What crosses a socket is a `Message` (`channel.py`): a struct for each kind, which holds `Request` and
`Completion` (`siirl/data/completions.py`) as they are. A field that one of these gets reaches vLLM's process,
other ranks, agents and rows without another line.
"""
