"""Progress, tables and plots: rich in a terminal, plain text elsewhere."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._parity import Refused

MARKERS = "osD^vP*X"
COLORS = ("black", "gold", "navy", "lime", "salmon", "teal", "tan", "indigo")  # after matplotlib's ten


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, if that is a terminal; the function it gives counts one step and says what runs."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def _bound(r: Any) -> str:
    return "" if r.bound is None else f"<= {r.bound:.0e}" if r.ok else f"NOT <= {r.bound:.0e}"


def _ms(times: Any) -> str:
    return "" if times is None else f"{times.median_ms:.3f}"


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Any], str]  # of a result
    number: bool = False  # aligned right


PROBLEM, KERNEL = Column("problem", lambda r: r.case), Column("kernel", lambda r: r.kernel)
ERROR, BOUND = Column("rel. error", lambda r: f"{r.max_rel_err:.2e}", True), Column("bound", _bound)
GFLOPS = Column("GFLOP/s", lambda r: f"{r.gflops:.1f}", True)
DIGEST = Column("sha256", lambda r: (r.sha256 or "")[:8])
MS = Column("ms", lambda r: f"{r.median_ms:.3f}", True)
QUARTILES = Column("quartiles", lambda r: f"{r.times.q1_ms:.3f} - {r.times.q3_ms:.3f}", True)
COLD, EAGER = Column("L2 cold", lambda r: _ms(r.cold), True), Column("one call", lambda r: _ms(r.eager), True)
PARITY = (PROBLEM, KERNEL, ERROR, BOUND, MS, GFLOPS, DIGEST)
BENCH = (PROBLEM, KERNEL, ERROR, BOUND, MS, QUARTILES, COLD, EAGER, GFLOPS, DIGEST)


def table(results: Sequence[Any], refused: Sequence[Refused], title: str, columns: Sequence[Column]) -> None:
    """Prints the results; a column without entries is left out."""
    columns = [column for column in columns if any(column.cell(r) for r in results)] or columns
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            shown.add_column(column.heading, justify="right" if column.number else "left", no_wrap=True)
        for r in results:
            shown.add_row(*(column.cell(r) for column in columns), style=None if r.ok else "bold red")
        Console().print(shown)
    else:
        rows = [[column.heading for column in columns], *([column.cell(r) for column in columns] for r in results)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        print(title)
        for row in rows:
            cells = (row[i].rjust(w) if columns[i].number else row[i].ljust(w) for i, w in enumerate(widths))
            print("  ".join(cells).rstrip())
    for no in refused:
        print(f"{no.case}: {no.kernel} refused: {no.reason}")


def load_matplotlib() -> tuple[Any, Any, Any]:
    """matplotlib's modules pyplot, lines and ticker, with a backend that draws to files. By name: type checkers need not have it.

    Raises:
        ImportError: it is not installed.
    """
    importlib.import_module("matplotlib").use("Agg")
    pyplot, lines, ticker = (importlib.import_module(f"matplotlib.{name}") for name in ("pyplot", "lines", "ticker"))
    return pyplot, lines, ticker


GROWING = {"context": "context (cells)", "width": "cells of a query", "queries": "queries in a call"}  # sets of `bench` and their axis


def panels(results: Sequence[Any]) -> list[str]:
    """The pictures that the results make: "error", and a growing set each."""
    sets = {getattr(r, "set", "") for r in results}
    return [*(["error"] if sets - set(GROWING) else []), *(name for name in GROWING if name in sets)]


def plot(results: Sequence[Any], path: Path, title: str, wanted: Sequence[str] | None = None, **options: Any) -> None:
    """Draws these of the panels, by default all; `options` go to matplotlib's savefig."""
    pyplot, lines, ticker = load_matplotlib()
    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text
    names = panels(results) if wanted is None else wanted
    figure, axes = pyplot.subplots(len(names), 1, figsize=(8, 5 * len(names)), layout="constrained", squeeze=False)
    for name, one in zip(names, axes[:, 0], strict=True):
        if name == "error":
            _draw_errors([r for r in results if getattr(r, "set", "") not in GROWING], one, lines)
        else:
            _draw_growth([r for r in results if r.set == name], one, name)
        for axis in (one.xaxis, one.yaxis):  # a label on every 1, 2 and 5
            axis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
        one.grid(visible=True, which="both", alpha=0.25)
    axes[0, 0].set_title(title, fontsize=10)
    figure.savefig(path, **({"dpi": 120} | options))
    pyplot.close(figure)


def _draw_errors(results: Sequence[Any], axes: Any, lines: Any) -> None:
    """Error against time: a colour for each kernel, a marker for each problem, a dashed line at each bound."""
    kernels = list(dict.fromkeys(r.kernel for r in results))
    cases = list(dict.fromkeys(r.case for r in results))
    colors = {kernel: f"C{i}" if i < 10 else COLORS[i % len(COLORS)] for i, kernel in enumerate(kernels)}
    markers = {case: MARKERS[i % len(MARKERS)] for i, case in enumerate(cases)}
    for r in results:
        axes.plot(r.median_ms, r.max_rel_err, markers[r.case], color=colors[r.kernel], markersize=9, markeredgecolor="black")
    bounds = {r.bound for r in results if r.bound is not None}
    for bound in bounds:
        axes.axhline(bound, color="gray", linestyle="--", linewidth=1)
        axes.annotate(f"bound {bound:.0e}", (0.01, bound), xycoords=("axes fraction", "data"), va="bottom", color="gray", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="time per call, median (ms)", ylabel="max |out - float64| / max |float64|")
    seen = [r.max_rel_err for r in results if r.max_rel_err > 0]  # NaN is not
    axes.set_ylim(min([*seen, 1e-7]) / 2, max([*seen, *bounds]) * 1.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:.0e}")
    axes.yaxis.set_minor_formatter("{x:.0e}" if max(seen, default=1) < 50 * min(seen, default=1) else "")
    legend = [lines.Line2D([], [], color=colors[kernel], linewidth=6, label=kernel) for kernel in kernels]
    legend += [lines.Line2D([], [], color="black", marker=markers[case], linestyle="", markersize=8, label=case) for case in cases]
    axes.legend(handles=legend, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def _draw_growth(results: Sequence[Any], axes: Any, name: str) -> None:
    """Time per query against the number that grows, a line for each kernel and peer."""
    for i, kernel in enumerate(dict.fromkeys(r.kernel for r in results)):
        points = [
            ({"context": r.context, "width": r.widest, "queries": r.queries}[name], r.us_per_query) for r in results if r.kernel == kernel
        ]
        axes.plot(*zip(*sorted(points), strict=True), "o-", color=f"C{i}", label=kernel, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel=GROWING[name], ylabel="time per query, median (\N{MICRO SIGN}s)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(fontsize=9)
