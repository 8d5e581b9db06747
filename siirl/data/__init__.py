"""Rows: fields, layouts, loaders and the transport that moves rows between layouts.

A batch is a TensorDict of rows. Every field is declared once, in `siirl/types.py`, with shape, dtype, unit
and padding side; object fields (chat messages, ground truth) travel as JSON. The store of a rank is keyed
by *(field, layout)*, because the same field may lie in several layouts at once. An op that changes the
number of rows (a rollout makes n of each prompt) starts a new *row set*; fields that are needed later are
carried over.

`row_id` is a row's position in the global batch. Mini-batches are runs of rows in the order of `row_id`, so
the same rows take part in the same optimizer step on any number of ranks. A loader assigns them so that each
shard has about as many of every mini-batch (`assignment_order` in `siirl/data/loader.py`): which rank samples
a prompt depends on the mini-batches, which step trains it does not.

A layout has one order of rows on each rank: that of the `row_id` that came first. Columns that come later
follow it, so the compiler keeps a `row_id` in a layout until the last reshard into it, and the transport
refuses to assign rows beside columns whose `row_id` is gone. `tests/support/plan_rows.py` runs plans of
random workflows row by row on every rank.

In a reshard (`siirl/data/transport.py`) ranks first find out which rows go where (`transfer_plan.py`); those
that trade send each other parcels of rows, all fields side by side; a rank that keeps its rows sends
nothing. Few rows are known to every rank, from headers (ids, groups, lengths), and each computes the same
assignment. Many are known to teams of ranks (`teams.py`), which tell each other sums only, so what a rank
hears and computes does not grow with the world (tuning.md). Columns
that follow rows, there or back, go by what the ranks remember of them. Row counts may change from step to
step. Where costs are to be equal (`siirl/data/balance.py`), rows start on the rank that has them; what a
rank has above 1.01 of the mean goes to others, groups whole as far as that balances. Only if nothing else
balances are all rows sharded anew.
"""
