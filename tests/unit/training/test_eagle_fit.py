"""An EAGLE fit on tiny models: it learns, goes on where it stopped, and touches nothing that is frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.errors import CheckpointError, ConfigError
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.training import eagle_fit, eagle_texts
from paceline.training.capture import Conversation
from paceline.training.eagle_batch import build_batch
from paceline.training.eagle_fit import EagleFit, EagleFitOptions
from paceline.training.eagle_states import CachedStates, OnlineStates
from paceline.training.eagle_texts import batches, padded, read_texts
from paceline.training.loops import loop_start
from paceline.training.shards import Answer, write_shard
from paceline.vocabularies.output_layer import OutputLayer
from paceline.vocabularies.speculative import VocabularyRanking

OPTIONS = EagleFitOptions(epochs=3, learning_rate=5e-3, batch_tokens=96, num_steps=3)


@pytest.fixture(scope="module")
def texts(target_of, oracle_of):
    """Greedy answers of the tiny target behind short prompts."""
    found = []
    for start in range(3, 27):
        prompt = [start, (start * 7) % 90 + 3, 5]
        ids = torch.tensor([*prompt, *oracle_of("llama", tuple(prompt), 20)])
        found.append(Conversation(ids, torch.arange(len(ids)) >= 3))
    return found


def layer_of(target) -> OutputLayer:
    return OutputLayer(target.model.get_output_embeddings().weight.detach())


def fit_of(target, texts, folder, options=OPTIONS, **extra) -> EagleFit:
    size = target.hidden_size
    torch.manual_seed(0)
    head = EagleHead(EagleConfig("eagle3", size, size, 48, 4, 2, 8, feature_layers=(0, 1)))
    return EagleFit(head, target, layer_of(target), texts[:20], texts[20:], options, folder, **extra)


def test_a_batch_pairs_features_with_the_token_behind_and_the_one_to_predict(target_of, texts):
    """Row 66 of the public faults: every assistant token is predicted once, and no prompt token."""
    target = target_of("llama")
    batch = build_batch(target, texts[:2], OnlineStates(target, (0, 1)).states(texts[:2]))
    ids, width = texts[0].token_ids, batch.embedding.shape[1]
    assert batch.next_ids[0, : len(ids) - 2].tolist() == ids[2:].tolist()
    assert batch.is_learned[0, : len(ids) - 2].tolist() == [i + 2 >= 3 for i in range(len(ids) - 2)]
    torch.testing.assert_close(batch.embedding[0, 0], target.embedding(ids[1:2])[0])
    with torch.no_grad():
        states = target.model(input_ids=ids[None], output_hidden_states=True)
    torch.testing.assert_close(
        batch.features[0, 4, 1].float(), states.hidden_states[1][0, 4], rtol=0.02, atol=0.02
    )
    # Row 65: what the teacher says at a pair is the target's own next token.
    logits = layer_of(target).all_logits(batch.teacher[0].float())
    agreed = (logits.argmax(-1) == batch.next_ids[0])[batch.is_learned[0]]
    assert agreed.float().mean() > 0.9
    assert width == max(len(text.token_ids) for text in texts[:2]) - 2


def test_the_head_learns_what_the_target_says(target_of, texts, tmp_path):
    target = target_of("llama")
    before = [parameter.clone() for parameter in target.model.parameters()]
    said = []
    fit = fit_of(target, texts, tmp_path / "fit", replace(OPTIONS, epochs=30, learning_rate=1e-2))
    # Random models write what cannot be foreseen, but it can be learned by heart.
    fit.train = fit.held_out = texts[:6]
    history = fit.run(say=said.append)
    assert len(said) == len(history) == 30
    assert history[-1].train_loss < 0.75 * history[0].train_loss
    assert history[-1].held_out_loss < history[0].held_out_loss
    assert history[-1].agreement[0] > 0.6 > history[0].agreement[0]
    assert 1.6 < history[-1].acceptance_length <= 4
    # Row 70: every part has learned, and the target is what it was.
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in fit.head.parameters()
    )
    for old, parameter in zip(before, target.model.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.grad is None


def test_an_interrupted_fit_ends_as_an_uninterrupted_one(target_of, texts, tmp_path):
    target = target_of("llama")
    whole = fit_of(target, texts, tmp_path / "whole")
    whole.run(say=lambda _: None)

    class StoppedError(Exception):
        pass

    def stop_in_the_second_epoch(num_steps):
        if num_steps == len(first._groups(0)) + 1:
            raise StoppedError

    first = fit_of(target, texts, tmp_path / "parts")
    with pytest.raises(StoppedError):
        first.run(stop_in_the_second_epoch, say=lambda _: None)
    second = fit_of(target, texts, tmp_path / "parts")
    second.run(say=lambda _: None)
    assert second.history == whole.history
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(second.head.state_dict()[name], tensor), name
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == ["checkpoint.pt"]


def test_every_text_is_learned_in_every_epoch_and_once(target_of, texts, tmp_path, monkeypatch):
    """How many steps an epoch has depends on how its texts were shuffled."""
    target = target_of("llama")
    lengths = torch.randint(6, 24, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    own = [Conversation(t.token_ids[:n], t.is_answer[:n]) for t, n in zip(texts, lengths, strict=False)]
    monkeypatch.setattr(eagle_texts, "LENGTH_STEP", 100)
    fit = fit_of(target, own, tmp_path / "fit", replace(OPTIONS, epochs=5, batch_tokens=70, num_steps=1))
    fit.train = own
    sizes = [len(fit._groups(epoch)) for epoch in range(5)]
    assert len(set(sizes)) > 1, "the case in question"
    fit.total_steps = sum(sizes)
    seen = []
    build = fit._batch

    def counted(asked):
        seen.append([len(text.token_ids) for text in asked])
        return build(asked)

    monkeypatch.setattr(fit, "_batch", counted)
    monkeypatch.setattr(fit, "held_out", [])
    steps = []
    fit.run(steps.append, say=lambda _: None)
    assert steps == list(range(1, sum(sizes) + 1))
    start = 0
    for size in sizes:
        learned = [n for group in seen[start : start + size] for n in group]
        assert sorted(learned) == sorted(lengths), "an epoch left texts out"
        start += size


def test_a_fit_goes_on_in_the_middle_of_an_epoch(target_of, texts, tmp_path, monkeypatch):
    """Epochs may be longer than anybody can wait: nothing but the steps since the last save is lost."""
    target = target_of("llama")
    whole = fit_of(target, texts, tmp_path / "whole")
    whole.run(say=lambda _: None)
    monkeypatch.setattr(eagle_fit, "SAVE_SECONDS", -1.0)
    first = fit_of(target, texts, tmp_path / "parts")
    stop_at = len(first._groups(0)) + 2

    class StoppedError(Exception):
        pass

    def stop(num_steps):
        if num_steps == stop_at:
            raise StoppedError

    with pytest.raises(StoppedError):
        first.run(stop, say=lambda _: None)
    steps = []
    second = fit_of(target, texts, tmp_path / "parts")
    second.run(steps.append, say=lambda _: None)
    assert steps[0] == stop_at + 1, "the step that was saved is not done twice"
    assert second.history == whole.history
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(second.head.state_dict()[name], tensor), name


def test_a_share_of_the_positions_learns_in_every_step(target_of, texts, tmp_path):
    target = target_of("llama")
    fit = fit_of(target, texts, tmp_path / "part", replace(OPTIONS, loss_fraction=0.25))
    batch = build_batch(target, texts[:8], fit.states.states(texts[:8]))
    few = [found.num_tokens for found in fit.losses(batch)]
    again = [found.num_tokens for found in fit.losses(batch)]
    fit.num_steps += 1
    later = [found.num_tokens for found in fit.losses(batch)]
    with torch.no_grad():
        held_out = [found.num_tokens for found in fit.losses(batch)]
    assert few == again != later, "another draw for another step, the same one for the same"
    assert few == sorted(few, reverse=True), "the steps share positions, less those at the front"
    assert all(0.1 * all_ < part < 0.45 * all_ for part, all_ in zip(few, held_out, strict=True))
    fit.num_steps = 0
    history = fit.run(say=lambda _: None)
    assert history[-1].held_out_loss < history[0].held_out_loss


def test_states_on_disk_are_those_of_the_target_and_read_once(target_of, texts, tmp_path):
    online = OnlineStates(target_of("llama"), (0, 1))
    wanted = online.states(texts[:4])

    class Counting:
        num_texts = 0

        def states(self, asked):
            self.num_texts += len(asked)
            return online.states(asked)

    source = Counting()
    cached = CachedStates(source, tmp_path / "states")
    cached.states(texts[1:3])
    for found, want in zip(cached.states(texts[:4]), wanted, strict=True):
        # Several texts at once or one by one: the same numbers up to bf16's last bit.
        torch.testing.assert_close(found, want, rtol=0.01, atol=0.01)
    assert source.num_texts == 4
    assert len(list((tmp_path / "states").iterdir())) == 4
    CachedStates(source, tmp_path / "states").states(texts[:4])
    assert source.num_texts == 4, "another run finds them"
    next((tmp_path / "states").iterdir()).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        cached.states(texts[:4])


def test_a_fit_on_states_from_the_disk_ends_with_the_same_weights(target_of, texts, tmp_path):
    target = target_of("llama")
    options = replace(OPTIONS, epochs=1)
    online = fit_of(target, texts, tmp_path / "online", options)
    online.run(say=lambda _: None)
    states = CachedStates(OnlineStates(target, (0, 1)), tmp_path / "states")
    cached = fit_of(target, texts, tmp_path / "cached", options, states=states)
    cached.run(say=lambda _: None)
    for name, tensor in online.head.state_dict().items():
        torch.testing.assert_close(cached.head.state_dict()[name], tensor, rtol=0.02, atol=0.002)


def test_texts_without_a_token_to_learn_are_left_out_and_no_loss_is_no_number(target_of, texts, tmp_path):
    """Row 67 of the public faults: a mean over nothing."""
    target = target_of("llama")
    fit = fit_of(target, texts, tmp_path / "fit", replace(OPTIONS, epochs=1, batch_tokens=8))
    before = {name: tensor.clone() for name, tensor in fit.head.state_dict().items()}
    # Nothing of the answer lies behind the second token: pairs begin there.
    fit.train = [Conversation(text.token_ids[:4], torch.zeros(4).bool()) for text in texts[:3]]
    fit.total_steps = len(fit._groups(0))
    history = fit.run(say=lambda _: None)
    assert history[0].train_loss == 0.0
    assert torch.tensor(history[0].held_out_loss).isfinite()
    for name, tensor in fit.head.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_answers_that_teach_nothing_are_not_read(tmp_path):
    """Row 67: cut off, empty, or of one token behind a prompt of one."""
    prompts = {
        "whole": ([1, 2, 3], [4, 5]),
        "empty": ([1, 2, 3], []),
        "short": ([1], [2]),
        "cut": ([1] * 9, [2]),
    }
    answers = [
        Answer(
            key, key, "x", torch.tensor(prompt), torch.tensor(output), torch.zeros(len(output), 1, 4), True
        )
        for key, (prompt, output) in prompts.items()
    ]
    answers = [a for a in answers if len(a.output_ids)]
    write_shard(tmp_path / "shard-0-00000.safetensors", answers)
    found = read_texts(tmp_path, lambda _: True, max_len=8)
    assert [text.token_ids.tolist() for text in found] == [[1, 2, 3, 4, 5]]
    assert found[0].is_answer.tolist() == [False, False, False, True, True]
    with pytest.raises(ConfigError, match="no recorded answer has a token to learn"):
        read_texts(tmp_path, lambda answer: answer.key == "cut", max_len=8)


def test_loops_are_cut_off_where_they_begin(tmp_path):
    ids = torch.tensor([*range(10), *[3, 4, 5, 6, 7, 8, 9, 10] * 9])
    answer = Answer("a", "a", "x", torch.tensor([1, 2]), ids, torch.zeros(len(ids), 1, 4), True)
    write_shard(tmp_path / "shard-0-00000.safetensors", [answer])
    whole, cut = (read_texts(tmp_path, lambda _: True, drop_loops=drop)[0] for drop in (False, True))
    assert len(whole.token_ids) == len(ids) + 2
    assert len(cut.token_ids) == loop_start(ids.tolist()) + 2 < len(whole.token_ids)


def test_a_ranking_learns_beside_the_head_and_changes_nothing_about_it(target_of, texts, tmp_path):
    target = target_of("llama")
    layer = layer_of(target)
    plain = fit_of(target, texts, tmp_path / "plain")
    torch.manual_seed(5)
    ranking = VocabularyRanking(target.hidden_size, layer.num_entries, 8)
    before = ranking.vocabulary.weight.detach().clone()
    ranked = fit_of(target, texts, tmp_path / "ranked", replace(OPTIONS, gradient_norm=1e9), ranking=ranking)
    plain.options = replace(OPTIONS, gradient_norm=1e9)
    plain.run(say=lambda _: None)
    ranked.run(say=lambda _: None)
    assert not torch.equal(before, ranking.vocabulary.weight)
    assert ranked.history[-1].coverage == 1.0, "fewer entries than candidates"
    for name, tensor in plain.head.state_dict().items():
        torch.testing.assert_close(ranked.head.state_dict()[name], tensor)


def test_a_reduced_vocabulary_learns_its_rows_and_leaves_other_tokens_out(target_of, texts, tmp_path):
    target = target_of("llama")
    layer = layer_of(target)
    ids = torch.arange(0, layer.num_entries, 2)
    rows = torch.nn.Linear(target.hidden_size, len(ids), bias=False)
    with torch.no_grad():
        rows.weight.copy_(layer.weight[ids])
    fit = fit_of(target, texts, tmp_path / "fit", own_rows=rows, own_ids=ids)
    batch = build_batch(target, texts[:4], OnlineStates(target, (0, 1)).states(texts[:4]))
    learned = next(iter(fit.losses(batch))).num_tokens
    teacher = layer.all_logits(batch.teacher.to(layer.weight.dtype)).argmax(-1)
    assert learned == int((batch.is_learned & (teacher % 2 == 0)).sum())
    fit.run(say=lambda _: None)
    assert not torch.equal(rows.weight, layer.weight[ids])


def test_damaged_checkpoints_are_refused(target_of, texts, tmp_path):
    target = target_of("llama")
    fit_of(target, texts, tmp_path / "fit", replace(OPTIONS, epochs=1)).run(say=lambda _: None)
    (tmp_path / "fit" / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be gone on from"):
        fit_of(target, texts, tmp_path / "fit", replace(OPTIONS, epochs=1)).run()


def test_a_fit_of_other_texts_or_options_is_not_gone_on_from(target_of, texts, tmp_path):
    target = target_of("llama")
    fit_of(target, texts, tmp_path / "fit", replace(OPTIONS, epochs=1)).run(say=lambda _: None)
    with pytest.raises(CheckpointError, match="of other texts or options"):
        fit_of(target, texts, tmp_path / "fit").run()


def test_groups_hold_every_text_once_and_as_many_tokens_as_allowed(texts):
    lengths = [3, 40, 41, 100, 7, 64]
    own = [Conversation(torch.zeros(n, dtype=torch.int64), torch.ones(n).bool()) for n in lengths]
    groups = batches(own, 96, torch.Generator().manual_seed(0))
    assert sorted(i for group in groups for i in group) == list(range(6))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= 96
    assert batches(own, 96, None) == batches(own, 96, None)


def test_parts_are_padded_behind():
    joined = padded([torch.ones(2, 3), torch.ones(1, 3)])
    assert joined.tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [0.0] * 3]]
