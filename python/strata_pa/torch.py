"""Prompt attention as an operator of PyTorch, and a paged int8 KV cache that quantizes what is appended to it.

    cache = PagedInt8KVCache(n_kv=2, head_dim=128)
    sequence = cache.add()
    cache.append(sequence, k, v)  # [n, 2, 128] each
    out = prompt_attention(q, cache.view(sequence), kv_len=cache.length(sequence))

Importing this module imports PyTorch; the rest of the package never does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _core
from ._torch_cache import PagedInt8KVCache
from .arrays import Ints
from .attention import prompt_attention as _run
from .cache import PagedKV

__all__ = ["PagedInt8KVCache", "prompt_attention"]


@torch.library.custom_op("strata_pa::prompt_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    page_table: Tensor,
    layout: str,
    ids: Tensor | None,
    widths: Tensor | None,
    granularity: int,
    kv_len: Sequence[int] | None,
    cu_seqlens_q: Sequence[int] | None,
    causal: bool,
    window_left: int,
    sm_scale: float | None,
    kernel: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v, k_scale, v_scale, page_table = (t.detach() for t in (q, k, v, k_scale, v_scale, page_table))
    done = _run(
        q,
        PagedKV(k, v, k_scale, v_scale, page_table, layout),
        ids=ids,
        widths=widths,
        granularity=granularity,
        kv_len=kv_len,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window_left=window_left,
        sm_scale=sm_scale,
        kernel=kernel,
        return_lse=return_lse,
    )
    return done if return_lse else (done, q.new_empty(0, dtype=torch.float32))


@_operator.register_fake
def _fake(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    lse = q.shape[:2] if arguments[-1] else (0,)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(lse, dtype=torch.float32, device=q.device)


def _no_gradient(*_: Any) -> None:
    raise _core.InvalidInput("strata_pa is for inference: it has no gradient, and an argument requires one; use torch.no_grad()")


_operator.register_autograd(_no_gradient, setup_context=lambda ctx, inputs, output: _no_gradient())


def prompt_attention(
    q: Tensor,
    kv: PagedKV,
    *,
    ids: Tensor | None = None,
    widths: Tensor | None = None,
    granularity: int = 1,
    kv_len: Ints | None = None,
    cu_seqlens_q: Ints | None = None,
    causal: bool = True,
    window_left: int = -1,
    sm_scale: float | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
) -> Any:
    """`strata_pa.prompt_attention` as the operator `torch.ops.strata_pa.prompt_attention`, for `torch.compile` as well.

    Arguments, results and errors are those of `strata_pa.prompt_attention`, for tensors in host memory or on a GPU, whose current stream is
    used. In a compiled function `kv` is an argument (a cache is not made there), and `kv_len` and `cu_seqlens_q` are ints or lists of ints.

    Raises:
        InvalidInput: gradients are on and a tensor requires one; nothing has run then.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, kv.k, kv.v, kv.k_scale, kv.v_scale)):
        _no_gradient()
    out, lse = _operator(
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
        _ints(kv_len),
        _ints(cu_seqlens_q),
        causal,
        window_left,
        sm_scale,
        kernel,
        return_lse,
    )
    return (out, lse) if return_lse else out


def _ints(value: Ints | None) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, int):
        return [value]
    return value if isinstance(value, list) else [int(x) for x in value]
