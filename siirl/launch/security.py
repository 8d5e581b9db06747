"""`siirl check --security`: what a run lets in, what runs unconfined, who reads its files; and the fixes.

Looks at this machine and starts nothing of the user's. docs/security.md explains the lines.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from siirl.access import is_loopback
from siirl.agents.tool_files import code_of_tools, servers_of_tools
from siirl.compiler.plan import AgentStage, Plan
from siirl.config import Config
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.config.values import SECRET_KEYS
from siirl.errors import SandboxError
from siirl.guarded_files import user_name, who_may_change
from siirl.launch.devices import count_gpus
from siirl.launch.doctor import Line
from siirl.launch.job import Launcher
from siirl.launch.run_folder import written_folders
from siirl.sandbox.box import strongest_isolation

REFERENCE = re.compile(r"(?!\d)[\w./~-]+:[A-Za-z_]\w*")
"""Code of the user's, as keys name it: file.py:name or pkg.mod:name."""
SERVED = ("openenv:", "nemo_gym:")
"""Before the address of an environment that runs elsewhere."""
SHUT_IN = "With other users here, run in a network namespace (docs/security.md, What has no token)."
FIREWALL = "Let only the machines of the run reach each other."
PLAIN = "It is not encrypted: let nobody listen on the way (ssh -L)."
ENTER, READ = 0o001, 0o005
WORKER, THREAD = "runs in each worker", "runs in threads of the workers"


@dataclass(frozen=True)
class Subject:
    """The run that is looked at."""

    cfg: Config
    plan: Plan
    node_cfgs: Mapping[str, Config]
    launcher: Launcher

    @property
    def configs(self) -> list[Config]:
        """The run's, and those of its nodes."""
        return [self.cfg, *self.node_cfgs.values()]

    @property
    def environments(self) -> list[str]:
        """What names the environments."""
        acting = (stage for inter in self.plan.interactions.values() for stage in inter.acting)
        return list(dict.fromkeys(stage.env.path for stage in acting if stage.env))


def _socket(what: str, where: str, away: bool, asks: str = "", remedy: str = "") -> Line:
    """away: others than programs of this machine reach it. asks: for what; "": for nothing, so it is open."""
    who = "whoever reaches the machine" if away else "users and programs of this machine"
    if asks:
        return Line("ok", what, f"{where}: {who}; asks for {asks}", remedy)
    return Line("open", what, f"{where}: {who}; no token", remedy or (FIREWALL if away else SHUT_IN))


def _http(what: str, address: str, asks: str) -> Line:
    away = not is_loopback(address.rpartition(":")[0])
    return _socket(what, address, away, asks, PLAIN if asks and away else "")


def listens(run: Subject) -> Iterator[Line]:
    """What listens, who reaches it, and what it asks for."""
    trainer, env, by_ray = run.cfg.trainer, os.environ, run.launcher == "ray"
    away = run.launcher != "local" and not (by_ray and trainer.nnodes == 1)
    others = "its address in Ray" if by_ray else "all addresses of the first machine"
    yield _socket("torch's store", others if away else "127.0.0.1", away)
    picked = {"gloo": "the interface to the first machine" if away else "127.0.0.1"}
    if trainer.device == "cuda" or (trainer.device == "auto" and count_gpus(env, Path("/dev"))):
        picked["NCCL"] = "an interface that it picks"
    for library, where in picked.items():
        name = f"{library.upper()}_SOCKET_IFNAME"
        where = f"the interface {env[name]}" if env.get(name) else where
        remedy = f"On one machine: {name}=lo in the environment." if library == "NCCL" and not away else ""
        is_here = where in ("127.0.0.1", "the interface lo")
        yield _socket(f"{library}, of each rank", where, not is_here, remedy="" if is_here else remedy)
    for policy in sorted({one.policy for inter in run.plan.interactions.values() for one in inter.streams}):
        where = "the address to the first machine" if away else "127.0.0.1"
        yield _socket(f"requests to {policy}", where, away, "a token of the run, 32 random bytes")
    for program in filter(None, (inter.program for inter in run.plan.interactions.values())):
        if program["listen"]:
            asks = "the token of the run, then of an episode"
            yield _http("endpoint of clients", program["address"], asks)
        else:
            yield _socket("endpoint of programs", "127.0.0.1", False, "the token of an episode")
    for node in run.plan.nodes.values():
        if node.spec.is_asked:
            asks = "a tenant's key, or the server's; all who have one may load what any of them saved"
            yield _http("training service", run.node_cfgs[node.name].service.address, asks)
    backends = {model.backend for model in run.plan.models.values()}
    if "vllm" in backends:
        where = f"sockets in {tempfile.gettempdir()} and shared memory: this user alone"
        yield Line("ok", "vLLM", where)
    if "sglang" in backends:
        yield _socket("SGLang", "torch's store of each engine, at a free port of all addresses", True)
    if by_ray:
        token = "`ray get-auth-token --generate`, the same token and RAY_AUTH_MODE=token on all machines"
        asks, remedy = ("Ray's token", "") if _ray_asks(run) else ("", f"{token}; and a firewall.")
        yield _socket("Ray", "all addresses of its machines, for programs to run", True, asks, remedy)
    if "prometheus" in trainer.logger:
        variable = trainer.prometheus_token_env
        line = _http("metrics", trainer.prometheus_address, f"the token in {variable}" if variable else "")
        yield line if variable else replace(line, remedy="Set trainer.prometheus_token_env.")


def _ray_asks(run: Subject) -> bool:
    """Whether Ray asks for a token: a cluster of the run's own does, another where this machine has one."""
    env = os.environ
    if mode := env.get("RAY_AUTH_MODE"):
        return mode.lower() == "token"
    own = not (run.cfg.ray_init.address or env.get("RAY_ADDRESS")) and run.cfg.trainer.nnodes == 1
    has_token = "RAY_AUTH_TOKEN" in env or "RAY_AUTH_TOKEN_PATH" in env
    return own or has_token or (Path.home() / ".ray" / "auth_token").is_file()


def asks(run: Subject) -> Iterator[Line]:
    """Services that the run asks: prompts, answers and tokens go there."""
    served = (path for path in run.environments if path.startswith(SERVED))
    urls: list[tuple[str, Any]] = [(f"environment {path}", path.partition(":")[2]) for path in served]
    for cfg in run.configs:
        urls += [(name, get(cfg, name)) for name in all_keys() if name.endswith(".url")]
        urls.append(("reward_model.sandbox_fusion.url", (cfg.reward_model.sandbox_fusion or {}).get("url")))
        urls += [(f"MCP server {url}", url) for url in (one.get("url") for one in _tool_servers(cfg))]
    for what, url in dict.fromkeys((what, url) for what, url in urls if isinstance(url, str) and url):
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "ws") and not is_loopback(parts.hostname or "")
        told = f"{parts.scheme}://{parts.hostname}{': anybody on the way can read' if plain else ''}"
        yield Line("open" if plain else "ok", what, told, f"Use {parts.scheme}s://." if plain else "")


def runs(run: Subject) -> Iterator[Line]:
    """As whom all of it runs, with which code of the user's and others, and what holds code of a model."""
    uid = os.geteuid()
    on = "" if run.launcher == "local" else ", on each machine as whom its processes were started"
    remedy = "" if uid else "Start it as another user than root, or in a container."
    yield Line("ok" if uid else "open", "workers and all below", f"run as {user_name(uid)}{on}", remedy)
    remedy = "Unless you have written or read it, run it in a container that holds nothing else."
    for what, place in _code(run).items():
        told = f"{place}, with the files, the network and the environment of that user"
        yield Line("open", what, told, remedy)
    what = "programs that a model writes (code rewards, the tool python)"
    try:
        isolation = strongest_isolation()
    except SandboxError as error:
        yield Line("open", what, "no sandbox works here: they are refused", f"{error}.")
        return
    gaps = "".join(f"; {gap}" for gap in isolation.gaps())
    remedy = "docs/security.md says what better modes need." if gaps else ""
    yield Line("open" if gaps else "ok", what, f"sandbox, mode {isolation.mode}{gaps}", remedy)


def _code(run: Subject) -> dict[str, str]:
    """Code, which may do all that the run's user may -> where it runs."""
    found: list[tuple[str | None, str]] = []
    for cfg in run.configs:
        found.append((cfg.custom_reward_function.path, "runs in reward processes of each rank"))
        for name in all_keys():
            value = None if name.endswith(".env_path") else get(cfg, name)
            place = "runs in this command and in the launcher" if name.startswith("dag.") else WORKER
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and REFERENCE.fullmatch(text) and "://" not in text:
                    found.append((text, place))
            if name.endswith(".model.trust_remote_code") and value is True:
                found.append((f"{name}=true", f"the Python code of the model's folder {WORKER}"))
        multi_turn = cfg.actor_rollout_ref.rollout.multi_turn
        tools = code_of_tools(multi_turn) if multi_turn.enable else ()
        found += [(f"tool {reference}", THREAD) for reference in tools]
        commands = filter(None, (server.get("command") for server in _tool_servers(cfg)))
        found += [(f"MCP server {command!r}", "is a process beside each worker") for command in commands]
    found += [(node.executable, WORKER) for node in run.plan.nodes.values()]
    for interaction in run.plan.interactions.values():
        for stage in interaction.stages:
            process = stage.process_path if isinstance(stage, AgentStage) else None
            found += [(code, WORKER) for code in (stage.until, stage.route, process)]
        program = interaction.program
        if program and program["command"] and not program["is_function"]:
            found.append((f"program {program['command']!r}", "is a process for each episode"))
    found += [(f"environment {path}", THREAD) for path in run.environments if not path.startswith(SERVED)]
    places: dict[str, str] = {}
    for what, place in found:
        if what is not None:
            places.setdefault(what, place)
    return places


def _tool_servers(cfg: Config) -> list[dict[str, Any]]:
    multi_turn = cfg.actor_rollout_ref.rollout.multi_turn
    return servers_of_tools(multi_turn) if multi_turn.enable else []


def files(run: Subject) -> Iterator[Line]:
    """What the run writes, files that say what it does and others can change, and secrets on its command."""
    umask = os.umask(0)
    os.umask(umask)
    for key, folder in written_folders(run.cfg).items():
        made = not folder.exists()
        parent = next(path for path in (folder, *folder.parents) if path.is_dir())
        readable = _others_may(parent, ENTER if made else READ) and not (made and umask & READ)
        told = "all users can read it, except job.json and run_config.yaml, which hold secrets"
        remedy = "Set `umask 077` before the command." if made else "Make it private by chmod 700."
        where = f"{folder}{' will be made' if made else ''}: {told if readable else 'private'}"
        yield Line("open" if readable else "ok", key, where, remedy if readable else "")
        if not made and (why := who_may_change(folder)):
            program = (
                "Others can write there, and a run's folder says what `siirl resume` and `siirl eval` run"
            )
            remedy = "Choose a folder that is yours, and chmod go-w it."
            yield Line("open", f"who can write {key}", f"{folder}: {why}. {program}", remedy)
    named = [reference.rpartition(" ")[2].partition(":")[0] for reference in _code(run)]
    for name in dict.fromkeys([*named, str(run.cfg.dag.workflow_path or "")]):
        path = Path(name).expanduser().absolute()
        for found in (path, path.parent) if path.is_file() else ():
            if why := who_may_change(found):
                told = f"{found}: others can write: {why}"
                yield Line("open", "code", told, "chown it to you, and chmod go-w it.")
                break
    shown = [name for name in run.cfg.explicit if name.endswith(SECRET_KEYS)]
    for name in [*shown, *["ray_init.env_vars"] * bool(run.cfg.ray_init.env_vars)]:
        told = "on a command line all users of this machine can read it (ps)"
        remedy = "Put secrets into the environment (HF_TOKEN), or into a file that only you can read."
        yield Line("open", name, told, remedy)


def _others_may(path: Path, bits: int) -> bool:
    """Whether any user may do this with a path: the bits are of others."""
    try:
        reached = all(parent.stat().st_mode & ENTER for parent in path.parents)
        return reached and path.stat().st_mode & bits == bits
    except OSError:
        return False


def security_report(run: Subject) -> str:
    """The report: a line for each thing, by section."""
    told: list[str] = []
    num_open = 0
    for section in (listens, asks, runs, files):
        found = list(section(run))
        told += [f"{section.__name__}:", *(f"  {line}" for line in found)] if found else []
        num_open += sum(line.grade == "open" for line in found)
    return "\n".join(
        [*told, f"{num_open} open: somebody could misuse them without a token (docs/security.md)."]
    )
