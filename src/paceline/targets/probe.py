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
        target.model_call(
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


def check_target(
    target: HuggingFaceTarget, reference: Tensor, *, num_prefix: int = 2, in_rounds: bool = False
) -> None:
    """Compare a tree forward, a rollback and the following step with the model's own forward.

    Args:
        target: to be checked.
        reference: its `reference_logits`.
        num_prefix: prompt tokens before the tree's root, 1 or 2.
        in_rounds: feed them in a forward of their own, so that the tree comes as in a decoding round.

    Raises:
        IncompatibleModelError: the logits differ by more than rounding.
    """
    ids = _probe_ids(target)
    prefix, root, true_ids, next_id = (
        tuple(ids[:num_prefix]),
        ids[num_prefix],
        ids[num_prefix + 1 : num_prefix + 3],
        ids[num_prefix + 3],
    )
    sequence = Sequence([*prefix, root], SamplingParameters(), frozenset(), 1 << 20, seed=0)
    decoy = next_id if next_id != true_ids[0] else true_ids[1]
    # Breadth-first order puts a decoy before each true node, so the accepted path is not contiguous.
    tree = DraftTree.from_paths(root, [[decoy, ids[0]], true_ids])
    true_path = _path_of(tree, true_ids)
    result = VerifyResult(tuple(true_path), tuple(true_ids), next_id)
    try:
        if in_rounds:
            target.forward([Segment(sequence, prefix, None)])
            prefix = ()
        logits = target.forward([Segment(sequence, prefix, tree)]).tree_logits()
        for depth, node in enumerate((0, *true_path)):
            where = f"a drafted node at depth {depth}" if depth else "the root of a draft tree"
            _compare(target, logits[node], reference[num_prefix + depth], where)
        sequence.output_ids.extend(result.emitted_ids)
        target.commit(sequence, result)
        logits = target.forward([Segment(sequence, (), DraftTree.root_only(next_id))]).tree_logits()
        _compare(target, logits[0], reference[num_prefix + 3], "the step after a rollback")
    finally:
        target.release(sequence)


def check_rounds(target: HuggingFaceTarget, reference: Tensor) -> None:
    """Check a prompt with a tree behind it, then decoding rounds that begin at different positions.

    The second time around, captured forwards are replayed with other values than those of their capture.

    Args:
        target: to be checked.
        reference: its `reference_logits`.

    Raises:
        IncompatibleModelError: the logits differ by more than rounding.
    """
    check_target(target, reference)
    for num_prefix in (2, 1):
        check_target(target, reference, num_prefix=num_prefix, in_rounds=True)


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
