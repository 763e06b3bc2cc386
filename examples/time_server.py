"""What the server costs: time per token alone, eight clients at once, first tokens beside a long prompt.

    python examples/time_server.py [--target smollm2] [--rounds 12]

Starts `paceline serve` on a free port and loads the same model here; the arms take turns:

- one client: the same prompts through the engine itself and through the server, seconds per token;
- eight clients: each asks eight questions, one after the other; all of them decoded plainly here, in batches;
- arrivals: short requests until their first token, alone and while a prompt of 4,000 tokens is read.

Prints medians, ratios, and 95 % intervals of paired ratios (bootstrap over rounds).
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from paceline.cli.threads import configure_threads

configure_threads()

import httpx

import paceline
from paceline.bench.suites import load_suite

NUM_CLIENTS = 8
NUM_PER_CLIENT = 8
NUM_NODES = 8
NUM_ARRIVALS = 20
HAS_TEXT = re.compile(rb'"content":"[^"]')
LONG_PROMPT_TOKENS = 4000
NUM_NEW = 96


@contextmanager
def served(target: str, *options: str) -> Iterator[str]:
    """A server process; yields its address."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "serve",
        "--target",
        target,
        "--port",
        "0",
        "--dtype",
        "bf16",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    url = next(found.group(1) for line in lines if (found := re.search(r"on (http://\S+)", line)))
    threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
    try:
        for _ in range(200):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


class Client:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._http = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=64))

    def ask(self, prompt: str, num_tokens: int = NUM_NEW, **options: object) -> tuple[float, float]:
        """Stream one answer: seconds to the first token, and to the last."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True, **options,
        }  # fmt: skip
        started, first = time.perf_counter(), 0.0
        with self._http.stream("POST", self._url, json=body) as found:
            found.raise_for_status()
            # Not parsed: the client shares the cores with the server.
            for part in found.iter_raw():
                if not first and HAS_TEXT.search(part):
                    first = time.perf_counter() - started
        if not first:
            raise RuntimeError("no text came")
        return first, time.perf_counter() - started

    def ask_whole(self, prompt: str) -> None:
        """Wait for one answer, not streamed: the client itself then takes little of the machine."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        self._http.post(self._url, json=body).raise_for_status()


def interval(pairs: list[tuple[float, float]]) -> str:
    """Ratio of sums, with a 95 % interval over the pairs."""
    chance = random.Random(0)

    def ratio(chosen: list[tuple[float, float]]) -> float:
        return sum(a for a, _ in chosen) / sum(b for _, b in chosen)

    draws = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return f"{ratio(pairs):.3f} [{draws[50]:.3f}, {draws[1949]:.3f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    prompts = [prompt.turns[0] for prompt in load_suite("builtin").prompts]
    fixed = paceline.SamplingParameters(max_new_tokens=NUM_NEW, ignore_eos=True)
    alone = one_client(given.target, prompts, fixed, given.rounds)
    print(f"one client: server's seconds per token over the engine's {interval(alone)}")
    plain = paceline.load(given.target, dtype="bf16", drafter="none", max_batch_size=NUM_CLIENTS)
    with served(given.target) as url:
        client = Client(url)
        client.ask(prompts[0])
        together: dict[str, list[tuple[float, float]]] = {"whole": [], "streamed": []}
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for number in range(given.rounds):
                chosen = [
                    prompts[(number * 5 + i) % len(prompts)] for i in range(NUM_CLIENTS * NUM_PER_CLIENT)
                ]
                started = time.perf_counter()
                plain.generate_batch(chosen, fixed)
                own = time.perf_counter() - started
                for name, ask in (("whole", client.ask_whole), ("streamed", client.ask)):
                    started = time.perf_counter()
                    list(pool.map(ask, chosen))
                    together[name].append((own, time.perf_counter() - started))
        for name, pairs in together.items():
            print(
                f"{NUM_CLIENTS} clients, answers {name}: server's throughput over plain batched decoding "
                f"{interval(pairs)}"
            )
        solo = [client.ask(f"{i}. {prompts[i % len(prompts)][:60]}", 1)[0] for i in range(NUM_ARRIVALS)]
        beside = beside_a_long_prompt(client, prompts)
        ratio = statistics.median(beside) / statistics.median(solo)
        worst = sorted(beside)[int(0.95 * len(beside))] / sorted(solo)[int(0.95 * len(solo))]
        print(
            f"first token: alone {1e3 * statistics.median(solo):.0f} ms, beside a prompt of "
            f"{LONG_PROMPT_TOKENS} tokens {1e3 * statistics.median(beside):.0f} ms: {ratio:.2f} times "
            f"(median), {worst:.2f} times (95 %)"
        )


def one_client(
    target: str, prompts: list[str], fixed: paceline.SamplingParameters, num_rounds: int
) -> list[tuple[float, float]]:
    """Seconds of the same answers through the server and through the engine, in turns.

    Both draft the same number of nodes in every round: how many `auto` drafts depends on what it saw before.
    """
    engine = paceline.load(target, dtype="bf16", num_speculative_tokens=NUM_NODES)
    found = []
    with served(target, "--num-speculative-tokens", str(NUM_NODES)) as url:
        client = Client(url)
        client.ask(prompts[0])
        engine.generate(prompts[0], fixed)
        for number in range(num_rounds):
            prompt = prompts[number % len(prompts)]
            started = time.perf_counter()
            engine.generate(prompt, fixed)
            own = time.perf_counter() - started
            found.append((client.ask(prompt)[1], own))
    return found


def beside_a_long_prompt(client: Client, prompts: list[str]) -> list[float]:
    """Seconds to the first token of short requests that arrive while long prompts are read."""
    found: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        number = 0
        while len(found) < NUM_ARRIVALS:
            number += 1
            long = pool.submit(client.ask, f"{number} " + "word " * LONG_PROMPT_TOKENS, 1)
            time.sleep(0.1)
            while not long.done() and len(found) < NUM_ARRIVALS:
                seconds = client.ask(f"{len(found)}: {prompts[len(found) % len(prompts)][:60]}", 1)[0]
                if not long.done():
                    found.append(seconds)
            long.result()
    return found


if __name__ == "__main__":
    main()
