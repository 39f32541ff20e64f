"""Writes the tables of docs/benchmarks.md from the records in bench/records/.

    python bench/report.py            rewrites the generated regions
    python bench/report.py --check    exit status 1 if they are out of date

Standard library only. A region lies between `<!-- generated: name -->` and `<!-- end of name -->`; ci/make_docs.py uses the same.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records"
KINDS = ("cpu", "parity", "gpu")  # the records that the page is made of: <kind>_..._<date>.json
DOCUMENT = ROOT / "docs" / "benchmarks.md"

REGION = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def renewed(text: str, regions: dict[str, str]) -> str:
    """`text` with the contents of its regions replaced.

    Raises:
        KeyError: the text has a region that is not among `regions`, or not one that is.
    """
    names = {match["name"] for match in REGION.finditer(text)}
    if names != set(regions):
        raise KeyError(f"regions of the text: {sorted(names)}, generated: {sorted(regions)}")
    return REGION.sub(lambda match: f"{match[1]}\n{regions[match['name']].strip()}\n\n{match[3]}", text)


def update(documents: dict[Path, dict[str, str]], check: bool) -> int:
    """Rewrites the regions of each document, or says which are out of date."""
    stale = []
    for path, regions in documents.items():
        old = path.read_text(encoding="utf-8")
        new = renewed(old, regions)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'rewritten'}")
    return 1 if check and stale else 0


def table(headings: list[str], rows: list[list[str]], numbers: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """A Markdown table; the columns in `numbers` are aligned right."""
    rules = ["---:" if heading in numbers else "---" for heading in headings]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rules, *rows])


def records(kind: str) -> list[tuple[Path, dict]]:
    """The newest record of this kind for each machine, newest first."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in RECORDS.glob(f"{kind}_*.json")]
    newest: dict[tuple, tuple[Path, dict]] = {}
    for path, record in sorted(found, key=lambda entry: entry[1]["date"]):
        machine = record["machine"]
        newest[machine["cpu"], machine["cores"], tuple(machine["devices"])] = (path, record)
    return sorted(newest.values(), key=lambda entry: entry[1]["date"], reverse=True)


def source(path: Path, record: dict) -> str:
    machine, versions = record["machine"], record["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']} path; {used}; {record['date'][:10]}.\n"
        f"Record: [{path.name}](../bench/records/{path.name}), written by `{record['command']}`."
    )


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def error(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.1e}".replace("e-0", "e-")


def cpu_region() -> str:
    parts = []
    for path, record in records("cpu"):
        parts.append(source(path, record))
        for case in dict.fromkeys(r["case"] for r in record["results"]):
            rows = [r for r in record["results"] if r["case"] == case]
            least = {b["kernel"]: b for b in record["bounds"] if b["case"] == case}
            against = next(iter(least.values()))["against"]
            lines = []
            for r in rows:
                goal = f"at least {least[r['kernel']]['least']:.2f}" if r["kernel"] in least else ""
                name = f"`{r['kernel']}`" if r["ours"] else r["kernel"]
                ratios = [f"{ratio:.2f}" for ratio in r["speedup"].values()]
                spread = f"{number(r['min_ms'])} - {number(r['max_ms'])}"
                values = [number(r["median_ms"]), spread, number(r["gflops"]), error(r["max_rel_err"]), f"`{r['sha256'][:8]}`"]
                lines.append([name, *values, *ratios, goal])
            peers = [f"times as fast as {peer}" for peer in rows[0]["speedup"]]
            headings = ["kernel", "median ms", "least - most", "GFLOP/s", "error", "sha256", *peers, "asked for"]
            yard = next(y for y in record["yardsticks"] if y["case"] == case)
            parts.append(
                f"**{case}**, {rows[0]['threads']} threads, medians of {rows[0]['reps']} alternating calls; "
                f"beside them {yard['what']}: {number(yard['gflops'])} GFLOP/s. What is asked for is asked against {against}."
            )
            parts.append(table(headings, lines, {*headings[1:5], *peers}))
    return "\n\n".join(parts) or "No record yet."


def parity_table(results: list[dict]) -> str:
    headings = ["problem", "device", "kernel", "error", "bound", "median ms", "GFLOP/s", "sha256"]
    rows = [
        [
            r["case"],
            r["device"],
            f"`{r['kernel']}`",
            error(r["max_rel_err"]),
            error(r["bound"]),
            number(r["median_ms"]),
            number(r["gflops"]),
            f"`{r['sha256'][:8]}`",
        ]
        for r in results
    ]
    return table(headings, rows, {"error", "bound", "median ms", "GFLOP/s"})


def parity_region() -> str:
    parts = []
    for path, record in records("parity"):
        parts += [source(path, record), parity_table(record["results"])]
    return "\n\n".join(parts) or "No record yet."


def gpu_region() -> str:
    """The newest record of `ci/gpu` for each card: what was checked, and parity."""
    newest: dict[str, tuple[Path, dict]] = {}
    for path in RECORDS.glob("gpu_*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        card = record["card"]["name"]
        if card not in newest or newest[card][1]["date"] < record["date"]:
            newest[card] = (path, record)
    parts = []
    for card, (path, record) in sorted(newest.items()):
        steps = record["steps"]
        build, counts = steps["build"]["build"], {name: some for name, some in steps["test"].items() if isinstance(some, dict)}
        tests = "; ".join(f"{name}: {', '.join(f'{n} {word}' for word, n in some.items())}" for name, some in counts.items())
        parts.append(
            f"{card}, driver {record['card']['driver_version']}; strata_pa {build['version']}, nvcc {build['nvcc']}, "
            f"built for {', '.join(build['cuda_archs'])}; {record['date'][:10]}.\n"
            f"Record: [{path.name}](../bench/records/{path.name}), written by `ci/gpu`. `pytest -m gpu`: {tests}. compute-sanitizer: "
            f"{'; '.join(str(steps['sanitize'][tool]) for tool in ('memcheck', 'racecheck'))}."
        )
        parts.append(parity_table(steps["parity"]["results"]))
    return "\n\n".join(parts) or "No record yet."


def documents() -> dict[Path, dict[str, str]]:
    return {DOCUMENT: {"cpu": cpu_region(), "gpu": gpu_region(), "parity": parity_region()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="rewrite nothing; exit status 1 if a region is out of date")
    return update(documents(), parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
