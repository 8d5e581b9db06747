"""What a rollout engine cannot say as a teacher (teacher.strategy=vllm). Pure."""

from collections.abc import Iterator

from siirl.compiler.resolved_node import ResolvedNode
from siirl.config.teacher import WHOLE
from siirl.errors import ConfigError, NotSupportedError, UserError

OTHERWISE = "or teacher.strategy=fsdp (or megatron)"


def check_scored(teacher: ResolvedNode) -> Iterator[UserError]:
    """What is wrong with a teacher that a rollout engine scores for."""
    mine, rollout = teacher.cfg.teacher, teacher.cfg.actor_rollout_ref.rollout
    key = f"{teacher}: teacher.strategy={mine.strategy}"
    if rollout.trained_temperature != 1:
        yield NotSupportedError(
            f"not supported yet: {key} with actor_rollout_ref.rollout.temperature={rollout.temperature:g}: "
            "the policy is compared with its teacher at the temperature at which it samples, and vLLM gives "
            f"the log-probs of tokens that are there at temperature 1. Set temperature=1, {OTHERWISE}."
        )
    if mine.top_k == WHOLE:
        yield NotSupportedError(
            f"not supported yet: {key} with actor.distill.top_k=-1: vLLM hands over each token's log-probs "
            "one by one, which takes longer than to compute them. Set distill.top_k=64 or so, "
            f"{OTHERWISE}."
        )
    if mine.policy is not None:
        yield NotSupportedError(
            f"not supported yet: {key} with teacher.policy={mine.policy}: older weights are averaged and "
            "kept in checkpoints by a training engine. Set teacher.strategy=fsdp (or megatron)."
        )
    if mine.model.lora_rank:
        yield ConfigError(
            f"{key} with teacher.model.lora_rank={mine.model.lora_rank}: a teacher is frozen, and a new "
            "adapter changes nothing. Leave it out; adapters that were trained are merged by `siirl export`."
        )
