"""Log-probabilities of emitted tokens from the target's own logits: no penalties, temperature or filters."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.sequence import TokenLogProb


def token_log_probs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogProb]:
    """Log-probability of each token under its row.

    Args:
        logits: [n, V], the rows that predict the tokens.
        token_ids: n emitted tokens.
        num_top: likeliest alternatives to report per position; may be 0.
    """
    if logits.shape[0] != len(token_ids):
        raise ShapeError(f"{logits.shape[0]} rows of logits for {len(token_ids)} tokens: give one row each")
    if not token_ids:
        return []
    log_probs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    ids = torch.tensor(list(token_ids), device=logits.device)[:, None]
    top = log_probs.topk(min(num_top, logits.shape[1]), dim=-1)
    own = log_probs.gather(1, ids)[:, 0].tolist()
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogProb(token_id, log_prob, dict(zip(top_ids, top_values, strict=True)))
        for token_id, log_prob, (top_ids, top_values) in zip(token_ids, own, alternatives, strict=True)
    ]
