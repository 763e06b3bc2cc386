"""Fields that are known and not served: each may only carry the value that asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from paceline.server.errors import ApiError, bad_request
from paceline.server.protocol import ChatCompletionRequest, CompletionRequest

# Field -> values that change nothing; None always does.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "prompt_cache_key": (),
        "reasoning_effort": ("none",),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "best_of": "ask for n answers and choose yourself",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "metadata": "keep it on your side",
        "safety_identifier": "use user, which is written to the log",
        "prompt_cache_key": "prefixes are found by their tokens, leave it out",
    }
)


def refuse_unserved(request: ChatCompletionRequest | CompletionRequest) -> None:
    """Raise for the first field that asks for something that is not served.

    Raises:
        ApiError: it names the field, the value, and what to do instead.
    """
    for name in request.model_fields_set & set(_NEUTRAL):
        value = getattr(request, name)
        if value is not None and value not in _NEUTRAL[name]:
            raise _not_served(name, value)
    options = request.stream_options
    if options is not None and options.include_obfuscation:
        raise _not_served("stream_options.include_obfuscation", True)
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is given without stream: true", param="stream_options")


def _not_served(name: str, value: Any) -> ApiError:
    """The error of one field."""
    instead = _INSTEAD.get(name, "leave it out")
    return bad_request(
        f"{name} is {str(value)[:80]!r}: it is not served here; {instead}", param=name, code="unsupported"
    )
