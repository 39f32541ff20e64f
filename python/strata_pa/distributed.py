"""Prompt attention over the ranks of a torch.distributed process group.

Three ways to divide the work. Every rank of the group makes the same call; each passes what it holds.

    query_parallel    each rank answers some of the queries; the cache is on every rank, or its pages are gathered (codes and scales)
    head_parallel     each rank answers some of the query heads, with their KV heads
    context_parallel  each rank holds some of the cache's pages and answers every query for them; the parts combine

With kernel="exact" all three give the bytes of one call on one device, whatever the number of ranks; the first two do with every kernel.
Arrays are PyTorch tensors, on the CPU with Gloo or on a GPU with NCCL; a Gloo group takes tensors on a GPU too, through host memory. What a
call costs: docs/distributed.md.

Before anything is exchanged, the ranks compare what they were called with. If they were called differently, or one of them cannot do its
part, all raise an error; a rank that is gone or late is noticed within the group's timeout (`GroupError`). After a GroupError the group
must not be used any more.
"""

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import _core
from .arrays import Array
from .attention import plan, prompt_attention
from .cache import PagedKV
from .partial import ExactAnchors, ExactSums, exact_anchors, exact_finish, exact_sums, merge_partials

Span = tuple[int, int]

_STEP_BYTES = 64 << 20  # of sums that are under way at once in context_parallel
_MOST_RUNS = 16  # runs of neighbouring pages that context_parallel walks one by one
_MOST_PARTS = 64  # of one merge_partials

# Named anew in PyTorch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GroupError(_core.Error, RuntimeError):
    """The group could not do a call together: a rank is gone, late, or refused its part."""


# --- Who does what ----------------------------------------------------------------------------------------------------------


def query_spans(n_q: int, size: int, rank: int) -> tuple[Span, Span]:
    """The rows of a prompt that a rank answers in `query_parallel`: two spans `(first, end)`, an early and a late one.

    The prompt is cut into `2 * size` chunks; a rank gets the chunks `rank` and `2 * size - 1 - rank`, so that with causal attention all
    have as much to do. A span may be empty.

    Raises:
        InvalidInput: rank is not one of size ranks, or n_q is negative.
    """
    _check_rank(size, rank)
    if n_q < 0:
        raise _core.InvalidInput(f"n_q must not be negative, got {n_q}")

    def chunk(i: int) -> Span:
        return n_q * i // (2 * size), n_q * (i + 1) // (2 * size)

    return chunk(rank), chunk(2 * size - 1 - rank)


def head_spans(n_head: int, n_kv: int, size: int, rank: int) -> tuple[Span, Span]:
    """The query heads and the KV heads `(first, end)` of a rank in `head_parallel`.

    The query heads are dealt out as evenly as can be; a KV head goes to every rank that has a query head of it.

    Raises:
        InvalidInput: rank is not one of size ranks, n_kv does not divide n_head, or there are more ranks than query heads.
    """
    _check_rank(size, rank)
    if n_kv < 1 or n_head < n_kv or n_head % n_kv != 0:
        raise _core.InvalidInput(f"n_head must be a multiple of n_kv, got {n_head} and {n_kv}")
    if size > n_head:
        raise _core.InvalidInput(f"{size} ranks cannot share {n_head} query heads")
    first, end = n_head * rank // size, n_head * (rank + 1) // size
    ratio = n_head // n_kv
    return (first, end), (first // ratio, (end - 1) // ratio + 1)


def page_spans(max_pages: int, size: int, rank: int) -> tuple[Span, Span]:
    """Logical pages for a rank in `context_parallel`: two spans, dealt out as in `query_spans`. Any other division works too."""
    return query_spans(max_pages, size, rank)


def _check_rank(size: int, rank: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise _core.InvalidInput(f"rank must be 0 to size - 1, got rank {rank} of {size}")


# --- The group --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exchange:
    """A collective under way."""

    ranks: "_Ranks"
    name: str
    work: Any
    out: torch.Tensor

    def result(self) -> torch.Tensor:
        if self.out.is_cuda:
            self._wait_on_host()
        with self.ranks.failing(self.name):
            self.work.wait()
        return self.out.to(self.ranks.device)

    def _wait_on_host(self) -> None:
        """A GPU would wait for a lost rank in silence: NCCL's watchdog comes at the timeout, and ends the process some time later."""
        end = time.monotonic() + 0.9 * self.ranks.timeout
        pause = 1e-5
        while not self.work.is_completed():
            if time.monotonic() > end:
                raise GroupError(
                    f"{self.name} of {self.ranks.size} ranks failed on rank {self.ranks.rank}: the others did not come in time"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-4)


class _Failing:
    """What the group's library raises, as a GroupError."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, _core.Error):
            raise GroupError(f"{self.what}: {error}") from error


class _Ranks:
    """The group, and its collectives on tensors of one device."""

    def __init__(self, group: Any, device: torch.device) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise _core.InvalidInput("there is no process group: call torch.distributed.init_process_group first")
        world: Any = dist.group.WORLD
        self.group: Any = world if group is None else group
        self.rank, self.size, self.device = dist.get_rank(self.group), dist.get_world_size(self.group), device
        if self.rank < 0:
            raise _core.InvalidInput("this process is not a rank of the group")
        backends = dict(item.split(":") for item in str(dist.get_backend_config(self.group)).split(","))
        backend = backends.get(device.type)
        if backend is None:
            raise _core.InvalidInput(f"the group has no backend for tensors on {device}: {backends}")
        self.through_host = backend == "gloo" and device.type != "cpu"
        options = getattr(self.group._get_backend(torch.device("cpu") if self.through_host else device), "options", None)
        self.timeout = options._timeout.total_seconds() if options is not None else 600.0

    def failing(self, name: str) -> _Failing:
        return _Failing(f"{name} of {self.size} ranks failed on rank {self.rank}")

    def _start(self, name: str, operation: Callable[..., Any], out: torch.Tensor, *arguments: Any) -> _Exchange:
        with self.failing(name):
            work = operation(out, *arguments, group=self.group, async_op=True)
        return _Exchange(self, name, work, out)

    def _mine(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() if self.through_host else x).contiguous()

    def gather(self, x: torch.Tensor) -> _Exchange:
        """[...] of each rank -> [size, ...] on all."""
        x = self._mine(x)[None]
        return self._start("all-gather", _ALL_GATHER, x.new_empty((self.size, *x.shape[1:])), x)

    def maximum(self, x: torch.Tensor) -> _Exchange:
        return self._start("all-reduce (max)", dist.all_reduce, self._mine(x), dist.ReduceOp.MAX)

    def total(self, x: torch.Tensor) -> _Exchange:
        return self._start("all-reduce (sum)", dist.all_reduce, self._mine(x), dist.ReduceOp.SUM)

    def scatter_total(self, x: torch.Tensor) -> _Exchange:
        """[size * n, ...] on all, summed -> rows [n, ...] of each rank."""
        x = self._mine(x)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return self._start("reduce-scatter", _REDUCE_SCATTER, out, x)

    def exchange(self, x: torch.Tensor) -> _Exchange:
        """[size, ...], one for each rank -> [size, ...], one of each rank."""
        x = self._mine(x)
        return self._start("all-to-all", dist.all_to_all_single, torch.empty_like(x), x)

    def agree(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """Raises on every rank unless all have the same facts and none has an error. Waits no longer than the group's timeout."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
        mine = [int(error is not None), *(int.from_bytes(digest[i : i + 7], "little") for i in range(0, 28, 7))]
        told = self.gather(torch.tensor(mine, dtype=torch.int64, device=self.device)).result().tolist()
        if all(one == [0, *mine[1:]] for one in told):
            return
        everyone: list[Any] = [None] * self.size
        current = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with self.failing("all-gather of errors"), current:
            dist.all_gather_object(everyone, (None if error is None else f"{type(error).__name__}: {error}", dict(facts)), self.group)
        if error is not None:
            raise error
        for rank, (refusal, _) in enumerate(everyone):
            if refusal is not None:
                raise GroupError(f"rank {rank} refused its part: {refusal}")
        for name in dict.fromkeys(name for _, other in everyone for name in other):
            values = [other.get(name) for _, other in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise _core.InvalidInput(f"the ranks' calls differ: {name} is {values[0]} on rank 0, {value} on rank {rank}")
        raise GroupError("the ranks' calls differ")


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """A rank's own step: its error is told to the others before it is raised."""
    try:
        return work(), None
    except Exception as error:  # whatever it is, the others must not wait for this rank
        return None, error


def _facts(q: torch.Tensor, kv: PagedKV, what: str, options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            plain[name] = f"{value.dtype} of {value.dim()} dimensions" if name in ("ids", "widths") else value.tolist()
        elif value is not None:
            plain[name] = value
    return {
        "the call": what,
        "q's dtype": str(q.dtype),
        "head_dim": kv.head_dim,
        "group": kv.group,
        "page_size": kv.page_size,
        "layout": kv.layout,
        "max_pages": int(kv.page_table.shape[-1]),
        **{name: value if isinstance(value, (str, int, float, bool)) else str(value) for name, value in {**plain, **more}.items()},
    }


def _check_tensors(q: Array, kv: PagedKV) -> None:
    for name, x in (("q", q), ("k", kv.k), ("page_table", kv.page_table)):
        if not isinstance(x, torch.Tensor):
            raise _core.InvalidType(f"{name} must be a PyTorch tensor, got {type(x).__name__}")


def _one_sequence(kv: PagedKV, kv_len: Any) -> int:
    if kv.page_table.dim() != 1:
        raise _core.InvalidInput("a batch of sequences is not divided: call once for each, with a page table [max_pages]")
    return int(kv.page_table.shape[0]) * kv.page_size if kv_len is None else int(kv_len)


# --- Query parallel ---------------------------------------------------------------------------------------------------------


def query_parallel(
    q: Array,
    kv: PagedKV,
    *,
    n_q: int,
    group: Any = None,
    cache: str = "replicated",
    gather: bool = False,
    kv_len: int | None = None,
    ids: Array | None = None,
    widths: Array | None = None,
    causal: bool = True,
    window_left: int = -1,
    kernel: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of a prompt whose queries are dealt out to the ranks: `query_spans`.

    Args:
        q: `[own rows, n_head, head_dim]`: the rows of this rank's two spans, one after the other.
        kv: the cache of one sequence. cache="replicated": all of it. cache="sharded": each page on one rank; the page tables are as long as
            on one device and hold -1 for the pages of others. The pages are gathered, as codes and scales; the late ones arrive while the
            early span is computed.
        n_q: queries of the whole prompt; the last one sits at cell `kv_len - 1`.
        group: the process group; None: the default one.
        gather: True: all rows on every rank; False: the rank's own rows.
        ids, widths: those of the rank's own rows.
        kernel, return_lse, options: as `prompt_attention`; also `granularity`, `sm_scale`, `num_threads`.

    Returns:
        out `[own rows or n_q, n_head, head_dim]`, with `return_lse` also lse: the rows of one call on one device. Without `gather` and with
        a replicated cache nothing is exchanged.

    Raises:
        As `prompt_attention`; InvalidInput also where the ranks' calls differ; GroupError.
    """
    _check_tensors(q, kv)
    ranks = _Ranks(group, q.device)
    mine = query_spans(n_q, ranks.size, ranks.rank)
    options = {**options, "causal": causal, "window_left": window_left, "kernel": kernel, "return_lse": return_lse}

    def prepare() -> tuple[int, list[tuple[Span, Span]]]:
        if cache not in ("replicated", "sharded"):
            raise _core.InvalidInput(f"cache must be 'replicated' or 'sharded', got {cache!r}")
        cells = _one_sequence(kv, kv_len)
        if not causal and window_left >= 0:
            raise _core.InvalidInput("window_left without causal needs every query's position: not divided by queries")
        rows = [end - first for first, end in mine]
        if q.shape[0] != sum(rows):
            raise _core.InvalidInput(f"q must have the {sum(rows)} rows of the spans {mine} of rank {ranks.rank}, got {q.shape[0]}")
        return cells, [((0, rows[0]), mine[0]), ((rows[0], sum(rows)), mine[1])]

    def answer(cells: int, cache_kv: PagedKV, own: Span, span: Span, run: Any = prompt_attention) -> Any:
        """One span: a prompt that ends where the span does."""
        first, end = own
        lists = {name: x[first:end] for name, x in (("ids", ids), ("widths", widths)) if x is not None}
        length = max(0, cells - n_q + span[1]) if causal else cells
        return run(q[first:end], cache_kv, kv_len=length, **lists, **options)

    def check() -> tuple[int, list[tuple[Span, Span]], list[str]]:
        cells, spans = prepare()
        return cells, spans, sorted({answer(cells, kv, own, span, plan).kernel for own, span in spans if own[1] > own[0]})

    prepared, error = _attempt(check)
    facts = _facts(q, kv, "query_parallel", options, n_q=n_q, cache=cache, gather=gather, kv_len=kv_len, n_head=q.shape[1], n_kv=kv.n_kv)
    if cache != "replicated" or gather:
        ranks.agree({**facts, "the kernels that run": prepared and prepared[2]}, error)
    elif error is not None:
        raise error
    cells, spans, _ = prepared

    if cache == "sharded":
        gathered = _GatheredCache(ranks, kv, cells, cells - n_q + (n_q * ranks.size // (2 * ranks.size)) if causal else cells)

        def early_then_late() -> list[Any]:
            gathered.wait(0)
            early = answer(cells, gathered.kv, *spans[0])
            gathered.wait(1)
            return [early, answer(cells, gathered.kv, *spans[1])]

        parts, error = _attempt(early_then_late)
    else:
        parts, error = _attempt(lambda: [answer(cells, kv, *span) for span in spans])
    if gather:
        ranks.agree({**facts, "step": "computed"}, error)
    if error is not None:
        raise error
    results = list(zip(*parts, strict=True)) if return_lse else [tuple(parts)]
    joined = [torch.cat(result) for result in results]
    if gather:
        joined = [_gather_rows(ranks, x, n_q) for x in joined]
    return tuple(joined) if return_lse else joined[0]


def _gather_rows(ranks: _Ranks, own: torch.Tensor, n_q: int) -> torch.Tensor:
    """The rows of all spans in their order."""
    all_spans = [query_spans(n_q, ranks.size, rank) for rank in range(ranks.size)]
    most = max(sum(end - first for first, end in spans) for spans in all_spans)
    padded = own.new_zeros((most, *own.shape[1:]))
    padded[: own.shape[0]] = own
    gathered = ranks.gather(padded).result()
    out = own.new_empty((n_q, *own.shape[1:]))
    for rank, spans in enumerate(all_spans):
        at = 0
        for first, end in spans:
            out[first:end] = gathered[rank, at : at + end - first]
            at += end - first
    return out


class _GatheredCache:
    """Every rank's pages on this one, in two steps: first the pages before cell `early`, then the others."""

    def __init__(self, ranks: _Ranks, kv: PagedKV, cells: int, early: int) -> None:
        owner = _owners(ranks, kv.page_table)
        local = kv.page_table.cpu()
        pools = [kv.k, kv.v, kv.k_scale, kv.v_scale]
        used = [x.shape[1:].numel() * x.element_size() for x in pools]  # bytes of a page
        sizes = [_round_up(x, 16) for x in used]
        border = min(len(owner), max(0, -(-early // kv.page_size)))
        held = [[(owner[:border] == rank).nonzero()[:, 0], (owner[border:] == rank).nonzero()[:, 0] + border] for rank in range(ranks.size)]
        slots = [max(len(pages[step]) for pages in held) for step in (0, 1)]
        pool = torch.zeros((max(1, sum(slots) * ranks.size), sum(sizes)), dtype=torch.uint8, device=ranks.device)
        table = torch.full((len(owner),), -1, dtype=torch.int32)
        self._steps: list[tuple[_Exchange | None, torch.Tensor]] = []
        at = 0
        for step in (0, 1):
            mine = held[ranks.rank][step]
            packed = pool.new_zeros((slots[step], sum(sizes)))
            physical = local[mine].to(torch.int64).to(ranks.device)
            offset = 0
            for x, size in zip(pools, sizes, strict=True):
                if len(mine):
                    codes = x[physical].reshape(len(mine), -1).view(torch.uint8)
                    packed[: len(mine), offset : offset + codes.shape[1]] = codes
                offset += size
            here = pool[at : at + slots[step] * ranks.size]
            self._steps.append((ranks.gather(packed) if slots[step] else None, here))
            for rank in range(ranks.size):
                pages = held[rank][step]
                table[pages] = torch.arange(len(pages), dtype=torch.int32) + (at + rank * slots[step])
            at += slots[step] * ranks.size
        views, offset = [], 0
        for x, n, size in zip(pools, used, sizes, strict=True):
            views.append(pool[:, offset : offset + n].view(x.dtype).view(-1, *x.shape[1:]))
            offset += size
        k, v, k_scale, v_scale = views
        self.kv = PagedKV(k, v, k_scale, v_scale, table.to(ranks.device), kv.layout)

    def wait(self, step: int) -> None:
        exchange, here = self._steps[step]
        if exchange is not None:
            here.copy_(exchange.result().view(here.shape))


def _owners(ranks: _Ranks, page_table: torch.Tensor) -> torch.Tensor:
    """The rank that holds each logical page, -1: none; on the CPU.

    Raises:
        InvalidInput: a page is on several ranks. All ranks raise it.
    """
    held = (page_table >= 0).to(torch.int32)
    count, owner = ranks.total(torch.stack([held, held * ranks.rank])).result().cpu()
    if bool((count > 1).any()):
        page = tuple((count > 1).nonzero()[0].tolist())
        raise _core.InvalidInput(
            f"logical page {', '.join(map(str, page))} is on {int(count[page])} ranks; each page must be on one at most"
        )
    return torch.where(count == 1, owner, -1)


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


# --- Head parallel ----------------------------------------------------------------------------------------------------------


def head_parallel(
    q: Array, kv: PagedKV, *, n_head: int, n_kv: int, group: Any = None, gather: bool = False, return_lse: bool = False, **options: Any
) -> Any:
    """Attention of a prompt, or of a batch, whose heads are dealt out to the ranks: `head_spans`.

    Args:
        q: `[n_q, own query heads, head_dim]`.
        kv: a cache of this rank's own KV heads.
        n_head, n_kv: heads of the whole problem.
        group: the process group; None: the default one.
        gather: True: all heads on every rank; False: the rank's own, and nothing is exchanged.
        options: as `prompt_attention`; `ids` with a list for each KV head have those of the own KV heads.

    Returns:
        out `[n_q, own heads or n_head, head_dim]`, with `return_lse` also lse.

    Raises:
        As `prompt_attention`; InvalidInput also where the ranks' calls differ; GroupError.
    """
    _check_tensors(q, kv)
    ranks = _Ranks(group, q.device)
    lists = options.pop("ids", None)

    def compute() -> tuple[list[torch.Tensor], str]:
        (first, end), (first_kv, end_kv) = head_spans(n_head, n_kv, ranks.size, ranks.rank)
        if (q.shape[1], kv.n_kv) != (end - first, end_kv - first_kv):
            raise _core.InvalidInput(
                f"rank {ranks.rank} has {end - first} query heads and {end_kv - first_kv} KV heads, "
                f"got q with {q.shape[1]} and a cache with {kv.n_kv}"
            )
        parts, kernels = [], set()
        for heads, kv_heads in _pieces(first, end, n_head // n_kv):
            at = slice(heads[0] - first, heads[1] - first)
            of = slice(kv_heads[0] - first_kv, kv_heads[1] - first_kv)
            pools = (x[:, of] if kv.layout == "HND" else x[:, :, of] for x in (kv.k, kv.v, kv.k_scale, kv.v_scale))
            k, v, k_scale, v_scale = pools
            ids = lists[:, of] if lists is not None and lists.dim() == 3 else lists
            piece = PagedKV(k, v, k_scale, v_scale, kv.page_table, kv.layout)
            kernels.add(plan(q[:, at], piece, ids=ids, **options).kernel)
            if len(kernels) > 1:
                raise _core.InvalidInput(
                    f"the heads of rank {ranks.rank} would run several kernels, {sorted(kernels)}: name one with kernel="
                )
            parts.append(prompt_attention(q[:, at], piece, ids=ids, return_lse=True, **options))
        return [torch.cat(x, 1) for x in zip(*parts, strict=True)], kernels.pop()

    computed, error = _attempt(compute)
    if gather:
        facts = _facts(q, kv, "head_parallel", {**options, "ids": lists}, n_head=n_head, n_kv=n_kv, n_q=q.shape[0], return_lse=return_lse)
        ranks.agree({**facts, "the kernel that runs": computed and computed[1]}, error)
    if error is not None:
        raise error
    results = computed[0] if return_lse else computed[0][:1]
    if gather:
        results = [_gather_heads(ranks, x, n_head) for x in results]
    return tuple(results) if return_lse else results[0]


def _pieces(first: int, end: int, ratio: int) -> Iterator[tuple[Span, Span]]:
    """Query heads and KV heads of calls in which every KV head has as many query heads: the whole KV heads in one."""
    while first < end:
        kv = first // ratio
        whole = end // ratio if first % ratio == 0 else 0
        if whole > kv:
            yield (first, whole * ratio), (kv, whole)
            first = whole * ratio
        else:
            stop = min(end, (kv + 1) * ratio)
            yield (first, stop), (kv, kv + 1)
            first = stop


def _gather_heads(ranks: _Ranks, own: torch.Tensor, n_head: int) -> torch.Tensor:
    counts = [n_head * (rank + 1) // ranks.size - n_head * rank // ranks.size for rank in range(ranks.size)]
    padded = own.new_zeros((own.shape[0], max(counts), *own.shape[2:]))
    padded[:, : own.shape[1]] = own
    gathered = ranks.gather(padded).result()
    return torch.cat([gathered[rank, :, :count] for rank, count in enumerate(counts)], 1)


# --- Context parallel -------------------------------------------------------------------------------------------------------


def context_parallel(
    q: Array,
    kv: PagedKV,
    *,
    group: Any = None,
    kv_len: Any = None,
    cu_seqlens_q: Any = None,
    ids: Array | None = None,
    widths: Array | None = None,
    granularity: int = 1,
    causal: bool = True,
    window_left: int = -1,
    kernel: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of a prompt over a cache whose pages are dealt out to the ranks.

    Args:
        q: all queries `[n_q, n_head, head_dim]`, the same on every rank.
        kv: this rank's pages: the page table is as long as on one device and holds -1 for the pages of other ranks. Each page is on one
            rank at most; any division works. For a dense call long runs of neighbouring pages are quickest: `page_spans` gives every rank
            as much to do.
        group: the process group; None: the default one.
        ids, widths: as on one device, the same on every rank; each rank takes from them what it holds.
        kernel: "exact": the bytes of one call on one device, whatever the division. Others, and None (the device's choice): the ranks'
            results are merged by their log-sum-exp in FP32, in the order of the ranks, so the bytes depend on the division.
        kv_len, cu_seqlens_q, granularity, causal, window_left, return_lse, options: as `prompt_attention`; also `sm_scale`, `num_threads`.

    Returns:
        out `[n_q, n_head, head_dim]` on every rank, with `return_lse` also lse.

    Raises:
        As `prompt_attention`; InvalidInput also where the ranks' calls differ or a page is on several ranks; GroupError.
    """
    _check_tensors(q, kv)
    ranks = _Ranks(group, q.device)
    shape = {"granularity": granularity, "causal": causal, "window_left": window_left}
    whole = {"kv_len": kv_len, "cu_seqlens_q": cu_seqlens_q, "ids": ids, "widths": widths, **shape, **options}

    def check() -> tuple[_Parts, str]:
        chosen = plan(q, kv, kernel=kernel, **whole)
        return _Parts(q, kv, kv_len, cu_seqlens_q, ids, widths, shape, ranks.size), chosen.kernel

    prepared, error = _attempt(check)
    facts = _facts(
        q, kv, "context_parallel", {**whole, "kernel": kernel}, n_q=q.shape[0], n_head=q.shape[1], n_kv=kv.n_kv, return_lse=return_lse
    )
    ranks.agree({**facts, "the kernel that runs": None if prepared is None else prepared[1]}, error)
    _owners(ranks, kv.page_table)
    parts, chosen = prepared
    if parts.n_q == 0:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
        return (out, lse) if return_lse else out
    run = _exact_context if chosen == "exact" else functools.partial(_merged_context, chosen)
    out, lse = run(ranks, parts, {**facts, "step": "computed"}, options)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Piece:
    """A call over this rank's cells for some rows of a block."""

    rows: Span
    kv: PagedKV
    options: dict[str, Any]


class _Parts:
    """What this rank computes: blocks of rows, and for each block calls over disjoint sets of this rank's cells."""

    def __init__(
        self, q: torch.Tensor, kv: PagedKV, kv_len: Any, cu_seqlens_q: Any, ids: Any, widths: Any, shape: dict[str, Any], size: int
    ) -> None:
        self.q, self.kv, self.ids, self.widths, self.shape = q, kv, ids, widths, shape
        self.n_q, self.n_head, self.head_dim = map(int, q.shape)
        self.whole = {"kv_len": kv_len, "cu_seqlens_q": cu_seqlens_q}
        self.resident = kv.page_table >= 0
        divisible = kv.page_table.dim() == 1 and cu_seqlens_q is None and (shape["causal"] or shape["window_left"] < 0)
        self.cells = _one_sequence(kv, kv_len) if divisible else None
        self.runs = self._find_runs() if divisible and ids is None else None
        row_bytes = self.n_head * (self.head_dim + 1) * 8
        step = _round_up(max(1, _STEP_BYTES // row_bytes), size) if divisible else max(1, self.n_q)
        self.blocks = [(first, min(self.n_q, first + step)) for first in range(0, self.n_q, step)]

    def _find_runs(self) -> list[Span] | None:
        """Runs of neighbouring pages as cells; None: too many to walk one by one."""
        held = [False, *self.resident.tolist(), False]
        edges = [i for i in range(len(held) - 1) if held[i] != held[i + 1]]
        size, cells = self.kv.page_size, self.cells or 0
        runs = [(a * size, min(b * size, cells)) for a, b in zip(edges[::2], edges[1::2], strict=True) if a * size < cells]
        return runs if len(runs) <= _MOST_RUNS else None

    def pieces(self, block: Span) -> list[_Piece]:
        if self.cells is None:
            return [_Piece(block, self.kv, {**self.whole, **self.shape, **self._lists(block)})]
        first, end = block
        base = self.cells - self.n_q  # the cell of row 0
        if self.runs is None:
            length = max(0, base + end) if self.shape["causal"] else self.cells
            return [_Piece(block, self.kv, {"kv_len": length, **self.shape, **self._lists(block)})]
        if not self.shape["causal"]:
            return [_Piece(block, self._slice(a, b, b), {"kv_len": b - a, **self.shape}) for a, b in self.runs]
        pieces, window = [], self.shape["window_left"]
        for a, b in self.runs:
            low, high = max(first, a - base), min(end, b - base)
            if low < high:  # rows within the run
                pieces.append(_Piece((low, high), self._slice(a, b, base + high), {"kv_len": base + high - a, **self.shape}))
            low, high = max(first, b - base), end if window < 0 else min(end, b - base + window)
            if low < high and window < 0:  # rows behind it see all of it
                pieces.append(_Piece((low, high), self._slice(a, b, b), {"kv_len": b - a, **self.shape, "causal": False}))
            elif low < high:
                pieces.append(_Piece((low, high), self._slice(a, b, base + high), {"kv_len": base + high - a, **self.shape}))
        return pieces

    def _slice(self, a: int, b: int, end: int) -> PagedKV:
        """The pages of cells a .. b - 1 as a cache that begins at cell a and goes to `end`."""
        size = self.kv.page_size
        table = self.kv.page_table[a // size : -(-b // size)]
        missing = -(-(end - a) // size) - len(table)
        if missing > 0:
            table = torch.cat([table, table.new_full((missing,), -1)])
        return PagedKV(self.kv.k, self.kv.v, self.kv.k_scale, self.kv.v_scale, table, self.kv.layout)

    def _lists(self, block: Span) -> dict[str, Any]:
        """The block's lists, with the entries that this rank holds moved to the front. Entries that cannot be are kept, to be refused."""
        if self.ids is None:
            return {}
        first, end = block
        ids = self.ids[first:end]
        cap = ids.shape[-1]
        widths = ids.new_full((end - first,), cap) if self.widths is None else self.widths[first:end]
        if self.cells is None or cap == 0 or (not ids.is_cuda and bool(((widths < 0) | (widths > cap)).any())):
            return {"ids": ids, "widths": widths}
        size, grain = self.kv.page_size, self.shape["granularity"]
        held = torch.cat([self.resident.new_zeros(1), self.resident]).to(torch.int32).cumsum(0, dtype=torch.int32)
        cell = ids.clamp(min=0).to(torch.int64) * grain
        low, high = (cell // size).clamp(max=len(held) - 1), ((cell + (grain - 1)) // size + 1).clamp(max=len(held) - 1)
        used = torch.arange(cap, device=ids.device) < widths.view(-1, *[1] * (ids.dim() - 1))
        own = used & ((held[high] > held[low]) & (ids >= 0) | (ids < -1))
        place = own.cumsum(-1) - 1
        # An entry that is not this rank's writes its -1 to the last slot, which is free then.
        packed = torch.full_like(ids, -1).scatter_(-1, torch.where(own, place, cap - 1), torch.where(own, ids, -1))
        count = own.sum(-1)
        return {"ids": packed, "widths": (count if ids.dim() == 2 else count.amax(1)).to(torch.int32)}


def _exact_context(ranks: _Ranks, parts: _Parts, facts: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two all-reduces: the greatest anchors, then the sums, as integers. The second is a reduce-scatter of each block's rows and an
    all-gather of what they come to, which moves less; it is under way while the next block is computed."""
    q, rows = parts.q, (parts.n_q, parts.n_head)

    def anchors_here() -> tuple[list[list[_Piece]], torch.Tensor]:
        empty = ExactAnchors(torch.full(rows, float("-inf"), device=q.device), torch.full(rows, -60.0, device=q.device))
        keys, pieces = empty.keys(), [parts.pieces(block) for block in parts.blocks]
        for piece in (piece for block in pieces for piece in block):
            a, b = piece.rows
            here = keys[:, a:b]
            here.copy_(torch.maximum(here, exact_anchors(q[a:b], piece.kv, **piece.options, **options).keys()))
        return pieces, keys

    computed, error = _attempt(anchors_here)
    ranks.agree(facts, error)
    pieces, keys = computed
    anchors = ExactAnchors.from_keys(ranks.maximum(keys).result())

    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty(rows, dtype=torch.float32, device=q.device)

    def start(block: Span, calls: list[_Piece]) -> tuple[Span, _Exchange, _Exchange]:
        first, end = block
        padded = _round_up(end - first, ranks.size)
        L = torch.zeros((padded, parts.n_head), dtype=torch.int64, device=q.device)
        O = torch.zeros((padded, parts.n_head, parts.head_dim), dtype=torch.int64, device=q.device)  # noqa: E741
        for piece in calls:
            a, b = piece.rows
            sums = exact_sums(q[a:b], piece.kv, anchors=ExactAnchors(anchors.A[a:b], anchors.b[a:b]), **piece.options, **options)
            L[a - first : b - first] += sums.L
            O[a - first : b - first] += sums.O
        return block, ranks.scatter_total(L), ranks.scatter_total(O)

    def finish(block: Span, total_L: _Exchange, total_O: _Exchange) -> None:
        first, end = block
        sums = ExactSums(total_L.result(), total_O.result())
        share = sums.L.shape[0]
        mine = ExactAnchors(*(_rows(x, first + ranks.rank * share, share, end) for x in (anchors.A, anchors.b)))
        own = torch.empty((share, parts.n_head, parts.head_dim), dtype=q.dtype, device=q.device)
        _store(ranks, *exact_finish(mine, sums, out=own), block, out, lse)

    _pipeline(parts.blocks, pieces, start, finish)
    return out, lse


def _merged_context(
    kernel: str, ranks: _Ranks, parts: _Parts, facts: dict[str, Any], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's result in FP32 goes, for a share of each block's rows, to the rank that merges the share."""
    q = parts.q.to(torch.float32)
    rows = (parts.n_q, parts.n_head)
    out, lse = torch.empty(parts.q.shape, dtype=parts.q.dtype, device=q.device), torch.empty(rows, dtype=torch.float32, device=q.device)

    def here(block: Span) -> tuple[torch.Tensor, torch.Tensor]:
        first, end = block
        padded = _round_up(end - first, ranks.size)
        results = []
        for piece in parts.pieces(block):
            a, b = piece.rows
            result = prompt_attention(q[a:b], piece.kv, kernel=kernel, return_lse=True, **piece.options, **options)
            results.append([_placed(x, a - first, padded, empty) for x, empty in zip(result, (0.0, float("-inf")), strict=True)])
        if not results:
            shape = (padded, parts.n_head)
            return torch.zeros((*shape, parts.head_dim), device=q.device), torch.full(shape, float("-inf"), device=q.device)
        return _merge([x for x, _ in results], [x for _, x in results])

    def start(block: Span, computed: tuple[torch.Tensor, torch.Tensor]) -> tuple[Span, _Exchange, _Exchange]:
        sent = [ranks.exchange(x.view(ranks.size, -1, *x.shape[1:])) for x in computed]
        return block, sent[0], sent[1]

    def finish(block: Span, outs: _Exchange, lses: _Exchange) -> None:
        merged, merged_lse = _merge(list(outs.result()), list(lses.result()))
        _store(ranks, merged.to(out.dtype), merged_lse, block, out, lse)

    # A block's own errors are told before its exchange.
    waiting = None
    for block in parts.blocks:
        computed, error = _attempt(functools.partial(here, block))
        ranks.agree(facts, error)
        started = start(block, computed)
        if waiting is not None:
            finish(*waiting)
        waiting = started
    if waiting is not None:
        finish(*waiting)
    return out, lse


def _merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """merge_partials of any number of parts: in groups where there are many."""
    while len(outs) > 1:
        groups = [slice(i, i + _MOST_PARTS) for i in range(0, len(outs), _MOST_PARTS)]
        merged = [merge_partials(outs[at], lses[at]) for at in groups]
        outs, lses = [x for x, _ in merged], [x for _, x in merged]
    return outs[0], lses[0]


def _pipeline(blocks: list[Span], pieces: list[list[_Piece]], start: Callable[..., Any], finish: Callable[..., None]) -> None:
    """Each block's exchange is under way while the next block is computed."""
    waiting = None
    for block, calls in zip(blocks, pieces, strict=True):
        started = start(block, calls)
        if waiting is not None:
            finish(*waiting)
        waiting = started
    if waiting is not None:
        finish(*waiting)


def _rows(x: torch.Tensor, first: int, count: int, end: int) -> torch.Tensor:
    """`count` rows from `first`; in place of those past `end` another one, which is not looked at."""
    return x[torch.arange(first, first + count, device=x.device).clamp(max=end - 1)]


def _placed(x: torch.Tensor, at: int, rows: int, empty: float) -> torch.Tensor:
    if x.shape[0] == rows:
        return x
    whole = x.new_full((rows, *x.shape[1:]), empty)
    whole[at : at + x.shape[0]] = x
    return whole


def _store(ranks: _Ranks, own: torch.Tensor, own_lse: torch.Tensor, block: Span, out: torch.Tensor, lse: torch.Tensor) -> None:
    first, end = block
    for part, whole in ((own, out), (own_lse, lse)):
        whole[first:end] = ranks.gather(part).result().flatten(0, 1)[: end - first]
