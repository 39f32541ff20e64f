"""The Python surface: arrays of every kind, views, refusals, partial states of `exact`."""

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from small import cache, pool, queries, replace

import strata_pa
from strata_pa import InvalidInput, InvalidType, PagedKV, UnsupportedDevice, prompt_attention

CUDA, HIP = (bool(strata_pa.build_info()[f"{backend}_archs"]) for backend in ("cuda", "hip"))


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for variable in strata_pa.environment_variables():
        monkeypatch.delenv(variable["name"], raising=False)


Q, KV = queries(), cache()
CELLS = 20
OUT = prompt_attention(Q, KV)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def spread(a, extra=3):
    """The same values with other strides, the innermost dimension contiguous."""
    big = np.full([*(2 * n for n in a.shape[:-1]), a.shape[-1] + extra], 77, a.dtype)
    view = big[(*(slice(None, None, 2) for _ in a.shape[:-1]), slice(0, a.shape[-1]))]
    view[...] = a
    return view


# Errors and imports


def test_exceptions():
    assert issubclass(InvalidInput, strata_pa.Error)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(InvalidType, InvalidInput)
    assert issubclass(InvalidType, TypeError)
    assert issubclass(strata_pa.UnsupportedProblem, strata_pa.Error)
    assert issubclass(strata_pa.UnsupportedProblem, ValueError)
    assert issubclass(UnsupportedDevice, strata_pa.Error)
    assert issubclass(UnsupportedDevice, RuntimeError)
    error = pickle.loads(pickle.dumps(InvalidInput("text")))
    assert type(error) is InvalidInput
    assert InvalidInput.__module__ == "strata_pa"


def test_import_loads_nothing():
    code = "import sys, strata_pa; print(*{'numpy', 'strata_pa._core', 'torch'} & set(sys.modules), *dir(strata_pa))"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert set(names) >= set(strata_pa.__all__)
    assert not {"numpy", "strata_pa._core", "torch"} & set(names)


def test_every_public_name_exists_and_is_documented():
    for name in strata_pa.__all__:
        assert getattr(strata_pa, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        strata_pa.nothing  # noqa: B018


# Layouts


def test_outputs():
    assert (OUT.dtype, OUT.shape, OUT.flags.c_contiguous) == (np.float32, Q.shape, True)
    out, lse = prompt_attention(Q, KV, return_lse=True)
    assert same(out, OUT)
    assert (lse.dtype, lse.shape) == (np.float32, Q.shape[:2])
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("kernel", ["fp32", "imma", "exact"])
def test_views_give_the_same_bytes(kernel):
    expected = prompt_attention(Q, KV, kernel=kernel)
    views = PagedKV(spread(KV.k), spread(KV.v), spread(KV.k_scale), spread(KV.v_scale), KV.page_table)
    assert same(prompt_attention(spread(Q), views, kernel=kernel), expected)
    swapped = [np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in (KV.k, KV.v, KV.k_scale, KV.v_scale)]
    assert same(prompt_attention(Q, PagedKV(*swapped, KV.page_table, layout="NHD"), kernel=kernel), expected)
    both = np.stack([KV.k, KV.v], 1)  # K and V of a page interleaved
    assert same(prompt_attention(Q, replace(KV, k=both[:, 0], v=both[:, 1]), kernel=kernel), expected)
    heads_first = np.ascontiguousarray(Q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert same(prompt_attention(heads_first, KV, kernel=kernel), expected)
    out = spread(np.zeros_like(Q))
    assert prompt_attention(Q, KV, kernel=kernel, out=out) is out
    assert same(np.ascontiguousarray(out), expected)
    assert (out.base.reshape(-1)[-1], out.base[1].min()) == (77, 77)  # nothing beside the view is written


def test_ids_and_widths_as_views():
    ids = np.array([[0, 5, 9, -1], [1, 2, 3, 4], [19, 0, 7, 7]], np.int32)
    widths = np.array([2, 4, 3], np.int32)
    expected = prompt_attention(Q, KV, ids=ids, widths=widths)
    records = np.zeros((3, 5), np.int32)
    records[:, 2] = widths
    assert same(prompt_attention(Q, KV, ids=spread(ids), widths=records[:, 2]), expected)
    per_head = np.repeat(ids[:, None], 2, 1)
    assert same(prompt_attention(Q, KV, ids=per_head, widths=widths), expected)
    assert same(prompt_attention(Q, KV, ids=np.broadcast_to(ids[:, None], (3, 2, 4)), widths=widths), expected)
    table = np.full((1, 9), -1, np.int32)
    table[0, :5] = KV.page_table
    assert same(prompt_attention(Q, replace(KV, page_table=table[:, :5]), ids=ids, widths=widths), expected)


def test_read_only_and_broadcast_inputs():
    arrays = [a.copy() for a in (Q, KV.k, KV.v, KV.k_scale, KV.v_scale, KV.page_table)]
    for a in arrays:
        a.setflags(write=False)
    assert same(prompt_attention(arrays[0], PagedKV(*arrays[1:])), OUT)
    one = np.broadcast_to(Q[:1, :1], Q.shape)
    assert same(prompt_attention(one, KV), prompt_attention(one.copy(), KV))


def test_layouts_that_are_refused():
    with pytest.raises(InvalidInput, match=r"q: the innermost dimension must be contiguous, its stride is 12 elements"):
        prompt_attention(np.zeros((64, 4, 3), np.float32).transpose(2, 1, 0), KV)
    with pytest.raises(InvalidInput, match="the innermost dimension must be contiguous, its stride is 0"):
        prompt_attention(np.broadcast_to(np.float32(1), Q.shape), KV)
    with pytest.raises(InvalidInput, match=r"q has a negative stride in dimension 0 \(-256 elements\)"):
        prompt_attention(Q[::-1], KV)
    raw = np.zeros(Q.nbytes + 4, np.uint8)
    for shift in (1, 2, 3):
        with pytest.raises(InvalidInput, match=f"q is misaligned.*multiple of 4 bytes, the remainder is {shift}"):
            prompt_attention(raw[shift : shift + Q.nbytes].view(np.float32).reshape(Q.shape), KV)
    scales = np.zeros(KV.k_scale.nbytes + 1, np.uint8)[1:].view(np.float16).reshape(KV.k_scale.shape)
    with pytest.raises(InvalidInput, match="k_scale is misaligned"):
        prompt_attention(Q, replace(KV, k_scale=scales))
    field = np.zeros(KV.k_scale.shape, np.dtype([("a", np.float16), ("b", np.int8)]))["a"]
    with pytest.raises(InvalidInput, match=r"k_scale has a stride of .* bytes in dimension"):
        replace(KV, k_scale=field)


def test_outputs_that_are_refused():
    def refused(out, match):
        with pytest.raises(InvalidInput, match=match) as info:
            prompt_attention(Q, KV, out=out)
        with pytest.raises(type(info.value), match=match):
            strata_pa.plan(Q, KV, out=out)

    refused(Q, "out overlaps the memory of q")
    refused(np.zeros((3, 4, 65), np.float32)[..., :64].astype(np.float64), "out must be float32, got float64")
    refused(np.zeros((4, 4, 64), np.float32), r"out must be of q's shape = \[3, 4, 64\], got float32 \[4, 4, 64\]")
    refused(np.zeros((12, 64), np.float32), "out must have 3 dimensions")
    frozen = np.zeros_like(Q)
    frozen.setflags(write=False)
    refused(frozen, "out is read-only")
    for strides in ((256, 256, 4), (0, 256, 4), (1024, 252, 4)):
        refused(np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), Q.shape, strides), "out overlaps itself")
    refused([[0.0]], "out must be an array")
    both = np.zeros((2, *Q.shape), np.float32)
    both[0] = Q
    assert same(prompt_attention(both[0], KV, out=both[1]), OUT)


# Types


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (Q.astype(np.float64), "q must be float32 or float16 or bfloat16, got float64"),
        (Q.astype(np.int32), "got int32"),
        (Q.astype(">f4"), "foreign byte order"),
        (np.ma.masked_array(Q, Q > 0), "MaskedArray"),
        (Q.tolist(), r"q must be an array \(NumPy, DLPack or __cuda_array_interface__\), got list"),
        (None, "got NoneType"),
    ],
)
def test_types_of_q(array, match):
    with pytest.raises(InvalidType, match=match):
        prompt_attention(array, KV)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint32, np.float32])
def test_types_of_int32_arrays(dtype):
    ids, widths = np.zeros((3, 2)), np.zeros(3)
    name = np.dtype(dtype).name
    for arguments in ({"ids": ids.astype(dtype)}, {"ids": ids.astype(np.int32), "widths": widths.astype(dtype)}):
        with pytest.raises(InvalidType, match=rf"must be int32, got {name} .*\(use \.astype\(numpy\.int32\)\)"):
            prompt_attention(Q, KV, **arguments)
    with pytest.raises(InvalidType, match="page_table must be int32"):
        replace(KV, page_table=KV.page_table.astype(dtype))


def test_types_of_the_cache():
    with pytest.raises(InvalidType, match="k must be int8, got uint8"):
        replace(KV, k=KV.k.view(np.uint8))
    for dtype in (np.float32, np.uint16):
        with pytest.raises(InvalidType, match="v_scale must be float16"):
            replace(KV, v_scale=KV.v_scale.astype(dtype))
    with pytest.raises(InvalidType, match="kv must be a PagedKV, got tuple"):
        prompt_attention(Q, (KV.k, KV.v))


def test_float16_queries():
    half = queries(dtype=np.float16)
    out = prompt_attention(half, KV)
    assert out.dtype == np.float16
    assert same(out, prompt_attention(half.astype(np.float32), KV).astype(np.float16))


def test_ml_dtypes_bfloat16_queries():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q = queries().astype(bfloat16)
    assert same(prompt_attention(q, KV), prompt_attention(q.astype(np.float32), KV).astype(bfloat16))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"causal": 1}, InvalidType, "causal must be True or False, got int"),
        ({"window_left": 1.5}, InvalidType, "window_left must be an integer, got float"),
        ({"window_left": True}, InvalidType, "window_left must be an integer, got bool"),
        ({"window_left": -2}, InvalidInput, "window_left .* must be from -1 to 2147483647, got -2"),
        ({"window_left": 2**70}, InvalidInput, "window_left does not fit"),
        ({"sm_scale": "1"}, InvalidType, "sm_scale must be a number, got str"),
        ({"sm_scale": float("nan")}, InvalidInput, "sm_scale must be a finite float32, got nan"),
        ({"sm_scale": 1e39}, InvalidInput, "sm_scale must be a finite float32, got 1e"),
        ({"granularity": 0, "ids": np.zeros((3, 1), np.int32)}, InvalidInput, "granularity must be from 1"),
        ({"granularity": 4}, InvalidInput, "granularity 4 needs ids"),
        ({"widths": np.zeros(3, np.int32)}, InvalidInput, "widths needs ids"),
        ({"stream": 0}, InvalidInput, "stream is for GPU arrays"),
        ({"num_threads": "2"}, InvalidType, "num_threads must be an integer, got str"),
        ({"kv_len": 21}, InvalidInput, r"kv_len\[0\] must be from 0 to 20 \(5 pages of 4 cells\), got 21"),
        ({"kv_len": -1}, InvalidInput, r"kv_len\[0\] must be from 0"),
        ({"kv_len": [3, 3]}, InvalidInput, "kv_len must have one entry for each of 1 sequences, got 2"),
        ({"kv_len": 2**40}, InvalidInput, r"kv_len\[0\] does not fit 32 bits"),
        ({"kv_len": 3.0}, InvalidType, "kv_len must be an integer, got float"),
        ({"kv_len": np.array([3.0])}, InvalidType, "kv_len must be int8 or .*, got float64"),
        ({"cu_seqlens_q": [0, 2]}, InvalidInput, "cu_seqlens_q must end at the number of queries, 3, got 2"),
        ({"cu_seqlens_q": [1, 3]}, InvalidInput, "cu_seqlens_q must start at 0, got 1"),
        ({"cu_seqlens_q": [0, 1, 3]}, InvalidInput, "cu_seqlens_q must have 2 entries"),
        ({"cu_seqlens_q": "03"}, InvalidType, "cu_seqlens_q must be an integer, got str"),
        ({"ids": np.zeros((2, 1), np.int32)}, InvalidInput, r"ids must be \[n_q, cap\] = \[3, 1\], got int32 \[2, 1\]"),
        ({"ids": np.zeros((3, 3, 1), np.int32)}, InvalidInput, r"ids must be \[n_q, n_kv, cap\] = \[3, 2, 1\]"),
        ({"ids": np.zeros(3, np.int32)}, InvalidInput, "ids must have 2 or 3 dimensions"),
        ({"ids": np.zeros((3, 1), np.int32), "widths": np.zeros(4, np.int32)}, InvalidInput, r"widths must be \[n_q\] = \[3\]"),
    ],
)
def test_arguments_that_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        prompt_attention(Q, KV, **arguments)
    with pytest.raises(error, match=match):
        strata_pa.plan(Q, KV, **arguments)


def test_shapes_that_are_refused():
    with pytest.raises(InvalidInput, match="q must have 3 dimensions, got float32"):
        prompt_attention(Q[0], KV)
    with pytest.raises(InvalidInput, match="q's head_dim is 128, the cache's is 64"):
        prompt_attention(queries(head_dim=128), KV)
    with pytest.raises(InvalidInput, match="3 query heads are not a multiple of 2 KV heads"):
        prompt_attention(queries(n_head=3), KV)
    with pytest.raises(InvalidInput, match="query heads must be at least 1, got 0"):
        prompt_attention(queries(n_head=0), KV)
    with pytest.raises(InvalidInput, match="layout must be 'HND' or 'NHD', got 'DHN'"):
        replace(KV, layout="DHN")
    with pytest.raises(InvalidInput, match=r"v must be of k's shape"):
        replace(KV, v=KV.v[:4])
    with pytest.raises(InvalidInput, match=r"v_scale must be of k_scale's shape = \[5, 2, 4, 2\], got float16 \[5, 2, 4, 1\]"):
        replace(KV, v_scale=KV.v_scale[..., :1])
    with pytest.raises(InvalidInput, match="3, does not divide head_dim 64"):
        replace(KV, k_scale=np.zeros((5, 2, 4, 3), np.float16))
    with pytest.raises(InvalidInput, match=r"k_scale must be \[pages, page_size, n_kv, head_dim / group\]"):
        replace(KV, k=np.zeros((5, 4, 2, 64), np.int8), v=np.zeros((5, 4, 2, 64), np.int8), layout="NHD")
    with pytest.raises(InvalidInput, match="empty dimension"):
        PagedKV(*(a[:, :, :0] for a in (KV.k, KV.v, KV.k_scale, KV.v_scale)), KV.page_table)
    with pytest.raises(InvalidInput, match="page_table must have 1 or 2 dimensions"):
        replace(KV, page_table=KV.page_table[None, None])
    with pytest.raises(InvalidInput, match="a page table of 2 sequences needs cu_seqlens_q"):
        prompt_attention(Q, replace(KV, page_table=np.stack([KV.page_table] * 2)))


# Contents


def test_pages():
    for position, page in ((0, 5), (4, -2), (3, 2**31 - 1)):
        table = KV.page_table.copy()
        table[position] = page
        with pytest.raises(InvalidInput, match=rf"page_table\[{position}\] is {page}; a page is from 0 to 4, or -1"):
            prompt_attention(Q, replace(KV, page_table=table))
    two = np.stack([KV.page_table, table])
    with pytest.raises(InvalidInput, match=r"page_table\[1, 3\] is 2147483647"):
        prompt_attention(Q, replace(KV, page_table=two), cu_seqlens_q=[0, 1, 3])
    # Entries past kv_len are not part of the problem.
    assert np.isfinite(prompt_attention(Q, replace(KV, page_table=two), cu_seqlens_q=[0, 1, 3], kv_len=[20, 12])).all()
    nowhere = np.full(5, -1, np.int32)
    out, lse = prompt_attention(Q, replace(KV, page_table=nowhere), return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_ids():
    ids = np.zeros((3, 4), np.int32)
    ids[2, 1] = -2
    with pytest.raises(InvalidInput, match=r"ids\[2, 1\] is -2"):
        prompt_attention(Q, KV, ids=ids)
    with pytest.raises(InvalidInput, match=r"ids\[2, 1, 1\] is -2"):
        prompt_attention(Q, KV, ids=np.stack([np.zeros_like(ids), ids], 1))
    prompt_attention(Q, KV, ids=ids, widths=np.array([4, 4, 1], np.int32))  # past the width: not read
    for width in (-1, 5):
        with pytest.raises(InvalidInput, match=rf"widths\[1\] is {width}; a width is from 0 to 4"):
            strata_pa.plan(Q, KV, ids=np.zeros_like(ids), widths=np.array([4, width, 0], np.int32))
    # Cells past the query or past kv_len, and -1, are masked.
    ids = np.array([[3], [3], [3]], np.int32)
    far = np.array([[3, 1000, -1], [3, 2**31 - 1, -1], [-1, 3, CELLS]], np.int32)
    for granularity in (1, 4):
        arguments = {"granularity": granularity, "kernel": "exact"}
        assert same(prompt_attention(Q, KV, ids=far, **arguments), prompt_attention(Q, KV, ids=ids, **arguments))


def test_empty_calls():
    for kernel in ("fp32", "imma", "exact"):
        out, lse = prompt_attention(Q[:0], KV, kernel=kernel, return_lse=True)
        assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))
        out, lse = prompt_attention(Q, KV, kernel=kernel, kv_len=0, return_lse=True)
        assert not out.any()
        assert (lse == -np.inf).all()
        for arguments in ({"ids": np.zeros((3, 0), np.int32)}, {"ids": np.zeros((3, 4), np.int32), "widths": np.zeros(3, np.int32)}):
            assert not prompt_attention(Q, KV, kernel=kernel, **arguments).any()
        no_pages = PagedKV(*(a[:0] for a in (KV.k, KV.v, KV.k_scale, KV.v_scale)), KV.page_table[:0])
        assert not prompt_attention(Q, no_pages, kernel=kernel).any()
        # Fewer cells than queries: the first rows sit before cell 0.
        out = prompt_attention(Q, KV, kernel=kernel, kv_len=1)
        assert [bool(row.any()) for row in out] == [False, False, True]
    assert prompt_attention(Q[:0], KV, ids=np.zeros((0, 7), np.int32), widths=np.zeros(0, np.int32)).shape == (0, 4, 64)


def test_batches():
    tables = np.array([[0, 1, 2], [4, 3, -1]], np.int32)
    kv = replace(KV, page_table=tables)
    whole, lse = prompt_attention(Q, kv, cu_seqlens_q=[0, 1, 3], kv_len=[12, 6], return_lse=True)
    first = prompt_attention(Q[:1], replace(KV, page_table=tables[0]), kv_len=12)
    second, second_lse = prompt_attention(Q[1:], replace(KV, page_table=tables[1]), kv_len=6, return_lse=True)
    assert same(whole, np.concatenate([first, second]))
    assert same(lse[1:], second_lse)
    for kind in (np.int64, np.int32, np.uint8, np.int16):
        lists = {"cu_seqlens_q": np.array([0, 1, 3], kind), "kv_len": np.array([12, 0, 6, 0], kind)[::2]}
        assert same(prompt_attention(Q, kv, **lists), whole)
    assert same(prompt_attention(Q, kv, cu_seqlens_q=(0, np.int64(1), 3), kv_len=(12, 6)), whole)
    with pytest.raises(InvalidInput, match=r"kv_len\[1\] does not fit 32 bits: 4294967296"):
        prompt_attention(Q, kv, cu_seqlens_q=[0, 1, 3], kv_len=np.array([12, 2**32]))
    with pytest.raises(InvalidInput, match="kv_len must have one entry for each of 2 sequences, got 1"):
        prompt_attention(Q, kv, cu_seqlens_q=[0, 1, 3], kv_len=6)
    with pytest.raises(InvalidInput, match="must not descend, got 2 then 1 at position 2"):
        prompt_attention(Q, kv, cu_seqlens_q=[0, 2, 1])


def test_scalars_for_kv_len():
    expected = prompt_attention(Q, KV, kv_len=7)
    for kv_len in (np.int32(7), np.array(7), np.array([7]), [7]):
        assert same(prompt_attention(Q, KV, kv_len=kv_len), expected)


# Other libraries


class Exporter:
    """An array that is reachable by DLPack alone."""

    def __init__(self, array, device=(1, 0), old=False, error=None):
        self.array, self.device, self.old, self.error = array, device, old, error

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        if self.error:
            raise self.error
        if self.old and arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__()


@pytest.mark.parametrize("old", [False, True])
def test_dlpack(old):
    def wrap(a):
        return Exporter(a, old=old)

    kv = PagedKV(wrap(KV.k), wrap(KV.v), wrap(KV.k_scale), wrap(KV.v_scale), wrap(KV.page_table))
    assert (kv.pages, kv.page_size, kv.n_kv, kv.head_dim, kv.group) == (5, 4, 2, 64, 32)
    out = prompt_attention(wrap(Q), kv, kv_len=wrap(np.array([CELLS])))
    assert isinstance(out, np.ndarray)
    assert same(out, OUT)
    given = np.zeros_like(Q)
    prompt_attention(wrap(Q), kv, out=wrap(given))
    assert same(given, OUT)
    with pytest.raises(InvalidType, match=r"ids must be int32, got int64 \[3, 1\] \(convert it to int32\)"):
        prompt_attention(Q, KV, ids=wrap(np.zeros((3, 1), np.int64)))


def test_references_are_dropped():
    before = sys.getrefcount(Q)
    for _ in range(3):
        prompt_attention(Exporter(Q), KV)
        with pytest.raises(InvalidInput):
            prompt_attention(Exporter(Q), KV, window_left=-2)
    assert sys.getrefcount(Q) == before


@pytest.mark.parametrize("device", [2, 13, 10, 8])
def test_device_arrays_are_refused_not_copied(device):
    if (device != 8 and HIP) or (device in (2, 13) and CUDA):
        pytest.skip("tests/cuda and tests/hip have them")
    q = Exporter(Q, device=(device, 3), error=AssertionError("the array must not be exported"))
    name = {2: "CUDA device 3", 13: "CUDA device 3", 10: "HIP device 3", 8: "DLPack type 8"}[device]
    with pytest.raises(UnsupportedDevice, match=name):
        prompt_attention(q, KV)
    with pytest.raises(UnsupportedDevice, match="v_scale is"):
        replace(KV, v_scale=q)


@pytest.mark.skipif(CUDA or HIP, reason="tests/cuda and tests/hip have them")
def test_cuda_array_interface_is_recognized():
    class DeviceArray:
        __cuda_array_interface__ = {"shape": (3, 4, 64), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012

    with pytest.raises(UnsupportedDevice, match=r"q is in the memory of a CUDA device; this build is without CUDA \(STRATA_PA_CUDA=OFF\)"):
        prompt_attention(DeviceArray(), KV)
    with pytest.raises(UnsupportedDevice, match="kv_len is in the memory of a CUDA device"):
        prompt_attention(Q, KV, kv_len=DeviceArray())


def test_an_exporter_that_fails():
    with pytest.raises(InvalidInput, match="q: its library does not export it: requires grad"):
        prompt_attention(Exporter(Q, error=BufferError("requires grad")), KV)
    with pytest.raises(InvalidType, match="gave no DLPack capsule"):
        prompt_attention(Exporter(type("Odd", (), {"__dlpack__": lambda self: 3})()), KV)


def test_torch():
    torch = pytest.importorskip("torch")
    kv = PagedKV(*(torch.from_numpy(a) for a in (KV.k, KV.v, KV.k_scale, KV.v_scale, KV.page_table)))
    out, lse = prompt_attention(torch.from_numpy(Q), kv, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert same(out.numpy(), OUT)
    for dtype in (torch.float16, torch.bfloat16):
        q = torch.from_numpy(Q).to(dtype)
        out = prompt_attention(q, kv)
        assert out.dtype == dtype
        assert torch.equal(out, prompt_attention(q.float(), kv).to(dtype))
        given = torch.empty_like(q)
        assert prompt_attention(q, kv, out=given) is given
        assert torch.equal(given, out)
    with pytest.raises(InvalidInput, match="require gradient"):
        prompt_attention(torch.from_numpy(Q).requires_grad_(), kv)
    with pytest.raises(InvalidType, match="ids must be int32, got int64"):
        prompt_attention(torch.from_numpy(Q), kv, ids=torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="innermost"):
        prompt_attention(torch.from_numpy(np.zeros((64, 4, 3), np.float32)).permute(2, 1, 0), kv)
    codes, scales = strata_pa.quantize_kv(torch.from_numpy(Q).bfloat16(), 32)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float16)
    expected = strata_pa.quantize_kv(torch.from_numpy(Q).bfloat16().float().numpy(), 32)
    assert same(codes.numpy(), expected[0])
    assert same(scales.numpy(), expected[1])


# Quantization


def quantize_reference(x, group):
    """The written rule, in NumPy."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    scale = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    wide = scale.astype(np.float32)[..., None]
    codes = np.where(wide == 0, 0, np.clip(np.rint(groups / np.where(wide == 0, 1, wide)), -127, 127))
    return codes.astype(np.int8).reshape(x.shape), scale


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("group", [1, 32, 64, 128])
def test_quantize(dtype, group):
    rng = np.random.default_rng(5)
    for exponent in range(-30, 22):
        x = (rng.standard_normal((3, 2, 128)) * 2.0**exponent).astype(np.float32)
        if dtype == np.float16:
            x = np.clip(x, -65504, 65504).astype(np.float16)
        x[0, 0, 5:70] = 0
        for view in (x, spread(x), x[:, :1], x.transpose(1, 0, 2)):
            codes, scales = strata_pa.quantize_kv(view, group)
            expected = quantize_reference(view, group)
            assert same(codes, np.ascontiguousarray(expected[0]))
            assert same(scales, np.ascontiguousarray(expected[1]))


def test_quantize_rounds_every_scale_as_numpy_does():
    bits = np.random.default_rng(6).integers(0, 2**32, 200_000, np.uint64).astype(np.uint32)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:, None] * np.float32([1, 1 + 2**-11, 1 + 2**-11 + 2**-23])).ravel()
    x = np.concatenate([bits.view(np.float32), ties, ties * np.float32(127)])
    x = x[np.abs(x) < 8.32e6][:, None]  # drops what is not finite as well
    codes, scales = strata_pa.quantize_kv(x, 1)
    expected = quantize_reference(x, 1)
    assert same(scales, expected[1])
    assert same(codes, expected[0])


def test_quantize_refuses():
    x = np.zeros((2, 3, 64), np.float32)
    for value in (np.nan, np.inf, -np.inf, 8.33e6):
        x[1, 2, 5] = value
        with pytest.raises(InvalidInput, match=r"x\[1, 2, 5\] is not finite, or too large"):
            strata_pa.quantize_kv(x)
    with pytest.raises(InvalidInput, match="group 48 does not divide x's last dimension, 64"):
        strata_pa.quantize_kv(x, 48)
    with pytest.raises(InvalidInput, match="group 0"):
        strata_pa.quantize_kv(x, 0)
    with pytest.raises(InvalidType, match="x must be float32 or float16 or bfloat16, got float64"):
        strata_pa.quantize_kv(x.astype(np.float64))
    assert [a.shape for a in strata_pa.quantize_kv(x[:0])] == [(0, 3, 64), (0, 3, 1)]


# Partial states


def parts_of(n_parts):
    """The cells of a problem dealt out to parts, as lists of ids with -1 for none."""
    ids = np.stack([np.random.default_rng(i).permutation(CELLS) for i in range(len(Q))]).astype(np.int32)
    owner = np.random.default_rng(9).integers(0, n_parts, ids.shape)
    return ids, [np.where(owner == part, ids, -1).astype(np.int32) for part in range(n_parts)]


@pytest.mark.parametrize("n_parts", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_partial_states_give_the_bytes_of_the_whole(n_parts, dtype):
    q = Q.astype(dtype)
    ids, parts = parts_of(n_parts)
    out, lse = prompt_attention(q, KV, ids=ids, kernel="exact", return_lse=True)
    anchors = [strata_pa.exact_anchors(q, KV, ids=part) for part in parts]
    merged = strata_pa.merge_anchors(anchors)
    sums = [strata_pa.exact_sums(q, KV, ids=part, anchors=merged) for part in parts]
    for order in itertools.permutations(range(n_parts)):
        assert same(strata_pa.merge_anchors([anchors[i] for i in order]).b, merged.b)
        result = strata_pa.exact_finish(merged, strata_pa.merge_sums([sums[i] for i in order]), dtype)
        assert same(result[0], out)
        assert same(result[1], lse)


def test_parts_by_page_table():
    out, lse = prompt_attention(Q, KV, kernel="exact", return_lse=True)
    tables = [np.where(np.arange(5) % 2 == part, KV.page_table, -1).astype(np.int32) for part in range(2)]
    caches = [replace(KV, page_table=table) for table in tables]
    merged = strata_pa.merge_anchors([strata_pa.exact_anchors(Q, kv) for kv in caches])
    sums = strata_pa.merge_sums([strata_pa.exact_sums(Q, kv, anchors=merged) for kv in caches])
    given = np.zeros_like(Q)
    result = strata_pa.exact_finish(merged, sums, out=given)
    assert result[0] is given
    assert same(given, out)
    assert same(result[1], lse)


def test_bad_rows_survive_merging():
    q = Q.copy()
    q[1, 2, 3] = np.nan
    out, lse = prompt_attention(q, KV, kernel="exact", return_lse=True)
    assert np.isnan(lse).sum() == 1
    half = [np.where(np.arange(5) < 2, KV.page_table, -1).astype(np.int32), np.where(np.arange(5) < 2, -1, KV.page_table).astype(np.int32)]
    caches = [replace(KV, page_table=table) for table in half]
    anchors = [strata_pa.exact_anchors(q, kv) for kv in caches]
    for order in ((0, 1), (1, 0)):
        merged = strata_pa.merge_anchors([anchors[i] for i in order])
        assert np.isnan(merged.A).sum() == 1
        sums = strata_pa.merge_sums([strata_pa.exact_sums(q, kv, anchors=merged) for kv in caches])
        result = strata_pa.exact_finish(merged, sums)
        assert same(result[0], out)
        assert same(result[1], lse)


def test_merging_rows_without_cells():
    none = strata_pa.exact_anchors(Q, replace(KV, page_table=np.full(5, -1, np.int32)))
    assert np.isneginf(none.A).all()
    assert (none.b == -60).all()
    some = strata_pa.exact_anchors(Q, KV)
    for parts in ([none, some], [some, none], [none, some, none]):
        merged = strata_pa.merge_anchors(parts)
        assert same(merged.A, some.A)
        assert same(merged.b, some.b)
    assert same(strata_pa.merge_anchors([none, none]).A, none.A)


def test_anchors_merge_as_written():
    def anchors(A, b):
        return strata_pa.ExactAnchors(np.float32([[A]]), np.float32([[b]]))

    for (A1, b1), (A2, b2), expected in [
        ((5, 3), (2, 4), (5, 3)),
        ((5, -10), (2, 4), (5, 1)),
        ((5, -60), (-200, 7), (5, -60)),
        ((0, -50), (100, -60), (100, -60)),
    ]:
        for pair in ([anchors(A1, b1), anchors(A2, b2)], [anchors(A2, b2), anchors(A1, b1)]):
            merged = strata_pa.merge_anchors(pair)
            assert (merged.A.item(), merged.b.item()) == expected


def test_partial_states_that_are_refused():
    anchors = strata_pa.exact_anchors(Q, KV)
    sums = strata_pa.exact_sums(Q, KV, anchors=anchors)
    for merge in (strata_pa.merge_anchors, strata_pa.merge_sums):
        with pytest.raises(InvalidInput, match="no parts"):
            merge([])
    with pytest.raises(InvalidInput, match="A must be"):
        strata_pa.merge_anchors([anchors, strata_pa.ExactAnchors(anchors.A[:1], anchors.b[:1])])
    with pytest.raises(InvalidType, match="A must be float32, got float64"):
        strata_pa.exact_sums(Q, KV, anchors=strata_pa.ExactAnchors(anchors.A.astype(np.float64), anchors.b))
    with pytest.raises(InvalidInput, match="b must be C-contiguous"):
        strata_pa.exact_sums(Q, KV, anchors=strata_pa.ExactAnchors(anchors.A, spread(anchors.b)))
    huge = strata_pa.ExactSums(np.full_like(sums.L, 2**62), sums.O)
    with pytest.raises(InvalidInput, match="the sums do not fit 64 bits"):
        strata_pa.merge_sums([huge, huge])
    with pytest.raises(InvalidInput, match="dtype must be"):
        strata_pa.exact_finish(anchors, sums, "float64")
    with pytest.raises(InvalidType, match="L must be int64"):
        strata_pa.exact_finish(anchors, strata_pa.ExactSums(sums.L.astype(np.int32), sums.O))


def test_repr():
    assert repr(KV) == "PagedKV(5 pages of 4 cells, 2 KV heads, head_dim 64, group 32, layout 'HND')"
    assert pool()[0].shape == (5, 2, 4, 64)
