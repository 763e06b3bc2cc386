"""Public faults, group K: batches equal solo runs, and measurements compare like with like."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from conftest import PROMPTS
from paceline.bench.arms import ArmName, EngineArm
from paceline.bench.records import Journal
from paceline.bench.rows import answers_of, result_rows
from paceline.bench.runner import BenchmarkRunner
from paceline.bench.suites import BenchPrompt, Suite
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.sampling import SamplingParameters
from paceline.testing import ReplayDrafter
from stub_target import StubTarget

NUM_NEW = 24


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_each_row_of_a_ragged_batch_equals_its_solo_run(architecture, decoys, generator_of, oracle_of):
    """Row 75: three lengths, three acceptance patterns, one row ends early by EOS; absolute positions too."""
    texts = {tuple(p): oracle_of(architecture, tuple(p), NUM_NEW) for p in PROMPTS}
    recorded = dict(texts)
    # Never right, right at every second token, always right.
    recorded[tuple(PROMPTS[0])] = [(t + 1) % 96 for t in texts[tuple(PROMPTS[0])]]
    recorded[tuple(PROMPTS[1])] = [(t + i % 2) % 96 for i, t in enumerate(texts[tuple(PROMPTS[1])])]
    early = texts[tuple(PROMPTS[2])]
    end = max(i for i, token_id in enumerate(early[:8]) if token_id not in early[:i])
    parameters = [
        SamplingParameters(max_new_tokens=NUM_NEW),
        SamplingParameters(max_new_tokens=NUM_NEW - 5),
        SamplingParameters(max_new_tokens=NUM_NEW, eos_token_ids=(early[end],)),
    ]
    generator = generator_of(architecture, ReplayDrafter(recorded, 4, decoys=decoys))
    alone = [generator.generate(p, own) for p, own in zip(PROMPTS, parameters, strict=True)]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        results = generator.generate_batch([PROMPTS[i] for i in order], [parameters[i] for i in order])
        for i, result in zip(order, results, strict=True):
            assert result.token_ids == alone[i].token_ids
            assert result.finish_reason == alone[i].finish_reason
            assert result.statistics.num_rounds == alone[i].statistics.num_rounds
    assert alone[2].token_ids == tuple(early[: end + 1])


def test_finished_rows_are_frozen_while_others_go_on(generator_of, oracle_of):
    """Row 75: a row that has ended takes no further part in any forward."""
    drafter = ReplayDrafter({tuple(p): oracle_of("llama", tuple(p), NUM_NEW) for p in PROMPTS}, 3)
    generator = generator_of("llama", drafter)
    answers = [
        generator.open(list(p), SamplingParameters(max_new_tokens=n))
        for p, n in zip(PROMPTS, (2, 11, 24), strict=True)
    ]
    rounds, widths = Counter(), []
    while generator.engine.has_work:
        outcomes = generator.engine.round()
        rounds.update(outcome.sequence for outcome in outcomes)
        widths.append({outcome.timing.num_sequences for outcome in outcomes})
    # Four tokens a round. Prompts are read beside each other, then only running rows share a forward.
    assert [rounds[answer.sequence] for answer in answers] == [1, 3, 6]
    assert widths[1:] == [{2}, {2}, {1}, {1}, {1}]
    assert [len(answer.sequence.output_ids) for answer in answers] == [2, 11, 24]


class CostlyTarget(StubTarget):
    """Counts what its forwards cost: one for the forward, a little for every row."""

    def __init__(self, law, vocab_size):
        super().__init__(law, vocab_size)
        self.cost = 0.0

    def forward(self, segments, features=()):
        self.cost += 1 + 0.1 * sum(map(len, segments))
        return super().forward(segments, features)


class WriterDrafter(ReplayDrafter):
    """Knows the text that the target writes to any prompt, or something else."""

    def __init__(self, script, length, *, is_right=True):
        super().__init__({}, length)
        self.script = script
        self.is_right = is_right

    def _tree(self, sequence):
        text = self.script if self.is_right else [(t + 1) % 96 for t in self.script]
        self.recorded = {tuple(sequence.prompt_ids): text}
        return super()._tree(sequence)


def test_speed_ups_compare_the_same_prompts_ids_and_counts(tokenizer):
    """Row 77: R(0) has ratio 1, R(4) gains, an always-wrong drafter loses and is shown to."""
    script = [(7 * i) % 89 + 3 for i in range(64)]
    opening = [1, *tokenizer("assistant\n")["input_ids"]]

    def law(ids):
        # The script follows the last turn's opening, whose first token occurs nowhere in it.
        start = len(ids) - ids[::-1].index(opening[0]) - 1 + len(opening)
        row = torch.zeros(96)
        row[script[max(len(ids) - start, 0)]] = 10.0
        return row

    suite = Suite("own", tuple(BenchPrompt(f"p{i}", ("a" * (3 * i + 1),)) for i in range(4)))
    target = CostlyTarget(law, 96)
    plain = Generator(target, tokenizer, NoDrafter())
    prompts = [plain.encode_chat([{"role": "user", "content": p.turns[0]}]) for p in suite.prompts]
    drafters = {
        "none": NoDrafter(),
        "replay-0": WriterDrafter(script, 0),
        "replay-4": WriterDrafter(script, 4),
        "wrong-4": WriterDrafter(script, 4, is_right=False),
    }
    arms = [EngineArm(ArmName(name), Generator(target, tokenizer, d)) for name, d in drafters.items()]
    journal = Journal(None, {})
    BenchmarkRunner(plain, arms, [suite], journal, max_new_tokens=20, clock=lambda: target.cost).run()
    by_arm = {}
    for record in journal:
        by_arm.setdefault(record.key.arm, []).append(record)
    for records in by_arm.values():
        turns = [turn for group in answers_of(records).values() for turn in group]
        assert [list(turn.prompt_ids) for turn in turns] == prompts
        assert [list(turn.token_ids) for turn in turns] == [script[:20]] * 4
    rows = {row.drafter: row for row in result_rows(journal, [arm.name for arm in arms], seed=0)}
    assert {row.num_output_tokens for row in rows.values()} == {80}
    assert rows["replay-0"].speedup_vs_none.value == pytest.approx(1.0)
    assert rows["replay-4"].speedup_vs_none.value > 2
    assert 0.5 < rows["wrong-4"].speedup_vs_none.value < 0.9
    assert rows["wrong-4"].mean_acceptance_length.value == 1
    assert rows["replay-4"].mean_acceptance_length.value == 5
    assert rows["replay-4"].accepted_per_round.value == 4
    assert rows["none"].mean_forward_width == 1
    assert rows["wrong-4"].mean_forward_width > 4
    assert all(row.identical_fraction in (None, 1.0) for row in rows.values())
