"""The loop: a worker's instructions, one after another."""

from collections.abc import Sequence

from siirl.compiler.plan_instructions import (
    Collect,
    Free,
    Instruction,
    Load,
    Repeat,
    Reshard,
    Run,
    Serve,
    SyncWeights,
    Until,
)
from siirl.dag_worker.rounds import groups_wanted
from siirl.dag_worker.worker import DAGWorker, StepRecord
from siirl.data.store import FieldStore


def run_step(
    instructions: Sequence[Instruction], worker: DAGWorker, step: int, validate: bool = False
) -> StepRecord:
    """Run this rank's instructions of one step, in the one global order, so that collectives match."""
    store, record = worker.new_store(), StepRecord(step, validate)
    with worker.observer.part("validation" if validate else "step", step):
        _run(instructions, worker, store, record)
        for show in record.later:
            show()
    return record


def _run(
    instructions: Sequence[Instruction],
    worker: DAGWorker,
    store: FieldStore,
    record: StepRecord,
    region: int | None = None,
):
    """region: number of the Repeat that these instructions are of."""
    step, position = record.step, 0
    while position < len(instructions):
        ins = instructions[position]
        position += 1
        number = worker.number_of(ins)
        order = (number if region is None else region, record.round, number)
        with worker.observer.span(span_name(ins), step, order, **span_args(ins)):
            match ins:
                case Repeat(node=node, ranks=ranks):
                    end = instructions.index(Until(node, ranks), position)
                    sampled = 0
                    while wanted := groups_wanted(worker, ins, record.round, sampled):
                        record.round, record.wanted, sampled = record.round + 1, wanted, sampled + wanted
                        _run(instructions[position:end], worker, store, record, number)
                    position, record.round, record.wanted = end + 1, 0, None
                case Collect(node=node, reads=reads, source=source):
                    agent = worker.plan.nodes[node].agent
                    worker.collect(ins, store.view(reads, source, agent), record)
                case Load(loader=loader, keys=keys, layout=layout):
                    agent = worker.plan.loaders[loader].agent
                    store.put(worker.load(ins, record), agent, layout, names(keys))
                case Reshard():
                    record.metrics.merge(worker.exchange(store, ins))
                case Run(node=node, reads=reads, writes=writes, source=source, target=target, joins=joins):
                    agent = worker.plan.nodes[node].agent
                    others = store.view_others(joins)
                    rows = worker.run_node(ins, store.view(reads, source, agent), record, others)
                    store.put(rows, agent, target, names(writes))
                case Serve():
                    record.metrics.merge(worker.serve(ins))
                case SyncWeights():
                    record.metrics.merge(worker.sync_weights(ins, step, record.validate))
                case Free(keys=keys):
                    store.drop(keys)


def names(keys) -> list[str]:
    return [key.name for key in keys]


def span_name(ins: Instruction) -> str:
    """What the time of an instruction is booked under: the node, or the kind of instruction."""
    return ins.node if isinstance(ins, Run | Collect) else SPAN_NAMES[type(ins)]


def span_args(ins: Instruction) -> dict[str, str]:
    """What the trace says of an instruction besides its name."""
    match ins:
        case Load(loader=loader):
            return {"loader": loader}
        case Reshard(keys=keys, route=route):
            return {"route": route, "fields": " ".join(names(keys))}
        case Serve(node=node):
            return {"node": node}
        case SyncWeights(link=link):
            return {"link": link}
    return {}


SPAN_NAMES = {
    Load: "load",
    Reshard: "reshard",
    Serve: "serve",
    SyncWeights: "weight_sync",
    Free: "free",
    Repeat: "rounds",
}
