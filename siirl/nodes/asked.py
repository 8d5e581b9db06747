"""A node that is asked from outside: it carries out what clients want, one request after the other."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from siirl.agents.outside.session_queue import kept_token, token_of
from siirl.config import Config
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.errors import ConfigError, UserError
from siirl.guarded_files import write_own
from siirl.nodes.context import LocalNode, OpContext
from siirl.observe.spans import phase, waits_outside
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
    SaveExternal,
    SaveSampler,
    SaveState,
    tokens_of,
)
from siirl.service.desk import Desk, Ticket
from siirl.service.saved_weights import OPERATOR
from siirl.service.service_endpoint import Served, ServiceEndpoint
from siirl.service.snapshot_sampling import Sampler
from siirl.service.tenant_keys import KEY, tenant_keys
from siirl.service.tenants import Tenants

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often a worker without work says that it waits."""
WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
"""Where a word begins in the name of a command."""


class Service:
    """The server of a node, and what its commands are carried out on."""

    def __init__(
        self,
        node: LocalNode,
        sampler: RolloutEngine,
        base: TrainEngine,
        make: Callable[[str, Config], TrainEngine],
    ) -> None:
        """base: with the frozen weights. make: an engine for an adapter on them."""
        cfg = node.cfg
        base.onload(params=True, grads=False, optimizer=False)  # for good: each adapter computes on it
        self.folder = Path(cfg.trainer.output_dir).expanduser() / "service"
        self.desk = Desk(cfg.service.max_tokens_per_s)
        self.tenants = Tenants(cfg, self.folder / "models", make)
        self.sampler = Sampler(cfg, sampler, base, self.tenants, node.tokenizer, make)
        self._cfg, self._stops = cfg, tuple(node.dialect.stop_ids)
        self._endpoint: ServiceEndpoint | None = None

    def start(self) -> ServiceEndpoint:
        """Listen, and say where. Idempotent. ConfigError for a key or an address that cannot be."""
        if self._endpoint is not None:
            return self._endpoint
        keys, data = self._cfg.service, self._cfg.data
        file = self.folder / "client.json"
        token = token_of(keys.token_env, "service.token_env") or kept_token(file)
        token = token or f"{KEY}{secrets.token_urlsafe(32)}"
        if not token.startswith(KEY):
            raise ConfigError(
                f"the key in {keys.token_env} (service.token_env) does not begin with {KEY}: the client "
                "takes no other. Set another one."
            )
        model = self._cfg.actor_rollout_ref.model
        longest = data.max_prompt_length + data.max_response_length
        served = Served(model.path, longest, self._stops, keys.idle_s, keys.max_models_per_tenant)
        tokens = {OPERATOR: token} | tenant_keys(keys.tenants_file)
        endpoint = ServiceEndpoint(self.desk, served, self.folder / "models", tokens)
        host, _, port = keys.address.rpartition(":")
        endpoint.start(host.strip("[]"), int(port))
        write_own(file, {"base_url": endpoint.url, "token": token})
        log.info("clients find us at TINKER_BASE_URL=%s; their TINKER_API_KEY is in %s", endpoint.url, file)
        print(f"serving {model.path} at {endpoint.url}; the key is in {file}", flush=True)
        self._endpoint = endpoint
        return endpoint

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self.desk.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def asked(ctx: OpContext, rows: TensorDict, service: Service) -> TensorDict:
    """Carry out what clients ask for until one of them has taken an optimizer step; reads and writes nothing.

    Waiting for clients is no stall. What a request is refused for, or fails of, is its own answer.
    """
    endpoint, desk = service.start(), service.desk
    stepped = False
    while not stepped:
        ticket = desk.take(LOOK_S)
        if ticket is None:
            waits_outside(f"waits for clients: {endpoint.num_sessions} sessions")
            continue
        tickets, started = [ticket], time.perf_counter()
        command = ticket.command
        if isinstance(command, Sample):
            source, most = command.source, service.sampler.most_requests
            alike = lambda other: isinstance(other, Sample) and other.source == source  # noqa: B023, E731
            tickets = desk.take_like(ticket, alike, most)
        name = WORDS.sub("_", type(command).__name__).lower()
        with phase(name):
            stepped = _carry_out(ctx, service, tickets)
        ctx.metrics.sum(f"service/{name}_s", time.perf_counter() - started)
        ctx.metrics.sum(f"service/{name}_requests", len(tickets))
    ctx.metrics.max("service/models", service.tenants.num_tenants)
    ctx.metrics.max("service/sessions", endpoint.num_sessions)
    return TensorDict({}, batch_size=rows.batch_size)


def _carry_out(ctx: OpContext, service: Service, tickets: list[Ticket]) -> bool:
    """Answer commands; whether an optimizer step was taken."""
    command = tickets[0].command
    try:
        if isinstance(command, Sample):
            samples = service.sampler.sample([one.command for one in tickets])
            for one, found in zip(tickets, samples, strict=True):
                told = found if isinstance(found, Refused) else wire.sampled_bytes(found)
                service.desk.done(one, told, tokens_of(one.command, found))
            return False
        service.desk.done(tickets[0], _answer(ctx, service, command))
        return isinstance(command, OptimStep)
    except Refused as error:
        problem: Exception = error
    except UserError as error:
        problem = Refused(str(error))
    except Exception as error:  # the edge to a client: one's request costs the others nothing
        log.exception("a request of a client failed")
        problem = RuntimeError(f"{type(error).__name__}: {error}")
    for one in tickets:
        service.desk.done(one, problem)
    return False


def _answer(ctx: OpContext, service: Service, command: Command) -> Any:
    """What a client reads of a command that is carried out."""
    tenants = service.tenants
    match command:
        case CreateModel(model=model):
            tenants.create(command)
            return {"model_id": model, "type": "create_model"}
        case ForwardBackward(data=data):
            found = tenants.train(command)
            ctx.metrics.sum("service/trained_tokens", sum(len(one.tokens) for one in data))
            return wire.trained_bytes(found)
        case OptimStep():
            norm = tenants.step(command)
            ctx.metrics.mean("actor/grad_norm", norm)
            return {"metrics": {"grad_norm:mean": norm}}
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
