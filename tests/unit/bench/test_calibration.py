"""What strict verification rejects, and the limits that follow from it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from conftest import PROMPTS
from paceline.bench.calibration import Calibration, Suggestion, calibrate
from paceline.bench.calibration_report import summary, write_calibration
from paceline.engine.generator import Generator
from paceline.errors import ConfigError
from paceline.relaxation import Relaxation
from paceline.testing import ReplayDrafter

NUM_NEW = 24


@pytest.fixture
def found() -> Calibration:
    """Ten rejections: regrets 0, 0.5, ... 4.5 at values 1 and 2 in turn; 100 tokens in 4 answers."""
    regrets = np.arange(10) * 0.5
    return Calibration(4, 100, 30, {"gate": 10, "leaf": 20}, regrets, np.tile([1.0, 2.0], 5))


def test_a_percentile_is_taken_of_positive_regret_over_value(found):
    positive = (found.regrets / found.values)[1:]
    suggestion = found.by_percentile(25)
    assert suggestion.max_regret_per_value == pytest.approx(np.percentile(positive, 25))
    passed = found.regrets[found.ratios <= suggestion.max_regret_per_value]
    assert suggestion.risk_budget == pytest.approx(passed.sum() / 4)
    assert suggestion.risk_budget_per_token == pytest.approx(passed.sum() / 100)
    assert suggestion.relaxed_share == pytest.approx(len(passed) / 10)


@pytest.mark.parametrize("loss", [0.004, 0.02, 0.1, 5.0])
def test_a_wanted_loss_is_not_exceeded_and_nearly_reached(found, loss):
    suggestion = found.by_loss(loss)
    assert suggestion.risk_budget_per_token <= loss
    larger = found.ratios[found.ratios > suggestion.max_regret_per_value]
    if larger.size:
        assert found._with_gate(larger.min()).risk_budget_per_token > loss


def test_rejections_that_cost_alike_pass_together_or_not_at_all():
    """Ten of one ratio would spend 0.1 a token; half of them cannot be let through."""
    tied = Calibration(2, 100, 10, {}, np.ones(10), np.full(10, 4.0))
    assert tied.by_loss(0.05) == Suggestion(0.0, 0.0, 0.0, 0.0)
    assert tied.by_loss(0.1).max_regret_per_value == 0.25


@pytest.mark.parametrize(
    ("method", "value"), [("by_percentile", 0), ("by_percentile", 101), ("by_loss", 0.0)]
)
def test_wishes_out_of_range_are_refused(found, method, value):
    with pytest.raises(ConfigError, match="must be above 0"):
        getattr(found, method)(value)


def test_rejections_are_those_of_strict_decoding(target_of, tokenizer, oracle_of):
    """The third drafted token of every round is wrong: each full round is rejected there, at value 5."""
    recorded = {tuple(p): oracle_of("llama", tuple(p), NUM_NEW) for p in PROMPTS}
    generator = Generator(
        target_of("llama"),
        tokenizer,
        ReplayDrafter(recorded, 6, wrong=2),
        verifier="budgeted",
        num_speculative_tokens=8,
    )
    told = []
    found = calibrate(generator, PROMPTS, max_new_tokens=NUM_NEW, limits=Relaxation(), on_answer=told.append)
    assert told == [1, 2, 3]
    assert (found.num_answers, found.num_tokens) == (3, 3 * NUM_NEW)
    assert set(found.values) == {5.0}
    assert (found.regrets > 0).all()
    # Three tokens a round; what the last one rejects is cut off with it.
    assert found.reasons == {"rejected": 3 * (NUM_NEW // 3 - 1)}


def test_another_verifier_and_a_drafter_without_drafts_are_refused(generator_of):
    generator = generator_of("llama")
    with pytest.raises(ConfigError, match="calibration reads what 'budgeted' refuses"):
        calibrate(generator, PROMPTS, max_new_tokens=4, limits=Relaxation())
    generator.verifier = "budgeted"
    with pytest.raises(ConfigError, match="rejected nothing"):
        calibrate(generator, PROMPTS, max_new_tokens=4, limits=Relaxation())


def test_figures_and_picture_are_written(found, tmp_path):
    suggestions = {"percentile 25": found.by_percentile(25), "loss": found.by_loss(0.02)}
    paths = write_calibration(tmp_path / "out", found, suggestions, {"command": "c"})
    assert [path.name for path in paths] == ["calibration.json", "regret.png"]
    stored = json.loads(paths[0].read_text())
    assert stored["num_ties"] == 1
    assert stored["suggestions"]["loss"]["risk_budget_per_token"] <= 0.02
    assert stored["regret_percentiles"] == summary(found)["regret_percentiles"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["calibration.json", "regret.png"]
