"""Partial results over disjoint sets of cells.

States of the `exact` kernel combine to the bytes of one call over all cells, in any order and grouping (docs/numerics.md, section 5):

    anchors = merge_anchors([exact_anchors(q, kv, ids=part) for part in parts])
    sums = merge_sums([exact_sums(q, kv, ids=part, anchors=anchors) for part in parts])
    out, lse = exact_finish(anchors, sums)

Whole results of any kernel combine by their log-sum-exp, rounded, in the order given (section 6):

    out, lse = merge_partials(*zip(*[prompt_attention(q, kv, ids=part, return_lse=True) for part in parts]))

The parts may be lists of `ids`, or caches with the same `kv_len` whose page tables hold -1 for the pages of the others; they may live in
different processes (`strata_pa.distributed`). Arrays are in host memory or on a GPU, all in one place; new ones are of the library of
the given ones (on a GPU PyTorch or CuPy), and the work is on that library's current stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from .arrays import Array, Ints, as_numpy, empty_like_kind
from .attention import make_call
from .cache import PagedKV


@dataclass(frozen=True, eq=False)
class ExactAnchors:
    """The anchors of each row.

    Attributes:
        A: float32 `[n_q, n_head]`, the greatest rounded log2 score; -inf: no visible cell; NaN: a bad row (a value that is not finite).
        b: float32 `[n_q, n_head]`, the exponent of the row's sums of values relative to A, at least -60.
    """

    A: Array
    b: Array

    def keys(self) -> Array:
        """The anchors as integers, int64 `[2, n_q, n_head]`, that merge by their maximum: what an all-reduce of any library can take.

        An integer maximum keeps bad rows, which a maximum of floats does not everywhere.
        """
        n_q, n_head = _core.array_shape(self.A)
        keys = empty_like_kind(self.A, (2, n_q, n_head), "int64", _core.array_device(self.A))
        _core.anchors_to_keys(self.A, self.b, keys)
        return keys

    @classmethod
    def from_keys(cls, keys: Array) -> "ExactAnchors":
        """The anchors of `keys()`, or of maxima of several.

        Raises:
            InvalidInput: keys is not int64 `[2, n_q, n_head]`.
        """
        shape, device = _core.array_shape(keys)[1:], _core.array_device(keys)
        anchors = cls(*(empty_like_kind(keys, shape, "float32", device) for _ in range(2)))
        _core.anchors_from_keys(keys, anchors.A, anchors.b)
        return anchors


@dataclass(frozen=True, eq=False)
class ExactSums:
    """The sums of each row, computed with the anchors of all parts. Those of disjoint sets add, as integers.

    Attributes:
        L: int64 `[n_q, n_head]`, the sum of the weights in units of 2^-30.
        O: int64 `[n_q, n_head, head_dim]`, the weighted sum of the values in units of 2^(b - 30).
    """

    L: Array
    O: Array  # noqa: E741


def exact_anchors(
    q: Array,
    kv: PagedKV,
    *,
    ids: Array | None = None,
    widths: Array | None = None,
    granularity: int = 1,
    kv_len: Ints | None = None,
    cu_seqlens_q: Ints | None = None,
    causal: bool = True,
    window_left: int = -1,
    sm_scale: float | None = None,
    num_threads: int | None = None,
) -> ExactAnchors:
    """The anchors of one set of cells; the arguments and errors of `prompt_attention`. The arrays are of q's library."""
    call = make_call(
        q,
        kv,
        ids=ids,
        widths=widths,
        granularity=granularity,
        kv_len=kv_len,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window_left=window_left,
        sm_scale=sm_scale,
        kernel="exact",
        num_threads=num_threads,
    )
    rows = call.shape[:2]
    anchors = ExactAnchors(*(empty_like_kind(q, rows, "float32", call.device) for _ in range(2)))
    call.exact_anchors(anchors.A, anchors.b)
    return anchors


def exact_sums(
    q: Array,
    kv: PagedKV,
    *,
    anchors: ExactAnchors,
    ids: Array | None = None,
    widths: Array | None = None,
    granularity: int = 1,
    kv_len: Ints | None = None,
    cu_seqlens_q: Ints | None = None,
    causal: bool = True,
    window_left: int = -1,
    sm_scale: float | None = None,
    num_threads: int | None = None,
) -> ExactSums:
    """The sums of one set of cells under the merged anchors of all sets; the arguments and errors of `prompt_attention`.

    Anchors that are not those of all sets (lower than a score of this one) give meaningless sums.
    """
    call = make_call(
        q,
        kv,
        ids=ids,
        widths=widths,
        granularity=granularity,
        kv_len=kv_len,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window_left=window_left,
        sm_scale=sm_scale,
        kernel="exact",
        num_threads=num_threads,
    )
    sums = ExactSums(*(empty_like_kind(q, shape, "int64", call.device) for shape in (call.shape[:2], call.shape)))
    call.exact_sums(anchors.A, anchors.b, sums.L, sums.O)
    return sums


def merge_anchors(parts: Sequence[ExactAnchors]) -> ExactAnchors:
    """The anchors of the union of disjoint sets. A bad row of any part stays bad.

    Raises:
        InvalidInput: no parts, or parts of different shapes.
    """
    first, *rest = _some(parts)
    merged = ExactAnchors(_copy(first.A), _copy(first.b))
    for part in rest:
        _core.add_anchors(merged.A, merged.b, part.A, part.b)
    return merged


def merge_sums(parts: Sequence[ExactSums]) -> ExactSums:
    """The sums of the union of disjoint sets.

    Raises:
        InvalidInput: no parts, parts of different shapes, or more entries of a row than 64 bits hold (2^24 are safe; on a GPU this is not
            noticed).
    """
    first, *rest = _some(parts)
    merged = ExactSums(_copy(first.L), _copy(first.O))
    for part in rest:
        _core.add_sums(merged.L, part.L, "L")
        _core.add_sums(merged.O, part.O, "O")
    return merged


def exact_finish(anchors: ExactAnchors, sums: ExactSums, dtype: str = "float32", *, out: Array | None = None) -> tuple[Array, Array]:
    """The result from the merged state of all cells: the bytes that `prompt_attention` with kernel="exact" gives.

    Args:
        anchors, sums: the merged state.
        dtype: of q and so of `out`: "float32", "float16" or "bfloat16".
        out: where to write, C-contiguous `[n_q, n_head, head_dim]`; it decides the dtype. None: a new array of the sums' library.

    Returns:
        out `[n_q, n_head, head_dim]`, lse float32 `[n_q, n_head]` of the same kind.
    """
    shape, device = _core.array_shape(sums.O), _core.array_device(sums.O)
    if out is None:
        if not isinstance(dtype, str) or dtype not in ("float32", "float16", "bfloat16"):
            raise _core.InvalidInput(f"dtype must be 'float32', 'float16' or 'bfloat16', got {dtype!r}")
        out = empty_like_kind(sums.O, shape, dtype, device)
    lse = empty_like_kind(out, shape[:2], "float32", device)
    _core.exact_finish(anchors.A, anchors.b, sums.L, sums.O, out, lse)
    return out, lse


def merge_partials(outs: Sequence[Array], lses: Sequence[Array], *, out: Array | None = None) -> tuple[Array, Array]:
    """The results over disjoint sets of cells as one over their union: `out` and `lse` of `prompt_attention(..., return_lse=True)`.

    The parts are weighted with e^lse and added in the order given, in FP32: the same parts in the same order give the same bytes on every
    machine. A part's rows without a cell (lse -inf) do not take part, a row that is NaN in one part is NaN. To keep the accuracy of q in
    float16 or bfloat16, merge float32 results.

    Args:
        outs: 1 to 64 C-contiguous arrays `[n_q, n_head, head_dim]`, float32, float16 or bfloat16.
        lses: as many, float32 `[n_q, n_head]`, natural logs.
        out: where to write, C-contiguous, dtype and shape as `outs[0]`; it may be one of them, and overlaps no other. None: a new array.

    Returns:
        out, and lse float32 `[n_q, n_head]`; new arrays are of the library of `outs[0]`.

    Raises:
        InvalidInput: no parts, too many, or different shapes; InvalidType: a wrong dtype.
    """
    outs, lses = list(_some(outs)), list(lses)
    shape, device = _core.array_shape(outs[0]), _core.array_device(outs[0])
    if out is None:
        out = empty_like_kind(outs[0], shape, _core.array_dtype(outs[0]), device)
    lse = empty_like_kind(outs[0], shape[:2], "float32", device)
    _core.merge_partials(outs, lses, out, lse)
    return out, lse


def _some(parts: Sequence[Any]) -> Sequence[Any]:
    if not parts:
        raise _core.InvalidInput("there are no parts to merge")
    return parts


def _copy(array: Array) -> Any:
    if hasattr(array, "clone"):  # PyTorch
        return array.contiguous().clone()
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "copy"):  # CuPy
        return array.copy(order="C")
    return np.array(as_numpy(array), order="C")
