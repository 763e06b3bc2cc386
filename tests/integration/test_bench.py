"""Whole benchmarks on a tiny model, with drafters whose worth is known beforehand."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from paceline.bench.arms import ArmName, EngineArm
from paceline.bench.baselines import baseline_arms
from paceline.bench.benchmark import BenchmarkOptions, run_benchmark
from paceline.bench.check import run_check
from paceline.bench.intervals import Interval
from paceline.bench.records import RECORDS_FILE, Journal
from paceline.bench.rows import result_rows
from paceline.bench.runner import BenchmarkRunner
from paceline.bench.suites import BenchPrompt, Suite
from paceline.engine.generator import Generator
from paceline.errors import ConfigError
from paceline.testing import ReplayDrafter, greedy_oracle, tiny_tokenizer

NUM_TOKENS = 30
SUITE = Suite(
    "own", tuple(BenchPrompt(f"p{i}", (text,)) for i, text in enumerate(("hello", "and then", "why")))
)
OPTIONS = BenchmarkOptions(
    suites=("builtin",), limit=2, max_new_tokens=6, drafters=("none", "prompt_lookup"), widths=(4,)
)


@pytest.fixture(scope="module")
def generator():
    """A tiny model with room for the built-in prompts, and no end of text."""
    import torch
    import transformers

    from paceline.drafters.none import NoDrafter
    from paceline.targets.huggingface import HuggingFaceTarget

    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return Generator(HuggingFaceTarget(model.eval()), tiny_tokenizer(), NoDrafter())


@contextmanager
def work_clock(model):
    """A clock that stands still but for forwards: twenty ticks each, and one per token read.

    Every arm's forwards pass the same module, so ratios of these times are exact where real ones are noisy.
    """
    ticks = 0

    def count(module, args, kwargs):
        nonlocal ticks
        ticks += 20 + (args[0] if args else kwargs["input_ids"]).numel()

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    yield lambda: float(ticks)
    handle.remove()


@pytest.fixture(scope="module")
def replayed(generator):
    """Rows and records of R(0), R(4), a drafter that is always wrong, plain decoding and `generate()`."""
    recorded = {}
    for prompt in SUITE.prompts:
        ids = generator.encode(prompt.turns[0])
        recorded[tuple(ids)] = greedy_oracle(generator.target.model, ids, NUM_TOKENS)
    drafters = {
        "none": ReplayDrafter(recorded, 0),
        "R0": ReplayDrafter(recorded, 0),
        "R4": ReplayDrafter(recorded, 4),
        "wrong": ReplayDrafter(recorded, 4, wrong=0),
    }
    arms = baseline_arms(generator, ["hf_generate"])
    for name, drafter in drafters.items():
        own = Generator(
            generator.target, generator.tokenizer, drafter, verifier="greedy", num_speculative_tokens=4
        )
        arms.append(EngineArm(ArmName(name), own))
    journal = Journal(None, {})
    with work_clock(generator.target.model.model) as clock:
        BenchmarkRunner(generator, arms, [SUITE], journal, max_new_tokens=NUM_TOKENS, clock=clock).run()
    rows = {row.drafter: row for row in result_rows(journal, [arm.name for arm in arms], seed=0)}
    return rows, list(journal)


def test_all_arms_do_the_same_work_on_the_same_prompts(replayed):
    rows, records = replayed
    assert {row.num_output_tokens for row in rows.values()} == {NUM_TOKENS * len(SUITE.prompts)}
    for group in range(len(SUITE.prompts)):
        own = [record for record in records if record.key.group == group]
        assert len({tuple(turn.prompt_ids for turn in record.turns) for record in own}) == 1
        assert len({tuple(turn.token_ids for turn in record.turns) for record in own}) == 1


def test_tokens_a_round_stand_beside_every_speed_up(replayed):
    rows, _ = replayed
    assert rows["R0"].mean_acceptance_length.value == 1.0
    assert rows["wrong"].mean_acceptance_length.value == 1.0
    assert rows["wrong"].accepted_per_round.value == 0.0
    assert rows["R4"].mean_acceptance_length.value == pytest.approx(5.0)
    assert rows["R4"].accepted_per_round.value == pytest.approx(4.0)
    assert rows["wrong"].mean_forward_width > 4 > rows["R0"].mean_forward_width == 1.0


def test_speed_ups_come_from_emitted_tokens_and_wall_time(replayed):
    rows, records = replayed
    seconds = {}
    for record in records:
        drafter = record.key.arm.split("/")[0]
        seconds[drafter] = seconds.get(drafter, 0.0) + record.seconds
    for name, row in rows.items():
        # The same number of tokens everywhere: the ratio is that of the times, also where it is below 1.
        assert row.speedup_vs_none.value == pytest.approx(seconds["none"] / seconds[name])
        assert row.speedup_vs_hf_generate.value == pytest.approx(seconds["hf_generate"] / seconds[name])


def test_a_drafter_that_drafts_nothing_is_even_a_wrong_one_loses_and_a_good_one_wins(replayed):
    rows, _ = replayed
    assert rows["R0"].speedup_vs_none == Interval(1.0, 1.0, 1.0)
    assert rows["none"].speedup_vs_hf_generate.value == pytest.approx(1.0)
    assert rows["wrong"].speedup_vs_none.high < 1.0
    assert rows["R4"].speedup_vs_none.low > 2.0


def test_wrong_drafts_do_not_change_the_text(replayed):
    rows, _ = replayed
    assert {row.identical_fraction for row in rows.values()} == {None, 1.0}


def test_a_run_writes_its_report_and_the_same_command_repeats_nothing(generator, tmp_path):
    report = run_benchmark(OPTIONS, generator, target="tiny", out=tmp_path, command="paceline bench --here")
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [row["drafter"] for row in stored["rows"]] == ["hf_generate", "none", "prompt_lookup"]
    assert stored["rows"][2]["num_speculative_tokens"] == 4
    assert all(row["identical_fraction"] in (None, 1.0) for row in stored["rows"])
    assert stored["differences"] == []
    assert stored["settings"]["seed"] == 0
    assert stored["settings"]["dtype"] == "fp32"
    assert stored["prompt_ids"] == {"builtin": ["maths-1", "code-1"]}
    assert stored["command"] == "paceline bench --here"
    assert (tmp_path / "speedup.png").exists()
    assert "paceline bench --here" in (tmp_path / "report.md").read_text()
    records = (tmp_path / RECORDS_FILE).read_bytes()
    again = run_benchmark(OPTIONS, generator, target="tiny", out=tmp_path)
    assert (tmp_path / RECORDS_FILE).read_bytes() == records
    assert again.rows == report.rows


def test_two_turns_and_batches_go_through_every_arm(generator, tmp_path):
    options = BenchmarkOptions(
        suites=("builtin",),
        limit=6,
        max_new_tokens=4,
        drafters=("none", "prompt_lookup"),
        widths=(4,),
        batch_sizes=(1, 4),
    )
    report = run_benchmark(options, generator, target="tiny", out=tmp_path)
    prompts = options.load_suites()[0].prompts
    num_turns = sum(len(prompt.turns) for prompt in prompts)
    assert num_turns > len(prompts)
    assert [row.batch_size for row in report.rows] == [1, 1, 1, 4, 4, 4]
    assert {row.num_output_tokens for row in report.rows} == {4 * num_turns}
    assert {row.identical_fraction for row in report.rows} == {None, 1.0}


def test_sampling_arms_with_one_seed_give_the_same_text(generator, tmp_path):
    options = BenchmarkOptions(
        suites=("builtin",),
        limit=2,
        max_new_tokens=8,
        drafters=("none", "prompt_lookup"),
        verifiers=("sampling",),
        baselines=(),
        widths=(4,),
        seed=3,
    )
    report = run_benchmark(options, generator, target="tiny", out=tmp_path)
    assert [row.identical_fraction for row in report.rows] == [None, 1.0]
    assert [row.speedup_vs_hf_generate for row in report.rows] == [None, None]


def test_another_seed_in_the_same_folder_is_refused(generator, tmp_path):
    run_benchmark(OPTIONS, generator, target="tiny", out=tmp_path)
    changed = BenchmarkOptions(
        suites=("builtin",), limit=2, max_new_tokens=6, drafters=OPTIONS.drafters, widths=(4,), seed=9
    )
    with pytest.raises(ConfigError, match="seed was 0, now 9"):
        run_benchmark(changed, generator, target="tiny", out=tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"suites": ()},
        {"suites": ("builtin", "builtin")},
        {"widths": (4, 4)},
        {"batch_sizes": (0,)},
        {"max_new_tokens": 0},
        {"drafters": (), "baselines": ()},
    ],
)
def test_options_that_measure_nothing_are_refused(settings):
    with pytest.raises(ConfigError):
        BenchmarkOptions(**settings)


def test_the_rounding_check_passes_in_fp32_and_counts_its_answers(generator):
    options = BenchmarkOptions(
        suites=("check",), limit=3, max_new_tokens=8, drafters=("none", "prompt_lookup"), widths=(4,)
    )
    outcome = run_check(options, generator, target="tiny")
    assert (outcome.num_answers, outcome.differences, outcome.violations) == (6, (), ())
    assert outcome.threshold < 1e-3


def test_the_rounding_check_finds_a_decoder_that_is_wrong(generator, monkeypatch):
    from paceline.verifiers.greedy import GreedyVerifier

    plain = GreedyVerifier.verify

    def spoilt(self, trees, logits, sequences):
        # The second likeliest token at every tenth position: a fault, not rounding.
        if any(len(sequence.output_ids) == 5 for sequence in sequences):
            best = logits.argmax(dim=-1, keepdim=True)
            logits = logits.scatter(-1, best, float("-inf"))
        return plain(self, trees, logits, sequences)

    monkeypatch.setattr(GreedyVerifier, "verify", spoilt)
    options = BenchmarkOptions(suites=("check",), limit=3, max_new_tokens=8, drafters=("none",), widths=(4,))
    outcome = run_check(options, generator, target="tiny")
    assert len(outcome.violations) == 3
    assert {difference.position for difference in outcome.violations} == {5}


def test_the_check_needs_texts_long_enough_to_measure_its_noise(generator, monkeypatch):
    from paceline.bench import check

    monkeypatch.setattr(check, "width_noise", lambda *_: None)
    options = BenchmarkOptions(suites=("check",), limit=1, max_new_tokens=2, drafters=("none",), widths=(4,))
    with pytest.raises(ConfigError, match="--max-new-tokens"):
        run_check(options, generator, target="tiny")


def test_the_check_needs_its_reference(generator):
    options = BenchmarkOptions(suites=("check",), limit=1, drafters=("none",), baselines=())
    with pytest.raises(ConfigError, match="hf_generate"):
        run_check(options, generator, target="tiny")


LOSSY = BenchmarkOptions(
    suites=("builtin",),
    limit=3,
    max_new_tokens=12,
    drafters=("none", "prompt_lookup"),
    verifiers=("greedy", "budgeted:1000/1000/9/0/0", "margin:0"),
    widths=(4,),
)


def test_lossy_verifiers_are_timed_on_fixed_work_and_judged_on_natural_ends(generator, tmp_path):
    """Strict first and last, everything twice; a margin of nothing is strict decoding."""
    report = run_benchmark(LOSSY, generator, target="tiny", out=tmp_path / "out")
    stored = [json.loads(line) for line in (tmp_path / "out" / RECORDS_FILE).read_text().split("\n")[1:-1]]
    assert {record["key"]["work"] for record in stored} == {"natural", "fixed"}
    for work in ("natural", "fixed"):
        order = [r["key"]["arm"] for r in stored if r["key"]["group"] == 0 and r["key"]["work"] == work]
        own = [arm for arm in order if arm.startswith("prompt_lookup")]
        if work == "fixed":
            assert own[0] == "prompt_lookup/greedy/4"
            assert own[-1] == "prompt_lookup/greedy/4#2"
        else:
            assert "prompt_lookup/greedy/4#2" not in own, "it would give the same answers"
        # Neither generate() nor plain decoding has drafts to be verified.
        assert [name in order for name in ("hf_generate/greedy", "none/greedy")] == [work == "natural"] * 2
    fixed = [turn for r in stored if r["key"]["work"] == "fixed" for turn in r["turns"]]
    assert {len(turn["token_ids"]) for turn in fixed} == {12}
    assert all(
        turn["log_prob"] < 0
        for r in stored
        if "lookup" in r["key"]["arm"]
        for turn in r["turns"]
        if r["key"]["work"] == "natural"
    )
    rows = {(row.verifier, row.is_repeat): row for row in report.lossy}
    assert list(rows) == [
        ("greedy", False), ("budgeted:1000/1000/9/0/0", False), ("margin:0", False), ("greedy", True)
    ]  # fmt: skip
    off, free = rows["margin:0", False], rows["budgeted:1000/1000/9/0/0", False]
    assert (off.differing.value, off.relaxed_per_token.value, off.log_prob_change.value) == (0.0, 0.0, 0.0)
    assert free.relaxed_per_token.value > 0
    assert free.accepted_per_round.value > off.accepted_per_round.value
    assert free.log_prob_change.value < 0
    assert free.regret_per_token.value > 0
    assert sum(free.refusals.values()) == pytest.approx(1.0)
    # Only strict answers have to be those of generate(); what computes log-probabilities is not timed.
    assert report.differences == []
    assert {row.tokens_per_second for row in report.rows} == {None}
    assert "## Quality on natural ends" in (tmp_path / "out" / "report.md").read_text()


def test_an_interrupted_lossy_run_goes_on(generator, tmp_path):
    first = run_benchmark(LOSSY, generator, target="tiny", out=tmp_path / "out")
    path = tmp_path / "out" / RECORDS_FILE
    lines = path.read_text().split("\n")[:-1]
    path.write_text("\n".join(lines[:-5]) + "\n")
    again = run_benchmark(LOSSY, generator, target="tiny", out=tmp_path / "out")
    assert [row.log_prob for row in again.lossy] == [row.log_prob for row in first.lossy]
    assert len(path.read_text().split("\n")) == len(lines) + 1


def test_lossy_verifiers_need_the_strict_one_beside_them_and_drafts():
    with pytest.raises(ConfigError, match="need a drafter that drafts"):
        BenchmarkOptions(drafters=("none",), verifiers=("greedy", "budgeted"))
    with pytest.raises(ConfigError, match="compared with 'greedy'"):
        BenchmarkOptions(verifiers=("budgeted",))
