from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters.phrase_trees import PhraseTrees
from paceline.heads.phrase import PhraseHead, PhraseHeadConfig
from paceline.training.fit import FitOptions, PhraseFit, start_from_frequencies
from paceline.training.losses import LOSSES
from paceline.training.samples import Samples
from paceline.vocabularies.trie import TokenTrie

ENTRIES = [(token,) for token in range(6)] + [(0, 1), (2, 3, 4)]
D = 8
NUM_FOLLOWERS = 4


def learnable(num_rows: int, seed: int) -> Samples:
    """Rows whose newest token decides the entry: easy to learn for a head that reads the right row."""
    trie = TokenTrie(ENTRIES)
    generator = torch.Generator().manual_seed(seed)
    newest = torch.randint(0, 8, (num_rows,), generator=generator)
    entries = newest % len(ENTRIES)
    return Samples(
        shards=(torch.randn(num_rows, 1, D, generator=generator).to(torch.bfloat16),),
        shard_ids=torch.zeros(num_rows, dtype=torch.int64),
        shard_rows=torch.arange(num_rows),
        newest_ids=newest,
        output_ids=torch.tensor([ENTRIES[entry][0] for entry in entries.tolist()]),
        entries=entries,
        nodes=trie.entry_nodes[entries],
        # The phrase decides what follows it; behind (0, 1) stands other text, behind (5,) nothing.
        followers=torch.tensor([1, 2, 0, 3, 1, -1, NUM_FOLLOWERS, 2])[entries],
        is_censored=torch.zeros(num_rows, dtype=torch.bool),
        answer_lens=(num_rows,),
        num_empty=0,
    )


@pytest.fixture
def fit_of(tmp_path: Path) -> Callable[..., PhraseFit]:
    def make(
        train: Samples | None = None, chain_entries: int = 0, ranking_width: int = 0, **changes: Any
    ) -> PhraseFit:
        generator = torch.Generator().manual_seed(7)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = PhraseHead(
                PhraseHeadConfig(
                    D,
                    len(ENTRIES),
                    width=16,
                    dropout=0.1,
                    chain_entries=chain_entries,
                    ranking_width=ranking_width,
                )
            )
        settings: dict[str, Any] = {"epochs": 3, "batch_size": 32, "learning_rate": 0.02, "device": "cpu"}
        return PhraseFit(
            head,
            torch.randn(8, D, generator=generator),
            train or learnable(256, 1),
            learnable(64, 2),
            TokenTrie(ENTRIES),
            ENTRIES,
            FitOptions(**{**settings, **changes}),
            tmp_path / "fit",
        )

    return make


def quiet(_: str) -> None:
    """Nothing is printed."""


@pytest.mark.parametrize("loss", LOSSES)
def test_learns_what_the_newest_token_decides(loss: str, fit_of: Callable[..., PhraseFit]) -> None:
    fit = fit_of(loss=loss, epochs=6)
    result = fit.run(say=quiet)
    assert result.history[-1].held_out_loss < 0.3 * result.history[0].train_loss
    probabilities = fit.head(fit.inputs(fit.held_out, torch.arange(64))).softmax(-1).detach()
    mass = fit.trie.node_mass(probabilities).gather(1, fit.held_out.nodes[:, None])
    assert mass.mean() > 0.5  # a head that learnt nothing has 0.14


@pytest.mark.parametrize("chain_entries", [0, NUM_FOLLOWERS])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_parameter_gets_a_gradient_and_the_target_none(
    loss: str, chain_entries: int, fit_of: Callable[..., PhraseFit]
) -> None:
    """Fault 70: no layer is skipped; the target's embeddings stay as they are, byte for byte."""
    fit = fit_of(loss=loss, chain_entries=chain_entries)
    before = fit.embedding.clone()
    rows = fit.train.trained[:64]
    sum(fit.losses(fit.train, rows)).backward()
    for name, parameter in fit.head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert fit.head.output.weight.grad is not None
    assert (fit.head.output.weight.grad.abs().sum(1) > 0).all()
    assert not fit.embedding.requires_grad
    fit.run(say=quiet)
    assert torch.equal(fit.embedding, before)


def test_the_step_learns_what_follows_a_phrase(fit_of: Callable[..., PhraseFit]) -> None:
    fit = fit_of(epochs=6, chain_entries=NUM_FOLLOWERS)
    before = fit.losses(fit.held_out, fit.held_out.trained)[1].item()
    result = fit.run(say=quiet)
    fit.head.eval()
    assert fit.losses(fit.held_out, fit.held_out.trained)[1].item() < 0.2 * before
    assert result.history[-1].held_out_loss < 0.3 * result.history[0].train_loss
    # Two phrases deep: the longest single phrase has three tokens.
    [tree] = PhraseTrees(fit.head, fit.trie, fit.token_ids, lambda ids: fit.embedding[ids]).draft(
        fit.inputs(fit.held_out, (fit.held_out.newest_ids == 7).nonzero()[:1, 0]), [7], 12
    )
    node = 0
    for token in (2, 3, 4, 2):
        [node] = ((tree.parents == node) & (tree.token_ids == token)).nonzero()[:, 0].tolist()
    assert float(tree.node_values[node]) > 0.2


def test_rows_without_a_follower_do_not_enter_its_loss(fit_of: Callable[..., PhraseFit]) -> None:
    fit = fit_of(chain_entries=NUM_FOLLOWERS)
    fit.head.eval()
    known = fit.train.trained[fit.train.followers[fit.train.trained] >= 0]
    unknown = fit.train.trained[fit.train.followers[fit.train.trained] < 0]
    assert len(known)
    assert len(unknown)
    torch.testing.assert_close(fit.losses(fit.train, fit.train.trained)[1], fit.losses(fit.train, known)[1])
    assert float(fit.losses(fit.train, unknown)[1]) == 0.0


@pytest.mark.parametrize("chain_entries", [0, NUM_FOLLOWERS])
def test_phrase_at_a_time_has_no_second_loss(chain_entries: int, fit_of: Callable[..., PhraseFit]) -> None:
    fit = fit_of(chain_entries=chain_entries)
    assert (float(fit.losses(fit.train, fit.train.trained)[1]) > 0) == bool(chain_entries)


def test_best_epoch_is_kept_and_patience_ends_the_fit(
    fit_of: Callable[..., PhraseFit], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = fit_of(epochs=9, patience=2)
    evaluate = PhraseFit._evaluate
    figures = iter([1.0, 3.0, 2.0, 2.5, 9.0])

    def scripted(self: PhraseFit, epoch: int, train_loss: float) -> Any:
        found = evaluate(self, epoch, train_loss)
        found.tokens_per_round[32] = next(figures)
        return found

    monkeypatch.setattr(PhraseFit, "_evaluate", scripted)
    states: list[torch.Tensor] = []
    save = PhraseFit._save

    def remember(self: PhraseFit, *, is_best: bool) -> None:
        states.append(self.head.output.weight.detach().clone())
        save(self, is_best=is_best)

    monkeypatch.setattr(PhraseFit, "_save", remember)
    result = fit.run(say=quiet)
    assert (result.best_epoch, len(result.history)) == (2, 4)
    torch.testing.assert_close(result.head.output.weight, states[1], rtol=0, atol=0)


def test_finished_fit_is_not_run_again(
    fit_of: Callable[..., PhraseFit], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fit_of().run(say=quiet)

    def must_not_run(*_: Any) -> float:
        raise AssertionError("an epoch ran again")

    monkeypatch.setattr(PhraseFit, "_run_epoch", must_not_run)
    again = fit_of().run(say=quiet)
    assert again.history == first.history
    torch.testing.assert_close(again.head.state_dict(), first.head.state_dict(), rtol=0, atol=0)


def test_average_of_the_weights_is_what_counts(fit_of: Callable[..., PhraseFit]) -> None:
    fit = fit_of(ema_decay=0.9, epochs=1)
    result = fit.run(say=quiet)
    last = torch.load(fit.folder / "checkpoint.pt", weights_only=True)["head"]
    assert not torch.equal(result.head.output.weight.detach(), last["output.weight"])
    torch.testing.assert_close(result.head.output.weight.detach(), fit.average["output.weight"])


def test_learning_rate_rises_then_falls_to_zero(fit_of: Callable[..., PhraseFit]) -> None:
    fit = fit_of(epochs=10)
    rates = []
    for step in range(fit.options.epochs * fit.steps_per_epoch):
        fit.num_steps = step
        rates.append(fit._schedule())
    peak = rates.index(max(rates))
    assert 0 < rates[0] < 1
    assert max(rates) == pytest.approx(1.0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.01


def test_bias_starts_at_the_frequencies() -> None:
    head = PhraseHead(PhraseHeadConfig(D, 3, width=4))
    start_from_frequencies(head, torch.tensor([0, 0, 0, 2]))
    torch.testing.assert_close(head.output.bias.exp(), torch.tensor([3.5, 0.5, 1.5]) / 5.5)


def test_order_of_the_batch_does_not_change_the_loss(fit_of: Callable[..., PhraseFit]) -> None:
    """Fault 74: samples do not touch each other, so packing changes nothing."""
    fit = fit_of()
    fit.head.eval()
    rows = fit.train.trained[:40]

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return fit.losses(fit.train, part)[0]

    together = loss_of(rows)
    apart = (loss_of(rows[:10]) * 10 + loss_of(rows[10:]) * 30) / 40
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together, loss_of(rows.flip(0)), rtol=1e-5, atol=1e-5)


def test_a_ranking_learns_what_the_head_says_and_changes_nothing_about_it(
    fit_of: Callable[..., PhraseFit], tmp_path: Path
) -> None:
    fit = fit_of(epochs=12, ranking_width=16)
    rows = torch.arange(64)
    scores = fit.model(fit.inputs(fit.held_out, rows))
    scores.ranking_loss.backward()
    trained = {name for name, parameter in fit.head.named_parameters() if parameter.grad is not None}
    assert trained == {"ranking.down.weight", "ranking.vocabulary.weight"}
    before = float(scores.ranking_loss.detach())
    for epoch in range(12):
        fit._run_epoch(epoch, None)
    fit.head.eval()
    after = fit.model(fit.inputs(fit.held_out, rows))
    with torch.no_grad():
        assert float(fit.model(fit.inputs(fit.held_out, rows)).ranking_loss) == 0
        ranking = fit.head.ranking_scores(fit.head.trunk(fit.inputs(fit.held_out, rows)))
    assert float(after.ranking_loss) < before
    assert (ranking.argmax(-1) == after.phrases.argmax(-1)).float().mean() > 0.9
    fit.options = replace(fit.options, epochs=1)
    fit.run(say=quiet)
    assert "ranking.down.weight" in load_file(tmp_path / "fit" / "best.safetensors")
