"""The job of a run on fewer machines than it asked for, or on as many again. No torch."""

import dataclasses
import logging

from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.phases import estimate_record
from siirl.config import Config, from_dict
from siirl.findings import Findings
from siirl.launch.devices import machine_of, rank_memory_gib, with_machines
from siirl.launch.job import Job
from siirl.show.memory_text import memory_warnings

log = logging.getLogger(__name__)


class Scaled:
    """Makes jobs of one run for other numbers of machines, of the workflow as it was at the start; after an
    amendment that names another, of that."""

    def __init__(self, cfg: Config):
        trainer = cfg.trainer
        self.most = trainer.nnodes
        self.fewest = trainer.nnodes if trainer.min_nnodes is None else trainer.min_nnodes
        self._dag_keys, self._dag = cfg.dag, load_dag(cfg) if self.fewest < self.most else None

    def job(self, job: Job, nnodes: int) -> Job:
        """The job on so many machines. UserError: the workflow has no plan for them."""
        world_size = nnodes * job.local_world_size
        if self._dag is None or world_size == job.world_size:
            return job
        cfg = with_machines(from_dict(job.config), nnodes)
        if cfg.dag != self._dag_keys:
            self._dag_keys, self._dag = cfg.dag, load_dag(cfg)
        plan, node_cfgs = compile_plan(self._dag, cfg, world_size)
        plan, node_cfgs = choose(plan, node_cfgs, machine_of(cfg, "ray"))
        device_gib = rank_memory_gib(cfg)
        found = Findings()
        for warning in memory_warnings(plan, node_cfgs, device_gib, found):
            log.warning(warning)
        found.close()
        trainer = job.config["trainer"] | {"nnodes": nnodes, "min_nnodes": None}
        return dataclasses.replace(
            job,
            config=job.config | {"trainer": trainer},
            plan=plan.to_json(),
            world_size=world_size,
            memory_estimate=estimate_record(plan, node_cfgs, device_gib),
        )
