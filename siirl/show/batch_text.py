"""The arithmetic of batches as text: what is sampled, in flight and trained in a step; where its time
will go (`siirl plan --explain`).
"""

from siirl.compiler.agent_steps import WHOLE, window_of
from siirl.compiler.cost.step_time import Phase, StepTime
from siirl.compiler.memory.estimate import micro_batch_tokens
from siirl.compiler.plan import ModelPlan, NodePlan, Plan
from siirl.config import Config
from siirl.config.batch import BatchArithmetic, batch_of
from siirl.config.roles import ROLES, token_budget, trained_group
from siirl.dag.ops import LATER_OLD_LOG_PROB
from siirl.parallel.placement import format_ranks
from siirl.show.credit_text import speakers_of
from siirl.spelling import aligned


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """As in "1 rank", "2 ranks"; plural: what the noun ends with then."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def batch_lines(plan: Plan, configs: dict[str, Config]) -> list[str]:
    """Prompts x responses = sequences -> optimizer steps -> micro-batches on each rank, for each agent."""
    lines: list[str] = []
    for model in plan.models.values():
        if not model.is_rollout:
            continue
        batch = batch_of(configs[model.node])
        shards, verb = model.dims.dp, "sampled"
        if entry := next((x.entry for x in plan.interactions.values() if model.name in x.policies), None):
            shards, verb = len(plan.run_of(entry).ranks), "played"
        refilled = f" in rounds of {batch.generated} prompts" if batch.in_rounds else ""
        if refilled and plan.nodes[entry or model.node].max_lag:
            refilled = f" in rounds of as many as it lacks, read {batch.generated} at a time"
        share = _share(batch.generated, shards)
        amount = f"{batch.rows} {'episodes' if entry else 'sequences'}"
        most = plan.interactions[entry].most_branches if entry else 1
        amount += f" (with branches up to {batch.rows * most})" if most > 1 else ""
        lines.append(
            f"agent {model.agent}: {batch.prompts} prompts x {batch.samples} responses = {amount} a "
            f"step{refilled}, {verb} by {count_of(shards, 'shard')} of {share} prompts"
            f"{_window(configs[model.node])}"
        )
        lines += _staleness(plan.nodes[model.node], configs[model.node], batch, bool(entry))
        speakers = speakers_of(plan, model.agent)
        trainers = [m for m in plan.models.values() if m.agent == model.agent and m.trains]
        if trainers and speakers:
            agents = ", ".join(map(str, speakers))
            who = "each episode in which it" if len(speakers) == 1 else f"each of agents {agents} that"
            where, most = "" if len(speakers) == 1 else " in an episode", batch.rows * most * len(speakers)
            why = "more where a context is full or rewritten"
            lines.append(f"  a row for {who} speaks{where}: at most {most}, {why}")
        for trainer in trainers:
            training = _training(trainer, configs[trainer.node], batch, len(speakers))
            training += _old_log_probs(plan, trainer, configs[trainer.node])
            lines += [f"  {trainer.role}:", *(f"    {line}" for line in training)]
    return lines + [line for name in plan.nodes for line in _given(plan, name, configs)]


def _given(plan: Plan, name: str, configs: dict[str, Config]) -> list[str]:
    """The batch of an agent whose responses are those of the dataset, and what is trained on it."""
    node, batch = plan.nodes[name], batch_of(configs[name])
    if not node.spec.gives_data:
        return []
    amount = f"{batch.prompts} prompts x {count_of(batch.samples, 'response')} of the dataset"
    lines = [f"agent {node.agent}: {amount} = {batch.rows} sequences a step{_window(configs[name])}"]
    for model in plan.models.values():
        for trainer in model.nodes:
            if plan.nodes[trainer].agent == node.agent and plan.nodes[trainer].spec.trains:
                training = _training(model, configs[trainer], batch, 0)
                lines += [f"  {trainer}, of {model.name}:", *(f"    {line}" for line in training)]
    return lines


def _window(cfg: Config) -> str:
    """In which steps an agent takes part, if not in all."""
    first, last = window_of(cfg)
    if (first, last) == WHOLE:
        return ""
    return f", in steps {first} to {'the last' if last is None else last}"


def _old_log_probs(plan: Plan, trainer: ModelPlan, cfg: Config) -> list[str]:
    """Of how many mini-batches they are computed, where that is not all of them."""
    if all(node.op != LATER_OLD_LOG_PROB.name for node in plan.nodes.values() if node.model == trainer.name):
        return []
    count = batch_of(cfg, trainer.role).mini_batches
    return [f"old log-probs of {count - 1} of {count} mini-batches: the first one's are its own log-probs"]


def _staleness(node: NodePlan, cfg: Config, batch: BatchArithmetic, talks: bool) -> list[str]:
    """What is in flight besides a batch, and how old it may be."""
    if not node.max_lag:
        return []
    rollout = cfg.actor_rollout_ref.rollout
    prompts = int((1 + rollout.surplus) * batch.prompts)
    if node.runs_in_background:
        who = "turns, tools and environments go on" if talks else "the engines go on with them"
        rest = f"{who} while the trainer trains, and under its new weights after each sync"
    else:
        rest = (
            "those that a step does not complete keep their tokens, and no device memory, and go on in the "
            "next one"
        )
    rest += {
        "wait": "",
        "restart": "; those that would be older restart",
        "drop": "; those that would be older are dropped, and others loaded in their place",
    }[rollout.stale]
    return [
        f"  at most {count_of(node.max_lag, 'step')} old: up to {prompts} prompts ({prompts * batch.samples} "
        f"{'episodes' if talks else 'responses'}) are in flight; {rest}"
    ]


def _training(trainer: ModelPlan, cfg: Config, sampled: BatchArithmetic, num_speakers: int) -> list[str]:
    """num_speakers: of the policy, in an interaction, where rows are bounded and not known; else 0."""
    group = trained_group(cfg, trainer.role)
    batch, shards = batch_of(cfg, trainer.role), trainer.dims.dp
    mini = batch.mini_prompts
    rows = mini * sampled.samples * max(num_speakers, 1)
    bound, noun = ("up to ", "row") if num_speakers else ("", "sequence")
    epochs = f" x {batch.epochs} epochs" if batch.epochs > 1 else ""
    lines = [
        f"{count_of(sampled.prompts // mini, 'mini-batch', 'es')} of {mini} prompts = {bound}{rows} "
        f"{noun}s{epochs} -> {count_of(batch.optimizer_steps, 'optimizer step')}",
        f"a mini-batch is {bound}{_share(rows, shards)} {noun}s on each of "
        f"{count_of(shards, 'data-parallel rank')}",
    ]
    per_rank = -(-rows // shards)
    if group.use_dynamic_bsz:
        most = -(-per_rank * _row_tokens(cfg) // micro_batch_tokens(trainer, cfg, trains=True))
        keys = ROLES[trainer.role].train
        assert keys is not None, f"{trainer.name} does not train"
        budget = token_budget(cfg, trainer.role, keys)
        lines.append(f"-> micro-batches of up to {budget} tokens: at most about {most} on each rank")
    else:
        micro = group.ppo_micro_batch_size_per_gpu
        count = count_of(-(-per_rank // micro), "micro-batch", "es")
        lines.append(f"-> {bound}{count} of {count_of(micro, noun)} on each rank")
    return lines


def _row_tokens(cfg: Config) -> int:
    return cfg.actor_rollout_ref.rollout.prompt_length + cfg.actor_rollout_ref.rollout.response_length


def _share(total: int, parts: int) -> str:
    return str(total // parts) if total % parts == 0 else f"{total // parts}-{total // parts + 1}"


_SMALL = 0.03  # of a phase: parts below are left out
_IDLE = 0.02  # of a step: waiting below is left out


def explanation(found: StepTime, device: str, world_size: int) -> str:
    """The phases of a predicted step, what bounds it, what is not counted, and what was assumed."""
    rows = [["phase", "ranks", "begins", "seconds", "share", "where it goes, s"]]
    for phase in found.phases:
        share = f"{100 * phase.seconds / found.step_s:.0f}%" if found.step_s else ""
        begins = f"{phase.begins_s:.1f}"
        rows.append(
            [
                phase.name,
                format_ranks(phase.ranks),
                begins,
                seconds_text(phase.seconds),
                share,
                parts_text(phase),
            ]
        )
    lines = aligned(rows) if found.phases else []
    if found.step_s:
        rate = f"{found.tokens / found.step_s / world_size:,.0f} tokens/s on each of {world_size} devices"
        lines.append(f"step: {seconds_text(found.step_s)} s; {rate}")
    lines += [f"wait: {line}" for line in _waiting(found, world_size)]
    lines += [f"not counted: {line}" for line in found.not_counted]
    lines += [f"assumed: {line}" for line in found.assumed]
    return "\n".join([f"time of a step, predicted for {device}", *(f"  {line}" for line in lines)])


def seconds_text(value: float) -> str:
    """As in 12.3, 0.12, 0.0012."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def parts_text(phase: Phase) -> str:
    """What a phase spends its time on, the largest first."""
    shown = [f"{what} {seconds_text(s)}" for what, s in phase.parts.items() if s >= _SMALL * phase.seconds]
    return ", ".join(shown)


def _waiting(found: StepTime, world_size: int) -> list[str]:
    """Ranks that have nothing to do for a part of the step."""
    idle: dict[float, list[int]] = {}
    for rank in range(world_size):
        busy = sum(phase.seconds for phase in found.phases if rank in phase.ranks)
        waits = round(found.step_s - busy, 1)
        if waits > _IDLE * found.step_s:
            idle.setdefault(waits, []).append(rank)
    return [f"ranks {format_ranks(ranks)} have nothing to do for {waits} s" for waits, ranks in idle.items()]
