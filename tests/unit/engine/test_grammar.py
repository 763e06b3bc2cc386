"""Grammars on draft trees: rows are those of a fresh matcher, texts are those of plain masked decoding."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.forward_cost import ForwardCost
from paceline.engine.generator import Generator
from paceline.engine.grammar import GrammarTokenizer
from paceline.engine.node_budget import AdaptiveBudget
from paceline.engine.processors import build_processors, needs_processing
from paceline.engine.speculate import SpeculativeEngine
from paceline.errors import MissingDependencyError, RequestError, UnsupportedFeatureError
from paceline.grammar import MAX_GRAMMAR_CHARS, Grammar
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.testing import ReplayDrafter, greedy_oracle
from paceline.tree import DraftTree
from stub_target import StubTarget, scripted_law

CPU = torch.device("cpu")
EOS = 1
V = 288  # more than the tokenizer has, as padded models do
# Pieces that span several terminals of JSON, and characters of several bytes.
PIECES = ['{"', '":', '": "', '"}', '","', '", "', "red", 'n": 1', "true", "é", "日本", "  ", "\n"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["red", "grün", "日本"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "n"],
    "additionalProperties": False,
}
COMPACT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "compact": Grammar.json_schema(COMPACT),
    "object": Grammar.json_object(),
    "regex": Grammar.regex(r"(ab|a|é日*)+x?"),
    "lark": Grammar.lark('start: "(" start ")" | "()" | "[" "]"'),
    "choice": Grammar.choice(["red", "reddish", "日本", "日", 'say "hi"\\\n']),
}
LOOSE = Relaxation(
    risk_budget=1e6, max_regret_per_value=1e6, regret_price=0.0, typical_epsilon=1e-9, max_regret=1e6
)


def spell(text):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def make_tokenizer(without="") -> PreTrainedTokenizerFast:
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map(spell, PIECES)]
    tokens = [token for token in dict.fromkeys(tokens) if token not in without]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


TOKENIZER = make_tokenizer()
GRAMMAR_TOKENIZER = GrammarTokenizer(TOKENIZER, V)
REFERENCE = from_tokenizer(TOKENIZER, n_vocab=V, eos_token=EOS)


def ids_of(text: str) -> list[int]:
    """Byte by byte."""
    return [TOKENIZER.convert_tokens_to_ids(symbol) for symbol in spell(text)]


def piece(text: str) -> int:
    return TOKENIZER.convert_tokens_to_ids(spell(text))


def reference_mask(grammar: Grammar, ids) -> torch.Tensor | None:
    """Bool [V] by a matcher that has seen nothing else; None when the ids themselves are illegal."""
    matcher = llguidance.LLMatcher(REFERENCE, grammar.source, log_level=0)
    if matcher.try_consume_tokens(list(ids)) != len(ids):
        return None
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, bitorder="little")[:V].astype(bool))


def make_sequence(grammar, output=(), *, eos=(EOS,), **changes) -> Sequence:
    return Sequence(
        [5, 6], SamplingParameters(grammar=grammar, **changes), frozenset(eos), 1000, 0, output_ids=[*output]
    )


def processors_of(sequence):
    return build_processors(sequence, V, CPU, GRAMMAR_TOKENIZER)


def processed(sequence, tree, logits=None):
    logits = torch.zeros(len(tree), V) if logits is None else logits.clone()
    for processor in processors_of(sequence):
        processor.apply(logits, tree, sequence)
    return logits


def allowed(sequence, tree=None):
    tree = tree or DraftTree.root_only(sequence.last_token_id)
    return processed(sequence, tree) != float("-inf")


def random_text(grammar, rng, length):
    """Legal ids, as many as there are up to a length; the end of the text is not among them."""
    ids = []
    for _ in range(length):
        possible = reference_mask(grammar, ids).nonzero()[:, 0].tolist()
        possible = [i for i in possible if i != EOS]
        if not possible:
            break
        ids.append(rng.choice(possible))
    return ids


def random_tree(grammar, before, root, rng, num_nodes):
    """A tree in random order of growth, of legal tokens mostly, with the drafted text at each node."""
    tokens, parents, texts = [root], [-1], [[]]
    for _ in range(num_nodes):
        above = rng.randrange(len(tokens))
        mask = reference_mask(grammar, [*before, *texts[above]])
        is_legal = mask is not None and rng.random() < 0.8
        token = rng.choice(mask.nonzero()[:, 0].tolist()) if is_legal else rng.randrange(V)
        if any(p == above and t == token for p, t in zip(parents, tokens, strict=True)):
            continue
        tokens.append(token)
        parents.append(above)
        texts.append([*texts[above], token])
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.ones(len(tokens))), texts


@pytest.mark.parametrize("name", GRAMMARS)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(0, 12), st.integers(0, 14))
def test_rows_of_legal_nodes_are_those_of_a_fresh_matcher(name, seed, num_before, num_nodes):
    grammar, rng = GRAMMARS[name], random.Random(seed)
    text = random_text(grammar, rng, num_before)
    half = rng.randint(0, len(text))
    sequence = make_sequence(grammar, text[:half])
    (processor,) = processors_of(sequence)
    # A first tree is rejected, or accepted as far as the rest of the text goes: its traces must be gone.
    logits = torch.zeros(9, V)
    first, _ = random_tree(grammar, text[:half], sequence.last_token_id, rng, 8)
    processor.apply(logits[: len(first)], first, sequence)
    sequence.output_ids += text[half:]
    processor.extend(tuple(text[half:]))
    tree, texts = random_tree(grammar, text, sequence.last_token_id, rng, num_nodes)
    raw = torch.randn(len(tree), V, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        rows = raw.clone()
        processor.apply(rows, tree, sequence)
        for node, drafted in enumerate(texts):
            if EOS in drafted:
                continue
            mask = reference_mask(grammar, [*text, *drafted])
            if mask is not None:
                assert torch.equal(rows[node], raw[node].masked_fill(~mask, float("-inf")))
            assert not torch.isinf(rows[node]).all()


def test_a_node_is_possible_exactly_when_its_token_is_legal():
    grammar = GRAMMARS["choice"]
    paths = [ids_of("reddish!"), ids_of("blue"), [piece("red"), *ids_of("dy")], [piece("日本"), 0]]
    tree = DraftTree.from_paths(6, paths)
    rows = processed(make_sequence(grammar), tree)
    for node, row in enumerate(tree.path_table):
        text = tree.token_ids[row[row >= 0]].tolist()[1:]
        is_possible = all(
            rows[parent, token] == 0 for parent, token in zip(row[row >= 0].tolist(), text, strict=False)
        )
        assert is_possible == (reference_mask(grammar, text) is not None), node


def test_a_token_may_span_several_terminals():
    sequence = make_sequence(GRAMMARS["schema"])
    assert allowed(sequence)[0, piece('{"')]
    text = [piece('{"'), *ids_of("name"), piece('": "'), piece("é"), piece('","')]
    rows = allowed(sequence, DraftTree.from_chain(6, text))
    assert rows[6, piece("日本")]
    assert rows[6, piece('","')]
    assert torch.equal(rows[-1], reference_mask(GRAMMARS["schema"], text))
    # Half a character: only its other half may follow.
    halves = ids_of("é")
    rows = allowed(sequence, DraftTree.from_chain(6, [*text[:6], halves[0]]))
    assert rows[-1, halves[1]]
    assert not rows[-1, halves[0]]


def test_a_complete_text_can_only_end_by_any_end_of_the_request():
    grammar = Grammar.choice(["ok", "okay"])
    tree = DraftTree.from_chain(6, ids_of("okay"))
    rows = allowed(make_sequence(grammar, eos=(0, EOS, 287)), tree)
    assert [rows[i, [0, EOS, 287]].tolist() for i in (0, 1, 2, 3, 4)] == [
        [False] * 3,
        [False] * 3,
        [True] * 3,
        [False] * 3,
        [True] * 3,
    ]
    assert rows[2].nonzero()[:, 0].tolist() == sorted([0, EOS, 287, *ids_of("a")])
    assert rows[4].nonzero()[:, 0].tolist() == [0, EOS, 287]


def test_an_end_of_the_text_is_never_a_piece_of_it():
    (a,) = ids_of("a")
    rows = allowed(make_sequence(Grammar.regex("[ab]{2}"), eos=(a,)), DraftTree.from_chain(6, ids_of("bb")))
    assert rows[0].nonzero()[:, 0].tolist() == ids_of("b")
    assert rows[2].nonzero()[:, 0].tolist() == [a]
    with pytest.raises(RequestError, match="no token of this model goes on"):
        processors_of(make_sequence(Grammar.regex("a"), eos=(a,)))


def test_padding_and_special_tokens_are_never_text():
    rows = allowed(make_sequence(Grammar.regex("(?s:.*)")))
    assert not rows[0, len(TOKENIZER) :].any()
    assert not rows[0, 0]
    assert rows[0, EOS]


def test_nothing_makes_a_forbidden_token_possible():
    (x,) = ids_of("x")
    sequence = make_sequence(Grammar.choice(["red"]), logit_bias={x: 1e9}, presence_penalty=-2.0)
    rows = processed(sequence, DraftTree.from_chain(6, ids_of("red")))
    assert rows[:, x].tolist() == [float("-inf")] * 4
    assert rows.argmax(dim=1).tolist() == [*ids_of("r")[:1], *ids_of("ed"), EOS]


@pytest.mark.parametrize(
    "bans",
    [
        {"min_new_tokens": 50},
        {"bad_words": tuple((i,) for i in sorted({*ids_of("red"), piece("red")}))},
        {"logit_bias": dict.fromkeys([*ids_of("red"), piece("red")], float("-inf"))},
        {"no_repeat_ngram_size": 1},
    ],
    ids=lambda bans: next(iter(bans)),
)
def test_the_grammar_wins_over_bans_that_leave_nothing(bans):
    sequence = make_sequence(Grammar.choice(["redredred"]), **bans)
    tree = DraftTree.from_chain(6, ids_of("redredred"))
    rows = processed(sequence, tree, torch.randn(len(tree), V))
    for row, text in zip(rows, [*tree.token_ids.tolist()[1:], EOS], strict=True):
        assert row[text] > float("-inf")
        assert len(row.isfinite().nonzero()) <= 2
    # Where something is left the bans hold: red as one token, or r.
    rows = processed(make_sequence(Grammar.choice(["red"]), bad_words=((piece("red"),),)), tree)
    assert rows[0].isfinite().nonzero()[:, 0].tolist() == ids_of("r")


def test_a_minimum_length_holds_as_long_as_the_text_may_go_on():
    rows = allowed(make_sequence(Grammar.regex("a+"), ids_of("aa"), min_new_tokens=4))
    assert not rows[0, EOS]
    assert allowed(make_sequence(Grammar.regex("a+"), ids_of("aaaa"), min_new_tokens=4))[0, EOS]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore_eos": True}, "must be able to end, but ignore_eos is true"),
        ({"eos": ()}, "must be able to end, but it has no end-of-sequence id"),
        ({"eos": (V,)}, f"eos_token_ids has token id {V}"),
    ],
    ids=["ignored", "none", "outside"],
)
def test_requests_that_cannot_end_are_refused(changes, message):
    with pytest.raises(RequestError, match=message):
        processors_of(make_sequence(GRAMMARS["object"], **changes))


def test_a_grammar_needs_processing_and_a_tokenizer():
    sequence = make_sequence(GRAMMARS["object"])
    assert needs_processing(sequence.parameters)
    with pytest.raises(RequestError, match="no tokenizer"):
        build_processors(sequence, V, CPU)
    with pytest.raises(RequestError, match="grammar is 'json': it must be a Grammar"):
        SamplingParameters(grammar="json")


def test_tokenizers_that_llguidance_cannot_read_are_refused(any_tokenizer):
    sequence = make_sequence(Grammar.choice(["at"]))
    grammars = GrammarTokenizer(any_tokenizer, V)
    if type(any_tokenizer.backend_tokenizer.decoder).__name__ == "Metaspace":
        with pytest.raises(UnsupportedFeatureError, match="cannot use this tokenizer"):
            build_processors(sequence, V, CPU, grammars)
    else:
        assert build_processors(sequence, V, CPU, grammars)
    with pytest.raises(UnsupportedFeatureError, match="fast tokenizer, this one is a object"):
        build_processors(sequence, V, CPU, GrammarTokenizer(object(), V))


def test_what_the_vocabulary_cannot_spell_is_refused_up_front(generator_of):
    generator = generator_of("llama", eos_token_ids=(2,))  # its tokenizer has no braces
    with pytest.raises(UnsupportedFeatureError, match="printable ASCII character, this one has none for"):
        generator.generate([7], SamplingParameters(grammar=GRAMMARS["object"]))
    assert not generator.engine.has_work
    with pytest.raises(RequestError, match="regex cannot be followed after 0 tokens: no token"):
        processors_of(make_sequence(Grammar.regex(r"[^\s\S]")))


@pytest.mark.parametrize(
    ("make", "given_value", "message"),
    [
        (Grammar.json_schema, [1], r"json_schema is \[1\]: it must be an object"),
        (Grammar.json_schema, {"propertyNames": {}}, r"Unimplemented keys: \[.propertyNames.\]; use the"),
        (Grammar.json_schema, {"type": "objekt"}, "Invalid type: objekt"),
        (Grammar.json_schema, {"minimum": 3, "maximum": 1, "type": "integer"}, "minimum .3. is greater"),
        (Grammar.json_schema, {"enum": [{1}]}, "is not JSON: Object of type set"),
        (Grammar.json_schema, {"enum": ["\ud800"]}, "cannot be used"),
        (Grammar.json_schema, {"enum": ["x" * MAX_GRAMMAR_CHARS]}, f"at most {MAX_GRAMMAR_CHARS} are"),
        (Grammar.regex, "([", "unclosed character class"),
        (Grammar.regex, "(?=a)b", "look-around.* is not supported"),
        (Grammar.regex, "", "regex is '': it must be a non-empty string"),
        (Grammar.regex, "\ud800", "not valid Unicode"),
        (Grammar.lark, "start: x", 'unknown name: "x"'),
        (Grammar.lark, None, "lark is None"),
        (Grammar.choice, [], r"choice is \[\]: give a list"),
        (Grammar.choice, "abc", "choice is 'abc': give a list"),
        (Grammar.choice, ["a", ""], "non-empty strings"),
        (Grammar.choice, ["\ud800"], "choice is not valid Unicode"),
    ],
)
def test_grammars_that_cannot_be_used_say_why_in_one_line(make, given_value, message):
    with pytest.raises(RequestError, match=message) as caught:
        make(given_value)
    assert "\n" not in str(caught.value)


def test_the_library_is_imported_on_first_use_and_named_when_it_is_missing(monkeypatch):
    code = "import sys, paceline.engine.generator; print('llguidance' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False"]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install \"paceline\[serve\]\""):
        Grammar.json_object()


# Whole texts, from here on: a tiny random model that speaks bytes and pieces.


@pytest.fixture(scope="module")
def target(target_of):
    return target_of("llama", vocab_size=V, eos_token_id=EOS, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def generator_with(target):
    def make(drafter=None, **options):
        options.setdefault("num_speculative_tokens", 64)
        return Generator(target, TOKENIZER, drafter or NoDrafter(), eos_token_ids=(EOS,), **options)

    return make


def drafters_for(target, prompt, ids):
    """Plain, right, wrong at places, wrong branches around the right one, and the text's own n-grams."""
    recorded = {tuple(prompt): ids}
    yield NoDrafter()
    yield ReplayDrafter(recorded, 7, vocab_size=V)
    yield ReplayDrafter(recorded, 5, wrong=2, vocab_size=V)
    yield ReplayDrafter(recorded, 4, decoys=True, vocab_size=V)
    yield PromptLookupDrafter.build(target, None, 16)


def assert_of_schema(text):
    found = json.loads(text)
    assert list(found) == ["name", "kind", "n"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 6
    assert found["kind"] in ("red", "grün", "日本")
    assert isinstance(found["n"], int)
    assert 0 <= found["n"] <= 99


PROMPTS = ([7], ids_of('{"name": "x", "kind": "red"} a'))


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
@pytest.mark.parametrize("name", ["compact", "regex", "lark", "choice"])
def test_greedy_text_is_plain_masked_decoding_under_any_drafter(generator_with, target, name, prompt):
    grammar = GRAMMARS[name]

    def mask(logits, ids):
        allowed_here = reference_mask(grammar, ids[len(prompt) :])
        return logits.masked_fill(~allowed_here, float("-inf"))

    expected = greedy_oracle(target.model, prompt, 80, eos_token_ids=(EOS,), process=mask)
    parameters = SamplingParameters(max_new_tokens=80, grammar=grammar)
    for drafter in drafters_for(target, prompt, expected):
        result = generator_with(drafter).generate(prompt, parameters)
        assert list(result.token_ids) == expected
        if result.finish_reason == "stop" and name == "compact":
            assert_of_schema(result.text)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["compact", "schema", "choice"])
def test_sampled_text_is_the_same_under_any_drafter_and_valid(generator_with, target, name, seed):
    prompt = PROMPTS[seed % 2]
    parameters = SamplingParameters(
        max_new_tokens=600, grammar=GRAMMARS[name], temperature=1.0, top_p=0.95, seed=seed
    )
    expected = generator_with().generate(prompt, parameters)
    for drafter in drafters_for(target, prompt, list(expected.token_ids)):
        result = generator_with(drafter).generate(prompt, parameters)
        assert result.token_ids == expected.token_ids
    assert expected.finish_reason == "stop"
    assert expected.token_ids[-1] == EOS
    if name == "choice":
        assert expected.text in ("red", "reddish", "日本", "日", 'say "hi"\\\n')
    else:
        assert_of_schema(expected.text)


def test_grammars_and_free_texts_share_a_batch(generator_with):
    asked = [
        SamplingParameters(max_new_tokens=60, grammar=grammar) for grammar in (GRAMMARS["compact"], None)
    ]
    asked.append(replace(asked[0], grammar=GRAMMARS["regex"], temperature=0.8, seed=3))
    generator = generator_with(PromptLookupDrafter.build(generator_with().target, None, 16))
    together = generator.generate_batch([PROMPTS[1]] * 3, asked)
    alone = [generator.generate(PROMPTS[1], own) for own in asked]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


@pytest.mark.parametrize("verifier", ["budgeted", "typical", "margin"])
@pytest.mark.parametrize("seed", range(3))
def test_lossy_verifiers_never_relax_into_a_forbidden_token(generator_with, target, verifier, seed):
    grammar, rng = GRAMMARS["compact"], random.Random(seed)
    prompt = PROMPTS[seed % 2]

    class Guesses(ReplayDrafter):
        """Random trees, legal and illegal tokens mixed."""

        def _tree(self, sequence):
            return random_tree(grammar, sequence.output_ids, sequence.last_token_id, rng, 10)[0]

    generator = generator_with(Guesses({}, 0, vocab_size=V), verifier=verifier)
    parameters = SamplingParameters(max_new_tokens=60, grammar=grammar, relaxation=LOOSE)
    result = generator.generate(prompt, parameters)
    assert result.statistics.num_relaxed_tokens > 0
    *text, last = result.token_ids
    assert reference_mask(grammar, text)[last]
    if result.finish_reason == "stop":
        assert_of_schema(result.text)


def test_log_probs_stay_the_target_s_own(generator_with):
    parameters = SamplingParameters(max_new_tokens=3, grammar=GRAMMARS["compact"], logprobs=1)
    result = generator_with().generate([7], parameters)
    assert result.token_ids[0] in (piece('{"'), *ids_of("{"))
    assert result.token_ids[0] not in result.log_probs[0].top


@pytest.mark.parametrize("text", ["\U00040000b", "ab\U00040000ab"], ids=["at once", "later"])
@pytest.mark.parametrize("length", [0, 2, 12], ids=["plain", "short drafts", "one draft"])
def test_a_character_that_the_vocabulary_cannot_spell_fails_whatever_is_drafted(text, length):
    lacking = make_tokenizer(without=spell("\U00040000")[0])  # as SmolLM2 lacks some lead bytes
    script = [*lacking.convert_tokens_to_ids([s for s in spell(text) if s in lacking.get_vocab()]), EOS]
    target = StubTarget(scripted_law([7], script, V), V)
    drafter = ReplayDrafter({(7,): script}, length, vocab_size=V)
    generator = Generator(target, lacking, drafter, eos_token_ids=(EOS,), num_speculative_tokens=32)
    with pytest.raises(RequestError, match="the choice cannot be followed after"):
        generator.generate([7], SamplingParameters(grammar=Grammar.choice([text])))


class TestFailure:
    """llguidance gives up in the middle of a text: that request ends, the others go on."""

    @pytest.fixture(autouse=True)
    def _small_limits(self, monkeypatch):
        def matcher(self, grammar):
            limits = llguidance.LLParserLimits(max_items_in_row=9, verbose_errors=False)
            return llguidance.LLMatcher(self._built, grammar.source, log_level=0, limits=limits)

        monkeypatch.setattr(GrammarTokenizer, "matcher", matcher)

    def sequence(self, grammar, **changes):
        parameters = SamplingParameters(max_new_tokens=30, grammar=grammar, **changes)
        return Sequence([7], parameters, frozenset({EOS}), 1000, 0)

    @pytest.mark.parametrize("length", [0, 2, 12], ids=["plain", "short drafts", "one draft"])
    def test_only_the_request_that_failed_ends(self, length):
        script = [*ids_of('{"a": [1]}'), EOS]
        target = StubTarget(scripted_law([7], script, V), V)
        drafter = ReplayDrafter({(7,): script}, length, vocab_size=V)
        engine = SpeculativeEngine(target, drafter, num_speculative_tokens=32, grammars=GRAMMAR_TOKENIZER)
        failing, free = self.sequence(Grammar.json_object()), self.sequence(None)
        other = self.sequence(Grammar.regex(r"\{.*"))
        sequences = [failing, free, other]
        for sequence in sequences:
            engine.submit(sequence)
        emitted = {sequence: [] for sequence in sequences}
        forward, shown, num_rounds = target.forward, [], 0
        target.forward = lambda segments, *rest: shown.append(len(segments)) or forward(segments, *rest)
        observe, observed = drafter.observe, []
        drafter.observe = lambda output, results: observed.append(len(results)) or observe(output, results)
        while engine.has_work:
            num_rounds += 1
            for outcome in engine.round():
                emitted[outcome.sequence] += outcome.result.emitted_ids
        # In the round of the failure the others' rows are used as they are.
        assert len(shown) == num_rounds
        assert sum(shown) == sum(observed) + 1
        assert re.match(r"the json_schema cannot be followed after \d+ tokens: .*items", str(failing.error))
        assert failing.finish_reason is None
        assert failing.is_finished
        assert emitted[free] == free.output_ids == script
        assert emitted[other] == other.output_ids == script
        assert emitted[failing] == failing.output_ids
        assert not target.cache

    def test_a_round_of_which_nothing_is_left_is_not_judged(self):
        script = [*ids_of('{"a": [1]}'), EOS]
        target = StubTarget(scripted_law([7], script, V), V)
        budget = AdaptiveBudget(ForwardCost((1, 2, 64), (0.02, 0.02, 0.03)), pads=True)
        drafter = ReplayDrafter({(7,): script}, 2, vocab_size=V)
        engine = SpeculativeEngine(target, drafter, num_speculative_tokens=budget, grammars=GRAMMAR_TOKENIZER)
        failing = self.sequence(Grammar.json_object())
        engine.submit(failing)
        while engine.has_work:
            budget._window.num_rounds = 9  # as after a while
            budget._pause = 0
            engine.round()
        assert "cannot be followed" in str(failing.error)

    def test_the_reader_gets_the_error_and_other_readers_their_text(self):
        script = [*ids_of('{"a": [1]}'), EOS]
        target = StubTarget(scripted_law([7], script, V), V)
        generator = Generator(target, TOKENIZER, NoDrafter(), eos_token_ids=(EOS,))
        failing = generator.open([7], SamplingParameters(grammar=Grammar.json_object()))
        free = generator.open([7], SamplingParameters())
        texts = [event.event.text for event in generator.run([free])]
        assert "".join(texts) == '{"a": [1]}'
        with pytest.raises(RequestError, match="cannot be followed"):
            list(generator.run([failing]))
        with pytest.raises(RequestError, match="cannot be followed"):
            generator.generate([7], SamplingParameters(grammar=Grammar.json_object()))


@pytest.mark.real_model
def test_real_model_writes_the_same_valid_json_with_and_without_drafts(smollm2):
    drafting = Generator(
        smollm2.target,
        smollm2.tokenizer,
        PromptLookupDrafter.build(smollm2.target, None, 16),
        eos_token_ids=tuple(smollm2.eos_token_ids),
        num_speculative_tokens=16,
    )
    prompt = 'Describe a person as JSON: {"name": "Ada", "kind": "red", "n": 3}'
    for changes in ({}, {"temperature": 0.8, "seed": 4}):
        parameters = SamplingParameters(max_new_tokens=100, grammar=GRAMMARS["schema"], **changes)
        plain = smollm2.generate(prompt, parameters)
        drafted = drafting.generate(prompt, parameters)
        assert drafted.token_ids == plain.token_ids
        assert plain.finish_reason == "stop"
        assert_of_schema(plain.text)
