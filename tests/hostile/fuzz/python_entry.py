"""One fuzzed call of the Python surface: a small problem that is right but for what the bytes change."""

import contextlib

import ml_dtypes
import numpy as np
from choices import Choices
from numpy.lib.stride_tricks import as_strided

import strata_pa

DTYPES = (
    np.float32, np.float16, np.int8, np.int32, ml_dtypes.bfloat16, np.uint8, np.int16, np.int64, np.float64, np.bool_, np.complex64,
    np.dtype(">f4"), np.dtype("V3"), np.dtype("U2"),
)  # fmt: skip
EDGES = (-(2**31), -2, -1, 0, 1, 2**15, 2**30, 2**31 - 1)
SCALARS = (
    None, True, 0, 1, -1, 2, 3, 4, 16, 128, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63), 2**70, 0.5, float("nan"), float("inf"), 1e-45,
    "x", b"", (), [1],
)  # fmt: skip


class Held:
    """An array that ends where its buffer ends, for AddressSanitizer to see a step past it; its type, shape or strides may be wrong."""

    def __init__(self, c: Choices, name: str, shape: tuple, dtype, fill):
        self.name = name
        if c.rarely(24):
            dtype = c.one_of(DTYPES)
        shape = list(shape)
        if c.rarely(24):
            shape[c.number(0, len(shape) - 1)] = c.number(0, 9)
        if c.rarely(48):
            shape.insert(c.number(0, len(shape)), c.number(0, 2))
        if c.rarely(48):
            shape.pop(c.number(0, len(shape) - 1))
        self.array = self._place(c, tuple(shape), np.dtype(dtype), fill)

    def _place(self, c, shape, dtype, fill):
        size = dtype.itemsize
        order, strides = list(range(len(shape)))[::-1], [0] * len(shape)
        if c.rarely(8):
            c.generator().shuffle(order)
        extent = 1
        for d in order:
            strides[d] = extent * size
            extent *= max(shape[d], 1)
            if c.rarely(12):
                extent += c.number(0, 5)
            if c.rarely(24):
                strides[d] = c.one_of((0, 1, size, -strides[d], strides[d] // 2))
        low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0 and n)
        high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0 and n) + size
        shift = c.one_of((0, 0, 0, 0, 1, 2, 4, 8)) if c.rarely(12) else 0
        raw = np.zeros(high - low + shift, np.uint8)
        start = shift - low
        array = as_strided(raw[start : start + size].view(dtype), shape, strides) if 0 not in shape else np.zeros(shape, dtype)
        if array.size:
            with contextlib.suppress(TypeError, ValueError):  # a type without such numbers: zeros
                array[...] = fill(c, shape).astype(dtype)
        if c.rarely(32):
            array.flags.writeable = False
        return array


def codes(c, shape):
    rng = c.generator()
    return rng.integers(-128, 128, shape) if not c.rarely(8) else np.full(shape, c.one_of((-128, 127, 0)))


def scales(c, shape):
    values = c.generator().uniform(0, 0.02, shape)
    if values.size and c.rarely(8):
        values.reshape(-1)[c.number(0, values.size - 1)] = c.one_of((np.nan, np.inf, -np.inf, 65504, 6e-8, -1.0))
    return values


def floats(c, shape):
    values = c.generator().standard_normal(shape)
    if values.size and c.rarely(8):
        values.reshape(-1)[c.number(0, values.size - 1)] = c.one_of((np.nan, np.inf, -np.inf, 3e38, 1e-45, 1e30))
    return values


def integers(low, high):
    def fill(c, shape):
        values = c.generator().integers(low, high + 1, shape)
        if values.size and c.rarely(6):
            values.reshape(-1)[c.number(0, values.size - 1)] = c.one_of(EDGES)
        return values

    return fill


def odd(c, value):
    return c.one_of(SCALARS) if c.rarely(24) else value


def problem(c):
    """(q, kv, options); raises what PagedKV raises."""
    dim = c.one_of((64, 128, 256, 64, 64, 96))
    group = c.one_of((32, 64, dim, 16))
    n_kv, heads = c.number(1, 3), c.number(1, 4)
    page_size, pages, n_q, n_seq = c.number(1, 9), c.number(1, 6), c.number(0, 6), c.one_of((1, 1, 1, 2, 3))
    nhd = c.rarely(3)
    shape = (pages, page_size, n_kv) if nhd else (pages, n_kv, page_size)
    pools = [
        Held(c, "k", (*shape, dim), np.int8, codes),
        Held(c, "v", (*shape, dim), np.int8, codes),
        Held(c, "k_scale", (*shape, max(dim // group, 1)), np.float16, scales),
        Held(c, "v_scale", (*shape, max(dim // group, 1)), np.float16, scales),
    ]
    max_pages = c.number(1, 5)
    table = Held(c, "page_table", (n_seq, max_pages) if n_seq > 1 or c.rarely(4) else (max_pages,), np.int32, integers(-1, pages - 1))
    layout = odd(c, "NHD" if nhd else "HND")
    q = Held(c, "q", (n_q, n_kv * heads, dim), c.one_of((np.float32, np.float32, np.float16, ml_dtypes.bfloat16)), floats)
    options = {}
    if n_seq > 1 or c.rarely(4):
        cuts = np.sort(c.generator().integers(0, n_q + 1, n_seq - 1))
        options["cu_seqlens_q"] = odd(c, [0, *cuts.tolist(), n_q])
        options["kv_len"] = odd(c, [c.number(0, max_pages * page_size) for _ in range(n_seq)])
    elif c.rarely(2):
        options["kv_len"] = odd(c, c.number(0, max_pages * page_size + 1))
    if c.rarely(2):
        cap = c.number(0, 12)
        granularity = c.one_of((1, 1, 4, 16, 64, 128, 3))
        options["granularity"] = odd(c, granularity)
        lists = (n_q, n_kv, cap) if c.rarely(3) else (n_q, cap)
        options["ids"] = Held(c, "ids", lists, np.int32, integers(-1, max_pages * page_size // granularity)).array
        if c.rarely(2):
            options["widths"] = Held(c, "widths", (n_q,), np.int32, integers(0, cap)).array
    if c.rarely(3):
        options["causal"] = odd(c, c.rarely(2))
    if c.rarely(3):
        options["window_left"] = odd(c, c.number(-1, 30))
    if c.rarely(6):
        options["sm_scale"] = odd(c, 0.1)
    if c.rarely(3):
        options["num_threads"] = odd(c, c.number(1, 3))
    kv = strata_pa.PagedKV(*(p.array for p in pools), table.array, layout)
    return q.array, kv, options


def whole(c, q, kv, options):
    kernel = odd(c, c.one_of((None, "fp32", "imma", "exact", "v2", "none")))
    if c.rarely(4):
        strata_pa.plan(q, kv, kernel=kernel, **options)
    arguments = {"return_lse": c.rarely(2)}
    if c.rarely(2):
        arguments["out"] = c.one_of((q, kv.k, None, 3)) if c.rarely(16) else Held(c, "out", q.shape, q.dtype, scales).array
    before = [np.asarray(x).tobytes() for x in (q, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)]
    result = strata_pa.prompt_attention(q, kv, kernel=kernel, **arguments, **options)
    out = result[0] if arguments["return_lse"] else result
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert [np.asarray(x).tobytes() for x in (q, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)] == before, "an input was written"


def in_parts(c, q, kv, options):
    options = {k: v for k, v in options.items() if k != "num_threads"}
    anchors = [strata_pa.exact_anchors(q, kv, **options) for _ in range(c.number(1, 3))]
    merged = strata_pa.merge_anchors(anchors)
    if c.rarely(8):
        merged = anchors[0]
    sums = [strata_pa.exact_sums(q, kv, anchors=merged, **options) for _ in anchors]
    strata_pa.exact_finish(merged, strata_pa.merge_sums(sums))


def quantize(c):
    shape = (*(c.number(0, 4) for _ in range(c.number(0, 4))), c.one_of((64, 128, 0, 63)))
    strata_pa.quantize_kv(Held(c, "x", shape, np.float32, floats).array, odd(c, c.one_of((32, 64, 128, 7))))


def run(data: bytes) -> str:
    """What came of it: "ok", or the text of the library's own error. Everything else is a finding."""
    c = Choices(data)
    what = c.number(0, 9)
    with np.errstate(all="ignore"):
        try:
            if what == 9:
                quantize(c)
            else:
                q, kv, options = problem(c)
                (in_parts if what == 8 else whole)(c, q, kv, options)
        except strata_pa.Error as error:
            return f"{type(error).__name__}: {error}"
    return f"ok {what}"
