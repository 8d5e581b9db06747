"""`siirl check --security`: what a run lets in, what runs unconfined, who reads its files; and the fixes.

Looks at this machine and starts nothing of the user's. docs/security.md explains the lines.
"""

import os
import pwd
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from siirl.access import is_loopback
from siirl.agents.tool_files import code_of_tools, servers_of_tools
from siirl.compiler.plan import AgentStage, Plan, Stage
from siirl.config import Config
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.config.values import SECRET_KEYS
from siirl.errors import SandboxError
from siirl.guarded_files import who_may_change
from siirl.launch.devices import count_gpus
from siirl.launch.job import Launcher
from siirl.launch.run_folder import written_folders
from siirl.observe.printable import printable
from siirl.sandbox.box import strongest_isolation

REFERENCE = re.compile(r"(?!\d)[\w./~-]+:[A-Za-z_]\w*")
"""Code of the user's, as keys name it: file.py:name or pkg.mod:name."""
SERVED = ("openenv:", "nemo_gym:")
"""Before the address of an environment that runs elsewhere."""
HERE, CLUSTER = "users and programs of this machine", "whoever reaches the machine"
SHUT_IN = "With other users here, run in a network namespace (docs/security.md, What has no token)"
FIREWALL = "Let only the machines of the run reach each other"
PRIVATE = "Make it private by chmod 700"
PROGRAM = "Others can write there, and a run's folder says what `siirl resume` and `siirl eval` run"
OWN = "Choose a folder that is yours, and chmod go-w it"
READ, ENTER = 0o004, 0o001


@dataclass(frozen=True)
class Line:
    """One thing that somebody else could use."""

    open: bool
    """Whether somebody can who shows nothing for it."""
    what: str
    found: str
    remedy: str = ""
    """How to close it; "" where nothing is to be done."""

    def __str__(self) -> str:
        remedy = f". {self.remedy}" if self.remedy else ""
        return printable(f"  {'open' if self.open else 'ok':<5} {self.what}: {self.found}{remedy}.")


@dataclass(frozen=True)
class Subject:
    """The run that is looked at."""

    cfg: Config
    plan: Plan
    node_cfgs: Mapping[str, Config]
    launcher: Launcher
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def local(self) -> bool:
        return self.launcher == "local"

    @property
    def one_machine(self) -> bool:
        """Whether its ranks meet on loopback: they all are here."""
        return self.local or (self.launcher == "ray" and self.cfg.trainer.nnodes == 1)

    @property
    def has_gpus(self) -> bool:
        device = self.cfg.trainer.device
        return device == "cuda" or (device == "auto" and bool(count_gpus(self.env, Path("/dev"))))

    def configs(self) -> Iterator[tuple[str, Config]]:
        """The run's configuration, and those of its nodes, with their names for messages."""
        yield "", self.cfg
        yield from ((f"node {name!r}: ", cfg) for name, cfg in self.node_cfgs.items())

    def stages(self) -> Iterator[Stage]:
        for interaction in self.plan.interactions.values():
            yield from interaction.stages

    def environments(self) -> Iterator[str]:
        """What names the environments, as often as nodes do."""
        for interaction in self.plan.interactions.values():
            yield from (stage.env.path for stage in interaction.acting if stage.env)


def torch_store(run: Subject) -> Iterator[Line]:
    """The rendezvous store, served by rank 0 or by torchrun."""
    if run.one_machine:
        yield Line(True, "torch's store, of rank 0", f"127.0.0.1: {HERE}; no token", SHUT_IN)
    else:
        of = "its address in Ray" if run.launcher == "ray" else "all addresses of the first machine"
        yield Line(True, "torch's store", f"{of}: {CLUSTER}; no token", FIREWALL)


def gloo(run: Subject) -> Iterator[Line]:
    """Sockets between the ranks, for what is not on GPUs."""
    interface = run.env.get("GLOO_SOCKET_IFNAME", "lo" if run.one_machine else "")
    if interface == "lo":
        yield Line(True, "gloo, of each rank", f"127.0.0.1: {HERE}; no token", SHUT_IN)
    else:
        where = f"the interface {interface}" if interface else "the interface to the first machine"
        yield Line(True, "gloo, of each rank", f"{where}: {CLUSTER}; no token", FIREWALL)


def nccl(run: Subject) -> Iterator[Line]:
    """Sockets by which NCCL finds its peers, and moves data where nothing better is."""
    if not run.has_gpus:
        return
    interface = run.env.get("NCCL_SOCKET_IFNAME", "")
    where = f"the interface {interface}" if interface else "an interface that NCCL picks"
    remedy = FIREWALL
    if run.one_machine and not interface:
        remedy = "On one machine: NCCL_SOCKET_IFNAME=lo in the environment"
    who = HERE if interface == "lo" else CLUSTER
    yield Line(True, "NCCL, of each rank with a GPU", f"{where}: {who}; no token", remedy)


def streams(run: Subject) -> Iterator[Line]:
    """Engines that other ranks ask."""
    served = {stream.policy for inter in run.plan.interactions.values() for stream in inter.streams}
    for policy in sorted(served):
        where = f"127.0.0.1: {HERE}" if run.one_machine else f"the address to the first machine: {CLUSTER}"
        yield Line(False, f"requests to {policy}", f"{where}; asks for a token of the run, 32 random bytes")


def programs(run: Subject) -> Iterator[Line]:
    """The endpoint of programs that play episodes."""
    for interaction in run.plan.interactions.values():
        if (program := interaction.program) is None:
            continue
        if not program["listen"]:
            yield Line(False, "endpoint of programs", f"127.0.0.1: {HERE}; asks for the token of an episode")
            continue
        host = program["address"].rpartition(":")[0]
        where = f"{program['address']}: {HERE if is_loopback(host) else CLUSTER}"
        asks = f"{where}; asks for the token of the run, then of an episode"
        readable = not is_loopback(host)
        remedy = "It is not encrypted: let nobody listen between clients and run (ssh -L)" if readable else ""
        yield Line(False, "endpoint of clients", asks, remedy)


def training_service(run: Subject) -> Iterator[Line]:
    """The server of `siirl serve`."""
    for node in run.plan.nodes.values():
        if not node.spec.is_asked:
            continue
        address = run.node_cfgs[node.name].service.address
        away = not is_loopback(address.rpartition(":")[0])
        asks = f"{address}: {CLUSTER if away else HERE}; asks for the server's key; all who have it may read"
        remedy = "It is not encrypted: let nobody listen between clients and server (ssh -L)" if away else ""
        yield Line(False, "training service", f"{asks} and load what any of them saved", remedy)


def vllm(run: Subject) -> Iterator[Line]:
    """What vLLM's processes talk through."""
    if any(model.backend == "vllm" for model in run.plan.models.values()):
        yield Line(False, "vLLM", f"sockets in {tempfile.gettempdir()} and shared memory: this user alone")


def sglang(run: Subject) -> Iterator[Line]:
    """What SGLang's processes talk through."""
    if any(model.backend == "sglang" for model in run.plan.models.values()):
        where = f"torch's store of each engine, at a free port of all addresses: {CLUSTER}; no token"
        yield Line(True, "SGLang", where, FIREWALL)


def ray(run: Subject) -> Iterator[Line]:
    """Ray's own ports: who reaches them can start programs."""
    if run.launcher != "ray":
        return
    where = f"all addresses of its machines: {CLUSTER}"
    if _ray_asks(run):
        yield Line(False, "Ray", f"{where}; asks for Ray's token")
        return
    generate = "`ray get-auth-token --generate`, the same token and RAY_AUTH_MODE=token on all machines"
    yield Line(True, "Ray", f"{where}, and runs what they send; no token", f"{generate}; and a firewall")


def _ray_asks(run: Subject) -> bool:
    """Whether Ray asks for a token: a cluster of the run's own does, another where this machine has one."""
    if mode := run.env.get("RAY_AUTH_MODE"):
        return mode.lower() == "token"
    own = not (run.cfg.ray_init.address or run.env.get("RAY_ADDRESS")) and run.cfg.trainer.nnodes == 1
    has_token = "RAY_AUTH_TOKEN" in run.env or "RAY_AUTH_TOKEN_PATH" in run.env
    return own or has_token or (Path.home() / ".ray" / "auth_token").is_file()


def prometheus(run: Subject) -> Iterator[Line]:
    """Metrics to be fetched."""
    trainer = run.cfg.trainer
    if "prometheus" not in trainer.logger:
        return
    host = trainer.prometheus_address.rpartition(":")[0]
    where = f"{trainer.prometheus_address}: {HERE if is_loopback(host) else CLUSTER}"
    if trainer.prometheus_token_env:
        yield Line(False, "metrics", f"{where}; asks for the token in {trainer.prometheus_token_env}")
    else:
        yield Line(True, "metrics", f"{where}; no token", "Set trainer.prometheus_token_env")


def services(run: Subject) -> Iterator[Line]:
    """Services that the run asks: prompts, answers and tokens go there."""
    told = set()
    for path in run.environments():
        if path.startswith(SERVED):
            yield _service(f"environment {path}", path.partition(":")[2])
    for who, cfg in run.configs():
        urls = {name: get(cfg, name) for name in all_keys() if name.endswith(".url")}
        urls["reward_model.sandbox_fusion.url"] = (cfg.reward_model.sandbox_fusion or {}).get("url")
        multi_turn = cfg.actor_rollout_ref.rollout.multi_turn
        if multi_turn.enable:
            urls |= {
                f"MCP server {server['url']}": server["url"]
                for server in servers_of_tools(multi_turn)
                if "url" in server
            }
        for name, url in urls.items():
            if not isinstance(url, str) or not url or (name, url) in told:
                continue
            told.add((name, url))
            yield _service(f"{who}{name}", url)


def _service(what: str, url: str) -> Line:
    parts = urlsplit(url)
    plain = parts.scheme in ("http", "ws") and not is_loopback(parts.hostname or "")
    found = f"{parts.scheme}://{parts.hostname}" + (": anybody on the way can read" if plain else "")
    return Line(plain, what, found, f"Use {parts.scheme}s://" if plain else "")


def user(run: Subject) -> Iterator[Line]:
    """As whom all of it runs."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "a user without a name"
    on = "" if run.local else ", on each machine as whom its processes were started"
    remedy = "Start it as another user than root, or in a container" if uid == 0 else ""
    yield Line(uid == 0, "workers and all below", f"run as {name} (uid {uid}){on}", remedy)


def code(run: Subject) -> Iterator[Line]:
    """Code of the user's and of others, which may do all that the run's user may."""
    seen: dict[str, str] = {}
    for reference, place in _code(run):
        seen.setdefault(reference, place)
    for reference, place in seen.items():
        yield Line(
            True,
            reference,
            f"{place}, with the files, the network and the environment of that user",
            "Unless you have written or read it, run it in a container that holds nothing else",
        )


def _code(run: Subject) -> Iterator[tuple[str, str]]:
    """(what, where it runs), with repetitions."""
    worker, thread = "runs in each worker", "runs in threads of the workers"
    for _, cfg in run.configs():
        if cfg.custom_reward_function.path is not None:
            yield cfg.custom_reward_function.path, "runs in reward processes of each rank"
        for name in all_keys():
            value = None if name.endswith(".env_path") else get(cfg, name)
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and REFERENCE.fullmatch(text) and "://" not in text:
                    place = "runs in this command and in the launcher" if name.startswith("dag.") else worker
                    yield text, place
            if name.endswith(".model.trust_remote_code") and value is True:
                yield f"{name}=true", f"the Python code of the model's folder {worker}"
        multi_turn = cfg.actor_rollout_ref.rollout.multi_turn
        if multi_turn.enable:
            yield from ((f"tool {reference}", thread) for reference in code_of_tools(multi_turn))
            commands = (server.get("command") for server in servers_of_tools(multi_turn))
            yield from (
                (f"MCP server {command!r}", "is a process beside each worker")
                for command in commands
                if command
            )
    for node in run.plan.nodes.values():
        if node.executable is not None:
            yield node.executable, worker
    for stage in run.stages():
        process = stage.process_path if isinstance(stage, AgentStage) else None
        yield from ((code, worker) for code in (stage.until, stage.route, process) if code is not None)
    for path in run.environments():
        if not path.startswith(SERVED):
            yield f"environment {path}", thread
    for interaction in run.plan.interactions.values():
        if (program := interaction.program) and program["command"] and not program["is_function"]:
            yield f"program {program['command']!r}", "is a process for each episode"


def sandbox(run: Subject) -> Iterator[Line]:
    """What holds programs that a model wrote: code rewards, and the tool `python`."""
    what = "programs that a model writes (code rewards, the tool python)"
    try:
        isolation = strongest_isolation()
    except SandboxError as error:
        yield Line(True, what, "no sandbox works here: they are refused", str(error))
        return
    gaps = "".join(f"; {gap}" for gap in isolation.gaps())
    remedy = "docs/security.md says what better modes need" if gaps else ""
    yield Line(bool(gaps), what, f"sandbox, mode {isolation.mode}{gaps}", remedy)


def folders(run: Subject) -> Iterator[Line]:
    """What the run writes: rollouts, samples, logs and checkpoints."""
    umask = os.umask(0)
    os.umask(umask)
    for key, folder in written_folders(run.cfg).items():
        if folder.exists():
            readable = _others_may(folder, READ | ENTER)
            yield Line(readable, key, f"{folder}: {_readers(readable)}", PRIVATE if readable else "")
            if why := who_may_change(folder):
                yield Line(True, f"who can write {key}", f"{folder}: {why}. {PROGRAM}", OWN)
            continue
        parent = next(path for path in folder.parents if path.is_dir())
        readable = _others_may(parent, ENTER) and not umask & READ
        remedy = "Set `umask 077` before the command" if readable else ""
        yield Line(readable, key, f"{folder} will be made: {_readers(readable)}", remedy)


def changeable(run: Subject) -> Iterator[Line]:
    """Files that say what the run does, which others can change."""
    named = [reference.rpartition(" ")[2].partition(":")[0] for reference, _ in _code(run)]
    named += [str(run.cfg.dag.workflow_path or "")]
    for name in dict.fromkeys(named):
        path = Path(name).expanduser().absolute()
        for found in (path, path.parent) if path.is_file() else ():
            if why := who_may_change(found):
                remedy = "chown it to you, and chmod go-w it"
                yield Line(True, "code", f"{found}: others can write: {why}", remedy)
                break


def secrets(run: Subject) -> Iterator[Line]:
    """Secrets that a command line shows."""
    shown = [name for name in run.cfg.explicit if name.endswith(SECRET_KEYS)]
    shown += ["ray_init.env_vars"] * bool(run.cfg.ray_init.env_vars)
    for name in shown:
        yield Line(
            True,
            name,
            "on a command line all users of this machine can read it (ps)",
            "Put secrets into the environment (HF_TOKEN), or into a file that only you can read",
        )


def _others_may(path: Path, bits: int) -> bool:
    """Whether any user may do this with a path: the bits are of others."""
    try:
        reached = all(parent.stat().st_mode & ENTER for parent in path.parents)
        mode = path.stat().st_mode
    except OSError:
        return False
    return reached and mode & bits == bits


def _readers(readable: bool) -> str:
    return (
        "all users can read it, except job.json and run_config.yaml, which hold secrets"
        if readable
        else "private"
    )


Check = Callable[[Subject], Iterator[Line]]
SECTIONS: Mapping[str, tuple[Check, ...]] = {
    "listens": (
        *(torch_store, gloo, nccl, streams, programs, training_service),
        *(vllm, sglang, ray, prometheus),
    ),
    "asks": (services,),
    "runs": (user, code, sandbox),
    "files": (folders, changeable, secrets),
}
"""What is looked at, by section of the report."""


def security_report(run: Subject) -> str:
    """The report: a line for each thing, by section."""
    lines: list[str] = []
    num_open = 0
    for title, checks in SECTIONS.items():
        found: Iterable[Line] = [line for check in checks for line in check(run)]
        if found:
            lines += [f"{title}:", *map(str, found)]
            num_open += sum(line.open for line in found)
    return "\n".join(
        [*lines, f"{num_open} open: somebody could misuse them without a token (docs/security.md)."]
    )
