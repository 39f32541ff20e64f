"""What a prompt costs over many ranks: a model of strata_pa.distributed, beside a record of bench/distributed.py and past its ranks.

    python bench/distributed_model.py             writes the tables of docs/distributed.md and docs/distributed.svg from the newest record
    python bench/distributed_model.py --check     exit status 1 if the tables are out of date
    python bench/distributed_model.py --simulate 4096/1048576,131072/131072 --ranks 8,64,512,4096

A collective takes `latency + moved bytes / bandwidth`, both from the record. Between nodes (--node ranks each) the bandwidth is at most
--network GB/s a rank, and each doubling of the nodes adds --network-us. A rank's work is one device's, divided. 24 query heads, 2 KV heads,
head_dim 256, groups of 64.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import report

DOCUMENT, PLOT = report.ROOT / "docs" / "distributed.md", report.ROOT / "docs" / "distributed.svg"
HEADS, KV_HEADS, DIM, GROUP = 24, 2, 256, 64
CELL_BYTES = KV_HEADS * 2 * (DIM + 2 * DIM // GROUP)  # codes and scales
STEP_BYTES = 64 << 20  # strata_pa.distributed: sums under way at once
WAYS = ("queries, replicated cache", "queries, gathered cache", "heads", "context")


def pairs(n_q: float, cells: float, selected: float | None) -> float:
    """Cells that all queries see."""
    return n_q * selected if selected else n_q * (cells - (n_q - 1) / 2)


@dataclass(frozen=True)
class Network:
    """latency: ms of a small collective; bandwidth: bytes per ms of a large one; per collective, of the record's ranks."""

    latency: dict[str, float]
    bandwidth: dict[str, float]
    agree: float
    node: int = 8
    between: float = 50e6  # bytes per ms and rank
    between_ms: float = 0.01

    def time(self, collective: str, size: float, ranks: int) -> float:
        """ms for a whole of `size` bytes."""
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.node)
        moved = size * (ranks - 1) / ranks * (2 if collective == "all-reduce" else 1)
        speed = min(self.bandwidth[collective], self.between) if nodes > 1 else self.bandwidth[collective]
        return self.latency[collective] + math.ceil(math.log2(nodes)) * self.between_ms + moved / speed

    def agreement(self, ranks: int) -> float:
        """The check before the work, and that no page is on two ranks: small collectives whose answers the host waits for."""
        return 0.0 if ranks == 1 else self.agree + math.ceil(math.log2(-(-ranks // self.node))) * self.between_ms


def network(record: dict, **more: float) -> Network:
    rows: dict[str, list[tuple[int, float]]] = {}
    for row in record["collectives"]:
        rows.setdefault(row["collective"], []).append((row["bytes"], row["ms"]))
    ranks = record["ranks"]
    agree = rows.pop("agree")[0][1]
    latency = {name: min(ms for _, ms in points) for name, points in rows.items()}
    bandwidth = {}
    for name, points in rows.items():
        size, ms = max(points)
        bandwidth[name] = size * (ranks - 1) / ranks * (2 if name == "all-reduce" else 1) / (ms - latency[name])
    return Network(latency, bandwidth, agree, **more)


@dataclass(frozen=True)
class Work:
    """ms on one device: the whole call, and what the ranks of context_parallel compute, added up (exact: anchors and sums)."""

    one: float
    first: float
    second: float


def times(way: str, exact: bool, work: Work, n_q: int, cells: int, selected: int | None, ranks: int, net: Network) -> float:
    """ms of a way, its result left where it is computed (context: on all ranks)."""
    if way == "queries, replicated cache":
        return work.one / ranks
    if way == "heads":
        return work.one / min(ranks, HEADS)
    if way == "queries, gathered cache":
        chunk = n_q / (2 * ranks)  # rank 0 has the first and the last one
        early, late = pairs(chunk, cells - n_q + chunk, selected), pairs(chunk, cells, selected)
        late_ms = work.one / ranks * late / (early + late)
        early_ms = work.one / ranks - late_ms
        before = min(1.0, (cells - n_q / 2) / cells)  # of the bytes: what the early spans need
        total = cells * CELL_BYTES
        first, second = (net.time("all-gather", total * part, ranks) for part in (before, 1 - before))
        return 2 * net.agreement(ranks) + first + max(early_ms, second) + late_ms
    rows = n_q * HEADS
    blocks = max(1, -(-rows * (DIM + 1) * 8 // STEP_BYTES))
    back = net.time("all-gather", rows * DIM * 4 / blocks, ranks) + net.time("all-gather", rows * 4 / blocks, ranks)
    if exact:
        before = 3 * net.agreement(ranks) + work.first / ranks + net.time("all-reduce", rows * 16, ranks)
        exchange = net.time("reduce-scatter", rows * 8 / blocks, ranks) + net.time("reduce-scatter", rows * DIM * 8 / blocks, ranks) + back
        compute = work.second / ranks
    else:
        before = (2 + blocks) * net.agreement(ranks)
        exchange = net.time("all-to-all", rows * 4 / blocks, ranks) + net.time("all-to-all", rows * DIM * 4 / blocks, ranks) + back
        compute = work.first / ranks
    return before + compute / blocks + (blocks - 1) * max(compute / blocks, exchange) + exchange


def moved(way: str, exact: bool, n_q: int, cells: int, ranks: int) -> float:
    """Bytes that a rank receives."""
    share = (ranks - 1) / ranks
    rows = n_q * HEADS
    if way == "queries, gathered cache":
        return share * cells * CELL_BYTES
    if way == "context":
        return share * rows * (2 * 16 + 8 * (DIM + 1) + 4 * (DIM + 1) if exact else 8 * (DIM + 1))
    return 0.0


def work_of(row: dict, ranks: int) -> Work:
    steps = row["steps"]
    if row["kernel"] == "exact":
        return Work(row["one_device_ms"], steps["anchors_ms"] * ranks, steps["sums_ms"] * ranks)
    return Work(row["one_device_ms"], steps["results_ms"] * ranks, 0.0)


def shape_text(row: dict) -> str:
    return f"{row['n_q']} / {row['cells']}" + (f", {row['selected']} each" if row["selected"] else "")


def checked(record: dict) -> str:
    """The model beside what was measured."""
    net, ranks, lines, ratios = network(record), record["ranks"], [], []
    for row in record["shapes"]:
        exact = row["kernel"] == "exact"
        for way in WAYS:
            measured = row["ways"][way]
            model = times(way, exact, work_of(row, ranks), row["n_q"], row["cells"], row["selected"], ranks, net)
            ratios.append((model, measured["ms"] / model))
            same = "the same" if measured["same_bytes"] else f"within {measured['difference']:.1e}"
            speed = row["one_device_ms"] / measured["ms"]
            received = moved(way, exact, row["n_q"], row["cells"], ranks) / 2**20
            numbers = [f"{row['one_device_ms']:.2f}", f"{measured['ms']:.2f}", f"{speed:.2f}", f"{model:.2f}", f"{received:.1f}"]
            lines.append([row["kernel"], shape_text(row), way, *numbers, same])
    headings = [
        "kernel",
        "queries / cells",
        "way",
        "one device, ms",
        f"{ranks} ranks, ms",
        "times faster",
        "model, ms",
        "MiB received",
        "bytes",
    ]
    long = [ratio for model, ratio in ratios if model >= 10]
    over = [model * (ratio - 1) for model, ratio in ratios]
    text = (
        f"Measured over model: {min(long):.2f} to {max(long):.2f} where the model says 10 ms or more. It leaves out the host's work: "
        "Python, plans, launches, the check before each block of a merged result. That counts in short calls: measured less model is "
        f"{statistics.median(over):.1f} ms in the median, {max(over):.1f} ms at most."
    )
    return f"{report.table(headings, lines, set(headings[3:8]))}\n\n{text}"


def collectives(record: dict) -> str:
    net = network(record)
    lines = [[name, f"{net.latency[name]:.3f}", f"{net.bandwidth[name] / 1e6:.0f}"] for name in sorted(net.latency)]
    lines.append(["the check before a call", f"{net.agree:.3f}", ""])
    headings = ["collective", "least time, ms", "GB/s of bytes moved by a rank"]
    return report.table(headings, lines, set(headings[1:]))


def dense_work(record: dict, kernel: str, n_q: int, cells: int, selected: int | None) -> Work:
    """Scaled by pairs from the record's row of that kernel that is most like it: with lists or dense, and the most pairs."""
    rows = [row for row in record["shapes"] if row["kernel"] == kernel and bool(row["selected"]) == bool(selected)]
    row = max(rows, key=lambda row: pairs(row["n_q"], row["cells"], row["selected"]))
    factor = pairs(n_q, cells, selected) / pairs(row["n_q"], row["cells"], row["selected"])
    work = work_of(row, record["ranks"])
    return Work(work.one * factor, work.first * factor, work.second * factor)


def simulated(record: dict, shapes: list[tuple[int, int, int | None]], ranks: list[int], net: Network, kernel: str = "exact") -> str:
    lines = []
    for n_q, cells, selected in shapes:
        work = dense_work(record, kernel, n_q, cells, selected)
        for way in WAYS:
            row = [shape_text({"n_q": n_q, "cells": cells, "selected": selected}), way]
            for size in ranks:
                if size > n_q or (way == "heads" and size > HEADS):
                    row.append("-")
                else:
                    row.append(f"{times(way, kernel == 'exact', work, n_q, cells, selected, size, net):.1f}")
            lines.append([*row, f"{cells * CELL_BYTES / 2**20 / (ranks[-1] if way == 'context' else 1):.1f}"])
    headings = ["queries / cells", "way", *(f"{size} ranks" for size in ranks), f"MiB of cache a rank, {ranks[-1]} ranks"]
    return report.table(headings, lines, set(headings[2:]))


SHAPES = [(131072, 131072, None), (4096, 1048576, None), (4096, 1048576, 2048)]
RANKS = [1, 8, 64, 512, 4096]


def plot(record: dict, net: Network, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "strata_pa"
    from matplotlib import pyplot

    sizes = [2**i for i in range(13)]
    figure, axes = pyplot.subplots(1, len(SHAPES), figsize=(12, 3.6), layout="constrained")
    for axis, (n_q, cells, selected) in zip(axes, SHAPES, strict=True):
        work = dense_work(record, "exact", n_q, cells, selected)
        for way in WAYS:
            here = [size for size in sizes if size <= n_q and (way != "heads" or size <= HEADS)]
            axis.loglog(here, [times(way, True, work, n_q, cells, selected, size, net) for size in here], label=way)
        axis.set(xlabel="ranks", ylabel="ms", title=shape_text({"n_q": n_q, "cells": cells, "selected": selected}))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def newest() -> dict | None:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in report.RECORDS.glob("distributed_*.json")]
    return max(found, key=lambda record: record["date"], default=None)


def assumed(net: Network) -> str:
    return (
        f"Nodes of {net.node} ranks, whose links are taken to be those measured; between nodes {net.between / 1e6:.0f} GB/s a rank, and "
        f"{net.between_ms * 1e3:.0f} µs for each doubling of the nodes. Times in ms."
    )


def documents() -> dict[Path, dict[str, str]]:
    """The generated regions of docs/distributed.md."""
    record = newest()
    if record is None:
        return {DOCUMENT: dict.fromkeys(("collectives", "measured", "simulated"), "No record yet.")}
    about = f"{record['ranks']} ranks, {record['backend']} on {' and '.join(record['gpus'])}, {record['date'][:10]}"
    return {
        DOCUMENT: {
            "collectives": f"{about}.\n\n{collectives(record)}",
            "measured": checked(record),
            "simulated": f"{assumed(network(record))}\n\n{simulated(record, SHAPES, RANKS, network(record))}",
        }
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="default: the newest distributed_*.json in bench/records")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--simulate", help="queries/cells[/selected],...")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--kernel", default="exact")
    parser.add_argument("--node", type=int, default=8, help="ranks that the record's links join; default: 8")
    parser.add_argument("--network", type=float, default=50, help="GB/s of a rank between nodes; default: 50")
    parser.add_argument("--network-us", type=float, default=10, help="of each doubling of the nodes; default: 10")
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text()) if asked.record else newest()
    if record is None:
        parser.error("no record of bench/distributed.py: pass --record")
    net = network(record, node=asked.node, between=asked.network * 1e6, between_ms=asked.network_us / 1e3)
    ranks = list(map(int, asked.ranks.split(",")))
    if asked.simulate:
        shapes = [(*map(int, shape.split("/")), None)[:3] for shape in asked.simulate.split(",")]
        print(simulated(record, shapes, ranks, net, asked.kernel))
        return 0
    if not asked.check:
        plot(record, network(record), PLOT)
    return report.update(documents(), asked.check)


if __name__ == "__main__":
    sys.exit(main())
