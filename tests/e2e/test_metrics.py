"""What is counted adds up, and the dashboard asks for nothing that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "paceline.json"
BODY = {"messages": [{"role": "user", "content": "the cat and the hat"}], "max_tokens": 20, "temperature": 0}


def values(server):
    found = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_counters_are_the_sums_of_what_answers_report(live):
    live.wait_until_idle()
    before = values(live)
    reported = [
        httpx.post(f"{live.url}/v1/chat/completions", json=BODY | {"paceline": {"drafter": name}}).json()
        for name in ("phrase", "prompt_lookup", "none")
    ]
    live.wait_until_idle()
    after = values(live)

    def grown(name):
        return after[f"paceline:{name}_total"] - before[f"paceline:{name}_total"]

    reported = [body["usage"] for body in reported]
    figures = [usage["paceline"] for usage in reported]
    assert grown("generation_tokens") == sum(usage["completion_tokens"] for usage in reported)
    assert grown("prompt_tokens") == sum(usage["prompt_tokens"] for usage in reported)
    assert grown("spec_decode_num_draft_tokens") == sum(one["num_draft_tokens"] for one in figures)
    accepted = sum(one["num_accepted_tokens"] for one in figures)
    assert grown("spec_decode_num_accepted_tokens") == accepted > 0
    per_position = {
        int(re.search(r'position="(\d+)"', name).group(1)): after[name] - before.get(name, 0)
        for name in after
        if "accepted_tokens_per_pos_total" in name
    }
    assert sum(per_position.values()) == accepted
    # A place counts as often as drafts were accepted that far.
    by_place = [per_position[place] for place in sorted(per_position)]
    assert by_place == sorted(by_place, reverse=True)
    assert grown("spec_decode_num_drafts") >= by_place[0] > 0 < by_place[1]
    first = "paceline:time_to_first_token_seconds_count"
    assert after[first] - before[first] == 3
    finished = 'paceline:request_success_total{finished_reason="length"}'
    assert after[finished] - before.get(finished, 0) == 3
    assert after["paceline:num_requests_running"] == after["paceline:num_requests_waiting"] == 0


def test_the_dashboard_shows_metrics_that_exist(live):
    httpx.post(f"{live.url}/v1/chat/completions", json=BODY)
    known = {re.split(r"[{ ]", name)[0] for name in values(live)}
    asked = set(re.findall(r"paceline:[a-z_]+", json.dumps(json.loads(DASHBOARD.read_text())["panels"])))
    assert len(asked) > 15
    assert asked <= known
