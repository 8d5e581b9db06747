"""A node that is asked from outside: it carries out what clients want, one request after the other."""

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from siirl.agents.outside.session_queue import kept_token, token_of
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.fsdp.adapter_engine import AdapterEngine
from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
from siirl.engines.train.packed.micro_batches import MicroBatchLimit
from siirl.errors import ConfigError, RequestError, UserError
from siirl.guarded_files import write_own
from siirl.nodes.context import LocalNode, OpContext
from siirl.observe.spans import phase, waiting, waits_outside
from siirl.service import wire
from siirl.service.commands import (
    Command,
    CreateModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    Refused,
    Release,
    Sample,
    Sampled,
    SaveExternal,
    SaveSampler,
    SaveState,
    Trained,
    tokens_of,
)
from siirl.service.desk import Desk, Ticket
from siirl.service.request_journal import Journal, Kept
from siirl.service.saved_weights import OPERATOR
from siirl.service.server_process import ServerProcess
from siirl.service.service_endpoint import Served
from siirl.service.snapshot_sampling import Sampler
from siirl.service.suspects import Suspects
from siirl.service.tenant_keys import KEY, tenant_keys
from siirl.service.tenants import Tenants

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often a worker without work says that it waits."""
WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
"""Where a word begins in the name of a command."""


class Service:
    """The server of a node, on its first rank, and what its commands are carried out on, on all."""

    def __init__(
        self, node: LocalNode, sampler: RolloutEngine, base: FSDPEngine, limit: MicroBatchLimit
    ) -> None:
        """base: with the frozen weights. limit: of the rows that a rank computes at once."""
        cfg, model = node.cfg, node.cfg.actor_rollout_ref.model
        base.onload(params=True, grads=False, optimizer=False)  # for good: each adapter computes on it
        self.folder = Path(cfg.trainer.output_dir).expanduser() / "service"
        self.desk: Desk | ServerProcess = Desk(cfg.service.max_tokens_per_s)
        engine = AdapterEngine(base, model.target_modules, model.lora_alpha, limit)
        self.tenants = Tenants(cfg, self.folder / "models", engine)
        self.sampler = Sampler(cfg, sampler, base, self.tenants, node.tokenizer)
        self._cfg, self._stops = cfg, tuple(node.dialect.stop_ids)
        self.journal, self.suspects = Journal(self.folder / "journal"), Suspects(self.folder)
        self._client_file = self.folder / "client.json"
        self._is_started = False

    @property
    def num_sessions(self) -> int:
        return self.desk.num_sessions if isinstance(self.desk, ServerProcess) else 0

    @property
    def is_first(self) -> bool:
        """Whether clients are answered by this rank."""
        return self.tenants.engine.group.rank() == 0

    def next(self) -> tuple[list[Ticket], list[Command]]:
        """What is carried out next, on all ranks, and on the first whom to answer; nothing after LOOK_S
        without a request."""
        tickets: list[Ticket] = []
        box: list[list[Command]] = [[]]
        if self.is_first:
            found = self.desk.take_together(LOOK_S, self.sampler.most_requests)
            tickets = [one for one in found if not self._is_refused(one)]
            box = [[one.command for one in tickets]]  # type: ignore[misc]
            if tickets:
                self.suspects.begin([one.id for one in tickets])
        group = self.tenants.engine.group
        if group.size() > 1:
            with waiting():
                dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
        return tickets, box[0]

    def _is_refused(self, ticket: Ticket) -> bool:
        """Whether a request is not carried out, as it cannot be kept, or ends servers, which is then its
        answer."""
        command = ticket.command
        problem = self.journal.problem(command)  # type: ignore[arg-type]
        if problem is None and (problem := self.suspects.problem(ticket.id)) is not None:
            log.error("%s is refused: %s", ticket.id, problem)
            if not isinstance(command, Sample | Release):
                with contextlib.suppress(OSError):  # then the next server refuses it
                    self.journal.add(command.model, _number(ticket), None, Refused(problem))  # type: ignore[union-attr]
        if problem is not None:
            self.desk.answer([(ticket, Refused(problem), None)])
        return problem is not None

    def start(self, speaks: bool) -> None:
        """Listen, and say where; then go on where an earlier server was killed. Idempotent. ConfigError for a
        key or an address that cannot be, and for models that cannot go on with the configuration. speaks: see
        Sampler.sample."""
        if self._is_started:
            return
        self.sampler.prepare(speaks)
        self.tenants.engine.prepare(self._cfg.actor_rollout_ref.model.lora_rank)
        for one in self.tenants.on_first(self._listen):
            self._restore(one)
        self._is_started = True

    def _restore(self, kept: Kept) -> None:
        try:
            if kept.state is not None:
                self.tenants.restore(kept.model, kept.state)
            self._carry_out_again(kept)
        except Refused as error:
            raise ConfigError(
                f"{kept.model}, which an earlier server has left in {self.folder}, cannot go on: {error}. "
                "Set the keys as they were, or another trainer.output_dir."
            ) from error
        log.info("%s goes on: %d commands were carried out again", kept.model, len(kept.commands))

    def _carry_out_again(self, kept: Kept) -> None:
        for command in kept.commands:
            if isinstance(command, ForwardBackward):
                self.tenants.train([command])
            elif isinstance(command, OptimStep):
                self.tenants.step([command])
            elif isinstance(command, CreateModel):
                self.tenants.create(command)

    def keep(
        self, tickets: Sequence[Ticket], commands: Sequence[Command], answers: Sequence[Any]
    ) -> list[Any]:
        """Have the journal hold what is about to be answered; the answers, of which one that it cannot hold
        is an error, and its model lost. On the first rank."""
        told = list(answers)
        for place, (ticket, command, answer) in enumerate(zip(tickets, commands, answers, strict=True)):
            if isinstance(command, Release):
                self.journal.forget(command.session)
                self.suspects.forget(command.session)
            elif not isinstance(command, Sample):
                try:
                    self._keep(_number(ticket), command, answer)
                except OSError as error:
                    log.exception("%s is lost", command.model)
                    self.journal.lost[command.model] = why = f"the server could not keep its state ({error})"
                    told[place] = RuntimeError(f"{command.model} is lost: {why}")
        self.suspects.end([one.id for one in tickets])
        return told

    def _keep(self, number: int, command: Command, answer: Any) -> None:
        assert not isinstance(command, Release | Sample)
        is_due = self.journal.add(command.model, number, command, answer)
        was_loaded = isinstance(command, LoadState) and not isinstance(answer, Exception)
        if is_due or was_loaded:  # what was loaded may be deleted: it is kept before anybody is told
            self.journal.begin(command.model, *self.tenants.state_of(command.model), at_once=was_loaded)

    def _listen(self) -> list[Kept]:
        """Start the server; what is kept of the models that go on. On the first rank."""
        assert isinstance(self.desk, Desk)
        own, data, model = self._cfg.service, self._cfg.data, self._cfg.actor_rollout_ref.model
        keys, longest = self._keys(), data.max_prompt_length + data.max_response_length
        served = Served(model.path, longest, self._stops, own.idle_s, own.max_models_per_tenant)
        self.desk = ServerProcess(self.desk, served, self.folder / "models", keys)
        alone, kept = frozenset(self.suspects.read()), self.journal.kept()
        url, gone = self.desk.open(own.address, kept, self.journal.lost, alone)
        for one in gone:
            self.journal.forget(one)
        write_own(self._client_file, {"base_url": url, "token": keys[OPERATOR]})
        where = self._client_file
        log.info("clients find us at TINKER_BASE_URL=%s; their TINKER_API_KEY is in %s", url, where)
        print(f"serving {model.path} at {url}; the key is in {where}", flush=True)
        return [one for one in kept if one.model not in gone]

    def _keys(self) -> dict[str, str]:
        """Of each tenant, the server's own under OPERATOR. ConfigError."""
        own = self._cfg.service
        token = token_of(own.token_env, "service.token_env") or kept_token(self._client_file)
        token = token or f"{KEY}{secrets.token_urlsafe(32)}"
        if not token.startswith(KEY):
            raise ConfigError(
                f"the key in {own.token_env} (service.token_env) does not begin with {KEY}: the client "
                "takes no other. Set another one."
            )
        return {OPERATOR: token} | tenant_keys(own.tenants_file)

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self.desk.close()
        self.journal.close()
        self.suspects.close()


def asked(ctx: OpContext, rows: TensorDict, service: Service) -> TensorDict:
    """Carry out what clients ask for until some of them have taken an optimizer step; reads and writes
    nothing.

    Waiting for clients is no stall. What a request is refused for, or fails of, is its own answer.
    """
    service.start(ctx.is_shard_leader)
    stepped = False
    while not stepped:
        tickets, commands = service.next()
        if not commands:
            waits_outside(f"waits for clients: {service.num_sessions} sessions")
            continue
        started, name = time.perf_counter(), WORDS.sub("_", type(commands[0]).__name__).lower()
        with phase(name):
            answers = _answers(ctx, service, commands)
        if service.is_first:
            told = service.keep(tickets, commands, [_told(one) for one in answers])
            tokens = map(tokens_of, commands, answers)
            service.desk.answer([*zip(tickets, told, tokens, strict=True)])
        taken = zip(commands, answers, strict=True)
        stepped = any(isinstance(one, OptimStep) and isinstance(answer, dict) for one, answer in taken)
        if service.is_first:
            ctx.metrics.sum(f"service/{name}_s", time.perf_counter() - started)
            ctx.metrics.sum(f"service/{name}_requests", len(commands))
    ctx.metrics.max("service/models", service.tenants.num_tenants)
    ctx.metrics.max("service/sessions", service.num_sessions)
    return TensorDict({}, batch_size=rows.batch_size)


def _number(ticket: Ticket) -> int:
    """Of a request, in its lane."""
    return int(ticket.id.rpartition(":")[2])


def _answers(ctx: OpContext, service: Service, commands: Sequence[Command]) -> list[Any]:
    """What comes of commands that are carried out together: what a client reads, or an error."""
    alone = service.tenants.engine.group.size() == 1
    try:
        if isinstance(commands[0], Sample):
            return service.sampler.sample(commands, ctx.is_shard_leader)  # type: ignore[arg-type]
        if isinstance(commands[0], ForwardBackward):
            found = service.tenants.train(commands)  # type: ignore[arg-type]
            if service.is_first:
                tokens = sum(len(one.tokens) for command in commands for one in command.data)  # type: ignore[union-attr]
                ctx.metrics.sum("service/trained_tokens", tokens)
            return found
        if isinstance(commands[0], OptimStep):
            return _stepped(ctx, service.tenants.step(commands))  # type: ignore[arg-type]
    except Exception as error:  # the edge to a client: one's request costs the others nothing
        if not (alone or isinstance(error, Refused | UserError)):  # the ranks are no longer at one
            raise RequestError(f"a client's request failed: {type(error).__name__}: {error}") from error
        if len(commands) > 1 and not isinstance(commands[0], OptimStep):  # whose gradients are gone
            return [_answers(ctx, service, [one])[0] for one in commands]
        return [_failed(error)] * len(commands)
    return [_answered(ctx, service, one) for one in commands]


def _stepped(ctx: OpContext, norms: Sequence[float | Refused]) -> list[Any]:
    """What clients read of the norms of their steps."""
    for norm in norms:
        if not isinstance(norm, Refused):
            ctx.metrics.mean("actor/grad_norm", norm)
    return [one if isinstance(one, Refused) else {"metrics": {"grad_norm:mean": one}} for one in norms]


def _answered(ctx: OpContext, service: Service, command: Command) -> Any:
    """What comes of a command that is carried out by itself."""
    try:
        return _answer(ctx, service, command)
    except Exception as error:  # noqa: BLE001 - the edge to a client
        return _failed(error)


def _failed(error: Exception) -> Exception:
    """What a client is told of what was raised."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, UserError):
        return Refused(str(error))
    log.error("a request of a client failed", exc_info=error)
    return RuntimeError(f"{type(error).__name__}: {error}")


def _told(answer: Any) -> Any:
    """An answer as the desk keeps it."""
    if isinstance(answer, Trained):
        return wire.trained_bytes(answer)
    return wire.sampled_bytes(answer) if isinstance(answer, Sampled) else answer


def _answer(ctx: OpContext, service: Service, command: Command) -> Any:
    """What a client reads of a command that is carried out by itself."""
    tenants = service.tenants
    match command:
        case CreateModel(model=model):
            tenants.create(command)
            return {"model_id": model, "type": "create_model"}
        case SaveState(path=path):
            tenants.save(command)
            return {"path": path, "type": "save_weights"}
        case SaveSampler(path=path, session=session):
            tenants.save_sampler(command)
            told = {"path": path} if session is None else {"sampling_session_id": session}
            return {**told, "type": "save_weights_for_sampler"}
        case SaveExternal(path=path):
            tenants.save_external(command)
            return {"path": path, "type": "save_weights_external"}
        case LoadState(path=path, model=model):
            tenants.load(command)
            return {"path": path, "model_id": model, "type": "load_weights"}
        case Release(session=session):
            tenants.release(session)
            return {}
    raise AssertionError(f"no answer to a {type(command).__name__}")
