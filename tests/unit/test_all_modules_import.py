"""Every module of siirl imports: none refers to something that no longer exists."""

import importlib
import pkgutil

import pytest

import siirl

pytestmark = pytest.mark.heavy

MODULES = sorted(module.name for module in pkgutil.walk_packages(siirl.__path__, "siirl."))
NEEDS = {
    "siirl.engines.train.megatron.": "megatron.core",
    "siirl.engines.rollout.sglang.native": "sglang",
    "siirl.engines.rollout.vllm.native_texts": "torchvision",
    "siirl.engines.train.attention.fla_kernels": "fla",
    "siirl.engines.train.attention.flash_four": "flash_attn.cute",
    "siirl.engines.train.attention.convolution_kernels": "triton",
    "siirl.engines.train.triton_kernels": "triton",
    "siirl.engines.train.experts.expert_kernels": "triton",
}
"""Beginnings of names of modules -> what may be absent, and is imported by them."""


def is_absent(name: str) -> bool:
    """Whether what a module needs is not installed here."""
    try:
        importlib.import_module(name)
    except ImportError:
        return True
    return False


def test_every_module_imports():
    absent = tuple(beginning for beginning, needed in NEEDS.items() if is_absent(needed))
    failed = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not name.startswith(absent):
                failed[name] = repr(error)
    assert failed == {}


def test_the_list_of_modules_is_not_empty():
    assert {"siirl.types", "siirl.compiler.plan", "siirl.engines.engine_registry"} <= set(MODULES)
