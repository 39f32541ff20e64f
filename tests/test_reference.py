"""The referees themselves: the scalar steps against exact arithmetic, the portable kernels against float64, and what they promise."""

import hashlib
import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import inputs
import numpy as np
import pytest
from hypothesis import given, settings
from problems import KERNELS, PORTABLE, SPECS, build, random_kv, random_q, same_bytes

from strata_pa import reference

f32 = np.float32


# The scalar steps


def nearest(x):
    """The float32 nearest to a Fraction, ties to even, by integer arithmetic alone."""
    exponent = -149
    if x:
        exponent = max(exponent, abs(x.numerator).bit_length() - x.denominator.bit_length() - 24)
    whole = round(x / Fraction(2) ** exponent)
    if abs(whole) >= 1 << 24:  # the estimate of the exponent was one too low
        exponent += 1
        whole = round(x / Fraction(2) ** exponent)
    return f32(math.inf if whole > 0 else -math.inf) if exponent > 104 else f32(math.ldexp(whole, exponent))


def test_nearest():
    for exact, want in ((1, 1), (Fraction(1, 3), f32(1) / f32(3)), (2**24 + 1, 2**24), (2**24 + 3, 2**24 + 4), (2**25 - 1, 2**25)):
        assert nearest(Fraction(exact)) == f32(want)
    assert nearest(Fraction(3, 2**150)) == f32(2.0**-148)
    assert nearest(Fraction(1, 2**150)) == 0
    assert nearest(Fraction(2**128)) == np.inf


def fma_cases():
    rng = np.random.default_rng(1)

    def random(low, high, n=1500):
        return (rng.choice([-1, 1], n) * (1 + rng.integers(0, 2**23, n) / 2**23) * 2.0 ** rng.integers(low, high, n)).astype(f32)

    a, b = random(-20, 20), random(-20, 20)
    yield a, b, random(-40, 40)
    yield a, b, -(a * b)  # only the product's low half is left
    yield random(-80, -50), random(-80, -70), random(-149, -120)  # results in the subnormal range
    yield random(-75, -70), random(-76, -70), np.zeros(1500, f32)
    yield random(60, 64), random(60, 64), random(120, 127)  # about the overflow
    # c is odd in its last place, a product of half that place makes a tie, and a last bit of a moves it off the tie, or not.
    c = random(0, 1)
    half = np.copysign(f32(2.0**-24), random(0, 1))
    nudge = f32(1) + rng.choice([-(2.0**-23), 0, 2.0**-23], 1500).astype(f32)
    yield half, nudge, c
    yield half * f32(2.0**-60), nudge * f32(2.0**-65), c.view(np.int32).astype(f32) * f32(2.0**-149)
    yield half, np.ones(1500, f32), np.where(rng.random(1500) < 0.5, f32(1), f32(2) - f32(2.0**-23))
    tiny = f32(2.0**-149) * rng.integers(0, 4, 1500).astype(f32)
    yield f32(0.5) * nudge, tiny, f32(2.0**-149) * rng.integers(0, 4, 1500).astype(f32)  # ties between subnormals


@pytest.mark.parametrize("case", range(9))
def test_fma_rounds_once(case):
    with np.errstate(under="ignore"):
        a, b, c = list(fma_cases())[case]
    with np.errstate(over="ignore"):
        got = reference.fma(a, b, c)
    for x, y, z, g in zip(a, b, c, got, strict=True):
        want = nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        assert g == want, (x.hex(), y.hex(), z.hex())


def test_fma_is_not_two_roundings():
    a, b, c = f32(1 + 2.0**-23), f32(1 - 2.0**-23), f32(-1)
    assert a * b + c == 0
    assert reference.fma(a, b, c) == f32(-(2.0**-46))


def test_fma_leaves_inf_and_nan_alone():
    with np.errstate(invalid="ignore"):
        got = reference.fma(f32([np.inf, -np.inf, np.inf, np.nan, 1]), f32([1, 1, 0, 1, 1]), f32([1, 1, 1, 1, np.inf]))
    np.testing.assert_array_equal(got, f32([np.inf, -np.inf, np.nan, np.nan, np.inf]))


def test_poly():
    t = np.linspace(-0.5, 0.5, 2**20 + 1).astype(f32)
    p = reference.poly(t)
    want = np.exp2(t.astype(np.float64))
    assert np.abs(p / want - 1).max() <= 7e-8
    assert p.min() >= 0.707
    assert p.max() < 1.4143
    assert reference.poly(f32(0)) == 1


def test_log2():
    m = np.linspace(0.5, 2, 2**19).astype(f32)
    assert np.abs(reference.log2(m) - np.log2(m.astype(np.float64))).max() <= 1e-7
    x = np.ldexp(np.tile(m[::64], 9), np.repeat(np.arange(-120, 121, 30), len(m[::64])).astype(np.int32))
    want = np.log2(x.astype(np.float64))
    assert (np.abs(reference.log2(x) - want) <= 1e-7 + 2.0**-24 * np.abs(want)).all()
    powers = np.arange(-126, 128, dtype=f32)
    assert (reference.log2(np.ldexp(f32(1), powers.astype(np.int32))) == powers).all()


def test_exp2_and_shift():
    y = -np.linspace(0, 125, 2**16).astype(f32)
    assert np.abs(reference.exp2(y) / np.exp2(y.astype(np.float64)) - 1).max() <= 7e-8
    assert not reference.exp2(f32([-126, -127, -1e30, -np.inf])).any()
    assert reference.shift(f32([1, 1, 1]), f32([-125, -126, -np.inf])).tolist() == [2.0**-125, 0, 0]


def test_tree():
    x = np.arange(1, 65, dtype=f32) ** 5  # large enough that the order shows
    eight = x[:32] + x[32:]
    eight = eight[:16] + eight[16:]
    eight = eight[:8] + eight[8:]
    assert reference.tree(x) == ((eight[0] + eight[1]) + (eight[2] + eight[3])) + ((eight[4] + eight[5]) + (eight[6] + eight[7]))


# Random problems


def naive_float64(q, kv, *, kv_len, cu_seqlens_q=None, causal=True, window_left=-1, ids=None, widths=None, granularity=1):
    """Section 1.3 by loops, one cell at a time."""
    pools = [x if kv.layout == "HND" else x.swapaxes(1, 2) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale)]
    n_kv, page_size, dim = pools[0].shape[1:]
    starts = [0, len(q)] if cu_seqlens_q is None else cu_seqlens_q
    table, lengths = np.atleast_2d(kv.page_table), np.atleast_1d(kv_len)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for sequence, (first, end) in enumerate(itertools.pairwise(starts)):
        for i in range(first, end):
            pos = lengths[sequence] - (end - first) + (i - first)
            for h in range(q.shape[1]):
                head = h * n_kv // q.shape[1]
                if ids is None:
                    cells = list(range(lengths[sequence]))
                else:
                    chosen = (ids[i] if ids.ndim == 2 else ids[i, head])[: None if widths is None else widths[i]]
                    cells = [int(c) * granularity + j if c >= 0 else -1 for c in chosen for j in range(granularity)]
                scores, values = [], []
                for c in cells:
                    if c < 0 or c >= lengths[sequence] or (causal and c > pos) or (window_left >= 0 and c < pos - window_left):
                        continue
                    page = table[sequence, c // page_size]
                    if page < 0:
                        continue
                    k, v, ks, vs = (x[page, head, c % page_size].astype(np.float64) for x in pools)
                    scores.append(q[i, h].astype(np.float64) @ (k * np.repeat(ks, dim // len(ks))) / math.sqrt(dim))
                    values.append(v * np.repeat(vs, dim // len(vs)))
                if scores:
                    e = np.exp(np.array(scores) - max(scores))
                    out[i, h], lse[i, h] = e @ np.array(values) / e.sum(), max(scores) + np.log(e.sum())
    return out, lse


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SPECS)
def test_random_problems(spec):
    q, kv, options = build(spec)
    want, want_lse = reference.attention_float64(q, kv, return_lse=True, **options)
    naive, naive_lse = naive_float64(q, kv, **options)
    seen = np.isfinite(naive_lse)
    assert (want_lse[~seen] == -np.inf).all()
    assert not want[~seen].any()
    np.testing.assert_allclose(want[seen], naive[seen], rtol=0, atol=1e-12)
    np.testing.assert_allclose(want_lse[seen], naive_lse[seen], rtol=1e-12, atol=1e-12)
    scale = 128 * float(kv.v_scale.max())
    for kernel in KERNELS:
        out, lse = reference.portable(kernel, q, kv, return_lse=True, **options)
        assert out.dtype == lse.dtype == f32
        assert np.abs(out - want).max(initial=0) <= 1e-6 * scale, kernel
        assert (lse[~seen] == -np.inf).all()
        assert not out[~seen].tobytes().strip(b"\0")
        assert (np.abs(lse[seen] - want_lse[seen]) <= 1e-6 * (1 + np.abs(want_lse[seen]))).all(), kernel


@pytest.fixture
def small():
    """A dense causal problem: 3 queries, 4 query heads, 2 KV heads, 90 cells in pages of 4."""
    rng = np.random.default_rng(7)
    return random_q(rng, 3, 4, 128), random_kv(rng, 1, 23, 2, 4, 128, 64), {"kv_len": 90}


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_and_dense_lists(kernel, small):
    q, kv, options = small
    out, lse = reference.portable(kernel, q, kv, return_lse=True, **options)
    few, few_lse = reference.portable(kernel, q, kv, return_lse=True, rows=[2, 0], **options)
    assert same_bytes(few, out[[2, 0]])
    assert same_bytes(few_lse, lse[[2, 0]])
    cells, blocks = (np.tile(np.arange(n, dtype=np.int32), (3, 1)) for n in (90, 24))
    assert same_bytes(out, reference.portable(kernel, q, kv, ids=cells, **options))
    assert same_bytes(out, reference.portable(kernel, q, kv, ids=blocks, granularity=4, **options))


@pytest.mark.parametrize("kernel", KERNELS)
def test_16_bit_queries(kernel, small):
    q, kv, options = small
    half = q.astype(np.float16)
    out = reference.portable(kernel, half, kv, **options)
    assert same_bytes(out, reference.portable(kernel, half.astype(f32), kv, **options).astype(np.float16))
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    brain = q.astype(bfloat16)
    out = reference.portable(kernel, brain, kv, **options)
    assert same_bytes(out, reference.portable(kernel, brain.astype(f32), kv, **options).astype(bfloat16))


# Values that are not finite


@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_rows(kernel, small):
    q, kv, options = small
    clean, clean_lse = reference.portable(kernel, q, kv, return_lse=True, **options)

    def answer(q=q, **changed):
        return reference.portable(kernel, q, SimpleNamespace(**{**vars(kv), **changed}), return_lse=True, **options)

    def expect(answered, bad):
        out, lse = answered
        assert (out.view(np.uint32)[bad] == 0x7FC00000).all()
        assert (lse.view(np.uint32)[bad] == 0x7FC00000).all()
        assert same_bytes(out[~bad], clean[~bad])
        assert same_bytes(lse[~bad], clean_lse[~bad])

    for value in (np.nan, np.inf, -np.inf):
        broken = q.copy()
        broken[1, 2, 5] = value
        expect(answer(q=broken), np.arange(12).reshape(3, 4) == 6)
    for name in ("k_scale", "v_scale"):  # cell 88 is past the first query's position; KV head 1 serves the heads 2 and 3
        pool = getattr(kv, name).copy()
        pool[kv.page_table[0, 22], 1, 0, 1] = np.inf
        expect(answer(**{name: pool}), (np.arange(3) > 0)[:, None] & (np.arange(4) > 1))
    huge = q.copy()
    huge[2, 0] = 3e38  # the scores overflow
    pool = np.full_like(kv.k_scale, 60000)
    out, lse = answer(q=huge, k_scale=pool)
    assert np.isnan(out[2, 0]).all()
    assert np.isnan(lse[2, 0])
    assert np.isfinite(out[:2]).all()
    half = reference.portable(kernel, np.full((3, 4, 128), np.inf, np.float16), kv, **options)
    assert (half.view(np.uint16) == 0x7E00).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_visible(kernel, small):
    q, kv, _ = small
    broken = np.full_like(q, np.nan)  # whatever q is
    for nothing in ({"kv_len": 0}, {"kv_len": 90, "ids": np.full((3, 5), -1, np.int32)}, {"kv_len": 90, "ids": np.zeros((3, 0), np.int32)}):
        out, lse = reference.portable(kernel, broken, kv, return_lse=True, **nothing)
        assert same_bytes(out, np.zeros_like(q))
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_garbage_changes_nothing(kernel, small):
    q, kv, _ = small
    rng = np.random.default_rng(8)
    ids = np.where(rng.random((3, 2, 70)) < 0.2, -1, rng.integers(0, 60, (3, 2, 70))).astype(np.int32)
    options = {"kv_len": 60, "causal": False, "ids": ids}
    kv.page_table[0, 3] = -1
    out = reference.portable(kernel, q, kv, return_lse=True, **options)
    named = np.zeros((kv.k.shape[0], 2, 4), bool)
    for head in range(2):
        cells = np.unique(ids[:, head])
        cells = cells[(cells >= 0) & (cells // 4 != 3)]
        named[kv.page_table[0, cells // 4], head, cells % 4] = True
    assert not named.all()
    for x in ("k", "v", "k_scale", "v_scale"):
        getattr(kv, x)[~named] = -128 if x in "kv" else np.nan
    kv.page_table[0, 15:] = 10**6
    for a, b in zip(out, reference.portable(kernel, q, kv, return_lse=True, **options), strict=True):
        assert same_bytes(a, b)


# exact: order-free, and partial states that add


def by_parts(q, kv, parts, **options):
    """The answer of `exact` from the partial states of lists of ids."""
    anchors = reference.merge_anchors([reference.exact_anchors(q, kv, ids=ids, **options) for ids in parts])
    sums = [reference.exact_sums(q, kv, anchors=anchors, ids=ids, **options) for ids in parts]
    return reference.exact_finish(anchors, sum(s[0] for s in sums), sum(s[1] for s in sums), q.dtype)


@pytest.mark.parametrize("loud", [1, 1e3, 1e9, 3e9, 1e15, 1e30])
def test_exact_is_a_function_of_the_set(small, loud):
    """Also where the scores leave the range in which their integers are spaced by one (|n| > 2^22 from loud = 3e9 on)."""
    q, kv, _ = small
    rng = np.random.default_rng(9)
    q[1:, :, 64:] *= f32(loud)
    kv.v_scale[:] = rng.choice([0, 2.0**-24, 2.0**-10, 1, 60000], kv.v_scale.shape, p=[0.3, 0.2, 0.2, 0.2, 0.1])
    kv.k[:, 0, :, 64:], kv.k_scale[:, 0, :, 1] = kv.k[0, 0, 0, 64:], kv.k_scale[0, 0, 0, 1]  # KV head 0: loud scores, but close ones
    options = {"kv_len": 90, "causal": False}
    ids = rng.integers(0, 90, (3, 120)).astype(np.int32)
    ids[:, :10] = -1
    whole = reference.portable("exact", q, kv, return_lse=True, ids=ids, **options)
    assert np.isfinite(whole[0]).all()
    assert loud < 3e9 or (np.abs(reference.exact_anchors(q, kv, ids=ids, **options)[0][1:]) > 2.0**22).all()
    shuffled = reference.portable("exact", q, kv, return_lse=True, ids=rng.permuted(ids, axis=1), **options)
    cuts = [ids[:, :10], ids[:, 10:11], ids[:, 11:60], ids[:, 60:]]  # the first part sees nothing
    for other in (shuffled, by_parts(q, kv, cuts, **options), by_parts(q, kv, cuts[::-1], **options)):
        assert same_bytes(whole[0], other[0])
        assert same_bytes(whole[1], other[1])


def test_a_bad_part_makes_a_bad_row(small):
    q, kv, options = small
    kv.v_scale[kv.page_table[0, 5], 0, 2, 1] = np.nan  # cell 22 of KV head 0
    ids = np.tile(np.arange(80, dtype=np.int32), (3, 1))
    parts = [ids[:, :20], ids[:, 20:30], ids[:, 30:], ids[:, :0]]
    anchors = [reference.exact_anchors(q, kv, ids=x, **options) for x in parts]
    assert [np.isnan(a).tolist() for a, _ in anchors] == [[[i == 1, i == 1, False, False]] * 3 for i in range(4)]
    assert (anchors[3][0] == -np.inf).all()
    whole = reference.portable("exact", q, kv, return_lse=True, ids=ids, **options)
    for a, b in zip(whole, by_parts(q, kv, parts, **options), strict=True):
        assert same_bytes(a, b)
        assert np.isnan(a[:, :2]).all()
        assert np.isfinite(a[:, 2:]).all()


def test_level():
    scales = f32([[0, 0], [1, -0.5], [0.75, 0], [2.0**-24, 0], [-65504, 1], [2.0**-24 * 3, 0]])
    assert reference._level(scales).tolist() == [-np.inf, 0, 0, -24, 16, -22]


# The golden cases


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["tiny", "widths", "layer12"])
def test_golden(name, kernel):
    q, kv, options = inputs.arguments(inputs.load(name))
    out = reference.portable(kernel, q, kv, **options)
    assert hashlib.sha256(out.tobytes()).hexdigest() == PORTABLE[name][kernel]
    rows = sorted({*np.linspace(0, len(q) - 1, 16).astype(int).tolist()})
    want = reference.attention_float64(q, kv, rows=rows, **options)
    assert np.abs(out[rows] - want).max() <= 1e-6 * np.abs(want).max()


def test_golden_names():
    assert sorted(PORTABLE) == sorted([*inputs.CASES, *inputs.REAL_LAYERS])


def test_the_cases_own_float64():
    p = inputs.make("tiny")
    q, kv, options = inputs.arguments(p)
    np.testing.assert_allclose(reference.attention_float64(q, kv, **options), inputs.reference(p), rtol=0, atol=1e-12)
