"""Launches the kernels of cuda/ on problems of arrays: Params filled as cuda/launch.h says, symbols and shapes from its functions."""

import ctypes
import math
import pathlib

import driver
import numpy as np

KERNELS = {"fp32": 0, "v1": 1, "v2": 2, "imma": 3, "exact": 4}
FILES = {"fp32": "fp32_sm75", "v1": "v1_sm75", "v2": "v2_sm80", "imma": "imma_sm80", "exact": "exact_sm80"}
MAX_SEQUENCES = 64

i32, i64, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64


class PoolStride(ctypes.Structure):
    _fields_ = [("head", i64), ("page", i32), ("slot", i32)]


class Sequence(ctypes.Structure):
    _fields_ = [("q_end", i32), ("kv_len", i32)]


class Params(ctypes.Structure):
    _fields_ = [
        *[(x, ptr) for x in ("q", "out", "lse", "k", "v", "k_scale", "v_scale", "page_table", "ids", "widths")],
        *[
            (x, i64)
            for x in (
                "q_stride",
                "q_head_stride",
                "out_stride",
                "out_head_stride",
                "lse_stride",
                "page_table_stride",
                "ids_stride",
                "ids_head_stride",
                "widths_stride",
            )
        ],
        *[(x, PoolStride) for x in ("k_stride", "v_stride", "k_scale_stride", "v_scale_stride")],
        *[(x, i32) for x in ("n_q", "n_kv", "heads_per_kv", "group", "pages", "max_pages", "page_size")],
        ("page_magic", ctypes.c_uint32),
        *[(x, i32) for x in ("page_shift", "cap", "granularity_log2", "causal", "window_left", "dtype")],
        ("score_scale", ctypes.c_float),
        ("max_entries", i32),
        ("n_seq", i32),
        ("seq", Sequence * MAX_SEQUENCES),
    ]


class Kernels:
    def __init__(self, images: pathlib.Path, arch="sm_90"):
        self.driver = driver.Driver()
        self.lib = ctypes.CDLL(str(images / "launcher.so"))
        self.lib.scale_for.restype = ctypes.c_float
        self.lib.scale_for.argtypes = [ctypes.c_int, ctypes.c_double]
        assert self.lib.params_bytes() == ctypes.sizeof(Params), (self.lib.params_bytes(), ctypes.sizeof(Params))
        self.modules = {
            k: self.driver.load(images / f"{f}.{arch}.cubin") for k, f in FILES.items() if (images / f"{f}.{arch}.cubin").exists()
        }
        self.functions = {}

    def symbol(self, kernel, dim, group, rows):
        if kernel == "fp32":
            return f"strata_fp32_d{dim}_r{-(-rows // 4) * 4}"
        return f"strata_{kernel}_d{dim}_g{group}"

    def function(self, kernel, symbol, shared):
        if symbol not in self.functions:
            f = self.driver.function(self.modules[kernel], symbol)
            if self.driver.attribute(f, driver.LOCAL_BYTES):
                print(f"{symbol}: {self.driver.attribute(f, driver.LOCAL_BYTES)} bytes of local memory", flush=True)
            self.functions[symbol] = [f, 0]
        entry = self.functions[symbol]
        if shared > entry[1]:
            self.driver.allow_shared(entry[0], shared)
            entry[1] = shared
        return entry[0]


class Problem:
    """Arrays on the device, and Params without a kernel. q may be float32, float16 or uint16 (bfloat16 bits); the layout is HND or NHD."""

    def __init__(
        self,
        kernels,
        p,
        *,
        layout="HND",
        granularity=1,
        window_left=-1,
        causal=True,
        sm_scale=None,
        cu_seqlens_q=None,
        bfloat16=False,
        q_rows=None,
    ):
        self.kernels, d = kernels, kernels.driver
        q = p["q"] if q_rows is None else p["q"][q_rows]
        self.n_q, self.n_head, self.dim = q.shape
        self.out_type = q.dtype
        x = Params()
        x.q, x.q_stride, x.q_head_stride = d.put(q), self.n_head * self.dim, self.dim
        x.dtype = 2 if bfloat16 else {np.dtype(np.float32): 0, np.dtype(np.float16): 1}[q.dtype]
        for name in ("k", "v", "k_scale", "v_scale"):
            a = p[name]
            setattr(x, name, d.put(a))
            s = [z // a.itemsize for z in np.ascontiguousarray(a).strides]
            setattr(x, f"{name}_stride", PoolStride(s[1], s[0], s[2]) if layout == "HND" else PoolStride(s[2], s[0], s[1]))
        pages, a, b, _ = p["k"].shape
        x.n_kv, x.page_size = (a, b) if layout == "HND" else (b, a)
        x.pages, x.group, x.heads_per_kv = pages, self.dim // p["k_scale"].shape[3], self.n_head // x.n_kv
        table = np.atleast_2d(p["page_table"])
        x.page_table, x.max_pages, x.page_table_stride = d.put(table), table.shape[1], table.shape[1]
        x.granularity_log2 = granularity.bit_length() - 1
        if p.get("ids") is not None:
            ids = p["ids"] if q_rows is None else p["ids"][q_rows]
            x.ids, x.cap, x.ids_stride = d.put(ids), ids.shape[-1], int(np.prod(ids.shape[1:]))
            x.ids_head_stride = ids.shape[-1] if ids.ndim == 3 else 0
            if p.get("widths") is not None:
                x.widths, x.widths_stride = d.put(p["widths"] if q_rows is None else p["widths"][q_rows]), 1
        lengths = np.atleast_1d(p["kv_len"])
        if q_rows is not None:  # a call with a part of one sequence's queries: its last one sits where it did
            lengths = lengths - (len(p["q"]) - 1 - int(np.arange(len(p["q"]))[q_rows][-1]))
        starts = [0, self.n_q] if cu_seqlens_q is None else list(cu_seqlens_q)
        x.n_seq = len(lengths)
        for s in range(len(lengths)):
            x.seq[s] = Sequence(int(starts[s + 1]), int(lengths[s]))
        x.causal, x.window_left, x.n_q = int(causal), window_left, self.n_q
        x.max_entries = int(lengths.max()) if p.get("ids") is None else x.cap * granularity
        kernels.lib.set_page(ctypes.byref(x), x.page_size)
        self.sm_scale = 1 / math.sqrt(self.dim) if sm_scale is None else sm_scale
        self.bytes = self.n_q * self.n_head * self.dim * q.dtype.itemsize
        x.out, x.out_stride, x.out_head_stride = d.alloc(self.bytes), self.n_head * self.dim, self.dim
        x.lse, x.lse_stride = d.alloc(self.n_q * self.n_head * 4), self.n_head
        self.params = x

    def launcher(self, kernel):
        """A function that launches the kernel once."""
        ks, x, number = self.kernels, self.params, KERNELS[kernel]
        x.score_scale = ks.lib.scale_for(number, self.sm_scale)
        grid, block, shared = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        ks.lib.config_for(number, ctypes.byref(x), self.dim, ctypes.byref(grid), ctypes.byref(block), ctypes.byref(shared))
        f = ks.function(kernel, ks.symbol(kernel, self.dim, x.group, x.heads_per_kv), shared.value)
        own, more = Params.from_buffer_copy(x), ctypes.create_string_buffer(2048)  # exact's second parameter, empty
        return lambda: ks.driver.launch(f, grid.value, block.value, shared.value, own, more)

    def run(self, kernel):
        """out [n_q, n_head, D], lse [n_q, n_head]; both poisoned before."""
        d = self.kernels.driver
        d.fill(self.params.out, 0xAB, self.bytes)
        d.fill(self.params.lse, 0xAB, self.n_q * self.n_head * 4)
        if self.n_q:
            self.launcher(kernel)()
        d.sync()
        return (
            d.get(self.params.out, (self.n_q, self.n_head, self.dim), self.out_type),
            d.get(self.params.lse, (self.n_q, self.n_head), np.float32),
        )
