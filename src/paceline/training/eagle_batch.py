"""What one step of an EAGLE fit learns from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.targets.base import TargetModel
from paceline.training.capture import Conversation
from paceline.training.eagle_texts import padded


@dataclass(frozen=True, slots=True)
class EagleBatch:
    """B texts; pair t is the target's feature at t with the token at t + 1, and predicts the token at t + 2.

    Attributes:
        embedding: [B, T, D], of the token behind each position.
        features: [B, T, F, D], of the target.
        lengths: int64 [B], pairs of each text.
        teacher: [B, T, D], the target's final state at t + 1, whose logits are what pair t should say.
        is_learned: bool [B, T], whether the predicted token is the assistant's.
        next_ids: int64 [B, T], that token.
    """

    embedding: Tensor
    features: Tensor
    lengths: Tensor
    teacher: Tensor
    is_learned: Tensor
    next_ids: Tensor


@torch.no_grad()
def build_batch(
    target: TargetModel, texts: Seq[Conversation], states: Seq[Tensor], *, reads_final_state: bool = False
) -> EagleBatch:
    """Pair features, tokens and what is to be said.

    Args:
        target: embeds the tokens.
        texts: of at least three tokens each.
        states: of each text [S, 1 + L, D] (`eagle_states`).
        reads_final_state: whether the final hidden state itself is the head's feature (EAGLE-1 and 2).
    """
    features = [own[:-2, :1] if reads_final_state else own[:-2, 1:] for own in states]
    return EagleBatch(
        embedding=padded([target.embedding(text.token_ids[1:-1].to(target.device)) for text in texts]),
        features=padded(features).to(target.device),
        lengths=torch.tensor([len(own) - 2 for own in states], device=target.device),
        teacher=padded([own[1:-1, 0] for own in states]).to(target.device),
        is_learned=padded([text.is_answer[2:] for text in texts]).to(target.device),
        next_ids=padded([text.token_ids[2:] for text in texts]).to(target.device),
    )
