"""The C API by ctypes, and problems of NumPy arrays as its structures."""

import contextlib
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p

import numpy as np

import strata_pa

OK, INVALID_INPUT, INVALID_TYPE, UNSUPPORTED_PROBLEM, UNSUPPORTED_DEVICE, DRIVER_ERROR, OUT_OF_MEMORY, INTERNAL_ERROR = range(8)
CPU, CUDA, HIP = range(3)
DTYPES = ("float32", "float16", "bfloat16")


def fields(kind, names):
    return tuple((name, kind) for name in names.split())


class ContextOptions(ctypes.Structure):
    _fields_ = (("size", c_size_t), *fields(c_int32, "device ordinal num_threads"), ("isa", c_char_p))


class PoolStride(ctypes.Structure):
    _fields_ = fields(c_int64, "page head cell")


class Problem(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("q", c_void_p),
        *fields(c_int64, "n_q n_head head_dim q_stride q_head_stride"),
        *fields(c_int32, "dtype causal"),
        *fields(c_void_p, "k v k_scale v_scale"),
        *fields(c_int64, "pages n_kv page_size group"),
        *fields(PoolStride, "k_stride v_stride k_scale_stride v_scale_stride"),
        ("page_table", c_void_p),
        *fields(c_int64, "n_seq max_pages page_table_stride"),
        *fields(c_void_p, "cu_seqlens_q kv_len"),
        ("ids", c_void_p),
        *fields(c_int64, "cap ids_stride ids_head_stride"),
        ("widths", c_void_p),
        *fields(c_int64, "widths_stride granularity window_left"),
        ("sm_scale", c_double),
        ("out", c_void_p),
        *fields(c_int64, "out_stride out_head_stride"),
        ("lse", c_void_p),
        ("lse_stride", c_int64),
    )


class KernelInfo(ctypes.Structure):
    _fields_ = (("size", c_size_t), *fields(c_char_p, "name needs what"), *fields(c_int32, "device built opt_in portable"))


# name: (result, arguments); every function of the header
FUNCTIONS = {
    "abi": (c_int32, ()),
    "version": (c_char_p, ()),
    "build_info": (c_char_p, ()),
    "last_error": (c_char_p, ()),
    "context_create": (c_int32, (POINTER(ContextOptions), POINTER(c_void_p))),
    "context_destroy": (None, (c_void_p,)),
    "context_text": (c_char_p, (c_void_p,)),
    "context_refusal": (c_char_p, (c_void_p, c_char_p)),
    "problem_init": (c_int32, (POINTER(Problem), c_size_t)),
    "problem_set_strides": (c_int32, (POINTER(Problem), c_int32)),
    "plan_create": (c_int32, (c_void_p, POINTER(Problem), c_char_p, POINTER(c_void_p))),
    "plan_destroy": (None, (c_void_p,)),
    "plan_kernel": (c_char_p, (c_void_p,)),
    "plan_chosen_by": (c_char_p, (c_void_p,)),
    "plan_text": (c_char_p, (c_void_p,)),
    "plan_refusal": (c_char_p, (c_void_p, c_char_p)),
    "plan_workspace_bytes": (c_int64, (c_void_p,)),
    "run": (c_int32, (c_void_p, POINTER(Problem), c_void_p, c_void_p, c_size_t)),
    "exact_anchors": (c_int32, (c_void_p, POINTER(Problem), c_void_p, c_void_p)),
    "exact_sums": (c_int32, (c_void_p, POINTER(Problem), c_void_p, c_void_p, c_void_p, c_void_p)),
    "exact_finish": (c_int32, (c_void_p, POINTER(Problem), c_void_p, c_void_p, c_void_p, c_void_p)),
    "merge_anchors": (c_int32, (c_int64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "merge_sums": (c_int32, (c_int64, c_void_p, c_void_p)),
    "set_imma": (c_int32, (c_int32,)),
    "get_imma": (c_int32, ()),
    "kernel_count": (c_int32, ()),
    "kernel_at": (c_int32, (c_int32, POINTER(KernelInfo))),
    "quantize": (
        c_int32,
        (c_void_p, c_int32, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64),
    ),
    "allocate": (c_int32, (c_void_p, c_size_t, POINTER(c_void_p))),
    "release": (c_int32, (c_void_p, c_void_p)),
    "upload": (c_int32, (c_void_p, c_void_p, c_void_p, c_size_t)),
    "download": (c_int32, (c_void_p, c_void_p, c_void_p, c_size_t)),
    "synchronize": (c_int32, (c_void_p, c_void_p)),
}

_library = ctypes.CDLL(str(strata_pa.get_library()))


class Failed(Exception):
    """(status, text)"""


def call(name, *arguments):
    """The result of a function; a status that is not OK becomes Failed."""
    function = getattr(_library, f"strata_pa_{name}")
    function.restype, function.argtypes = FUNCTIONS[name]
    result = function(*arguments)
    if name in STATUS and result != OK:
        raise Failed(result, call("last_error"))
    return result.decode(errors="replace") if isinstance(result, bytes) else result  # a text quotes what it was given


# Functions whose int32_t is a number, not a status.
STATUS = {name for name, (result, _) in FUNCTIONS.items() if result is c_int32} - {"abi", "get_imma", "kernel_count"}


@contextlib.contextmanager
def context(device=CPU, ordinal=0, num_threads=0, isa=None):
    options = ContextOptions(ctypes.sizeof(ContextOptions), device, ordinal, num_threads, isa)
    made = c_void_p()
    call("context_create", options, made)
    try:
        yield made
    finally:
        call("context_destroy", made)


@contextlib.contextmanager
def plan(where, problem, kernel=None):
    made = c_void_p()
    call("plan_create", where, problem, kernel.encode() if kernel else None, made)
    try:
        yield made
    finally:
        call("plan_destroy", made)


def run(made, problem, stream=None, workspace=None, workspace_bytes=0):
    call("run", made, problem, stream, workspace, workspace_bytes)


def strides(array):
    return [s // array.dtype.itemsize for s in array.strides]


def problem(
    q,
    kv,
    out,
    place=lambda array: array.ctypes.data,
    *,
    ids=None,
    widths=None,
    kv_len=None,
    cu_seqlens_q=None,
    lse=None,
    dtype=None,
    **options,
):
    """(structure, what it points to). `place(array)`: the address that the device knows an array by; kv_len and cu_seqlens_q stay here."""
    p = Problem()
    call("problem_init", p, ctypes.sizeof(Problem))
    nhd = kv.layout == "NHD"
    p.q, p.out = place(q), place(out)
    p.n_q, p.n_head, p.head_dim = q.shape
    p.q_stride, p.q_head_stride, _ = strides(q)
    p.out_stride, p.out_head_stride, _ = strides(out)
    p.dtype = DTYPES.index(dtype or q.dtype.name)
    for name in ("k", "v", "k_scale", "v_scale"):
        pool = getattr(kv, name)
        setattr(p, name, place(pool))
        page, second, third, _ = strides(pool)
        setattr(p, f"{name}_stride", PoolStride(page, *((third, second) if nhd else (second, third))))
    p.pages, (p.n_kv, p.page_size) = kv.k.shape[0], kv.k.shape[2:0:-1] if nhd else kv.k.shape[1:3]
    p.group = p.head_dim // kv.k_scale.shape[3]
    table = kv.page_table
    p.page_table, p.n_seq, p.max_pages = place(table), len(table) if table.ndim == 2 else 1, table.shape[-1]
    p.page_table_stride = strides(table)[0] if table.ndim == 2 else p.max_pages
    kv_len = np.full(p.n_seq, p.max_pages * p.page_size) if kv_len is None else kv_len
    kv_len = np.ascontiguousarray(np.atleast_1d(kv_len), np.int32)
    p.kv_len = kv_len.ctypes.data
    if cu_seqlens_q is not None:
        cu_seqlens_q = np.ascontiguousarray(cu_seqlens_q, np.int32)
        p.cu_seqlens_q = cu_seqlens_q.ctypes.data
    if ids is not None:
        p.ids, p.cap, p.ids_stride = place(ids), ids.shape[-1], strides(ids)[0]
        p.ids_head_stride = strides(ids)[1] if ids.ndim == 3 else 0
    if widths is not None:
        p.widths, p.widths_stride = place(widths), strides(widths)[0]
    if lse is not None:
        p.lse, p.lse_stride = place(lse), strides(lse)[0]
    for name, value in options.items():
        setattr(p, name, value)
    return p, (q, kv, out, ids, widths, kv_len, cu_seqlens_q, lse)


class Memory:
    """Copies of arrays in the memory of a context's device."""

    def __init__(self, where):
        self.where, self._held = where, []

    def place(self, array):
        """The address of a copy of a contiguous array."""
        assert array.flags.c_contiguous
        address = self.allocate(array.nbytes)
        call("upload", self.where, address, array.ctypes.data, array.nbytes)
        return address

    def allocate(self, size):
        memory = c_void_p()
        call("allocate", self.where, size, memory)
        self._held.append(memory.value)
        return memory.value

    def write(self, address, array):
        call("upload", self.where, address, np.ascontiguousarray(array).ctypes.data, array.nbytes)

    def read(self, address, like):
        array = np.empty_like(like)
        call("download", self.where, array.ctypes.data, address, array.nbytes)
        return array

    def free(self):
        while self._held:
            call("release", self.where, self._held.pop())
