"""Writes the tables and plots of docs/benchmarks.md from the records in bench/records/.

    python bench/report.py            rewrites the generated regions and docs/plots/ (needs the package and matplotlib)
    python bench/report.py --check    exit status 1 if they are out of date (standard library only)

A region lies between `<!-- generated: name -->` and `<!-- end of name -->`; ci/make_docs.py uses the same. A plot carries a digest of the
numbers that it shows, which --check compares: matplotlib's own bytes change from version to version.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records"
PLOTS = ROOT / "docs" / "plots"
KINDS = ("bench", "parity", "gpu")  # the records that the page is made of: <kind>_..._<date>.json
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
    """The newest record of this kind for each machine, newest first; one of `ci/gpu` may have a bench in it."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in RECORDS.glob(f"{kind}_*.json")]
    if kind == "bench":
        found += [
            (path, record) for path in RECORDS.glob("gpu_*.json") if "results" in bench_parts(record := json.loads(path.read_text()))[0]
        ]
    newest: dict[tuple, tuple[Path, dict]] = {}
    for path, record in sorted(found, key=lambda entry: entry[1]["date"]):
        machine = bench_parts(record)[0]["machine"]
        newest[machine["cpu"], machine["cores"], devices_of(record)] = (path, record)
    return sorted(newest.values(), key=lambda entry: entry[1]["date"], reverse=True)


def devices_of(record: dict) -> tuple[str, ...]:
    """Those that were measured."""
    return tuple(sorted({r["device"] for r in bench_parts(record)[0]["results"]}))


def source(path: Path, record: dict) -> str:
    machine, versions = record["machine"], record["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    scheduled = ", at real-time priority before other work of the machine" if machine.get("scheduling") == "real-time" else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']} path{scheduled}; {used}; {record['date'][:10]}.\n"
        f"Record: [{path.name}](../bench/records/{path.name}), written by `{record['command']}`."
    )


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def error(x: float | None) -> str:
    return "NaN" if x is None else f"{x:.1e}".replace("e-0", "e-")


def bench_parts(record: dict) -> tuple[dict, dict]:
    """The record of `strata-pa bench`, and what else its run checked: `ci/gpu` has both in its steps."""
    steps = record.get("steps")
    return (record, {}) if steps is None else (steps.get("bench", {}), steps)


GROWING = {"context": "context", "width": "widest", "queries": "queries"}  # a growing set of `bench` and what grows


def milliseconds(times: dict | None) -> str:
    return number(times["median_ms"]) if times else ""


def bench_table(results: list[dict]) -> str:
    headings = ["problem", "kernel", "error", "median ms", "quartiles", "L2 cold", "one call", "GFLOP/s", "sha256"]
    rows = [
        [
            r["case"],
            r["kernel"] if r["peer"] else f"`{r['kernel']}`",
            error(r["max_rel_err"]),
            number(r["median_ms"]),
            f"{number(r['times']['q1_ms'])} - {number(r['times']['q3_ms'])}",
            milliseconds(r["cold"]),
            milliseconds(r["eager"]),
            number(r["gflops"]),
            f"`{r['sha256'][:8]}`" if r["sha256"] else "",
        ]
        for r in results
    ]
    return table(headings, rows, set(headings[2:-1]))


def growth_table(results: list[dict], name: str) -> str:
    """Microseconds per query: a row for each size, a column for each kernel and peer."""
    kernels = {r["kernel"]: r["kernel"] if r["peer"] else f"`{r['kernel']}`" for r in results}
    found = {(r[GROWING[name]], r["kernel"]): r["us_per_query"] for r in results}
    sizes = sorted({size for size, _ in found})
    rows = [[str(size), *(number(found[size, k]) if (size, k) in found else "" for k in kernels)] for size in sizes]
    return table(
        [{"context": "cells", "width": "selected cells", "queries": "queries"}[name], *kernels.values()], rows, set(kernels.values())
    )


GROWTH_TITLES = {
    "context": "Time per query (\N{MICRO SIGN}s), 256 queries, dense causal",
    "width": "Time per query (\N{MICRO SIGN}s), 256 queries that select from 32768 cells",
    "queries": "Time per query (\N{MICRO SIGN}s), 2051 cells selected of 32768",
}


def bench_region() -> str:
    parts = []
    for path, whole in records("bench"):
        record, steps = bench_parts(whole)
        results = record["results"]
        parts.append(source(path, record))
        for device, states in record["cards"].items():
            card = states["before"] or {}
            clocks = ", ".join(f"{state['clocks.sm']} {when}" for when, state in states.items() if state)
            parts.append(f"{device}: {card.get('name')}, driver {card.get('driver_version')}; clock of the processors: {clocks}.")
        if tests := steps.get("golden") or steps.get("test"):
            counts = "; ".join(", ".join(f"{n} {word}" for word, n in some.items()) for some in tests.values() if isinstance(some, dict))
            which = "tests" if "golden" in steps else "GPU tests, among them those"
            parts.append(f"In the same run, {which} of the checked-in digests: {counts or 'failed'}.")
        single = [r for r in results if r["set"] not in GROWING]
        parts.append(bench_table(single))
        parts.append(f"![error against time](plots/{path.stem}_error.svg)")
        for name in GROWING:
            if some := [r for r in results if r["set"] == name]:
                parts += [f"**{GROWTH_TITLES[name]}**", growth_table(some, name), f"![{name}](plots/{path.stem}_{name}.svg)"]
        refused = sorted({(r["case"], r["kernel"], r["reason"]) for r in record["refused"]})
        if refused:
            parts.append("Not measured:\n\n" + "\n".join(f"- {case}, {kernel}: {reason}" for case, kernel, reason in refused))
    return "\n\n".join(parts) or "No record yet."


# What `exact` and `fp32` shall reach on an H200: milliseconds at most, and the aim beyond.
MOST_MS = {
    ("32768/2048 selected", "exact"): (0.85, 0.65),
    ("2100/256 selected", "exact"): (0.11, 0.08),
    ("1500/1500 dense", "exact"): (0.26, 0.18),
    ("32768/2048 selected apart", "exact"): (1.64, None),
    ("32768/2048 selected", "fp32"): (4.53, None),  # a third of the published FP32 kernel
    ("2100/256 selected", "fp32"): (0.55, None),
    ("1500/1500 dense", "fp32"): (1.73, None),
}
# Times the time of FP16 cuDNN at most, times as fast as FP32 memory-efficient attention at least; and the aims beyond.
RATIO_CASES = ("32768/8192 dense", "8192/8192 dense 9/3/64", "8192/8192 dense 32/8/128")
MOST_OF_CUDNN, LEAST_OF_FP32 = (4.5, 3.0), (4.0, 6.0)
FEW_QUERIES = 3.0  # times the time per query of a large batch, from 1 to 32 queries


def aims_region() -> str:
    """The newest record of a GPU against the aims."""
    found = [bench_parts(whole)[0] for _, whole in records("bench")]
    results = next((record["results"] for record in found if record["cards"]), [])
    ms = {(r["case"], r["kernel"]): r["median_ms"] for r in results}
    rows = []

    def row(what: str, asked: float, beyond: float | None, seen: float, most: bool) -> None:
        def reached(bound: float) -> bool:
            return seen <= bound if most else seen >= bound

        verdict = "missed" if not reached(asked) else "beyond" if beyond and reached(beyond) else "reached"
        word = "at most" if most else "at least"
        rows.append([what, f"{word} {number(asked)}", "" if beyond is None else number(beyond), number(seen), verdict])

    for (case, kernel), (asked, beyond) in MOST_MS.items():
        if (case, kernel) in ms:
            row(f"`{kernel}`, {case}, ms", asked, beyond, ms[case, kernel], True)
    for case in RATIO_CASES:
        if {(case, name) for name in ("exact", "FP16 cuDNN", "FP32 memory-efficient")} <= set(ms):
            exact = ms[case, "exact"]
            row(f"`exact`, {case}, over the time of FP16 cuDNN", *MOST_OF_CUDNN, exact / ms[case, "FP16 cuDNN"], True)
            row(
                f"FP32 memory-efficient, {case}, over the time of `exact`", *LEAST_OF_FP32, ms[case, "FP32 memory-efficient"] / exact, False
            )
    per_query = {r["queries"]: r["us_per_query"] for r in results if r["set"] == "queries" and r["kernel"] == "exact"}
    few = [us for n, us in per_query.items() if n <= 32]
    if few and 2048 in per_query:
        row("`exact`, time per query of 1 to 32 queries over that of 2048, the worst", FEW_QUERIES, None, max(few) / per_query[2048], True)
    headings = ["aim", "asked", "beyond", "seen", ""]
    return table(headings, rows, {"seen"}) if rows else "No record yet."


def peak_region() -> str:
    headings = ["machine", "path", "threads", "peak GOP/s", "`exact` GOP/s", "of the peak", "at its best"]
    rows = []
    for _, whole in records("bench"):
        record, _ = bench_parts(whole)
        rows += [
            [
                record["machine"]["cpu"],
                p["isa"],
                str(p["threads"]),
                number(p["peak_gops"]),
                number(p["exact_gops"]),
                f"{p['share']:.0%}",
                f"{p['best_share']:.0%}",
            ]
            for p in record["peak"]
        ]
    return table(headings, rows, set(headings[2:])) if rows else "No record yet."


def plots() -> dict[Path, tuple[str, list[dict]]]:
    """Every picture: its panel and what it shows."""
    found = {}
    for path, whole in records("bench"):
        results = bench_parts(whole)[0]["results"]
        for panel in ("error", *GROWING):
            if some := [r for r in results if (r["set"] if r["set"] in GROWING else "error") == panel]:
                found[PLOTS / f"{path.stem}_{panel}.svg"] = (panel, some)
    return found


def shown_digest(panel: str, results: list[dict]) -> str:
    """Of the numbers in a picture."""
    keys = ("case", "kernel", "max_rel_err", "bound", "median_ms", "us_per_query", "context", "widest", "queries")
    return hashlib.sha256(json.dumps([panel, [[r[key] for key in keys] for r in results]]).encode()).hexdigest()


def update_plots(check: bool) -> int:
    """Draws the pictures whose numbers have changed and deletes those without a record, or says which."""
    wanted = plots()
    stale = [
        path
        for path, (panel, results) in wanted.items()
        if not path.exists() or f"numbers: {shown_digest(panel, results)}" not in path.read_text(encoding="utf-8")
    ]
    extra = [path for path in PLOTS.glob("*.svg") if path not in wanted]
    if stale and not check:
        from strata_pa import _show

        PLOTS.mkdir(exist_ok=True)
        _show.load_matplotlib()
        for path in stale:
            panel, results = wanted[path]
            shown = [SimpleNamespace(**(r | {"max_rel_err": r["max_rel_err"] or float("nan")})) for r in results]
            note = {"Description": f"numbers: {shown_digest(panel, results)}", "Date": None}
            _show.plot(shown, path, path.stem, [panel], format="svg", metadata=note)
    for path in extra:
        if not check:
            path.unlink()
    for path in stale + extra:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'rewritten'}")
    return 1 if check and stale + extra else 0


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
        build, counts = steps["build"]["build"], []
        for step in ("test", "hostile", "identity"):
            counts += [(f"{step}, {name}", some) for name, some in steps.get(step, {}).items() if isinstance(some, dict)]
        tests = "; ".join(f"{name}: {', '.join(f'{n} {word}' for word, n in some.items())}" for name, some in counts)
        sanitize = steps.get("sanitize", {"skipped": "not run"})
        sanitized = [str(sanitize[tool]) for tool in ("memcheck", "racecheck", "skipped") if tool in sanitize]
        if "memcheck" in steps.get("memcheck", {}):
            sanitized.append(f"{steps['memcheck']['memcheck']} over the hostile problems")
        failed = [name for name, step in steps.items() if not step["ok"]]
        parts.append(
            f"{card}, driver {record['card']['driver_version']}; strata_pa {build['version']}, nvcc {build['nvcc']}, "
            f"built for {', '.join(build['cuda_archs'])}; {record['date'][:10]}.\n"
            f"Record: [{path.name}](../bench/records/{path.name}), written by `ci/gpu`. "
            f"`pytest -m gpu`: {tests or 'no counts'}. compute-sanitizer: {'; '.join(sanitized) or 'no summary'}. "
            f"Steps that failed: {', '.join(failed) or 'none'}."
        )
        if "results" in steps.get("parity", {}):
            parts.append(parity_table(steps["parity"]["results"]))
    return "\n\n".join(parts) or "No record yet."


def documents() -> dict[Path, dict[str, str]]:
    return {
        DOCUMENT: {"bench": bench_region(), "aims": aims_region(), "peak": peak_region(), "gpu": gpu_region(), "parity": parity_region()}
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="rewrite nothing; exit status 1 if a region is out of date")
    check = parser.parse_args().check
    return update(documents(), check) | update_plots(check)


if __name__ == "__main__":
    sys.exit(main())
