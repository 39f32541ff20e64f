"""The command `strata-pa`, also `python -m strata_pa`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from . import _inspect, paths

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 (a check failed or a bound is broken) or 2 (it could not be run as asked)."""
    asked = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = asked.run
    try:
        return run(asked)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()  # or the interpreter complains about stdout at its exit
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


class _PrintPath(argparse.Action):
    """An option that prints a path and ends the command."""

    def __init__(self, *arguments: Any, function: Callable[[], Path], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._function = function

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        print(self._function())
        parser.exit()


_FOLDERS = (
    ("--cmakedir", paths.get_cmake_dir, "the folder of strata_paConfig.cmake"),
    ("--includedir", paths.get_include, "the folder of strata_pa.h"),
    ("--pkgconfigdir", paths.get_pkgconfig_dir, "the folder of strata_pa.pc"),
    ("--library", paths.get_library, "the shared library"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="strata-pa", description="Exact prompt attention over a paged int8 KV cache.")
    for option, function, what in _FOLDERS:
        parser.add_argument(option, action=_PrintPath, nargs=0, function=function, help=f"print {what}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")

    info = commands.add_parser("info", help="devices, kernels and why each other one is refused, build, environment")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_run_info)

    doctor = commands.add_parser("doctor", help="check the installation; exit status 1 if a check fails")
    doctor.set_defaults(run=_run_doctor)

    parity = commands.add_parser(
        "parity",
        help="each kernel's error against float64, and its time; exit status 1 if a bound is broken",
        description="Runs every kernel of the device and prints max|out - float64| / max|float64| and the time of a call.\n"
        "Without --context and --data: 8192/64 and 2100/64 selected cells and 600/600 dense on a CPU;\n"
        "32768/2048 and 2100/256 selected and 1500/1500 dense on a GPU.",
        epilog=_DATA_FORMAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parity.add_argument("--context", type=_positive, metavar="N", help="cells in the cache, instead of the default problems")
    parity.add_argument("--queries", type=_positive, metavar="N", help="the last ones of the context; default: all of it, dense causal")
    parity.add_argument("--kernels", metavar="A,B", help="only these kernels; default: all that the device has")
    parity.add_argument("--device", metavar="NAME", help="as `info` lists them, e.g. cpu; default: the first GPU, or the CPU")
    parity.add_argument("--data", metavar="FILE", help="a captured layer as below, or `sample`")
    parity.add_argument("--json", metavar="FILE", help="write a record; - for the standard output, in place of the table")
    parity.add_argument("--plot", type=Path, metavar="FILE", help="draw error against time (needs matplotlib)")
    parity.add_argument("--reps", type=_positive, default=7, metavar="N", help="timed calls of each kernel, after one warm-up; default: 7")
    parity.add_argument("--sample", type=_positive, default=32, metavar="N", help="queries to compare with float64; default: 32")
    parity.add_argument("--threads", type=_positive, metavar="N", help="CPU threads; default: as `info` says")
    parity.add_argument("--seed", type=int, default=0, metavar="N", help="of the made problems; default: 0")
    parity.set_defaults(run=_run_parity)

    bench = commands.add_parser(
        "bench",
        help="times of kernels and of PyTorch beside them over a grid of shapes, errors beside the times",
        description="Times every kernel of the device, and PyTorch's attention where that is installed, with the error against float64\n"
        "of what was timed. Exit status 1: an error is more than `parity` allows\n"
        "(on rows longer than 2051 cells: that of `exact`).",
        epilog=_SHAPES_FORMAT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("--shapes", metavar="A,B", help="as below; default: cpu on a CPU, main on a GPU")
    bench.add_argument(
        "--kernels", metavar="A,B", help="only these kernels; default: all that the device has (`context`, `width`, `queries`: two)"
    )
    bench.add_argument("--peers", default="all", metavar="PART", help="all, none, or those with PART in their name; default: all")
    bench.add_argument("--device", metavar="A,B", help="as `info` lists them, e.g. cpu,cuda:0; default: the first GPU, or the CPU")
    bench.add_argument(
        "--peak", action="store_true", help="also: how near `exact` comes to the CPU's byte dot products (VNNI), by one thread and by all"
    )
    bench.add_argument("--json", metavar="FILE", help="write a record; - for the standard output, in place of the table")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw error against time, and the growing sets (needs matplotlib)")
    bench.add_argument("--seconds", type=_positive, metavar="N", help="begin no further shape after that time; default: no limit")
    bench.add_argument("--reps", type=_positive, default=11, metavar="N", help="timed calls of each, at most; default: 11")
    bench.add_argument("--sample", type=_positive, default=32, metavar="N", help="queries to compare with float64, at most; default: 32")
    bench.add_argument("--threads", type=_positive, metavar="N", help="CPU threads; default: as `info` says")
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of the made problems; default: 0")
    bench.set_defaults(run=_run_bench)
    return parser


_SHAPES_FORMAT = """\
--shapes takes sets and single shapes:
  cpu       1500/1500 dense, 8192/256 selected: context/queries, the last ones of the context
  main      32768/2048 and 2100/256 selected, 1500/1500 dense
  long      32768/8192 dense
  geometry  8192/8192 dense with 9 query heads, 3 KV heads, head_dim 64, and with 32, 8, 128; all others have 24, 2, 256
  apart     32768/2048 selected, neighbouring queries share no cell
  context   256 queries over 512 .. 262144 cells
  width     256 queries that select 64 .. 8192 of 32768 cells
  queries   1 .. 16384 queries that select 2051 of 32768 cells
  C/Q       one problem: Q queries over C cells; dense where Q = C, otherwise 2051 cells are selected
  C/Q/W     W cells are selected; 0: dense
A peer's name says what its time has in it: "dequantize" and "gather" from the int8 cache, otherwise K and V lie ready."""


_DATA_FORMAT = """\
FILE of --data is an .npz with the arrays of one attention layer, in the order of the tokens:
  q                 float32 [n, heads, D]       the queries of the last n tokens, rotary embedding applied
  k, v              int8    [m, kv_heads, D]    codes of the m >= n tokens in the cache
  k_scale, v_scale  float16 [m, kv_heads, D/G]  value = code * scale; G dims share a scale
  ids               int32   [n, cap]            optional: the cells each query attends to, -1: none; without it, all up to its own
  sm_scale          float                       optional: softmax scale; without it, 1/sqrt(D)
Query head h reads KV head h // (heads / kv_heads); query i is token m - n + i. `--data sample` is such a file: one layer of
SmolLM2-135M-Instruct, the last 128 of 600 tokens."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _complain(message: str, status: int) -> int:
    print(f"strata-pa: error: {message}", file=sys.stderr)
    return status


def _run_info(asked: argparse.Namespace) -> int:
    facts = _inspect.facts()
    print(json.dumps(facts, indent=1) if asked.json else _inspect.info_text(facts))
    return EXIT_FAILED if facts["problems"] else EXIT_OK


def _run_doctor(asked: argparse.Namespace) -> int:
    found = _inspect.checks()
    print(_inspect.checks_text(found))
    return EXIT_FAILED if any(status == "failed" for _, status, _ in found) else EXIT_OK


def _bad_outputs(asked: argparse.Namespace) -> str:
    """What is wrong with --seed, --json and --plot; "": nothing."""
    from . import _show

    if asked.seed < 0:
        return f"--seed must not be negative, got {asked.seed}"
    for path in (asked.plot, Path(asked.json) if asked.json not in (None, "-") else None):
        if path is not None and not path.parent.is_dir():
            return f"{path}: there is no folder {path.parent}"
    if asked.plot:
        try:
            _show.load_matplotlib()
        except ImportError as error:
            return f"--plot needs matplotlib ({error}); install it with: pip install 'strata_pa[plot]'"
    return ""


def _run_parity(asked: argparse.Namespace) -> int:
    broken = _inspect.broken_imports()
    if broken:
        return _complain("; ".join(f"{name} {what}" for name, what in broken.items()), EXIT_FAILED)
    from . import _cases, _core, _parity, _record, _show

    if asked.data and (asked.context or asked.queries):
        return _complain("--data brings its own context and queries: leave out --context and --queries", EXIT_USAGE)
    if asked.queries and not asked.context:
        return _complain("--queries needs --context", EXIT_USAGE)
    if asked.context and (asked.queries or 0) > asked.context:
        return _complain(f"{asked.queries} queries do not fit in a context of {asked.context}", EXIT_USAGE)
    if complaint := _bad_outputs(asked):
        return _complain(complaint, EXIT_USAGE)
    try:
        target = _parity.choose_target(asked.device, asked.kernels.split(",") if asked.kernels else None)
        makers: list[Callable[[], _cases.Case]]
        if asked.data == "sample":
            makers = [partial(_cases.read_case, _cases.SAMPLE, "sample", asked.seed)]
        elif asked.data:
            makers = [partial(_cases.read_case, Path(asked.data), None, asked.seed)]
        else:
            shapes = _cases.CPU_SHAPES if target.backend == "cpu" else _cases.GPU_SHAPES
            if asked.context:
                shapes = ((asked.context, asked.queries or asked.context),)
            makers = [partial(_cases.make_case, _cases.shape_of(context, queries), asked.seed) for context, queries in shapes]
        results: list[_parity.Result] = []
        refused: list[_parity.Refused] = []
        with _show.progress(len(makers) * _parity.steps(len(target.kernels), asked.reps)) as step:
            for make in makers:
                found, no = _parity.measure(make(), target, reps=asked.reps, sample=asked.sample, threads=asked.threads, step=step)
                results += found
                refused += no
    except (_core.Error, _cases.DataError, MemoryError) as error:
        return _complain(str(error) or "not enough memory", EXIT_USAGE)

    record = _record.header(_record.command_line("strata-pa")) | _record.outcome(results, refused)
    threads = f", {results[0].threads} threads" if results and target.backend == "cpu" else ""
    title = f"{target.device} ({target.architecture}{threads}), {record['machine']['cpu']}, strata_pa {record['versions']['strata_pa']}"
    return _hand_out(asked, record, title, results, refused, _show.PARITY)


def _hand_out(
    asked: argparse.Namespace, record: dict[str, Any], title: str, results: Sequence[Any], refused: Sequence[Any], columns: Sequence[Any]
) -> int:
    """Prints, writes and draws what was measured; the exit status."""
    from . import _show

    text = json.dumps(record, indent=1)
    try:
        if asked.json == "-":
            print(text)
        else:
            _show.table(results, refused, title, columns)
            if asked.json:
                Path(asked.json).write_text(text + "\n", encoding="utf-8")
        if asked.plot and results:
            _show.plot(results, asked.plot, title)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a picture format that matplotlib does not know
        return _complain(f"could not be written: {error}", EXIT_USAGE)
    if not results:
        return _complain("no kernel ran", EXIT_FAILED)
    over = [f"{r.kernel} on {r.case}: {r.max_rel_err:.2e} > {r.bound:.1e}" for r in results if r.bound is not None and not r.ok]
    return _complain("the bound is broken: " + "; ".join(over), EXIT_FAILED) if over else EXIT_OK


def _shapes(text: str) -> list[tuple[str, Any]]:
    """(set, shape) of each shape of --shapes; the set of a single shape is "single".

    Raises:
        ValueError: the message says what cannot be read.
    """
    from . import _bench, _cases

    found: list[tuple[str, Any]] = []
    for part in text.split(","):
        if part in _bench.SETS:
            found += [(part, shape) for shape in _bench.SETS[part]]
            continue
        try:
            numbers = [int(number) for number in part.split("/")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or min(numbers[:2]) < 1 or numbers[-1] < 0:
            raise ValueError(
                f"--shapes: {part!r} is neither a set ({', '.join(_bench.SETS)}) nor CONTEXT/QUERIES nor CONTEXT/QUERIES/CELLS"
            )
        context, queries = numbers[:2]
        if queries > context:
            raise ValueError(f"--shapes: {queries} queries do not fit in a context of {context}")
        found.append(("single", _cases.Shape(context, queries, numbers[2]) if len(numbers) == 3 else _cases.shape_of(context, queries)))
    return found


def _run_bench(asked: argparse.Namespace) -> int:
    broken = _inspect.broken_imports()
    if broken:
        return _complain("; ".join(f"{name} {what}" for name, what in broken.items()), EXIT_FAILED)
    from . import _bench, _cases, _core, _parity, _peers, _record, _show

    if complaint := _bad_outputs(asked):
        return _complain(complaint, EXIT_USAGE)
    began = time.perf_counter()
    torch = _peers.load_torch()
    results: list[_bench.Result] = []
    refused: list[_parity.Refused] = []
    cards: dict[str, Any] = {}
    peaks: list[dict[str, Any]] = []
    try:
        names = asked.kernels.split(",") if asked.kernels else None
        targets = [_parity.choose_target(device, names) for device in (asked.device.split(",") if asked.device else [None])]
        for target in targets:
            on_cpu = target.backend == "cpu"
            shapes = _shapes(asked.shapes or ("cpu" if on_cpu else "main"))
            graphs = torch is not None and not on_cpu and torch.cuda.is_available()
            if torch is None or not (on_cpu or graphs):
                asked.peers = "none"
            clock = None if on_cpu else _bench.TorchClock(torch, target.device) if graphs else _bench.DriverClock(target.device)
            if not on_cpu:
                cards[target.device] = {"before": _bench.card(target.device)}
            work = [
                (set_name, shape, _bench.kernels_for(set_name, target, bool(names)), _bench.peers_for(set_name, shape, target, asked.peers))
                for set_name, shape in shapes
            ]
            with _show.progress(_bench.steps((len(own) + len(peers) for _, _, own, peers in work), asked.reps, on_cpu)) as step:
                for set_name, shape, own, peers in work:
                    if asked.seconds and time.perf_counter() - began > asked.seconds:
                        refused.append(_parity.Refused(shape.name, "all kernels", f"not begun: {asked.seconds} seconds were over"))
                        continue
                    found, no = _bench.measure(
                        set_name,
                        _cases.make_case(shape, asked.seed),
                        target,
                        names=own,
                        peers=peers,
                        clock=clock,
                        reps=asked.reps,
                        sample=asked.sample,
                        threads=asked.threads,
                        step=step,
                    )
                    results += found
                    refused += no
            if not on_cpu:
                cards[target.device]["after"] = _bench.card(target.device)
        if asked.peak:
            here = _parity.choose_target("cpu", None)
            all_threads = asked.threads or _record.machine()["cores"]
            peaks = _bench.peak(here.architecture, sorted({1, all_threads}), asked.reps, asked.seed)
            if not peaks:
                refused.append(_parity.Refused("peak", "exact", f"the {here.architecture} path has no instruction for byte dot products"))
    except (_core.Error, _cases.DataError, MemoryError, ValueError) as error:
        return _complain(str(error) or "not enough memory", EXIT_USAGE)

    record = _record.header(_record.command_line("strata-pa"))
    record["versions"] |= _bench.library_versions() if asked.peers != "none" or cards else {}
    record |= {"cards": cards, "peak": [row | {"times": asdict(row["times"])} for row in peaks]} | _record.outcome(results, refused)
    title = f"{', '.join(t.device for t in targets)}, {record['machine']['cpu']}, strata_pa {record['versions']['strata_pa']}"
    status = _hand_out(asked, record, title, results, refused, _show.BENCH)
    if asked.json != "-":
        for row in peaks:
            rates = f"{row['exact_gops']:.0f} of {row['peak_gops']:.0f} GOP/s of bytes, {row['share']:.0%}"
            print(f"exact, {row['case']}, {row['threads']} threads: {rates}")
    return status


if __name__ == "__main__":
    sys.exit(main())
