"""The measurements of `strata-pa parity`: each kernel against float64, and its time."""

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core, reference
from ._cases import Case
from ._device import DeviceArray, on_device, ordinal_of, to_device, workspace_on
from .attention import plan, prompt_attention
from .cache import PagedKV
from .info import capabilities, kernels

Array = npt.NDArray[Any]

# The greatest max|out - float64| / max|float64| that a kernel may have. fp32, imma and exact: what the project promises of them on every
# problem that it checks. v1, v2: no promise; twice what v2 was seen with, so that a defect shows.
BOUNDS = {"fp32": 1.0e-6, "imma": 1.0e-6, "exact": 1.0e-6, "v1": 2.0e-6, "v2": 2.0e-6}


@dataclass(frozen=True)
class Target:
    """A device, and the kernels to run on it."""

    device: str
    backend: str
    architecture: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """One kernel on one problem; the fields are those of the JSON record."""

    case: str
    kernel: str
    device: str
    architecture: str
    threads: int
    context: int
    queries: int
    widest: int  # cells of the longest row
    n_head: int
    n_kv: int
    head_dim: int
    group: int
    sampled: int  # queries compared with float64
    max_rel_err: float
    bound: float
    ok: bool
    reps: int
    median_ms: float
    min_ms: float
    max_ms: float
    gflops: float
    sha256: str


@dataclass(frozen=True)
class Refused:
    """A kernel that cannot run a problem."""

    case: str
    kernel: str
    reason: str


def choose_target(device: str | None, asked: Sequence[str] | None) -> Target:
    """The device of that name, by default the first GPU or else the CPU, and its kernels or those asked for.

    Raises:
        InvalidInput: no kernel has that name.
        UnsupportedDevice: no such device, or a kernel that the device does not have; the message says what there is.
    """
    devices = capabilities()["devices"]
    if device is None:
        here = next((d for d in devices if d["backend"] != "cpu"), devices[0])
    else:
        found = [d for d in devices if device in (d["device"], d["backend"])]
        if not found:
            raise _core.UnsupportedDevice(f"there is no device {device!r}; devices: {', '.join(d['device'] for d in devices)}")
        here = found[0]
    names = tuple(asked or here["kernels"])
    known = list(dict.fromkeys(row["name"] for row in kernels()))
    refused = dict(here["refused"])
    for name in names:
        if name not in known:
            raise _core.InvalidInput(f"{name!r} is not a kernel; known kernels: {', '.join(known)}")
        if name not in here["kernels"]:
            raise _core.UnsupportedDevice(f"{name} does not run on {here['device']}: {'; '.join(refused.get(name, ()))}")
    return Target(here["device"], here["backend"], here["architecture"], names)


def relative_error(out: Array, expected: Array) -> float:
    """max|out - expected| / max|expected|, NaN where anything is NaN."""
    most = float(np.abs(expected).max(initial=0))
    worst = float(np.abs(out.astype(np.float64) - expected).max(initial=0))
    return worst if most == 0 else worst / most


def digest(out: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(out).tobytes()).hexdigest()


@dataclass(frozen=True)
class Placed:
    """A problem's arrays on a device."""

    q: Any
    kv: PagedKV
    options: dict[str, Any]
    out: Any
    clock: Callable[[Callable[[], object]], float]  # runs a call and gives its ms
    clear: Callable[[], None]  # fills `out` with NaN, so that what a kernel leaves out shows
    read: Callable[[], Array]  # what `out` holds


def _on_cpu(case: Case, device: str) -> Placed:
    def clock(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    out = np.empty_like(case.q)
    return Placed(case.q, case.kv, case.options, out, clock, lambda: out.fill(np.nan), lambda: out)


def _on_gpu(case: Case, device: str) -> Placed:
    q, kv, options = to_device(case.q, case.kv, case.options, device)
    timer = _core.DeviceTimer(ordinal_of(device), 0, device.partition(":")[0])

    def clock(run: Callable[[], object]) -> float:
        """Between two events around the call, on the stream that it runs on."""
        timer.start()
        run()
        timer.stop()
        return timer.milliseconds()

    nothing = np.full_like(case.q, np.nan)
    out = on_device(nothing, device)
    return Placed(q, kv, options, out, clock, lambda: out.write(nothing), out.read)


# How each backend's devices get their arrays.
_PLACES: dict[str, Callable[[Case, str], Placed]] = {"cpu": _on_cpu, "cuda": _on_gpu, "hip": _on_gpu}


def measure(
    case: Case,
    target: Target,
    *,
    reps: int,
    sample: int,
    threads: int | None = None,
    step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Result], list[Refused]]:
    """Every kernel of `target` on one problem; `step(what)` is called after each piece of work, `steps(...)` times."""
    rows = case.sampled(sample)
    step(f"{case.name}: float64")
    expected = reference.attention_float64(case.q, case.kv, rows=rows, **case.options)
    results: list[Result] = []
    refused: list[Refused] = []
    here = _PLACES[target.backend](case, target.device)
    for name in target.kernels:
        what = f"{case.name}: {name}"
        try:
            chosen = plan(here.q, here.kv, kernel=name, num_threads=threads, **here.options)
        except _core.UnsupportedProblem as error:
            refused.append(Refused(case.name, name, reason_line(name, str(error))))
            for _ in range(reps + 1):
                step(what)
            continue

        workspace = workspace_on(target.device, chosen.workspace_bytes)

        def run(name: str = name, workspace: DeviceArray | None = workspace) -> None:
            prompt_attention(here.q, here.kv, kernel=name, out=here.out, num_threads=threads, workspace=workspace, **here.options)

        here.clear()
        times = []
        for _ in range(reps + 1):
            times.append(here.clock(run))
            step(what)
        del times[0]  # the warm-up
        out = here.read()
        err = relative_error(out[rows], expected)
        median = statistics.median(times)
        results.append(
            Result(
                case=case.name,
                kernel=name,
                device=target.device,
                architecture=chosen.architecture,
                threads=chosen.num_threads,
                context=case.context,
                queries=case.queries,
                widest=case.widest,
                n_head=case.q.shape[1],
                n_kv=case.kv.n_kv,
                head_dim=case.q.shape[2],
                group=case.kv.group,
                sampled=len(rows),
                max_rel_err=err,
                bound=BOUNDS[name],
                ok=err <= BOUNDS[name],  # not so for NaN
                reps=reps,
                median_ms=median,
                min_ms=min(times),
                max_ms=max(times),
                gflops=case.flop / median * 1e-6,
                sha256=digest(out),
            )
        )
    return results, refused


def steps(kernels: int, reps: int) -> int:
    """How often `measure` calls `step`."""
    return 1 + kernels * (reps + 1)


def reason_line(kernel: str, message: str) -> str:
    """The line of a refusal that speaks of one kernel."""
    lines = (line.strip() for line in message.splitlines())
    return next((line.removeprefix(f"{kernel}: ") for line in lines if line.startswith(f"{kernel}: ")), message)
