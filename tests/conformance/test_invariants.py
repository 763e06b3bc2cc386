"""What holds after every round, for random trees, stops, batches and samplers on tiny models.

`cached_len == len - 1`; 1 to depth + 1 new tokens; node logits equal a plain forward over the path to the
node; deltas join to the text. And the whole text is what a loop without any engine writes token by token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import PROMPTS
from paceline.engine.generator import Generator
from paceline.engine.prefill import FixedPace
from paceline.sampling import SamplingParameters
from paceline.sequence import Sequence
from paceline.testing import TINY_VOCAB, greedy_oracle
from paceline.tree import DraftTree, check_tree
from paceline.verifiers.sampling import SamplingVerifier

MAX_NEW = 18
ARCHITECTURES = ("llama", "gpt2", "mistral-sliding", "gemma2")


class RandomTreeDrafter:
    """Grows random trees in which true tokens are frequent, and checks the target's logits at every node.

    Args:
        recorded: prompt ids -> what the target will write.
        seed: of the shapes.
        model: judges the logits by plain forwards.
    """

    required_features = ()

    def __init__(self, recorded, seed, model):
        self.recorded = recorded
        self.random = random.Random(seed)
        self.model = model
        self.num_nodes_checked = 0

    def propose(self, sequences, max_nodes):
        return [self._tree(sequence) for sequence in sequences]

    def release(self, sequence):
        pass

    def _tree(self, sequence):
        rest = self.recorded[tuple(sequence.prompt_ids)][len(sequence.output_ids) :]
        token_ids, parents, values, depth_on_path = [sequence.last_token_id], [-1], [1.0], {0: 0}
        for _ in range(self.random.choice([0, 1, 3, 8, 14])):
            parent = self.random.choice([*range(len(token_ids)), max(depth_on_path)])
            depth = depth_on_path.get(parent)
            is_true = depth is not None and depth < len(rest) and self.random.random() < 0.8
            # Now and then an id that no target has.
            token_id = rest[depth] if is_true else self.random.randrange(TINY_VOCAB + 3)
            if any(p == parent and t == token_id for p, t in zip(parents, token_ids, strict=True)):
                continue
            if depth is not None and depth < len(rest) and token_id == rest[depth]:
                depth_on_path[len(token_ids)] = depth + 1
            token_ids.append(token_id)
            parents.append(parent)
            values.append(values[parent] * self.random.choice([1.0, 0.9, 0.5]))
        tree = DraftTree(torch.tensor(token_ids), torch.tensor(parents), torch.tensor(values))
        check_tree(tree)
        return tree

    def observe(self, output, results):
        for i, (segment, result) in enumerate(zip(output.segments, results, strict=True)):
            if segment.tree is None or result is None:
                continue
            sequence, tree = segment.sequence, segment.tree
            rows = torch.arange(output.root_row(i), output.rows(i).stop)
            # The result has been accepted already: the root is the last token before what it added.
            before = sequence.token_ids[: len(sequence) - len(result.emitted_ids) - 1]
            own = output.logits(rows)
            expected = plain_logits(self.model, before, tree)
            error = (own - expected).norm(dim=1) / expected.norm(dim=1)
            assert float(error.max()) < 1e-4
            self.num_nodes_checked += len(tree)


def plain_logits(model, before, tree):
    """[N + 1, V] logits of plain forwards over the path to every node (padded behind, where nobody looks)."""
    table = tree.path_table
    paths = tree.token_ids[table.clamp(min=0)].clamp(min=0)
    ids = torch.cat([torch.tensor(before, dtype=torch.int64).expand(len(tree), -1), paths], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[torch.arange(len(tree)), len(before) + tree.depths]


@dataclass(frozen=True)
class Expected:
    """What a loop over single tokens writes."""

    token_ids: list[int]
    finish_reason: str
    text: str


def written_token_by_token(model, tokenizer, prompt, parameters):
    """An answer without engine, cache, drafts or incremental text."""

    def process(logits, ids):
        if len(ids) - len(prompt) < parameters.min_new_tokens:
            logits[list(parameters.eos_token_ids)] = float("-inf")
        return logits

    if parameters.is_greedy:
        stream = greedy_oracle(model, prompt, parameters.max_new_tokens, process=process)
    else:
        stream = sampled_one_by_one(model, prompt, parameters, process)
    ids = []
    for token_id in stream:
        ids.append(token_id)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found = [(text.index(stop), stop) for stop in parameters.stop if stop in text]
        if found:
            start, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            end = start + len(stop) if parameters.include_stop_string else start
            return Expected(ids, "stop", text[:end])
        if token_id in parameters.eos_token_ids and not parameters.ignore_eos:
            return Expected(ids, "stop", text)
    return Expected(ids, "length", tokenizer.decode(ids, skip_special_tokens=True))


def sampled_one_by_one(model, prompt, parameters, process):
    """Tokens that the sampling verifier draws when it is shown one row at a time."""
    sequence = Sequence(list(prompt), parameters, frozenset(), 1 << 20, seed=parameters.seed)
    for _ in range(parameters.max_new_tokens):
        ids = sequence.token_ids
        with torch.no_grad():
            row = process(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1], ids)
        tree = DraftTree.root_only(sequence.last_token_id)
        [result] = SamplingVerifier().verify([tree], row[None], [sequence])
        sequence.output_ids.append(result.next_token_id)
    return sequence.output_ids


@st.composite
def requests(draw, texts, tokenizer):
    """Parameters whose stops fall into the text that the target writes."""
    written = texts[draw(st.sampled_from(sorted(texts)))]
    text = tokenizer.decode(written, skip_special_tokens=True)
    start = draw(st.integers(0, max(len(text) - 4, 0)))
    piece = text[start : start + draw(st.integers(1, 4))]
    is_sampled = draw(st.booleans())
    return SamplingParameters(
        max_new_tokens=draw(st.integers(1, MAX_NEW)),
        min_new_tokens=draw(st.sampled_from([0, 0, 3, 9])),
        eos_token_ids=tuple(draw(st.lists(st.sampled_from(written), max_size=2))),
        ignore_eos=draw(st.sampled_from([False, False, True])),
        stop=(piece,) if piece and draw(st.booleans()) else (),
        include_stop_string=draw(st.booleans()),
        temperature=draw(st.sampled_from([0.4, 1.0])) if is_sampled else 0.0,
        top_k=draw(st.sampled_from([0, 5])) if is_sampled else 0,
        seed=draw(st.integers(0, 1000)),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_invariants_hold_after_every_round(architecture, target_of, oracle_of, tokenizer):
    target = target_of(architecture)
    texts = {tuple(p): oracle_of(architecture, tuple(p), MAX_NEW) for p in PROMPTS}

    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        asked=st.lists(requests(texts, tokenizer), min_size=1, max_size=3),
        seed=st.integers(0, 2**32),
        prefill_chunk=st.sampled_from([512, 9]),
    )
    def check(asked, seed, prefill_chunk):
        prompts = PROMPTS[: len(asked)]
        expected = [
            written_token_by_token(target.model, tokenizer, prompt, parameters)
            for prompt, parameters in zip(prompts, asked, strict=True)
        ]
        recorded = {tuple(p): e.token_ids for p, e in zip(prompts, expected, strict=True)}
        drafter = RandomTreeDrafter(recorded, seed, target.model)
        generator = Generator(target, tokenizer, drafter, num_speculative_tokens=12, max_batch_size=2)
        generator.engine.pace = FixedPace(prefill_chunk)
        assert run_and_check(generator, prompts, asked) == expected
        assert drafter.num_nodes_checked > 0
        assert not target._slots

    check()


def run_and_check(generator, prompts, asked):
    """Answer the prompts, checking what has to hold after each round; returns what was written."""
    answers = [generator.open(list(p), own) for p, own in zip(prompts, asked, strict=True)]
    by_sequence = {answer.sequence: answer for answer in answers}
    texts = dict.fromkeys(answers, "")
    results = {}
    while generator.engine.has_work:
        lengths = {sequence: len(sequence) for sequence in by_sequence}
        for outcome in generator.engine.round():
            sequence, answer = outcome.sequence, by_sequence[outcome.sequence]
            num_new = len(sequence) - lengths[sequence]
            assert 1 <= num_new <= int(outcome.tree.depths.max()) + 1
            assert num_new == len(outcome.result.emitted_ids)
            assert outcome.tree.num_draft_tokens <= generator.engine.budget.max_nodes
            cached = 0 if sequence.is_finished else len(sequence) - 1
            assert generator.target.cached_len(sequence) == cached
            event = answer.advance(outcome)
            texts[answer] += event.text
            if event.result is not None:
                results[answer] = event.result
    written = []
    for answer in answers:
        result, parameters = results[answer], answer.sequence.parameters
        assert texts[answer] == result.text
        assert result.statistics.num_output_tokens == len(result.token_ids)
        assert (result.log_probs is None) == (parameters.logprobs is None)
        if result.log_probs is not None:
            assert [entry.token_id for entry in result.log_probs] == list(result.token_ids)
        written.append(Expected(list(result.token_ids), result.finish_reason, result.text))
    return written


def test_unfinished_text_never_runs_ahead_of_its_end(generator_of, oracle_of):
    """At every point of a stream, the text so far is a beginning of the final text."""
    expected = oracle_of("llama", tuple(PROMPTS[2]), 24)
    generator = generator_of("llama")
    stop = generator.tokenizer.decode(expected[15:18], skip_special_tokens=True)
    parameters = SamplingParameters(max_new_tokens=24, stop=(stop,))
    whole = generator.generate(PROMPTS[2], replace(parameters)).text
    so_far = ""
    for event in generator.stream(PROMPTS[2], parameters):
        so_far += event.text
        assert whole.startswith(so_far)
    assert so_far == whole
