"""Models and tokenizers that are named as on a hub: their local directories take the place of the names.

Everything else in siirl reads local directories. The names are replaced once in each process, node by node,
because each agent of a DAG may have a model of its own.
"""

import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from siirl.compiler.plan import NodePlan, Plan
from siirl.config import Config, with_overrides
from siirl.config.common import ModelConfig
from siirl.config.roles import ROLES, role_model
from siirl.config.tree import filled
from siirl.errors import ConfigError, DataError
from siirl.model_files.directory import check_config_file, check_tokenizer_files, check_weight_files
from siirl.model_files.hub import MODELSCOPE_SWITCH, HubRepo, fetch, fetch_cached, is_hub_id, is_on

CONFIG_FILES = ("config.json",)
TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")
TOKEN_VARIABLE = "HF_TOKEN"

Find = Callable[[HubRepo, Sequence[str]], Path]


def with_local_models(cfg: Config, plan: Plan, cached_first: bool = False) -> Plan:
    """The plan in whose nodes names on a hub are local directories; what is missing is downloaded.

    Once on a machine before the workers start, to ask the hub for the newest files of the revision; then in
    every worker with cached_first, which asks only for what is not there. No communication between ranks.
    DataError if a model cannot be had.
    """
    found: dict[tuple[HubRepo, Sequence[str]], Path] = {}

    def find(repo: HubRepo, patterns: Sequence[str]) -> Path:
        if (repo, patterns) not in found:
            cached = fetch_cached(repo, patterns, _modelscope()) if cached_first else None
            whole = cached is not None and _is_whole(cached, weights=patterns == MODEL_PATTERNS)
            found[repo, patterns] = cached if whole else fetch(repo, patterns, _modelscope())
        return found[repo, patterns]

    nodes = {name: _local_node(cfg, plan, node, find) for name, node in plan.nodes.items()}
    return replace(plan, nodes=nodes)


def with_local_configs(cfg: Config, roles: Sequence[str], asks_hub: bool = True) -> Config:
    """The configuration of a node whose models, if on a hub, are local directories with config.json alone.

    asks_hub: whether a hub is asked; else its cache on this machine alone. DataError if a model is not there.
    """

    def find(repo: HubRepo, _patterns: Sequence[str]) -> Path:
        if asks_hub:
            return fetch(repo, CONFIG_FILES, _modelscope())
        cached = fetch_cached(repo, CONFIG_FILES, _modelscope())
        if cached is None or not (cached / CONFIG_FILES[0]).is_file():
            raise DataError(
                f"model {repo.name!r} (revision {repo.revision}) is not in the hub's cache here, and "
                "--elsewhere asks no hub: its layers, heads, lengths and memory are not checked. Download "
                "its config.json, or leave --elsewhere out."
            )
        return cached

    return with_overrides(cfg, dict(_local_paths(cfg, roles, find)))


def token_to_environment(cfg: Config, env: MutableMapping[str, str] = os.environ) -> Config:
    """Hand model.hf_hub_token to the hub's client and to workers as HF_TOKEN; a configuration without it.

    No file of the run holds it then. ConfigError for two different tokens.
    """
    roles = ("actor", *(name for name, role in ROLES.items() if role.own_model))
    tokens = {role_model(cfg, role).hf_hub_token for role in roles} - {None}
    if not tokens:
        return cfg
    if len(tokens) > 1:
        names = " and ".join(dict.fromkeys(f"{ROLES[role].model}.hf_hub_token" for role in roles))
        raise ConfigError(f"{names} are two different tokens: a run has one. Set only one of them.")
    env[TOKEN_VARIABLE] = tokens.pop()
    return filled(cfg, {f"{ROLES[role].model}.hf_hub_token": None for role in roles})


def _local_node(cfg: Config, plan: Plan, node: NodePlan, find: Find) -> NodePlan:
    role = plan.models[node.model].role if node.model else "actor"
    roles = ("actor", role) if ROLES[role].own_model else ("actor",)
    node_cfg = with_overrides(cfg, node.overrides)
    local = dict(_local_paths(node_cfg, roles, find))
    tokenizer = node_cfg.data.tokenizer
    if tokenizer and on_hub(tokenizer):
        repo = _repo(node_cfg.actor_rollout_ref.model, tokenizer)
        local["data.tokenizer"] = str(find(replace(repo, revision="main"), TOKENIZER_PATTERNS))
    return replace(node, overrides=node.overrides | local) if local else node


def _local_paths(cfg: Config, roles: Sequence[str], find: Find) -> Iterator[tuple[str, str]]:
    """(key, local directory) of each role's model that is named as on a hub."""
    for role in roles:
        model = role_model(cfg, role)
        if on_hub(model.path):
            yield f"{ROLES[role].model}.path", str(find(_repo(model, model.path), MODEL_PATTERNS))


def _repo(model: ModelConfig, name: str) -> HubRepo:
    return HubRepo(name, "model", model.model_revision, model.cache_dir, model.hf_hub_token)


def on_hub(path: str) -> bool:
    """Whether a model is named as on a hub, and there is no directory of that name."""
    return is_hub_id(path) and not Path(path).is_dir()


def _modelscope() -> bool:
    return is_on(MODELSCOPE_SWITCH)


def _is_whole(path: Path, weights: bool) -> bool:
    """Whether the cache holds all that is needed: older clients of the hub return what there is."""
    try:
        if weights:
            check_config_file(path)
            check_weight_files(path)
        else:
            check_tokenizer_files(path)
    except DataError:
        return False
    return True
