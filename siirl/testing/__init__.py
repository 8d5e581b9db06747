"""Tests of workflows: the user's own job for a few steps on CPUs, and what is asserted of it (`siirl test`).

`tiny_job.py` makes the job small: tiny models, few rows, no keys of the machine. `trial.py` plays it in four
runs, whose workers (`trial_worker.py`) are DAGWorkers that write down what nodes see (`evidence.py`); what
agents say may be a script's (`answers.py`, `scripted_engine.py`). `assertions.py` turns that into verdicts.
"""
