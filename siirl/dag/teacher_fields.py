"""The fields of teachers: one set for each node, named by it. Pure."""

from siirl.config import Config
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.dag.fields_read import OF_TEACHER, TOKENS, Names


def teacher_outputs(top_k: int) -> Names:
    """What a teacher computes of each token: outputs of a training engine."""
    if top_k == SAMPLED:
        return ("log_prob",)
    return ("top_log_prob",) if top_k == WHOLE else ("top_log_prob", "top_ids")


def teacher_writes(node_id: str, cfg: Config) -> Names:
    """The fields of a teacher: what it counts in each row, and what it says of its tokens."""
    return tuple(f"{node_id}{OF_TEACHER}{name}" for name in ("weight", *teacher_outputs(cfg.teacher.top_k)))


def teacher_reads(cfg: Config) -> Names:
    routed = (cfg.teacher.by.partition(".")[0],) if cfg.teacher.takes else ()
    return (*TOKENS, *routed)
