"""EAGLE drafting: what the head's cache holds, and that a node is worth what the head says of its path."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from conftest import PROMPTS
from paceline.drafters import eagle
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.eagle_vocabularies import output_layer_of
from paceline.drafters.none import NoDrafter
from paceline.engine.generator import Generator
from paceline.engine.prefill import FixedPace
from paceline.errors import CheckpointError, ConfigError
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.eagle_folder import LoadedEagle, save_eagle
from paceline.heads.formats.eagle_checkpoint import save_speculators_eagle3
from paceline.kernels import build
from paceline.registry import drafter_class
from paceline.sampling import SamplingParameters
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.tree import check_tree
from paceline.vocabularies.full import FullVocabulary
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import SpeculativeVocabulary, VocabularyRanking
from paceline.vocabularies.static import StaticVocabulary

NUM_NEW = 24
KINDS = ("eagle3", "eagle")


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


def head_of(target, kind="eagle3") -> EagleHead:
    """Random, but loud enough to prefer some tokens."""
    size = target.hidden_size
    config = EagleConfig(kind, size, size, 48, 4, 2, 8, feature_layers=(0, 1) if kind == "eagle3" else ())
    torch.manual_seed(0)
    head = EagleHead(config).eval().requires_grad_(False)
    for parameter in head.parameters():
        parameter.mul_(2.0)
    return head


def layer_of(target) -> OutputLayer:
    return OutputLayer(target.model.get_output_embeddings().weight.detach() * 3.0)


def drafter_of(target, kind="eagle3", vocabulary=None, **shape) -> EagleDrafter:
    shape = {"least_alive": 0.0, **shape}
    return EagleDrafter(
        target, head_of(target, kind), vocabulary or FullVocabulary(layer_of(target)), **shape
    )


def generator_with(target, tokenizer, drafter, **settings) -> Generator:
    return Generator(target, tokenizer, drafter, num_speculative_tokens=24, **settings)


def vocabularies(target):
    layer = layer_of(target)
    ranking = VocabularyRanking(target.hidden_size, layer.num_entries, 8)
    return {
        "full": FullVocabulary(layer),
        "static": StaticVocabulary.of_rows(layer, torch.arange(0, layer.num_entries, 3)),
        "speculative": SpeculativeVocabulary(layer, ranking, 20),
        "speculative, shared": SpeculativeVocabulary(layer, ranking, 20, shares_candidates=True),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["full", "static", "speculative", "speculative, shared"])
@pytest.mark.parametrize("shape", [{"top_k": 4, "depth": 3}, {"top_k": 1, "depth": 5}], ids=["tree", "chain"])
def test_text_is_the_targets_with_every_vocabulary(target_of, tokenizer, oracle_of, kind, name, shape):
    target = target_of("llama")
    drafter = drafter_of(target, kind, vocabularies(target)[name], **shape)
    generator = generator_with(target, tokenizer, drafter)
    asked = SamplingParameters(max_new_tokens=NUM_NEW)
    results = generator.generate_batch([list(prompt) for prompt in PROMPTS], asked)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.token_ids) == oracle_of("llama", tuple(prompt), NUM_NEW)
    assert results[0].statistics.num_draft_tokens > 0


def committed(target, ids):
    """Features of a whole text, and the pairs that a head makes of it."""
    layers = (0, 1)
    with torch.no_grad():
        states = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return {"eagle3": torch.stack([states[i][0] for i in layers], 1), "eagle": states[-1][0][:, None]}


def path_log_prob(target, head, layer, kind, ids, path):
    """Log-probability of drafted tokens behind `ids`, by a dense forward over everything."""
    features = committed(target, ids[:-1])[kind]
    state, tokens, total = head.fuse(features), list(ids[1:]), 0.0
    for token_id in path:
        positions = torch.arange(len(state))[None]

        def causal(q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        embedding = target.embedding(torch.tensor(tokens))
        found = head(embedding[None], state[None], positions, causal)
        total += float(layer.all_logits(found.final[0, -1:]).log_softmax(-1)[0, token_id])
        # Own guesses go on from the state that was fed back, at the places of the guesses only.
        state = torch.cat([state, found.fed_back[0, -1:]])
        tokens.append(token_id)
    return total


@pytest.mark.parametrize("choosing_levels", [1, 2, 9])
def test_a_speculated_vocabulary_chooses_anew_as_often_as_asked(target_of, tokenizer, choosing_levels):
    target = target_of("llama")
    vocabulary = vocabularies(target)["speculative, shared"]
    given, real = [], vocabulary.candidates

    def watched(hidden, num_groups=1, choice=None):
        found = real(hidden, num_groups, choice)
        given.append((choice, found))
        return found

    vocabulary.candidates = watched
    drafter = drafter_of(target, vocabulary=vocabulary, top_k=2, depth=4, choosing_levels=choosing_levels)
    generator = generator_with(target, tokenizer, drafter)
    sequences = [
        generator.open(list(prompt), SamplingParameters(max_new_tokens=40)).sequence for prompt in PROMPTS
    ]
    for _ in range(2):
        generator.engine.round()
    given.clear()
    drafter.propose(sequences, 24)
    assert [choice is not None for choice, _ in given] == [
        level >= choosing_levels for level in range(len(given))
    ]
    for (choice, found), (_, before) in zip(given[1:], given, strict=False):
        if choice is not None:
            assert torch.equal(found.choice.entry_ids, before.choice.entry_ids)
            assert found.log_probs.exp().sum(-1).max() <= 1 + 1e-5
    assert len(given) == 4


def test_a_draft_ends_where_little_of_the_likelihood_is_left(target_of, tokenizer):
    target = target_of("llama")
    asked = SamplingParameters(max_new_tokens=40)

    def drafted(least_alive):
        drafter = drafter_of(target, top_k=2, depth=6, least_alive=least_alive)
        generator = generator_with(target, tokenizer, drafter)
        sequence = generator.open(list(PROMPTS[1]), asked).sequence
        for _ in range(3):
            generator.engine.round()
        (tree,) = drafter.propose([sequence], 24)
        return tree

    whole = drafted(0.0)
    assert int(whole.depths.max()) == 6
    assert int(drafted(1.1).depths.max()) == 1, "no beam holds more than everything"
    alive = [float(whole.node_values[whole.depths == d].sort().values[-2:].sum()) for d in range(1, 7)]
    ends = set()
    for least_alive in [left + 1e-4 for left in alive]:
        expected = next(depth for depth, left in enumerate(alive, start=1) if left < least_alive)
        short = drafted(least_alive)
        assert int(short.depths.max()) == expected
        kept = whole.depths <= expected
        assert torch.equal(short.token_ids, whole.token_ids[kept]), "what is drafted is drafted as before"
        ends.add(expected)
    assert len(ends) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_is_worth_the_likelihood_of_its_path(target_of, tokenizer, kind):
    target = target_of("llama")
    drafter = drafter_of(target, kind, top_k=3, depth=4)
    generator = generator_with(target, tokenizer, drafter)
    sequence = generator.open(list(PROMPTS[1]), SamplingParameters(max_new_tokens=40)).sequence
    head, layer = head_of(target, kind), layer_of(target)
    for _ in range(4):
        generator.engine.round()
    (tree,) = drafter.propose([sequence], 12)
    check_tree(tree)
    assert tree.num_draft_tokens == 12
    assert int(tree.depths.max()) > 1
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    for node in range(1, len(tree)):
        path, above = [], node
        while above:
            path.insert(0, tokens[above])
            above = parents[above]
        expected = path_log_prob(target, head, layer, kind, sequence.token_ids, path)
        assert float(tree.node_values[node].log()) == pytest.approx(expected, abs=2e-3)
    # Nothing that was left out is likelier than the least likely that is in.
    first = [float(v) for v, p in zip(tree.node_values, parents, strict=True) if p == 0]
    assert len(first) <= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefill_chunk", [512, 4])
def test_the_cache_holds_what_the_targets_features_give(target_of, tokenizer, kind, prefill_chunk):
    """Row 28 of the public faults: none of its own guesses stays; it equals a fresh start over the text."""
    target = target_of("llama")
    drafter = drafter_of(target, kind, top_k=3, depth=3)
    generator = generator_with(target, tokenizer, drafter)
    generator.engine.pace = FixedPace(prefill_chunk)
    sequence = generator.open(list(PROMPTS[2]), SamplingParameters(max_new_tokens=30)).sequence
    while len(sequence.output_ids) < 20:
        generator.engine.round()
    proposed = drafter.propose([sequence], 10)[0]
    length = drafter._cache.lengths[sequence]
    assert length == len(sequence) - 1

    fresh = drafter_of(target, kind, top_k=3, depth=3)
    fresh._keep(sequence, committed(target, sequence.token_ids[:-1])[kind], len(sequence) - 1)
    again = fresh.propose([sequence], 10)[0]
    kept, made = (d._cache._buffer[:, d._cache._lanes[sequence], :, :length] for d in (drafter, fresh))
    torch.testing.assert_close(kept, made, rtol=1e-4, atol=1e-4)
    assert torch.equal(proposed.token_ids, again.token_ids)
    torch.testing.assert_close(proposed.node_values, again.node_values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "speculative, shared"])
def test_sequences_of_a_batch_draft_as_they_do_alone(target_of, tokenizer, name):
    target = target_of("llama")
    vocabulary = vocabularies(target)[name]
    together = drafter_of(target, vocabulary=vocabulary, top_k=3, depth=4)
    generator = generator_with(target, tokenizer, together)
    asked = SamplingParameters(max_new_tokens=40)
    sequences = [generator.open(list(prompt), asked).sequence for prompt in PROMPTS]
    for _ in range(3):
        generator.engine.round()
    trees = together.propose(sequences, 10)
    for sequence, tree in zip(sequences, trees, strict=True):
        alone = drafter_of(target, vocabulary=vocabulary, top_k=3, depth=4)
        alone._keep(sequence, committed(target, sequence.token_ids[:-1])["eagle3"], len(sequence) - 1)
        (own,) = alone.propose([sequence], 10)
        assert torch.equal(tree.token_ids, own.token_ids)
        assert torch.equal(tree.parents, own.parents)
    together.release(sequences[1])
    generator.engine.release(sequences[1])
    assert set(together._features) == {sequences[0], sequences[2]}
    # Asked once more for the same round, with a lane between them gone, it says the same.
    again = together.propose([sequences[0], sequences[2]], 10)
    assert [tree.token_ids.tolist() for tree in again] == [trees[i].token_ids.tolist() for i in (0, 2)]


def test_nothing_is_drafted_before_features_are_there(target_of, tokenizer):
    target = target_of("llama")
    drafter = drafter_of(target)
    generator = generator_with(target, tokenizer, drafter)
    sequence = generator.open(list(PROMPTS[1]), SamplingParameters(max_new_tokens=4)).sequence
    assert drafter.propose([sequence], 8)[0].num_draft_tokens == 0
    generator.engine.round()
    assert drafter.propose([sequence], 8)[0].num_draft_tokens == 8
    assert drafter.propose([sequence], 0)[0].num_draft_tokens == 0


def test_shapes_that_draft_nothing_are_refused(target_of):
    with pytest.raises(ConfigError, match="top_k 0, depth None"):
        drafter_of(target_of("llama"), top_k=0)


@pytest.fixture
def folder_of(target_of, tmp_path):
    """A head folder for a tiny target."""

    def make(architecture="llama", **changes):
        target = target_of(architecture)
        ranking = VocabularyRanking(target.hidden_size, target.vocab_size, 8)
        loaded = LoadedEagle(
            head_of(target), ranking, torch.arange(0, target.vocab_size, 2), None,
            {"target_fingerprint": target.fingerprint, "coverage": 0.5},
        )  # fmt: skip
        save_eagle(tmp_path / "head", replace(loaded, **changes), "")
        return tmp_path / "head"

    return make


@pytest.mark.parametrize("name", ["full", "static", "speculative"])
def test_one_folder_serves_all_vocabularies(target_of, folder_of, name):
    drafter = drafter_class(f"eagle3:{name}").build(target_of("llama"), folder_of(), 16)
    assert type(drafter._vocabulary).__name__ == f"{name.capitalize()}Vocabulary"
    if name == "speculative":
        assert drafter._vocabulary.shares_candidates


@pytest.mark.parametrize(
    ("changes", "name", "named"),
    [
        ({"ranking": None}, "speculative", "no ranking"),
        ({"static_ids": None}, "static", "no static vocabulary"),
        ({"static_ids": torch.tensor([1, 10**6])}, "full", "token ids up to 1000000"),
        ({"static_ids": torch.tensor([1, 2]), "rows": torch.ones(2, 32)}, "full", "use vocabulary 'static'"),
    ],
)
def test_heads_without_what_a_vocabulary_needs_are_refused(target_of, folder_of, changes, name, named):
    with pytest.raises(CheckpointError, match=named):
        drafter_class(f"eagle3:{name}").build(target_of("llama"), folder_of(**changes), 16)


@pytest.mark.parametrize(("top_k", "depth"), [(1, 12), (3, 9), (2, 2)])
def test_a_tree_may_be_deeper_than_the_steps_that_were_trained(
    target_of, tokenizer, oracle_of, folder_of, top_k, depth
):
    """Row 11 of the public faults: one layer drafts any number of steps, seven were trained."""
    target = target_of("llama")
    drafter = EagleDrafter.build(target, folder_of(), 16)
    drafter.top_k, drafter.depth, drafter.least_alive = top_k, depth, 0.0
    generator = generator_with(target, tokenizer, drafter)
    asked = SamplingParameters(max_new_tokens=NUM_NEW)
    sequence = generator.open(list(PROMPTS[2]), asked).sequence
    generator.engine.round()
    tree = drafter.propose([sequence], 24)[0]
    check_tree(tree)
    assert int(tree.depths.max()) <= depth
    assert top_k > 1 or int(tree.depths.max()) == depth
    while not sequence.is_finished:
        generator.engine.round()
    assert sequence.output_ids == oracle_of("llama", tuple(PROMPTS[2]), NUM_NEW)


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere", "llama"])
def test_logits_and_embeddings_are_those_of_the_target(target_of, architecture):
    """Row 63: scaled embeddings, and logits that are scaled, soft-capped or divided."""
    target = target_of(architecture)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, target.hidden_size, generator=generator)
    wanted = target.lm_head(hidden)
    layer = replace(output_layer_of(target), score_all=None)
    ids = torch.arange(0, target.vocab_size, 3)
    torch.testing.assert_close(FullVocabulary(layer).candidates(hidden).logits, wanted, rtol=1e-5, atol=1e-5)
    static = StaticVocabulary.of_rows(layer, ids).candidates(hidden).logits
    torch.testing.assert_close(static, wanted[:, ids], rtol=1e-5, atol=1e-5)
    ranking = VocabularyRanking(target.hidden_size, target.vocab_size, 8)
    found = SpeculativeVocabulary(layer, ranking, 20).candidates(hidden)
    torch.testing.assert_close(found.logits, wanted.gather(1, found.entry_ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["gemma2", "granite"])
def test_the_head_reads_embeddings_as_the_target_scales_them(target_of, tokenizer, architecture, monkeypatch):
    """Row 63, the other half."""
    target = target_of(architecture)
    drafter = drafter_of(target, top_k=2, depth=2)
    seen = []
    forward = EagleHead.forward

    def spy(self, embedding, *rest):
        seen.append(embedding)
        return forward(self, embedding, *rest)

    monkeypatch.setattr(EagleHead, "forward", spy)
    generator = generator_with(target, tokenizer, drafter)
    sequence = generator.open([5, 9, 11], SamplingParameters(max_new_tokens=8)).sequence
    generator.engine.round()
    seen.clear()
    drafter.propose([sequence], 8)
    ids = torch.tensor(sequence.token_ids)
    with torch.no_grad():
        # What the model's own first layer reads.
        wanted = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states[0][0]
        unscaled = torch.nn.functional.embedding(ids, target.model.get_input_embeddings().weight)
    torch.testing.assert_close(seen[0][0][: len(ids) - 1], wanted[1:])
    assert not torch.allclose(wanted, unscaled), "nothing is scaled here"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_of_another_dtype_and_target_drafts_and_changes_nothing(
    target_of, tokenizer, folder_of, dtype, tmp_path
):
    """Row 64: a target that was changed since is warned of, and text stays its own."""
    model = copy.deepcopy(target_of("llama").model).to(dtype)
    target = HuggingFaceTarget(model, fingerprint="changed", check=False)
    folder = folder_of(provenance={"target_fingerprint": "as it was", "coverage": 0.5})
    asked = SamplingParameters(max_new_tokens=NUM_NEW)
    plain = Generator(target, tokenizer, NoDrafter()).generate(list(PROMPTS[2]), asked)
    for name in ("full", "static", "speculative"):
        with pytest.warns(UserWarning, match="trained for target as it was"):
            drafter = drafter_class(f"eagle3:{name}").build(target, folder, 16)
        assert drafter._head.dtype is dtype
        result = generator_with(target, tokenizer, drafter).generate(list(PROMPTS[2]), asked)
        assert result.statistics.num_draft_tokens > 0
        if dtype is torch.float32:
            assert result.token_ids == plain.token_ids


def test_heads_of_other_targets_are_refused_or_warned_of(target_of, folder_of):
    target = target_of("llama")
    with pytest.warns(UserWarning, match="the head was trained for target other"):
        EagleDrafter.build(target, folder_of(provenance={"target_fingerprint": "other"}), 16)
    wide = EagleHead(EagleConfig("eagle3", 48, 48, 48, 4, 2, 8, feature_layers=(0, 1)))
    with pytest.raises(CheckpointError, match="features of width 48"):
        EagleDrafter.build(target, folder_of(head=wide, ranking=None), 16)
    deep = EagleHead(replace(head_of(target).config, feature_layers=(0, 99)))
    with pytest.raises(CheckpointError, match=r"reads layers \[99\]"):
        EagleDrafter.build(target, folder_of(head=deep), 16)
    with pytest.raises(ConfigError, match="no EAGLE head is shipped"):
        EagleDrafter.build(target, None, 16)


def test_a_published_checkpoint_drafts_with_its_own_rows(target_of, tokenizer, oracle_of, tmp_path):
    target = target_of("llama")
    ids = torch.arange(0, target.vocab_size, 2)
    save_speculators_eagle3(
        tmp_path / "public",
        head_of(target),
        output_weight=target.output_rows.weight[ids] * 3.0,
        entry_ids=ids,
        vocab_size=target.vocab_size,
        verifier_name="t",
        verifier_architectures=(),
    )
    drafter = drafter_class("eagle3:static").build(target, tmp_path / "public", 16)
    generator = generator_with(target, tokenizer, drafter)
    result = generator.generate(list(PROMPTS[2]), SamplingParameters(max_new_tokens=NUM_NEW))
    assert list(result.token_ids) == oracle_of("llama", tuple(PROMPTS[2]), NUM_NEW)
    assert result.statistics.num_draft_tokens > 0
    assert drafter.propose([], 8) == []


def test_a_sequence_without_numbers_drafts_nothing_and_harms_no_other(target_of, tokenizer):
    """Neither its neighbours in the batch nor the next owner of its lane."""
    target = target_of("llama")
    drafter = drafter_of(target, vocabulary=vocabularies(target)["speculative, shared"], top_k=3, depth=4)
    generator = generator_with(target, tokenizer, drafter)
    asked = SamplingParameters(max_new_tokens=40)
    well, ill = (generator.open(list(prompt), asked).sequence for prompt in PROMPTS[1:])
    generator.engine.round()
    expected = drafter.propose([well], 8)[0]
    drafter._features[ill].parts[:] = [part * torch.nan for part in drafter._features[ill].parts]
    trees = drafter.propose([well, ill], 8)
    assert torch.equal(trees[0].token_ids, expected.token_ids)
    assert trees[1].num_draft_tokens == 0
    drafter.release(ill)
    other = generator.open([5, 9, 11], asked).sequence
    generator.engine.round()
    assert drafter.propose([other], 8)[0].num_draft_tokens == 8


def test_long_texts_go_through_the_head_as_they_come(target_of, tokenizer, monkeypatch):
    """Nothing piles up while nothing is drafted, and drafts are those of a fresh start."""
    monkeypatch.setattr(eagle, "CHUNK", 6)
    target = target_of("llama")
    drafter = drafter_of(target, top_k=3, depth=3)
    generator = Generator(target, tokenizer, drafter, num_speculative_tokens=0)
    sequence = generator.open(list(PROMPTS[2]), SamplingParameters(max_new_tokens=30)).sequence
    while len(sequence.output_ids) < 20:
        generator.engine.round()
        assert sum(map(len, drafter._features[sequence].parts)) < 6
    fresh = drafter_of(target, top_k=3, depth=3)
    fresh._keep(sequence, committed(target, sequence.token_ids[:-1])["eagle3"], len(sequence) - 1)
    found, expected = (d.propose([sequence], 10)[0] for d in (drafter, fresh))
    assert torch.equal(found.token_ids, expected.token_ids)
