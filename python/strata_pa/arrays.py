"""Array types, and new arrays of the same kind as a given one."""

import sys
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._core import InvalidInput

Array: TypeAlias = Any
"""A NumPy array, or an object with `__dlpack__` or `__cuda_array_interface__`. It is used in place, never copied."""

Ints: TypeAlias = Any
"""An int, a sequence of ints, or an integer array in host memory."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of this name; bfloat16 only where ml_dtypes has been imported."""
    if name == "bfloat16":
        ml_dtypes = sys.modules.get("ml_dtypes")
        if ml_dtypes is None:
            raise InvalidInput("NumPy has no bfloat16: pass out=, a PyTorch tensor as q, or import ml_dtypes")
        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def empty_like_kind(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """An uninitialised array: a PyTorch tensor where `like` is one, otherwise a NumPy array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    return np.empty(shape, numpy_dtype(dtype))


def as_numpy(array: Array) -> npt.NDArray[Any]:
    """The same memory as a NumPy array."""
    return array if isinstance(array, np.ndarray) else np.from_dlpack(array)
