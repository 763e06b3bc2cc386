"""What is checked before a request is read: the key, and how large its body is."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import ConfigError
from paceline.server.errors import ApiError

MAX_BODY_BYTES = 4 << 20
LEAST_KEY_LEN = 16
GUARDED = ("/v1", "/metrics", "/openapi.json")
"""Paths that need a key; the page, health and version are open."""


def read_keys(path: Path) -> tuple[bytes, ...]:
    """API keys from a file, one a line; lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, or a key is too short to be one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} cannot be read: it is not UTF-8") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key: write one a line")
    short = next((key for key in keys if len(key) < LEAST_KEY_LEN), None)
    if short is not None:
        raise ConfigError(
            f"--api-key-file {path} holds a key of {len(short)} characters: at least {LEAST_KEY_LEN} "
            "are needed"
        )
    return tuple(key.encode() for key in keys)


def check_key(authorization: str | None, keys: tuple[bytes, ...]) -> None:
    """Refuse requests without one of the keys; every comparison takes the same time.

    Raises:
        ApiError: 401.
    """
    if not keys:
        return
    scheme, _, given = (authorization or "").partition(" ")
    found = False
    for key in keys:
        found |= hmac.compare_digest(given.strip().encode(), key)
    if scheme.lower() != "bearer" or not found:
        raise ApiError(
            401,
            "no valid API key: send it as Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class KeyCheck:
    """Lets requests for guarded paths through with a key alone, before anything of their body is read.

    Args:
        app: the application behind it.
        keys: see `check_key`.
    """

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key."""
        if scope["type"] == "http" and scope["path"].startswith(GUARDED):
            given = dict(scope["headers"]).get(b"authorization")
            try:
                check_key(None if given is None else given.decode("latin-1"), self._keys)
            except ApiError as error:
                await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies beyond a size before they are read whole.

    Args:
        app: the application behind it.
        max_bytes: of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what arrives; once it is too much, whatever the application answers is replaced."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes, is_answered = 0, False

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise ValueError("the body is too large")
            return message

        async def checked(message: Message) -> None:
            nonlocal is_answered
            if num_bytes <= self._max_bytes:
                await send(message)
            elif not is_answered:
                is_answered = True
                error = ApiError(
                    413, f"the body has more than {self._max_bytes} bytes: send less", code="body_too_large"
                )
                await JSONResponse(error.body, error.status)(scope, receive, send)

        await self._app(scope, counted, checked)
