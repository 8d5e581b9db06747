"""From the workflow and its configuration to the plan. Pure: no torch, no device.

`compile_plan(dag, cfg, world_size)` in `siirl/compiler/compile.py` reads as its seven steps: read, resolve,
interact, prune, check, place, emit. The first three make a `Workflow` (`siirl/compiler/workflow.py`): the
graph, each node with its op and configuration, the interactions, and what follows from them (what is above
a node, which agents talk, whose adapters lie on whose base), computed once. It is read only; a pass that
changes something gives a new one. The standard library's graphlib orders the graph and finds its cycles.
What is decided, in this order:

1. **Ops.** Each node's op follows from its type and role (`siirl/dag/node_kinds.py`, `op_choice.py`), or is
   the user's function. What an op is stands in one row of a table (`siirl/dag/ops.py`): the fields that it
   reads and writes under the node's resolved configuration, the model and the services that it needs,
   whether it trains, changes rows, collects them in rounds or scores, and where its code is.
2. **Pruning.** A node whose fields nobody reads, and which has no side effect, is dropped: no reference
   model without KL, no old-log-prob pass when each batch is one mini-batch. This is not a special case; it
   follows from the declarations. Rows that nobody needs are left out likewise
   (`siirl/compiler/pruning.py`): the first mini-batch of a step is trained by the very weights that its
   old log-probs would be of, so the node becomes `later_old_log_prob`, which computes those of the others.
   The ratio of the first is exactly 1; with a pass it is 1 up to float rounding, as the pass cuts other
   micro-batches. The whole pass stays where anything but the agent's training reads the field (a KL in the
   reward, a node of the user's), where rows are filtered or drawn between the two, and where a loss picks
   tokens by it (`kl_cov`, whose slope jumps at a ratio of 1, then uses it for the picks alone in the first
   mini-batch). With several epochs the later ones use what the first optimizer step computed.
3. **Models.** One model worker for each (agent, role), on the ranks where its nodes are placed.
4. **Layouts.** How rows lie over ranks, from the real parallel groups of the node's backend.
   `split="group"` keeps the samples of a prompt together; `split="cost"` spreads rows so that every
   data-parallel rank computes about as much, and `split="prompt_cost"` does where a rank computes a prompt
   once for all samples of it that it has.
5. **Instructions.** In topological order, ties by declaration: loads, weight syncs before the rollout that
   uses them, a reshard wherever a field is needed in a layout in which it does not lie yet, the node, and
   frees after the last reader.

The plan is data (`siirl/compiler/plan.py`) and the same for every process and hash seed.

**Keys of speed and memory that nobody set** are chosen last, beside the plan (`siirl/compiler/choose.py`):
`choose(plan, configs, machine)` gives the plan in which nodes have the values as overrides, with the
reasons (`Plan.choices`). A draft (`choices.py`) weighs each by the memory estimate beside those before it.
Such keys say so in the schema (`Rule.auto`); their default is what holds where nothing can be chosen.

**Memory** is estimated from the plan, without a device. Each backend says what its model takes of a rank in
each of its activities (`siirl/compiler/memory/estimate.py`, of rollout engines `engine_memory.py`). A phase
of the step takes what its models take then, and what the idle ones keep (`phases.py`). The fullest phase is
held against the size of a device (`siirl/show/memory_text.py`).

**Time** is predicted from the plan, too (`siirl/compiler/cost`, docs/tuning.md). `work.py` says what a rank
has to do in a pass, a rollout or a weight sync, in amounts of a few kinds of work; `device_kinds.py` is the
table of how fast a device does each; `lengths.py` says how long rows are, and how many decode beside the
longest; `step_time.py` walks the instructions with a clock on every rank.
Amounts are linear in the constants, so these are fitted to measured steps by least squares
(`benchmarks/fit_costs.py`).
"""
