"""Arrays that lie oddly: the bytes of plain ones, or a refusal that says what is wrong, on the first call and on later ones."""

import numpy as np
import pytest
from place import OnDevice, Problem, at, call, check, everywhere, problem, same
from problems import same_bytes

from strata_pa import Error, PagedKV
from strata_pa.attention import make_call

POOLS = ("k", "v", "k_scale", "v_scale")


@pytest.fixture
def plain(where):
    """(problem, its answer), the answer checked."""
    p = problem(where, n_q=5, seed=1)
    return p, check(where, p)


def right_or_refused(where, p, want, times=2, **options):
    """The same outcome every time."""
    outcomes = set()
    for _ in range(times):
        try:
            assert same(call(where, p, **options), want)
            outcomes.add("right")
        except Error as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1
    return outcomes.pop()


@everywhere
def test_nhd(where, plain):
    p, want = plain
    pools = [np.ascontiguousarray(getattr(p.kv, x).swapaxes(1, 2)) for x in POOLS]
    nhd = PagedKV(*pools, p.kv.page_table, layout="NHD")
    assert same(call(where, Problem(p.q, nhd)), want)
    swapped = p.with_kv(**{x: pool.swapaxes(1, 2) for x, pool in zip(POOLS, pools, strict=True)})  # the other order as strides
    assert same(call(where, swapped), want)


@everywhere
def test_interleaved(where, plain):
    """K and V in one buffer, page by page, cell by cell, and several layers to a page."""
    p, want = plain
    for axis in (0, 1, 2, 3):
        codes = np.stack([p.kv.k, p.kv.v], axis)
        scales = np.stack([p.kv.k_scale, p.kv.v_scale], axis)
        parts = [np.moveaxis(x, axis, 0)[i] for x in (codes, scales) for i in (0, 1)]
        assert right_or_refused(where, p.with_kv(k=parts[0], v=parts[1], k_scale=parts[2], v_scale=parts[3]), want) == "right"
    layers = {x: np.repeat(getattr(p.kv, x)[:, None], 9, 1) for x in POOLS}
    for x, pool in layers.items():
        pool[:, [0, 1, 2, 3, 5, 6, 7, 8]] = 127 if x in "kv" else np.nan
    assert same(call(where, p.with_kv(**{x: pool[:, 4] for x, pool in layers.items()})), want)


@everywhere
def test_transposed_queries(where, plain):
    p, want = plain
    q = np.ascontiguousarray(p.q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert right_or_refused(where, p._replace(q=q), want, times=3) == "right"
    dims_first = np.ascontiguousarray(p.q.transpose(2, 0, 1)).transpose(1, 2, 0)
    said = right_or_refused(where, p._replace(q=dims_first), want, times=3)
    assert "the innermost dimension must be contiguous" in said


def shifted(array, bytes_):
    """A copy that begins this far past an address that is a multiple of 64."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64 + bytes_
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@everywhere
@pytest.mark.parametrize("shift", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["q", *POOLS])
def test_misaligned(where, plain, name, shift):
    p, want = plain
    array = shifted(p.q if name == "q" else getattr(p.kv, name), shift)
    moved = p._replace(q=array) if name == "q" else p.with_kv(**{name: array})
    said = right_or_refused(where, moved, want)
    if shift % array.itemsize:
        assert f"{name} is misaligned" in said
    elif not where.on_gpu or shift == 16:
        assert said == "right"


@everywhere
def test_broadcast(where):
    """Strides of zero: one head's q for all, one page's scales for all, one list for all queries."""
    p = problem(where, n_q=5, seed=2)
    q = np.broadcast_to(p.q[:, :1], p.q.shape)
    want = check(where, p._replace(q=q.copy()))
    assert right_or_refused(where, p._replace(q=q), want) == "right"
    scales = np.broadcast_to(p.kv.k_scale[:1, :1], p.kv.k_scale.shape)
    want = check(where, p.with_kv(k_scale=scales.copy()))
    assert right_or_refused(where, p.with_kv(k_scale=scales), want) == "right"
    ids = np.broadcast_to(np.array([3, 9, 20, -1, 4], np.int32), (5, p.kv.k.shape[1], 5))
    want = check(where, p, ids=ids.copy())
    assert right_or_refused(where, p, want, ids=ids) == "right"
    widths = np.broadcast_to(np.array([3], np.int32), (5,))
    want = check(where, p, ids=ids.copy(), widths=widths.copy())
    assert right_or_refused(where, p, want, ids=ids, widths=widths) == "right"


@everywhere
def test_views_of_tables_and_lists(where, plain):
    """Rows longer than what they are used for."""
    p, want = plain
    table = np.full((3, p.kv.page_table.size + 7), 2**31 - 1, np.int32)
    table[1, : p.kv.page_table.size] = p.kv.page_table
    assert same(call(where, p.with_kv(page_table=table[1:2, : p.kv.page_table.size]), cu_seqlens_q=[0, 5]), want)
    assert same(call(where, p.with_kv(page_table=table[1, : p.kv.page_table.size])), want)
    ids = np.full((5, 90), -7, np.int32)
    ids[:, 20:60] = np.arange(40)
    assert same(call(where, p, ids=ids[:, 20:60]), want)
    records = np.full((5, 8), 2**30, np.int32)
    records[:, 3] = 40
    assert same(call(where, p, ids=ids[:, 20:60], widths=records[:, 3]), want)


@everywhere
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_outputs_beside_other_things(where, dtype):
    """Nothing but the view is written."""
    p = problem(where, n_q=5, seed=3)
    p = p._replace(q=p.q.astype(dtype))
    want = call(where, p)
    room = np.full((7, *p.q.shape[1:-1], p.q.shape[2] + 16), 77, dtype)
    view = room[1:6, :, 8:-8]
    there = PagedKV(*(at(where, getattr(p.kv, x)) for x in (*POOLS, "page_table")))
    out = OnDevice(view, where.device) if where.on_gpu else view
    make_call(at(where, p.q), there, kernel=where.kernel).run(out, None)
    if where.on_gpu:
        room.reshape(-1).view(np.uint8)[...] = out.memory.read()
    assert same_bytes(room[1:6, :, 8:-8], want[0])
    room[1:6, :, 8:-8] = 77
    assert (room == 77).all()
