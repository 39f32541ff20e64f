"""Partial states of the `exact` kernel over disjoint sets of cells, which combine to the bytes of one call over all of them.

    anchors = merge_anchors([exact_anchors(q, kv, ids=part) for part in parts])
    sums = merge_sums([exact_sums(q, kv, ids=part, anchors=anchors) for part in parts])
    out, lse = exact_finish(anchors, sums)

The parts may be lists of `ids`, or caches with the same `kv_len` whose page tables hold -1 for the pages of the others; they may live in
different processes. Order and grouping do not matter. See docs/numerics.md, section 5.
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


@dataclass(frozen=True, eq=False)
class ExactSums:
    """The sums of each row, computed with the anchors of all parts.

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
    """The anchors of one set of cells; the arguments and errors of `prompt_attention`. The arrays are NumPy's."""
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
    anchors = ExactAnchors(np.empty(rows, np.float32), np.empty(rows, np.float32))
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
    sums = ExactSums(np.empty(call.shape[:2], np.int64), np.empty(call.shape, np.int64))
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
        InvalidInput: no parts, parts of different shapes, or more entries of a row than 64 bits hold (2^24 are safe).
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
        out: where to write, C-contiguous `[n_q, n_head, head_dim]`; it decides the dtype. None: a new NumPy array.

    Returns:
        out `[n_q, n_head, head_dim]`, lse float32 `[n_q, n_head]` of the same kind.
    """
    shape = tuple(as_numpy(sums.O).shape)
    if out is None:
        if not isinstance(dtype, str) or dtype not in ("float32", "float16", "bfloat16"):
            raise _core.InvalidInput(f"dtype must be 'float32', 'float16' or 'bfloat16', got {dtype!r}")
        out = empty_like_kind(None, shape, dtype)
    lse = empty_like_kind(out, shape[:2], "float32")
    _core.exact_finish(anchors.A, anchors.b, sums.L, sums.O, out, lse)
    return out, lse


def _some(parts: Sequence[Any]) -> Sequence[Any]:
    if not parts:
        raise _core.InvalidInput("there are no parts to merge")
    return parts


def _copy(array: Array) -> Any:
    return np.array(as_numpy(array), order="C")
