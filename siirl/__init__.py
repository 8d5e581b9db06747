"""What a script or a notebook needs of siirl; each name is imported when it is first used.

import siirl
cfg = siirl.load_config(["algorithm.adv_estimator=grpo", ...])   # settings as on the command line
siirl.check(cfg)            # raises a UserError that lists all that is wrong
siirl.plan(cfg)             # in a notebook: the picture
run = siirl.train(cfg)
run.metrics()["reward/score"]
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siirl.config import load_config
    from siirl.dag.spec import DagBuilder
    from siirl.session import check, plan, train

__all__ = ["DagBuilder", "check", "load_config", "plan", "train"]

_HOMES = {
    "DagBuilder": "siirl.dag.spec",
    "check": "siirl.session",
    "load_config": "siirl.config",
    "plan": "siirl.session",
    "train": "siirl.session",
}


def __getattr__(name: str) -> Any:
    """The name from the module that it lives in (PEP 562): `import siirl` alone loads nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'siirl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
