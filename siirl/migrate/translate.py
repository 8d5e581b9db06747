"""From the settings of siiRL or verl to those of siirl: each one kept, changed, dropped, or impossible."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from siirl.config.algorithm_table import LOSSES, OWN_LOSS
from siirl.config.effects import unmet
from siirl.config.foreign import POLICY, ROLLOUT, foreign
from siirl.config.keys import Key
from siirl.config.load import OVERRIDE
from siirl.config.root import all_groups, all_keys
from siirl.config.tree import split_name
from siirl.config.values import check_available, closest, convert, show
from siirl.errors import ConfigError, NotSupportedError, UserError
from siirl.migrate.correction import GROUP, translate_correction
from siirl.migrate.defaults import add_defaults, has_experts, names_vision_model, refused_by_megatron
from siirl.migrate.translation import Setting, Translation, scalar, typed, unquoted, value_of

MEGATRON_NAMES = ("ppo_megatron_trainer", "megatron_ppo_dag_trainer")
PRESET_NAMES = ("ppo_trainer", "ppo_dag_trainer", *MEGATRON_NAMES)
CONFIG_OPTIONS = ("--config-name", "--config-path", "--config-dir")
EMBODIED_NAMES = ("embodied_grpo_trainer", "embodied_srpo_trainer")
STRATEGIES = {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
GLOBAL_SIZES = {
    f"{POLICY}.actor.ppo_micro_batch_size": f"{POLICY}.actor.ppo_micro_batch_size_per_gpu",
    f"{POLICY}.ref.log_prob_micro_batch_size": f"{POLICY}.ref.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size": f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
}
SPEED_ALONE = re.compile(
    r"\w*_fusion|\w+_fusion_impl|tp_comm_overlap\w*|overlap_\w+_comm|batch_p2p_comm|attention_backend|use_flash_attn"
    r"|use_fused_\w+|deallocate_pipeline_outputs|delay_wgrad_compute|enable_cuda_graph|persist_layer_norm"
    r"|moe_(enable_deepep|shared_expert_overlap|token_dispatcher_type)"
)
"""Options of a transformer that pick kernels, or when tensors travel."""
COMPARED = "algorithm.gdpo_reward_"
MANAGER = "reward_model.reward_manager"
SWITCHES = ("enable", "enabled")
OFF = ("false", "null", "none", "0", "")
PROFILED = {
    f"{POLICY}.actor": "actor",
    f"{POLICY}.ref": "ref",
    ROLLOUT: "rollout",
    "critic": "critic",
    "reward_model": "reward",
}
"""The groups of verl whose profiler.enable picks whom its profiler records -> profiler.roles."""


def translate(origin: str, arguments: Sequence[str]) -> Translation:
    """The settings of a command line of `origin` (siirl or verl), for siirl."""
    result = Translation()
    given = list(_settings(_options(arguments, result), result))
    values = {name: value for _, name, value in given}
    for sign, name, value in given:
        off = _switched_off(name, value, values)
        if off:
            result.add("dropped", f"{sign}{name}={value}", off)
        elif not name.startswith((GROUP, COMPARED)):
            _translate_one(sign, name, value, result)
    for kind, there, why, name, value in translate_correction(values):
        result.add(kind, there, why, name, value)
    _loggers(values, result)
    _compared_rewards(values, result)
    _reward_of_groups(result)
    _sizes_over_ranks(result)
    _one_machine(result)
    _without_effect_there(result)
    _asked_by_a_function(values, result)
    _bounds_of_dppo(result)
    _profiled(values, result)
    add_defaults(origin, values, result)
    _engines_of_a_server(result)
    _experts_of_an_engine(result)
    _images(result)
    _refused_without_effect(result)
    return result


def _switched_off(name: str, value: str | None, values: Mapping[str, str | None]) -> str:
    """Why a key that siirl does not have asks for nothing: it has no value, or a group of theirs is off."""
    known = foreign(name)
    if name in all_keys() or name in GLOBAL_SIZES or value is None or (known and known[0].harmless):
        return ""
    parts = name.split(".")
    groups = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    for group in (group for group in groups if group not in all_groups()):
        for switch in SWITCHES:
            said = values.get(f"{group}.{switch}")
            if said is not None and _plain_text(said) in OFF:
                return f"{group}.{switch}={said}: the group does nothing"
        if group.endswith(".lora") and _plain_text(values.get(f"{group}.rank") or "0") in OFF:
            return f"{group}.rank is 0: the group does nothing"
    nothing = _plain_text(value) in ("null", "none", "", "[]", "{}")
    return "it asks for nothing" if nothing and known is None else ""


def _refused_without_effect(result: Translation) -> None:
    """Values that siirl refuses under keys that do nothing in this run are no loss."""
    for place, setting in enumerate(result.settings):
        key = all_keys().get(setting.there.lstrip("+").partition("=")[0])
        if key is None or setting.kind != "impossible":
            continue
        if why := unmet(key, lambda name: value_of(result, name)):
            result.settings[place] = replace(setting, kind="dropped", why=f"without effect: {why}")


def split_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """hydra's options that name a file, under their long names, and all other arguments."""
    left, options, waiting = [], {}, ""
    names = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
    for argument in arguments:
        if waiting:
            options[waiting], waiting = argument, ""
            continue
        head, equals, tail = argument.partition("=")
        head = names.get(head, head)
        if head in CONFIG_OPTIONS:
            options[head] = tail
            waiting = "" if equals else head
        else:
            left.append(argument)
    return options, left


def _options(arguments: Sequence[str], result: Translation) -> list[str]:
    """The arguments without hydra's options, which become settings or stay."""
    options, others = split_options(arguments)
    left = [argument for argument in others if not argument.startswith("-")]
    for argument in others:
        if argument.startswith("-"):
            result.add("dropped", argument, "an option of hydra, or of the program around it")
    name = options.get("--config-name", "").removesuffix(".yaml")
    if name in MEGATRON_NAMES:
        _strategies("megatron", f"--config-name={name}", result)
    elif name in EMBODIED_NAMES:
        result.add("impossible", f"--config-name={name}", "embodied agents")
    elif name and name not in PRESET_NAMES:
        result.options = [
            f"{option}={value}" for option, value in options.items() if option != "--config-dir"
        ]
    return left


def _strategies(strategy: str, there: str, result: Translation) -> None:
    for place, name in enumerate((f"{POLICY}.actor.strategy", "critic.strategy")):
        result.add("changed", there if not place else "", "the strategy of each model", name, strategy)


def _settings(arguments: Sequence[str], result: Translation) -> Iterator[tuple[str, str, str | None]]:
    """(sign, name, text or None) of each setting."""
    for argument in arguments:
        found = OVERRIDE.fullmatch(argument.strip())
        if found is None or not found["name"] or (found["value"] is None and found["sign"] != "~"):
            result.add("dropped", argument, "not a setting: key=value")
            continue
        yield found["sign"], found["name"].strip(), found["value"]


def _translate_one(sign: str, name: str, value: str | None, result: Translation) -> None:
    there = f"{sign}{name}" + ("" if value is None else f"={value}")
    if sign == "~" or value is None:
        result.add("dropped", there, "a key that is taken out has siirl's default")
        return
    known = foreign(name)
    role, _, engine = name.rpartition("model_engine")
    if engine == "" and (not role or f"{role}strategy" in all_keys()):
        strategy = STRATEGIES.get(_plain_text(value))
        if strategy is None:
            engines = " and ".join(sorted(set(STRATEGIES.values())))
            result.add("impossible", there, f"the engines are {engines}")
        elif role:
            _keep(f"{role}strategy", strategy, there, "", result)
        elif strategy != "fsdp":
            _strategies(strategy, there, result)
        else:
            result.add("dropped", there, "fsdp is the default")
        return
    if known is not None:
        entry, here = known
        asks_nothing = _plain_text(value) in entry.asks_nothing
        if asks_nothing and not here and name in all_keys():  # of siirl too, where the value says something
            _keep(name, value, there, "", result)
        elif asks_nothing:
            nothing = "nothing" if _plain_text(value) in OFF else "what siirl does anyway"
            result.add("dropped", there, entry.why if here else f"it asks for {nothing}")
        elif here:
            _keep(here, value, there, "" if entry.asks_nothing else entry.why, result)
        elif entry.harmless:
            result.add("dropped", there, entry.why)
        else:
            result.add("impossible", there, entry.why)
        return
    if name in GLOBAL_SIZES:
        result.add("changed", there, name=name, value=value)
        return
    if "@" in name or name in all_groups():
        result.add("impossible", there, "it picks a file of a group of keys: set the keys that the file sets")
        return
    _keep(name, value, there, "", result)


def _keep(name: str, value: str, there: str, why: str, result: Translation) -> None:
    """Add a setting under a name of siirl's, if it can be had and does something."""
    try:
        key_name, path = split_name(name)
    except ConfigError as error:
        message = str(error)
        near = closest(name, all_keys()) if message.endswith("exists.") else ""
        result.add("impossible", there, f"there is no such key{near}")
        return
    key = all_keys()[key_name]
    switch = {"true": "on", "false": "off"}.get(value.lower(), "")
    if switch in key.rule.synonyms:  # YAML reads an unquoted on or off as true or false
        value = switch
    reason = refused_by_megatron(name, value) if path else _unavailable(key, value)
    if value == "null" and (path or reason):
        default = "nothing is set" if path else f"the default here is {show(key, key.default)}"
        result.add("dropped", there, f"null there: {default}")
    elif (
        reason and ".override_transformer_config." in name and SPEED_ALONE.fullmatch(name.rpartition(".")[2])
    ):
        result.add("dropped", there, "a matter of speed: siirl's layers compute the same numbers without it")
    elif reason:
        result.add("impossible", there, reason)
    elif key.rule.ignored:
        result.add("dropped", there, key.rule.ignored)
    elif not path and key.rule.later:
        result.add("dropped", there, f"the default; another value would need {key.rule.later}")
    else:
        moved = there.lstrip("+") != f"{name}={value}"
        result.add("changed" if moved else "kept", there, why, name, value)


def _unavailable(key: Key, value: str) -> str:
    """Why a value cannot be had, or an empty string."""
    if "${" in value:
        return ""
    try:
        check_available(key, convert(key, typed(key, value)))
    except NotSupportedError as error:
        return str(error).removeprefix("not supported yet: ").partition(": ")[2] or str(error)
    except UserError as error:
        return str(error)
    return ""


def _plain_text(value: str) -> str:
    return unquoted(value.strip()).lower()


def _loggers(values: Mapping[str, str | None], result: Translation) -> None:
    """verl's logger of a file is what siirl always writes."""
    names = [unquoted(item.strip()) for item in (values.get("trainer.logger") or "").strip("[] ").split(",")]
    if "file" not in names:
        return
    left = f"[{','.join(name for name in names if name != 'file')}]"
    for place, setting in enumerate(result.settings):
        if setting.there.lstrip("+").startswith("trainer.logger=") and "file" in setting.there:
            why = _unavailable(all_keys()["trainer.logger"], left)
            kept = Setting(
                "changed", "trainer.logger", left, setting.there, "metrics.jsonl is always written"
            )
            result.settings[place] = Setting("impossible", "", "", setting.there, why) if why else kept


def _compared_rewards(values: Mapping[str, str | None], result: Translation) -> None:
    """verl's lists of the rewards that gdpo compares, and of their weights, are one map here."""
    given = {name: value for name, value in values.items() if name.startswith(COMPARED) and value}
    lists = {
        name: [unquoted(item.strip()) for item in text.strip("[] ").split(",")]
        for name, text in given.items()
    }
    names = lists.get(f"{COMPARED}keys", [])
    weights = lists.get(f"{COMPARED}weights", ["1"] * len(names))
    there = " ".join(f"{name}={value}" for name, value in given.items())
    if (
        given
        and len(names) == len(weights)
        and all(type(scalar(weight)) in (int, float) for weight in weights)
    ):
        pairs = ",".join(f"{name}:{weight}" for name, weight in zip(names, weights, strict=True))
        result.add("changed", there, "each has a weight", "algorithm.gdpo_rewards", f"{{{pairs}}}")
    elif given:
        result.add("impossible", there, "each key needs a weight, a number")
    for place, setting in enumerate(result.settings):
        name, _, value = setting.there.lstrip("+").partition("=")
        if name in ("reward.reward_manager.name", MANAGER) and _plain_text(value) == "gdpo":
            why = "algorithm.gdpo_rewards reads what the function returns"
            result.settings[place] = Setting("changed", MANAGER, "naive", setting.there, why)


def _reward_of_groups(result: Translation) -> None:
    """verl's sums of token rewards, by which groups are filtered, are the score unless more is in them."""
    inside = {
        "reward_model.overlong_buffer.enable": ["seq_reward", "seq_final_reward"],
        "algorithm.use_kl_in_reward": ["seq_final_reward"],
    }
    for place, setting in enumerate(result.settings):
        metric = _plain_text(setting.value)
        if setting.name != "algorithm.filter_groups.metric" or metric not in (
            "seq_reward",
            "seq_final_reward",
        ):
            continue
        more = [
            name for name, metrics in inside.items() if metric in metrics and value_of(result, name) is True
        ]
        if more:
            why = f"a sum with what {' and '.join(more)} adds: groups are filtered by the score, or acc"
            result.settings[place] = Setting("impossible", "", "", setting.there, why)
        else:
            why = "the sum of a row's rewards is its score"
            result.settings[place] = replace(setting, kind="changed", value="score", why=why)


def _sizes_over_ranks(result: Translation) -> None:
    """Micro-batch sizes over all ranks become those of each rank."""
    gpus, nodes = (value_of(result, f"trainer.{name}") for name in ("n_gpus_per_node", "nnodes"))
    for place, setting in enumerate(result.settings):
        here = GLOBAL_SIZES.get(setting.name)
        if here is None:
            continue
        rows = scalar(setting.value)
        whole = type(rows) is int and type(gpus) is int and type(nodes) is int
        if rows is None:
            result.settings[place] = Setting("dropped", "", "", setting.there, f"null; {here} decides")
        elif not whole:
            result.settings[place] = Setting("impossible", "", "", setting.there, f"set {here}")
        else:
            ranks = gpus * nodes
            size = max(1, rows // ranks)
            why = f"{rows} rows over {ranks} ranks are {size} on each"
            result.settings[place] = Setting("changed", here, str(size), setting.there, why)


def _one_machine(result: Translation) -> None:
    """A rollout engine lies on the GPUs of one machine."""
    name = f"{ROLLOUT}.tensor_model_parallel_size"
    size, gpus = value_of(result, name), value_of(result, "trainer.n_gpus_per_node")
    if type(size) is not int or type(gpus) is not int or size <= gpus:
        return
    why = (
        f"the GPUs of one engine are on one machine, which has {gpus}; each then holds {size / gpus:g} times "
        "the weights"
    )
    for place, setting in enumerate(result.settings):
        if setting.name == name:
            result.settings[place] = replace(setting, kind="changed", value=str(gpus), why=why)


def _engines_of_a_server(result: Translation) -> None:
    """Data parallel ranks of a server are engines of their own; of experts, which lie over all of them there,
    one engine over as many GPUs, if a machine has so many."""
    key, there = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size="
    size, gpus = value_of(result, key), value_of(result, "trainer.n_gpus_per_node")
    for place, setting in enumerate(result.settings):
        copies = scalar(_plain_text(setting.there.lstrip("+").partition("=")[2]))
        if (
            not setting.there.lstrip("+").startswith(there)
            or type(copies) is not int
            or type(size) is not int
        ):
            continue
        if not has_experts(str(value_of(result, f"{POLICY}.model.path") or "")):
            why = f"each {size} GPUs are an engine of their own: those of a server are {copies} engines"
            result.settings[place] = replace(setting, kind="dropped", why=why)
        elif type(gpus) is int and size * copies <= gpus:
            why = f"experts lie over {copies} x {size} GPUs there: here over those of one engine"
            result.settings[place] = replace(setting, kind="dropped", why=why)
            _set(result, key, str(size * copies), why)
        else:
            why = f"experts over {copies} x {size} GPUs: an engine is on one machine, which has {gpus}"
            result.settings[place] = replace(setting, kind="impossible", why=why)


def _experts_of_an_engine(result: Translation) -> None:
    """Experts that lie on the ranks of one engine are cut over them here, too: nothing is lost."""
    ranks = value_of(result, f"{ROLLOUT}.tensor_model_parallel_size")
    for place, setting in enumerate(result.settings):
        name, _, value = setting.there.lstrip("+").partition("=")
        size = scalar(_plain_text(value))
        wanted = name in (f"{ROLLOUT}.expert_parallel_size", f"{ROLLOUT}.moe_tensor_parallel_size")
        if wanted and type(size) is int and size <= ranks:
            why = "an engine cuts its experts over its ranks, as its other weights"
            result.settings[place] = replace(setting, kind="dropped", why=why)


def _images(result: Translation) -> None:
    """A model that sees images makes a dataset one of images there; its engine has one rank here."""
    if not names_vision_model(str(value_of(result, f"{POLICY}.model.path") or "")):
        return
    kind, engine = "data.dataset_type", f"{ROLLOUT}.tensor_model_parallel_size"
    wanted = {
        kind: ("vlm", "there the model says whether prompts may have images"),
        engine: ("1", "an engine of several ranks takes no images here: each GPU holds the whole model"),
    }
    for name, (value, why) in wanted.items():
        if show(all_keys()[name], value_of(result, name)) == value:
            continue
        _set(result, name, value, why)


def _set(result: Translation, name: str, value: str, why: str) -> None:
    """Give a key another value than the script has, or one that it lacks."""
    places = [place for place, setting in enumerate(result.settings) if setting.name == name]
    for place in places:
        there = result.settings[place].there
        result.settings[place] = Setting("changed" if there else "added", name, value, there, why)
    if not places:
        result.add("added", "", why, name, value)


def _without_effect_there(result: Translation) -> None:
    """Values that change nothing in siiRL and verl, and are refused here."""
    for place, setting in enumerate(result.settings):
        megatron = setting.name.removesuffix(".sequence_parallel")
        split = megatron != setting.name and _plain_text(setting.value) == "true"
        if split and value_of(result, f"{megatron}.tensor_model_parallel_size") == 1:
            why = "there is nothing to split over one tensor parallel rank"
            result.settings[place] = replace(setting, kind="changed", value="false", why=why)
        if setting.name == f"{POLICY}.actor.clip_ratio_low":
            low = scalar(setting.value)
            if type(low) in (int, float) and low > 1:
                why = "a ratio is never below 0: 1 is no lower bound at all"
                result.settings[place] = replace(setting, kind="changed", value="1", why=why)


def _asked_by_a_function(values: Mapping[str, str | None], result: Translation) -> None:
    """A reward function beside a served reward model asks that model in words, over verl's own client."""
    asked = any(
        name.endswith("custom_reward_function.path") and _plain_text(value or "") not in OFF
        for name, value in values.items()
    )
    for place, setting in enumerate(result.settings):
        name = setting.there.partition("=")[0]
        names_engine = name.endswith("reward_model.rollout.name") and not _switched_off(name, "", values)
        if asked and setting.kind == "dropped" and names_engine:
            why = (
                "a reward function that asks a model: let the model grade, as a judge (reward_model.judge.*)"
            )
            result.settings[place] = replace(setting, kind="impossible", why=why)


def _bounds_of_dppo(result: Translation) -> None:
    """verl's DPPO takes its bounds from the keys of the ratio clip."""
    instead = LOSSES.get(value_of(result, f"{POLICY}.actor.policy_loss.loss_mode") or "", OWN_LOSS).instead
    names = {
        f"{POLICY}.actor.{there}": f"{POLICY}.actor.policy_loss.{here}" for there, here in instead.items()
    }
    for place, setting in enumerate(result.settings):
        if setting.name in names:
            why = "the bounds of DPPO are no ratios, and have keys of their own"
            result.settings[place] = replace(setting, kind="changed", name=names[setting.name], why=why)


def _profiled(values: Mapping[str, str | None], result: Translation) -> None:
    """Roles whose profiler is on there are those that are recorded here."""
    on = [
        role
        for group, role in PROFILED.items()
        if _plain_text(values.get(f"{group}.profiler.enable") or "") == "true"
    ]
    if on:
        why = "whose profiler is on there"
        result.add("changed", "", why, "profiler.roles", f"[{','.join(on)}]")
