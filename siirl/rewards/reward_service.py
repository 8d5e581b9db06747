"""Scores that a service gives: one request for each response. No torch."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from siirl.errors import ConfigError
from siirl.http_service import Endpoint, EndpointSettings
from siirl.rewards.reward_registry import Score, register_reward

if TYPE_CHECKING:  # a reward worker starts in half the time without it
    from siirl.config import Config

REMOTE = "remote"


@register_reward(REMOTE, executor="thread", reads="whole")
def remote(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, service: Mapping[str, Any]
) -> Score:
    """What the service at reward_model.remote.url answers: a number, or an object with "score" and more.

    It is sent {data_source, solution_str, ground_truth, extra_info}. EndpointError if it cannot be reached.
    """
    message = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    return _endpoint(tuple(service.items())).post(message)


def remote_settings(cfg: "Config") -> dict[str, Any] | None:
    """The service that the configuration names, or None. ConfigError for an address that is none."""
    service = cfg.reward_model.remote
    if service.url is None:
        return None
    if not service.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"reward_model.remote.url={service.url!r}: it must be the http(s) address of a service, e.g. "
            "http://localhost:8000/score."
        )
    settings = EndpointSettings(
        url=service.url,
        timeout_s=service.timeout_s,
        max_tries=service.max_tries,
        away_s=service.away_s,
        max_concurrent=service.max_concurrent,
        max_per_s=service.max_per_s,
        token_env=service.token_env,
    )
    return dict(settings.__dict__)


@functools.cache
def _endpoint(items: tuple[tuple[str, Any], ...]) -> Endpoint:
    return Endpoint(EndpointSettings(**dict(items)))
