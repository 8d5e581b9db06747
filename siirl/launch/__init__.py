"""Starting the processes of a run, watching them, and starting them again.

User errors (`siirl/errors.py`, `UserError`) are found before any worker starts where that is possible,
print their messages without a traceback and exit with 2. Checks collect what is wrong (`siirl/findings.py`)
and go on; `siirl check` and the run share one survey (`siirl/launch/survey.py`), which lists all problems
by place: command line, configuration, workflow, data, models, rewards, machine. A key that was refused
holds a value that ends the check which reads it, so that nothing is judged by its default. A dying worker
ends the attempt: the launcher collects what each rank left behind, picks the first cause (not the peers
that failed because of it), and prints rank, node, step, signal and last log lines. If that was no fault of
the user's, a local run starts its workers again (`siirl/launch/attempts.py`): a resume from its own
checkpoint is all that this takes. Workers beat (`siirl/observe/heartbeat.py`) with their place in the one
order of all ranks, so the launcher knows who is behind (`siirl/launch/health.py`; of a Ray run by what its
actors answer, `ray_watch.py`).

A run may have fewer machines than it asked for (`trainer.nnodes=MIN:MAX`, `siirl/launch/scaled.py`): before
each attempt the launcher on Ray takes the most that it gets, and compiles the workflow that it read at the
start for them. That is all: ranks read the rectangles of tensors that are theirs now, whoever wrote them,
and batches do not depend on the number of ranks.
"""
