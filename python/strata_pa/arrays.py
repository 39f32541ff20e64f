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


def empty_like_kind(like: Array, shape: tuple[int, ...], dtype: str, device: str = "cpu") -> Array:
    """An uninitialised array of `like`'s library on `device`: PyTorch, CuPy or JAX there; in host memory PyTorch, otherwise NumPy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if device == "cpu":
        return np.empty(shape, numpy_dtype(dtype))
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        with like.device:
            return cupy.empty(shape, numpy_dtype(dtype))
    if is_jax(like):
        jax = sys.modules["jax"]
        with jax.default_device(next(iter(like.devices()))):
            return jax.numpy.empty(shape, dtype).block_until_ready()
    raise InvalidInput(f"new arrays on {device} are made for PyTorch, CuPy and JAX; pass out= for a {type(like).__name__}")


def is_jax(array: Array) -> bool:
    """JAX knows no streams: its arrays are complete when they are passed on, so results have to be waited for."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def as_numpy(array: Array) -> npt.NDArray[Any]:
    """The same memory as a NumPy array."""
    return array if isinstance(array, np.ndarray) else np.from_dlpack(array)
