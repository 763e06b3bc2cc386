"""Requests join and leave between forwards: cancellation, the queue, deadlines, long prompts."""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from e2e.live_server import start, tiny_generator
from paceline.engine.prefill import FixedPace

MESSAGES = [{"role": "user", "content": "x"}]
LONG = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class SlowTarget:
    """A target whose forwards take at least so long."""

    def __init__(self, target, seconds):
        self._target, self.seconds, self.widths = target, seconds, []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def forward(self, segments, features=()):
        time.sleep(self.seconds)
        self.widths.append([len(segment.prefix_ids) for segment in segments])
        return self._target.forward(segments, features)


@pytest.fixture
def slow_of(target_of, tokenizer):
    running = []

    def make(seconds=0.02, *, max_queue=64, **settings):
        generator = tiny_generator(SlowTarget(target_of("llama"), seconds), tokenizer, **settings)
        running.append(start(generator, max_queue=max_queue))
        return running[-1]

    yield make
    for server in running:
        server.stop()


# Made once: a client reads the machine's certificates first, which takes longer than a tiny model's answer.
CLIENT = httpx.Client(timeout=60)


def post(server, body):
    return CLIENT.post(f"{server.url}/v1/chat/completions", json=body)


def wait_for(is_true):
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def num_of(server, name):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"paceline:{name}"))


def read_one_chunk_and_leave(server, body):
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as found:
        lines = found.iter_lines()
        while not next(lines).startswith("data:"):
            pass


def test_a_client_that_leaves_a_stream_frees_its_place_at_the_next_round(slow_of):
    server = slow_of()
    read_one_chunk_and_leave(server, LONG)
    rounds = len(server.generator.target.widths)
    server.wait_until_idle()
    assert len(server.generator.target.widths) - rounds < 20, "it was not decoded to its end"
    assert server.generator.target.cached_len is not None
    assert num_of(server, "requests_disconnected_total") == 1
    assert server.scheduler._num_open == 0


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_it_too(slow_of):
    server = slow_of()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=LONG, timeout=0.3)
    server.wait_until_idle()
    assert len(server.generator.target.widths) < 100
    assert num_of(server, "requests_disconnected_total") == 1


def test_a_full_queue_is_said_at_once_with_a_time_to_come_back(slow_of):
    server = slow_of(max_queue=1, max_batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(post, server, LONG | {"max_tokens": 40}) for _ in range(2)]
        wait_for(lambda: server.scheduler._num_open == 2)
        started = time.monotonic()
        refused = post(server, LONG)
        assert time.monotonic() - started < 1
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert all(found.result().status_code == 200 for found in first)
    assert post(server, LONG | {"max_tokens": 2}).status_code == 200
    assert num_of(server, "requests_refused_total") == 1


def test_choices_count_as_places(slow_of):
    server = slow_of(max_queue=1, max_batch_size=2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server, LONG | {"n": 2, "max_tokens": 40})
        wait_for(lambda: server.scheduler._num_open == 2)
        assert post(server, LONG | {"n": 2}).status_code == 429
        assert first.result().status_code == 200
    never = post(server, LONG | {"n": 4})
    assert never.status_code == 400, "coming back later would not help"
    assert "3 answers at once" in never.json()["error"]["message"]


def test_requests_are_served_in_the_order_of_their_arrival(slow_of):
    server = slow_of(max_batch_size=1)
    order = []

    def ask(number):
        post(server, LONG | {"max_tokens": 8})
        order.append(number)

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        wait_for(lambda n=number: n < server.scheduler._num_open + len(order))
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_its_deadline_is_given_up(slow_of, stream):
    server = slow_of()
    started = time.monotonic()
    body = LONG | {"stream": stream, "paceline": {"deadline_seconds": 0.3}}
    found = post(server, body)
    assert time.monotonic() - started < 10, "not for as long as it would have taken"
    if stream:
        lines = [line[6:] for line in found.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        error = json.loads(lines[-2])["error"]
    else:
        assert found.status_code == 504
        error = found.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "0.3 s" in error["message"]
    server.wait_until_idle()
    assert num_of(server, "requests_expired_total") == 1


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(slow_of):
    server = slow_of(0.01)
    server.generator.engine.pace = FixedPace(16)
    widths = server.generator.target.widths
    with ThreadPoolExecutor(1) as pool:
        listener = pool.submit(post, server, LONG | {"max_tokens": 60})
        wait_for(lambda: len(widths) > 8)
        first = len(widths)
        long = [{"role": "user", "content": "the cat and the hat " * 12}]
        assert post(server, {"messages": long, "max_tokens": 1, "temperature": 0}).status_code == 200
        later = [max(together) for together in widths[first:]]
        assert listener.result().json()["usage"]["completion_tokens"] == 60
    pieces = [place for place, width in enumerate(later) if width]
    assert len(pieces) > 10
    assert max(later) == 16
    # A forward without prompt tokens is one of the other request's rounds.
    assert all(later[a + 1 : b] and not any(later[a + 1 : b]) for a, b in itertools.pairwise(pieces))


def test_short_prompts_overtake_a_long_one_and_it_ends_none_the_less(slow_of):
    server = slow_of(0.1)
    server.generator.engine.pace = FixedPace(16)
    long = {
        "messages": [{"role": "user", "content": "the cat and the hat " * 12}],
        "max_tokens": 1,
        "temperature": 0,
    }
    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(post, server, long)
        wait_for(lambda: server.generator.target.widths)
        quick = [pool.submit(post, server, LONG | {"max_tokens": 1}) for _ in range(3)]
        assert all(found.result().status_code == 200 for found in quick)
        assert not slow.done(), "they did not wait for it"
        assert slow.result().status_code == 200


def test_what_fails_in_the_engine_is_told_and_the_server_goes_on(slow_of, monkeypatch):
    server = slow_of(0.0)
    target = server.generator.target
    monkeypatch.setattr(target, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("/secret/path")))
    broken = post(server, LONG)
    assert broken.status_code == 500
    assert "secret" not in broken.text
    monkeypatch.undo()
    assert post(server, LONG | {"max_tokens": 3}).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_server_that_stops_finishes_what_is_in_flight(slow_of):
    server = slow_of(0.02)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, LONG | {"max_tokens": 30})
        time.sleep(0.3)
        server.stop()
        assert answer.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 30
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
