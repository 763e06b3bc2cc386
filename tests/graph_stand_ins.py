"""Stand-ins for CUDA graphs on a CPU: one that computes anew, and one that repeats recorded operations.

`RecordedGraph` behaves as a CUDA graph does where it matters: a replay runs exactly the operations of the
capture, on the same tensors, and no Python of the model. A number that the host knew at capture is repeated
as it was, so whatever depends on it shows in the results of a later round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from paceline.targets.model_call import ModelStates

# Each of these would wait for the device, or bring values from the host that a replay does not bring again.
FORBIDDEN = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "lift_fresh",
    "lift_fresh_copy",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "set_",
    "record_stream",
    "pin_memory",
    "_pin_memory",
)


class HostValueError(RuntimeError):
    """An operation that cannot be captured."""


def refuse_host_values(operation: Any, args: Any) -> None:
    """Raise as a CUDA stream that is being captured would."""
    name = operation._schema.name.removeprefix("aten::")
    if name in FORBIDDEN:
        raise HostValueError(f"{name} is not permitted when stream is capturing")
    if name == "repeat_interleave" and operation._overloadname == "Tensor":
        raise HostValueError("repeat_interleave asks for its size")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                raise HostValueError(f"{name} with a mask asks how many entries are set")


class CaptureRules(TorchDispatchMode):
    """Raises on what a CUDA graph cannot hold."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_host_values(operation, args)
        return operation(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Notes every operation with the tensors it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_host_values(operation, args)
        result = operation(*args, **(kwargs or {}))
        self.steps.append((operation, args, kwargs or {}, result))
        return result


@dataclass
class RecordedGraph:
    """Operations of one run, to be repeated."""

    states: ModelStates
    steps: list[tuple[Any, Any, Any, Any]]

    def replay(self) -> None:
        for operation, args, kwargs, recorded in self.steps:
            result = operation(*args, **kwargs)
            for old, new in zip(tree_flatten(recorded)[0], tree_flatten(result)[0], strict=True):
                if isinstance(old, Tensor) and not _is_same_place(old, new):
                    old.copy_(new)


def _is_same_place(old: Tensor, new: Tensor) -> bool:
    """Views and in-place results lie where they lay."""
    return old.data_ptr() == new.data_ptr() and old.stride() == new.stride()


@dataclass
class RecordedGraphs:
    """GraphCapture by recorded operations.

    Attributes:
        num_captures: forwards captured so far.
        num_forgotten: times that all were dropped.
        captured: those that somebody still holds.
        spoils: overwrite, at every replay, what all other graphs hold, as graphs that share memory may.
    """

    num_captures: int = 0
    num_forgotten: int = 0
    num_replays: int = 0
    captured: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def capture(self, run: Callable[[], ModelStates]) -> Any:
        run()
        with _Recorder() as recorder:
            states = run()
        self.num_captures += 1
        graph = _Spoiling(RecordedGraph(states, recorder.steps), self)
        # A capture computes nothing.
        graph.spoil()
        self.captured.add(graph)
        return graph

    def forget(self) -> None:
        assert not self.captured
        self.num_forgotten += 1


@dataclass(eq=False)
class _Spoiling:
    """Graphs of one pool overwrite each other's results."""

    graph: RecordedGraph
    owner: RecordedGraphs

    @property
    def states(self) -> ModelStates:
        return self.graph.states

    def spoil(self) -> None:
        for states in (self.states.hidden, *self.states.features.values()):
            states.fill_(float("nan"))

    def replay(self) -> None:
        for other in self.owner.captured:
            if other is not self:
                other.spoil()
        self.owner.num_replays += 1
        self.graph.replay()


@dataclass
class Uncaptured:
    """GraphCapture that runs the static forward anew each time, under the rules of a capture."""

    num_captures: int = 0

    def capture(self, run: Callable[[], ModelStates]) -> Any:
        self.num_captures += 1
        return _Rerun(run)

    def forget(self) -> None:
        pass


class _Rerun:
    def __init__(self, run: Callable[[], ModelStates]) -> None:
        self._run = run
        self.states: Any = None

    def replay(self) -> None:
        with CaptureRules():
            self.states = self._run()
