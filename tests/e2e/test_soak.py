"""Many clients at once, some of them rude: afterwards nothing is left, and nobody got another's answer.

Short by default; `make soak` asks for 200 requests of 16 clients (`PACELINE_SOAK_REQUESTS`).
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import psutil

from e2e.live_server import start, tiny_generator

NUM_REQUESTS = int(os.environ.get("PACELINE_SOAK_REQUESTS", "48"))
NUM_CLIENTS = 16
WORDS = tuple("the cat and hat tell story of a land far away with ten men in it".split())  # noqa: SIM905
BROKEN = ({}, {"prompt": 3}, {"prompt": "x", "temperature": "hot"}, {"prompt": "x", "unknown": 1})


@dataclass
class Asked:
    """A request, and what became of it."""

    body: dict
    kind: str
    status: int = 0
    text: str = ""
    num_tokens: int = 0
    details: dict = field(default_factory=dict)


def plan(number: int) -> Asked:
    chance = random.Random(number)
    kind = chance.choices(("whole", "stream", "leave", "broken"), (5, 5, 3, 2))[0]
    if kind == "broken":
        return Asked(chance.choice(BROKEN), kind)
    body = {
        "prompt": " ".join(chance.choices(WORDS, k=chance.randint(1, 30))),
        "max_tokens": chance.randint(1, 60),
        "temperature": chance.choice([0, 0, 0.8]),
        "seed": number,
        "paceline": {"drafter": chance.choice(["phrase", "prompt_lookup", "none"])},
    }
    if chance.random() < 0.3:
        body["stop"] = [chance.choice(["th", "a", "zz"])]
    if chance.random() < 0.2:
        body |= {"presence_penalty": 0.7, "logit_bias": {"40": 2.0}}
    return Asked(body, kind)


def perform(client: httpx.Client, url: str, asked: Asked) -> Asked:
    if asked.kind in ("whole", "broken"):
        found = client.post(f"{url}/v1/completions", json=asked.body)
        asked.status = found.status_code
        if found.status_code == 200:
            asked.text = found.json()["choices"][0]["text"]
            asked.num_tokens = found.json()["usage"]["completion_tokens"]
        return asked
    body = {**asked.body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", f"{url}/v1/completions", json=body) as found:
        asked.status = found.status_code
        for number, line in enumerate(found.iter_lines()):
            if asked.kind == "leave" and number > 3:
                return asked
            if line.startswith("data: {"):
                chunk = httpx.Response(200, content=line[6:]).json()
                if chunk["choices"]:
                    asked.text += chunk["choices"][0]["text"]
                else:
                    asked.num_tokens = chunk["usage"]["completion_tokens"]
    return asked


def parameters_of(body: dict) -> dict:
    names = {
        "max_tokens": "max_new_tokens",
        "temperature": "temperature",
        "seed": "seed",
        "presence_penalty": "presence_penalty",
    }
    found = {ours: body[theirs] for theirs, ours in names.items() if theirs in body}
    if "stop" in body:
        found["stop"] = tuple(body["stop"])
    if "logit_bias" in body:
        found["logit_bias"] = {int(key): value for key, value in body["logit_bias"].items()}
    return found


def test_rude_clients_leave_nothing_behind_and_polite_ones_get_their_own_answers(
    target_of, tokenizer, phrase_head_of, solo
):
    from paceline.drafters.phrase import PhraseDrafter

    target = target_of("llama")
    num_slots = len(target._slots)
    phrase = PhraseDrafter.build(target, phrase_head_of("llama"), 16)
    server = start(tiny_generator(target, tokenizer, {"phrase": phrase}), max_queue=NUM_REQUESTS)
    metrics = server.scheduler.metrics
    try:
        with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=NUM_CLIENTS)) as client:
            # Buffers grow to what so many clients need; what is measured is whether they go on growing.
            warm = ThreadPoolExecutor(NUM_CLIENTS)
            list(warm.map(lambda n: perform(client, server.url, plan(10_000 + n)), range(2 * NUM_CLIENTS)))
            server.wait_until_idle()
            before = psutil.Process().memory_info().rss
            start_tokens = metrics.num_generated_tokens._value.get()
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                done = list(pool.map(lambda n: perform(client, server.url, plan(n)), range(NUM_REQUESTS)))
            server.wait_until_idle()
        for asked in done:
            if asked.kind == "broken":
                assert asked.status == 400
            elif asked.kind != "leave":
                expected = solo(asked.body["prompt"], **parameters_of(asked.body))
                assert asked.status == 200
                assert asked.text == expected.text, asked.body
                assert asked.num_tokens == len(expected.token_ids)
        counts = {
            kind: sum(asked.kind == kind for asked in done) for kind in ("whole", "stream", "leave", "broken")
        }
        assert all(counts.values()), counts
        engine = server.generator.engine
        assert engine.num_running == engine.num_waiting == server.scheduler._num_open == 0
        assert not server.scheduler._owners
        assert not server.scheduler._jobs
        server.scheduler.drop_prefixes()
        time.sleep(0.7)
        assert server.scheduler.prefixes.num_tokens == 0
        assert len(target._slots) == num_slots, "no slot of the cache is in use"
        polite = sum(asked.num_tokens for asked in done)
        assert metrics.num_generated_tokens._value.get() - start_tokens >= polite
        assert metrics.num_accepted_tokens._value.get() <= metrics.num_draft_tokens._value.get()
        assert psutil.Process().memory_info().rss < 1.05 * before + (8 << 20)
    finally:
        server.stop()
