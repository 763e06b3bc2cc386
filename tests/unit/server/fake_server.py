"""A stand-in for the server that the playground speaks to: canned models, canned rounds, faults on request.

A prompt chooses the fault: `[refuse]` is answered with 400, `[error]` breaks off with an error event, `[cut]`
loses the connection, `[slow]` goes on until the client leaves.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

PLAYGROUND = Path(__file__).parents[3] / "src" / "paceline" / "server" / "playground"
POLICY = "default-src 'self'"
MODELS = {
    "smollm2": {
        "drafters": ["none", "phrase", "prompt_lookup"],
        "verifiers": ["greedy", "budgeted", "sampling"],
        "presets": ["stable", "discovery"],
        "default_drafter": "phrase",
        "default_verifier": None,
        "num_speculative_tokens": "auto",
        "has_chat_template": True,
    },
    "base": {
        "drafters": ["none", "prompt_lookup"],
        "verifiers": ["greedy"],
        "presets": ["stable"],
        "default_drafter": "prompt_lookup",
        "default_verifier": "greedy",
        "num_speculative_tokens": 8,
        "has_chat_template": False,
    },
}
# One round a line: accepted tokens, the target's own token, and branches that were rejected.
ROUNDS = [
    ([], "Riding", []),
    ([" in", " a", " line"], " saves", [[" in", " the", " wind"], [" in", " a", " group"], [" behind"]]),
    ([" energy"], ".", [[" energy", " because"], [" a", " lot", " of", " energy"]]),
    (
        [" The", " rider", " at", " the", " front"],
        " breaks",
        [[" The", " first", " rider"], [" The", " rider", " in", " front"], [" Each", " rider"]],
    ),
    ([" the", " air"], ",", [[" the", " wind"], [" through", " the", " air"]]),
    ([" and", " those", " behind"], " spend", [[" and", " the", " others"], [" so", " that"]]),
    ([" about", " a", " third"], " less", [[" a", " third"], [" up", " to"], [" less", " energy"]]),
    ([" power"], ".", [[" power", " than"], [" effort"]]),
    (
        ["\n\n", "They", " take", " turns"],
        " in",
        [["\n\n", "They", " change", " places"], [" When", " the", " leader", " tires"]],
    ),
    ([" the", " wind"], ",", [[" the", " lead"], [" front"]]),
    ([" so", " the", " whole", " group"], " goes", [[" so", " that"], [" so", " the", " line"]]),
    ([" faster", " than", " any", " of", " them"], " alone", [[" faster", " for"], [" further"]]),
    ([], ".", [[" could"], [" would", " be"]]),
]
RELAXED = {" third"}
SINGLE = {" energy", " power", " air", " wind"}


@dataclass(slots=True)
class FakeServer:
    """Serves from a thread until closed. `key` is demanded when set; `requests` are the bodies that came."""

    key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    changes_text: bool = False
    has_left: threading.Event = field(default_factory=threading.Event)
    pause: float = 0.0
    _http: ThreadingHTTPServer = field(init=False)

    def __post_init__(self) -> None:
        handler = partial(Handler, self, directory=str(PLAYGROUND))
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def page(self) -> str:
        return f"{self.origin}/playground/"

    def reset(self) -> None:
        self.key = None
        self.requests.clear()
        self.keys.clear()
        self.changes_text = False
        self.pause = 0.0
        self.has_left.clear()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class Handler(SimpleHTTPRequestHandler):
    """One request; a connection serves one, so that a cut is a cut."""

    extensions_map: ClassVar[dict[str, str]] = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
    }

    def __init__(self, server: FakeServer, *arguments: Any, **settings: Any) -> None:
        self.fake = server
        super().__init__(*arguments, **settings)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            if self._is_allowed():
                listed = [{"id": name, "paceline": abilities} for name, abilities in MODELS.items()]
                self._json(200, {"object": "list", "data": listed})
        elif self.path.startswith("/playground/"):
            self.path = self.path.removeprefix("/playground")
            super().do_GET()
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_allowed():
            return
        self.fake.requests.append({"path": self.path, **body})
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        if "[refuse]" in prompt:
            self._json(400, {"error": {"message": "unknown drafter 'x': <b>did you mean</b> 'y'?"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in self._events(body, prompt):
                payload = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
                self.wfile.write(f"data: {payload}\n\n".encode())
                self.wfile.flush()
        except OSError:
            self.fake.has_left.set()

    def _events(self, body: dict[str, Any], prompt: str) -> Iterator[dict[str, Any] | str]:
        is_plain = body["paceline"]["drafter"] == "none"
        rounds = plain_rounds() if is_plain else speculative_rounds()
        is_chat = self.path.endswith("chat/completions")
        if self.fake.changes_text and not is_plain:
            rounds[-1]["tokens"][0]["text"] = "<i>!</i>"
        for index, round_ in enumerate(rounds):
            text = "".join(token["text"] for token in round_["tokens"])
            finish = "stop" if index == len(rounds) - 1 else None
            words = {"delta": {"content": text}} if is_chat else {"text": text}
            yield {
                "choices": [{"index": 0, "finish_reason": finish, **words}],
                "paceline": {"round": round_},
            }
            if index == 2 and "[error]" in prompt:
                yield {"error": {"message": "the target ran out of memory"}}
                return
            if index == 2 and "[cut]" in prompt:
                return
            threading.Event().wait(self.fake.pause)
            while index == 2 and "[slow]" in prompt:
                yield {"choices": []}
                threading.Event().wait(0.02)
        yield {"choices": [], "usage": usage(rounds, body["paceline"]["drafter"])}
        yield "[DONE]"

    def _is_allowed(self) -> bool:
        header = self.headers.get("Authorization")
        self.fake.keys.append(header)
        if self.fake.key is None or header == f"Bearer {self.fake.key}":
            return True
        self._json(401, {"error": {"message": "this server needs an API key"}})
        return False

    def _json(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments: Any) -> None:
        """Tests read the page, not a log."""


def usage(rounds: list[dict[str, Any]], drafter: str) -> dict[str, Any]:
    num_tokens = sum(len(round_["tokens"]) for round_ in rounds)
    seconds = sum(sum(round_["seconds"].values()) for round_ in rounds)
    return {
        "prompt_tokens": 20,
        "completion_tokens": num_tokens,
        "paceline": {
            "num_rounds": len(rounds),
            "mean_acceptance_length": num_tokens / len(rounds),
            "acceptance_rate": 0.0 if drafter == "none" else 0.43,
            "num_relaxed_tokens": 0 if drafter == "none" else 1,
            "regret_spent": 0.0 if drafter == "none" else 0.4,
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "drafter": drafter,
        },
    }


def plain_rounds() -> list[dict[str, Any]]:
    """The same text, one token a round."""
    rounds = []
    for accepted, own, _ in ROUNDS:
        for text in [*accepted, own]:
            tokens = [_token(text, "target", None, len(rounds))]
            rounds.append(
                {
                    "round": len(rounds),
                    "seconds": {"draft": 0.0, "forward": 0.0098, "verify": 0.0002, "other": 0.0002},
                    "num_draft_tokens": 0,
                    "num_sequences": 1,
                    "tokens": tokens,
                    "tree": {"texts": ["<root>"], "parents": [-1], "values": [1.0], "accepted": []},
                }
            )
    return rounds


def speculative_rounds() -> list[dict[str, Any]]:
    """Rounds of draft trees: the accepted path and branches beside it."""
    return [_speculative_round(index, *parts) for index, parts in enumerate(ROUNDS)]


def _speculative_round(
    index: int, accepted: list[str], own: str, branches: list[list[str]]
) -> dict[str, Any]:
    texts, parents, values = ["<root>"], [-1], [1.0]
    for path in [accepted, *branches]:
        node = 0
        for text in path:
            known = [i for i in range(1, len(texts)) if parents[i] == node and texts[i] == text]
            if not known:
                share = 0.82 if path is accepted else 0.34
                texts.append(text)
                parents.append(node)
                values.append(round(values[node] * share, 4))
            node = known[0] if known else len(texts) - 1
    path = list(range(1, len(accepted) + 1))
    tokens = [_token(texts[node], _origin(texts[node]), node, node + index) for node in path]
    return {
        "round": index,
        "seconds": {"draft": 0.0016, "forward": 0.0112, "verify": 0.0004, "other": 0.0003},
        "num_draft_tokens": len(texts) - 1,
        "num_sequences": 1,
        "tokens": [*tokens, _token(own, "target", None, index)],
        "tree": {"texts": texts, "parents": parents, "values": values, "accepted": path},
    }


def _origin(text: str) -> str:
    return "relaxed" if text in RELAXED else "token" if text in SINGLE else "phrase"


def _token(text: str, origin: str, node: int | None, salt: int) -> dict[str, Any]:
    probability = 0.31 if origin == "relaxed" else 0.62 + 0.05 * (salt % 7)
    others = (
        [(" quarter", 0.46), (" few", 0.08)] if origin == "relaxed" else [(" and", 0.05), (" with", 0.02)]
    )
    ranked = sorted([(text, probability), *others], key=lambda entry: -entry[1])
    return {
        "id": sum(map(ord, text)),
        "text": text,
        "origin": origin,
        "node": node,
        "log_prob": math.log(probability),
        "top": [{"text": other, "log_prob": math.log(share)} for other, share in ranked],
    }
