"""Ops: one file each, and what they share.

A node that changes the number of rows (a rollout, a filter) starts a new row set; fields that later nodes
read are carried through it. Rows may then be anywhere and of any number: the next reshard computes its
route from exchanged counts.

Dynamic sampling samples until its batch is full. In the plan this is a region of the one instruction list:

    repeat   ranks    until dynamic_sampling has enough rows:
    load, weights, rollout, reshard, reward ...
    collect  ranks    dynamic_sampling keeps rows
    until
    run      ranks    dynamic_sampling gives the rows of one full batch

All ranks with a part in the region (`Repeat.ranks`) add up how many groups are kept, before each round, so
that they agree on whether there is another; there may be none, when the groups left over from the last step
are enough. What a round makes is freed within it. Rows leave it only through `Collect`, into a buffer of
the node on each rank (`siirl/data/buffer.py`), which is part of a checkpoint and is sharded anew when a
run resumes on other ranks. The nodes above the repeating one are the region
(`siirl/compiler/checks/sampling_rounds.py`): none of them may train or be above a second repeating node, and
none of their rows may be read past it, which the compiler checks. A node may still wait for one of them: it
waits for the end of the rounds.


With `rollout.max_lag` a rollout (`siirl/nodes/generate.py`) has a delay line; without, as in validation, its
completions are those of the engine's stream, drained. With it a step loads one batch of prompts and gives one
batch of groups, those that were begun first among the complete ones; the first step loads more, by
`rollout.surplus`, the last ones load nothing (`LoaderPlan.ahead`). In the rounds of dynamic sampling it gives
as many groups as the batch lacks (`siirl/dag_worker/rounds.py`), given to the shards in turn, so none stays
in the filter and ages there. So everything below it sees the batch of a step as ever. Before they load, its
ranks agree on how many batches: what the one that lacks most needs. What is in flight lies in
`RolloutsInFlight` (`siirl/nodes/rollouts_in_flight.py`), a buffer of the node and so part of a checkpoint:
prompts on all ranks of a shard, tokens on the first. The bound is held by waiting for what would be too old
in the next step. As each step gives one batch and at most L batches are behind it, that is never more than a
batch. With `rollout.stale=restart` a step does not wait, and the next one begins such groups anew; with
`drop` it gives them up first. Where the engine shares its device (`NodePlan.runs_in_background` is false),
the stream is paused at the end of a step: the engine forgets the requests, which are asked again as the ends
of prompts (`Request.start` says how many draws were made), so nothing of them is on the device while others
train. Else the stream stays open and gives way
(`RolloutEngine.stream`): `load_weights` and `generate` hold its requests and let them go on, and the engine's
process keeps what completes until its worker reads it. So the worker needs no second thread and the plan no
further instruction: the rank waits in its next SyncWeights while its engine decodes.

Interactions (`siirl/nodes/interaction.py`) go on in the same way: the delay line then holds episodes
(`EpisodesInFlight`, `siirl/nodes/episodes_in_flight.py`). An episode is a task of an event loop that outlives
a step. It asks a `ResumablePolicy`, which keeps what a paused turn had, waits for the next client, and asks
for the rest. Where nobody computes beside the engines (`NodePlan.runs_in_background`) the loop runs in a
thread all the time, and clients stay open until a validation or checkpoint; an engine and its client, or the
service that answers other ranks (`siirl/nodes/streams.py`), use the stream in turn (`StreamGuard`), so that
weights can come whenever they do. Else the loop runs in steps only, and streams, their clients and services
are opened anew in each step, so a rank that serves knows of no staleness. A driver takes back its own
requests of a shared stream (`Pause`, `siirl/engines/rollout/remote.py`). What both kinds share
(`in_flight.py`): who leaves, when a step may end, and the prompts that are loaded ahead. A checkpoint has the
transcript of each episode (`siirl/agents/transcript.py`): after a resume it is played again, and answered
from there.


- **Replay** (`rollout.name=replay`) is another op in the rollout's place, without a model: no engine, no
  link. Prompts come from the loader as ever; responses, log-probs and masks from files that any rollout
  recorded (`siirl/data/replayed_rows.py`). Each rank reads those of its own prompts, so the number of ranks
  may differ; prompt tokens are compared.
- **Rollout only** (`trainer.rollout_only`): nodes that train are pruned; rollouts and rewards are kept for
  themselves. A rollout still takes its weights from a training engine through its link: the compiler adds
  an actor that no node runs, without an optimizer, on the rollout's ranks. It reads `model.path`, hands its
  weights over once and stays offloaded. So every rollout engine works this way, and every sync is checked,
  at the price of one sharded copy in host memory.


Adding an op takes two files: its code in `siirl/nodes/<op>.py`, and its row in `siirl/dag/ops.py`. Worker,
compiler, memory estimate and reports ask the row and never the op's name. The code is a function of
`(context, rows)`: the context says which node, step, ranks and configuration it is called for; the services
that the row names in `needs` come by keyword, built once for each node by the table of
`siirl/nodes/services.py`. An op of a user's file has its row above it (`@declare_op`), which the compiler
reads from the source.
"""
