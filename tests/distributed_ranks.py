"""One rank of a group: what tests/test_distributed.py starts, several at a time. Prints one JSON line.

distributed_ranks.py SCENARIO RANK SIZE STORE [DEVICE [BACKEND]]
"""

import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "golden")]

import inputs  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from problems import PLAIN, build  # noqa: E402

import strata_pa  # noqa: E402
from strata_pa import distributed, reference  # noqa: E402

TIMEOUT = {"cpu": 20, "cuda": 10}  # seconds of the group, where a rank is lost
# name: (golden case, are its lists given)
CASES = {
    "tiny": ("tiny", True),
    "dense": ("tiny", False),
    "page17": ("page17", True),
    "widths": ("widths", True),
    "layer0": ("layer0", False),
}
SPEC = PLAIN | {"n_rep": 3, "dim_group": (64, 32), "cap": 20, "widths": True}
# More shapes: name: a spec of tests/problems.py.
SPECS = {
    "window": {**SPEC, "seed": 1, "layout": "NHD", "sequences": [(40, 100)], "window_left": 30},
    "all": {**SPEC, "seed": 2, "dim_group": (128, 64), "page_size": 3, "sequences": [(9, 70)], "causal": False},
    "more queries than cells": {**SPEC, "seed": 3, "dim_group": (64, 64), "sequences": [(30, 17)]},
    "per head": {**SPEC, "seed": 4, "page_size": 3, "sequences": [(11, 90)], "lists": "per head", "granularity": 4},
    "batch": {**SPEC, "seed": 5, "sequences": [(5, 40), (0, 9), (7, 33)], "window_left": 11},
}


def digest(*tensors):
    return hashlib.sha256(b"".join(x.contiguous().cpu().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


class Problem:
    """A problem on this rank's device, whole."""

    def __init__(self, name, device, dtype=torch.float32):
        if name in CASES:
            case, lists = CASES[name]
            q, kv, options = inputs.arguments(inputs.load(case))
            options = {x: y for x, y in options.items() if y is not None and (lists or x not in ("ids", "widths"))}
        else:
            q, kv, options = build(SPECS[name])

        def place(x):
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        self.q = place(q).to(dtype)
        self.kv = strata_pa.PagedKV(*(place(x) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)), kv.layout)
        self.options = {x: place(y) if x in ("ids", "widths") else y for x, y in options.items()}
        self.n_q, self.n_head = self.q.shape[:2]

    def whole(self, **more):
        return strata_pa.prompt_attention(self.q, self.kv, return_lse=True, **self.options, **more)

    def slice_of(self, rank, size, division):
        """The cache with the pages of one rank, in a pool of their own."""
        table = self.kv.page_table
        pages = torch.arange(table.shape[-1])
        if division == "spans":
            mine = torch.zeros(len(pages), dtype=torch.bool)
            for first, end in distributed.page_spans(len(pages), size, rank):
                mine[first:end] = True
        elif division == "stripes":
            mine = pages % size == rank
        else:  # the last rank has none
            mine = pages % max(1, size - 1) == rank
        mine = (mine.to(table.device) & (table >= 0)).expand(table.shape)
        pools = [x[table[mine].long()].clone() for x in (self.kv.k, self.kv.v, self.kv.k_scale, self.kv.v_scale)]
        local = torch.full_like(table, -1)
        local[mine] = torch.arange(int(mine.sum()), dtype=torch.int32, device=table.device)
        return strata_pa.PagedKV(*pools, local, self.kv.layout)

    def lists(self, rows):
        return {x: y[rows] if x in ("ids", "widths") else y for x, y in self.options.items()}


def by_queries(p, rank, size, kernel, cache):
    spans = distributed.query_spans(p.n_q, size, rank)
    rows = torch.cat([torch.arange(first, end) for first, end in spans])
    kv = p.kv if cache == "replicated" else p.slice_of(rank, size, "stripes" if cache == "striped" else "spans")
    how = {"n_q": p.n_q, "cache": "replicated" if cache == "replicated" else "sharded", "kernel": kernel, "return_lse": True}
    all_rows = distributed.query_parallel(p.q[rows], kv, gather=True, **how, **p.lists(rows))
    own = distributed.query_parallel(p.q[rows], kv, **how, **p.lists(rows))
    assert all(torch.equal(x[rows.to(x.device)].view(torch.int32), y.view(torch.int32)) for x, y in zip(all_rows, own, strict=True))
    return all_rows


def own_heads(p, rank, size):
    """q, cache and options of a rank's heads, copied."""
    (first, end), (first_kv, end_kv) = distributed.head_spans(p.n_head, p.kv.n_kv, size, rank)
    kv = p.kv
    at = (slice(None), slice(first_kv, end_kv)) if kv.layout == "HND" else (slice(None), slice(None), slice(first_kv, end_kv))
    own = strata_pa.PagedKV(*(x[at].contiguous() for x in (kv.k, kv.v, kv.k_scale, kv.v_scale)), kv.page_table, kv.layout)
    options = dict(p.options)
    if "ids" in options and options["ids"].dim() == 3:
        options["ids"] = options["ids"][:, first_kv:end_kv].contiguous()
    return p.q[:, first:end].contiguous(), own, options


def by_heads(p, rank, size, kernel):
    q, kv, options = own_heads(p, rank, size)
    how = {"n_head": p.n_head, "n_kv": p.kv.n_kv, "kernel": kernel, "return_lse": True, "gather": True}
    return distributed.head_parallel(q, kv, **how, **options)


def by_context(p, rank, size, kernel, division):
    return distributed.context_parallel(p.q, p.slice_of(rank, size, division), kernel=kernel, return_lse=True, **p.options)


def schemes(rank, size, device):
    """{problem: {scheme: digest of out and lse}}, "one" for one device; and how far the merged results are from float64."""
    table, errors = {}, {}
    for name in [*CASES, *SPECS]:
        p = Problem(name, device)
        table[name] = row = {"one": digest(*p.whole(kernel="exact"))}
        if name in CASES and CASES[name][1]:
            row["golden"] = digest(p.whole(kernel="exact")[0])
            row["golden context"] = digest(by_context(p, rank, size, "exact", "stripes")[0])
        if name != "batch":
            for cache in ("replicated", "spans", "striped"):
                row[f"queries {cache}"] = digest(*by_queries(p, rank, size, "exact", cache))
        row["heads"] = digest(*by_heads(p, rank, size, "exact"))
        for division in ("spans", "stripes", "none on the last"):
            row[f"context {division}"] = digest(*by_context(p, rank, size, "exact", division))
    for kernel in ("fp32", "imma"):
        for name in ("dense", "page17", "window"):
            p = Problem(name, device)
            table[f"{kernel} {name}"] = {
                "one": digest(*p.whole(kernel=kernel)),
                "queries": digest(*by_queries(p, rank, size, kernel, "spans")),
                "heads": digest(*by_heads(p, rank, size, kernel)),
            }
            out = by_context(p, rank, size, kernel, "spans")
            again = by_context(p, rank, size, kernel, "spans")
            table[f"{kernel} {name} twice"] = {"one": digest(*out), "again": digest(*again)}
            want = float64(p)
            errors[f"{kernel} {name}"] = float((out[0].double().cpu() - want).abs().max() / want.abs().max())
    for dtype in (torch.float16, torch.bfloat16):
        p = Problem("dense", device, dtype)
        table[f"dense {dtype}"] = {"one": digest(*p.whole(kernel="exact")), "context": digest(*by_context(p, rank, size, "exact", "spans"))}
        fp32 = by_context(p, rank, size, "fp32", "spans")[0]
        assert fp32.dtype == dtype
    return {"digests": table, "errors": errors}


def float64(p):
    def back(x):
        return x.cpu().numpy() if isinstance(x, torch.Tensor) else x

    kv = strata_pa.PagedKV(*map(back, (p.kv.k, p.kv.v, p.kv.k_scale, p.kv.v_scale, p.kv.page_table)), p.kv.layout)
    return torch.from_numpy(reference.attention_float64(back(p.q), kv, **{x: back(y) for x, y in p.options.items()}))


def raised(call):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"error": None}


def differing(rank, size, device):
    """Calls that differ between the ranks: refused on every one of them, and the group goes on."""
    p, last = Problem("dense", device), rank == size - 1
    mine = p.slice_of(rank, size, "spans")
    short = p.q[: p.n_q - 1] if last else p.q
    bad_ids = torch.zeros((p.n_q, 5), dtype=torch.int32, device=p.q.device)
    if last:
        bad_ids[1, 2] = -7
    own_q, own_kv, _ = own_heads(p, rank, size)
    rows = torch.cat([torch.arange(first, end) for first, end in distributed.query_spans(p.n_q, size, rank)])
    calls = {
        "rows": lambda: distributed.context_parallel(short, mine, kernel="exact"),
        "window": lambda: distributed.context_parallel(p.q, mine, kernel="exact", window_left=5 if last else -1),
        "kernel": lambda: distributed.context_parallel(p.q, mine, kernel="exact" if last else "fp32"),
        "scheme": lambda: by_heads(p, rank, size, "exact") if last else distributed.context_parallel(p.q, mine, kernel="exact"),
        "one page on all": lambda: distributed.context_parallel(p.q, p.kv, kernel="exact"),
        "one rank's mistake": lambda: distributed.context_parallel(p.q, mine, kernel="no such" if last else "exact"),
        "rows of a span": lambda: distributed.query_parallel(p.q[rows][: len(rows) - last], p.kv, n_q=p.n_q, gather=True),
        "heads": lambda: distributed.head_parallel(own_q[:, last:], own_kv, n_head=p.n_head, n_kv=p.kv.n_kv, gather=True),
    }
    if device == "cpu":  # where the lists are read before anything is done
        calls["one rank's ids"] = lambda: distributed.context_parallel(p.q, mine, kernel="exact", ids=bad_ids)
        calls["one rank's ids, merged"] = lambda: distributed.context_parallel(p.q, mine, kernel="fp32", ids=bad_ids)
    table = {name: raised(call) for name, call in calls.items()}
    after = distributed.context_parallel(p.q, mine, kernel="exact", **p.options)
    return {"raised": table, "after": torch.equal(after, p.whole(kernel="exact")[0])}


def lost(rank, size, device):
    """The last rank goes away: between two calls, or in the middle of one."""
    p = Problem("dense", device)
    mine = p.slice_of(rank, size, "spans")
    distributed.context_parallel(p.q, mine, kernel="exact")
    if rank == size - 1:
        os._exit(7)
    return raised(lambda: distributed.context_parallel(p.q, mine, kernel="exact"))


def lost_within(rank, size, device):
    p = Problem("dense", device)
    mine = p.slice_of(rank, size, "spans")
    if rank == size - 1:
        distributed.exact_sums = lambda *a, **b: os._exit(7)
    return raised(lambda: distributed.context_parallel(p.q, mine, kernel="exact"))


def late(rank, size, device):
    """The last rank does not come, but is there."""
    p = Problem("dense", device)
    mine = p.slice_of(rank, size, "spans")
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL connects at the first use, and waits for that with another timeout
    if rank == size - 1:
        time.sleep(9)
        return {"error": "none"}
    return raised(lambda: distributed.context_parallel(p.q, mine, kernel="exact", group=group))


SCENARIOS = {"schemes": schemes, "differing": differing, "lost": lost, "lost_within": lost_within, "late": late}


def main(scenario, rank, size, store, device="cpu", backend="gloo"):
    rank, size = int(rank), int(size)
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=TIMEOUT[device.partition(":")[0]] if "lost" in scenario else 300)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    result = SCENARIOS[scenario](rank, size, device)
    print(json.dumps(result), flush=True)
    if scenario in ("schemes", "differing"):  # a group with a lost rank cannot be taken down in order
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo that still releases the last collective would abort when it finds the interpreter ending


if __name__ == "__main__":
    main(*sys.argv[1:])
