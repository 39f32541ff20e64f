"""Rows that see nothing, little, or are not there."""

import numpy as np
import pytest
from place import call, check, everywhere, problem, same

import strata_pa
from strata_pa import reference


@everywhere
def test_widths_of_zero_and_rows_of_nothing(where):
    """Rows without a cell are +0.0 and -inf, and their neighbours are what they are alone."""
    p = problem(where, n_q=6)
    ids = np.random.default_rng(1).integers(0, 34, (6, 3)).astype(np.int32)
    ids[4] = -1
    widths = np.array([0, 3, 0, 1, 3, 3], np.int32)
    out, lse = check(where, p, ids=ids, widths=widths)
    assert (lse == -np.inf).all(1).tolist() == [True, False, True, False, True, False]
    for row in (1, 3, 5):
        alone = p._replace(q=p.q[row : row + 1])
        got = call(where, alone, kv_len=40 - 5 + row, ids=ids[row : row + 1], widths=widths[row : row + 1])
        assert same(got, (out[row : row + 1], lse[row : row + 1]))


@everywhere
@pytest.mark.parametrize("n_q", [1, 2, 3, 5, 7, 13, 17, 31, 33])
def test_every_row_is_written(where, n_q):
    """The outputs are full of NaN before the call; no number of queries is a multiple of a tile."""
    p = problem(where, n_q=n_q)
    for options in ({}, {"ids": np.full((n_q, 1), -1, np.int32)}, {"ids": np.arange(2 * n_q, dtype=np.int32).reshape(n_q, 2) % 40}):
        check(where, p, **options)


@everywhere
def test_no_queries(where):
    p = problem(where, n_q=0)
    for options in ({}, {"ids": np.zeros((0, 3), np.int32)}, {"ids": np.zeros((0, 3), np.int32), "widths": np.zeros(0, np.int32)}):
        out, lse = call(where, p, **options)
        assert (out.size, lse.size) == (0, 0)


@everywhere
@pytest.mark.parametrize("kv_len", [0, 1, 2])
def test_few_cells(where, kv_len):
    """With more queries than cells, the first rows sit before cell 0."""
    _, lse = check(where, problem(where), kv_len=kv_len)
    assert (lse == -np.inf).all(1).sum() == 5 - kv_len
    check(where, problem(where), kv_len=kv_len, causal=False)
    check(where, problem(where), kv_len=kv_len, ids=np.zeros((5, 2), np.int32))


@everywhere
def test_no_pages(where):
    p = problem(where)
    nowhere = p.with_kv(page_table=np.full_like(p.kv.page_table, -1))
    _, lse = check(where, nowhere)
    assert (lse == -np.inf).all()
    check(where, nowhere, ids=np.zeros((5, 3), np.int32))


@everywhere
def test_only_its_own_cell(where):
    """The softmax of one score is 1: the row is the cell's value."""
    p = problem(where)
    for options in ({"window_left": 0}, {"ids": np.arange(35, 40, dtype=np.int32)[:, None]}):
        out, _ = check(where, p, **options)
        values = p.kv.v.astype(np.float64) * p.kv.v_scale.astype(np.float64).repeat(p.kv.v.shape[3] // p.kv.v_scale.shape[3], 3)
        own = np.stack([values[p.kv.page_table[c // 4], :, c % 4] for c in range(35, 40)]).repeat(where.shape.heads_per_kv, 1)
        assert np.abs(out - own).max() <= where.bound * np.abs(own).max()


@everywhere
def test_a_window_that_reaches_no_listed_cell(where):
    p = problem(where)
    _, lse = check(where, p, ids=np.array([[0, 1]] * 5, np.int32), window_left=3)
    assert (lse == -np.inf).all()


def test_float64_itself():
    """The referee of these tests, by hand: two cells of equal scores, values 1 and 3."""
    kv = strata_pa.PagedKV(
        np.zeros((1, 1, 2, 64), np.int8), np.broadcast_to(np.array([1, 3], np.int8)[:, None], (1, 1, 2, 64)).copy(),
        np.ones((1, 1, 2, 1), np.float16), np.ones((1, 1, 2, 1), np.float16), np.zeros(1, np.int32),
    )  # fmt: skip
    out, lse = reference.attention_float64(np.ones((2, 1, 64), np.float32), kv, return_lse=True)
    assert (out[0], out[1]) == (pytest.approx(np.ones((1, 64))), pytest.approx(np.full((1, 64), 2.0)))
    assert lse.ravel().tolist() == pytest.approx([0, np.log(2)])
