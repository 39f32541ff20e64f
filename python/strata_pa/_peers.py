"""PyTorch's attention on the problems of `strata-pa bench`: the peers that the kernels are measured beside.

What is ready before a call is timed: q in the peer's type, and K and V too where the name does not say "dequantize" or "gather".
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._cases import Case, Shape

Call = Callable[[], Any]  # gives [queries, n_head, D]

GATHERED_BYTES = 4 << 30  # of K and V that a GPU peer gathers at once
CPU_BLOCK = 32  # queries that a CPU peer gathers at once


class Unavailable(Exception):
    """A peer that cannot run here; the message says why."""


@dataclass(frozen=True)
class Peer:
    name: str
    prepare: Callable[["Tensors"], Call]


def load_torch() -> Any:
    """PyTorch by name, as type checkers need not have it; None where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


class Tensors:
    """A problem's arrays as tensors that share their memory."""

    def __init__(self, case: Case, q: Any, kv: Any, options: dict[str, Any], device: str) -> None:
        """`q`, `kv`, `options`: the arrays of `case` where `device` has them."""
        torch = self.torch = importlib.import_module("torch")
        self.case, self.device = case, device

        def tensor(x: Any) -> Any:
            return None if x is None else torch.as_tensor(x, device=device)

        self.q, self.table = tensor(q), tensor(kv.page_table)
        self.codes, self.scales = (tensor(kv.k), tensor(kv.v)), (tensor(kv.k_scale), tensor(kv.v_scale))
        self.ids = tensor(options["ids"])
        self.n_kv = self.codes[0].shape[1]
        self.heads = torch.arange(self.n_kv, device=device)
        widths = case.options["widths"]
        self.width = case.widest
        self.equal = widths is None or bool((widths == self.width).all())

    def grouped_q(self, dtype: Any) -> Any:
        """[queries, n_kv, heads of a KV head, D]"""
        return self.q.to(dtype).unflatten(1, (self.n_kv, -1))

    def gather(self, cells: Any, dtype: Any, function: Callable[..., Any]) -> tuple[Any, Any]:
        """K and V of these cells [cells, n_kv, D]."""
        k, v = (function(c, s, self.table, cells, self.heads, dtype) for c, s in zip(self.codes, self.scales, strict=True))
        return k, v

    def dense(self, dtype: Any, function: Callable[..., Any]) -> tuple[Any, Any]:
        """K and V of the whole context [1, n_kv, context, D]."""
        cells = self.torch.arange(self.case.context, device=self.device)
        k, v = (x.transpose(0, 1)[None] for x in self.gather(cells, dtype, function))
        return k, v


def _gather(codes: Any, scales: Any, table: Any, cells: Any, heads: Any, dtype: Any) -> Any:
    page_size, dim = codes.shape[2:]
    row = (table[cells // page_size][:, None] * codes.shape[1] + heads) * page_size + (cells % page_size)[:, None]
    values = codes.view(-1, dim)[row].to(dtype).unflatten(2, (scales.shape[3], -1))
    return (values * scales.view(-1, scales.shape[3])[row].to(dtype)[..., None]).flatten(2)


def _gather_ready(values: Any, table: Any, cells: Any, heads: Any) -> Any:
    """The same from a cache of floats [pages, n_kv, page_size, D]."""
    page_size, dim = values.shape[2:]
    row = (table[cells // page_size][:, None] * values.shape[1] + heads) * page_size + (cells % page_size)[:, None]
    return values.view(-1, dim)[row]


_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compile(function: Callable[..., Any], pool: int, cells: int) -> Callable[..., Any]:
    """torch.compile, once for all pools and numbers of cells: argument `pool` may be any number of pages, argument `cells` any cells."""
    torch = importlib.import_module("torch")
    dynamo = importlib.import_module("torch._dynamo")
    if function not in _compiled:
        _compiled[function] = torch.compile(function)
    fast = _compiled[function]

    def call(*arguments: Any) -> Any:
        for i in (*range(pool), cells):  # the pools and the page table before the cells, and these
            dynamo.maybe_mark_dynamic(arguments[i], 0)
        return fast(*arguments)

    return call


def _compiled_gather() -> Callable[..., Any]:
    return _compile(_gather, 3, 3)


# --- Dense --------------------------------------------------------------------------------------------------------------------


def _dense(backend: str | None, dtype: str, dequantize: bool) -> Callable[[Tensors], Call]:
    def prepare(t: Tensors) -> Call:
        kind = getattr(t.torch, dtype)
        gather = _compiled_gather() if t.device != "cpu" else _gather
        if not dequantize:
            ready = tuple(x.contiguous() for x in t.dense(kind, gather))
        attend = _attention(t, backend, kind)

        def call() -> Any:
            k, v = t.dense(kind, gather) if dequantize else ready
            return attend(k, v)

        return call

    return prepare


def _attention(t: Tensors, backend: str | None, dtype: Any) -> Callable[[Any, Any], Any]:
    """Causal attention of the last queries, by k and v [1, n_kv, context, D]."""
    functional = importlib.import_module("torch.nn.functional")
    n, context = t.case.queries, t.case.context
    sdpa = functional.scaled_dot_product_attention
    q = t.q.to(dtype).transpose(0, 1)[None].contiguous()  # [1, n_head, queries, D]
    if backend == "CUDNN_ATTENTION" and n != context:
        return _cudnn_in_two_parts(t, q)
    with_mask: dict[str, Any] = {"is_causal": True}
    if n != context:
        with_mask = {"attn_mask": importlib.import_module("torch.nn.attention.bias").causal_lower_right(n, context)}

    def attend(k: Any, v: Any) -> Any:
        with _only(t.torch, backend):
            if backend == "EFFICIENT_ATTENTION":  # it has no grouped heads: a KV head's queries see views of it
                rows = q[0].unflatten(0, (t.n_kv, -1))
                k, v = (x[0][:, None].expand(-1, rows.shape[1], -1, -1) for x in (k, v))
                out = sdpa(rows, k, v, **with_mask).flatten(0, 1)
            else:
                out = sdpa(q, k, v, enable_gqa=True, **with_mask)[0]
        return out.transpose(0, 1)

    return attend


def _cudnn_in_two_parts(t: Tensors, q: Any) -> Callable[[Any, Any], Any]:
    """cuDNN's causal mask starts at the first cell: what all queries see and the square after it apart, joined by their log-sum-exps."""
    first = t.case.context - t.case.queries
    attention = t.torch.ops.aten._scaled_dot_product_cudnn_attention

    def attend(k: Any, v: Any) -> Any:
        whole, lse = attention(q, k[:, :, :first], v[:, :, :first], None, True, 0.0, False, False)[:2]
        square, square_lse = attention(q, k[:, :, first:], v[:, :, first:], None, True, 0.0, True, False)[:2]
        share = t.torch.sigmoid(lse - square_lse).reshape(*whole.shape[:3], 1)
        return t.torch.lerp(square.float(), whole.float(), share)[0].transpose(0, 1)

    return attend


def _only(torch: Any, backend: str | None) -> Any:
    """That kernel of PyTorch or an error; None: as it chooses."""
    attention = importlib.import_module("torch.nn.attention")
    kinds = attention.SDPBackend
    return attention.sdpa_kernel([getattr(kinds, backend)] if backend else [kinds.MATH, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION])


def _masked(dequantize: bool) -> Callable[[Tensors], Call]:
    """A selection as a mask over the whole context."""

    def prepare(t: Tensors) -> Call:
        torch = t.torch
        sdpa = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
        gather = _compiled_gather()
        q = t.q.half().transpose(0, 1)[None].contiguous()
        if not dequantize:
            ready = tuple(x.contiguous() for x in t.dense(torch.float16, gather))
        n, context = t.case.queries, t.case.context
        room = -(-(context + 1) // 64) * 64  # and a column for the entries that name no cell

        def call() -> Any:
            mask = torch.full((n, room), -torch.inf, dtype=torch.float16, device=t.device)
            mask.scatter_(1, torch.where(t.ids < 0, context, t.ids).long(), 0.0)
            k, v = t.dense(torch.float16, gather) if dequantize else ready
            with _only(torch, "CUDNN_ATTENTION"):
                out = sdpa(q, k, v, mask[None, None, :, :context].expand(1, q.shape[1], -1, -1), enable_gqa=True)
            return out[0].transpose(0, 1)

        return call

    return prepare


# --- Selected -----------------------------------------------------------------------------------------------------------------


def _gathered(backend: str | None, dtype: str, *, compiled: bool = True, ready: bool = False) -> Callable[[Tensors], Call]:
    """The cells of some queries at a time, then attention of a KV head's rows to their own cells."""

    def prepare(t: Tensors) -> Call:
        torch, kind = t.torch, getattr(t.torch, dtype)
        q = t.grouped_q(kind)
        out = torch.empty_like(q)
        if ready:
            gather_ready = _compile(_gather_ready, 2, 2)
            pools = [
                (c.to(kind).unflatten(3, (s.shape[3], -1)) * s.to(kind)[..., None]).flatten(3)
                for c, s in zip(t.codes, t.scales, strict=True)
            ]

            def take(cells: Any) -> tuple[Any, ...]:
                return tuple(gather_ready(pool, t.table, cells, t.heads) for pool in pools)
        else:
            gather = _compiled_gather() if compiled else _gather

            def take(cells: Any) -> tuple[Any, ...]:
                return t.gather(cells, kind, gather)

        blocks = _blocks(t, q.element_size())
        attend = _equal_lists if t.equal else _flash_varlen if backend == "FLASH_ATTENTION" else _padded_lists
        parts = [attend(t, backend, q[at], out[at], at, take) for at in blocks]

        def call() -> Any:
            for part in parts:
                part()
            return out.flatten(1, 2)

        return call

    return prepare


def _blocks(t: Tensors, size: int) -> list[slice]:
    n = t.case.queries
    per_query = 2 * t.width * t.n_kv * t.q.shape[2] * size
    block = CPU_BLOCK if t.device == "cpu" else max(1, min(n, GATHERED_BYTES // per_query))
    return [slice(at, min(at + block, n)) for at in range(0, n, block)]


def _equal_lists(
    t: Tensors, backend: str | None, q: Any, out: Any, at: slice, take: Callable[[Any], tuple[Any, ...]], mask: Any = None
) -> Call:
    sdpa = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    ids = t.ids[at, : t.width]

    def part() -> None:
        cells = ids.clamp(min=0).flatten() if mask is not None else ids.flatten()
        k, v = (x.unflatten(0, (len(ids), -1)).transpose(1, 2) for x in take(cells))  # [block, n_kv, width, D]
        with _only(t.torch, backend):
            out.copy_(sdpa(q, k, v, mask))

    return part


def _padded_lists(t: Tensors, backend: str | None, q: Any, out: Any, at: slice, take: Callable[[Any], tuple[Any, ...]]) -> Call:
    mask = (t.ids[at, : t.width] >= 0)[:, None, None].expand(-1, t.n_kv, q.shape[2], -1)
    return _equal_lists(t, backend, q, out, at, take, mask)


def _flash_varlen(t: Tensors, backend: str | None, q: Any, out: Any, at: slice, take: Callable[[Any], tuple[Any, ...]]) -> Call:
    """Lists of several lengths, one after another: flash has no mask."""
    torch = t.torch
    ids = t.ids[at, : t.width]
    kept = (ids >= 0).flatten().nonzero()[:, 0]
    counts = (ids >= 0).sum(1)
    block, _, rows, _ = q.shape
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    q_starts = torch.arange(0, (block + 1) * rows, rows, dtype=torch.int32, device=t.device)
    q_rows = q.transpose(1, 2).flatten(0, 1).contiguous()  # [block * rows, n_kv, D]
    longest = int(counts.max())
    flash = torch.ops.aten._flash_attention_forward

    def part() -> None:
        k, v = take(ids.flatten()[kept])
        found = flash(q_rows, k, v, q_starts, starts, rows, longest, 0.0, False, False)[0]
        out.copy_(found.unflatten(0, (block, rows)).transpose(1, 2))

    return part


def _in_place(t: Tensors) -> Call:
    """On a CPU: flat row indices, into buffers that are kept."""
    torch, block, dim = t.torch, CPU_BLOCK, t.q.shape[2]
    if not t.equal:
        raise Unavailable("lists of several lengths")
    sdpa = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    q = t.grouped_q(torch.float32)
    out = torch.empty_like(q)
    page_size, groups = t.codes[0].shape[2], t.scales[0].shape[3]
    most = block * t.n_kv * t.width
    codes, scales = torch.empty(most, dim, dtype=torch.int8), torch.empty(most, groups, dtype=torch.float16)
    k, v = (torch.empty(most, groups, dim // groups) for _ in range(2))

    def take(which: int, rows: Any, to: Any) -> Any:
        n = len(rows)
        torch.index_select(t.codes[which].view(-1, dim), 0, rows, out=codes[:n])
        torch.index_select(t.scales[which].view(-1, groups), 0, rows, out=scales[:n])
        to = to[:n]
        to.copy_(codes[:n].view_as(to))
        return to.mul_(scales[:n].float()[..., None]).view(-1, t.n_kv, t.width, dim)

    def call() -> Any:
        for at in range(0, len(q), block):
            cells = t.ids[at : at + block, None, : t.width].long()
            rows = ((t.table[cells // page_size] * t.n_kv + t.heads[:, None]) * page_size + cells % page_size).flatten()
            out[at : at + block] = sdpa(q[at : at + block], take(0, rows, k), take(1, rows, v))
        return out.flatten(1, 2)

    return call


_GPU_DENSE = (
    Peer("FP32 memory-efficient", _dense("EFFICIENT_ATTENTION", "float32", False)),
    Peer("dequantize, FP32 memory-efficient", _dense("EFFICIENT_ATTENTION", "float32", True)),
    Peer("FP16 flash", _dense("FLASH_ATTENTION", "float16", False)),
    Peer("dequantize, FP16 flash", _dense("FLASH_ATTENTION", "float16", True)),
    Peer("FP16 cuDNN", _dense("CUDNN_ATTENTION", "float16", False)),
    Peer("dequantize, FP16 cuDNN", _dense("CUDNN_ATTENTION", "float16", True)),
)
_GPU_SELECTED = (
    Peer("compiled gather + dequantize, FP32 memory-efficient", _gathered("EFFICIENT_ATTENTION", "float32")),
    Peer("compiled gather + dequantize, FP16 flash", _gathered("FLASH_ATTENTION", "float16")),
    Peer("gather + dequantize, FP16 flash", _gathered("FLASH_ATTENTION", "float16", compiled=False)),
    Peer("compiled gather of FP16, FP16 flash", _gathered("FLASH_ATTENTION", "float16", ready=True)),
    Peer("FP16 cuDNN with a mask", _masked(False)),
    Peer("dequantize, FP16 cuDNN with a mask", _masked(True)),
)
_CPU_DENSE = (Peer("FP32", _dense(None, "float32", False)), Peer("dequantize, FP32", _dense(None, "float32", True)))
_CPU_SELECTED = (
    Peer("gather + dequantize, FP32", _gathered(None, "float32", compiled=False)),
    Peer("gather + dequantize in place, FP32", _in_place),
    Peer("compiled gather + dequantize, FP32", _gathered(None, "float32")),
)


def peers_of(shape: Shape, backend: str) -> Sequence[Peer]:
    """Every peer of a problem."""
    if backend == "cpu":
        return _CPU_SELECTED if shape.cells else _CPU_DENSE
    return _GPU_SELECTED if shape.cells else _GPU_DENSE
