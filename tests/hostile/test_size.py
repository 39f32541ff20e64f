"""Many rows, many cells, memory past 32-bit offsets. What a launch is made of: tests/cuda/test_arrays.py, "Many launches"."""

import mmap

import numpy as np
import pytest
from place import Problem, Shape, call, everywhere, problem, same
from problems import same_bytes

import strata_pa
from strata_pa import reference

ROWS = Shape(1, 1, 64, 64)


@everywhere
@pytest.mark.parametrize("n_q", [65535, 65536, 70000])
def test_many_queries(where, n_q):
    """More than 16 bits count."""
    shape, cells = ROWS if where.portable else where.shape, 4 * 17600
    p = problem(where, n_q=1, cells=64, shape=shape, seed=n_q)
    rng = np.random.default_rng(n_q)
    q = np.repeat(p.q, n_q, 0)
    q[:, :, 0] += rng.standard_normal((n_q, 1), np.float32)
    table = np.resize(p.kv.page_table, cells // 4)
    ids = rng.integers(0, cells, (n_q, 3)).astype(np.int32)
    big = Problem(q, p.kv).with_kv(page_table=table)
    out, lse = call(where, big, ids=ids, kv_len=cells)
    some = [0, 1, 32767, 32768, 65534, *range(65535, n_q, 997), n_q - 1]
    some = [i for i in some if i < n_q]
    want, want_lse = reference.attention_float64(*big, ids=ids, kv_len=cells, rows=some, return_lse=True)
    seen = want_lse > -np.inf
    assert seen.any()
    assert np.abs(out[some] - want).max() <= where.bound * np.abs(want).max()
    assert ((lse[some] > -np.inf) == seen).all()
    for i in some[:3] + some[-3:]:
        got = call(where, Problem(q[i : i + 1], big.kv), ids=ids[i : i + 1], kv_len=cells - n_q + i + 1)
        assert same(got, (out[i : i + 1], lse[i : i + 1]))
    assert not np.isnan(out).any()


@everywhere
def test_long_context(where):
    """131,072 cells. Running sums round once a chunk, so their error grows as the root of the length: 4 times that of 8,192 cells."""
    long = problem(where, n_q=2, cells=131072, page_size=16, shape=ROWS if where.portable else None, seed=1)
    bound = where.bound * (1 if where.kernel == "exact" else 4)
    for options in ({}, {"ids": np.array([[131071, 0, 65536, 65535, 131000, 7]] * 2, np.int32)}):
        out, _ = call(where, long, **options)
        want = reference.attention_float64(*long, **options)
        assert np.abs(out - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("kernel", ["fp32", "imma", "exact"])
def test_offsets_past_32_bits(kernel):
    """Pools of 5 GB of which four pages are ever touched, and pages further apart than 2^31 elements."""
    rng = np.random.default_rng(2)
    stride = 2**31 + 4096
    raw = {x: np.frombuffer(mmap.mmap(-1, 2 * stride + 8192), np.int8) for x in ("k", "v")}
    pools = {x: np.lib.stride_tricks.as_strided(y, (3, 1, 4, 64), (stride, 256, 64, 1)) for x, y in raw.items()}
    scales = np.full((3, 1, 4, 1), 0.01, np.float16)
    for pool in pools.values():
        pool[...] = rng.integers(-128, 128, pool.shape)
    q, table = rng.standard_normal((4, 2, 64), np.float32), np.array([2, 0, 1], np.int32)
    want = strata_pa.prompt_attention(q, strata_pa.PagedKV(*(p.copy() for p in pools.values()), scales, scales, table), kernel=kernel)
    got = strata_pa.prompt_attention(q, strata_pa.PagedKV(*pools.values(), scales, scales, table), kernel=kernel)
    assert same_bytes(got, want)
