"""A vLLM engine that decodes on while others train is killed: it comes back, and nobody else waits for it."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job, work
from test_lag_job import LAG, LONG_TAIL, ROLLOUT, VLLM, recorded

from siirl.compiler.compile import TEMPLATES

LOST_RANK, LOST_STEP = 1, 3


def loses_engine(rank, world_size, arguments, output):
    """A worker whose engine is killed, on one rank and in one step, when the step's requests run.

    Notes when it was lost and back, and when each step's sampling ended.
    """
    from siirl.engines.rollout.served.engine_process import EngineProcess
    from siirl.engines.rollout.served.recovery import RecoveringEngine
    from siirl.nodes.rollouts_in_flight import RolloutsInFlight

    times = {"step": 0, "ended": {}}
    send, restart, sample = EngineProcess.send, RecoveringEngine._restart, RolloutsInFlight.sample

    def send_and_lose(process, message):
        send(process, message)
        if (rank, times["step"]) == (LOST_RANK, LOST_STEP) and "lost" not in times:
            times["lost"] = time.time()
            threading.Timer(0.03, os.kill, (process.pid, signal.SIGKILL)).start()

    def noted_restart(engine, lost):
        restart(engine, lost)
        times["back"] = time.time()

    def noted_sample(in_flight, params, step):
        times["step"] = step
        taken = sample(in_flight, params, step)
        times["ended"][step] = time.time()
        return taken

    EngineProcess.send, RecoveringEngine._restart = send_and_lose, noted_restart
    RolloutsInFlight.sample = noted_sample
    work(rank, world_size, arguments, output)
    (Path(output).parent / f"times_{rank}.json").write_text(json.dumps(times))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_decodes_on_is_killed_and_comes_back_while_the_other_rank_samples(tmp_path):
    """One rank trains, two sample. Under constant weights the rows are those of a run without lag or loss."""
    made = Inputs.make(tmp_path / "inputs", rows=40)
    make_tiny_model_dir(made.model, init_std=0.2, head_dim=32)  # vLLM's CPU attention has no smaller heads
    dag = yaml.safe_load((TEMPLATES / "grpo.yaml").read_text())
    for node in dag["nodes"]:
        node["placement"] = "1-2" if node["node_role"] == "ROLLOUT" else "0"
    (tmp_path / "apart.yaml").write_text(yaml.safe_dump(dag))
    keys = [*LONG_TAIL, *VLLM, "trainer.deadline_s=300", "actor_rollout_ref.actor.optim.lr=0"]
    keys += ["trainer.export_hf=False", "trainer.test_freq=-1", f"{ROLLOUT}.stop_token_ids=[5]"]
    plain = [*keys, f"trainer.dump_rollouts_dir={tmp_path / 'plain/dump'}"]
    run_job(1, overrides(made, tmp_path / "plain/out", *plain), deadline_s=280)
    lagging = [
        *keys,
        *LAG,
        f"dag.workflow_path={tmp_path / 'apart.yaml'}",
        f"{ROLLOUT}.max_engine_restarts=2",
    ]
    lagging += [f"trainer.dump_rollouts_dir={tmp_path / 'lagging/dump'}"]
    run = run_job(3, overrides(made, tmp_path / "lagging/out", *lagging), deadline_s=280, run=loses_engine)
    restarts = run.values("rollout/engine_restarts")
    assert sorted(restarts) == [0, 0, 0, 0, 1]
    noticed = restarts.index(1) + 1  # a busy step may have all it needs before that
    assert noticed in (LOST_STEP, LOST_STEP + 1)
    rows = [recorded(tmp_path / name / "dump") for name in ("plain", "lagging")]
    assert rows[0] == rows[1] and rows[1].total() == 5 * 8 * 2
    assert 0 < max(run.values("rollout/staleness_max")) <= 2 and run.values("rollout/in_flight")[-1] == 0
    assert max(run.values("actor/rollout_log_prob_diff")) < 1e-4, "it has come back with its weights"
    lost, other = (json.loads((tmp_path / f"lagging/times_{rank}.json").read_text()) for rank in (1, 2))
    assert "back" not in other and lost["lost"] < lost["back"] < lost["ended"][str(noticed)]
    assert other["ended"][str(LOST_STEP)] < lost["back"], "the other rank has sampled its part meanwhile"
