"""Progress, tables and plots: rich in a terminal, plain text elsewhere."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._parity import Refused, Result

MARKERS = "osD^vP*X"


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


HEADINGS = ("problem", "kernel", "rel. error", "bound", "ms", "GFLOP/s", "sha256")
NUMBERS = (2, 4, 5)  # the columns to align right


def _cells(r: Result) -> tuple[str, ...]:
    bound = f"<= {r.bound:.0e}" if r.ok else f"NOT <= {r.bound:.0e}"
    return r.case, r.kernel, f"{r.max_rel_err:.2e}", bound, f"{r.median_ms:.3f}", f"{r.gflops:.1f}", r.sha256[:8]


def table(results: Sequence[Result], refused: Sequence[Refused], title: str) -> None:
    """Prints the results."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, heading in enumerate(HEADINGS):
            shown.add_column(heading, justify="right" if i in NUMBERS else "left", no_wrap=True)
        for r in results:
            shown.add_row(*_cells(r), style=None if r.ok else "bold red")
        Console().print(shown)
    else:
        rows = [HEADINGS, *map(_cells, results)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        print(title)
        for row in rows:
            cells = (row[i].rjust(w) if i in NUMBERS else row[i].ljust(w) for i, w in enumerate(widths))
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


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Error against time: a colour for each kernel, a marker for each problem, a dashed line at each bound."""
    pyplot, lines, ticker = load_matplotlib()
    kernels = list(dict.fromkeys(r.kernel for r in results))
    cases = list(dict.fromkeys(r.case for r in results))
    colors = {kernel: f"C{i}" for i, kernel in enumerate(kernels)}
    markers = {case: MARKERS[i % len(MARKERS)] for i, case in enumerate(cases)}
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for r in results:
        axes.plot(r.median_ms, r.max_rel_err, markers[r.case], color=colors[r.kernel], markersize=9, markeredgecolor="black")
    for bound in {r.bound for r in results}:
        axes.axhline(bound, color="gray", linestyle="--", linewidth=1)
        axes.annotate(f"bound {bound:.0e}", (0.01, bound), xycoords=("axes fraction", "data"), va="bottom", color="gray", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="time per call, median (ms)", ylabel="max |out - float64| / max |float64|", title=title)
    seen = [r.max_rel_err for r in results if r.max_rel_err > 0]  # NaN is not
    axes.set_ylim(min([*seen, 1e-7]) / 2, max([*seen, *(r.bound for r in results)]) * 1.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:.0e}")
    axes.yaxis.set_minor_formatter("{x:.0e}")
    for axis in (axes.xaxis, axes.yaxis):  # a label on every 1, 2 and 5
        axis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    axes.grid(visible=True, which="both", alpha=0.25)
    legend = [lines.Line2D([], [], color=colors[kernel], linewidth=6, label=kernel) for kernel in kernels]
    legend += [lines.Line2D([], [], color="black", marker=markers[case], linestyle="", markersize=8, label=case) for case in cases]
    axes.legend(handles=legend, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
