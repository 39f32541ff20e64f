"""Numbers and shapes that cannot be: refused by name where they can be read, masked where they lie on a device; never reinterpreted."""

import numpy as np
import pytest
from place import PLACES, at, call, check, everywhere, problem, same

import strata_pa
from strata_pa import InvalidInput, InvalidType, PagedKV

FAR = [40, 41, 1000, 2**30, 2**31 - 1]


@everywhere
@pytest.mark.parametrize("far", FAR)
def test_cells_past_the_last(where, far):
    p = problem(where, seed=1)
    ids = np.array([[3, 7, -1, 30, 5]] * 5, np.int32)
    check(where, p, ids=ids)
    for granularity in (1, 4):
        ids[:, 2] = -1
        ids[:, 4] = -1
        want = call(where, p, ids=ids, granularity=granularity)
        ids[:, 2] = far
        ids[:, 4] = max(far // granularity, 10)
        assert same(call(where, p, ids=ids, granularity=granularity), want)


@everywhere
@pytest.mark.parametrize("low", [-2, -1000, -(2**31)])
def test_ids_below_minus_one(where, low):
    p = problem(where, seed=2)
    ids = np.array([[3, 7, -1, 30]] * 5, np.int32)
    want = call(where, p, ids=ids)
    ids[2, 2] = low
    if where.on_gpu:
        assert same(call(where, p, ids=ids), want)
    else:
        with pytest.raises(InvalidInput, match=rf"ids\[2, 2\] is {low}"):
            call(where, p, ids=ids)
    ids[2, 2] = -1
    assert same(call(where, p, ids=ids), want)


@everywhere
@pytest.mark.parametrize("page", [12, 2**31 - 1, -2, -(2**31)])
def test_pages_that_are_not_there(where, page):
    p = problem(where, seed=3)
    table = p.kv.page_table.copy()
    table[4] = -1
    want = call(where, p.with_kv(page_table=table))
    table[4] = page
    if where.on_gpu:
        assert same(call(where, p.with_kv(page_table=table)), want)
    else:
        with pytest.raises(InvalidInput, match=rf"page_table\[4\] is {page}; a page is from 0 to 11, or -1"):
            call(where, p.with_kv(page_table=table))
    assert same(call(where, p), check(where, p))


@everywhere
@pytest.mark.parametrize("width", [-1, 6, 2**31 - 1, -(2**31)])
def test_widths_that_cannot_be(where, width):
    """On a device, one past the list is the list, a negative one is none."""
    p = problem(where, seed=4)
    ids, widths = np.array([[3, 7, 9, 30, 1]] * 5, np.int32), np.array([5, 2, 5, 0, 1], np.int32)
    widths[2] = 0 if width < 0 else 5
    want = call(where, p, ids=ids, widths=widths)
    widths[2] = width
    if where.on_gpu:
        assert same(call(where, p, ids=ids, widths=widths), want)
    else:
        with pytest.raises(InvalidInput, match=rf"widths\[2\] is {width}; a width is from 0 to 5"):
            call(where, p, ids=ids, widths=widths)


@everywhere
@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint32, np.float32, np.float64, np.bool_])
@pytest.mark.parametrize("name", ["ids", "widths", "page_table"])
def test_types_of_integers(where, name, dtype):
    p = problem(where, seed=5)
    options = {"ids": np.zeros((5, 4), np.int32), "widths": np.zeros(5, np.int32)}
    wrong = at(where, p.kv.page_table.astype(dtype) if name == "page_table" else options[name].astype(dtype))
    with pytest.raises(InvalidType, match=f"{name} must be int32, got {np.dtype(dtype).name}"):
        call(where, p.with_kv(page_table=wrong)) if name == "page_table" else call(where, p, **(options | {name: wrong}))
    call(where, p, **options)


@everywhere
def test_types_of_the_cache(where):
    p = problem(where, seed=6)
    for name, array, match in (
        ("k", p.kv.k.view(np.uint8), "k must be int8, got uint8"),
        ("v", p.kv.v.astype(np.int16), "v must be int8, got int16"),
        ("k_scale", p.kv.k_scale.astype(np.float32), "k_scale must be float16, got float32"),
        ("v_scale", p.kv.v_scale.view(np.uint16), "v_scale must be float16, got uint16"),
    ):
        with pytest.raises(InvalidType, match=match):
            call(where, p.with_kv(**{name: at(where, array)}))


def test_bfloat16_scales():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    p = problem(PLACES[0].values[0])
    with pytest.raises(InvalidType, match="k_scale must be float16, got bfloat16"):
        p.with_kv(k_scale=p.kv.k_scale.astype(bfloat16))


@everywhere
def test_shapes_that_do_not_fit(where):
    p = problem(where, seed=7)
    k, s = p.kv.k, p.kv.k_scale
    with pytest.raises(InvalidInput, match=r"\d+ query heads are not a multiple of 2 KV heads"):
        call(where, p._replace(q=p.q[:, :3]))
    with pytest.raises(InvalidInput, match="q's head_dim is"):
        call(where, p._replace(q=np.ascontiguousarray(p.q[..., :32])))
    with pytest.raises(InvalidInput, match="does not divide head_dim"):
        p.with_kv(k_scale=np.ascontiguousarray(s.repeat(2, 3)[..., :3]), v_scale=np.ascontiguousarray(s.repeat(2, 3)[..., :3]))
    with pytest.raises(InvalidInput, match="v_scale must be of k_scale's shape"):
        p.with_kv(v_scale=s[..., :-1])
    for name in ("k", "v"):
        with pytest.raises(InvalidInput, match="must be"):
            p.with_kv(**{name: k[:-1]})
        with pytest.raises(InvalidInput, match="must be"):
            p.with_kv(**{name: k[..., : k.shape[3] // 2]})
        with pytest.raises(InvalidInput, match="must have 4 dimensions"):
            p.with_kv(**{name: k[0]})
    with pytest.raises(InvalidInput, match="k_scale must be"):
        p.with_kv(k_scale=s[:, :, :-1], v_scale=s[:, :, :-1])
    for shape in ((4, 3), (5, 3, 3), (5, 1, 1, 3)):
        with pytest.raises(InvalidInput, match="ids must"):
            call(where, p, ids=np.zeros(shape, np.int32))
    with pytest.raises(InvalidInput, match=r"widths must be \[n_q\]"):
        call(where, p, ids=np.zeros((5, 3), np.int32), widths=np.zeros(6, np.int32))
    call(where, p)


@everywhere
def test_lengths_that_cannot_be(where):
    p = problem(where, seed=8)
    for options, match in (
        ({"kv_len": 41}, r"kv_len\[0\] must be from 0 to 40"),
        ({"kv_len": -1}, r"kv_len\[0\] must be from 0"),
        ({"kv_len": 2**31}, "does not fit 32 bits"),
        ({"kv_len": [40, 40]}, "one entry for each of 1 sequences"),
        ({"cu_seqlens_q": [0, 4]}, "must end at the number of queries, 5"),
        ({"cu_seqlens_q": [0, 6, 5]}, "must have 2 entries"),
        ({"window_left": -2}, "window_left"),
        ({"granularity": 3, "ids": np.zeros((5, 1), np.int32)}, "granularity"),
        ({"sm_scale": float("inf")}, "sm_scale must be a finite float32"),
    ):
        with pytest.raises(strata_pa.Error, match=match):
            call(where, p, **options)
    call(where, p)


def test_geometries_that_no_kernel_serves():
    """Every kernel's reason is in the message."""
    for heads, n_kv, dim, group in ((34, 2, 64, 32), (4, 2, 96, 32), (4, 2, 64, 16), (2, 2, 512, 64)):
        scales = np.ones((3, n_kv, 4, dim // group), np.float16)
        codes = np.zeros((3, n_kv, 4, dim), np.int8)
        kv = PagedKV(codes, codes, scales, scales, np.arange(3, dtype=np.int32))
        with pytest.raises(strata_pa.UnsupportedProblem) as error:
            strata_pa.prompt_attention(np.zeros((2, heads, dim), np.float32), kv)
        for kernel in {k["name"] for k in strata_pa.kernels()}:
            assert kernel in str(error.value), kernel
