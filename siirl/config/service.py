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
    tenants_file: str | None = key(
        None,
        "file with a line for each who shares the server, a name and a key that begins with tml-: each "
        "reaches its own alone; null: all have one key",
        when=ON,
    )
    max_models_per_tenant: int = key(
        0, "adapters that one tenant may train at once; 0: as many as max_models", low=0, when=ON
    )
    max_tokens_per_s: float = key(
        0.0,
        "tokens a second that one tenant may have trained, read and sampled, 10 s of them at once; 0: any "
        "number",
        low=0,
        when=ON,
    )
    max_disk_gb: float = key(0.0, "size in GB of what one tenant may have saved; 0: any size", low=0, when=ON)
    idle_s: float = key(
        300.0,
        "seconds without a sign of a session after which it is over: its adapters are dropped, what it saved "
        "stays",
        low=0,
        excluded=0,
        when=ON,
    )
