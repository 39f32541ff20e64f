"""What a row may not depend on: the other rows of the call, the order and size of pages, how a list is written."""

import itertools

import numpy as np
import pytest
from place import Problem, call, check, everywhere, problem, same

import strata_pa
from strata_pa import reference

PAGE_SIZES = [1, 3, 4, 16, 17, 64, 128, 784]


def repaged(p, cells, page_size, seed=0):
    """The first cells in shuffled pages of another size; what no cell fills has codes of 127 and scales of NaN."""
    size, pages = p.kv.k.shape[2], -(-cells // page_size)
    table = np.random.default_rng(seed).permutation(pages + 2)[:pages].astype(np.int32)
    c, pools = np.arange(cells), {}
    for x in ("k", "v", "k_scale", "v_scale"):
        old = getattr(p.kv, x)
        pools[x] = np.full((pages + 2, old.shape[1], page_size, old.shape[3]), 127 if x in "kv" else np.nan, old.dtype)
        pools[x][table[c // page_size], :, c % page_size] = old[p.kv.page_table[c // size], :, c % size]
    return Problem(p.q, strata_pa.PagedKV(**pools, page_table=table))


def rows(options, first, end):
    return {k: v[first:end] if k in ("ids", "widths") else v for k, v in options.items()}


@everywhere
@pytest.mark.parametrize("listed", [False, True], ids=["dense", "listed"])
def test_batch(where, listed):
    """A row alone, in a batch of 2,048, and at splits of the call."""
    n, cells = 2048, 2048 if listed else 2060
    p, rng = problem(where, n_q=n, cells=cells, page_size=4, seed=1), np.random.default_rng(2)
    options = {"window_left": 70}
    if listed:
        options = {"ids": np.sort(rng.integers(0, cells, (n, 40))).astype(np.int32), "widths": rng.integers(0, 41, n).astype(np.int32)}
    whole = call(where, p, kv_len=cells, **options)
    some = sorted({0, 1, 2, 3, n - 1, *rng.integers(0, n, 12).tolist()})
    for i in some:
        got = call(where, p._replace(q=p.q[i : i + 1]), kv_len=cells - n + i + 1, **rows(options, i, i + 1))
        assert same(got, [x[i : i + 1] for x in whole]), i
    for splits in ([1, 2047], [5, 18, 1000, 1003]):
        for first, end in zip([0, *splits], [*splits, n], strict=True):
            got = call(where, p._replace(q=p.q[first:end]), kv_len=cells - n + end, **rows(options, first, end))
            assert same(got, [x[first:end] for x in whole]), (first, end)
    assert_rows(where, p, whole, some[:6], kv_len=cells, **options)


def assert_rows(where, p, got, some, **options):
    """A few rows of the answer against float64."""
    want = reference.attention_float64(*p, rows=some, **options)
    assert np.abs(got[0][some] - want).max() <= where.bound * max(np.abs(want).max(), 1e-30)


@everywhere
def test_a_cell_named_twice_counts_twice(where):
    p = problem(where, n_q=3, seed=3)
    once = np.array([[4, 9, 11, 30], [4, 9, 11, 30], [4, 9, 11, 30]], np.int32)
    twice = np.array([[4, 9, 9, 9, 11, 30]] * 3, np.int32)
    check(where, p, ids=twice)
    weight, lse = reference.attention_float64(*p, return_lse=True, ids=np.array([[9]] * 3, np.int32))
    rest, rest_lse = call(where, p, ids=once)
    got, _ = call(where, p, ids=twice)
    total = np.logaddexp(rest_lse, lse + np.log(2))
    want = rest * np.exp(rest_lse - total)[..., None] + weight * np.exp(lse + np.log(2) - total)[..., None]
    assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max()
    every = np.array([[0, 0, 1, 1] * 20] * 3, np.int32)  # and all of them: the same weights
    assert np.abs(call(where, p, ids=every)[0] - call(where, p, ids=every[:, 1:3])[0]).max() <= 2e-6 * np.abs(want).max()


@everywhere
def test_order_of_a_list(where):
    """`exact` does not know an order; the others round in it, and stay within their bound."""
    p, rng = problem(where, n_q=4, cells=200, seed=4), np.random.default_rng(5)
    ids = np.stack([rng.choice(200, 90, replace=False) for _ in range(4)]).astype(np.int32)
    want = check(where, p, ids=np.sort(ids))
    for order in (ids, ids[:, ::-1].copy()):
        got = check(where, p, ids=order)
        assert where.kernel != "exact" or same(got, want)


@everywhere
def test_padding(where):
    """-1 past a list's end never shows; within it only where an entry's place has a meaning."""
    p, rng = problem(where, n_q=4, cells=200, seed=6), np.random.default_rng(7)
    ids = np.sort(np.stack([rng.choice(200, 60, replace=False) for _ in range(4)])).astype(np.int32)
    want = call(where, p, ids=ids)
    padded = np.full((4, 150), -1, np.int32)
    padded[:, :60] = ids
    assert same(call(where, p, ids=padded), want)
    assert same(call(where, p, ids=padded, widths=np.full(4, 60, np.int32)), want)
    spread = np.full((4, 150), -1, np.int32)
    for row in range(4):
        spread[row, np.sort(rng.choice(150, 60, replace=False))] = ids[row]
    got = check(where, p, ids=spread)
    assert where.kernel != "exact" or same(got, want)


@everywhere
@pytest.mark.parametrize("granularity", [4, 16, 64, 128])
def test_granularity(where, granularity):
    """An entry is its cells written out."""
    p, rng = problem(where, n_q=5, cells=700, seed=8), np.random.default_rng(9)
    entries = np.sort(np.stack([rng.choice(700 // granularity + 1, 4, replace=False) for _ in range(5)])).astype(np.int32)
    entries[1, 2] = -1
    cells = np.where(entries[..., None] < 0, -1, entries[..., None] * granularity + np.arange(granularity)).reshape(5, -1)
    want = call(where, p, ids=cells.astype(np.int32))
    assert same(call(where, p, ids=entries, granularity=granularity), want)
    check(where, p, ids=entries, granularity=granularity)


@everywhere
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages(where, page_size):
    """The size of pages, their order, and a last page that is full, begun, or has one cell."""
    small = page_size if page_size <= 128 else 100  # a page of 784 cells is never full here
    for cells in sorted({max(small - 1, 1), small, small + 1, 2 * small + 1}):
        base = problem(where, n_q=3, cells=cells, page_size=1, seed=page_size)
        want = call(where, base, kv_len=cells)
        p = repaged(base, cells, page_size, seed=cells)
        assert same(call(where, p, kv_len=cells), want), cells
        ids = np.arange(cells, dtype=np.int32)[None].repeat(3, 0)
        assert same(call(where, p, kv_len=cells, ids=ids), want), cells
    check(where, p, kv_len=cells)


@everywhere
def test_a_page_used_twice(where):
    """Two logical pages may be one physical page."""
    p = problem(where, n_q=3, cells=40, seed=10)
    table = p.kv.page_table.copy()
    table[7] = table[2]
    check(where, p.with_kv(page_table=table))


@everywhere
def test_chunks_of_a_prompt(where):
    """Causal chunks, each with the cache as it is then, are the whole prompt at once."""
    n = 150
    p = problem(where, n_q=n, cells=n, page_size=1, seed=11)
    want = check(where, p, kv_len=n)
    for step in (1, 32, 49):
        for first in range(0, n, step):
            end = min(first + step, n)
            got = call(where, p._replace(q=p.q[first:end]), kv_len=end)
            assert same(got, [x[first:end] for x in want]), (first, end)


@everywhere
@pytest.mark.parametrize("window", [0, 1, 511, 512, 513])
def test_windows(where, window):
    """A window masks cells: it is the list of all cells with -1 in place of those before it."""
    p = problem(where, n_q=3, cells=1040, page_size=16, seed=12)
    want = check(where, p, window_left=window)
    ids = np.arange(1040, dtype=np.int32)[None].repeat(3, 0)
    for i in range(3):
        ids[i, : max(0, 1037 + i - window)] = -1
    assert same(call(where, p, ids=ids), want)


@everywhere
def test_sequences(where):
    """Each sequence of a batch is what it is alone, whatever its neighbours are: empty, longer, of other pages."""
    counts, lengths = [3, 0, 1, 17, 2], [20, 8, 1, 17, 33]
    p = problem(where, n_q=sum(counts), cells=40 * 5, seed=13)
    tables = np.random.default_rng(14).permutation(50)[:50].reshape(5, 10).astype(np.int32)
    starts = np.cumsum([0, *counts])
    whole = check(where, p.with_kv(page_table=tables), cu_seqlens_q=starts, kv_len=lengths)
    for s, (first, end) in enumerate(itertools.pairwise(starts)):
        one = p._replace(q=p.q[first:end]).with_kv(page_table=tables[s])
        assert same(call(where, one, kv_len=lengths[s]), [x[first:end] for x in whole]), s
