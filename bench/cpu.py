"""The CPU kernels beside PyTorch's FP32 attention, on two cores, in one process.

    pip install . torch==2.13.0 && python bench/cpu.py        about a minute; writes bench/records/cpu_<date>.json

Two problems, 24 query heads, 2 KV heads, head_dim 256:
- dense causal, 1500 queries over 1500 cells. The peer, scaled_dot_product_attention, gets keys and values that are already FP32.
- 256 queries over 2,051 selected cells each of 8192. The peer gathers the cells by page, dequantizes them and runs
  scaled_dot_product_attention, 32 queries at a time: once as one writes it down, once with flat indices and buffers that are reused.
Calls alternate, the medians count. Exit status 1: a kernel is slower than BOUNDS say, or its error is more than `strata-pa parity` allows.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

RECORDS = Path(__file__).with_name("records")
DENSE, SELECTED = (1500, 1500), (8192, 256)
SDPA, SDPA_REPEATED = "torch SDPA", "torch SDPA, K/V repeated"
GATHER, GATHER_TUNED = "torch gather + dequantize + SDPA", "the same, flat and in place"

# How much faster than the peer a kernel has to be, at least.
BOUNDS = {
    DENSE: {"against": SDPA, "fp32": 1.0, "imma": 1 / 1.5, "exact": 1.3},
    SELECTED: {"against": GATHER, "fp32": 8.0, "imma": 8.0, "exact": 8.0},
}


def dense_peers(case) -> dict[str, Callable]:
    """Both forms give [1, heads, n, D]."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.from_numpy(case.q).transpose(0, 1)[None].contiguous()
    k, v = dequantized(case, case.kv.k, case.kv.k_scale), dequantized(case, case.kv.v, case.kv.v_scale)
    n_rep = q.shape[1] // k.shape[1]
    k_all, v_all = k.repeat_interleave(n_rep, 1), v.repeat_interleave(n_rep, 1)
    return {
        SDPA: lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        SDPA_REPEATED: lambda: scaled_dot_product_attention(q, k_all, v_all, is_causal=True),
    }


def dequantized(case, codes, scales):
    """The cells in order, FP32 [1, n_kv, context, D]."""
    import torch

    codes, scales = (torch.from_numpy(x[case.kv.page_table]).transpose(0, 1) for x in (codes, scales))  # [n_kv, pages, page_size, ...]
    values = codes.float().unflatten(3, (scales.shape[3], -1)) * scales.float()[..., None]
    return values.reshape(1, len(codes), -1, codes.shape[3])[:, :, : case.context].contiguous()


def selection_peers(case, block: int = 32) -> dict[str, Callable]:
    """Both forms give [n_q, heads, D]. Every query has as many cells as the others, so no mask is needed."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    width = int(case.options["widths"][0])
    assert (case.options["widths"] == width).all()
    kv = case.kv
    k, v, k_scale, v_scale, table = (torch.from_numpy(x) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table))
    ids = torch.from_numpy(case.options["ids"][:, :width])
    n_kv, page_size, dim = k.shape[1:]
    groups = k_scale.shape[3]
    q = torch.from_numpy(case.q).unflatten(1, (n_kv, -1))  # the query heads of a KV head are the rows of one product
    out = torch.empty_like(q)

    def as_written():
        def take(codes, scales, page, slot):
            values = codes[page, :, slot].float().unflatten(3, (groups, -1)) * scales[page, :, slot].float()[..., None]
            return values.flatten(3).transpose(1, 2)  # [block, n_kv, width, D]

        for at in range(0, len(ids), block):
            cells = ids[at : at + block]
            page, slot = table[cells // page_size], cells % page_size
            out[at : at + block] = scaled_dot_product_attention(
                q[at : at + block], take(k, k_scale, page, slot), take(v, v_scale, page, slot)
            )
        return out.flatten(1, 2)

    rows = block * n_kv * width
    codes_buffer, scales_buffer = torch.empty(rows, dim, dtype=torch.int8), torch.empty(rows, groups, dtype=torch.float16)
    k_buffer, v_buffer = (torch.empty(block, n_kv, width, groups, dim // groups) for _ in range(2))
    heads = torch.arange(n_kv, dtype=torch.int32)[:, None]

    def tuned():
        def take(codes, scales, row, buffer):
            torch.index_select(codes.view(-1, dim), 0, row, out=codes_buffer)
            torch.index_select(scales.view(-1, groups), 0, row, out=scales_buffer)
            buffer.copy_(codes_buffer.view_as(buffer))
            return buffer.mul_(scales_buffer.float().view(block, n_kv, width, groups, 1)).flatten(3)

        for at in range(0, len(ids), block):
            cells = ids[at : at + block, None]
            row = ((table[cells // page_size] * n_kv + heads) * page_size + cells % page_size).flatten()
            out[at : at + block] = scaled_dot_product_attention(
                q[at : at + block], take(k, k_scale, row, k_buffer), take(v, v_scale, row, v_buffer)
            )
        return out.flatten(1, 2)

    return {GATHER: as_written, GATHER_TUNED: tuned}


def alternate(calls: dict[str, Callable], reps: int, step: Callable[[str], None]) -> dict[str, list[float]]:
    """The times in ms of `reps` rounds through all calls, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(reps + 1):
        for name, call in calls.items():
            time.sleep(0.02)  # OpenMP's threads stop spinning
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
            step(name)
    return {name: some[1:] for name, some in times.items()}


def gemm(n: int = 2048) -> tuple[Callable, float]:
    import torch

    a, b, c = (torch.ones(n, n) for _ in range(3))
    return lambda: torch.mm(a, b, out=c), 2.0 * n**3


def measure(shape, threads: int, reps: int, sample: int, step) -> dict:
    import numpy as np

    from strata_pa import _parity, prompt_attention, reference
    from strata_pa._cases import make_case, shape_of

    case = make_case(shape_of(*shape))
    peers = dense_peers(case) if shape == DENSE else selection_peers(case)
    out = {name: np.full_like(case.q, np.nan) for name in BOUNDS[shape] if name != "against"}
    calls: dict[str, Callable] = {
        name: lambda name=name: prompt_attention(case.q, case.kv, kernel=name, out=out[name], num_threads=threads, **case.options)
        for name in out
    }
    calls |= peers
    mm, mm_flop = gemm()
    times = alternate(calls | {"FP32 GEMM": mm}, reps, step)

    rows = case.sampled(sample)
    expected = reference.attention_float64(case.q, case.kv, rows=rows, **case.options)
    results = []
    for name in calls:
        answer = out[name] if name in out else peers[name]().numpy()
        if answer.ndim == 4:
            answer = answer[0].swapaxes(0, 1)
        median = statistics.median(times[name])
        results.append(
            {
                "case": case.name,
                "kernel": name,
                "ours": name in out,
                "device": "cpu",
                "context": case.context,
                "queries": case.queries,
                "widest": case.widest,
                "threads": threads,
                "max_rel_err": _parity.relative_error(answer[rows], expected),
                "sampled": len(rows),
                "median_ms": median,
                "min_ms": min(times[name]),
                "max_ms": max(times[name]),
                "reps": reps,
                "gflops": case.flop / median * 1e-6,
                "sha256": _parity.digest(answer),
            }
        )
    medians = {r["kernel"]: r["median_ms"] for r in results}
    against = BOUNDS[shape]["against"]
    bounds = [
        {"case": case.name, "kernel": name, "against": against, "least": BOUNDS[shape][name], "speedup": medians[against] / medians[name]}
        for name in out
    ]
    for r in results:  # the time of each peer over the kernel's
        r["speedup"] = {peer: medians[peer] / r["median_ms"] for peer in peers}
    yardstick = {
        "case": case.name,
        "what": "FP32 GEMM 2048 x 2048 x 2048, torch.mm",
        "gflops": mm_flop / statistics.median(times["FP32 GEMM"]) * 1e-6,
    }
    return {"results": results, "bounds": bounds, "yardsticks": [yardstick]}


def verdicts(record: dict) -> list[str]:
    """Every bound that is missed, in words."""
    from strata_pa._parity import BOUNDS as ERRORS

    slow = [
        f"{b['kernel']} on {b['case']}: {b['speedup']:.2f} times as fast as {b['against']}, not {b['least']:.2f}"
        for b in record["bounds"]
        if not b["speedup"] >= b["least"]
    ]
    wrong = [
        f"{r['kernel']} on {r['case']}: error {r['max_rel_err']:.2e} > {ERRORS[r['kernel']]:.1e}"
        for r in record["results"]
        if r["ours"] and not r["max_rel_err"] <= ERRORS[r["kernel"]]
    ]
    return slow + wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=11, help="rounds; default: 11")
    parser.add_argument("--sample", type=int, default=32, help="queries to compare with float64; default: 32")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores; default: 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/records/cpu_<date>.json")
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # before torch and its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.threads])

    import torch

    from strata_pa import _record, _show

    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    parts = []
    with _show.progress(len(BOUNDS) * (asked.reps + 1) * 6) as step:
        for shape in BOUNDS:
            parts.append(measure(shape, asked.threads, asked.reps, asked.sample, step))
    record = _record.header(_record.command_line("python bench/cpu.py"))
    record["versions"] |= {"torch": torch.__version__, "torch_cpu": torch.backends.cpu.get_cpu_capability()}
    record |= {key: [entry for part in parts for entry in part[key]] for key in parts[0]}

    for r in record["results"]:
        speed = f"{r['median_ms']:9.1f} ms {r['gflops']:7.1f} GFLOP/s"
        ratios = ", ".join(f"{ratio:.2f}" for ratio in r["speedup"].values())
        print(f"{r['case']:18} {r['kernel']:33} {speed}  {r['max_rel_err']:.2e}  {r['sha256'][:8]}  {ratios}")
    for y in record["yardsticks"]:
        print(f"{y['case']:18} {y['what']}: {y['gflops']:.1f} GFLOP/s")
    path = asked.json or RECORDS / f"cpu_{record['date'][:10]}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    missed = verdicts(record)
    print(*(f"MISSED: {what}" for what in missed), f"written: {os.path.relpath(path)}", sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
