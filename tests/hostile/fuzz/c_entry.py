"""One fuzzed call of the C interface: a small problem in which some fields are not what they should be.

The caller owes the library memory as large as the sizes and strides say; where those ask for more than a megabyte, nothing is called.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from choices import Choices

sys.path.insert(0, str(Path(__file__).parents[2]))
import capi

NAMES = {
    capi.INVALID_INPUT: "InvalidInput",
    capi.INVALID_TYPE: "InvalidType",
    capi.UNSUPPORTED_PROBLEM: "UnsupportedProblem",
    capi.UNSUPPORTED_DEVICE: "UnsupportedDevice",
    capi.OUT_OF_MEMORY: "OutOfMemory",
}
EDGES = (0, 1, -1, 2, 3, 7, 17, 65, 2**15, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
NUMBERS = [name for name, kind in capi.Problem._fields_ if kind in (ctypes.c_int32, ctypes.c_int64)]
POINTERS = [name for name, kind in capi.Problem._fields_ if kind is ctypes.c_void_p]
POOLS = ("k", "v", "k_scale", "v_scale")
MOST = 1 << 20


class TooLarge(Exception):
    pass


def sizes(c):
    p = capi.Problem()
    capi.call("problem_init", p, ctypes.sizeof(p))
    p.head_dim = c.one_of((64, 128, 256, 64))
    p.group = c.one_of((32, 64, p.head_dim))
    p.n_kv, p.page_size, p.pages = c.number(1, 2), c.number(1, 5), c.number(1, 5)
    p.n_head = p.n_kv * c.number(1, 4)
    p.n_seq, p.max_pages, p.n_q = c.one_of((1, 1, 2, 3)), c.number(1, 4), c.number(0, 5)
    p.dtype = c.one_of((0, 0, 1, 2))
    p.causal = c.number(0, 1)
    if c.rarely(2):
        p.cap, p.granularity = c.number(0, 9), c.one_of((1, 1, 4, 16))
    if c.rarely(3):
        p.window_left = c.number(-1, 20)
    capi.call("problem_set_strides", p, c.number(0, 1))
    p.lse_stride = p.n_head
    p.widths_stride = c.number(1, 3)
    return p


def change(c, p):
    """Up to three numbers are others."""
    for _ in range(c.number(0, 3) if c.rarely(2) else 0):
        name = c.one_of(NUMBERS)
        setattr(p, name, ctypes.c_int64(c.one_of(EDGES) if c.rarely(2) else c.number(-4, 300)).value)
    if c.rarely(12):
        setattr(getattr(p, c.one_of([f"{x}_stride" for x in POOLS])), c.one_of(("page", "head", "cell")), c.one_of(EDGES))


def memory(shape, strides, itemsize, shift=0):
    """(buffer, address) of an array with these strides in elements; nothing around it belongs to it."""
    if any(n <= 0 for n in shape):
        buffer = np.zeros(64, np.uint8)
        return buffer, buffer.ctypes.data
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True)) * itemsize
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True)) * itemsize + itemsize
    if high - low > MOST:
        raise TooLarge
    buffer = np.zeros(high - low + shift, np.uint8)
    return buffer, buffer.ctypes.data - low + shift


def place(c, p, held):
    """Every array, of exactly the size that the structure gives it, with random contents."""
    wide = 4 if p.dtype not in (1, 2) else 2
    rows, rng = (p.n_q, p.n_head, p.head_dim), c.generator()
    groups = max(p.head_dim // p.group, 1) if p.group else 1
    pool = (p.pages, p.n_kv, p.page_size)
    arrays = {
        "q": (rows, (p.q_stride, p.q_head_stride, 1), wide, lambda n: rng.standard_normal(n, np.float32)),
        "out": (rows, (p.out_stride, p.out_head_stride, 1), wide, None),
        "page_table": ((p.n_seq, p.max_pages), (p.page_table_stride, 1), 4, lambda n: integers(c, rng, n, -1, 4)),
        "kv_len": ((p.n_seq,), (1,), 4, lambda n: integers(c, rng, n, 0, 12)),
    }
    for name in POOLS:
        s, inner = getattr(p, f"{name}_stride"), groups if "scale" in name else p.head_dim
        fill = (
            (lambda n: rng.uniform(0, 0.02, n).astype(np.float16)) if "scale" in name else (lambda n: rng.integers(-128, 128, n, np.int8))
        )
        arrays[name] = ((*pool, inner), (s.page, s.head, s.cell, 1), 2 if "scale" in name else 1, fill)
    if p.n_seq != 1 or c.rarely(3):
        cuts = np.sort(rng.integers(0, max(p.n_q, 0) + 1, max(min(p.n_seq, 9) - 1, 0))) if p.n_q < 1000 else np.zeros(0, int)
        last = max(-(2**31), min(p.n_q, 2**31 - 1))
        arrays["cu_seqlens_q"] = ((p.n_seq + 1,), (1,), 4, lambda n: np.resize(np.array([0, *cuts, last], np.int32), n))
    if p.cap or c.rarely(8):
        arrays["ids"] = ((p.n_q, p.n_kv, p.cap), (p.ids_stride, p.ids_head_stride, 1), 4, lambda n: integers(c, rng, n, -1, 20))
        if c.rarely(2):
            arrays["widths"] = ((p.n_q,), (p.widths_stride,), 4, lambda n: integers(c, rng, n, 0, max(min(p.cap, 9), 0)))
    if c.rarely(2):
        arrays["lse"] = ((p.n_q, p.n_head), (p.lse_stride, 1), 4, None)
    for name, (shape, strides, itemsize, fill) in arrays.items():
        buffer, address = memory(shape, strides, itemsize, c.number(1, 3) if c.rarely(64) else 0)
        if fill:
            data = fill(max(len(buffer) // itemsize, 1))
            raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)[: len(buffer)]
            buffer[: len(raw)] = raw
        held.append(buffer)
        setattr(p, name, address)
    if c.rarely(24):
        setattr(p, c.one_of(POINTERS), None)
    if c.rarely(64):
        p.size = c.one_of((0, 8, ctypes.sizeof(p) - 8, ctypes.sizeof(p) + 8))


def integers(c, rng, n, low, high):
    values = rng.integers(low, high + 1, n).astype(np.int32)
    if n and c.rarely(8):
        values[c.number(0, min(n, 200) - 1)] = c.one_of((-(2**31), -2, -1, 0, 13, 2**31 - 1))
    return values


def whole(c):
    held, p = [], sizes(c)
    change(c, p)
    place(c, p, held)
    kernel = c.one_of((None, None, "fp32", "imma", "exact", "v2", "none", ""))
    with capi.context(num_threads=c.number(1, 2)) as where, capi.plan(where, p, kernel) as made:
        capi.call("plan_text", made)
        capi.run(made, p, c.one_of((1, None)) if c.rarely(64) else None)
        if c.rarely(8):  # the same plan for another problem
            other, more = sizes(c), []
            change(c, other)
            place(c, other, more)
            capi.run(made, other)


def quantize(c):
    dim, group, cells = c.one_of((64, 128, 96, 0)), c.one_of((32, 64, 7, 0)), c.number(0, 4)
    groups = max(dim // group, 1) if group else 1
    x_stride, code_stride, scale_stride = (c.one_of(EDGES) if c.rarely(8) else n for n in (dim, dim, groups))
    dtype = c.number(0, 3)
    x, x_at = memory((cells, dim), (x_stride, 1), 4 if dtype in (0, 3) else 2)
    x[...] = np.frombuffer(c.generator().standard_normal(len(x) // 4 + 1).astype(np.float32).tobytes(), np.uint8)[: len(x)]
    codes, codes_at = memory((cells, dim), (code_stride, 1), 1)
    scales, scales_at = memory((cells, groups), (scale_stride, 1), 2)
    capi.call("quantize", x_at, dtype, cells, dim, group, x_stride, codes_at, code_stride, scales_at, scale_stride)
    return x, codes, scales


def other(c):
    what = c.number(0, 3)
    if what == 0:
        index, size = c.one_of((*range(-3, 40), 2**31 - 1)), c.one_of((40, 48, 56, 0))
        capi.call("kernel_at", index, capi.KernelInfo(size))
    elif what == 1:
        isa = c.one_of((None, b"scalar", b"avx2", b"x" * 5000, b"\xff", b""))
        with capi.context(c.number(-1, 4), c.number(-2, 3), c.number(-3, 2000), isa):
            pass
    elif what == 2:
        capi.call("problem_init", capi.Problem(), c.one_of((0, 8, ctypes.sizeof(capi.Problem), 7, 64)))
    else:
        capi.call("problem_set_strides", sizes(c), c.number(-2, 5))


def run(data: bytes) -> str:
    """What came of it: "ok", or the kind and text of the library's error. Everything else is a finding."""
    c = Choices(data)
    what = c.number(0, 9)
    try:
        (quantize if what == 9 else other if what == 8 else whole)(c)
    except capi.Failed as failed:
        status, text = failed.args
        return f"{NAMES[status]}: {text}"  # an internal error has no name here
    except TooLarge:
        return "more memory than a test has"
    return f"ok {what}"
