"""merge_partials: whole results over parts of the cells; and the anchors of `exact` as integer keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KERNELS, PLAIN, build, same_bytes
from small import cache, queries

import strata_pa
from strata_pa import ExactAnchors, InvalidInput, InvalidType, merge_partials, reference

DTYPES = (np.float32, np.float16)


def parts(seed, n_parts, rows=(5, 3), dim=8, spread=10.0, dtype=np.float32):
    """Results of disjoint parts as any kernel may give them: some rows saw nothing in some parts, some in none."""
    rng = np.random.default_rng(seed)
    lses = (rng.standard_normal((n_parts, *rows)) * spread).astype(np.float32)
    outs = rng.standard_normal((n_parts, *rows, dim)).astype(dtype)
    empty = rng.random(lses.shape) < 0.2
    empty[:, 0, 0] = True
    lses[empty], outs[empty] = -np.inf, 0
    return list(outs), list(lses)


def in_float64(outs, lses):
    outs, lses = np.array(outs, np.float64), np.array(lses, np.float64)
    top = lses.max(0)
    with np.errstate(invalid="ignore"):
        w = np.where(np.isneginf(lses), 0, np.exp(lses - np.where(np.isneginf(top), 0, top)))
    total = w.sum(0)
    seen = total > 0
    out = (w[..., None] * outs).sum(0) / np.where(seen, total, 1)[..., None]
    return out, np.where(seen, top + np.log(np.where(seen, total, 1)), -np.inf)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([0.0, 1.0, 10.0, 300.0, 1e30]), st.sampled_from(DTYPES))
def test_as_written_and_near_float64(seed, n_parts, spread, dtype):
    outs, lses = parts(seed, n_parts, spread=spread, dtype=dtype)
    out, lse = merge_partials(outs, lses)
    want = reference.merge_partials(outs, lses)
    assert same_bytes(out, want[0])
    assert same_bytes(lse, want[1])
    exact, exact_lse = in_float64(outs, lses)
    unit = np.finfo(dtype).eps
    # A weight's error: that of lse_i - M and of its product with log2 e, where it matters (below e^-17 it does not), and exp2's.
    assert np.abs(out - exact).max() <= (unit / 2 + (17 + 2 * n_parts) * 2.0**-23) * max(1, np.abs(exact).max())
    seen = np.isfinite(exact_lse)
    assert (np.isneginf(lse) == ~seen).all()
    assert (np.abs(lse[seen] - exact_lse[seen]) <= 2.0**-22 * np.maximum(1, np.abs(exact_lse[seen]))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_alone_and_parts_that_saw_nothing(dtype):
    outs, lses = parts(1, 1, dtype=dtype)
    nothing = np.full_like(outs[0], 7), np.full_like(lses[0], -np.inf)  # whatever such a part's out holds
    for before, after in ((0, 0), (2, 0), (0, 3), (1, 1)):
        out, lse = merge_partials([nothing[0]] * before + outs + [nothing[0]] * after, [nothing[1]] * before + lses + [nothing[1]] * after)
        seen = np.isfinite(lse)
        assert same_bytes(lse, lses[0])
        assert same_bytes(out[seen], outs[0][seen])
        assert (out[~seen].view(np.uint16 if dtype == np.float16 else np.uint32) == 0).all()


def test_the_far_smaller_part_does_not_count():
    outs, lses = parts(2, 2)
    lses = [np.full_like(lses[0], 3e38), np.full_like(lses[0], -3e38)]
    outs[1][:] = np.inf
    out, lse = merge_partials(outs, lses)
    assert same_bytes(out, outs[0] + np.float32(0))
    assert same_bytes(lse, lses[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_row_stays_bad(value):
    outs, lses = parts(3, 3)
    lses[1][2, 1] = value
    out, lse = merge_partials(outs, lses)
    assert np.isnan(out[2, 1]).all()
    assert np.isnan(lse[2, 1])
    good = np.ones(lse.shape, bool)
    good[2, 1] = False
    assert not np.isnan(out[good]).any()
    want = reference.merge_partials(outs, lses)
    assert same_bytes(out, want[0])
    assert same_bytes(lse, want[1])


SPEC = PLAIN | {"dim_group": (64, 32), "n_rep": 3, "lists": "shared", "cap": 25, "widths": True}


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([1, 20]))
def test_attention_in_parts(kernel, seed, n_parts, loud):
    """Entries dealt out to parts: near float64 of the whole, however the rows fall."""
    q, kv, options = build({**SPEC, "seed": seed, "sequences": [(4, 150)]})
    q = q * np.float32(loud)
    kv = strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)
    owner = np.random.default_rng(seed).integers(0, n_parts, options["ids"].shape)
    lists = [{**options, "ids": np.where(owner == i, options["ids"], -1).astype(np.int32)} for i in range(n_parts)]
    out, lse = merge_partials(*zip(*[strata_pa.prompt_attention(q, kv, kernel=kernel, return_lse=True, **x) for x in lists], strict=True))
    want, want_lse = reference.attention_float64(q, kv, return_lse=True, **options)
    seen = np.isfinite(want_lse)
    largest_lse = np.abs(want_lse[seen]).max(initial=1)
    # The parts' lse are FP32: half a last digit of the largest moves a weight by as much.
    assert np.abs(out - want).max() <= (1.5e-6 + largest_lse * 2.0**-23) * max(np.abs(want).max(), 2.0**-20)
    assert (np.isfinite(lse) == seen).all()


def test_given_arrays():
    outs, lses = parts(4, 3)
    want = merge_partials(outs, lses)[0]
    given = np.full_like(outs[0], np.nan)
    assert merge_partials(outs, lses, out=given)[0] is given
    assert same_bytes(given, want)
    assert merge_partials(outs, lses, out=outs[1])[0] is outs[1]
    assert same_bytes(outs[1], want)
    assert merge_partials([x[:0] for x in outs], [x[:0] for x in lses])[0].shape == (0, 3, 8)


def test_what_is_refused():
    outs, lses = parts(5, 2)
    with pytest.raises(InvalidInput, match="no parts"):
        merge_partials([], [])
    with pytest.raises(InvalidInput, match="1 to 64 each, got 2 and 1"):
        merge_partials(outs, lses[:1])
    with pytest.raises(InvalidInput, match="got 65 and 65"):
        merge_partials(outs[:1] * 65, lses[:1] * 65)
    with pytest.raises(InvalidInput, match=r"outs\[1\] must be of the shape"):
        merge_partials([outs[0], outs[1][:4]], lses)
    with pytest.raises(InvalidInput, match=r"lses\[1\] must be of the shape"):
        merge_partials(outs, [lses[0], lses[1][:, :2]])
    with pytest.raises(InvalidType, match=r"outs\[1\] must be float32, got float16"):
        merge_partials([outs[0], outs[1].astype(np.float16)], lses)
    with pytest.raises(InvalidType, match=r"lses\[0\] must be float32, got float64"):
        merge_partials(outs, [lses[0].astype(np.float64), lses[1]])
    with pytest.raises(InvalidInput, match=r"outs\[0\] must be C-contiguous"):
        merge_partials([outs[0].swapaxes(0, 1).copy().swapaxes(0, 1), outs[1]], lses)
    with pytest.raises(InvalidType, match="out must be float32"):
        merge_partials(outs, lses, out=outs[0].astype(np.float16))
    both = np.zeros((6, 3, 8), np.float32)
    with pytest.raises(InvalidInput, match=r"out overlaps outs\[1\]"):
        merge_partials([outs[0], both[:5]], lses, out=both[1:])


# Keys


def numbers(rng, n):
    """Anchors of every size, as integral numbers; -inf and NaN too."""
    with np.errstate(over="ignore"):
        A = np.rint(rng.standard_normal(n) * 2.0 ** rng.choice([0, 3, 10, 20, 22, 24, 26, 30, 31, 32, 40, 60, 120], n)).astype(np.float32)
    b = rng.integers(-60, 17, n).astype(np.float32)
    kind = rng.random(n)
    A[kind < 0.05], A[kind > 0.97] = -np.inf, np.nan
    b[(kind < 0.05) | (kind > 0.97)] = -60
    return ExactAnchors(A.reshape(1, n), b.reshape(1, n))


def neighbour(rng, anchors):
    """Others near by, where the difference is small or the next number away."""
    A = anchors.A.copy()
    with np.errstate(over="ignore"):
        for _ in range(rng.integers(0, 3)):
            A = np.nextafter(A, np.float32(rng.choice([-np.inf, np.inf])))
    A = np.where(np.isfinite(A), np.rint(A), anchors.A) + np.float32(0)
    return ExactAnchors(A, np.where(np.isfinite(A), rng.integers(-60, 17, A.shape), -60).astype(np.float32))


def same_anchors(x, y):
    return np.array_equal(x.A, y.A, equal_nan=True) and np.array_equal(x.b, y.b)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_maxima_of_keys_are_the_merged_anchors(seed):
    rng = np.random.default_rng(seed)
    first = numbers(rng, 300)
    assert same_anchors(ExactAnchors.from_keys(first.keys()), first)
    for second in (numbers(rng, 300), neighbour(rng, first)):
        keys = np.maximum(first.keys(), second.keys())
        assert same_anchors(ExactAnchors.from_keys(keys), strata_pa.merge_anchors([first, second]))


def test_keys_of_a_problem():
    anchors = strata_pa.exact_anchors(queries(), cache())
    keys = anchors.keys()
    assert keys.dtype == np.int64
    assert keys.shape == (2, 3, 4)
    assert np.array_equal(keys[0], anchors.A.astype(np.int64))
    assert np.array_equal(keys[1] - keys[0], anchors.b.astype(np.int64))
    with pytest.raises(InvalidInput, match=r"keys must be int64 \[2, n_q, n_head\]"):
        ExactAnchors.from_keys(keys[:1])
    with pytest.raises(InvalidType, match="keys must be int64, got int32"):
        ExactAnchors.from_keys(keys.astype(np.int32))
