"""Group profiler: what torch's profiler records of a run, and where it writes it."""

from dataclasses import dataclass

from siirl.config.keys import key

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
