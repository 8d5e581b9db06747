"""Packages that a setting asks for and siirl does not need otherwise: each is an optional extra. Pure."""

import importlib.util

EXTRAS = {
    "reasoning_gym": ("reasoning-gym", "reasoning-gym"),
}
"""Module -> (its package, the extra of siirl that installs it)."""


def missing_extra(module: str) -> str | None:
    """What is wrong and the fix, as two sentences, if a module of EXTRAS is not installed; else None."""
    if importlib.util.find_spec(module) is not None:
        return None
    package, extra = EXTRAS[module]
    return f"the package {package} is not installed. Install it: pip install 'siirl[{extra}]'."
