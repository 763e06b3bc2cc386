"""Public faults, group H: what a draft head's outputs mean is stored, checked and never guessed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import PROMPTS
from paceline.drafters.phrase import PhraseDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.engine.generator import Generator
from paceline.errors import CheckpointError
from paceline.heads.checkpoint import load_head, save_head
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.sampling import SamplingParameters
from paceline.targets.huggingface import HuggingFaceTarget
from paceline.testing import TINY_ARCHITECTURES, ReplayDrafter, greedy_oracle
from paceline.tree import DraftTree
from paceline.vocabularies.phrases import PhraseVocabulary

NUM_NEW = 20


@pytest.fixture
def folder(phrase_head_of, tmp_path):
    """A head folder of our own, to be damaged; one phrase at a time, so that the order only names outputs."""
    loaded = load_head(phrase_head_of("llama"))
    head = PhraseHead(replace(loaded.config, chain_entries=0))
    head.load_state_dict({n: t for n, t in loaded.head.state_dict().items() if not n.startswith("step.")})
    save_head(tmp_path / "head", head, loaded.vocabulary, loaded.provenance, "A head.")
    return tmp_path / "head"


def change_entries(folder, change):
    """Rewrite the entries of phrases.json."""
    path = folder / "phrases.json"
    document = json.loads(path.read_text())
    document["entries"] = change(document["entries"])
    path.write_text(json.dumps(document))


def drafts_of(target, tokenizer, folder):
    """All trees that a head drafts for a prompt, as lists of tokens and parents."""
    drafter = PhraseDrafter.build(target, folder, 16)
    generator = Generator(target, tokenizer, drafter, num_speculative_tokens=16)
    generator.open(PROMPTS[2], SamplingParameters(max_new_tokens=NUM_NEW))
    trees = []
    while generator.engine.has_work:
        trees += [outcome.tree for outcome in generator.engine.round()]
    return [(tree.token_ids.tolist(), tree.parents.tolist()) for tree in trees]


def test_entries_survive_saving_and_loading_in_order(phrase_head_of, folder):
    """Row 51: an output stands for the same tokens after a round trip; ids are distinct and in range."""
    before, after = load_head(phrase_head_of("llama")), load_head(folder)
    assert after.vocabulary == before.vocabulary
    assert len(set(after.vocabulary.token_ids)) == len(after.vocabulary) == after.config.num_entries
    assert all(0 <= i < 96 for ids in after.vocabulary.token_ids for i in ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: [], "at least one phrase"),
        (lambda entries: entries[:-1], "149 entries, the head has 150"),
        (lambda entries: [*entries[:-1], entries[0]], "listed twice"),
        (lambda entries: [[text, [], count] for text, _, count in entries], "has no tokens"),
        (lambda entries: [[text, None, count] for text, _, count in entries], "list of token ids"),
        (lambda entries: [["?", [96], 1], *entries[1:]], "token id 96"),
        (lambda entries: [["?", [-1], 1], *entries[1:]], "list of token ids"),
    ],
    ids=["none", "one fewer", "twice", "empty", "null", "above", "negative"],
)
def test_a_map_that_is_missing_or_wrong_is_an_error_at_load(change, message, folder, target_of):
    """Rows 51 and 55: an absent, short, repeated or out-of-range entry never reaches a draft."""
    change_entries(folder, change)
    with pytest.raises(CheckpointError, match=message):
        PhraseDrafter.build(target_of("llama"), folder, 16)


def test_a_head_without_its_map_is_refused(folder, target_of):
    """Row 51: no identity map is assumed, even where the sizes would fit."""
    (folder / "phrases.json").unlink()
    with pytest.raises(CheckpointError, match=r"phrases\.json missing"):
        PhraseDrafter.build(target_of("llama"), folder, 16)


def test_order_of_the_entries_is_part_of_the_map(folder, target_of, tokenizer):
    """Row 51: as many entries in another order mean other drafts: the file's order is obeyed."""
    before = drafts_of(target_of("llama"), tokenizer, folder)
    change_entries(folder, lambda entries: entries[::-1])
    path = folder / "model.safetensors"
    assert drafts_of(target_of("llama"), tokenizer, folder) != before
    tensors = load_file(path)
    tensors["output.weight"] = tensors["output.weight"].flip(0).contiguous()
    tensors["output.bias"] = tensors["output.bias"].flip(0).contiguous()
    save_file(tensors, path)
    assert drafts_of(target_of("llama"), tokenizer, folder) == before


def test_a_saved_head_drafts_as_before(phrase_head_of, tmp_path, target_of, tokenizer):
    """Row 52: after zero steps of training, map and drafts are identical."""
    loaded, folder = load_head(phrase_head_of("llama")), tmp_path / "again"
    loaded.head.train()
    save_head(folder, loaded.head, loaded.vocabulary, loaded.provenance, "Again.")
    target = target_of("llama")
    assert drafts_of(target, tokenizer, folder) == drafts_of(target, tokenizer, phrase_head_of("llama"))


@pytest.fixture(scope="module")
def padded():
    """Model and target whose embedding is padded to 128 rows beyond the tokenizer's 96."""
    settings = {**TINY_ARCHITECTURES["llama"][2], "vocab_size": 128}
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(15.0)
        # A trained model gives its padding rows no chance.
        model.lm_head.weight[96:] = model.lm_head.weight[:96].mean(dim=0)
    return HuggingFaceTarget(model)


class BeyondDrafter(ReplayDrafter):
    """Every second draft is an id that only a wider head has."""

    def _tree(self, sequence):
        done = len(sequence.output_ids)
        rest = self.recorded[tuple(sequence.prompt_ids)][done : done + 2]
        paths = [[*rest, 128, 5], [128, *rest], [*rest[:1], 200], [-1]]
        return DraftTree.from_paths(sequence.last_token_id, paths)


def test_tokens_beyond_the_targets_head_are_cut_before_the_forward(padded, tokenizer):
    """Row 54: a drafter with more rows than the target: the common part is used, the rest never proposed."""
    prompt = tuple(PROMPTS[1])
    expected = greedy_oracle(padded.model, prompt, NUM_NEW)
    generator = Generator(padded, tokenizer, BeyondDrafter({prompt: expected}, 2))
    answer = generator.open(list(prompt), SamplingParameters(max_new_tokens=NUM_NEW))
    num_accepted = 0
    while generator.engine.has_work:
        for outcome in generator.engine.round():
            assert 0 <= int(outcome.tree.token_ids.min()) <= int(outcome.tree.token_ids.max()) < 128
            num_accepted += len(outcome.result.path)
    assert answer.sequence.output_ids == expected
    assert num_accepted >= NUM_NEW // 2


def test_padding_rows_are_never_drafted(padded, tokenizer):
    """Row 54: a target padded beyond its tokenizer; phrases and copies hold tokens of the tokenizer only."""
    expected = [greedy_oracle(padded.model, prompt, NUM_NEW) for prompt in PROMPTS]
    vocabulary = PhraseVocabulary.mine(expected * 2, tokenizer, num_entries=100, criterion="count")
    torch.manual_seed(0)
    config = PhraseHeadConfig(32, len(vocabulary), width=8)
    loaded = load_saved(config, vocabulary)
    for drafter in (PhraseDrafter(padded, loaded), PromptLookupDrafter()):
        generator = Generator(padded, tokenizer, drafter)
        answers = [generator.open(prompt, SamplingParameters(max_new_tokens=NUM_NEW)) for prompt in PROMPTS]
        while generator.engine.has_work:
            for outcome in generator.engine.round():
                assert int(outcome.tree.token_ids.max()) < 96
        assert [answer.sequence.output_ids for answer in answers] == expected


def load_saved(config, vocabulary):
    """A random head, as if it had been loaded."""
    from paceline.heads.checkpoint import LoadedHead

    return LoadedHead(PhraseHead(config).eval(), vocabulary, config, {"target_fingerprint": ""})


@pytest.mark.parametrize("num_rows", [60, 72, 94])
def test_phrases_beyond_the_targets_rows_are_refused_at_load(num_rows, phrase_head_of):
    """Rows 54 and 55: head and phrases of a wider tokenizer on a target with fewer rows."""
    settings = {**TINY_ARCHITECTURES["llama"][2], "vocab_size": num_rows}
    target = HuggingFaceTarget(LlamaForCausalLM(LlamaConfig(**settings)).eval())
    loaded = load_head(phrase_head_of("llama"))
    largest = max(max(ids) for ids in loaded.vocabulary.token_ids)
    assert largest >= num_rows
    with pytest.raises(CheckpointError, match=f"token id {largest}, the target has ids 0 to {num_rows - 1}"):
        PhraseDrafter(target, loaded)
