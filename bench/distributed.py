"""strata_pa.distributed over the ranks of this machine, beside one device; writes a JSON record.

    python bench/distributed.py --ranks 2 --device cuda --json FILE      a process for each rank, over NCCL (Gloo on the CPU)

24 query heads, 2 KV heads, head_dim 256, groups of 64, pages of 16. Per shape and kernel: the time of one device, of every way (the slowest
rank of a call, the median of several), of its steps alone, and whether its bytes are those of one device. The collectives come first.
Exit status 1: an exact way gave other bytes.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {"cuda": "1024/8192,2048/16384,4096/16384,2048/65536,2048/65536/2048", "cpu": "64/512,64/512/128"}
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
HEADS, KV_HEADS, DIM, GROUP, PAGE = 24, 2, 256, 64, 16


def rank_main(asked: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    rank, size = asked.rank, asked.ranks
    device = f"cuda:{rank % torch.cuda.device_count()}" if asked.device == "cuda" else "cpu"
    if asked.device == "cuda":
        torch.cuda.set_device(device)
    backend = asked.backend or ("nccl" if asked.device == "cuda" else "gloo")
    dist.init_process_group(
        backend, init_method=f"file://{asked.store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=asked.timeout)
    )
    measure = Measure(torch, dist, rank, size, device, asked.reps)
    result = {"collectives": measure.collectives(), "shapes": []}
    for shape in (asked.shapes or SHAPES[asked.device]).split(","):
        n_q, cells, *selected = map(int, shape.split("/"))
        for kernel in asked.kernels.split(","):
            row = {"n_q": n_q, "cells": cells, "selected": selected[0] if selected else None, "kernel": kernel}
            row |= measure.shape(n_q, cells, selected[0] if selected else None, kernel)
            result["shapes"].append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    if rank == 0:
        from strata_pa import _record

        record = {
            **_record.header(["python", "bench/distributed.py", *asked.arguments.split("\n")]),
            "ranks": size,
            "backend": backend,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if asked.device == "cuda" else [],
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if asked.device == "cuda" else None,
            "reps": asked.reps,
            **result,
        }
        Path(asked.json).write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not all(way["same_bytes"] for row in result["shapes"] if row["kernel"] == "exact" for way in row["ways"].values()))


class Measure:
    def __init__(self, torch, dist, rank, size, device, reps):
        self.torch, self.dist, self.rank, self.size, self.device, self.reps = torch, dist, rank, size, device, reps

    def wait(self):
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def time(self, call, together=True, reps=None) -> float:
        """Milliseconds: the median; of ranks together the slowest one's."""
        call()
        times = []
        for _ in range(reps or self.reps):
            self.wait()
            if together:
                self.dist.barrier()
                self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            times.append((time.perf_counter() - began) * 1e3)
        slowest = self.torch.tensor(times, device=self.device, dtype=self.torch.float64)
        if together:
            self.dist.all_reduce(slowest, self.dist.ReduceOp.MAX)
        return round(statistics.median(slowest.tolist()), 4)

    def collectives(self) -> list[dict]:
        """Each collective as strata_pa.distributed uses it; bytes: of the whole, one rank's view of the gathered or reduced array."""
        torch, ranks, rows = self.torch, self.group(), []
        for size in SIZES if self.device != "cpu" else SIZES[:3]:
            n = size // 8 // self.size * self.size
            x = torch.ones(n, dtype=torch.int64, device=self.device)
            shard, blocks = x[: n // self.size].clone(), x.view(self.size, -1)
            for name, call in {
                "all-gather": lambda shard=shard: ranks.gather(shard).result(),
                "reduce-scatter": lambda x=x: ranks.scatter_total(x).result(),
                "all-reduce": lambda x=x: ranks.maximum(x).result(),
                "all-to-all": lambda blocks=blocks: ranks.exchange(blocks).result(),
            }.items():
                rows.append({"collective": name, "bytes": n * 8, "ms": self.time(call, reps=20)})
        rows.append({"collective": "agree", "bytes": 40 * self.size, "ms": self.time(lambda: ranks.agree({"a": 1}, None), reps=20)})
        return rows

    def group(self):
        from strata_pa import distributed

        return distributed._Ranks(None, self.torch.device(self.device))

    def problem(self, n_q, cells, selected):
        import strata_pa

        torch = self.torch
        g = torch.Generator().manual_seed(n_q + cells)
        pages = cells // PAGE
        shape = (pages, KV_HEADS, PAGE)
        k, v = (torch.randint(-127, 128, (*shape, DIM), dtype=torch.int8, generator=g) for _ in range(2))
        ks, vs = ((torch.rand((*shape, DIM // GROUP), generator=g) * 0.02 + 0.005).half() for _ in range(2))
        table = torch.randperm(pages, generator=g).int()
        q = torch.randn((n_q, HEADS, DIM), generator=g)
        options = {}
        if selected:
            # A quarter of them the last cells; the others are chosen anew for every 8 queries.
            recent = selected // 4
            ids = torch.empty((n_q, selected), dtype=torch.int32)
            for first in range(0, n_q, 8):
                older = torch.randperm(cells - n_q - recent, generator=g)[: selected - recent].sort().values
                for i in range(first, min(first + 8, n_q)):
                    ids[i] = torch.cat([older, torch.arange(recent) + (cells - n_q + i + 1 - recent)])
            options["ids"] = ids
        tensors = [x.to(self.device) for x in (q, k, v, ks, vs, table)]
        kv = strata_pa.PagedKV(*tensors[1:])
        return tensors[0], kv, {name: x.to(self.device) for name, x in options.items()}

    def shape(self, n_q, cells, selected, kernel) -> dict:
        import strata_pa
        from strata_pa import distributed

        torch, rank, size = self.torch, self.rank, self.size
        q, kv, options = self.problem(n_q, cells, selected)
        one = strata_pa.prompt_attention(q, kv, kernel=kernel, **options)
        result = {
            "one_device_ms": self.time(lambda: strata_pa.prompt_attention(q, kv, kernel=kernel, **options), together=False),
            "ways": {},
        }

        pages = kv.page_table.shape[0]
        mine = torch.zeros(pages, dtype=torch.bool)
        for first, end in distributed.page_spans(pages, size, rank):
            mine[first:end] = True
        held = kv.page_table[mine.to(self.device)].long()
        table = torch.full((pages,), -1, dtype=torch.int32)
        table[mine] = torch.arange(len(held), dtype=torch.int32)
        slice_kv = strata_pa.PagedKV(*(x[held].clone() for x in (kv.k, kv.v, kv.k_scale, kv.v_scale)), table.to(self.device))

        spans = distributed.query_spans(n_q, size, rank)
        rows = torch.cat([torch.arange(first, end) for first, end in spans]).to(self.device)
        own_q, own_options = q[rows].contiguous(), {name: x[rows].contiguous() for name, x in options.items()}
        by_query = {"n_q": n_q, "kernel": kernel, **own_options}

        (first, end), (first_kv, end_kv) = distributed.head_spans(HEADS, KV_HEADS, size, rank)
        head_q = q[:, first:end].contiguous()
        head_kv = strata_pa.PagedKV(*(x[:, first_kv:end_kv].contiguous() for x in (kv.k, kv.v, kv.k_scale, kv.v_scale)), kv.page_table)
        by_head = {"n_head": HEADS, "n_kv": KV_HEADS, "kernel": kernel, **options}

        ways = {
            "queries, replicated cache": (lambda **x: distributed.query_parallel(own_q, kv, **by_query, **x), True),
            "queries, gathered cache": (lambda **x: distributed.query_parallel(own_q, slice_kv, cache="sharded", **by_query, **x), True),
            "heads": (lambda **x: distributed.head_parallel(head_q, head_kv, **by_head, **x), True),
            "context": (lambda: distributed.context_parallel(q, slice_kv, kernel=kernel, **options), False),
        }
        for name, (call, gathers) in ways.items():
            out = call(gather=True) if gathers else call()
            row = {"ms": self.time(call)}
            if gathers:
                row["all_rows_ms"] = self.time(lambda call=call: call(gather=True))
            row["same_bytes"] = torch.equal(out.view(torch.int32), one.view(torch.int32))
            row["difference"] = float((out - one).abs().max() / one.abs().max())
            result["ways"][name] = row
            del out
        result["steps"] = self.steps(q, kv, slice_kv, n_q, cells, kernel, options)
        return result

    def steps(self, q, kv, slice_kv, n_q, cells, kernel, options) -> dict:
        """What this rank computes in context_parallel, without the exchange."""
        from strata_pa import ExactAnchors, distributed, exact_anchors, exact_sums, prompt_attention

        shape = {"granularity": 1, "causal": True, "window_left": -1}
        parts = distributed._Parts(q, slice_kv, None, None, options.get("ids"), None, shape, self.size)

        def pieces():
            return [piece for block in parts.blocks for piece in parts.pieces(block)]

        listed = pieces()
        if kernel != "exact":

            def compute():
                for piece in listed:
                    prompt_attention(q[slice(*piece.rows)], piece.kv, kernel=kernel, return_lse=True, **piece.options)

            return {"pieces": len(listed), "lists_ms": self.time(pieces), "results_ms": self.time(compute)}
        whole = exact_anchors(q, kv, **options)

        def anchors():
            for piece in listed:
                exact_anchors(q[slice(*piece.rows)], piece.kv, **piece.options)

        def sums():
            for piece in listed:
                at = slice(*piece.rows)
                exact_sums(q[at], piece.kv, anchors=ExactAnchors(whole.A[at], whole.b[at]), **piece.options)

        return {"pieces": len(listed), "lists_ms": self.time(pieces), "anchors_ms": self.time(anchors), "sums_ms": self.time(sums)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", help="default: nccl on cuda, gloo on cpu")
    parser.add_argument("--shapes", help=f"queries/cells[/selected cells of each query],...; default: {SHAPES['cuda']}")
    parser.add_argument("--kernels", default="exact,v2", help="default: exact,v2")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--timeout", type=int, default=60, help="seconds of the group")
    parser.add_argument("--json", required=True)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", help=argparse.SUPPRESS)  # those of the first process
    parser.add_argument("--store", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, __file__, *sys.argv[1:], "--store", store, "--arguments=" + "\n".join(sys.argv[1:])]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=os.environ) for rank in range(asked.ranks)]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
