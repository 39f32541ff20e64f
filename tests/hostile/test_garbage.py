"""What no row sees must not show: code 127 with scales of NaN or inf in every cell that is not visible."""

import numpy as np
import pytest
from place import call, check, everywhere, problem, same

FILLS = [np.nan, np.inf, -np.inf]


def poison(p, seen, fill):
    """Every cell but `seen` [pages, n_kv, page_size], in a copy."""
    pools = {x: getattr(p.kv, x).copy() for x in ("k", "v", "k_scale", "v_scale")}
    assert not seen.all()
    for x, pool in pools.items():
        pool[~seen] = 127 if x in "kv" else fill
    return p.with_kv(**pools)


def cells_seen(p, cells_of):
    """A mask of the pool; cells_of: [(KV head, cells)]."""
    seen, size = np.zeros(p.kv.k.shape[:3], bool), p.kv.k.shape[2]
    for head, cells in cells_of:
        cells = np.asarray(cells)
        pages = p.kv.page_table[cells // size]
        cells, pages = cells[pages >= 0], pages[pages >= 0]
        seen[pages, head, cells % size] = True
    return seen


@everywhere
@pytest.mark.parametrize("fill", FILLS)
def test_beside_the_listed_cells(where, fill):
    """Unselected cells, entries past the width, -1 in the middle of a list, a page that is not resident, cells past the query."""
    p, rng = problem(where, n_q=5, cells=92, seed=3), np.random.default_rng(4)
    heads = p.kv.k.shape[1]
    ids = np.where(rng.random((5, heads, 37)) < 0.3, -1, rng.integers(0, 92, (5, heads, 37))).astype(np.int32)
    widths = np.array([37, 0, 33, 5, 1], np.int32)
    p.kv.page_table[3] = -1
    want = check(where, p, ids=ids, widths=widths)
    listed = [(h, [c for c in ids[i, h, :w] if 0 <= c <= 87 + i]) for i, w in enumerate(widths) for h in range(heads) if w]
    bad = poison(p, cells_seen(p, [(h, c) for h, c in listed if c]), fill)
    for i, w in enumerate(widths):
        ids[i, :, w:] = rng.integers(-(2**31), 2**31 - 1, ids[i, :, w:].shape)
    assert same(call(where, bad, ids=ids, widths=widths), want)


@everywhere
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("window_left", [-1, 9])
def test_beside_a_dense_call(where, fill, window_left):
    """The tail of the last page, cells before the window, pages that the table does not name, entries of the table past the last cell."""
    p = problem(where, n_q=5, cells=44, page_size=8, seed=5)
    options = {"kv_len": 41, "window_left": window_left}
    want = check(where, p, **options)
    first = 0 if window_left < 0 else 36 - window_left
    seen = cells_seen(p, [(h, np.arange(first, 41)) for h in range(p.kv.k.shape[1])])
    bad = poison(p, seen, fill)
    assert same(call(where, bad, **options), want)


@everywhere
def test_a_row_of_garbage_beside_good_ones(where):
    """A cell that one row sees and its neighbours do not makes NaN of that row alone."""
    p = problem(where, n_q=4, cells=60, seed=6)
    ids = np.arange(4 * 9, dtype=np.int32).reshape(4, 9)
    want = check(where, p, ids=ids)
    for x in ("k_scale", "v_scale"):
        pool = getattr(p.kv, x).copy()
        pool[p.kv.page_table[20 // 4], :, 20 % 4] = np.nan  # query 2's
        out, lse = call(where, p.with_kv(**{x: pool}), ids=ids)
        rows = [0, 1, 3]
        assert same((out[rows], lse[rows]), (want[0][rows], want[1][rows]))
        assert np.isnan(out[2]).all() or not where.portable
