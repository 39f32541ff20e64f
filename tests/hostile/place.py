"""Where a hostile problem runs: every kernel of every device that is here, on host arrays or on a copy of them with the same layout."""

from typing import NamedTuple

import numpy as np
import pytest
from problems import random_kv, random_q, same_bytes

import strata_pa
from strata_pa import reference
from strata_pa._device import DeviceArray, ordinal_of
from strata_pa.attention import make_call

PORTABLE = ("fp32", "imma", "exact")
BOUND = {"v2": 1.5e-6, "v1": 1.5e-6}  # of max|out - float64| / max|float64|; the portable kernels:
PORTABLE_BOUND = 1.0e-6


class Where(NamedTuple):
    device: str
    kernel: str

    @property
    def on_gpu(self):
        return self.device != "cpu"

    @property
    def portable(self):
        return self.kernel in PORTABLE

    @property
    def bound(self):
        return BOUND.get(self.kernel, PORTABLE_BOUND)

    @property
    def shape(self):
        """Of small problems: the one geometry of the published kernels, for the others one that is quick."""
        return Shape(12, 2, 256, 64) if not self.portable else Shape(2, 2, 64, 32)


class Shape(NamedTuple):
    heads_per_kv: int
    n_kv: int
    dim: int
    group: int

    @property
    def n_head(self):
        return self.heads_per_kv * self.n_kv


def _places():
    for device in strata_pa.capabilities()["devices"]:
        marks = [pytest.mark.gpu] if device["backend"] != "cpu" else []
        for kernel in device["kernels"]:
            yield pytest.param(Where(device["device"], kernel), id=f"{device['device']}-{kernel}", marks=marks)


PLACES = list(_places())
GPUS = [p for p in PLACES if p.values[0].on_gpu]
NO_GPU = pytest.param(None, id="gpu", marks=[pytest.mark.gpu, pytest.mark.skip(reason="no GPU that this build serves")])

everywhere = pytest.mark.parametrize("where", PLACES)
on_gpus = pytest.mark.parametrize("where", GPUS or [NO_GPU])
on_the_cpu = pytest.mark.parametrize("where", [p for p in PLACES if not p.values[0].on_gpu])


class Problem(NamedTuple):
    q: np.ndarray
    kv: object  # k, v, k_scale, v_scale, page_table, layout

    def with_kv(self, **fields):
        names = ("k", "v", "k_scale", "v_scale", "page_table", "layout")
        return self._replace(kv=strata_pa.PagedKV(**{n: fields.get(n, getattr(self.kv, n)) for n in names}))


def problem(where, *, n_q=5, cells=40, page_size=4, seed=0, shape=None, spare=2):
    """Random arrays, in shuffled pages, that a test may write to."""
    s, rng = shape or where.shape, np.random.default_rng(seed)
    kv = random_kv(rng, 1, -(-cells // page_size), s.n_kv, page_size, s.dim, s.group, spare=spare)
    kv.page_table = kv.page_table[0]
    q = random_q(rng, n_q, s.n_head, s.dim)
    return Problem(q, strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table))


class OnDevice:
    """A copy of a host array on a device: of the memory that it is a view of, with the same strides, offset and alignment."""

    def __init__(self, array, device):
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if not owner.flags.forc:
            owner = array = np.ascontiguousarray(array)
        self.memory = DeviceArray(owner.ravel(order="K").view(np.uint8), ordinal_of(device))
        offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        address = self.memory.__cuda_array_interface__["data"][0]
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (address + offset if array.size else 0, False),
            "strides": array.strides, "version": 3,
        }  # fmt: skip


def at(where, array):
    return OnDevice(array, where.device) if where.on_gpu and isinstance(array, np.ndarray) else array


def call(where, problem, *, out=None, lse=None, workspace=True, **options):
    """(out, lse) in host memory. Both are full of NaN before, and the workspace of a kernel that takes one of ones.

    `out`, `lse`: shapes are as the problem's; given ones are written and returned.
    """
    q, kv = problem
    out = np.full(q.shape, np.nan, q.dtype) if out is None else out
    lse = np.full(q.shape[:2], np.nan, np.float32) if lse is None else lse
    for name in ("ids", "widths"):
        if options.get(name) is not None:
            options[name] = at(where, options[name])
    there = strata_pa.PagedKV(*(at(where, getattr(kv, x)) for x in ("k", "v", "k_scale", "v_scale", "page_table")), kv.layout)
    one = make_call(at(where, q), there, kernel=where.kernel, **options)
    if not where.on_gpu:
        one.run(out, lse)
        return out, lse
    ordinal = ordinal_of(where.device)
    size = one.plan()["workspace_bytes"] if workspace else 0
    memory = DeviceArray(np.full(size, 255, np.uint8), ordinal) if size else None
    results = DeviceArray(out, ordinal), DeviceArray(lse, ordinal)
    one.run(*results, False, memory)
    for array, result in zip((out, lse), results, strict=True):
        array[...] = result.read()
    return out, lse


def same(a, b):
    return all(same_bytes(x, y) for x, y in zip(a, b, strict=True))


def check(where, problem, got=None, *, bound=None, **options):
    """The answer, once it is the one of float64; of a portable kernel also the referee's, byte for byte."""
    out, lse = got or call(where, problem, **options)
    want, want_lse = reference.attention_float64(*problem, return_lse=True, **options)
    bad = np.isnan(want_lse)
    assert (np.isnan(lse) == bad).all(), "rows that are NaN"
    assert (np.isnan(out) == bad[..., None]).all(), "values that are NaN"
    empty = want_lse == -np.inf
    assert ((lse == -np.inf) == empty).all(), "rows that see nothing"
    assert not out.view(f"u{out.itemsize}")[empty].any(), "+0.0 where a row sees nothing"
    good = ~bad & ~empty
    if good.any():
        error = np.abs(out[good].astype(np.float64) - want[good]).max()
        top = np.abs(want[good]).max()
        assert error <= (bound or where.bound) * top, f"{error / top:.3g}"
        assert np.abs(lse[good] - want_lse[good]).max() <= 2e-6 * max(1.0, np.abs(want_lse[good]).max())
    if where.portable:
        assert same((out, lse), reference.portable(where.kernel, *problem, return_lse=True, **options)), "the referee's bytes"
    return out, lse
