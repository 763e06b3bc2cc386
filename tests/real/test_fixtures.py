"""Fixtures F1 to F5: exact ids of the default target in fp32, whatever is drafted.

The ids were made step by step without a cache. F5 has a margin of only 0.023 between its two likeliest tokens
somewhere; in fp32 that is far above rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.generator import Generator
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, save_eagle
from paceline.registry import drafter_class, drafter_names
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.sequence import Segment, Sequence
from paceline.testing import ReplayDrafter
from paceline.tree import DraftTree
from paceline.vocabularies.speculative import VocabularyRanking

pytestmark = pytest.mark.real_model


@dataclass(frozen=True)
class Fixture:
    """A prompt and the ids that greedy decoding gives."""

    prompt: str
    raw: bool
    ids: tuple[int, ...]
    ends: bool


def ids(text):
    return tuple(map(int, text.split()))


FIXTURES = {
    "F1": Fixture(
        "1, 2, 3, 4, 5, 6, 7, 8, 9,",
        True,
        ids("216 33 32 28 216 33 33 28 216 33 34 28 216 33 35 28 216 33 36 28 216 33 37 28"),
        False,
    ),
    "F2": Fixture("What is the capital of France?", False, ids("504 3575 282 4649 314 7042 30 2"), True),
    "F3": Fixture("Write one emoji for happy.", False, (10813, 230, 249) * 16, False),
    "F4": Fixture(
        "Repeat exactly: the cat sat on the mat. the cat sat on the mat.",
        False,
        ids("504 2644 2643 335 260 1171 30 2"),
        True,
    ),
    "F5": Fixture(
        "a b c d e f g a b c d e f g a b c d",
        True,
        ids(
            "297 275 198 198 1348 314 253 8170 1183 282 253 35881 "
            "1517 281 5905 28 837 260 1517 6100 2581 1793 357 9732"
        ),
        False,
    ),
}
EOS = 2


@pytest.fixture(scope="session")
def prompts(smollm2):
    """Name -> prompt ids."""
    return {name: smollm2.encode(f.prompt, raw=f.raw) for name, f in FIXTURES.items()}


@pytest.fixture(scope="session")
def generator_with(smollm2):
    """A Generator on the shared target with another drafter."""

    def make(drafter, **settings):
        return Generator(
            smollm2.target,
            smollm2.tokenizer,
            drafter,
            eos_token_ids=tuple(smollm2.eos_token_ids),
            **{"num_speculative_tokens": 64, **settings},
        )

    return make


@pytest.fixture(scope="session")
def replay(prompts, smollm2, generator_with):
    """A Generator that drafts `length` tokens of the fixtures, with junk behind their end."""

    def make(length, **settings):
        recorded = {tuple(prompts[name]): [*f.ids, *range(40, 60)] for name, f in FIXTURES.items()}
        drafter = ReplayDrafter(recorded, length, vocab_size=smollm2.target.vocab_size, **settings)
        return generator_with(drafter)

    return make


@pytest.fixture(scope="session")
def eagle_head(smollm2, tmp_path_factory):
    """Folder of an EAGLE-3 head with random weights: no trained one is shipped."""
    size = smollm2.target.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EagleHead(EagleConfig("eagle3", size, size, 256, 9, 3, 64, feature_layers=(2, 15, 27)))
        ranking = VocabularyRanking(size, smollm2.target.vocab_size)
    provenance = {"target_fingerprint": smollm2.target.fingerprint}
    folder = tmp_path_factory.mktemp("heads") / "eagle"
    save_eagle(folder, LoadedEagle(head, ranking, torch.arange(0, 32_000), None, provenance), "Random.")
    return folder


def check(result, name, tokenizer):
    fixture = FIXTURES[name]
    assert result.token_ids == fixture.ids
    assert result.finish_reason == ("stop" if fixture.ends else "length")
    assert result.text == tokenizer.decode(fixture.ids, skip_special_tokens=True)


def test_tokenizer_and_model_are_those_of_the_fixtures(smollm2, prompts):
    """Row 49: `""` has no ids, so it is refused; an emoji is three ids; 37 ids of chat template for F2."""
    from paceline.errors import RequestError

    assert smollm2.tokenizer("")["input_ids"] == []
    with pytest.raises(RequestError, match="0 tokens"):
        smollm2.generate("", raw=True)
    assert len(prompts["F2"]) == 37
    assert smollm2.eos_token_ids == {EOS}
    assert (smollm2.target.hidden_size, smollm2.target.num_layers, smollm2.target.context_len) == (
        576,
        30,
        8192,
    )


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("drafter", drafter_names())
def test_exact_ids_with_registered_drafters(name, drafter, smollm2, prompts, generator_with, eagle_head):
    """Row 6: exact equality in fp32; F3 repeats itself, so copying pays there."""
    # A trained drafter takes the head that is shipped for this target.
    head = eagle_head if drafter.startswith("eagle3") else None
    generator = generator_with(
        drafter_class(drafter).build(smollm2.target, head, 32), num_speculative_tokens=32
    )
    result = generator.generate(prompts[name], SamplingParameters(max_new_tokens=len(FIXTURES[name].ids)))
    check(result, name, smollm2.tokenizer)
    if (name, drafter) == ("F3", "prompt_lookup"):
        assert result.statistics.num_rounds <= 20


@pytest.mark.parametrize(
    ("name", "length", "settings"),
    [
        ("F1", 4, {}),
        ("F1", 4, {"decoys": True}),
        ("F1", 6, {"wrong": 3, "decoys": True}),
        ("F3", 7, {"decoys": True}),
        ("F5", 6, {}),
        ("F5", 5, {"wrong": 3, "decoys": True}),
    ],
    ids=str,
)
def test_exact_ids_with_replayed_drafts(name, length, settings, smollm2, prompts, replay):
    """Rows 2, 8 and 12: chains and trees whose true branch is scattered, right and wrong."""
    num_new = len(FIXTURES[name].ids)
    result = replay(length, **settings).generate(prompts[name], SamplingParameters(max_new_tokens=num_new))
    check(result, name, smollm2.tokenizer)
    assert result.statistics.num_rounds == -(-num_new // (settings.get("wrong", length) + 1))


@pytest.mark.parametrize("length", range(1, 13))
def test_an_end_inside_an_accepted_block_ends_the_text(length, smollm2, prompts, replay):
    """Row 1: F4 has 8 ids for every k; with a list of ends the first one reached counts."""
    events = list(replay(length).stream(prompts["F4"], SamplingParameters(max_new_tokens=30)))
    check(events[-1].result, "F4", smollm2.tokenizer)
    assert tuple(i for event in events for i in event.token_ids) == FIXTURES["F4"].ids
    if length in (3, 12):
        asked = SamplingParameters(max_new_tokens=30, eos_token_ids=(30, 335))
        assert replay(length).generate(prompts["F4"], asked).token_ids == FIXTURES["F4"].ids[:4]


LOG_PROBS = [-1.8827, -0.0197, -0.0115, -0.0109, -0.0388, -0.0500, -0.5656, -0.2578]


@pytest.mark.parametrize("length", range(8))
def test_log_probabilities_of_f2(length, smollm2, prompts, replay):
    """Rows 40 and 42: the same eight values for every k; text and end in one block are both streamed."""
    events = list(replay(length).stream(prompts["F2"], SamplingParameters(max_new_tokens=30, logprobs=2)))
    result = events[-1].result
    check(result, "F2", smollm2.tokenizer)
    assert [entry.log_prob for entry in result.log_probs] == pytest.approx(LOG_PROBS, abs=1e-3)
    assert all(len(entry.top) == 2 for entry in result.log_probs)
    assert "".join(event.text for event in events) == result.text == "The capital of France is Paris."


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_stop_string_that_ends_inside_a_token(length, prompts, replay):
    """Row 15: F2 with stop " is Par": the completing token counts; ids and log-probabilities are cut."""
    asked = SamplingParameters(max_new_tokens=30, stop=(" is Par",), logprobs=0)
    events = list(replay(length).stream(prompts["F2"], asked))
    result = events[-1].result
    assert result.text == "".join(event.text for event in events) == "The capital of France"
    assert result.token_ids == FIXTURES["F2"].ids[:6]
    assert len(result.log_probs) == 6
    assert result.finish_reason == "stop"


def test_an_end_cannot_come_before_min_new_tokens(prompts, replay, generator_with, smollm2):
    """Row 17: F2 with 12 tokens at least: accepted ends are impossible before, the text goes on instead."""
    asked = SamplingParameters(max_new_tokens=16, min_new_tokens=12)
    plain = smollm2.generate(prompts["F2"], asked)
    assert EOS not in plain.token_ids[:12]
    assert plain.token_ids[:7] == FIXTURES["F2"].ids[:7]
    for generator in (replay(7), generator_with(PromptLookupDrafter())):
        assert generator.generate(prompts["F2"], asked).token_ids == plain.token_ids


@pytest.mark.parametrize(("length", "budgets"), [(4, (2, 9, 11)), (8, (1, 13, 20))], ids=str)
def test_budgets_are_met_to_the_token(length, budgets, prompts, replay):
    """Row 18: F3 with a budget of 1 to 20: that many ids, usage equal to them."""
    generator = replay(length)
    for budget in budgets:
        result = generator.generate(prompts["F3"], SamplingParameters(max_new_tokens=budget))
        assert result.token_ids == FIXTURES["F3"].ids[:budget]
        assert result.finish_reason == "length"
        assert result.statistics.num_output_tokens == budget


def test_the_next_turn_reuses_prompt_and_answer(prompts, replay, smollm2):
    """Row 19: F4's end lies inside a block; the second turn reuses 54 tokens and equals a cold run."""
    generator = replay(12)
    asked = SamplingParameters(max_new_tokens=30)
    former = generator.open(list(prompts["F4"]), asked, keeps_cache=True)
    for _ in generator.run([former]):
        pass
    assert generator.target.cached_len(former.sequence) == len(prompts["F4"]) + 7
    more = smollm2.tokenizer("\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    second = [*prompts["F4"], *FIXTURES["F4"].ids, *more]
    answer = generator.open(second, SamplingParameters(max_new_tokens=8), former=former)
    assert generator.target.cached_len(answer.sequence) == len(prompts["F4"]) + 7
    [*_, last] = generator.run([answer])
    cold = smollm2.generate(second, SamplingParameters(max_new_tokens=8))
    assert last.event.result.token_ids == cold.token_ids


def test_without_an_end_the_text_runs_to_the_cap(prompts, replay):
    """Row 22: no end at all: F4 goes on behind its eighth token."""
    asked = SamplingParameters(max_new_tokens=12, eos_token_ids=())
    result = replay(4).generate(prompts["F4"], asked)
    assert len(result.token_ids) == 12
    assert result.token_ids[:8] == FIXTURES["F4"].ids
    assert result.finish_reason == "length"


PROCESSED = {
    "repetition": ({"repetition_penalty": 1.3}, "\nd h i j k l m n o p q r s t u v w x y"),
    "bad word": ({"bad_words": ((198,),)}, " e f g a b c d"),
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processed_text_of_f5(name, prompts, replay, smollm2):
    """Row 33: penalties and bad words act at every drafted position: the known text for every draft."""
    changes, beginning = PROCESSED[name]
    asked = SamplingParameters(max_new_tokens=21 if name == "repetition" else 8, **changes)
    plain = smollm2.generate(prompts["F5"], asked)
    assert plain.text.startswith(beginning)
    assert plain.token_ids != FIXTURES["F5"].ids[: len(plain.token_ids)]
    generator, prompt = replay(5, decoys=True), tuple(prompts["F5"])
    generator.drafter.recorded = {prompt: plain.token_ids}
    assert generator.generate(list(prompt), asked).token_ids == plain.token_ids
    # Drafts of the unprocessed text are rejected one after the other.
    generator.drafter.recorded = {prompt: FIXTURES["F5"].ids}
    first = generator.generate(list(prompt), replace(asked, max_new_tokens=6))
    assert first.token_ids == plain.token_ids[:6]


def test_signs_and_sizes_of_penalties_matter_on_f5(prompts, generator_with):
    """Row 33: frequency -2 and +2 and a forbidden repetition of trigrams all write something else."""
    asked = [
        SamplingParameters(max_new_tokens=12, frequency_penalty=2.0),
        SamplingParameters(max_new_tokens=12, frequency_penalty=-2.0),
        SamplingParameters(max_new_tokens=12, no_repeat_ngram_size=3),
    ]
    results = generator_with(PromptLookupDrafter()).generate_batch([prompts["F5"]] * 3, asked)
    texts = {result.token_ids for result in results} | {FIXTURES["F5"].ids[:12]}
    assert len(texts) == 4
    assert len(set(zip(results[2].token_ids, results[2].token_ids[1:], results[2].token_ids[2:]))) == 10


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_emoji_are_never_cut_in_the_stream(length, prompts, replay, smollm2):
    """Row 43: F3, blocks that are no multiples of three, caps of 46 and 47 tokens."""
    for cap in (46, 47):
        events = list(replay(length).stream(prompts["F3"], SamplingParameters(max_new_tokens=cap)))
        pieces = [event.text for event in events]
        assert "\ufffd" not in "".join(pieces[:-1])
        assert "".join(pieces) == smollm2.tokenizer.decode(FIXTURES["F3"].ids[:cap])
        if length < 4:
            break


def test_a_batch_of_all_fixtures_equals_each_alone(prompts, replay, smollm2):
    """Rows 45 and 75: five prompts of different length and acceptance, two of which end early."""
    names = list(FIXTURES)
    asked = [SamplingParameters(max_new_tokens=len(FIXTURES[name].ids)) for name in names]
    generator = replay(5, decoys=True)
    generator.drafter.recorded[tuple(prompts["F1"])] = [7] * 24
    results = generator.generate_batch([prompts[name] for name in names], asked)
    for name, result in zip(names, results, strict=True):
        check(result, name, smollm2.tokenizer)


def test_logits_of_a_tree_equal_plain_forwards(prompts, smollm2):
    """Row 10: eleven nodes behind F1: flat positions are off by 11, a causal mask by 16, this by rounding."""
    prompt, target = prompts["F1"], smollm2.target
    true = FIXTURES["F1"].ids
    tree = DraftTree.from_paths(
        prompt[-1], [[30, 31], true[:4], [true[0], 40, 41], [true[0], true[1], 50, 51]]
    )
    assert len(tree) == 11
    sequence = Sequence(list(prompt), SamplingParameters(), frozenset(), 8192, seed=0)
    logits = target.forward([Segment(sequence, tuple(prompt[:-1]), tree)]).tree_logits()
    target.release(sequence)
    for node, path in enumerate(tree.path_table):
        ids = [*prompt[:-1], *tree.token_ids[path[path >= 0]].tolist()]
        with torch.no_grad():
            expected = target.model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        assert float((logits[node] - expected).abs().max()) <= 4e-4


def test_the_tied_head_reads_the_embedding_and_the_normed_state(prompts, smollm2):
    """Rows 59, 63 and 65: head rows are embedding rows; logits from the recorded state: TV below 1e-4."""
    target = smollm2.target
    assert torch.equal(target.architecture.lm_head.weight, target.architecture.embedding.weight)
    text = [*prompts["F2"], *FIXTURES["F2"].ids]
    with torch.no_grad():
        output = target.model(torch.tensor([text]), output_hidden_states=True)
    model_law = output.logits[0].softmax(dim=-1)
    own_law = target.lm_head(output.hidden_states[-1][0]).softmax(dim=-1)
    assert float((model_law - own_law).abs().sum(dim=-1).max() / 2) < 1e-4
    sequence = Sequence(text, SamplingParameters(), frozenset(), 8192, seed=0)
    tree = DraftTree.root_only(text[-1])
    recorded = target.forward([Segment(sequence, tuple(text[:-1]), tree)], (2, 15, 27))
    target.release(sequence)
    taught = target.lm_head(recorded.hidden).softmax(dim=-1)
    assert float((model_law - taught).abs().sum(dim=-1).max() / 2) < 1e-4
    for layer in (2, 15, 27):
        torch.testing.assert_close(
            recorded.features[layer], output.hidden_states[layer][0], atol=1e-3, rtol=1e-3
        )


def test_training_text_begins_with_prompt_and_generated_ids(prompts, smollm2):
    """Rows 66, 67 and 69: training text is prompt, then the generated ids, then the template's line break."""
    messages = [
        {"role": "user", "content": FIXTURES["F2"].prompt},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    rendered = smollm2.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    generated = [*prompts["F2"], *FIXTURES["F2"].ids]
    assert rendered[: len(generated)] == generated
    assert len(rendered) == 46
    assert smollm2.tokenizer.decode(rendered[45:]) == "\n"


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("wrong", [None, 0, 3])
def test_a_budget_of_nothing_gives_the_exact_ids(smollm2, prompts, replay, name, wrong):
    """Row 39: budgeted verification with budget 0 on F1 to F5, whatever is drafted."""
    generator = replay(8, wrong=wrong, decoys=True)
    generator.verifier = "budgeted"
    asked = SamplingParameters(max_new_tokens=len(FIXTURES[name].ids), relaxation=Relaxation(risk_budget=0.0))
    result = generator.generate(prompts[name], asked)
    check(result, name, smollm2.tokenizer)
    assert result.statistics.num_relaxed_tokens == 0
