"""Costs of forwards: reading the table, measuring it, keeping it."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch

from paceline.engine import forward_cost
from paceline.engine.forward_cost import ForwardCost, measure, measured_cost
from paceline.errors import ConfigError
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import tiny_model
from stub_target import StubTarget, scripted_law


def test_costs_are_linear_between_widths_and_beyond():
    cost = ForwardCost((1, 3, 5), (1.0, 2.0, 4.0))
    rows = torch.tensor([1, 2, 3, 4, 5, 7])
    assert cost.seconds(rows).tolist() == [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_costs_never_fall_with_width():
    """A measurement that says otherwise is noise, and would make the budget jump there."""
    cost = ForwardCost((1, 8, 16), (2.0, 1.0, 3.0))
    assert cost.seconds(torch.tensor([1, 8, 12, 16])).tolist() == [1.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("widths", "seconds"),
    [((1,), (1.0,)), ((2, 3), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (0.0, 1.0)), ((1, 2), (1.0,))],
)
def test_tables_that_cannot_be_read_off_are_refused(widths, seconds):
    with pytest.raises(ConfigError, match="forward costs"):
        ForwardCost(widths, seconds)


def test_measuring_leaves_the_target_as_it_was(target_of):
    target = target_of("llama")
    slots = len(target._slots)
    cost = measure(target)
    assert len(target._slots) == slots
    assert cost.widths[0] == 1
    assert all(seconds > 0 for seconds in cost.measured)


def test_a_short_context_is_measured_as_far_as_it_goes(target_of):
    assert max(measure(target_of("gpt2-short")).widths) <= 32


def test_lengths_between_and_beyond_the_measured_ones_are_linear():
    cost = ForwardCost((1, 2), (1.0, 2.0), 100, (2.0, 4.0), 200)
    rows = torch.tensor([1, 2])
    assert cost.seconds(rows, 50).tolist() == [1.0, 2.0]
    assert cost.seconds(rows, 150).tolist() == [1.5, 3.0]
    assert cost.seconds(rows, 300).tolist() == [3.0, 6.0]


def test_measuring_ends_at_its_time_limit(target_of):
    """A large model on a slow machine: two widths are enough, and its cache is not filled any further."""
    now = iter(range(10_000))
    cost = measure(target_of("llama"), clock=lambda: float(next(now)))
    assert cost.widths == (1, 2)
    assert cost.long_measured is None
    assert next(now) < 10


def test_first_forwards_on_a_device_are_not_counted():
    """There the first one of a shape chooses kernels and captures: neither times nor the limit include it."""

    class Device(StubTarget):
        device = torch.device("cuda")
        now = 0.0
        met: ClassVar[set[int]] = set()

        def forward(self, segments, features=()):
            width = len(segments[0])
            self.now += 0.001 if width in self.met else 30.0
            self.met.add(width)
            return super().forward(segments, features)

    target = Device(scripted_law([5], [1, 2, 3], 32), 32, context_len=400)
    cost = measure(target, clock=lambda: target.now)
    assert len(cost.widths) > 8
    assert max(cost.measured) < 0.01


def test_times_of_a_busy_machine_are_not_kept(tmp_path, monkeypatch):
    """The next start measures again."""
    target = HuggingFaceTarget(tiny_model(), fingerprint="tiny")
    monkeypatch.setattr(forward_cost.os, "getloadavg", lambda: (99.0, 99.0, 99.0), raising=False)
    measured_cost(target, folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def quiet(monkeypatch):
    """Whatever else the machine does."""
    monkeypatch.setattr(forward_cost, "is_busy", lambda: False)


@pytest.mark.usefixtures("quiet")
def test_a_damaged_table_is_measured_again(tmp_path):
    target = HuggingFaceTarget(tiny_model(), fingerprint="tiny")
    measured_cost(target, folder=tmp_path)
    [path] = tmp_path.iterdir()
    whole = json.loads(path.read_text())
    for content in (
        "",
        "{}",
        "[]",
        json.dumps({**whole, "measured": []}),
        json.dumps({**whole, "format": 0}),
    ):
        path.write_text(content)
        assert measured_cost(target, folder=tmp_path).widths == tuple(whole["widths"])
        assert json.loads(path.read_text())["measured"]
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]


def test_a_model_without_a_fingerprint_is_measured_every_time(target_of, tmp_path):
    """Its table could be another model's."""
    measured_cost(target_of("llama"), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    target = HuggingFaceTarget(tiny_model(), fingerprint="tiny")
    assert measured_cost(target, folder=blocked / "below").widths[0] == 1


def test_tables_of_other_settings_are_kept_apart(target_of):
    before = torch.get_num_threads()
    one = forward_cost._key(target_of("llama"))
    torch.set_num_threads(before + 1)
    try:
        assert forward_cost._key(target_of("llama")) != one
    finally:
        torch.set_num_threads(before)
