"""What the fake drivers of both vendors share: the library from Python, arrays on its cards, and the parameters of a launch."""

import ctypes
import itertools
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided

import strata_pa

_copies = itertools.count()


def compile_library(path, *sources, options=()):
    """A shared library of C++ sources, with tests/ and the root of the checkout as places of headers."""
    here = Path(__file__).parent
    flags = ("-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-I", here, "-I", here.parent)
    subprocess.run(["g++", "-O1", *flags, *options, "-o", path, *sources], check=True)
    return path


class Launch(ctypes.Structure):
    _fields_ = (
        ("ordinal", ctypes.c_int),
        *((name, ctypes.c_uint) for name in ("grid", "block", "shared")),
        ("stream", ctypes.c_uint64),
        ("symbol", ctypes.c_char * 64),
    )

    @property
    def kernel(self):
        """The kernel of the contract that this is: "v2"."""
        return self.symbol.decode().split("_")[1]


HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch), ctypes.POINTER(ctypes.c_void_p))
LAUNCH_FAILED = 719  # of both vendors' drivers


class FakeDriver:
    """One fake driver; each is a library of its own, so decisions about cards are not shared."""

    def __init__(self, library, folder):
        self.path = folder / f"{library.stem}-{next(_copies)}.so"
        shutil.copy(library, self.path)
        self.lib = ctypes.CDLL(str(self.path))
        self.lib.fake_launch.restype = ctypes.POINTER(Launch)

    def fail(self, call, status, symbol="", skip=0):
        self.lib.fake_fail(call.encode(), symbol.encode(), status, skip)

    def heal(self):
        self.lib.fake_heal()

    def calls(self, name):
        return self.lib.fake_calls(name.encode())

    def forget(self):
        self.lib.fake_forget()

    @property
    def launches(self):
        return [self.lib.fake_launch(i).contents for i in range(self.lib.fake_launches())]

    def hook(self, function):
        """`function(launch, params)` at each launch."""
        self.hook_all(lambda launch, parameters: function(launch, Params.from_address(parameters[0])))

    def hook_all(self, function):
        """`function(launch, parameters)` at each launch: the addresses of all parameters. What it raises is `raised`; the launch fails."""
        self.raised = None

        def call(launch, parameters):
            try:
                function(launch.contents, parameters)
            except Exception as error:
                self.raised = error
                return LAUNCH_FAILED
            return 0

        self._hook = HOOK(call)  # kept
        self.lib.fake_hook(self._hook)


class FakeArray:
    """An array at an address of a card that nothing stands behind."""

    def __init__(self, shape, dtype, address=None, strides=None, ordinal=0, readonly=False, stream=None):
        dtype = np.dtype(dtype)
        address = (ordinal << 40) + (next(_copies) + 1 << 24) if address is None else address
        if math.prod(shape) == 0:
            address = 0
        strides = strides and tuple(s * dtype.itemsize for s in strides)
        self.__cuda_array_interface__ = {
            "shape": tuple(shape), "typestr": dtype.str, "data": (address, readonly), "strides": strides, "version": 3, "stream": stream,
        }  # fmt: skip


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Exporter:
    """Device memory by DLPack alone, of a library that says `kind` (2: CUDA, 10: ROCm) and the ordinal `says`.

    `streams` are those that importers named.
    """

    def __init__(self, shape, dtype, ordinal=0, kind=2, says=None):
        self.kind, self.says, self.streams = kind, ordinal if says is None else says, []
        dtype = np.dtype(dtype)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        address = FakeArray(shape, dtype, ordinal=ordinal).__cuda_array_interface__["data"][0]
        code = {"i": 0, "u": 1, "f": 2}[dtype.kind]
        self._tensor = Tensor(address, (kind, self.says), len(shape), code, dtype.itemsize * 8, 1, self._shape, None, 0, None, None)

    def __dlpack_device__(self):
        return self.kind, self.says

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


def birth(n_q=3, ordinal=0, **other):
    """(q, kv, out) in the geometry that every kernel serves. Names of arrays: other FakeArrays in place of them."""
    s = SimpleNamespace(n_head=24, n_kv=2, dim=256, group=64, page_size=4, pages=6)
    pool, scales = (s.pages, s.n_kv, s.page_size, s.dim), (s.pages, s.n_kv, s.page_size, s.dim // s.group)
    arrays = {
        "q": ((n_q, s.n_head, s.dim), np.float32),
        "k": (pool, np.int8),
        "v": (pool, np.int8),
        "k_scale": (scales, np.float16),
        "v_scale": (scales, np.float16),
        "page_table": ((s.pages,), np.int32),
        "out": ((n_q, s.n_head, s.dim), np.float32),
    }
    a = {name: other.get(name) or FakeArray(*x, ordinal=ordinal) for name, x in arrays.items()}
    return a["q"], strata_pa.PagedKV(*(a[name] for name in ("k", "v", "k_scale", "v_scale", "page_table"))), a["out"]


i32, i64, u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64


def fields(kind, names):
    return tuple((name, kind) for name in names.split())


class PoolStride(ctypes.Structure):
    _fields_ = (("head", i64), ("page", i32), ("slot", i32))


class Sequence(ctypes.Structure):
    _fields_ = (("q_end", i32), ("kv_len", i32))


class Params(ctypes.Structure):
    """As cuda/launch.h has it."""

    _fields_ = (
        *fields(u64, "q out lse k v k_scale v_scale page_table ids widths"),
        *fields(i64, "q_stride q_head_stride out_stride out_head_stride lse_stride"),
        *fields(i64, "page_table_stride ids_stride ids_head_stride widths_stride"),
        *fields(PoolStride, "k_stride v_stride k_scale_stride v_scale_stride"),
        *fields(i32, "n_q n_kv heads_per_kv group pages max_pages page_size"),
        ("page_magic", ctypes.c_uint32),
        *fields(i32, "page_shift cap granularity_log2 causal window_left dtype"),
        ("score_scale", ctypes.c_float),
        *fields(i32, "max_entries n_seq"),
        ("seq", Sequence * 64),
    )


def at(address, dtype, shape, strides):
    """Host memory as an array; strides in elements."""
    if 0 in shape:
        return np.empty(shape, dtype)
    itemsize = np.dtype(dtype).itemsize
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = np.frombuffer((ctypes.c_char * (elements * itemsize)).from_address(address), dtype)
    return as_strided(raw, shape, [s * itemsize for s in strides])


def answer_on_the_cpu(launch, p):
    """What the launched portable kernel would write, by the CPU's kernel of that name."""
    symbol = launch.symbol.decode()
    # Beside strata_exact_tile_ (of two launches the sums') or _rows_, which answers all.
    if symbol.startswith(("strata_tile_", "strata_rows_", "strata_exact_rest_", "strata_exact_tile_scores_")):
        return
    dim = int(symbol.split("_d")[1].split("_")[0])
    assert launch.grid == p.n_q * p.n_kv or "_tile_" in symbol or "_rows_" in symbol
    dtype = (np.float32, np.float16)[p.dtype]
    heads = p.n_kv * p.heads_per_kv
    pools = {}
    for name, kind, inner in (
        ("k", np.int8, dim),
        ("v", np.int8, dim),
        ("k_scale", np.float16, dim // p.group),
        ("v_scale", np.float16, dim // p.group),
    ):
        s = getattr(p, f"{name}_stride")
        pools[name] = at(getattr(p, name), kind, (p.pages, p.n_kv, p.page_size, inner), (s.page, s.head, s.slot, 1))
    kv = strata_pa.PagedKV(**pools, page_table=at(p.page_table, np.int32, (p.n_seq, p.max_pages), (p.page_table_stride, 1)))
    ends = [p.seq[i].q_end for i in range(p.n_seq)]
    options = {
        "cu_seqlens_q": [0, *ends],
        "kv_len": [p.seq[i].kv_len for i in range(p.n_seq)],
        "causal": bool(p.causal),
        "window_left": p.window_left,
        "sm_scale": float(p.score_scale) / 1.4426950408889634,
        "granularity": 1 << p.granularity_log2,
        "kernel": launch.kernel,
    }
    if p.ids:
        options["ids"] = at(p.ids, np.int32, (p.n_q, p.n_kv, p.cap), (p.ids_stride, p.ids_head_stride, 1))
        if p.widths:
            options["widths"] = at(p.widths, np.int32, (p.n_q,), (p.widths_stride,))
    q = at(p.q, dtype, (p.n_q, heads, dim), (p.q_stride, p.q_head_stride, 1))
    out, lse = strata_pa.prompt_attention(q, kv, return_lse=True, **options)
    at(p.out, dtype, q.shape, (p.out_stride, p.out_head_stride, 1))[...] = out
    if p.lse:
        at(p.lse, np.float32, lse.shape, (p.lse_stride, 1))[...] = lse


def field_bytes(p):
    """A copy that outlives the launch."""
    return bytes(memoryview(p).cast("B"))
