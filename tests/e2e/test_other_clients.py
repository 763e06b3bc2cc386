"""LangChain's and LiteLLM's adapters for OpenAI's API, unchanged."""

from __future__ import annotations

import pytest

QUESTION = "tell me a story about the cat and the hat"


@pytest.fixture
def expected(solo):
    return solo([{"role": "user", "content": QUESTION}]).text


def test_langchain_asks_and_streams(live, expected):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=f"{live.url}/v1", api_key="anything", model="tiny", max_tokens=24, temperature=0,
        max_retries=0,
    )  # fmt: skip
    answer = chat.invoke(QUESTION)
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == expected
    plain = chat.bind(extra_body={"paceline": {"drafter": "none"}})
    assert plain.invoke(QUESTION).content == expected


def test_litellm_asks_and_streams(live, expected, monkeypatch):
    # Its table of prices would be fetched from the network otherwise.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    options = {
        "model": "openai/tiny",
        "api_base": f"{live.url}/v1",
        "api_key": "anything",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
        "num_retries": 0,
    }
    answer = litellm.completion(**options)
    assert answer.choices[0].message.content == expected
    streamed = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    lossless = litellm.completion(**options, extra_body={"paceline": {"drafter": "none"}})
    assert lossless.choices[0].message.content == expected
