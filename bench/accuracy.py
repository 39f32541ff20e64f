"""The tables and the figure of docs/accuracy.md, from the newest record of bench/end_to_end.py for each device.

python bench/accuracy.py        draws docs/accuracy.svg (pip install '.[plot]'); ci/make_docs.py writes the tables
"""

import hashlib
import json
import sys
from pathlib import Path

import report

DOCUMENT = report.ROOT / "docs" / "accuracy.md"
FIGURE = report.ROOT / "docs" / "accuracy.svg"
MODES = {"fixed": "Fixed cache", "own": "Own cache"}


def records() -> list[tuple[Path, dict]]:
    """The newest for each device and choice of prompts, CPU and short prompts first."""
    newest: dict[tuple, tuple[Path, dict]] = {}
    for path in sorted(report.RECORDS.glob("e2e_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        key = record["machine"]["card"] or "", *sorted({r["prompt"] for r in record["results"]})
        if key not in newest or newest[key][1]["date"] <= record["date"]:
            newest[key] = (path, record)
    return [newest[key] for key in sorted(newest)]


def where(record: dict) -> str:
    return record["machine"]["card"] or record["machine"]["cpu"]


def source(path: Path, record: dict) -> str:
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    link = f"[{path.name}](../bench/records/{path.name})"
    return f"{where(record)}; {used}; {record['date'][:10]}. Record: {link}, written by `{record['command']}`."


def default_sentence(record: dict) -> str:
    default = record["default"]
    said = []
    if default["same_again"] is not None:
        kernels = sorted({run["kernel"] for run in default["runs"]})
        same = "the same" if default["same_again"] else "OTHER"
        said.append(f"With nothing switched on `{', '.join(kernels)}` runs, and two runs gave {same} bytes.")
    if "same_in_other_build" in default:
        same = "the same" if default["same_in_other_build"] else "OTHER"
        said.append(f"A build without `imma` and `exact` gave {same} bytes.")
    refused = "; ".join(f"`{name}`: {reason}" for name, reason in record["refused"].items())
    return " ".join([*said, f"Refused: {refused}."])


def mode_table(record: dict, mode: str) -> str:
    rows = [
        [
            str(r["prompt"]),
            f"`{r['run']}`" if not r["run"].startswith("sdpa") else r["run"],
            report.error(r["kl_first"]),
            report.error(r["kl_most"]),
            f"{r['tokens_equal']} of {record['steps']}",
            f"{r['least_margin']:.3f}",
        ]
        for r in record["results"]
        if r["mode"] == mode and r["run"] != "fp32"
    ]
    headings = ["prompt", "run", "KL, first token", "KL, greatest", "tokens", "least margin"]
    return report.table(headings, rows, {*headings} - {"run"})


def tables() -> str:
    parts = []
    for path, record in records():
        parts += [f"### {where(record)}", source(path, record), default_sentence(record)]
        for mode, title in MODES.items():
            if mode not in {r["mode"] for r in record["results"]}:
                continue
            parts += [f"**{title}**", mode_table(record, mode)]
    return "\n\n".join(parts) or "No record yet."


def documents() -> dict[Path, dict[str, str]]:
    return {DOCUMENT: {"end-to-end": tables()}}


def data() -> list[dict]:
    """What the figure shows."""
    return [
        {"where": where(record), **{key: r[key] for key in ("prompt", "mode", "run", "kl_first", "kl_most")}}
        for _, record in records()
        for r in record["results"]
        if r["run"] != "fp32"
    ]


def mark() -> str:
    """Stands in the figure, so that a test sees whether it is that of the records."""
    return "records " + hashlib.sha256(json.dumps(data(), sort_keys=True).encode()).hexdigest()


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "strata_pa", "font.size": 9})
    from matplotlib import pyplot

    points = data()
    places = list(dict.fromkeys(p["where"] for p in points))
    runs = list(dict.fromkeys(p["run"] for p in points))
    figure, axes = pyplot.subplots(len(places), 2, figsize=(10, 3.4 * len(places)), sharey=True, squeeze=False, layout="constrained")
    for row, place in zip(axes, places, strict=True):
        for axis, (mode, title) in zip(row, MODES.items(), strict=True):
            mine = [p for p in points if p["where"] == place and p["mode"] == mode]
            prompts = sorted({p["prompt"] for p in mine})
            for i, run in enumerate(runs):
                chosen = [p for p in mine if p["run"] == run]
                x = [prompts.index(p["prompt"]) + 0.09 * (i - (len(runs) - 1) / 2) for p in chosen]
                axis.plot(x, [max(p["kl_first"], 1e-15) for p in chosen], "osD^vP*X"[i % 8], color=f"C{i}", label=run, markersize=5)
            axis.axhline(1e-10, color="gray", linewidth=0.8, linestyle=":")
            axis.set_yscale("log")
            axis.set_xticks(range(len(prompts)), [f"{p} tokens" for p in prompts])
            axis.set_title(f"{title}: {place}", fontsize=9)
            axis.grid(axis="y", linewidth=0.3)
        row[0].set_ylabel("KL of the first token to fp32, nats")
    axes[0][1].legend(loc="lower right", fontsize=8, ncols=2)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": mark()})


if __name__ == "__main__":
    draw(FIGURE)
    sys.exit(0)
