"""Memory of a GPU from its driver, for self tests and measurements: no array library is needed."""

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from .cache import PagedKV

Array = npt.NDArray[Any]


class DeviceArray:
    """A C-contiguous array on a GPU, reachable by `__cuda_array_interface__`; freed with the object."""

    def __init__(self, array: Array, ordinal: int, backend: str = "cuda") -> None:
        """A copy of `array`."""
        self.shape, self.dtype = array.shape, array.dtype
        self._memory = _core.DeviceMemory(ordinal, array.nbytes, backend)
        self.write(array)

    def write(self, array: Array) -> None:
        self._memory.write(np.ascontiguousarray(array, self.dtype).reshape(self.shape))

    def read(self) -> Array:
        """A copy in host memory, once the work on the legacy default stream is done."""
        array = np.empty(self.shape, self.dtype)
        self._memory.read(array)
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self._memory.address, False), "strides": None, "version": 3}


def workspace_on(device: str, size: int) -> DeviceArray | None:
    """What a plan with workspace_bytes `size` may be given; None where it has no use for it."""
    return on_device(np.zeros(size, np.uint8), device) if size and device != "cpu" else None


def on_device(array: Array, device: str) -> DeviceArray:
    """A copy of `array` on "cuda:0" or "hip:0"."""
    return DeviceArray(array, ordinal_of(device), device.partition(":")[0])


def ordinal_of(device: str) -> int:
    """1 of "cuda:1"."""
    return int(device.rpartition(":")[2])


def to_device(q: Array, kv: PagedKV, options: dict[str, Any], device: str) -> tuple[DeviceArray, PagedKV, dict[str, Any]]:
    """The same problem on "cuda:0" or "hip:0"; kv_len and cu_seqlens_q stay in host memory."""
    k, v, k_scale, v_scale, table = (on_device(x, device) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table))
    lists = {name: on_device(options[name], device) for name in ("ids", "widths") if options.get(name) is not None}
    return on_device(q, device), PagedKV(k, v, k_scale, v_scale, table, kv.layout), {**options, **lists}
