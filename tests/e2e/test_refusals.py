"""A field is honoured or refused by name; errors are one clear line in OpenAI's form."""

from __future__ import annotations

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "x"}]


def refused(live, body, path="/v1/chat/completions"):
    found = httpx.post(f"{live.url}{path}", json=body)
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "/" not in error["message"].replace("application/json", "").replace("and/or", ""), "no paths"
    return found.status_code, error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True), ("metadata", {"a": "b"}), ("modalities", ["audio"]), ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}), ("reasoning_effort", "high"), ("service_tier", "flex"),
        ("web_search_options", {}), ("functions", [{"name": "f"}]), ("function_call", "auto"),
        ("parallel_tool_calls", False), ("verbosity", "low"), ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
    ],
)  # fmt: skip
def test_known_fields_that_are_not_served_are_refused_by_name(live, field, value):
    status, error = refused(live, {"messages": MESSAGES, field: value})
    assert status == 400
    assert error["param"] == field
    assert error["message"].startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", False),
        ("service_tier", "auto"),
        ("parallel_tool_calls", True),
        ("modalities", ["text"]),
        ("audio", None),
    ],
)
def test_the_value_that_asks_for_nothing_is_fine(live, field, value):
    found = httpx.post(
        f"{live.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, field: value}
    )
    assert found.status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": MESSAGES, "tempersture": 1}, "tempersture", "not a field of this request"),
        ({"messages": MESSAGES, "temperature": 9}, "temperature", "less than or equal to 2 (it is '9')"),
        ({"messages": MESSAGES, "temperature": "1"}, "temperature", "valid number"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
        ({"messages": MESSAGES, "n": 99}, "n", "less than or equal to 8"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", "without logprobs"),
        ({"messages": MESSAGES, "stop": ["a"] * 40}, "stop", "40 strings: at most 16"),
        ({"messages": MESSAGES, "stop": ""}, None, "at least 1 character"),
        ({"messages": MESSAGES, "logit_bias": {"cat": 1}}, "logit_bias", "keys are token ids"),
        ({"messages": MESSAGES, "logit_bias": {"4000": 1}}, None, "ids of this target are 0 to"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "no tools are given"),
        ({"messages": [{"role": "user"}]}, "messages", "has no content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "wizard"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            None, "image_url",
        ),
        (
            {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools", "chat template has no place for tools",
        ),
        ({"messages": MESSAGES, "paceline": {"drafter": "fhrase"}}, None, "did you mean 'phrase'"),
        ({"messages": MESSAGES, "paceline": {"verifier": "greedi"}}, "paceline.verifier", "one of budgeted"),
        ({"messages": MESSAGES, "paceline": {"draftr": "none"}}, "paceline.draftr", "not a field"),
        (
            {"messages": MESSAGES, "paceline": {"verifier": "budgeted", "relaxation": {"preset": "wild"}}},
            None, "did you mean",
        ),
        (
            {"messages": MESSAGES, "paceline": {"relaxation": {"risk_budget": 1}}},
            "paceline.relaxation", "name a lossy one",
        ),
        ({"messages": MESSAGES, "stop": "x" * 300}, None, "at most 256 characters"),
        ({"messages": MESSAGES, "min_tokens": 5, "stop_token_ids": [999_999]}, None, "999999"),
        ({"messages": MESSAGES, "stop_token_ids": [10**30]}, None, "less than"),
        ({"messages": MESSAGES, "min_tokens": 10**30}, "min_tokens", "less than"),
        ({"messages": MESSAGES, "top_k": 10**30, "temperature": 1}, "top_k", "less than"),
        (
            {"messages": MESSAGES, "response_format": {"type": "text", "json_schema": {"schema": {}}}},
            "response_format", "must be 'json_schema'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "[1"}}],
                    },
                ]
            },
            "messages", "not a JSON object",
        ),
        (
            {"messages": MESSAGES, "temperature": 1, "paceline": {"verifier": "budgeted"}},
            None, "temperature",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, None, "the target's context is 256"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            "response_format", "give the schema",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_field_and_the_value(live, body, param, says):
    status, error = refused(live, body)
    assert status == 400
    assert says in error["message"], error
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 3000}]},
        {"messages": MESSAGES, "paceline": {"drafter": "fhrase"}},
        {"messages": MESSAGES, "temperature": 1, "paceline": {"verifier": "budgeted"}},
    ],
)
def test_what_the_engine_refuses_has_its_own_status_in_a_stream_too(live, body):
    assert refused(live, body | {"stream": True})[0] == 400


def test_more_choices_than_ever_fit_are_refused_for_good(live):
    body = {"prompt": ["x"] * 8, "n": 8, "max_tokens": 1}
    assert refused(live, body | {"n": 99}, "/v1/completions")[0] == 400
    limit = live.generator.engine.max_batch_size + live.scheduler.max_queue
    assert limit >= 64, "or the request below would not fit"
    assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_stop_ids_count_where_the_models_own_end_does_not(live, solo):
    ids = solo(MESSAGES, ignore_eos=True, max_new_tokens=30).token_ids
    asked = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    found = httpx.post(f"{live.url}/v1/chat/completions", json=asked | {"stop_token_ids": [ids[4]]}).json()
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == ids.index(ids[4]) + 1


def test_a_body_that_is_no_json_is_refused(live):
    found = httpx.post(
        f"{live.url}/v1/completions", content=b'{"prompt": "x"', headers={"content-type": "application/json"}
    )
    assert found.status_code == 400
    assert "JSON" in found.json()["error"]["message"]


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}])
def test_completions_refuse_what_they_do_not_serve(live, field):
    status, error = refused(live, {"prompt": "x", **field}, "/v1/completions")
    assert status == 400
    assert error["param"] == next(iter(field))


def test_ids_beyond_the_vocabulary_are_refused(live):
    status, error = refused(live, {"prompt": [1, 5000]}, "/v1/completions")
    assert status == 400
    assert "5000" in error["message"]


def test_unknown_paths_and_methods_are_errors_of_the_same_form(live):
    for method, path, status, says in (
        ("GET", "/v1/nothing", 404, "GET /v1/nothing is not served here"),
        ("POST", "/v1/embeddings", 404, "POST /v1/embeddings is not served here"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("POST", "/health", 405, "/health takes GET, not POST"),
        ("GET", "/missing.js", 404, "GET /missing.js is not served here"),
    ):
        found = httpx.request(method, f"{live.url}{path}")
        assert (found.status_code, found.json()["error"]["message"]) == (status, says)


def test_a_body_without_its_content_type_is_told(live):
    found = httpx.post(f"{live.url}/v1/completions", content=b'{"prompt": "x"}')
    assert found.status_code == 400
    assert "Content-Type: application/json" in found.json()["error"]["message"]


def test_images_are_refused_by_name(live):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, error = refused(live, {"messages": [{"role": "user", "content": [part]}]})
    assert status == 400
    assert "images (image_url) are not served" in error["message"]


def test_refused_requests_leave_nothing_behind(live):
    live.wait_until_idle()
    assert live.scheduler._num_open == 0
    assert live.generator.engine.num_running == live.generator.engine.num_waiting == 0
