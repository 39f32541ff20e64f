"""The kernels that run here: their bytes against the golden digests and the referee, on every instruction-set path."""

import hashlib
from functools import lru_cache
from types import SimpleNamespace

import inputs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KERNELS, PORTABLE, SPECS, build, paged, random_kv, random_q, same_bytes

import strata_pa
from strata_pa import reference

ISAS = [isa["name"] for isa in strata_pa.capabilities()["devices"][0]["isas"] if isa["supported"]]
BEST = ISAS[-1]
BOUND = 1.0e-6  # max|out - float64| / max|float64| on the golden cases

kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("STRATA_PA_FORCE_ISA", request.param)
    return request.param


def attention(q, kv, **options):
    return strata_pa.prompt_attention(q, paged(kv), **options)


def digest(x):
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


@lru_cache(maxsize=4)
def load(name):
    return inputs.load(name)


def golden(name):
    q, kv, options = inputs.arguments(load(name))
    return q, kv, {k: v for k, v in options.items() if v is not None}


def repaged(kv, kv_len, page_size, layout, seed=0):
    """The same cells in pages of another size, shuffled; what no cell fills holds NaN scales."""
    table, size = kv.page_table, kv.k.shape[2]
    cells = np.arange(kv_len)
    max_pages = -(-kv_len // page_size)
    new = np.random.default_rng(seed).permutation(max_pages + 3)[:max_pages].astype(np.int32)

    def move(pool, fill):
        out = np.full((max_pages + 3, pool.shape[1], page_size, pool.shape[3]), fill, pool.dtype)
        out[new[cells // page_size], :, cells % page_size] = pool[table[cells // size], :, cells % size]
        return out if layout == "HND" else np.ascontiguousarray(out.swapaxes(1, 2))

    pools = {x: move(getattr(kv, x), 127 if x in "kv" else np.nan) for x in ("k", "v", "k_scale", "v_scale")}
    return SimpleNamespace(**pools, page_table=new, layout=layout)


# The golden cases


# The large cases on all paths are left out of the quick tests: small ones and random problems go through the same code there.
LARGE = ("causal600", "select2100", "select8192", "select32768", "page512")
GOLDEN = [
    pytest.param(name, isa, num_threads, marks=[pytest.mark.slow] if name in LARGE and (isa, num_threads) != (BEST, 2) else [])
    for name in PORTABLE
    for isa in ISAS
    for num_threads in (1, 2)
]


@kernels
@pytest.mark.parametrize(("name", "isa", "num_threads"), GOLDEN, indirect=["isa"])
def test_golden(name, isa, num_threads, kernel):
    q, kv, options = golden(name)
    out = attention(q, kv, kernel=kernel, num_threads=num_threads, **options)
    assert digest(out) == PORTABLE[name][kernel]


@pytest.mark.parametrize("name", PORTABLE)
def test_accuracy(name):
    q, kv, options = golden(name)
    rows = sorted({*np.linspace(0, len(q) - 1, 12).astype(int).tolist()})
    want, want_lse = reference.attention_float64(q, kv, rows=rows, return_lse=True, **options)
    for kernel in KERNELS:
        out, lse = attention(q, kv, kernel=kernel, return_lse=True, **options)
        assert np.abs(out[rows] - want).max() <= BOUND * np.abs(want).max(), kernel
        seen = np.isfinite(want_lse)
        assert (np.isfinite(lse[rows]) == seen).all()
        assert (np.abs(lse[rows][seen] - want_lse[seen]) <= 1e-6 * (1 + np.abs(want_lse[seen]))).all(), kernel


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [1, 4, 17, 512])
@pytest.mark.parametrize("name", PORTABLE)
def test_pages_and_layouts(name, page_size, layout):
    q, kv, options = golden(name)
    kv = repaged(kv, options["kv_len"], page_size, layout)
    for kernel in KERNELS:
        assert digest(attention(q, kv, kernel=kernel, **options)) == PORTABLE[name][kernel], kernel


@kernels
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_split_calls(rows, kernel):
    for name in ("page1", "layer0"):
        q, kv, options = golden(name)
        n, kv_len = len(q), options.pop("kv_len")
        parts = []
        for first in range(0, n, rows):
            end = min(first + rows, n)
            lists = {x: options[x][first:end] for x in ("ids", "widths") if x in options}
            parts.append(attention(q[first:end], kv, kernel=kernel, kv_len=kv_len - n + end, **lists))
        assert digest(np.concatenate(parts)) == PORTABLE[name][kernel], name


@kernels
def test_a_dense_call_is_the_list_of_all_cells(kernel):
    q, kv, options = golden("causal600")
    del options["ids"], options["widths"]
    assert digest(attention(q, kv, kernel=kernel, **options)) == PORTABLE["causal600"][kernel]


@pytest.mark.parametrize("name", ["widths", "select2100"])
def test_exact_is_order_free(name):
    q, kv, options = golden(name)
    rng = np.random.default_rng(3)
    options["ids"] = options["ids"].copy()
    for ids, width in zip(options["ids"], options["widths"], strict=True):
        ids[:width] = rng.permutation(ids[:width])
    assert digest(attention(q, kv, kernel="exact", **options)) == PORTABLE[name]["exact"]


@pytest.mark.parametrize("name", ["widths", "page512"])
def test_exact_adds_up_from_parts(name, isa):
    q, kv, options = golden(name)
    kv, ids, widths = paged(kv), options.pop("ids"), options.pop("widths")
    part_of = np.random.default_rng(4).integers(0, 3, ids.shape)
    part_of[np.arange(ids.shape[1]) >= widths[:, None]] = -1
    parts = [np.where(part_of == i, ids, -1).astype(np.int32) for i in range(3)]
    anchors = strata_pa.merge_anchors([strata_pa.exact_anchors(q, kv, ids=part, **options) for part in parts])
    sums = strata_pa.merge_sums([strata_pa.exact_sums(q, kv, anchors=anchors, ids=part, **options) for part in parts])
    out, lse = strata_pa.exact_finish(anchors, sums)
    assert digest(out) == PORTABLE[name]["exact"]
    whole = strata_pa.prompt_attention(q, kv, kernel="exact", ids=ids, widths=widths, return_lse=True, **options)
    assert same_bytes(lse, whole[1])


# Random problems of every shape that is served


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SPECS, st.sampled_from(ISAS), st.integers(1, 3), st.sampled_from([np.float32, np.float32, np.float16]))
def test_random_problems(spec, path, num_threads, dtype):
    q, kv, options = build(spec)
    q = q.astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_PA_FORCE_ISA", path)
        for kernel in KERNELS:
            out = np.full(q.shape, 7, dtype)  # what is not written shows
            got, lse = attention(q, kv, kernel=kernel, num_threads=num_threads, return_lse=True, out=out, **options)
            want, want_lse = reference.portable(kernel, q, kv, return_lse=True, **options)
            assert got is out
            assert same_bytes(got, want), kernel
            assert same_bytes(lse, want_lse), kernel


@kernels
@pytest.mark.parametrize("n_rep", [1, 3, 5, 7, 16])
def test_full_tiles(kernel, n_rep, isa):
    """More rows than a tile holds, and more cells than a block."""
    rng = np.random.default_rng(n_rep)
    kv = random_kv(rng, 1, 27, 1, 16, 64, 32)
    q = random_q(rng, 130 if n_rep < 16 else 20, n_rep, 64)
    for options in ({}, {"window_left": 100}, {"causal": False}):
        options["kv_len"] = 425
        want = reference.portable(kernel, q, kv, return_lse=True, **options)
        got = attention(q, kv, kernel=kernel, return_lse=True, **options)
        assert same_bytes(got[0], want[0])
        assert same_bytes(got[1], want[1])


@kernels
def test_bfloat16(kernel, isa):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(5)
    kv, q = random_kv(rng, 1, 12, 2, 16, 128, 64), random_q(rng, 9, 6, 128).astype(bfloat16)
    assert same_bytes(attention(q, kv, kernel=kernel), reference.portable(kernel, q, kv))


def test_exact_past_its_buffers():
    """286,720 cells: the scores of 16 rows are not kept (16 MiB), those of 3 are, and the integer planes spill."""
    rng = np.random.default_rng(6)
    kv = random_kv(rng, 1, 560, 1, 512, 64, 64)
    kv.page_table[0] = rng.integers(0, 8, 560)  # few pages, many times
    for kernel_q in (random_q(rng, 2, 16, 64), random_q(rng, 1, 3, 64) * 4):
        want = reference.portable("exact", kernel_q, kv, return_lse=True)
        got = attention(kernel_q, kv, kernel="exact", return_lse=True)
        assert same_bytes(got[0], want[0])
        assert same_bytes(got[1], want[1])
    kv.v[:] = -128  # the largest sums there are
    kv.v_scale[:] = 1
    kv.k[:] = 0
    out = attention(random_q(rng, 1, 2, 64), kv, kernel="exact", num_threads=1)
    assert (out == -128).all()


# Values


@kernels
def test_masked_garbage_changes_nothing(kernel, isa):
    rng = np.random.default_rng(7)
    kv, q = random_kv(rng, 1, 25, 2, 4, 64, 64), random_q(rng, 5, 4, 64)
    ids = np.where(rng.random((5, 2, 70)) < 0.2, -1, rng.integers(0, 90, (5, 2, 70))).astype(np.int32)
    widths = np.array([70, 0, 33, 64, 1], np.int32)
    kv.page_table[0, 3] = -1
    options = {"kv_len": 95, "ids": ids, "widths": widths}
    want = attention(q, kv, kernel=kernel, return_lse=True, **options)
    named = np.zeros((kv.k.shape[0], 2, 4), bool)
    for i, width in enumerate(widths):
        for head in range(2):
            cells = ids[i, head, :width]
            cells = cells[(cells >= 0) & (cells <= 90 + i) & (cells // 4 != 3)]
            named[kv.page_table[0, cells // 4], head, cells % 4] = True
    assert not named.all()
    for x in ("k", "v", "k_scale", "v_scale"):
        getattr(kv, x)[~named] = -128 if x in "kv" else np.nan
    for i, width in enumerate(widths):
        ids[i, :, width:] = 2**31 - 1
    got = attention(q, kv, kernel=kernel, return_lse=True, **options)
    assert same_bytes(got[0], want[0])
    assert same_bytes(got[1], want[1])


@kernels
def test_values_that_are_not_finite(kernel, isa):
    """A bad value gives NaN in the rows that it touches, and changes no other row: one thread, so that a tile has rows of both kinds."""
    rng = np.random.default_rng(8)
    kv, q = random_kv(rng, 1, 40, 2, 4, 128, 64), random_q(rng, 30, 4, 128)
    clean = attention(q, kv, kernel=kernel, return_lse=True, num_threads=1)

    def bad_rows():
        out, lse = attention(q, kv, kernel=kernel, return_lse=True, num_threads=1)
        bad = np.isnan(lse)
        assert (out.view(np.uint32)[bad] == 0x7FC00000).all()
        assert (lse.view(np.uint32)[bad] == 0x7FC00000).all()
        assert same_bytes(out[~bad], clean[0][~bad])
        assert same_bytes(lse[~bad], clean[1][~bad])
        return bad

    assert not bad_rows().any()
    for value in (np.nan, np.inf, -np.inf):
        for name in ("k_scale", "v_scale"):
            pool = getattr(kv, name)
            page, slot = kv.page_table[0, 35], 2  # cell 142: queries 12 and up see it
            saved = pool[page, 1, slot, 1]
            pool[page, 1, slot, 1] = value
            want = (np.arange(30) >= 12)[:, None] & (np.arange(4) >= 2)
            assert (bad_rows() == want).all(), name
            pool[page, 1, slot, 1] = saved
        saved = q[7, 1, 3]
        q[7, 1, 3] = value
        assert np.argwhere(bad_rows()).tolist() == [[7, 1]]
        q[7, 1, 3] = saved
    huge = q.copy()
    huge[5, 0] = 3e38
    kv.k_scale[:] = 60000
    with np.errstate(over="ignore"):
        got = attention(huge, kv, kernel=kernel)
        assert same_bytes(got, reference.portable(kernel, huge, kv))
    assert np.isnan(got[5, 0]).all()


@pytest.mark.parametrize("loud", [1, 1e3, 1e9, 3e9, 1e15, 1e30])
@kernels
def test_loud_scores(kernel, loud, isa):
    rng = np.random.default_rng(9)
    kv, q = random_kv(rng, 1, 40, 2, 4, 64, 32), random_q(rng, 9, 4, 64) * np.float32(loud)
    kv.v_scale[:] = rng.choice([0, 2.0**-24, 2.0**-10, 1, 60000], kv.v_scale.shape, p=[0.3, 0.2, 0.2, 0.2, 0.1])
    kv.k[:, 0, :, :32], kv.k_scale[:, 0, :, 0] = kv.k[0, 0, 0, :32], kv.k_scale[0, 0, 0, 0]
    want = reference.portable(kernel, q, kv, return_lse=True)
    assert np.isfinite(want[0]).all()
    got = attention(q, kv, kernel=kernel, return_lse=True)
    assert same_bytes(got[0], want[0])
    assert same_bytes(got[1], want[1])


@kernels
@pytest.mark.parametrize("small", [0, 2.0**-24, 2.0**-14])
def test_tiny_scales_and_queries(kernel, small, isa):
    rng = np.random.default_rng(10)
    kv = random_kv(rng, 1, 20, 1, 4, 64, 64)
    kv.v_scale[:] = small
    kv.k_scale[::2] = small
    q = random_q(rng, 12, 2, 64) * np.array([1, 1e-30, 1e-38, 0] * 3, np.float32)[:, None, None]
    want = reference.portable(kernel, q, kv, return_lse=True)
    got = attention(q, kv, kernel=kernel, return_lse=True)
    assert same_bytes(got[0], want[0])
    assert same_bytes(got[1], want[1])
