"""Faults that users met elsewhere, over HTTP: rows 15, 19, 33, 37, 40, 42, 43, 45, 47 and 48.

The real target in fp32, behind the server, with drafters that replay the fixtures R(k): what is drafted is
right, and a block ends wherever k puts its end.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fastapi", reason="the server's packages are not installed: pip install paceline[serve]")
httpx = pytest.importorskip("httpx")

from e2e.live_server import start, tiny_generator  # noqa: E402
from paceline.testing import ReplayDrafter  # noqa: E402
from real.test_fixtures import FIXTURES, prompts  # noqa: E402, F401

pytestmark = pytest.mark.real_model
F2_LOG_PROBS = (-1.8827, -0.0197, -0.0115, -0.0109, -0.0388, -0.0500, -0.5656, -0.2578)
LENGTHS = range(1, 8)


@pytest.fixture(scope="module")
def server(smollm2, prompts):  # noqa: F811
    """Requests choose R(k) by the drafter's name `r<k>`; `wrong<j>` are R(4) with the j-th token spoilt."""
    recorded = {tuple(prompts[name]): [*f.ids, *range(40, 60)] for name, f in FIXTURES.items()}
    size = smollm2.target.vocab_size
    parts = {f"r{k}": ReplayDrafter(recorded, k, vocab_size=size) for k in LENGTHS}
    parts["wrong2"] = ReplayDrafter(recorded, 4, wrong=2, vocab_size=size)
    parts["wrong1"] = ReplayDrafter(recorded, 4, wrong=1, vocab_size=size)
    running = start(tiny_generator(smollm2.target, smollm2.tokenizer, parts), prefix_tokens=4096)
    with httpx.Client(timeout=120) as client:
        running.__dict__["client"] = client
        yield running
    running.stop()


def ask(server, name, drafter="none", **fields):
    fixture = FIXTURES[name]
    path = "/v1/completions" if fixture.raw else "/v1/chat/completions"
    prompt = (
        {"prompt": fixture.prompt}
        if fixture.raw
        else {"messages": [{"role": "user", "content": fixture.prompt}]}
    )
    length = {"max_tokens": 48 if name == "F3" else 24}
    body = {**prompt, **length, "temperature": 0, "paceline": {"drafter": drafter}, **fields}
    found = server.client.post(f"{server.url}{path}", json=body)
    assert found.status_code == 200, found.text
    if body.get("stream"):
        return [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]
    return found.json()


def text_of(body):
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def deltas_of(chunks):
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]


@pytest.mark.parametrize("k", LENGTHS)
def test_row_15_a_stop_string_inside_a_block_cuts_text_ids_and_log_probs(server, k):
    fields = {"stop": " is Par", "logprobs": True}
    body = ask(server, "F2", f"r{k}", **fields)
    assert text_of(body) == "The capital of France"
    assert body["usage"]["completion_tokens"] == 6
    assert len(body["choices"][0]["logprobs"]["content"]) == 6
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "".join(deltas_of(ask(server, "F2", f"r{k}", stream=True, **fields))) == "The capital of France"


@pytest.mark.parametrize("k", [1, 7])
def test_row_19_the_next_turn_reuses_what_was_read_and_equals_a_cold_one(server, k):
    server.scheduler.drop_prefixes()
    first = ask(server, "F4", f"r{k}")
    metrics = server.scheduler.metrics
    before = metrics.num_reused_tokens._value.get()
    messages = [
        {"role": "user", "content": FIXTURES["F4"].prompt},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Once more."},
    ]
    second = ask(server, "F4", messages=messages)
    reused = metrics.num_reused_tokens._value.get() - before
    assert reused == first["usage"]["prompt_tokens"] + 8 - 1
    server.scheduler.drop_prefixes()
    cold = ask(server, "F4", messages=messages, paceline={"drafter": "none", "trace": False})
    assert text_of(cold) == text_of(second)


@pytest.mark.parametrize("drafter", ["none", "r4"])
def test_row_33_penalties_act_and_what_is_not_offered_is_an_error(server, drafter):
    plain = text_of(ask(server, "F5", drafter))
    repeated = text_of(ask(server, "F5", drafter, repetition_penalty=1.3))
    assert repeated.startswith("\nd h i j k l m n o p q r s t u v w x y")
    assert not plain.startswith("\nd h i")
    low, high = (text_of(ask(server, "F5", drafter, frequency_penalty=amount)) for amount in (-2, 2))
    assert low != high
    banned = text_of(ask(server, "F5", drafter, logit_bias={"198": -100}))
    assert "\n" not in banned
    refused = server.client.post(
        f"{server.url}/v1/completions", json={"prompt": "a", "no_repeat_ngram_size": 3}
    )
    assert refused.status_code == 400
    assert "no_repeat_ngram_size is not a field" in refused.json()["error"]["message"]


def test_row_37_seeds_decide_and_nothing_else(server):
    before = torch.random.get_rng_state()
    seeded = {"temperature": 1.0, "seed": 42, "max_tokens": 12}
    alone = [text_of(ask(server, "F1", **seeded)) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, server, "F1", "r3", temperature=1.0, seed=i) for i in range(3)]
        company = text_of(ask(server, "F1", "r2", **seeded))
        [other.result() for other in others]
    assert alone[0] == alone[1] == company
    unseeded = {text_of(ask(server, "F1", temperature=1.0, max_tokens=12)) for _ in range(6)}
    assert len(unseeded) > 1
    choices = ask(server, "F1", n=4, **seeded)["choices"]
    assert len({choice["text"] for choice in choices}) > 1
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("k", [None, *LENGTHS])
def test_row_40_log_probs_of_accepted_tokens_come_from_their_own_rows(server, k):
    body = ask(server, "F2", "none" if k is None else f"r{k}", logprobs=True, top_logprobs=2)
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(F2_LOG_PROBS, abs=1e-3)
    assert all(entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"]) for entry in entries)


def test_row_42_the_last_block_brings_text_and_the_end(server):
    whole = ask(server, "F2", "r7")
    chunks = ask(server, "F2", "r7", stream=True, stream_options={"include_usage": True})
    assert "".join(deltas_of(chunks)) == text_of(whole) == "The capital of France is Paris."
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("cap", [47, 46])
def test_row_43_characters_are_never_sent_in_halves_or_twice(server, smollm2, k, cap):
    deltas = deltas_of(ask(server, "F3", f"r{k}", max_tokens=cap, stream=True))
    assert not any("\ufffd" in delta for delta in deltas[:-1])
    assert "".join(deltas) == smollm2.tokenizer.decode(FIXTURES["F3"].ids[:cap], skip_special_tokens=True)


def test_row_45_requests_in_company_get_what_each_gets_alone(server):
    asked = []
    for number in range(8):
        chance = random.Random(number)
        name = chance.choice(sorted(FIXTURES))
        fields = {"temperature": chance.choice([0, 0.9]), "seed": number}
        if chance.random() < 0.5:
            fields["stop"] = chance.choice([" is Par", "4", "e"])
        asked.append((name, f"r{chance.choice(LENGTHS)}", fields))
    alone = [text_of(ask(server, name, **fields)) for name, _, fields in asked]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, server, name, drafter, **fields) for name, drafter, fields in asked]
        assert [text_of(one.result()) for one in running] == alone


@pytest.mark.parametrize("drafter", ["none", "r1", "r6", "wrong2"])
def test_row_47_a_schema_holds_at_every_drafted_position(server, drafter):
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "maximum": 99},
        },
        "required": ["capital", "people"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    body = ask(server, "F2", drafter, max_tokens=60, response_format=wanted)
    assert body["choices"][0]["finish_reason"] == "stop"
    found = json.loads(text_of(body))
    assert set(found) == {"capital", "people"}
    assert isinstance(found["people"], int)
    plain = ask(server, "F2", "none", max_tokens=60, response_format=wanted)
    assert text_of(plain) == text_of(body)


@pytest.mark.parametrize(("drafter", "rate", "length"), [("wrong2", 0.5, 3.0), ("wrong1", 0.25, 2.0)])
def test_row_48_nothing_behind_a_rejection_counts_and_speed_is_of_tokens(server, drafter, rate, length):
    chunks = ask(server, "F1", drafter, stream=True, stream_options={"include_usage": True})
    usage = chunks[-1]["usage"]
    figures = usage["paceline"]
    # The last drafts are cut to the room that is left, so a whole run is a little off the rate of a round.
    assert figures["acceptance_rate"] == pytest.approx(rate, abs=0.06)
    assert figures["mean_acceptance_length"] == pytest.approx(length, abs=0.1)
    assert usage["completion_tokens"] == 24 > len(chunks)
    assert figures["tokens_per_second"] == pytest.approx(24 / figures["seconds"])
