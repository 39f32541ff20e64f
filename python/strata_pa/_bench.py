"""The measurements of `strata-pa bench`: the kernels, and PyTorch beside them, over a grid of shapes."""

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _cases, _core, _parity, _peers, reference
from ._cases import Case, Shape
from ._device import DeviceArray, ordinal_of, to_device, workspace_on
from ._parity import Refused, Target
from .attention import plan, prompt_attention

Array = npt.NDArray[Any]

SETS: dict[str, tuple[Shape, ...]] = {
    "cpu": (Shape(1500, 1500, 0), Shape(8192, 256)),
    "main": (Shape(32768, 2048), Shape(2100, 256), Shape(1500, 1500, 0)),
    "long": (Shape(32768, 8192, 0),),
    "geometry": (Shape(8192, 8192, 0, 9, 3, 64), Shape(8192, 8192, 0, 32, 8, 128)),
    "apart": (Shape(32768, 2048, apart=True),),
    "context": tuple(Shape(512 * 2**i, 256, 0) for i in range(10)),
    "width": tuple(Shape(32768, 256, 64 * 2**i) for i in range(8)),
    "queries": tuple(Shape(32768, 2**i) for i in range(15)),
}
GROWTH = ("context", "width", "queries")  # sets of one growing number: only the default kernel and exact, and few peers
GROWTH_PEERS = ("FP32 memory-efficient", "FP16 flash", "FP16 cuDNN", "compiled gather + dequantize, FP16 flash")
SLOW_PEERS = ("compiled gather + dequantize, FP32",)  # not measured unless named: the compiler takes longer than all the rest

PEAK_SHAPE = Shape(4096, 256, 0)
SECONDS, LEAST_REPS = 0.15, 5  # of one kind of timing of one kernel; a slow one is repeated a few times only
REFERENCE_CELLS = 1 << 18  # that float64 attention sees, over all sampled queries
EXACT_CELLS = 1 << 17  # up to so many exact has its bound; at twice as many 5.3e-6 were seen (bench/records/gpu_h200_2026-11-30.json)


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call."""

    reps: int
    median_ms: float
    q1_ms: float
    q3_ms: float
    min_ms: float
    max_ms: float


@dataclass(frozen=True)
class Result:
    """One kernel or peer on one problem; the fields are those of the JSON record."""

    set: str
    case: str
    kernel: str
    peer: bool
    device: str
    architecture: str
    threads: int
    context: int
    queries: int
    widest: int
    n_head: int
    n_kv: int
    head_dim: int
    group: int
    sampled: int
    max_rel_err: float
    bound: float | None  # None: a peer, or nothing is promised
    ok: bool
    timed: str  # "graph": replays of a CUDA graph; "calls": Python calls in a queue; "host": on a CPU, by its clock
    median_ms: float  # of `times`
    times: Times  # on a GPU: one after another, so with what the second-level cache kept
    cold: Times | None  # on a GPU: with that cache filled with other data before each
    eager: Times | None  # on a GPU: single Python calls, each waited for
    us_per_query: float
    gflops: float
    sha256: str | None  # None: a peer


@dataclass
class Contender:
    """A kernel or peer that is prepared: `run` does one call and gives what `rows` and `digest` read."""

    name: str
    peer: bool
    run: Callable[[int], Any]  # on that stream
    rows: Callable[[Any, list[int]], Array]
    clear: Callable[[Any], None]  # fills the output with NaN
    digest: Callable[[], str] | None = None
    architecture: str = ""
    threads: int = 0


Measured = tuple[str, Times, Times | None, Times | None, Any]  # timed, times, cold, eager, what the last call gave


def times_of(ms: Sequence[float]) -> Times:
    q1, median, q3 = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [ms[0]] * 3
    return Times(len(ms), median, q1, q3, min(ms), max(ms))


# --- Clocks -------------------------------------------------------------------------------------------------------------------


def _alternate(contenders: Sequence[Contender], reps: int, step: Callable[[str], None]) -> list[Measured | str]:
    """On a CPU: rounds through all, after one that does not count, so that a busy moment hits all. A text: why one failed."""
    ms: list[list[float]] = [[] for _ in contenders]
    last: list[Any] = [None for _ in contenders]
    failed: dict[int, str] = {}
    for round_ in range(reps + 1):
        for i, contender in enumerate(contenders):
            step(contender.name)
            if i in failed:
                continue
            time.sleep(0.02)  # OpenMP's threads stop spinning
            if round_ == reps and last[i] is not None:
                contender.clear(last[i])
            start = time.perf_counter()
            try:
                last[i] = contender.run(0)
            except Exception as error:
                if not contender.peer:
                    raise
                failed[i] = reason_of(error)
                continue
            ms[i].append((time.perf_counter() - start) * 1e3)
    return [failed[i] if i in failed else ("host", times_of(ms[i][1:]), None, None, last[i]) for i in range(len(contenders))]


class TorchClock:
    """CUDA events, and replays of a captured call, by PyTorch."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        size = max(256 << 20, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._other = torch.ones(size // 4, dtype=torch.int32, device=device)
        self._sum = torch.empty((), dtype=torch.int64, device=device)

    def measure(self, contender: Contender, reps: int) -> Measured:
        torch, stream = self._torch, self._stream
        address = stream.cuda_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = contender.run(address)
            stream.synchronize()
            estimate = self._single(lambda: contender.run(address), 1)[0]
            n = max(min(reps, int(SECONDS * 1e3 / estimate)), min(reps, LEAST_REPS))
            for _ in range(min(1000, int(20 / estimate))):  # the card raises its clocks
                contender.run(address)
            eager = times_of(self._single(lambda: contender.run(address), n))
            graph, timed = torch.cuda.CUDAGraph(), "graph"
            try:
                graph.capture_begin()
                try:
                    result = contender.run(address)
                finally:
                    graph.capture_end()
                launch = graph.replay
            except RuntimeError:
                stream.synchronize()
                timed, result = "calls", contender.run(address)

                def launch() -> None:
                    contender.run(address)

            contender.clear(result)
            hot = times_of(self._queue(launch, n))
            cold = times_of(self._queue(launch, n, lambda: torch.sum(self._other, dim=0, out=self._sum)))
            if timed == "calls":
                result = contender.run(address)
            stream.synchronize()
        return timed, hot, cold, eager, (result, graph)  # a graph owns what it writes

    def _event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)

    def _single(self, call: Callable[[], object], n: int) -> list[float]:
        ms = []
        for _ in range(n):
            start, stop = self._event(), self._event()
            self._stream.synchronize()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            ms.append(start.elapsed_time(stop))
        return ms

    def _queue(self, launch: Callable[[], object], n: int, before: Callable[[], object] = lambda: None) -> list[float]:
        """Without waiting in between, so that no launch is in the times; `before` is not either."""
        pairs = [(self._event(), self._event()) for _ in range(n)]
        for _ in range(2):
            launch()
        for start, stop in pairs:
            before()
            start.record()
            launch()
            stop.record()
        self._stream.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


class DriverClock:
    """Events of the driver, where there is no PyTorch: no graphs and no cold cache."""

    def __init__(self, device: str) -> None:
        self._ordinal = ordinal_of(device)

    def measure(self, contender: Contender, reps: int) -> Measured:
        def single() -> float:
            timer.start()
            contender.run(0)
            timer.stop()
            return timer.milliseconds()

        timer = _core.DeviceTimer(self._ordinal, 0)
        single()
        estimate = single()
        n = max(min(reps, int(SECONDS * 1e3 / estimate)), min(reps, LEAST_REPS))
        eager = times_of([single() for _ in range(n)])
        contender.clear(None)
        timers = [_core.DeviceTimer(self._ordinal, 0) for _ in range(n)]
        for timer in timers:
            timer.start()
            contender.run(0)
            timer.stop()
        return "calls", times_of([timer.milliseconds() for timer in timers]), None, eager, None


# --- One problem --------------------------------------------------------------------------------------------------------------


def _kernel(name: str, case: Case, q: Any, kv: Any, options: dict[str, Any], target: Target, threads: int | None) -> Contender:
    chosen = plan(q, kv, kernel=name, num_threads=threads, **options)
    on_cpu = target.backend == "cpu"
    nothing = np.full_like(case.q, np.nan)
    out: Any = nothing.copy() if on_cpu else DeviceArray(nothing, ordinal_of(target.device))
    workspace = workspace_on(target.device, chosen.workspace_bytes)

    def run(stream: int) -> Any:
        return prompt_attention(
            q, kv, kernel=name, out=out, num_threads=threads, workspace=workspace, stream=None if on_cpu else stream, **options
        )

    def read() -> Array:
        answer: Array = out if on_cpu else out.read()
        return answer

    return Contender(
        name,
        False,
        run,
        lambda _, rows: read()[rows],
        lambda _: out.fill(np.nan) if on_cpu else out.write(nothing),
        lambda: _parity.digest(read()),
        chosen.architecture,
        chosen.num_threads,
    )


def _peer(peer: _peers.Peer, tensors: _peers.Tensors, threads: int) -> Contender:
    call = peer.prepare(tensors)
    return Contender(
        peer.name,
        True,
        lambda _: call(),
        lambda result, rows: result[rows].float().cpu().numpy(),
        lambda result: result.fill_(math.nan),
        threads=threads,
    )


def bound_of(kernel: str, widest: int) -> float | None:
    """The greatest error that a kernel may have on rows of so many cells. On longer ones than `parity` has, sums in FP32 lose more, and on
    very long ones exact's smallest terms (docs/numerics.md, section 5)."""
    return _parity.BOUNDS[kernel] if widest <= (EXACT_CELLS if kernel == "exact" else _cases.MOST_CELLS) else None


def reason_of(error: Exception) -> str:
    """The first line of an error, short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def kernels_for(set_name: str, target: Target, asked: bool) -> tuple[str, ...]:
    """In a growing set, unless kernels were asked for: the device's default one and exact."""
    if asked or set_name not in GROWTH:
        return target.kernels
    return tuple(dict.fromkeys([target.kernels[0], *(name for name in target.kernels if name == "exact")]))


def peers_for(set_name: str, shape: Shape, target: Target, asked: str) -> list[_peers.Peer]:
    """`asked`: "all", "none", or a part of the names of those that are wanted."""
    if asked == "none":
        return []
    peers = _peers.peers_of(shape, target.backend)
    if asked != "all":
        return [peer for peer in peers if asked in peer.name]
    wanted = GROWTH_PEERS if set_name in GROWTH else [peer.name for peer in peers if peer.name not in SLOW_PEERS]
    return [peer for peer in peers if peer.name in wanted and not (set_name == "queries" and shape.queries > 2048)]


def measure(
    set_name: str,
    case: Case,
    target: Target,
    *,
    names: Sequence[str],
    peers: Sequence[_peers.Peer],
    clock: TorchClock | DriverClock | None,
    reps: int,
    sample: int,
    threads: int | None,
    step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Result], list[Refused]]:
    """Kernels and peers on one problem. `clock` None: a CPU."""
    rows = case.sampled(max(2, min(sample, REFERENCE_CELLS // max(case.widest, 1))))
    step(f"{case.name}: float64")
    expected = reference.attention_float64(case.q, case.kv, rows=rows, **case.options)
    on_cpu = target.backend == "cpu"
    q, kv, options = (case.q, case.kv, case.options) if on_cpu else to_device(case.q, case.kv, case.options, target.device)
    results: list[Result] = []
    refused: list[Refused] = []
    used = 0

    def prepared(maker: Callable[[], Contender], name: str, is_peer: bool) -> Contender | None:
        try:
            return maker()
        except Exception as error:
            if not is_peer and not isinstance(error, _core.UnsupportedProblem):
                raise
            refused.append(Refused(case.name, name, reason_of(error) if is_peer else _parity.reason_line(name, str(error))))
            return None

    def keep(contender: Contender, measured: Measured) -> None:
        timed, times, cold, eager, given = measured
        result = given[0] if isinstance(given, tuple) else given
        err = _parity.relative_error(contender.rows(result, rows), expected)
        bound = None if contender.peer else bound_of(contender.name, case.widest)
        results.append(
            Result(
                set=set_name,
                case=case.name,
                kernel=contender.name,
                peer=contender.peer,
                device=target.device,
                architecture=contender.architecture,
                threads=contender.threads,
                context=case.context,
                queries=case.queries,
                widest=case.widest,
                n_head=case.q.shape[1],
                n_kv=case.kv.n_kv,
                head_dim=case.q.shape[2],
                group=case.kv.group,
                sampled=len(rows),
                max_rel_err=err,
                bound=bound,
                ok=math.isfinite(err) if bound is None else err <= bound,
                timed=timed,
                median_ms=times.median_ms,
                times=times,
                cold=cold,
                eager=eager,
                us_per_query=times.median_ms * 1e3 / case.queries,
                gflops=case.flop / times.median_ms * 1e-6,
                sha256=contender.digest() if contender.digest else None,
            )
        )

    makers: list[tuple[str, bool, Callable[[], Contender]]] = [
        (name, False, lambda name=name: _kernel(name, case, q, kv, options, target, threads))  # type: ignore[misc]
        for name in names
    ]
    torch = _peers.load_torch() if peers else None
    if torch is not None:
        tensors = _peers.Tensors(case, q, kv, options, target.device)
        if on_cpu and threads:
            torch.set_num_threads(threads)
        used = torch.get_num_threads() if on_cpu else 0
        makers += [(peer.name, True, lambda peer=peer: _peer(peer, tensors, used)) for peer in peers]  # type: ignore[misc]
    with torch.no_grad() if torch is not None else nullcontext():
        if clock is None:
            ready = [c for c in (prepared(maker, name, is_peer) for name, is_peer, maker in makers) if c]
            for contender, measured in zip(ready, _alternate(ready, reps, lambda name: step(f"{case.name}: {name}")), strict=True):
                if isinstance(measured, str):
                    refused.append(Refused(case.name, contender.name, measured))
                else:
                    keep(contender, measured)
            return results, refused
        for name, is_peer, maker in makers:  # one at a time: peers take much memory
            step(f"{case.name}: {name}")
            contender_ = prepared(maker, name, is_peer)
            if contender_ is None:
                continue
            try:
                keep(contender_, clock.measure(contender_, reps))
            except Exception as error:
                if not is_peer:
                    raise
                refused.append(Refused(case.name, name, reason_of(error)))
            del contender_
            if torch is not None:
                torch.cuda.empty_cache()
    return results, refused


def steps(contenders: Iterable[int], reps: int, on_cpu: bool) -> int:
    """How often `measure` calls `step` at most for problems of so many kernels and peers."""
    return sum(1 + n * (reps + 1 if on_cpu else 1) for n in contenders)


# --- The CPU's peak -----------------------------------------------------------------------------------------------------------


def dot_peak(isa: str, threads: int, bursts: int = 15) -> Times | None:
    """GOP/s of byte dot products in registers, all threads together (in the fields of milliseconds); None: the path has no instruction."""
    rounds = 1000
    if not _core.dot_peak(isa, rounds):
        return None

    def burst(rounds: int) -> int:
        return int(_core.dot_peak(isa, rounds))

    while True:  # about 20 ms
        start = time.perf_counter()
        burst(rounds)
        if time.perf_counter() - start > 0.01:
            break
        rounds *= 2
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(burst, [1000] * threads))
        for _ in range(bursts):
            start = time.perf_counter()
            done = sum(pool.map(burst, [2 * rounds] * threads))
            rates.append(done / (time.perf_counter() - start) * 1e-9)
    return times_of(rates)


def peak(isa: str, threads: Sequence[int], reps: int, seed: int, step: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """`exact` on a dense problem beside the machine's peak, for each number of threads; []: the path has no byte dot products.

    Counted are 7 products of bytes for each dim of a score, a multiplication and an addition each: q's three digits with k, and the four
    of a weight with v. Masked scores are not counted, nor what a kernel computes twice.
    """
    case = _cases.make_case(PEAK_SHAPE, seed)
    operations = 7 * case.flop / 2
    out = np.empty_like(case.q)
    rows = []
    for n in threads:
        step(f"peak, {n} threads")
        before = dot_peak(isa, n)
        if before is None:
            return []
        ms = []
        for _ in range(reps + 1):
            start = time.perf_counter()
            prompt_attention(case.q, case.kv, kernel="exact", out=out, num_threads=n, **case.options)
            ms.append((time.perf_counter() - start) * 1e3)
        after = dot_peak(isa, n)
        assert after is not None
        most = max(before.max_ms, after.max_ms)
        found = times_of(ms[1:])
        rows.append(
            {
                "case": case.name,
                "isa": isa,
                "threads": n,
                "peak_gops": most,  # the most that was seen, before or after
                "peak_median_gops": [before.median_ms, after.median_ms],
                "times": found,
                "exact_gops": operations / found.median_ms * 1e-6,
                "share": operations / found.median_ms * 1e-6 / most,
                "best_share": operations / found.min_ms * 1e-6 / most,
            }
        )
    return rows


# --- The card -----------------------------------------------------------------------------------------------------------------

CARD = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "temperature.gpu")


def card(device: str) -> dict[str, str] | None:
    """What nvidia-smi says of the card now; None where it says nothing."""
    command = ["nvidia-smi", f"--id={ordinal_of(device)}", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(CARD, values, strict=True)) if done.returncode == 0 and len(values) == len(CARD) else None


def library_versions() -> dict[str, str]:
    """PyTorch and what it brings, for the record."""
    torch = _peers.load_torch()
    if torch is None:
        return {}
    found = {"torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    else:
        found["torch_cpu"] = str(torch.backends.cpu.get_cpu_capability())
    return found
