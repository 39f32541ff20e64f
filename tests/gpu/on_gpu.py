"""Golden problems on the GPU that is here, without an array library."""

import hashlib
from types import SimpleNamespace

import inputs
import numpy as np

import strata_pa
from strata_pa._device import DeviceArray, ordinal_of, to_device


def device():
    """The first CUDA device that kernels serve, as capabilities() describes it; None."""
    return next((d for d in strata_pa.capabilities()["devices"] if d["backend"] == "cuda" and d["kernels"]), None)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


class Rows:
    """Rows `first` to `end` of a device array."""

    def __init__(self, array, first, end):
        interface = array.__cuda_array_interface__
        row = array.dtype.itemsize * int(np.prod(array.shape[1:]))
        address = interface["data"][0] + first * row if end > first else 0
        self.__cuda_array_interface__ = interface | {"shape": (end - first, *array.shape[1:]), "data": (address, False)}


class Placed:
    """A golden problem on the device, and its output."""

    def __init__(self, name, *, shuffle=None):
        q, kv, options = inputs.arguments(inputs.load(name))
        kv = moved(kv, shuffle) if shuffle is not None else kv
        kv = strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)
        self.host = q, kv, {x: y for x, y in options.items() if y is not None}
        self.n_q, self.kv_len = len(q), options["kv_len"]
        self.name = device()["device"]
        self.q, self.kv, self.options = to_device(*self.host, self.name)
        self.out = DeviceArray(np.full_like(q, np.nan), ordinal_of(self.name))

    def run(self, step=None, **arguments):
        """The answer, in calls of `step` queries."""
        for first in range(0, self.n_q, step or self.n_q):
            end = min(first + (step or self.n_q), self.n_q)
            options = {x: Rows(y, first, end) if x in ("ids", "widths") else y for x, y in self.options.items()}
            options["kv_len"] = self.kv_len - self.n_q + end
            strata_pa.prompt_attention(Rows(self.q, first, end), self.kv, out=Rows(self.out, first, end), **options, **arguments)
        return self.out.read()


def moved(kv, seed):
    """The same cells in other pages."""
    order = np.random.default_rng(seed).permutation(len(kv.k))
    place = np.argsort(order)
    pools = {x: np.ascontiguousarray(getattr(kv, x)[place]) for x in ("k", "v", "k_scale", "v_scale")}
    return SimpleNamespace(**pools, page_table=order[kv.page_table].astype(np.int32), layout=kv.layout)
