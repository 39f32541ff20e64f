"""Prompt attention, and the plan that chooses its kernel."""

from dataclasses import dataclass

from . import _core
from .arrays import Array, Ints, empty_like_kind, is_jax
from .cache import PagedKV


@dataclass(frozen=True)
class Plan:
    """Which kernel runs a problem, and why not another.

    Attributes:
        kernel: the kernel's name, e.g. "fp32".
        backend: "cpu", "cuda" or "hip".
        device: "cpu", "cuda:0", ...
        workspace_bytes: scratch memory that a run takes, all threads together; on a GPU what it can be given (`workspace=`), 0: no
            use for it.
        refused: every other kernel with the reasons why it does not run.
        architecture: what the kernel is compiled for: the instruction-set path of the CPU, or "sm_90".
        num_threads: CPU threads.
        chosen_by: "default", "kernel=", "set_imma(True)", "STRATA_PROMPT_ATTN_OLD=1", ...
        notes: switches that were not followed, and why.
    """

    kernel: str
    backend: str
    device: str
    workspace_bytes: int
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    architecture: str = ""
    num_threads: int = 0
    chosen_by: str = "default"
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        threads = f", {self.num_threads} threads" if self.backend == "cpu" else ""
        lines = [
            f"Plan: {self.kernel} on {self.device} ({self.architecture}{threads}), chosen by {self.chosen_by}, "
            f"workspace {self.workspace_bytes} bytes",
            *(f"  refused {name}: {'; '.join(reasons)}" for name, reasons in self.refused),
            *(f"  note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def make_call(
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
    kernel: str | None = None,
    stream: object = None,
    num_threads: int | None = None,
    isa: str | None = None,
) -> _core.Call:
    """The checked call; `isa` forces an instruction-set path as STRATA_PA_FORCE_ISA does."""
    if not isinstance(kv, PagedKV):
        raise _core.InvalidType(f"kv must be a PagedKV, got {type(kv).__name__}")
    return _core.Call(
        q,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        kv.page_table,
        kv.layout,
        ids,
        widths,
        granularity,
        kv_len,
        cu_seqlens_q,
        causal,
        window_left,
        sm_scale,
        kernel,
        stream,
        num_threads,
        isa,
    )


def prompt_attention(
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
    kernel: str | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    stream: object = None,
    num_threads: int | None = None,
    workspace: Array | None = None,
) -> Array:
    """Attention of prompt queries over a paged int8 KV cache.

    Query i of a sequence of n queries and `kv_len` cells sits at cell `pos = kv_len - n + i`. Query head h reads KV head
    `h // (n_head // n_kv)`. A row that sees no cell gets 0 (lse: -inf); a row that meets a value that is not finite gets NaN.

    Args:
        q: float32, float16 or bfloat16 `[n_q, n_head, head_dim]`; the queries of all sequences, one after another.
        kv: the cache.
        ids: int32 `[n_q, cap]`, or `[n_q, n_kv, cap]` with a list for each KV head: the cells that each query attends to. Entry e
            names the cells `granularity * e .. granularity * e + granularity - 1`; those past the query's own position (with `causal`)
            or past `kv_len` are masked. -1: none, anywhere in a list. None: every cell. A cell listed twice counts twice.
        widths: int32 `[n_q]`, the entries of `ids` in use of each query, 0..cap; None: `cap`. Entries past the width are not read.
        granularity: cells per entry of `ids`: 1, 4, 16, 64 or 128.
        kv_len: cells of each sequence, an int (one sequence) or ints `[n_seq]` in host memory; None: the whole page table,
            `max_pages * page_size`.
        cu_seqlens_q: ints `[n_seq + 1]` in host memory, sequence s has the queries `cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1`; None:
            one sequence.
        causal: mask the cells past the query's position.
        window_left: mask the cells before `pos - window_left`; -1: no window.
        sm_scale: factor of the scores before the softmax; None: `1 / sqrt(head_dim)`.
        kernel: run this kernel ("fp32", "v1", "v2", "imma", "exact") or raise; None: as `set_imma`, then the environment
            say (`environment_variables()`), otherwise the device's default.
        return_lse: also return the natural log of each row's sum of exponentials.
        out: where to write: an array of q's shape and dtype that overlaps neither an input nor itself; None: a new array.
        stream: on a GPU, the CUDA stream to run on: an address (0: the legacy default stream), or a stream of PyTorch, CuPy or with
            `__cuda_stream__`. None: the current stream of q's library on that device, of a library without one the legacy default stream.
            The call returns before the work is done; with a stream that is not the current one, use `out` only after waiting for it.
        num_threads: CPU threads, 1 to 1024, for arrays in host memory; None: STRATA_PA_NUM_THREADS, otherwise the CPUs that the process
            may run on. The bytes do not depend on it.
        workspace: on a GPU, uint8 `[n]` of at least the plan's `workspace_bytes`, its address a multiple of 256, which no other call uses
            before this one is done: with it `exact` takes its fast form where there is one. None: allocated where `out` and `stream` are
            None too and q is of PyTorch or CuPy, otherwise the plain form runs. The bytes do not depend on it.

    Returns:
        `out` `[n_q, n_head, head_dim]` of q's dtype; with `return_lse` the pair `(out, lse)`, lse float32 `[n_q, n_head]`. New arrays
        are of q's library (PyTorch; on a GPU also CuPy and JAX), otherwise NumPy arrays.

    Arrays on a GPU stay there: all of them must be on one device, but `kv_len` and `cu_seqlens_q` are read on the host. With `out` given,
    nothing is allocated, copied or waited for, so a call can be captured in a CUDA graph (with `return_lse` in PyTorch's own capture): a
    replay reads q, the cache, the page table, ids and widths anew.

    Raises:
        InvalidInput: a value, shape or layout that cannot be (an id below -1, a page past the pool, a width past cap, ...), or a malformed
            environment variable; also a ValueError.
        InvalidType: a wrong dtype or type; an InvalidInput, also a TypeError.
        UnsupportedProblem: no kernel, or not the one of `kernel`, serves the problem: the message lists each with its reasons; also a
            ValueError.
        UnsupportedDevice: arrays on a device, or a STRATA_PA_FORCE_ISA, that this build or machine does not have; also a
            RuntimeError.
        DriverError: a call of the GPU's driver failed; also a RuntimeError.
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
        kernel=kernel,
        stream=stream,
        num_threads=num_threads,
    )
    fresh = out is None
    if out is None:
        facts = call.plan()  # refuses before anything is allocated
        out = empty_like_kind(q, call.shape, call.dtype, call.device)
        size = facts["workspace_bytes"]
        # The allocators of PyTorch and CuPy hand the memory on in the order of the current stream.
        if workspace is None and stream is None and size and call.device != "cpu" and not is_jax(out):
            workspace = empty_like_kind(q, (size,), "uint8", call.device)
    lse = empty_like_kind(q, call.shape[:2], "float32", call.device) if return_lse else None
    call.run(out, lse, fresh, workspace)
    if fresh and is_jax(out):
        call.synchronize()
    return (out, lse) if return_lse else out


def plan(
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
    kernel: str | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    stream: object = None,
    num_threads: int | None = None,
) -> Plan:
    """What `prompt_attention` with the same arguments would run, without running it.

    Shapes, layouts, switches and the environment are checked as there; the contents of `ids` and of
    the page table are not.

    Raises:
        As `prompt_attention`.
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
        kernel=kernel,
        stream=stream,
        num_threads=num_threads,
    )
    return Plan(**call.plan(out))
