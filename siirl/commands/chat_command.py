"""`siirl chat`: talk to a model, or to the agents of a checkpoint, in a terminal, on the CPU."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from siirl.checkpoint.export import current, export_hf
from siirl.checkpoint.files import MANIFEST, read_manifest
from siirl.command_line import cleaning_up, print_text
from siirl.commands.recorded_run import RecordedRun, run_of
from siirl.compiler.plan import Plan
from siirl.config import from_dict
from siirl.data.chat import encode_prompts, read_tokenizer
from siirl.engines.train.hf_model import model_class
from siirl.errors import CheckpointError, ConfigError
from siirl.observe.printable import printable
from siirl.runs.folder_reader import Skipped, attempt
from siirl.runs.run_files import read_job

HELP = (
    "/agent NAME: talk to another; /new: forget what was said; /quit or Ctrl-D: end; Ctrl-C: stop an answer"
)


UNTRAINED_TOKENS = 512
"""Of an answer of a model that no run here has trained."""


@dataclass(frozen=True)
class Trained:
    """What the run that trained a model says of conversations with it."""

    template: dict[str, Any] = field(default_factory=dict)
    """What it hands to the chat template."""
    answer_tokens: int = UNTRAINED_TOKENS
    """Of a response, at most."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn."""

    temperature: float
    max_tokens: int | None
    """Of an answer; None: as many as in the run that trained the model, else UNTRAINED_TOKENS."""
    seed: int


@dataclass(frozen=True)
class Source:
    """Where the weights of one who answers are."""

    names: tuple[str, ...]
    """What a user may call it: the agent, the nodes at which it speaks, the model."""
    model: str
    """A directory, or a name on a hub."""
    checkpoint: Path | None = None
    """Its model of this checkpoint is written to `model` when it is needed."""


@dataclass
class Speaker:
    """A model that answers, and what it and the user have said."""

    source: Source
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trained: Trained
    system: str
    said: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str, sampling: Sampling, write: Callable[[str], None]) -> str:
        """What it says to a text, written piece by piece. ConfigError: the conversation has no more room."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*opening, *self.said, {"role": "user", "content": text}]
        prompt = messages if self.tokenizer.chat_template else _continued(messages)
        ids, most = self._tokens(prompt), sampling.max_tokens or self.trained.answer_tokens
        longest = (
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or len(ids) + most
        )
        room = min(most, longest - len(ids))
        if room < 1:
            raise ConfigError(
                f"what was said takes {len(ids)} tokens, and the model reads {longest}: /new starts over."
            )
        torch.manual_seed(sampling.seed + len(self.said))
        streamed = _Streamed(self.tokenizer, write)
        warm = sampling.temperature > 0
        try:
            with torch.inference_mode():
                self.model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    max_new_tokens=room,
                    do_sample=warm,
                    **({"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if warm else {}),
                    pad_token_id=self.tokenizer.pad_token_id,
                    streamer=streamed,
                )
        except KeyboardInterrupt:
            streamed.end()
        self.said += [{"role": "user", "content": text}, {"role": "assistant", "content": streamed.text}]
        return streamed.text

    def _tokens(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """The tokens of what was said. ConfigError: it has words that the tokenizer does not know."""
        try:
            (ids,) = encode_prompts(self.tokenizer, [prompt], self.trained.template)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(
                f"the tokenizer cannot read this: {error}. A model that was trained from scratch knows the "
                "words of its data alone: say it as its prompts do."
            ) from error
        return ids


class _Streamed(TextStreamer):
    """Gives finished words to a function as they come, and keeps them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self._write, self.text = write, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._write(printable(text))


def chat(name: str, agent: str | None, system: str, sampling: Sampling) -> int:
    """Read lines of the user and answer them until the input ends. ConfigError: nobody is there."""
    with cleaning_up(), tempfile.TemporaryDirectory(prefix="siirl_chat_") as scratch:
        sources, trained = _sources(name, Path(scratch))
        speakers: dict[str, Speaker] = {}

        def speaker(wanted: str | None) -> Speaker:
            source = _called(sources, wanted)
            if source.model not in speakers:
                speakers[source.model] = _load(source, trained, system)
            return speakers[source.model]

        here = speaker(agent)
        if sys.stdin.isatty():
            names = "; ".join(", ".join(source.names) for source in sources)
            print_text(f"you talk to {here.source.names[0]} (there is: {names})\n{HELP}")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            command, _, rest = line.strip().partition(" ")
            try:
                if command in ("/quit", "/exit"):
                    return 0
                if command == "/new":
                    here.said.clear()
                elif command == "/agent":
                    here = speaker(rest.strip())
                elif command.startswith("/"):
                    print_text(HELP)
                elif line.strip():
                    print(f"{here.source.names[0]}: ", end="", flush=True)
                    here.answer(line, sampling, lambda text: print(text, end="", flush=True))
                    print(flush=True)
            except ConfigError as error:
                print_text(str(error))


def _sources(name: str, scratch: Path) -> tuple[list[Source], Trained]:
    """(who can be talked to, what the run says that trained them)."""
    path = Path(name).expanduser().absolute()
    if not path.exists():
        return [Source(("model",), name)], Trained()
    run = run_of(path)
    trained, spoken = _of_job(run) if run else (Trained(), {})
    checkpoint = current(path)
    if run and path == run and not (path / "config.json").is_file():
        checkpoint = RecordedRun.read(run).newest_checkpoint() or path / "hf_model"
    if (checkpoint / MANIFEST).is_file():
        try:
            models = [model for model in read_manifest(checkpoint)["models"] if model.endswith(".actor")]
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return [
            Source(_names(model, spoken), str(scratch / model), checkpoint) for model in sorted(models)
        ], trained
    folders = [checkpoint] if (checkpoint / "config.json").is_file() else []
    folders = folders or sorted(found.parent for found in checkpoint.glob("*/config.json"))
    if not folders:
        raise ConfigError(
            f"{name} has neither a checkpoint nor a model: nobody is there to talk to. Name a run that saves "
            "(trainer.save_freq) or exports (trainer.export_hf), a checkpoint global_step_N, a model's "
            "directory, or a name on a hub."
        )
    return [Source(_names(folder.name, spoken), str(folder)) for folder in folders], trained


def _of_job(run: Path) -> tuple[Trained, dict[str, tuple[str, ...]]]:
    """(what a run says of conversations, trained model -> the nodes at which it speaks)."""
    job = read_job(run, Skipped())

    def read() -> tuple[Trained, dict[str, tuple[str, ...]]]:
        plan = Plan.from_json(job["plan"])
        spoken = {
            link.source: plan.models[link.target].nodes
            for link in plan.links.values()
            if plan.models[link.target].is_rollout
        }
        data = from_dict(job["config"]).data
        return Trained(dict(data.apply_chat_template_kwargs), data.max_response_length), spoken

    return attempt(read, (Trained(), {}), "the plan of job.json", Skipped())


def _names(model: str, spoken: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    agent = model.removesuffix(".actor")
    return tuple(dict.fromkeys((agent, *spoken.get(model, ()), model)))


def _called(sources: list[Source], wanted: str | None) -> Source:
    """The one whom a name means; the first without a name. ConfigError: nobody is called so."""
    for source in sources:
        if wanted is None or wanted in source.names:
            return source
    names = "; ".join(", ".join(source.names) for source in sources)
    raise ConfigError(f"nobody is called {wanted!r} here. There is: {names}.")


def _load(source: Source, trained: Trained, system: str) -> Speaker:
    """Its model and tokenizer; of a checkpoint, exported first."""
    if source.checkpoint is not None:
        export_hf(source.checkpoint, Path(source.model), source.names[-1])
    tokenizer = read_tokenizer(source.model, False, "Name a model's directory, or a name on a hub")
    try:
        kind = model_class(AutoConfig.from_pretrained(source.model), "lm")
        model = kind.from_pretrained(source.model, dtype="auto").eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model can be loaded from {source.model}: {error}") from error
    return Speaker(source, model, tokenizer, trained, system)


def _continued(messages: list[dict[str, str]]) -> str:
    """What was said as one text, for a tokenizer without a chat template: a model that continues texts."""
    return "".join(message["content"] for message in messages)
