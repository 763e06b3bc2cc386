"""The official client, unchanged."""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "tell me a story about the cat and the hat"}]


@pytest.fixture
def client(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="anything", max_retries=0)


def ask(client, messages=MESSAGES, **fields):
    options = {"model": "tiny", "max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(messages=messages, **options)


def test_a_chat_is_answered_with_the_text_of_plain_decoding(client, solo):
    expected = solo(MESSAGES)
    answer = ask(client)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.prompt_len
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == expected.prompt_len + len(expected.token_ids)


def test_a_stream_adds_up_to_the_whole_answer(client, solo):
    expected = solo(MESSAGES)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [expected.finish_reason] == [reasons[-1]]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_that_wish_carries_no_usage(client):
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


@pytest.mark.parametrize("drafter", ["none", "phrase", "prompt_lookup"])
def test_every_drafter_gives_the_same_text_and_names_itself(client, solo, drafter):
    answer = ask(client, extra_body={"paceline": {"drafter": drafter}})
    assert answer.choices[0].message.content == solo(MESSAGES).text
    figures = answer.usage.model_extra["paceline"]
    assert figures["drafter"] == drafter
    assert (figures["num_draft_tokens"] == 0) == (drafter == "none")
    assert figures["mean_acceptance_length"] >= 1


def test_no_nodes_switch_speculation_off(client):
    figures = ask(client, extra_body={"paceline": {"num_speculative_tokens": 0}}).usage.model_extra[
        "paceline"
    ]
    assert figures["num_draft_tokens"] == 0


def test_a_request_may_draft_less_than_the_server(client):
    wide = ask(client).usage.model_extra["paceline"]
    narrow = ask(client, extra_body={"paceline": {"num_speculative_tokens": 2}}).usage.model_extra["paceline"]
    assert wide["num_draft_tokens"] > 2 * wide["num_rounds"] * 0.9
    assert narrow["num_draft_tokens"] <= 2 * narrow["num_rounds"]


def test_a_seed_decides_a_sampled_text_whoever_drafts(client, solo):
    expected = solo(MESSAGES, temperature=0.9, seed=5).text
    for drafter in ("none", "phrase", "prompt_lookup"):
        answer = ask(client, temperature=0.9, seed=5, extra_body={"paceline": {"drafter": drafter}})
        assert answer.choices[0].message.content == expected
    assert ask(client, temperature=0.9, seed=6).choices[0].message.content != expected


def test_several_choices_differ_and_the_first_is_the_one_alone(client, solo):
    answer = ask(client, n=3, temperature=1.0, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts[0] == solo(MESSAGES, temperature=1.0, seed=5).text
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in ask(client, n=3, temperature=1.0, seed=5).choices] == texts
    assert answer.usage.prompt_tokens == solo(MESSAGES).prompt_len, "one prompt, counted once"
    streamed = ["", "", ""]
    for chunk in ask(client, n=3, temperature=1.0, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_stop_string_ends_the_text_in_front_of_it(client, solo):
    whole = solo(MESSAGES).text
    stop = whole[9:12]
    answer = ask(client, stop=[stop, "never said"])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = ask(client, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == whole[: whole.index(stop)]


def test_log_probabilities_are_the_targets_own(client, solo):
    expected = solo(MESSAGES, logprobs=2)
    content = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(
        [e.log_prob for e in expected.log_probs], abs=1e-4
    )
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content if "\ufffd" not in entry.token)
    streamed = []
    for chunk in ask(client, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None and chunk.choices[0].delta.role is None:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_a_completion_goes_on_from_a_text_or_from_ids(client, solo, live):
    expected = solo("the cat and the hat")
    for prompt in ("the cat and the hat", live.generator.encode("the cat and the hat", raw=True)):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0, logprobs=1
        )
        assert answer.choices[0].text == expected.text
        assert len(answer.choices[0].logprobs.tokens) == len(expected.token_ids)
        assert answer.choices[0].logprobs.text_offset[0] == 0
    short = client.completions.create(model="tiny", prompt="the cat", temperature=0)
    assert short.usage.completion_tokens == 16, "as OpenAI's API has it"


def test_several_prompts_are_several_choices(client, solo):
    prompts = ["the cat", "and the hat"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=9, temperature=0)
    assert [choice.text for choice in answer.choices] == [solo(p, max_new_tokens=9).text for p in prompts]
    assert answer.usage.prompt_tokens == sum(solo(p).prompt_len for p in prompts)


def test_penalties_and_biases_are_those_of_the_engine(client, solo):
    expected = solo(
        MESSAGES,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={40: 9.0},
        repetition_penalty=1.2,
        top_k=7,
    )
    answer = ask(
        client, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={"40": 9},
        extra_body={"repetition_penalty": 1.2, "top_k": 7},
    )  # fmt: skip
    assert answer.choices[0].message.content == expected.text != solo(MESSAGES).text


def test_a_lossy_verifier_reports_what_it_spent(client):
    relaxed = {"verifier": "budgeted", "relaxation": {"preset": "discovery", "risk_budget": 50.0}}
    figures = ask(client, max_tokens=60, extra_body={"paceline": relaxed}).usage.model_extra["paceline"]
    assert 0 <= figures["regret_spent"] <= 50
    strict = {"verifier": "budgeted", "relaxation": {"risk_budget": 0}}
    assert (
        ask(client, extra_body={"paceline": strict}).choices[0].message.content
        == ask(client).choices[0].message.content
    )


def test_a_trace_tells_every_round(client):
    chunks = list(ask(client, stream=True, extra_body={"paceline": {"trace": True, "drafter": "phrase"}}))
    rounds = [
        chunk.model_extra["paceline"]["round"] for chunk in chunks if "paceline" in (chunk.model_extra or {})
    ]
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "".join(token["text"] for one in rounds for token in one["tokens"]).startswith(text[:5])
    for one in rounds:
        tree = one["tree"]
        assert (
            len(tree["texts"]) == len(tree["parents"]) == len(tree["values"]) == one["num_draft_tokens"] + 1
        )
        assert tree["parents"][0] == -1
        for token in one["tokens"]:
            assert token["origin"] in {"phrase", "relaxed", "target"}
            assert (token["node"] is None) == (token["origin"] == "target")
            if token["node"] is not None:
                assert tree["texts"][token["node"]] == token["text"]
            assert token["top"][0]["log_prob"] >= token["log_prob"] - 1e-6
        assert set(one["seconds"]) == {"draft", "forward", "verify", "other"}
    json.dumps(rounds)


def test_models_are_listed_and_found(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tiny"
    assert model.model_extra["paceline"]["drafters"] == ["phrase", "none", "prompt_lookup"]
    with pytest.raises(openai.NotFoundError, match="not served here: use 'tiny'"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(client, model="gpt-9")


def test_turns_of_a_conversation_reuse_what_was_read(client, live, solo):
    messages = [{"role": "user", "content": "once upon a time in the land of hats " * 3}]
    first = ask(client, messages)
    reused = live.scheduler.metrics.num_reused_tokens._value.get()
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "go on"},
    ]
    second = ask(client, messages)
    assert second.choices[0].message.content == solo(messages).text
    assert live.scheduler.metrics.num_reused_tokens._value.get() - reused > 40
