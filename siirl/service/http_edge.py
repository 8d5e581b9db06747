"""The edge to what clients send: whatever reading it raises is an answer in their own channel."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from siirl.agents.outside.content import BadRequest, understood
from siirl.errors import UserError
from siirl.service.commands import Command, Refused
from siirl.service.desk import ComeBack

log = logging.getLogger(__name__)
Answer = Callable[[Any, web.Request], Awaitable[Any]]


def sound(make: Callable[[], Command]) -> Callable[[], Command]:
    """Refused for whatever reading a request raises."""

    def command() -> Command:
        try:
            return understood("the request cannot be understood", make)
        except BadRequest as error:
            if isinstance(error.__cause__, Refused | UserError):
                raise Refused(str(error.__cause__)) from error
            raise Refused(str(error)) from error

    return command


async def understood_later(answer: Answer, asked: Any, request: web.Request) -> Any:
    """As `understood`, for what takes time."""
    try:
        return await answer(asked, request)
    except (BadRequest, Refused, ComeBack, OSError, web.HTTPException, asyncio.CancelledError):
        raise
    except Exception as error:  # the edge to what others sent
        log.debug("a request was not understood", exc_info=True)
        text = f"the request cannot be understood: {type(error).__name__}: {error}"
        raise BadRequest(text[:500]) from error


def error_answer(text: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    told = {"detail": text, "error": text, "category": "user"}
    return web.json_response(told, status=status, headers=headers)
