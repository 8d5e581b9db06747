"""Group service: clients of Tinker's API train here, in the place of a loop of the run's own."""

from dataclasses import dataclass

from siirl.config.keys import key

ON = "enable"


@dataclass(frozen=True)
class ServiceConfig:
    """Clients of Tinker's API train adapters by their own loops (docs/serve.md)."""

    enable: bool = key(False, "serve clients instead of training by a workflow; `siirl serve` sets it")
    address: str = key(
        "127.0.0.1:8000",
        "host:port at which clients are waited for; port 0 is a free one; 0.0.0.0 lets other machines in, "
        "with the token",
        when=ON,
    )
    token_env: str | None = key(
        None,
        "environment variable with the key that clients show as TINKER_API_KEY, which begins with tml-; "
        "null: the server makes one",
        when=ON,
    )
    max_models: int = key(8, "adapters that are trained at once, each with an optimizer", low=1, when=ON)
    idle_s: float = key(
        300.0,
        "seconds without a sign of a session after which it is over: its adapters are dropped, what it saved "
        "stays",
        low=0,
        excluded=0,
        when=ON,
    )
