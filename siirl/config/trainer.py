"""Groups trainer, ray_init, dag and profiler."""

from dataclasses import dataclass
from typing import Any

from siirl.config.keys import key, seed_key

SINKS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "prometheus")


@dataclass(frozen=True)
class TrainerConfig:
    """The run: length, cluster, outputs, checkpoints, validation."""

    total_epochs: int = key(30, "passes over the training prompts", low=1)
    total_training_steps: int | None = key(None, "steps of the run; null: total_epochs decides", low=1)
    project_name: str = key("siirl", "project, in output paths and sinks")
    experiment_name: str = key(
        "run",
        "experiment, in output paths and sinks; where neither it nor output_dir is set, a run that starts is "
        "named by its workflow, its model and the time (under torchrun without the time)",
    )
    logger: tuple[str, ...] = key(
        ("console", "tensorboard"), "where metrics go; a JSONL file is always written", choices=SINKS
    )
    progress: str = key(
        "bar",
        "what trainer.logger=[console] prints: table: a line for each step, under headers; bar: the table, "
        "and on a terminal a progress bar below; plain: key=value pairs, a line for each step",
        choices=("bar", "table", "plain"),
    )
    prometheus_address: str = key(
        "127.0.0.1:9464",
        "host:port at which trainer.logger=[prometheus] answers; 0.0.0.0 lets other machines ask, with a "
        "token (prometheus_token_env)",
    )
    prometheus_token_env: str | None = key(
        None, "environment variable whose value who asks for metrics must send as a bearer token"
    )
    log_val_generations: int = key(0, "validation responses that are logged as text", low=0)
    nnodes: int = key(
        1,
        "machines; unset, under torchrun those it found; MIN:MAX (in YAML quoted) also sets min_nnodes",
        low=1,
    )
    min_nnodes: int | None = key(
        None,
        "machines with which the run does while the others of nnodes are not there; null: all are needed",
        low=1,
    )
    n_gpus_per_node: int = key(
        8,
        "devices (on CPU: processes) of each machine; unset, a job of this machine alone has its GPUs, or "
        "one process on CPU, and one under torchrun the processes that it started",
        low=1,
    )
    device_memory_gib: float | None = key(
        None,
        "memory of a device, for the estimate of `siirl plan`; null: that of the GPUs here, else 80",
        low=1,
    )
    save_freq: int = key(
        -1,
        "steps between checkpoints; -1: none but the one with which Ctrl-C ends a run on one machine",
        low=-1,
    )
    resume_mode: str = key(
        "auto",
        "auto: go on from the last checkpoint in default_local_dir, if any",
        choices=("auto", "disable", "resume_path"),
        synonyms={"off": "disable"},
    )
    resume_from_path: bool | str = key(
        False, "checkpoint to resume from: .../global_step_N", when="resume_mode=resume_path"
    )
    resume_changed: bool = key(
        False,
        "go on from a checkpoint with other settings than it was made with, where these change the result",
    )
    test_freq: int = key(-1, "steps between validations; -1: none", low=-1)
    critic_warmup: int = key(0, "first steps of the run, in which only the critic is trained", low=0)
    default_local_dir: str = key(None, "directory of checkpoints")
    seed: int = seed_key(1, "seed of everything that has none of its own")
    val_before_train: bool = key(None, "validate before the first step")
    val_only: bool = key(False, "validate once and end")
    balance_batch: bool = key(False, "spread rows over data-parallel ranks by their compute cost")
    max_actor_ckpt_to_keep: int = key(100, "newest checkpoints that are kept", low=1)
    validation_data_dir: str | None = key(
        None, "directory for validation responses; null: <output_dir>/rollouts"
    )
    rollout_data_dir: str | None = key(None, "directory for training responses; null: <output_dir>/rollouts")
    samples_gib: float | None = key(
        1.0,
        "GiB that sampled responses take at most in each of the output folder's folders: of older steps "
        "every second one is removed; null: no bound. Folders of rollout_data_dir and validation_data_dir "
        "have none",
        low=0.001,
    )
    tensorboard_gib: float | None = key(
        1.0, "GiB that TensorBoard files take at most: the oldest are removed; null: no bound", low=0.001
    )
    ledger: str = key(
        "disable",
        "what <output_dir>/ledger keeps of every row, for `siirl audit`: rows: where it comes from, its "
        "reward, advantage and optimizer step; tokens: the numbers of its trained tokens, too",
        choices=("disable", "rows", "tokens"),
        synonyms={"off": "disable"},
    )
    ledger_gib: float | None = key(
        4.0,
        "GiB that the ledger takes at most: its oldest steps are removed; null: no bound",
        low=0.001,
        when="ledger=rows|tokens",
    )
    dump_rollouts_dir: str | None = key(
        None, "directory for the whole rows of every training rollout, which rollout.name=replay reads"
    )
    rollout_only: bool = key(False, "sample, score and report with the weights of model.path; train nothing")
    device: str = key(
        "auto",
        "device of the workers; auto: cuda if there is one",
        choices=("auto", "cpu", "cuda"),
        synonyms={"gpu": "cuda"},
    )
    behind_firewall: bool = key(
        False,
        "workers of several machines may listen on addresses of the internet: a firewall keeps others "
        "from them, as torch and NCCL ask for no token",
    )
    launcher: str = key(
        "auto",
        "who starts the workers; auto: torchrun if it started this process, Ray if RAY_ADDRESS is set or "
        "for several machines, else local processes",
        choices=("auto", "local", "torchrun", "ray"),
    )
    output_dir: str = key(None, "directory of everything the run writes")
    overwrite: bool = key(
        False,
        "start over in an output_dir with the results of an earlier run that is not resumed: they are "
        "removed, its checkpoints too",
    )
    export_hf: bool = key(True, "write <output_dir>/hf_model at the end")
    deadline_s: float = key(1800.0, "longest wait for another rank, in seconds", low=1)
    max_restarts: int = key(
        3,
        "restarts of workers that died for no fault of the user's, until a new checkpoint has come",
        low=0,
    )
    memory_checkpoint_freq: int = key(
        -1,
        "steps between checkpoints in host memory, from which workers that are started again go on; -1: none",
        low=-1,
        when="max_restarts",
    )
    restart_window_s: float | None = key(
        None, "seconds after which a restart does not count any more; null: only a checkpoint ends it", low=1
    )
    stuck_s: float = key(
        600.0,
        "seconds that a worker may stay in a part of the step, or ten times its longest stay so far if that "
        "is more; then it counts as stuck, and the run is started again (not under torchrun)",
        low=1,
    )
    trace: bool | None = key(
        None,
        "record what every rank does when, for `siirl view`; null: in a few steps; true: in all, or in "
        "trace_steps, and write <output_dir>/trace.json.gz; false: in none",
    )
    trace_steps: tuple[int, ...] = key((), "steps that are traced; empty: all", when="trace", low=0)
    trace_sync: bool = key(
        False, "wait for the GPU at the borders of phases, which costs some speed", when="trace"
    )

    @property
    def validates(self) -> bool:
        return self.val_before_train or self.val_only or self.test_freq > 0


RAY = "trainer.launcher=auto|ray"


@dataclass(frozen=True)
class RayInitConfig:
    """The Ray cluster that the workers run on."""

    address: str | None = key(
        None,
        "host:port of a Ray cluster; null: RAY_ADDRESS, else the one that runs on this machine, else one is "
        "started for the run",
        when=RAY,
    )
    num_cpus: int | None = key(
        None, "logical CPUs of a cluster that is started for the run; null: its cores", low=1, when=RAY
    )
    cpus_per_worker: int = key(1, "logical CPUs that Ray reserves for each worker", low=1, when=RAY)
    wait_s: float = key(
        30.0, "longest wait for missing machines, and for devices that other jobs hold", low=0, when=RAY
    )
    env_vars: dict[str, Any] = key({}, "further environment variables of the workers", when=RAY)


@dataclass(frozen=True)
class DagConfig:
    """The workflow."""

    workflow_path: str | None = key(None, "YAML file of the DAG; null: the template of adv_estimator")
    custom_pipeline_fn: str | None = key(
        None, "Python function that returns the DAG: file.py:name or pkg.mod:name"
    )
    node_config: dict[str, Any] = key({}, "config of nodes, by node_id; wins over that in the DAG")


TRACES = "tool=torch"
NSIGHT = "Nsight Systems has to start the workers itself; torch records a GPU's kernels, too"


@dataclass(frozen=True)
class ProfilerConfig:
    """Profiles of single steps."""

    enable: bool = key(False, "record the steps of profile_steps on the ranks of ranks")
    tool: str = key(
        "torch",
        "torch: a Chrome trace of operators, and of kernels where there is a GPU; torch_memory: a snapshot "
        "of what a GPU's allocator did",
        choices=("torch", "torch_memory"),
        later_choices={"nsys": NSIGHT, "npu": "NPUs: siirl runs on NVIDIA GPUs and on CPUs"},
    )
    profile_steps: tuple[int, ...] = key(
        (2,), "steps that are recorded; the first step of a run is 1", low=0, excluded=0
    )
    ranks: tuple[int, ...] = key((0,), "ranks that are recorded", low=0)
    all_ranks: bool = key(False, "record every rank, whatever ranks says")
    roles: tuple[str, ...] = key(
        (),
        "nodes that are recorded, each in a trace of its own: ids of nodes, roles of models (actor, ref, "
        "critic, ...) or phases (generate, compute_reward, compute_old_log_prob, compute_ref_log_prob, "
        "compute_value, compute_advantage, train_critic, train_actor); empty: the whole step",
        when=TRACES,
    )
    discrete: bool = key(False, "a trace of each node instead of one of the step", when=TRACES)
    save_path: str | None = key(None, "directory of what is recorded; null: <output_dir>/profile")
    record_shapes: bool = key(False, "shapes of the inputs of operators", when=TRACES)
    with_memory: bool = key(False, "what operators allocate and free", when=TRACES)
    with_stack: bool = key(False, "where in the Python code an operator was called", when=TRACES)
