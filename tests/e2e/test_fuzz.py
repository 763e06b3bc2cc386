"""Bodies made from the server's own OpenAPI document, good and malformed: never an error of the server."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")

NUM_EXAMPLES = int(os.environ.get("PACELINE_FUZZ_EXAMPLES", "25"))


def operations(live):
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    return {f"{o.method} {o.path}": o for o in (found.ok() for found in schema.get_all_operations())}


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/v1/chat/completions", "positive"),
        ("/v1/chat/completions", "negative"),
        ("/v1/completions", "positive"),
        ("/v1/completions", "negative"),
        # Any text is a good name of a model here, so there are no bad ones.
        ("/v1/models/{model_id}", "positive"),
    ],
)
def test_made_up_requests_are_answered_or_refused(live, path, mode):
    operation = next(o for name, o in operations(live).items() if name.lower().endswith(f" {path}"))
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    statuses = set()

    @given(case=strategy)
    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case):
        if isinstance(case.body, dict):
            # What would be answered at length is cut short, and what would wait is not waited for.
            case.body |= {"max_tokens": 2} if mode == "positive" else {}
        found = case.call(timeout=30)
        statuses.add(found.status_code)
        assert found.status_code < 500, found.text
        if found.status_code >= 400:
            assert set(found.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert statuses
    assert mode == "positive" or min(statuses) >= 400
    live.wait_until_idle()
    assert live.scheduler._num_open == 0
