"""The destinations that trainer.logger names: one class each, one table, one place that makes them."""

import importlib
import importlib.util
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from siirl.access import BoundedServer, PageHandler, is_loopback, is_same
from siirl.errors import ConfigError
from siirl.guarded_files import write_whole
from siirl.observe.console import ConsoleSink
from siirl.observe.curve import METRICS_FILE
from siirl.observe.printable import printable
from siirl.observe.sinks import JsonlSink, Rows, RunInfo, SampleSink, Sink, Sinks, samples_text

log = logging.getLogger(__name__)
IDS_FILE = "loggers.json"
EVENTS, EVENT_FILES = "events.out.tfevents.*", 8
"""Files of TensorBoard, and in how many a run's events are written, if they are bounded."""
MOST_TOLD = 300
"""Characters of another package's error."""


def make_sinks(names: Sequence[str], info: RunInfo) -> Sinks:
    """The sinks that trainer.logger names, besides JSONL and sample files, which a run always has.

    One whose package is missing is left out with a warning that names the package. ConfigError for a name
    that is unknown, and for one that cannot start, with the reason.
    """
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        raise ConfigError(f"trainer.logger has {unknown}: unknown. Known are {', '.join(LOGGERS)}.")
    sinks: list[Sink] = [
        JsonlSink(info.output_dir / METRICS_FILE, info.first_step),
        SampleSink(info.output_dir, info.sample_dirs, info.samples_bytes),
    ]
    for name in dict.fromkeys(names):
        logger = LOGGERS[name]
        try:
            sinks.append(logger.make(info) if logger.ours else Guarded(name, logger.make(info)))
        except ModuleNotFoundError as error:
            words = "trainer.logger has %r, but its package is missing (%s): pip install %s"
            log.warning(words, name, error.name, logger.package)
        except Exception as error:  # whatever a foreign package raises
            if logger.ours:
                raise
            raise ConfigError(
                f"trainer.logger has {name!r}, which did not start: {_told(error)}. "
                f"{logger.hint} Or take it out of trainer.logger."
            ) from error
    return Sinks(sinks)


class Guarded:
    """A sink of another's package: what goes wrong in it is a warning, the first time, and costs no step."""

    def __init__(self, name: str, sink: Sink):
        self.name, self.sink, self._has_failed = name, sink, False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(self.sink.log, step, values)

    def text(self, step: int, name: str, rows: Rows) -> None:
        self._try(self.sink.text, step, name, rows)

    def close(self) -> None:
        self._try(self.sink.close)

    def _try(self, function: Callable[..., None], *args) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - the edge to a foreign package
            if not self._has_failed:
                log.warning(
                    "trainer.logger: %s failed and may lack numbers from here on: %s. %s has them all.",
                    *(self.name, _told(error), METRICS_FILE),
                )
            self._has_failed = True


def id_of(info: RunInfo, name: str) -> str | None:
    """What a logger knows the run by that goes on; None for one that starts anew."""
    path = info.output_dir / IDS_FILE
    return json.loads(path.read_text()).get(name) if info.first_step and path.exists() else None


def keep_id(info: RunInfo, name: str, run_id: str) -> None:
    """Keep in the run's folder what a logger knows the run by."""
    path = info.output_dir / IDS_FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    write_whole(path, json.dumps(known | {name: run_id}))


def tensorboard_dir(output_dir: Path) -> Path:
    """TENSORBOARD_DIR, else a folder of the run."""
    return Path(os.environ.get("TENSORBOARD_DIR") or output_dir / "tensorboard").absolute()


def _age(path: Path) -> tuple[int, str]:
    """Sort key of event files: the oldest first."""
    return path.stat().st_mtime_ns, path.name


class TensorBoardSink:
    """TensorBoard event files. What an earlier run wrote of steps after first_step is not shown any more.

    They take info.tensorboard_bytes at most: the oldest one is removed. In a folder that runs may share
    (TENSORBOARD_DIR) only files of this process count.
    """

    def __init__(self, info: RunInfo):
        self._folder, self._most_bytes = tensorboard_dir(info.output_dir), info.tensorboard_bytes
        self._suffix = f".{uuid.uuid4().hex[:8]}"
        self._open(purge_step=info.first_step + 1 if info.first_step else None)

    def _open(self, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(self._folder), flush_secs=10, purge_step=purge_step, filename_suffix=self._suffix
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if self._most_bytes is not None:
            self._stay_within(self._most_bytes)

    def _stay_within(self, most_bytes: float) -> None:
        """Go on in another file where this one is full, and remove the oldest while all take too much."""
        newest = max(self._folder.glob(EVENTS + self._suffix), key=_age, default=None)
        if newest is None or newest.stat().st_size < most_bytes / EVENT_FILES:
            return
        self._writer.close()
        self._open()
        is_shared = "TENSORBOARD_DIR" in os.environ
        files = sorted(self._folder.glob(EVENTS + (self._suffix if is_shared else "")), key=_age)
        too_many = sum(path.stat().st_size for path in files) - most_bytes * (1 - 1 / EVENT_FILES)
        for path in files[:-1]:
            if too_many > 0:
                too_many -= path.stat().st_size
                path.unlink()

    def text(self, step: int, name: str, rows: Rows) -> None:
        indented = "".join(f"    {line}\n" for line in samples_text(rows).splitlines())
        self._writer.add_text(f"samples/{name}", indented, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. A run that is resumed goes on there too."""

    def __init__(self, info: RunInfo):
        self._wandb = importlib.import_module("wandb")
        run_id = id_of(info, "wandb") or uuid.uuid4().hex[:12]
        names = {"project": info.project, "name": info.experiment, "dir": str(info.output_dir)}
        self._run = self._wandb.init(**names, config=info.config, id=run_id, resume="allow")
        keep_id(info, "wandb", run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, rows: Rows) -> None:
        self._run.log({f"samples/{name}": self._wandb.Table(**_table(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow; metric names keep letters, digits and / . _ - only. A run that is resumed goes on there too."""

    def __init__(self, info: RunInfo):
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(info.project)
        run = self._mlflow.start_run(run_id=id_of(info, "mlflow"), run_name=info.experiment)
        keep_id(info, "mlflow", run.info.run_id)
        self._mlflow.log_dict(info.config, "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        clean = {re.sub(r"[^\w/.-]", "_", name, flags=re.ASCII): value for name, value in values.items()}
        self._mlflow.log_metrics(clean, step=step)

    def text(self, step: int, name: str, rows: Rows) -> None:
        self._mlflow.log_text(samples_text(rows), f"samples/{name}/step_{step}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


class SwanlabSink:
    """SwanLab. A run that is resumed goes on there too, where it is online."""

    def __init__(self, info: RunInfo):
        self._swanlab = importlib.import_module("swanlab")
        known = id_of(info, "swanlab")
        run = self._swanlab.init(
            project=info.project,
            name=info.experiment,
            config=info.config,
            log_dir=str(info.output_dir / "swanlab"),
            **({"id": known, "resume": "allow"} if known else {}),
        )
        keep_id(info, "swanlab", run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=step)

    def text(self, step: int, name: str, rows: Rows) -> None:
        self._swanlab.log({f"samples/{name}": self._swanlab.Text(samples_text(rows))}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class TrackioSink:
    """Trackio: on this machine, in TRACKIO_DIR. A run that is resumed goes on there too."""

    def __init__(self, info: RunInfo):
        self._trackio = importlib.import_module("trackio")
        resume = "allow" if id_of(info, "trackio") else "never"
        name = id_of(info, "trackio") or f"{info.experiment}-{uuid.uuid4().hex[:6]}"
        self._run = self._trackio.init(
            project=info.project, name=name, config=info.config, resume=resume, embed=False
        )
        keep_id(info, "trackio", name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, rows: Rows) -> None:
        self._run.log({f"samples/{name}": self._trackio.Table(**_table(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()


class PrometheusSink:
    """The newest number of each metric, for a Prometheus server to fetch, with project and experiment."""

    def __init__(self, info: RunInfo):
        self._client = importlib.import_module("prometheus_client")
        self._registry = self._client.CollectorRegistry()
        self._labels = {"project": info.project, "experiment": info.experiment}
        self._gauges = {}
        host, _, port = info.prometheus_address.rpartition(":")
        self._server = MetricsServer((host, int(port)), self._text, _token(info.prometheus_token_env))
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics for Prometheus: http://%s:%d/metrics", host, self.port)

    def _text(self) -> bytes:
        return self._client.generate_latest(self._registry)

    @property
    def port(self) -> int:
        """Of the server."""
        return self._server.server_port

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            self._gauge(name).labels(**self._labels).set(value)

    def text(self, step: int, name: str, rows: Rows) -> None:
        """Prometheus has numbers only."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _gauge(self, name: str):
        """The gauge of a metric, whose name keeps letters, digits and underscores."""
        if name not in self._gauges:
            clean = re.sub(r"\W", "_", f"siirl_{name}", flags=re.ASCII)
            self._gauges[name] = self._client.Gauge(clean, name, list(self._labels), registry=self._registry)
        return self._gauges[name]


class MetricsServer(BoundedServer):
    """Gives a text to who asks for /metrics, with the token if there is one."""

    def __init__(self, address: tuple[str, int], text: Callable[[], bytes], token: str):
        self.text, self.token = text, token
        self.here_alone = not token and is_loopback(address[0])
        super().__init__(address, _MetricsHandler)


class _MetricsHandler(PageHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        if self.server.here_alone and not is_loopback(self._asked_host()):
            self.send(403, "text/plain", "this address serves this machine alone, by a name of its own")
            return
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if self.server.token and not is_same(shown, self.server.token):
            self.send(401, "text/plain", "the token is missing or wrong", WWW_Authenticate="Bearer")
            return
        self.admitted()
        if self.path.partition("?")[0] in ("/", "/metrics"):
            self.send(200, "text/plain; version=0.0.4; charset=utf-8", self.server.text())
        else:
            self.send(404, "text/plain", "metrics are at /metrics")

    def _asked_host(self) -> str:
        """By what name it was asked; without a token a browser may have been led here by another one's."""
        host = self.headers.get("Host", "localhost")
        return host if host.endswith("]") else host.rpartition(":")[0] or host


def _token(variable: str | None) -> str:
    """The value of an environment variable that is to hold a token; "" if none is named."""
    if variable is None:
        return ""
    if not (token := os.environ.get(variable, "").strip()):
        raise ValueError(f"the environment variable {variable} (trainer.prometheus_token_env) is not set")
    return token


def _told(error: Exception) -> str:
    """An error of another's package, in one line."""
    text = printable(" ".join(str(error).split())).rstrip(".")
    return f"{type(error).__name__}: {text if len(text) <= MOST_TOLD else text[:MOST_TOLD] + '...'}"


def _table(rows: Rows) -> dict[str, list]:
    """Samples as columns and data, all of it text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {
        "columns": columns,
        "data": [[printable(str(row.get(key, ""))) for key in columns] for row in rows],
    }


@dataclass(frozen=True)
class Logger:
    """A destination that trainer.logger may name."""

    make: Callable[[RunInfo], Sink]

    package: str = ""
    """What is installed for it, where siirl does not bring it."""

    hint: str = ""
    """What to do if it does not start."""

    @property
    def ours(self) -> bool:
        """Whether it works without another's service or package."""
        return not self.package


LOGGERS = {
    "console": Logger(lambda info: ConsoleSink(info.total_steps, info.first_step, info.progress)),
    "tensorboard": Logger(TensorBoardSink),
    "wandb": Logger(WandbSink, "wandb", "Log in with `wandb login`, or set WANDB_MODE=offline."),
    "mlflow": Logger(
        MlflowSink,
        "mlflow",
        "Set MLFLOW_TRACKING_URI to a server's address, or to a folder with MLFLOW_ALLOW_FILE_STORE=true; "
        "a database, as in sqlite:///mlflow.db, needs more of the package: pip install mlflow.",
    ),
    "swanlab": Logger(SwanlabSink, "swanlab", "Log in with `swanlab login`, or set SWANLAB_MODE=offline."),
    "trackio": Logger(TrackioSink, "trackio", "Set TRACKIO_DIR to a folder that can be written."),
    "prometheus": Logger(PrometheusSink, "prometheus-client", "Set another trainer.prometheus_address."),
}
"""trainer.logger's names."""


def check_installed(names: Sequence[str]) -> None:
    """ConfigError for destinations whose packages are not installed here: their numbers would go nowhere."""
    for name in names:
        package = LOGGERS[name].package if name in LOGGERS else ""
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise ConfigError(
                f"trainer.logger has {name!r}, and the package {package} is not installed. Install it (pip "
                f"install {package}), or take {name} out of trainer.logger."
            )
