"""One round, told in full: what the playground draws."""

from __future__ import annotations

from typing import Any

from paceline.engine.generator import StreamEvent
from paceline.server.token_text import TokenTexts


def round_trace(event: StreamEvent, number: int, texts: TokenTexts, drafter: str) -> dict[str, Any]:
    """Describe a round.

    Args:
        event: what it added.
        number: of the round, counted from 1.
        texts: of single tokens.
        drafter: who drafted; drafted tokens are called phrases when it drafts those.

    Returns:
        `round`, `seconds` of its parts, `num_draft_tokens`, `num_sequences`, `tokens` with their `origin`
        (`phrase`, `token`, `relaxed` or `target`), tree `node` and log-probabilities, and the `tree` itself.
    """
    outcome = event.outcome
    tree, result, timing = outcome.tree, outcome.result, outcome.timing
    log_probs = event.log_probs
    drafted = "phrase" if "phrase" in drafter else "token"
    tokens = []
    for place, (token_id, origin) in enumerate(zip(event.token_ids, event.origins, strict=True)):
        tokens.append(
            {
                "id": token_id,
                "text": texts.text(token_id),
                "origin": drafted if origin == "drafted" else origin,
                "node": result.path[place] if place < len(result.path) else None,
                "log_prob": log_probs[place].log_prob if place < len(log_probs) else None,
                "top": [
                    {"text": texts.text(i), "log_prob": value} for i, value in log_probs[place].top.items()
                ]
                if place < len(log_probs)
                else [],
            }
        )
    return {
        "round": number,
        "seconds": {
            "draft": timing.draft_seconds,
            "forward": timing.forward_seconds,
            "verify": timing.verify_seconds,
            "other": timing.commit_seconds,
        },
        "num_draft_tokens": tree.num_draft_tokens,
        "num_sequences": timing.num_sequences,
        "tokens": tokens,
        "tree": {
            "texts": [texts.text(i) for i in tree.token_ids.tolist()],
            "parents": tree.parents.tolist(),
            "values": [round(value, 4) for value in tree.node_values.tolist()],
            "accepted": list(result.path),
        },
    }
