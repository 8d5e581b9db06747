"""Training engines: one contract, two strategies over what both use.

A training engine (`siirl/engines/train/base.py`) holds one model of one role: forward over rows, one
optimizer step on a mini-batch with a given loss, streamed export of weights under Hugging Face names,
offload, state. A rollout engine (`siirl/engines/rollout/base.py`) takes token ids and gives token ids. Both
contracts have a suite in `tests/contracts/` that every backend passes. What is known of a backend besides
its code, its class included, stands in `siirl/compiler/backends`; engines are built in
`siirl/engines/engine_registry.py`. Below `siirl/engines/train/` stand the strategies `fsdp` and `megatron`
in rooms of their own, over what both use: `adapters`, `attention`, `experts`, `packed` (rows as one stream
of tokens) and `vision`; what says how any engine steps, moves and shows its weights lies in the folder
itself.

- **Packing.** Rows have no padding inside the model: token-budget micro-batches of packed sequences with
  variable-length attention. All ranks run the same number of micro-batches; one without rows runs a dummy.
- **Shared prompts.** A prompt that several rows of a micro-batch have is computed once, in every pass:
  log-probs, values, scores and updates. `pack_rows` puts such prompts first, then the responses of each,
  then all other rows. On a GPU keys and values are gathered as whole rows read them, each response's behind
  its prompt's, and one call attends to them (`siirl/engines/train/attention/shared_attention.py`,
  `triton_kernels.py`); the copies are made again for the backward pass, and their gradients added up at the
  tokens, in fp32 and always in the same order. Where that is more than two keys for each token, as prompts
  are long beside responses, it would take memory without bound, as token budgets count a prompt once
  (`MOST_GATHERED`). There, and on a CPU, a response attends to itself and to its prompt in two calls,
  joined by the logarithms of their normalisers. Either way results are those of each row alone up to float
  rounding. Rows of a prompt come to one rank where that balances, and to one micro-batch where that fits
  and takes no more micro-batches than a cut would. It is done where it saves a tenth of the tokens
  (`sharing_pays`), as a second call costs about 6% of them. Not shared, as results would differ: sliding
  windows shorter than the longest row, experts, models of code of their own; nor in fp32 on a GPU. Both
  strategies share prompts in every layout: where ranks cut the stream of tokens (Megatron's context
  parallelism) each reads the keys of a response's prompt before those of the response.
- **Loss.** `loss_fn(outputs, rows, counts)` returns the micro-batch's share of the mini-batch loss,
  normalised by *global* counts. Shares add up, so the result does not depend on how rows are cut into
  micro-batches or spread over ranks.
- **One rank.** FSDP2 has nothing to reduce there, and would copy all gradients twice: they are added up at
  the parameters as each backward pass makes them (`siirl/engines/train/fsdp/fsdp_engine.py`), bit for
  bit the same.
- **Whole models.** A model of at most 2 GiB in fp32, or with `fsdp_config.reshard_after_forward=False`,
  stays whole on each rank (`stays_whole`, which the memory estimate and the cost model ask, too): weights
  are gathered once for all micro-batches of a mini-batch or pass, gradients added up whole in
  `reduce_dtype` and reduced in the last backward pass. The end of either frees the weights, which then may
  be written, sent or moved.
- **Attention sinks** (gpt-oss) are one more part that attention is joined from, a logit of each head
  without a value (`siirl/engines/train/attention/packed_attention.py`): the kernels' own backward, given the
  joined output and normaliser, is exact. In fp32 on a GPU, whose kernels do not say their normaliser, a key
  of zeros behind each row is the sink.
- **Gated delta nets** (`siirl/engines/train/attention/state_layers.py`) have a state in the place of keys and
  values. Two functions of transformers' modules are replaced, so that rows of a packed batch begin anew, or
  where their prompt ended.
- **Compiled layers** (`model.compile_layers`, `siirl/engines/train/layer_compiler.py`): linear layers of
  one input are one product, of their weights laid one under the other, if one of them has no more outputs
  than inputs, as keys and values have (`merge_linears`).
- **Experts** under FSDP2 are one tensor of all in a layer, as transformers has them, sharded by expert
  (`siirl/engines/train/experts/hf_experts.py` computes them). Which tensors of the model's files are where
  in it says `siirl/model_files/file_parts.py`; exports, checkpoints and rollout engines follow from that.
- **The host beside a GPU** must not be what the GPU waits for: operations on host tensors run in one thread
  there (`siirl/parallel/host_threads.py`), AdamW under FSDP gets a rank's shards as plain tensors, and a
  mini-batch's metrics are read when the norm of its gradient has come, so that it waits once.
- **Stepping** (`siirl/engines/train/stepping.py`) is the same for both strategies: count, clip, step or
  skip, move parts to the host. A strategy says how gradients come about, how they are clipped, and what an
  update is.
- **Megatron-Core** (`siirl/engines/train/megatron/`) keeps its parallel state in module globals. A
  `MegatronScope` swaps in those of one model, its default process group and its rank numbers, while that
  model's code runs; so models of different parallel sizes share a process. Its groups are not created by
  Megatron: the plan lists what it will ask for (`siirl/parallel/dims.py`), and
  `initialize_model_parallel` finds them there. `cpu_shim.py` lets it run on CPU, in the same scope only.
  `weights.py` says which rows of which Hugging Face tensors make up each parameter; loading (each rank
  reads its own slices), export and checkpoints follow from it. Checkpoints hold rectangles of Hugging Face
  tensors, so a run may go on with other parallel sizes, or under FSDP. A model that sees images has its
  vision tower, which is transformers', beside the embedding (`vision_stage.py`).
- **Log-probs** come from chunks of hidden states; full fp32 logits never exist.
- **Rollout seeds** are a function of (run seed, agent, step, prompt, sample), so that sampling does not
  depend on the layout.
"""
