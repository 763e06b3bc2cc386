"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import PacelineError


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line for people.
        kind: `type` in OpenAI's words.
        param: field of the request that it is about.
        code: short name for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong."""
    return ApiError(400, message, param=param, code=code)


def refused(error: PacelineError) -> ApiError:
    """The engine refuses a request; its messages name the field and the value, and no paths."""
    return bad_request(" ".join(str(error).split()))


def unknown_model(asked: str, served: str) -> ApiError:
    """A model that is not served here."""
    return ApiError(
        404, f"model {asked!r} is not served here: use {served!r}", param="model", code="model_not_found"
    )


def too_busy(retry_after: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        429,
        f"the queue is full: try again in {retry_after} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after)},
    )


def past_deadline(seconds: float) -> ApiError:
    """A request was not answered in time."""
    return ApiError(
        504,
        f"the deadline of {seconds:g} s has passed: ask for fewer tokens, or for a later deadline_seconds",
        kind="server_error",
        code="deadline_exceeded",
    )


def unavailable(message: str) -> ApiError:
    """The server cannot answer now."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"})
