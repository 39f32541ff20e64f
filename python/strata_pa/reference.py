"""The two referees, in plain NumPy: attention in float64, and the arithmetic of docs/numerics.md bit for bit.

Nothing here is fast or needs the compiled module.  Shapes: `rows` is the number of answered queries (all of them, or the ones
asked for), `n_rep` the query heads of one KV head, `n` the entries of one list, `D` the head_dim, `G` the dims of a scale group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = NDArray[Any]
Anchors = tuple[Array, Array]
KV = Any  # anything with the attributes k, v, k_scale, v_scale, page_table and layout

f32 = np.float32
INF = f32(np.inf)
LOG2E = float.fromhex("0x1.71547652b82fep+0")
LN2 = f32(float.fromhex("0x1.62e4300000000p-1"))
INV_127 = f32(float.fromhex("0x1.0204080000000p-7"))
DIGIT = f32(2.0**-16)
TINY = f32(2.0**-100)
POLY = [f32(float.fromhex(c)) for c in (
    "0x1.0000000000000p+0", "0x1.62e4300000000p-1", "0x1.ebfbdc0000000p-3", "0x1.c6af7c0000000p-5",
    "0x1.3b2de00000000p-7", "0x1.5f082e0000000p-10", "0x1.416b500000000p-13")]  # fmt: skip
LOG = [f32(float.fromhex(c)) for c in (
    "0x1.7154760000000p+1", "0x1.ec73e80000000p-1", "0x1.2632880000000p-1", "0x1.eb7b8c0000000p-2")]  # fmt: skip
IMMA_ROUND, EXACT_ROUND = 32768, 32896  # where the high digit is cut: an unsigned or a signed low byte is left over


class Options(TypedDict, total=False):
    """What every function below takes by keyword, after q [n_q, n_head, D] (float32, float16, or bfloat16 of ml_dtypes) and kv.

    kv has k, v: int8 [pages, n_kv, page_size, D] (layout "HND") or [pages, page_size, n_kv, D] ("NHD"); k_scale, v_scale: float16,
    D / G in place of D; page_table: int32 [max_pages] or [n_seq, max_pages].

    ids: int32 [n_q, cap] or [n_q, n_kv, cap], None: every cell.  widths: int32 [n_q], None: cap.  granularity: cells per id.
    kv_len: cells in the cache, an int or [n_seq], None: as many as the page table names.  cu_seqlens_q: int32 [n_seq + 1], None:
    one sequence.  causal; window_left (-1: no window); sm_scale (None: 1 / sqrt(D)).  rows: the queries to answer, None: all.
    """

    ids: Array | None
    widths: Array | None
    granularity: int
    kv_len: ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    causal: bool
    window_left: int
    sm_scale: float | None
    rows: Sequence[int] | None


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Array:
    """a * b + c for float32 values, rounded once to float32."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 24 + 24 bits
    total = np.add(product, c, dtype=np.float64)
    part = total - product
    error = (product - (total - part)) + (c - part)  # TwoSum: total + error is the exact sum
    # Round the sum to odd (toward zero, then set the last bit where anything was lost): a second rounding to 24 bits is then right.
    away = (error < 0) & (total > 0) | (error > 0) & (total < 0)
    bits = (total.view(np.int64) - away) | (np.abs(error) > 0)  # error is NaN, so not > 0, where total is not finite
    rounded: Array = bits.view(np.float64).astype(f32)
    return rounded


def _horner(coefficients: list[np.float32], t: Array) -> Array:
    value = np.asarray(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = fma(value, t, c)
    return value


def poly(t: Array) -> Array:
    """2^t for |t| <= 1/2 (float32)."""
    return _horner(POLY, t)


def shift(p: Array | np.float32, d: Array) -> Array:
    """p * 2^d for an integral float32 d, +0 where d < -125."""
    return np.where(d < -125, f32(0), np.ldexp(p, np.maximum(d, f32(-125)).astype(np.int32)))


def exp2(y: Array) -> Array:
    """2^y for y <= 0 (float32), -inf included."""
    y = np.maximum(y, f32(-200))  # 2^-200 is +0 already, and -inf would make NaN of y - n
    n = np.rint(y)
    return shift(poly(y - n), n)


def log2(x: Array) -> Array:
    """log2 of positive normal float32 numbers."""
    bits = np.asarray(x, f32).view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23
    f = (bits - (exponent << 23)).view(f32) - f32(1)
    z = f / (f + f32(2))
    return fma(z, _horner(LOG, z * z), exponent.astype(f32))


def tree(x: Array) -> Array:
    """The sum of the last axis (2^k >= 8 numbers) in the order of section 1.6."""
    while x.shape[-1] > 8:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


@dataclass(frozen=True)
class _Block:
    """The query heads of one KV head at one query, with the entries of their list; masked entries are zeros."""

    q: Array  # float32 [n_rep, D], zeros where not finite
    bad: Array  # bool [n_rep]: has an element of q, or a visible scale, that is not finite
    visible: Array  # bool [n]
    k: Array  # int8 [n, D]
    v: Array
    k_scale: Array  # float32 [n, D / G], zeros where not finite
    v_scale: Array
    sm_scale: float

    @property
    def c(self) -> np.float32:
        return f32(self.sm_scale * LOG2E)

    def chunked(self, size: int) -> _Block:
        """The list filled up to whole chunks, without the chunks in which nothing is visible."""
        fill = -len(self.visible) % size
        visible = np.pad(self.visible, (0, fill))
        keep = visible.reshape(-1, size).any(1).repeat(size)
        k, v, ks, vs = (np.pad(x, ((0, fill), (0, 0)))[keep] for x in (self.k, self.v, self.k_scale, self.v_scale))
        return _Block(self.q, self.bad, visible[keep], k, v, ks, vs, self.sm_scale)

    def checked(self, s: Array) -> tuple[Array, Array]:
        """The scores s [n_rep, n] with 0 for masked entries and bad rows, and the bad rows [n_rep]."""
        bad = self.bad | ~np.isfinite(s[:, self.visible]).all(1)
        return np.where(self.visible & ~bad[:, None], s, f32(0)), bad


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, f32(0))


def _spread(scale: Array, dim: int) -> Array:
    """A scale [n, D / G] for every dim [n, D]."""
    return scale.repeat(dim // scale.shape[1], 1)


def _blocks(
    q: Array, kv: KV, *, ids: Array | None = None, widths: Array | None = None, granularity: int = 1,
    kv_len: ArrayLike | None = None, cu_seqlens_q: ArrayLike | None = None, causal: bool = True, window_left: int = -1,
    sm_scale: float | None = None, rows: Sequence[int] | None = None,
) -> Iterator[tuple[tuple[int, slice], _Block]]:  # fmt: skip
    """Per answered query and KV head that sees a cell at all: its place in the results, and its block."""
    pools = [x if kv.layout == "HND" else x.swapaxes(1, 2) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale)]
    pages, n_kv, page_size, dim = pools[0].shape
    n_q, n_head, _ = q.shape
    n_rep = n_head // n_kv
    table = np.atleast_2d(kv.page_table)
    starts = np.asarray([0, n_q] if cu_seqlens_q is None else cu_seqlens_q)
    lengths = np.broadcast_to(np.asarray(table.shape[1] * page_size if kv_len is None else kv_len), len(table))
    scale = 1 / math.sqrt(dim) if sm_scale is None else float(sm_scale)
    for at, i in enumerate(range(n_q) if rows is None else rows):
        sequence = int(np.searchsorted(starts, i, side="right")) - 1
        length = int(lengths[sequence])
        pos = length - int(starts[sequence + 1]) + int(i)
        for head in range(n_kv):
            if ids is None:  # entries past pos would be masked, and end the list
                cells = np.arange(max(0, min(length, pos + 1) if causal else length))
            else:
                chosen = ids[i] if ids.ndim == 2 else ids[i, head]
                chosen = chosen[: None if widths is None else int(widths[i])].astype(np.int64)
                cells = (chosen[:, None] * granularity + np.arange(granularity)).reshape(-1)
            visible = (cells >= 0) & (cells < length)
            if causal:
                visible &= cells <= pos
            if window_left >= 0:
                visible &= cells >= pos - window_left
            page = np.full(len(cells), -1)
            page[visible] = table[sequence, cells[visible] // page_size]
            visible = (page >= 0) & (page < pages)
            if not visible.any():
                continue
            at_cell = page[visible], head, cells[visible] % page_size
            entries = [np.zeros((len(cells), pool.shape[3]), pool.dtype) for pool in pools]
            for entry, pool in zip(entries, pools, strict=True):
                entry[visible] = pool[at_cell]
            heads = slice(head * n_rep, (head + 1) * n_rep)
            row, ks, vs = (x.astype(f32) for x in (q[i, heads], *entries[2:]))
            bad = ~np.isfinite(row).all(1) | ~(np.isfinite(ks).all() & np.isfinite(vs).all())
            yield (at, heads), _Block(_finite(row), bad, visible, entries[0], entries[1], _finite(ks), _finite(vs), scale)


def _shape(q: Array, rows: Sequence[int] | None) -> tuple[int, int]:
    return (len(q) if rows is None else len(rows)), q.shape[1]


def attention_float64(q: Array, kv: KV, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """Attention in float64: out [rows, n_head, D], and if asked for lse [rows, n_head] (natural log).

    A row without a visible cell is +0 and -inf; one with a q or a visible scale that is not finite is NaN.
    """
    shape = _shape(q, options.get("rows"))
    out, lse = np.zeros((*shape, q.shape[2])), np.full(shape, -np.inf)
    for at, b in _blocks(q, kv, **options):
        k, v, ks, vs = (x[b.visible].astype(np.float64) for x in (b.k, b.v, b.k_scale, b.v_scale))
        s = b.q.astype(np.float64) @ (k * _spread(ks, k.shape[1])).T * b.sm_scale
        top = s.max(1, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(1, keepdims=True)
        out[at] = np.where(b.bad[:, None], np.nan, e @ (v * _spread(vs, v.shape[1])) / total)
        lse[at] = np.where(b.bad, np.nan, (top + np.log(total))[:, 0])
    return (out, lse) if return_lse else out


def _digits(x: Array, rounding: int) -> tuple[Array, Array, Array]:
    """x [..., n], float32, sharing one scale: their max / 127 [..., 1], and the digits h and r [..., n], integers in float64."""
    top = np.abs(x).max(-1, keepdims=True)
    up = np.where(top < TINY, f32(0), f32(127) / np.maximum(top, TINY))
    whole = np.rint((x * up) * f32(65536)).astype(np.int64)
    h = (whole + rounding) >> 16
    return top * INV_127, h.astype(np.float64), (whole - (h << 16)).astype(np.float64)


def _join(h: Array, r: Array, codes: Array) -> Array:
    """float(h @ codes) + float(r @ codes) * 2^-16.  The float64 products are exact: at most 256 terms below 2^16 * 2^7."""
    joined: Array = (h @ codes).astype(f32) + (r @ codes).astype(f32) * DIGIT
    return joined


def _integer_scores(b: _Block, rounding: int) -> Array:
    """The scores of section 3, float32 [n_rep, n]."""
    groups = b.k_scale.shape[1]
    top, h, r = (x.swapaxes(0, 1) for x in _digits(b.q.reshape(len(b.q), groups, -1), rounding))
    codes = b.k.reshape(len(b.k), groups, -1).transpose(1, 2, 0).astype(np.float64)
    t = _join(h, r, codes) * (top * b.c)  # [groups, n_rep, n]
    s: Array = t[0] * b.k_scale[:, 0]
    for g in range(1, groups):
        s = fma(t[g], b.k_scale[:, g], s)
    return s


def _online(value: Array, total: Array, alpha: Array) -> tuple[Array, Array]:
    """The recurrences over chunks: value [n_rep, chunks, D], total and alpha [n_rep, chunks] -> acc [n_rep, D], l [n_rep]."""
    acc, running = np.zeros_like(value[:, 0]), np.zeros_like(total[:, 0])
    for j in range(total.shape[1]):
        running = fma(running, alpha[:, j], total[:, j])
        acc = fma(acc, alpha[:, j, None], value[:, j])
    return acc, running


def _anchors(x: Array, visible: Array) -> tuple[Array, Array]:
    """The running maxima after and before each chunk of x [n_rep, chunks, size]: two arrays [n_rep, chunks]."""
    after = np.maximum.accumulate(np.where(visible, x, -INF).max(-1), 1)
    return after, np.concatenate([np.full_like(after[:, :1], -INF), after[:, :-1]], 1)


Row = tuple[Array, Array, Array, Array]  # out [n_rep, D], M, S, bad [n_rep]


def _fp32(b: _Block) -> Row:
    b = b.chunked(64)
    n_rep, dim = b.q.shape
    k, v = b.k * _spread(b.k_scale, dim), b.v * _spread(b.v_scale, dim)
    k_dims = np.ascontiguousarray(k.reshape(-1, dim // 16, 16).transpose(2, 1, 0), np.float64)  # [16, D / 16, n]
    q_dims = (b.q * b.c).reshape(n_rep, dim // 16, 16).transpose(2, 0, 1)[..., None]
    t = np.zeros((n_rep, dim // 16, len(k)), f32)
    for d in range(16):
        t = fma(q_dims[d], k_dims[d], t)
    while t.shape[1] > 2:
        t = t[:, 0::2] + t[:, 1::2]
    total = t[:, 0] + t[:, 1]
    u = total - t[:, 0]
    low = np.where(np.abs(total) < 65536, (t[:, 0] - (total - u)) + (t[:, 1] - u), f32(0))
    s, bad = b.checked(total)

    s, low, visible = s.reshape(n_rep, -1, 64), low.reshape(n_rep, -1, 64), b.visible.reshape(-1, 64)
    n = np.rint(s)
    after, before = _anchors(n, visible)
    e = np.where(visible, shift(poly((s - n) + low), n - after[..., None]), f32(0))
    alpha = shift(f32(1), before - after)
    v_entries = np.ascontiguousarray(v.reshape(-1, 64, dim).swapaxes(0, 1), np.float64)  # [64, chunks, D]
    x = np.zeros((n_rep, len(visible), dim), f32)
    for j in range(64):
        x = fma(e[:, :, j, None], v_entries[j], x)
    acc, total = _online(x, tree(e), alpha)
    return acc / total[:, None], after[:, -1], total, bad


def _imma(b: _Block) -> Row:
    b = b.chunked(32)
    n_rep, dim = b.q.shape
    groups = b.v_scale.shape[1]
    s, bad = b.checked(_integer_scores(b, IMMA_ROUND))
    s, visible = s.reshape(n_rep, -1, 32), b.visible.reshape(-1, 32)
    after, before = _anchors(s, visible)
    e = np.where(visible, exp2(s - after[..., None]), f32(0))
    alpha = exp2(before - after)
    y = e[:, :, None] * b.v_scale.reshape(-1, 32, groups).swapaxes(1, 2)  # [n_rep, chunks, groups, 32]
    top, h, r = (z.transpose(1, 2, 0, 3) for z in _digits(y, IMMA_ROUND))
    codes = b.v.reshape(-1, 32, groups, dim // groups).swapaxes(1, 2).astype(np.float64)  # [chunks, groups, 32, G]
    x = (_join(h, r, codes) * top).transpose(2, 0, 1, 3).reshape(n_rep, -1, dim)
    acc, total = _online(x, tree(e), alpha)
    return acc * (f32(1) / total)[:, None], after[:, -1], total, bad


def _level(v_scale: Array) -> Array:
    """lv of each cell of v_scale [n, groups], float32 [n]; -inf where all its scales are zero."""
    top = np.abs(v_scale).max(1)
    mantissa, exponent = np.frexp(top)
    return np.where(top == 0, -INF, exponent - (mantissa == 0.5)).astype(f32)


def exact_anchors(q: Array, kv: KV, **options: Unpack[Options]) -> Anchors:
    """(A, b), float32 [rows, n_head], of the cells that `options` select.  A is NaN for a bad row, -inf where nothing is visible."""
    shape = _shape(q, options.get("rows"))
    A, base = np.full(shape, -INF), np.full(shape, f32(-60))
    with np.errstate(all="ignore"):
        for at, b in _blocks(q, kv, **options):
            s, bad = b.checked(_integer_scores(b, EXACT_ROUND))
            n = np.rint(s[:, b.visible])
            top = n.max(1)
            levels = (n - top[:, None]) + _level(b.v_scale[b.visible])
            A[at] = np.where(bad, f32(np.nan), top)
            base[at] = np.where(bad, f32(-60), np.maximum(levels.max(1), f32(-60)))
    return A, base


def merge_anchors(parts: Sequence[Anchors]) -> Anchors:
    """The anchors of a union of disjoint sets of entries."""
    A = np.maximum.reduce([a for a, _ in parts])  # NaN wins
    base = np.full_like(A, -60)
    with np.errstate(all="ignore"):
        for a, b in parts:
            moved = b + (a - A)
            base = np.maximum(base, np.where(np.isfinite(a) & np.isfinite(A), moved, f32(-60)))
    return A, base


def exact_sums(q: Array, kv: KV, *, anchors: Anchors, **options: Unpack[Options]) -> tuple[Array, Array]:
    """(L [rows, n_head], O [rows, n_head, D]), int64, of the selected cells under `anchors`; zeros where A is not finite."""
    shape = _shape(q, options.get("rows"))
    L, O = np.zeros(shape, np.int64), np.zeros((*shape, q.shape[2]), np.int64)  # noqa: E741
    with np.errstate(all="ignore"):
        for at, b in _blocks(q, kv, **options):
            s, bad = b.checked(_integer_scores(b, EXACT_ROUND))
            keep = ~bad & np.isfinite(anchors[0][at])
            A, base = (np.where(keep, x[at], f32(0))[:, None] for x in anchors)
            n = np.rint(s)
            p, d = poly(s - n), n - A
            use = b.visible & keep[:, None]
            L[at] = np.where(use, np.rint(shift(p, d + f32(30))), f32(0)).astype(np.int64).sum(1)
            e = np.where(use, shift(p, (d - base) + f32(30)), f32(0))
            W = np.rint(e[:, None] * b.v_scale.T).astype(np.int64).swapaxes(0, 1)  # [groups, n_rep, n]
            codes = b.v.reshape(len(b.v), len(W), -1).swapaxes(0, 1).astype(np.float64)
            # Halves of W keep every partial sum in float64 below 2^16 * 2^7 * 2^24 = 2^47, hence exact.
            high, low = ((half.astype(np.float64) @ codes).astype(np.int64) for half in (W >> 16, W & 0xFFFF))
            O[at] = ((high << 16) + low).swapaxes(0, 1).reshape(len(b.q), -1)
    return L, O


def exact_finish(anchors: Anchors, L: Array, O: Array, dtype: DTypeLike = f32) -> tuple[Array, Array]:  # noqa: E741
    """out [rows, n_head, D] of `dtype` and lse [rows, n_head], float32, from the summed state."""
    A, base = anchors
    with np.errstate(all="ignore"):
        total = np.maximum(L, 1).astype(f32)  # L is 0 only in rows that _stored replaces
        out = (O.astype(f32) / total[..., None]) * np.ldexp(f32(1), base.astype(np.int32))[..., None]
        return _stored(out, A, total * f32(2.0**-30), dtype)


def merge_partials(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Whole results over disjoint sets of cells as one, in the order given: out and lse (section 6). All outs have one dtype."""
    top = np.maximum.reduce(lses)
    bad = np.logical_or.reduce([~(lse < INF) for lse in lses])
    out, total = np.zeros(outs[0].shape, f32), np.zeros(top.shape, f32)
    with np.errstate(all="ignore"):
        for part, lse in zip(outs, lses, strict=True):
            w = np.where(bad | np.isneginf(lse), f32(0), exp2((lse - top) * f32(LOG2E)))
            total = total + w
            out = np.where(w[..., None] > 0, fma(w[..., None], part.astype(f32), out), out)
        merged = fma(log2(np.where(total > 0, total, f32(1))), LN2, top)
        M = np.where(bad, f32(np.nan), top)
        return _stored(out / total[..., None], M, np.ones_like(top), outs[0].dtype)[0], np.where(np.isfinite(M), merged, M)


def _stored(out: Array, M: Array, S: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """The last steps (1.5), with the rows that saw nothing (M = -inf) or are bad (M = NaN) filled in."""
    lse = np.where(np.isfinite(M), (M + log2(S)) * LN2, M)
    out = np.where(np.isfinite(M)[..., None], out, np.where(np.isnan(M), f32(np.nan), f32(0))[..., None])
    return (out + f32(0)).astype(dtype), lse


_ONLINE: dict[str, Callable[[_Block], Row]] = {"fp32": _fp32, "imma": _imma}


def portable(kernel: str, q: Array, kv: KV, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """What kernel "fp32", "imma" or "exact" answers on every machine: out [rows, n_head, D] of q's dtype, and if asked for lse
    [rows, n_head], float32, natural log.
    """
    if kernel == "exact":
        anchors = exact_anchors(q, kv, **options)
        L, O = exact_sums(q, kv, anchors=anchors, **options)  # noqa: E741
        out, lse = exact_finish(anchors, L, O, q.dtype)
    else:
        answer = _ONLINE[kernel]
        shape = _shape(q, options.get("rows"))
        raw, M, S = np.zeros((*shape, q.shape[2]), f32), np.full(shape, -INF), np.ones(shape, f32)
        with np.errstate(all="ignore"):
            for at, b in _blocks(q, kv, **options):
                raw[at], anchor, S[at], bad = answer(b)
                M[at] = np.where(bad, f32(np.nan), anchor)
            out, lse = _stored(raw, M, S, q.dtype)
    return (out, lse) if return_lse else out
