"""Checks of Hugging Face model directories without torch or transformers: the launcher runs them too."""

import hashlib
import json
import re
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from siirl.compiler.checks.model_checks import check_trained_model
from siirl.config import Config
from siirl.config.common import ModelConfig
from siirl.config.roles import ROLE_GROUPS, ROLES, role_group, role_model
from siirl.errors import ConfigError, DataError
from siirl.findings import refuse
from siirl.model_files.hub import near_folder
from siirl.models.config_json import language_part
from siirl.models.overridden import overridden

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STRETCHED = ("linear", "dynamic", "yarn")  # rope types whose factor multiplies the positions
SCORE_WEIGHT, SCORE_BIAS = "score.weight", "score.bias"
"""Name of the head of models saved as ForSequenceClassification or ForTokenClassification."""
IN_LAYER = re.compile(r"\.\d+\.")
"""In the names of tensors of blocks, which are numbered."""
_DIGEST_PLACES, _DIGEST_BYTES = 256, 4096
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header


def model_dir(path: str, key: str = "actor_rollout_ref.model.path") -> Path:
    """The local directory of a model, with its config.json. DataError, which names `key`, without them."""
    if not path:
        raise DataError(
            f"{key} is not set: which model? Set it to a Hugging Face model directory, or to a name on the "
            "hub, as ORG/NAME."
        )
    local = Path(path).expanduser()
    try:
        if not local.is_dir():
            raise DataError(
                f"{_here()}: model directory {local} {'is a file' if local.exists() else 'does not exist'}. "
                f"{near_folder(str(local))}Set {key} to a Hugging Face model directory that every machine "
                "sees, or to a name on the hub, as ORG/NAME."
            )
        if not (local / "config.json").is_file():
            raise DataError(
                f"{_here()}: model directory {local} has no config.json: a Hugging Face model directory is "
                f"needed. Set {key} to one."
            )
    except PermissionError as error:
        raise DataError(
            f"{_here()}: model directory {local} cannot be read: {error}. Give this user the right to."
        ) from error
    return local


def check_config_file(path: Path) -> None:
    """DataError unless the directory's config.json is JSON and names a type of model."""
    config = _read_json(path / "config.json")
    if "model_type" not in config:
        raise DataError(
            f"{_here()}: {path / 'config.json'} has no model_type that is a name: it describes no model. "
            "Save the model with save_pretrained()."
        )


def weight_files(path: Path) -> set[str]:
    """Names of the safetensors files of a model directory. DataError if it has none."""
    if (path / WEIGHTS).is_file():
        return {WEIGHTS}
    if (path / INDEX).is_file():
        return set(_read_json(path / INDEX).get("weight_map", {}).values())
    raise DataError(
        f"{_here()}: model directory {path} has {_why_no_weights(path)}: weights are needed. "
        "Save the model with save_pretrained()."
    )


def weight_shapes(path: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in the weights of a model directory, by the files' headers."""
    headers = (_read_header(path / name) for name in sorted(weight_files(path)))
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def weights_digest(path: Path) -> str:
    """Tells weights apart without reading them all: SHA-256 of the size of each file and of places in it."""
    digest = hashlib.sha256()
    for name in sorted(weight_files(path)):
        size = (path / name).stat().st_size
        digest.update(f"{name} {size}\n".encode())
        with open(path / name, "rb") as file:
            for place in range(_DIGEST_PLACES):
                file.seek(size * place // _DIGEST_PLACES)
                digest.update(file.read(_DIGEST_BYTES))
    return digest.hexdigest()


def check_weight_files(path: Path) -> None:
    """DataError unless the directory holds whole safetensors weights (a pickle is not read).

    Reads the headers only: a file that is missing, cut short or a Git LFS pointer is found, a changed
    value is not.
    """
    names = weight_files(path)
    missing = sorted(name for name in names if not (path / name).is_file())
    if missing:
        raise DataError(
            f"{_here()}: model directory {path} lacks {len(missing)} of the {len(names)} weight files that "
            f"{INDEX} names: {', '.join(missing[:5])}. Download or copy them again."
        )
    for name in sorted(names):
        try:
            _check_safetensors(path / name)
        except OSError as error:
            raise DataError(f"{_here()}: {path / name} cannot be read: {error}. Restore the file.") from error


def check_image_files(path: Path) -> None:
    """DataError unless the directory of a vision model says how images become patches."""
    if not any((path / name).is_file() for name in PROCESSOR_FILES):
        raise DataError(
            f"{_here()}: model directory {path} has no {' or '.join(PROCESSOR_FILES)}, which says how images "
            "become patches. Copy the model's processor files there."
        )


def check_same_images(cfg: Config, path: Path, role: str) -> None:
    """DataError unless a model that reads the policy's tokens takes as many of them for an image."""
    policy = Path(cfg.actor_rollout_ref.model.path).expanduser()
    if not (policy / "config.json").is_file():
        return  # of a hub; or said of the policy
    mine, its = _image_sizes(policy), _image_sizes(path)
    if odd := sorted(name for name in mine if mine[name] != its[name]):
        raise DataError(
            f"{_here()}: {ROLES[role].model}.path={path}: {odd[0]} is {its[odd[0]]} there, and "
            f"{mine[odd[0]]} in {policy}, whose tokens of images it reads. Give a model of the policy's "
            f"type, with the same {PROCESSOR_FILES[0]}."
        )


def _image_sizes(path: Path) -> dict[str, Any]:
    """What decides how many tokens an image has, and which."""
    file = next((path / name for name in PROCESSOR_FILES if (path / name).is_file()), None)
    content = _read_json(file) if file else {}
    content = content.get("image_processor", content)
    least, most = content.get("min_pixels"), content.get("max_pixels")
    return {
        "size": content.get("size") or {"shortest_edge": least, "longest_edge": most},
        **{name: content.get(name) for name in ("patch_size", "merge_size")},
        "image_token_id": _read_json(path / "config.json").get("image_token_id"),
    }


def has_tokenizer_files(path: str | Path) -> bool:
    """Whether a directory holds a tokenizer."""
    return any((Path(path).expanduser() / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer_files(path: Path) -> None:
    """DataError unless the directory holds a tokenizer."""
    if not has_tokenizer_files(path) and (path / "tekken.json").is_file():
        raise DataError(
            f"{_here()}: model directory {path} has its tokenizer as tekken.json alone, which Mistral's own "
            "package reads. Copy the tokenizer.json that the model's Hugging Face files have, or set "
            "data.tokenizer to a directory with one."
        )
    if not has_tokenizer_files(path):
        raise DataError(
            f"{_here()}: model directory {path} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is "
            "there. Copy the model's tokenizer files there, or set data.tokenizer."
        )
    packages = [name for name in ("sentencepiece", "protobuf") if not _is_installed(name)]
    if packages and not (path / "tokenizer.json").is_file() and _is_sentencepiece(path / "tokenizer.model"):
        raise DataError(
            f"{_here()}: model directory {path} has its tokenizer as tokenizer.model alone, which "
            f"transformers reads with {' and '.join(packages)}, not installed here. Install it (pip install "
            f"{' '.join(packages)}), or save a tokenizer.json where it is."
        )


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.distribution(package))
    except metadata.PackageNotFoundError:
        return False


def _is_sentencepiece(file: Path) -> bool:
    """Whether it is there and begins as such a file does; others of the name are lines of text (tiktoken)."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(1) == b"\n"


def check_model_files(cfg: Config, role: str, trains: bool = False, of_known_type: bool = False) -> None:
    """DataError unless the model of a role can be built; all but a rollout read the weights, too.

    trains: whether a node trains it. of_known_type: whether it was asked before if its type is trained.
    """
    path = model_dir(role_model(cfg, role).path, f"{ROLES[role].model}.path")
    check_config_file(path)
    check_lengths(cfg, path, role)
    if not of_known_type:
        refuse(check_trained_model(cfg, role, f"{_here()}: {path}"))
    if cfg.data.has_images and not ROLES[role].generates:
        check_image_files(path)
        if not ROLES[role].own_length:
            check_same_images(cfg, path, role)
    if not ROLES[role].takes_weights:
        _check_weights(cfg, path, role)
    if trains:
        _check_adapted(cfg, path, role)
    if ROLES[role].head == "score":
        check_score_model(cfg, path, role, trains)


def _check_weights(cfg: Config, path: Path, role: str) -> None:
    """DataError unless a model has weights where it reads them from; tensors are not read."""
    group = None if ROLES[role].generates else role_group(cfg, role)
    if group is None or group.strategy != "megatron" or not group.megatron.use_dist_checkpointing:
        check_weight_files(path)
        return
    stored = Path(group.megatron.dist_checkpointing_path).expanduser()
    if not (stored / ".metadata").is_file():
        raise DataError(
            f"{_here()}: {ROLE_GROUPS[role]}.megatron.dist_checkpointing_path={stored} "
            f"{'has no .metadata' if stored.is_dir() else 'does not exist'}: weights are read from there. "
            "Give a directory that `siirl convert` wrote, or that of a model in a checkpoint."
        )


def _check_adapted(cfg: Config, path: Path, role: str) -> None:
    """ConfigError for names of modules that are to have adapters, and that the model does not have.

    peft takes the names that it finds, and is content with one. A model without weight files is passed over.
    """
    model, keys = role_model(cfg, role), ROLES[role].model
    targets = model.target_modules
    if (
        not model.lora_rank
        or isinstance(targets, str)
        or not any((path / x).is_file() for x in (WEIGHTS, INDEX))
    ):
        return
    shapes = weight_shapes(path)
    modules = [
        name.removesuffix(".weight") for name in shapes if len(shapes[name]) > 1 and IN_LAYER.search(name)
    ]
    missing = [name for name in targets if not any(module.endswith(f".{name}") for module in modules)]
    if missing:
        layers = {module.rpartition(".")[2] for module in modules}
        raise ConfigError(
            f"{_here()}: {keys}.target_modules=[{','.join(targets)}]: {path} has no {', '.join(missing)}. "
            f"The matrices of its layers are {', '.join(sorted(layers))}. Name some of these, or all-linear."
        )


def check_score_model(cfg: Config, path: Path, role: str, trains: bool) -> None:
    """DataError unless the model has a score head that gives one number, and knows the tokens it will get.

    The head is looked for only where there are weights; that of a model in training may be new.
    """
    rewards = not ROLES[role].of_node
    if any(path.glob("*.safetensors")):
        _check_score_head(path, "a reward model" if rewards else "a model with a score head", trains)
    if rewards:
        _check_reward_tokens(cfg, path)


def _check_score_head(path: Path, what: str, trains: bool) -> None:
    shapes = weight_shapes(path)
    shape = shapes.get(SCORE_WEIGHT)
    if trains and SCORE_BIAS in shapes:
        raise DataError(
            f"{_here()}: the weights of {path} have a {SCORE_BIAS}: a constant, which pairs of responses say "
            "nothing about, so a reward model in training has none. Give a model that was saved as "
            "ForSequenceClassification, or a language model."
        )
    if shape is None and trains:
        return
    if shape is None:
        raise DataError(
            f"{_here()}: the weights of {path} have no {SCORE_WEIGHT}: {what} needs its trained "
            "head. Give a model that was saved as ForSequenceClassification or ForTokenClassification."
        )
    if shape[0] != 1:
        raise DataError(
            f"{_here()}: {SCORE_WEIGHT} of {path} gives {shape[0]} numbers for a conversation: {what} "
            "gives one (num_labels=1). Give another model."
        )


def _check_reward_tokens(cfg: Config, path: Path) -> None:
    """DataError unless the reward model knows all tokens that it will be given."""
    known = language_part(_read_json(path / "config.json")).get("vocab_size")
    own = cfg.reward_model.model.rm_tokenizer or (path if has_tokenizer_files(path) else None)
    source = Path(own or cfg.data.tokenizer or cfg.actor_rollout_ref.model.path).expanduser()
    if own is not None and not source.is_dir():
        raise DataError(
            f"{_here()}: reward_model.model.rm_tokenizer={own}: there is no such directory. Correct the path."
        )
    largest = _largest_token(source)
    if known is not None and largest is not None and largest >= known:
        raise DataError(
            f"{_here()}: the tokenizer of {source} has token ids up to {largest}, but the reward model "
            f"{path} knows 0 to {known - 1} (vocab_size): they do not belong together. Set "
            "reward_model.model.rm_tokenizer to the directory of the reward model's own tokenizer."
        )


def _largest_token(path: Path) -> int | None:
    """The largest id of a tokenizer.json, None if there is none."""
    if not (path / "tokenizer.json").is_file():
        return None
    content = _read_json(path / "tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=None)


def model_positions(model: ModelConfig) -> int | None:
    """Positions of a model in a local directory, rope scaling included; None if its config does not tell."""
    config = _read_json(Path(model.path).expanduser() / "config.json")
    return num_positions(language_part(overridden(config, model.override_config)))


def check_lengths(cfg: Config, path: Path, role: str) -> None:
    """ConfigError if the longest row has more tokens than the model of a role has positions.

    A reward model cuts longer ones; a judge is not asked about them.
    """
    if ROLES[role].any_length:
        return
    rollout = cfg.actor_rollout_ref.rollout
    beside = ROLES[role].positions_beside
    longest = rollout.prompt_length + rollout.response_length + beside
    config = overridden(_read_json(path / "config.json"), role_model(cfg, role).override_config)
    known = num_positions(language_part(config))
    if known is not None and longest > known:
        half = max(1, (known - beside) // 2)
        one_more = f" + {beside} that its engine samples" if beside else ""
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length{one_more} = {longest} tokens, but "
            f"{path}/config.json gives the model {known} positions (max_position_embeddings): it was not "
            f"trained on longer texts. Lower the lengths (data.max_prompt_length={half} and "
            f"data.max_response_length={half} fit), or extend the model by model.override_config, e.g. its "
            "rope_scaling."
        )


def check_stop_tokens(cfg: Config, path: Path, role: str) -> None:
    """ConfigError if a policy's responses are to end at a token that the model does not have."""
    stops = cfg.actor_rollout_ref.rollout.stop_token_ids
    if not ROLES[role].takes_weights or not stops:
        return
    config = overridden(_read_json(path / "config.json"), role_model(cfg, role).override_config)
    known = language_part(config).get("vocab_size")
    if isinstance(known, int) and max(stops) >= known:
        key = f"{ROLES[role].group}.stop_token_ids"
        raise ConfigError(
            f"{key}=[{','.join(map(str, stops))}]: {path}/config.json gives the model the tokens 0 to "
            f"{known - 1} (vocab_size), so {max(stops)} never ends a response. Correct it, or leave it out."
        )


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Positions of a model, rope scaling included; None if its config does not tell."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in STRETCHED:
        return positions
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(original * float(rope.get("factor") or 1.0)))


def check_tokenizer(cfg: Config) -> None:
    """DataError unless the tokenizer of data.tokenizer, or else of the model, has its files."""
    tokenizer = cfg.data.tokenizer
    if tokenizer and not Path(tokenizer).expanduser().is_dir():
        raise DataError(
            f"{_here()}: data.tokenizer={tokenizer}: there is no such directory. Correct the path."
        )
    model = cfg.actor_rollout_ref.model.path
    check_tokenizer_files(Path(tokenizer).expanduser() if tokenizer else model_dir(model))


def _why_no_weights(path: Path) -> str:
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if found:
        return f"{', '.join(found[:3])}, but neither {WEIGHTS} nor {INDEX}"
    if any(path.glob("*.bin")):
        return "only pickled .bin files, which can run code when read"
    return "no *.safetensors file"


def _read_header(path: Path) -> dict[str, Any]:
    """Name -> {dtype, shape, data_offsets} of each tensor of a safetensors file that is whole."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _check_safetensors(path: Path) -> None:
    """The header's length and the end of its last tensor must match the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= size - _LENGTH_BYTES:
            raise DataError(
                f"{_here()}: {path} is no safetensors file, or is cut short: it has {size} bytes. Download "
                "it again (of a Git clone without Git LFS only pointers arrive)."
            )
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DataError(
                f"{_here()}: {path} is no safetensors file: {error} in its header. Download it again."
            ) from None
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise DataError(
            f"{_here()}: {path} has {size} bytes instead of {expected}: it is damaged. Download it again."
        )


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{_here()}: {path} cannot be read: {error}. Restore the file.") from None
    if not isinstance(content, dict):
        raise DataError(f"{_here()}: {path} holds no JSON object. Restore the file.")
    if not isinstance(content.get("model_type"), str):
        content.pop("model_type", None)  # tables are asked for it; see check_config_file
    return content


def _here() -> str:
    """This machine, for messages: a directory may be bad on one of several."""
    return f"on host {socket.gethostname()}"
