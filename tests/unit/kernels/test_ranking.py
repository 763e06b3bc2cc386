"""The compiled ranking against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ShapeError
from paceline.kernels import build
from paceline.kernels.ranking import CompiledRanking


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    build.load_kernels()


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def drawn(num_rows, width, num_entries, seed, dtype):
    """Small whole numbers: products are exact in either dtype, and equal scores are common."""
    generator = torch.Generator().manual_seed(seed)
    narrow = torch.randint(-2, 3, (num_rows, width), generator=generator).float()
    table = torch.randint(-2, 3, (num_entries, width), generator=generator).to(dtype)
    return narrow, table, narrow @ table.float().T


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 300), st.integers(0, 2**31), DTYPES, st.data())
def test_every_state_gets_its_own_best_entries(num_rows, width, num_entries, seed, dtype, data):
    narrow, table, scores = drawn(num_rows, width, num_entries, seed, dtype)
    k = data.draw(st.integers(1, num_entries))
    found = CompiledRanking(table).rank(narrow, k)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(found.entry_ids, order.sort(dim=-1).values)
    share = scores.gather(1, order).logsumexp(-1) - scores.logsumexp(-1)
    torch.testing.assert_close(found.log_share, share.clamp(max=0), rtol=1e-4, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**31),
    DTYPES, st.data(),
)  # fmt: skip
def test_a_group_shares_what_any_of_its_states_wants(groups, each, width, num_entries, seed, dtype, data):
    narrow, table, scores = drawn(groups * each, width, num_entries, seed, dtype)
    k = data.draw(st.integers(1, num_entries))
    found = CompiledRanking(table).rank(narrow, k, groups)
    mass = scores.logsumexp(-1)
    best = (scores - mass[:, None]).unflatten(0, (groups, each)).amax(1)
    assert found.entry_ids.shape == (groups, k)
    for ids, own in zip(found.entry_ids, best, strict=True):
        assert (ids.diff() > 0).all()
        left_out = own.clone()
        left_out[ids] = -torch.inf
        # Masses are rounded in another order, so entries that tie may change places.
        assert k == num_entries or own[ids].min() >= left_out.max() - 1e-4
    share = scores.gather(1, found.entry_ids.repeat_interleave(each, 0)).logsumexp(-1) - mass
    torch.testing.assert_close(found.log_share, share.clamp(max=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_as_long_as_a_vocabulary(dtype):
    generator = torch.Generator().manual_seed(0)
    narrow = (torch.randn(10, 80, generator=generator) * 3).to(dtype).float()
    table = torch.randn(49_157, 80, generator=generator).to(dtype)
    scores = narrow @ table.float().T
    found = CompiledRanking(table).rank(narrow, 2048, 1)
    best = (scores - scores.logsumexp(-1, keepdim=True)).amax(0)
    edge = best.sort(descending=True).values[2047]
    assert best[found.entry_ids[0]].min() > edge - 1e-3
    share = scores[:, found.entry_ids[0]].logsumexp(-1) - scores.logsumexp(-1)
    torch.testing.assert_close(found.log_share, share, rtol=1e-3, atol=1e-3)


def test_scores_far_from_zero_and_far_from_the_first_one():
    table = torch.tensor([[-400.0], [1.0], [300.0], [299.0]] + [[-1.0]] * 40)
    found = CompiledRanking(table).rank(torch.tensor([[1.0], [-1.0]]), 2)
    assert found.entry_ids.tolist() == [[2, 3], [0, 4]]
    torch.testing.assert_close(found.log_share, torch.zeros(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_groups", [None, 2])
def test_several_threads_choose_what_one_chooses_and_the_same_every_time(num_groups):
    """Chunks are dealt out as threads come by; what they add up to does not depend on that."""
    generator = torch.Generator().manual_seed(0)
    narrow, table = torch.randn(6, 20, generator=generator), torch.randn(3001, 20, generator=generator)
    before, found = torch.get_num_threads(), []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        try:
            runs = [CompiledRanking(table).rank(narrow, 40, num_groups) for _ in range(20)]
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(run.entry_ids, runs[0].entry_ids) for run in runs)
        assert all(torch.equal(run.log_share, runs[0].log_share) for run in runs)
        found.append(runs[0])
    assert torch.equal(found[0].entry_ids, found[1].entry_ids)
    torch.testing.assert_close(found[0].log_share, found[1].log_share)


def test_no_states_have_no_entries():
    found = CompiledRanking(torch.ones(7, 4)).rank(torch.ones(0, 4), 2)
    assert found.entry_ids.shape == (0, 2)
    assert found.log_share.shape == (0,)


def test_a_bias_counts():
    found = CompiledRanking(torch.zeros(40, 4), torch.arange(40.0)).rank(torch.ones(1, 4), 3)
    assert found.entry_ids.tolist() == [[37, 38, 39]]


def test_shapes_that_do_not_fit_are_refused():
    ranking = CompiledRanking(torch.ones(7, 4))
    for narrow, k, groups in (
        (torch.ones(2, 4), 8, None),
        (torch.ones(2, 5), 2, None),
        (torch.ones(3, 4), 2, 2),
    ):
        with pytest.raises(ShapeError, match="entries for states"):
            ranking.rank(narrow, k, groups)
    with pytest.raises(ShapeError, match="give fp32 or bf16"):
        CompiledRanking(torch.ones(7, 4, dtype=torch.float16))
