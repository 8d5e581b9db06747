"""Spans, metrics, sinks and traces of a rank.

The metrics of a step are added up along a tree (`siirl/dag_worker/step_report.py`): no rank receives those of
more than eight others. `Observer` (`siirl/observe/spans.py`) measures each instruction of a rank. What runs
inside says what it does by `phase` and `note`, which reach the observer of the process, so that engines
need not be handed one, and by `waiting` that it waits for other ranks. Spans become the `time/` metrics,
and with `trainer.trace` events: a file for each rank, written as things happen, on a clock aligned at the
start. Merging is joining lines. With `profiler.enable` the same borders start and end torch's profiler
(`siirl/observe/profile.py`), on the nodes that `profiled_nodes` of the compiler finds for `profiler.roles`.
docs/metrics.md and docs/observability.md say what there is to see.

What tokens were trained with is written of the sampled rows (`siirl/nodes/trained_tokens.py`). In a step of
which it is, one of ten at most, the training op keeps its rows and what its loss says of them (old
log-prob, ratio, clip, weight), and the advantage op the parts of rewards, each on the rank where it is. At
the end of the step rank 0, which has joined the samples, tells all ranks which rows they are (up to 64, 100
bytes each), and gets these rows along the tree. Nodes in between may have numbered rows anew (dynamic
sampling, PF-PPO), so a row is found by its prompt and a hash of its response; of agents whose rows nobody
shows, by episode. This is why training nodes read `sample_index`. Ranks without the loss (pipeline stages
but the last) have nothing to give; those that hold the same rows say the same. Rank 0 counts what that
takes, and says with the rows from which step on it may be done again: no more than a thousandth of the
run's time goes there (`TokenPace` in `siirl/dag_worker/step_report.py`). Rows are made text at the end of
the step (`StepRecord.later`), so that nothing waits for their rewards.

`siirl ls`, `watch`, `compare` and `view` read folders of runs and nothing else, by one reader
(`siirl/runs/run_files.py`, on `folder_reader.py`, which raises for no content and says what it left out).
In `siirl/view/`, `view_page.py` joins what its readers give as JSON, one for each section, and puts it into
a page with the script of `view/page/`: plain JavaScript of ours, which sets all text as text. The content
policy admits that script by its hash and no other. `page_server.py` serves the same page.
`critical_path.py` runs a traced step again, with the durations as they were or with a node's halved;
`dag_share.py` follows the plan for what went from node to node.
"""
