"""One small problem for each kernel of a GPU."""

from typing import Any

import numpy as np

from . import reference
from ._device import on_device, to_device, workspace_on
from .attention import plan, prompt_attention
from .cache import PagedKV, quantize_kv

# max |out - float64| / max |float64| of the kernels without portable bytes.
_TOLERANCE = 2e-6


def check_kernel(device: str, name: str, portable: bool) -> str:
    """What was seen of the kernel there, or an exception."""
    q, kv, options = _problem()
    q_there, kv_there, options_there = to_device(q, kv, options, device)
    arguments: dict[str, Any] = {**options_there, "kernel": name}
    chosen = plan(q_there, kv_there, **arguments)
    poison = np.full(q.shape, np.nan, np.float32)
    out = on_device(poison, device)
    prompt_attention(q_there, kv_there, out=out, workspace=workspace_on(device, chosen.workspace_bytes), **arguments)
    answer = out.read()
    notes = "".join(f"; {note}" for note in chosen.notes)
    if portable:
        expected = prompt_attention(q, kv, **options, kernel=name)
        wrong = int((answer.view(np.uint32) != expected.view(np.uint32)).any(-1).sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {q.shape[0] * q.shape[1]} rows differ from the CPU's bytes{notes}")
        return f"the CPU's bytes{notes}"
    expected = reference.attention_float64(q, kv, **options)
    error = float(np.abs(answer - expected).max() / np.abs(expected).max())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"the relative error is {error:.2e}, more than {_TOLERANCE:.0e}{notes}")
    return f"relative error {error:.1e}{notes}"


def _problem() -> tuple[Any, PagedKV, dict[str, Any]]:
    """The geometry that every kernel serves; lists with gaps, a page that is not resident, a query that sees nothing."""
    n_q, n_head, n_kv, dim, group, cells, page_size = 5, 24, 2, 256, 64, 150, 4
    rng = np.random.default_rng(1)
    pages = -(-cells // page_size)
    q = rng.standard_normal((n_q, n_head, dim), np.float32)
    k, k_scale = quantize_kv(rng.standard_normal((pages, n_kv, page_size, dim), np.float32), group)
    v, v_scale = quantize_kv(rng.standard_normal((pages, n_kv, page_size, dim), np.float32), group)
    table = rng.permutation(pages).astype(np.int32)
    table[7] = -1
    ids = rng.integers(0, cells, (n_q, 70)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    widths = np.array([70, 0, 1, 33, 64], np.int32)
    return q, PagedKV(k, v, k_scale, v_scale, table), {"ids": ids, "widths": widths, "kv_len": cells}
