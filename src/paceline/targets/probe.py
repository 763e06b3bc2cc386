"""Checks at load time: does this model verify a draft tree as its own forward would?

A wrong mask, position, scale or cache shows up in logits long before it changes a token, so the probe
compares
logits: a prompt, a tree with a decoy branch in front of the true one, a rollback, and one more step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import IncompatibleModelError
from paceline.kv_cache import LayerShape, ShapeRecorder
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence, VerifyResult
from paceline.tree import DraftTree

if TYPE_CHECKING:
    from paceline.targets.huggingface import HuggingFaceTarget

# Relative error of a logits row; a misplaced mask or position is off by far more on any trained model.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.08}


@contextmanager
def refused_by_model(model: object) -> Iterator[None]:
    """Turn what a model's own code raises on a draft tree's mask or cache into IncompatibleModelError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise IncompatibleModelError(
            f"{type(model).__name__} cannot verify draft trees: its forward fails on one "
            f"({type(error).__name__}: {error}); it must take a 4-D mask, positions and a cache as Llama does"
        ) from error


def record_layer_shapes(target: HuggingFaceTarget) -> dict[int, LayerShape]:
    """Run one token with a cache that notes what every layer writes."""
    recorder = ShapeRecorder()
    device = target.device
    mask = torch.zeros(1, 1, 1, 1, dtype=target.dtype, device=device)
    kinds = target.architecture.layer_types
    with torch.inference_mode():
        target._run_base(
            torch.zeros(1, 1, dtype=torch.int64, device=device),
            torch.zeros(1, 1, dtype=torch.int64, device=device),
            dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask,
            recorder,
        )
    missing = target.num_layers - len(recorder.shapes)
    if missing:
        raise IncompatibleModelError(
            f"{missing} of {target.num_layers} layers of {type(target.model).__name__} keep no keys and "
            "values: a draft tree cannot be rolled back on them"
        )
    return recorder.shapes


def check_target(target: HuggingFaceTarget, reference: Tensor) -> None:
    """Compare a tree forward, a rollback and the following step with the model's own forward.

    Args:
        target: to be checked.
        reference: its `reference_logits`.

    Raises:
        IncompatibleModelError: the logits differ by more than rounding.
    """
    ids = _probe_ids(target)
    sequence = Sequence(ids[:3], SamplingParameters(), frozenset(), 1 << 20, seed=0)
    decoy = ids[5] if ids[5] != ids[3] else ids[4]
    # Breadth-first order puts a decoy before each true node, so the accepted path is not contiguous.
    tree = DraftTree.from_paths(ids[2], [[decoy, ids[0]], [ids[3], ids[4]]])
    output = target.forward([Segment(sequence, tuple(ids[:2]), tree)])
    true_path = _path_of(tree, ids[3:5])
    logits = output.tree_logits()
    _compare(target, logits[0], reference[2], "the root of a draft tree")
    for node, position in zip(true_path, (3, 4), strict=True):
        _compare(target, logits[node], reference[position], f"a drafted node at depth {position - 2}")
    result = VerifyResult(tuple(true_path), tuple(ids[3:5]), ids[5])
    sequence.output_ids.extend(result.emitted_ids)
    target.commit(sequence, result)
    output = target.forward([Segment(sequence, (), DraftTree.root_only(ids[5]))])
    _compare(target, output.tree_logits()[0], reference[5], "the step after a rollback")
    target.release(sequence)


def _probe_ids(target: HuggingFaceTarget) -> list[int]:
    """A prompt of six tokens spread over the vocabulary."""
    spread = torch.arange(6) * max(1, (target.vocab_size - 1) // 7) + 1
    ids: list[int] = (spread % target.vocab_size).tolist()
    return ids


def reference_logits(target: HuggingFaceTarget) -> Tensor:
    """[T, V] logits of the probe's prompt by the model's own forward, no cache."""
    ids = torch.tensor([_probe_ids(target)], device=target.device)
    with torch.inference_mode():
        output: Any = target.model(input_ids=ids, use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


def _path_of(tree: DraftTree, ids: list[int]) -> list[int]:
    """Nodes of `tree` that spell `ids` below the root."""
    path, node = [], 0
    for token_id in ids:
        below = (tree.parents == node) & (tree.token_ids == token_id)
        node = int(below.nonzero()[0, 0])
        path.append(node)
    return path


def _compare(target: HuggingFaceTarget, ours: Tensor, reference: Tensor, where: str) -> None:
    """Raise unless two rows of logits agree up to rounding."""
    error = float((ours.float() - reference).norm() / reference.norm().clamp(min=1e-6))
    tolerance = TOLERANCE.get(target.dtype, 1e-3)
    if not error <= tolerance:
        raise IncompatibleModelError(
            f"{type(target.model).__name__} does not verify draft trees: its logits at {where} are off by "
            f"{error:.3f} of their norm, at most {tolerance} is rounding (its cache or mask is not standard)"
        )
