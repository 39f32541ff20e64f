"""Numbers at the edges of their types."""

import numpy as np
import pytest
from place import Shape, call, check, everywhere, problem, same

SCALES = [0.0, 2.0**-24, 2.0**-14, 1.0, 65504.0]


@everywhere
@pytest.mark.parametrize("pool", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", SCALES)
def test_scales(where, pool, scale):
    """Of all cells, and of one group in some cells; q is such that scores stay near 1."""
    p = problem(where, n_q=5, cells=50, seed=1)
    quiet = np.float32(min(1, 1 / (64 * scale)) if pool == "k_scale" and scale else 1)
    p = p._replace(q=p.q * quiet)
    getattr(p.kv, pool)[...] = scale
    check(where, p)
    p = problem(where, n_q=5, cells=50, seed=2)
    getattr(p.kv, pool)[::2, :, 1, 0] = scale
    check(where, p._replace(q=p.q * quiet))


@everywhere
def test_groups_of_zeros_and_constants(where):
    p = problem(where, n_q=5, cells=50, seed=3)
    group = where.shape.group
    p.kv.k[..., :group] = 0
    p.kv.v[..., group:] = 0
    check(where, p)
    p.kv.k[...] = 77
    p.kv.v[..., :group] = -5
    check(where, p)
    q = p.q.copy()
    q[1] = 0
    q[2, :, :group] = 0
    check(where, p._replace(q=q))


@everywhere
@pytest.mark.parametrize("code", [-128, 127])
def test_one_code_everywhere(where, code):
    """The largest sums that codes can make; the mean of equal values is that value."""
    p = problem(where, n_q=3, cells=300, seed=4)
    p.kv.k[...] = code
    p.kv.v[...] = code
    p.kv.v_scale[...] = 1
    out, _ = check(where, p)
    assert np.abs(out - code).max() <= 1e-6 * 128
    q = np.sign(p.q) * np.float32(1 / 64)
    check(where, p._replace(q=q))


@everywhere
def test_every_code(where):
    """All 256 codes in K and V, each against each sign and size of q."""
    p = problem(where, n_q=3, cells=256, seed=5)
    codes = np.arange(-128, 128).astype(np.int8)
    for x in ("k", "v"):
        pool = getattr(p.kv, x)
        for c in range(256):
            pool[p.kv.page_table[c // 4], :, c % 4] = np.roll(codes, c)[: pool.shape[3]] if x == "k" else codes[c]
    check(where, p, causal=False)
    p.q[...] = 0  # equal weights: sums of codes alone
    p.kv.v_scale[...] = 1
    out, _ = check(where, p, causal=False)
    assert np.abs(out - codes.astype(np.float64).mean()).max() <= 1e-6 * 128


@everywhere
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e4, 1e30])
def test_sizes_of_q(where, size):
    p = problem(where, n_q=5, cells=50, seed=6)
    check(where, p._replace(q=p.q * np.float32(size)))


@everywhere
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_row_that_is_not_finite(where, value):
    p = problem(where, n_q=9, cells=60, seed=7)
    want = check(where, p)
    q = p.q.copy()
    q[4, 1, 3] = value
    out, lse = call(where, p._replace(q=q))
    others = np.arange(9) != 4
    assert same((out[others], lse[others]), (want[0][others], want[1][others]))
    if where.portable:  # the published kernels scale the heads of a KV head together
        assert np.isnan(out[4, 1]).all()
        assert np.isnan(lse[4, 1])
        heads = np.arange(q.shape[1]) != 1
        assert same((out[4, heads], lse[4, heads]), (want[0][4, heads], want[1][4, heads]))
    else:
        assert np.isnan(out[4, 1]).any()


def with_scores(where, scores, seed=8):
    """One query with the given scores (a code for the sign, a scale for the size), and values that do not cancel."""
    p = problem(where, n_q=1, cells=len(scores), page_size=1, seed=seed)
    np.maximum(p.kv.v, -p.kv.v, out=p.kv.v)  # -128 stays
    p.kv.v[p.kv.v < 0] = 127
    dim = p.q.shape[2]
    p.q[...] = 1
    for c, s in enumerate(scores):
        page = p.kv.page_table[c]
        p.kv.k[page] = np.sign(s)
        p.kv.k_scale[page] = abs(s) / np.sqrt(dim)
    return p


@everywhere
def test_scores_around_minus_20(where):
    """Nothing may take 0 for the greatest score."""
    _, lse = check(where, with_scores(where, np.linspace(-20.5, -19.5, 70)))
    assert (lse < -14).all()


@everywhere
@pytest.mark.parametrize("place", [0, 33, 69])
def test_one_score_far_above_the_rest(where, place):
    scores = np.full(70, -3.0)
    scores[place] = 60
    p = with_scores(where, scores)
    out, _ = check(where, p)
    page = p.kv.page_table[place]
    value = p.kv.v[page, :, 0].astype(np.float64) * p.kv.v_scale[page, :, 0].astype(np.float64).repeat(where.shape.group, 1)
    value = value.repeat(where.shape.heads_per_kv, 0)
    assert np.abs(out[0] - value).max() <= where.bound * np.abs(value).max()


@everywhere
def test_scores_that_climb_and_fall(where):
    """Every chunk raises the running maximum, or none after the first."""
    for scores in (np.linspace(-300, 300, 120), np.linspace(300, -300, 120)):
        check(where, with_scores(where, scores))


@everywhere
@pytest.mark.parametrize("heads", [1, 3, 7, 16])
def test_head_counts(where, heads):
    if not where.portable:
        pytest.skip("serves 12 query heads per KV head only")
    for dim, group in ((64, 64), (128, 32), (256, 256)):
        p = problem(where, n_q=4, cells=35, seed=heads, shape=Shape(heads, 1, dim, group))
        check(where, p)
