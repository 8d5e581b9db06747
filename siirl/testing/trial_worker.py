"""The worker of a test: the DAGWorker of any run, which also writes down what its nodes see.

Rows, ops, engines and instructions are those of a run. What agents say may be a script's; and in one run of a
test all rewards are made equal, in another the process is killed.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.agents.runner import turn_seed
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.config import Config
from siirl.dag.ops import OpSpec
from siirl.dag_worker.boundary import RunPlaces
from siirl.dag_worker.observing import make_observer
from siirl.dag_worker.training import Training
from siirl.dag_worker.worker import DAGWorker, StepRecord
from siirl.data.completions import Request
from siirl.data.rows import make_rows, objects
from siirl.engines.engine_registry import engine_class, make_rollout_engine
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.rollout.hf.hf_rollout import HFRollout
from siirl.errors import DataError
from siirl.launch.job import Job
from siirl.nodes import interaction
from siirl.nodes.context import Samples
from siirl.nodes.generate import prompt_tokens
from siirl.nodes.interaction import episodes_of, samples_of_prompt
from siirl.nodes.interaction_credit import in_interaction, outcome, turn_rewards
from siirl.observe.metrics import Metrics
from siirl.observe.spans import Observer, observing
from siirl.rewards.reward_registry import ScoreFn
from siirl.rewards.scorer import RewardScorer
from siirl.testing.answers import FORMS, Answers, filled_in
from siirl.testing.evidence import Evidence, NodeRecord, plain_columns
from siirl.testing.scripted_engine import ScriptedRollout
from siirl.testing.swallowed import swallowed, user_functions
from siirl.testing.template_probe import template_seen

EQUAL = 0.5
"""The score of all responses in the run whose rewards are equal."""
MOST_TURNS = 64
"""Of an episode, that a script can be for."""


@dataclass(frozen=True)
class Order:
    """What a run of a test does besides."""

    answers: dict[str, list[list[str | None]]]
    source: str
    equal: bool = False
    """All rewards are made equal."""
    twice: bool = False
    """Rewards are asked twice, and log-probs measured around each update."""
    killed_in: int = 0
    """The step in which rank 0 is killed, before its update; 0: none."""

    def script(self) -> Answers:
        """The answers."""
        said = {who: tuple(map(tuple, rows)) for who, rows in self.answers.items()}
        return Answers(said, self.source)


@dataclass(frozen=True)
class Asked:
    """Which turn a request is for."""

    names: tuple[str, ...]
    """Of the node, and of the agent."""
    row: Mapping[str, Any]
    prompt: int
    sample: int
    episode: int | None = None
    turn: int = 0
    """Of the episode, over all agents."""
    place: int = 0
    """Of the speaker in its conversation."""


class AnswerBook:
    """Finds out which turn a request is for, and what is said there."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.tokenizers: dict[str, Any] = {}
        self._turns: dict[int, Asked] = {}  # seed of an episode's turn
        self._prompts: dict[tuple[str, tuple[int, ...]], Asked] = {}
        self._own: dict[tuple[int, str], list[int]] = {}  # (episode, speaker) -> turns so far

    def expect_turn(self, seed: int, asked: Asked) -> None:
        """A request with this seed is this turn."""
        self._turns[seed] = asked

    def expect_prompt(self, engine: str, prompt: list[int], asked: Asked) -> None:
        """Requests with this prompt are samples of it."""
        self._prompts[engine, tuple(prompt)] = asked

    def __call__(self, engine: str, request: Request) -> list[int] | None:
        """See Script."""
        asked = self._turns.get(request.seed)
        if asked is None:
            asked = self._prompts.get((engine, tuple(request.prompt)))
            if asked is None or request.params.temperature == 0:
                return None
            asked = replace(asked, sample=request.sample)
        text = self.answers.of(asked.names, asked.prompt, asked.sample, self._own_turn(asked), asked.place)
        if text is None or engine not in self.tokenizers:
            return None
        said = filled_in(text, asked.row)
        try:
            tokens = self._tokens(engine, said)
            if self.answers.source or len(tokens) <= request.params.max_tokens:
                return tokens
            return self._tokens(engine, filled_in(FORMS[0], asked.row))  # no form around it fits
        except Exception as error:  # the tokenizers package raises nothing narrower
            if not self.answers.source:
                return None
            raise DataError(
                f"--answers {self.answers.source}: the tokenizer of {engine} has no tokens for {said!r:.80}: "
                f"{error}. Say it in words that the model knows."
            ) from error

    def _tokens(self, engine: str, said: str) -> list[int]:
        return self.tokenizers[engine].encode(said, add_special_tokens=False)

    def _own_turn(self, asked: Asked) -> int:
        """How many turns the speaker has had in the episode before."""
        if asked.episode is None:
            return 0
        turns = self._own.setdefault((asked.episode, asked.names[0]), [])
        if asked.turn not in turns:
            turns.append(asked.turn)
        return sorted(turns).index(asked.turn)


class _Heard(logging.Handler):
    """Keeps the warnings of episodes that failed."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if "episodes" in record.getMessage():
            self._kept.append(record.getMessage())


class TrialWorker(DAGWorker):
    """See the module."""

    def __init__(
        self, cfg: Config, plan: Plan, rank: int, device: torch.device, observer: Observer, order: Order
    ):
        self.order, self.book = order, AnswerBook(order.script())
        self.evidence, self._spoken, self._noted = Evidence(rank), [], 0
        self._caught_by: dict[str, dict[str, ScoreFn]] = {}
        logging.getLogger(interaction.__name__).addHandler(_Heard(self.evidence.failures))
        super().__init__(cfg, plan, rank, device, observer)
        for node in self.nodes.values():
            model = node.plan.model
            scorer = node.services.get("scorer")
            if self.order.twice and isinstance(scorer, RewardScorer):
                self._caught_by[node.plan.name] = user_functions(node.cfg)
            if node.plan.spec.is_rollout and model is not None:
                self.book.tokenizers[model] = node.tokenizer
                texts = tuple(node.tokenizer.convert_ids_to_tokens(list(node.dialect.stop_ids)))
                self.evidence.stops[node.plan.name] = texts
        for shared in self.interactions.values():
            for stage in shared.plan.speaking:
                self.book.tokenizers.setdefault(stage.model, shared.tokenizers[stage.node])
            for name, use in shared.tools.items():
                self.evidence.tools[name] = tuple(use.toolbox.tools)

    def make_rollout(self, *build: Any) -> RolloutEngine:
        """See DAGWorker."""
        if not issubclass(engine_class(build[0]), HFRollout):
            return make_rollout_engine(*build)
        engine = ScriptedRollout(*build[:4], **({"base": build[4]} if build[4] else {}))
        engine.script, engine.spoken = self.book, self._spoken
        return engine

    def run_node(
        self, ins: Run, rows: TensorDict, record: StepRecord, others: dict[int, TensorDict]
    ) -> TensorDict | Future[TensorDict]:
        """See DAGWorker."""
        node, spec = self.nodes[ins.node], self.nodes[ins.node].plan.spec
        if record.validate:
            return super().run_node(ins, rows, record, others)
        if spec.is_rollout and not spec.is_handed:
            self._expect(ins, rows, record)
        if spec.trains and record.step == self.order.killed_in and self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        versions = {name: engine.version for name, engine in self.train_engines.items()}
        seen, state = plain_columns(rows), dict(node.state)
        before = self._measured(ins, rows)
        result = super().run_node(ins, rows, record, others)
        result = result.result() if isinstance(result, Future) else result
        if self.order.equal:
            result = _equal(result)
        again = self._again(ins, rows, record, others, state)
        note = NodeRecord(
            record.step,
            record.round,
            ins.node,
            node.plan.agent,
            seen,
            plain_columns(result),
            versions,
            again=again,
            before=before,
            after=self._measured(ins, rows),
            expected=self._expected(ins, rows, record, others),
        )
        prefix = f"{self._prefix(node)}"
        note.metrics = {
            name.removeprefix(prefix): value
            for name, value in record.metrics.values().items()
            if name.startswith(prefix) and _is_told(spec, name)
        }
        if ins.node in self._caught_by:
            samples = node.services["scorer"].samples(rows)
            note.swallowed = swallowed(self._caught_by[ins.node], samples)
        if spec.is_rollout:
            self._show(node, note)
        self.evidence.records.append(note)
        return result

    def end_step(self, step: int) -> None:
        """Write what there is of it. Collective over the ranks of each trained model."""
        self.evidence.spoken += [(step, one) for one in self._spoken[self._noted :]]
        self._noted = len(self._spoken)
        self.evidence.digests[step] = {
            name: _digest(engine.export_weights())
            for name, engine in self.train_engines.items()
            if self.plan.models[name].trains
        }

    def _expect(self, ins: Run, rows: TensorDict, record: StepRecord) -> None:
        """Tell the book which turns this node will ask for."""
        node, ctx = self.nodes[ins.node], self._context(ins, record)
        names = ("ground_truth", "extra_info")
        known = [objects(rows, name) if name in rows.keys() else [None] * len(rows) for name in names]
        tasks = [dict(zip(names, values, strict=True)) for values in zip(*known, strict=True)]
        samples = rows["sample_index"].tolist() if "sample_index" in rows.keys() else list(range(len(rows)))
        shared = self.interactions.get(ins.node)
        if shared is None:
            for task, prompt, number in zip(tasks, prompt_tokens(rows), samples, strict=True):
                asked = Asked((node.plan.name, f"agent_{node.plan.agent}"), task, number, 0)
                self.book.expect_prompt(str(node.plan.model), prompt, asked)
            return
        n, last = samples_of_prompt(ctx), record.step + node.plan.max_lag + 1
        for step in range(record.step, last):
            episodes = episodes_of(ctx, shared, rows, n, [step] * len(rows))
            for number, episode in enumerate(episodes):
                for place, stage in enumerate(shared.plan.speaking):
                    who = (stage.node, f"agent_{stage.agent}")
                    asked = Asked(
                        who,
                        episode.task,
                        samples[number // n],
                        episode.sample,
                        step << 32 | episode.episode_id,
                        place=place,
                    )
                    for turn in range(MOST_TURNS):
                        seed = turn_seed(episode.seed, stage.agent, turn)
                        self.book.expect_turn(seed, replace(asked, turn=turn))

    def _show(self, node: Any, note: NodeRecord) -> None:
        """Keep the first row of a rollout node as text, and what its template makes of that conversation."""
        name = node.plan.name
        if not len(note) or name in self.evidence.shown or not note.has("response_mask", "prompt_ids"):
            return
        ids_T, mask = note.column("response_ids")[0].tolist(), note.column("response_mask")[0].tolist()
        length = int(note.column("response_length")[0])
        prompt = note.column("prompt_ids")[0][-int(note.column("prompt_length")[0]) :].tolist()
        text = node.tokenizer.decode(prompt)
        for trained, part in itertools.groupby(
            zip(ids_T[:length], mask[:length], strict=True), lambda x: x[1]
        ):
            said = node.tokenizer.decode([token for token, _ in part])
            text += f">>{said}<<" if trained else said
        self.evidence.shown[name] = text
        messages = note.column("raw_prompt")[0] if note.has("raw_prompt") else ()
        found = template_seen(node.dialect.template, messages, node.dialect.reasoning is not None)
        if found is not None:
            self.evidence.templates[name] = found

    def _measured(self, ins: Run, rows: TensorDict) -> Tensor | None:
        """What the model of a node that trains says of its rows now. Collective over the model's ranks."""
        node = self.nodes[ins.node]
        if not (node.plan.spec.trains and self.order.twice) or node.plan.spec.on_critic:
            return None
        engine = self.train_engines[str(node.plan.model)]
        if not node.plan.spec.trains_policy:
            return None
        temperature = node.cfg.actor_rollout_ref.rollout.trained_temperature
        return engine.compute(rows, ("log_prob",), temperature)["log_prob"].cpu()

    def _again(
        self,
        ins: Run,
        rows: TensorDict,
        record: StepRecord,
        others: dict[int, TensorDict],
        state: dict[str, float],
    ) -> Tensor | None:
        """The scores of a second call of a node that scores. Communicates as its op does."""
        node = self.nodes[ins.node]
        name = next((key.name for key in ins.writes if not key.name.endswith("_info")), None)
        if not (self.order.twice and node.plan.spec.scores and name):
            return None
        after, node.state = node.state, state
        context = self._context(ins, record)
        context.metrics, context.shown, context.others = Metrics(), Samples([], 0, [], True), others
        found = self.ops[ins.node](context, rows, **node.services)
        found = found.result() if isinstance(found, Future) else found
        node.state = after
        return found[name].cpu() if name in found.keys() else None

    def _expected(
        self, ins: Run, rows: TensorDict, record: StepRecord, others: dict[int, TensorDict]
    ) -> Tensor | None:
        """What the rewards of each row add up to; None where more than scores and environments counts."""
        node = self.nodes[ins.node]
        changed = node.cfg.reward_model.overlong_buffer.enable or node.cfg.algorithm.use_kl_in_reward
        if not node.plan.spec.credits or changed:
            return None
        context = self._context(ins, record)
        context.others = others
        if not in_interaction(rows):
            return rows["score"].double().cpu() if "score" in rows.keys() else None
        earned = turn_rewards(context, rows)
        assert isinstance(earned, Tensor)
        return (outcome(context, rows).double() + earned.double().sum(-1)).cpu()


def _is_told(spec: OpSpec, name: str) -> bool:
    """Whether a metric is kept beside a call of such a node."""
    if spec.is_rollout:
        return "/failed/" in name or name.endswith("/restarted")
    return spec.trains and name.endswith(("grad_norm", "lr", "loss"))


def _equal(rows: TensorDict) -> TensorDict:
    """The rows with rewards that are all the same."""
    for name in rows.keys():
        if name == "env_reward":
            rows[name] = torch.zeros_like(rows[name])
        elif name in ("score", "baseline_score"):
            rows[name] = torch.full_like(rows[name], EQUAL)
        elif name == "reward_info":
            infos = [{key: EQUAL for key in info or {}} for info in objects(rows, name)]
            rows.set(name, make_rows({name: infos}).get(name))
    return rows


def _digest(weights: Any) -> str:
    found = hashlib.blake2b(digest_size=12)
    for name, tensor in weights:
        found.update(name.encode() + tensor.detach().float().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


class TrialTraining(Training):
    """Training that leaves what its worker has seen, step by step."""

    worker: TrialWorker

    def train_step(self) -> Metrics:
        """See Training."""
        metrics = super().train_step()
        self.worker.end_step(self.step)
        self.worker.evidence.write(self.output_dir)
        return metrics

    def _require_progress(self, first_step: int, versions: dict[str, int]) -> None:
        """See Training; of equal rewards nothing is to be learnt, as of pairs of which neither is better."""
        if not self.worker.order.equal:
            super()._require_progress(first_step, versions)


def run_worker(
    cfg: Config, plan: Plan, rank: int, world_size: int, device: torch.device, places: RunPlaces
) -> None:
    """The whole run of one rank of a test: the entry of its job."""
    assert isinstance(places, Job)
    order = Order(**places.extra["order"])
    observer = make_observer(cfg, plan, rank, device, places.output_path, places.position_path(rank))
    with observing(observer), closing(observer):
        worker = TrialWorker(cfg, plan, rank, device, observer, order)
        with contextlib.closing(worker):
            TrialTraining(worker, places.output_path, "", world_size).run()
