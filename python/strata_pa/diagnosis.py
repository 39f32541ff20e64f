"""doctor(): is this installation sound?"""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from .attention import make_call
from .cache import PagedKV, quantize_kv

_TOLERANCE = 1e-6  # max |out - float64| / max |float64|


@dataclass(frozen=True)
class Check:
    """One finding: `status` is "ok", "failed" or "absent" (not here, and not needed)."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Report:
    """What `doctor` found; `ok` if no check failed."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(f"{check.status:6}  {check.name}: {check.detail}" for check in self.checks)


def doctor() -> Report:
    """Checks the build, the environment variables, the devices, and each kernel on a small problem.

    A kernel must be right against float64 and give the same bytes on every instruction-set path and for 1 and 2 threads.

    Nothing is printed and nothing is raised: a check that raises has failed.
    """
    checks = [_checked("build", _build), _checked("environment", _environment), _checked("cpu", _cpu)]
    for row in _core.kernels():
        if row["backend"] == "cpu":
            checks.append(_checked(f"kernel {row['name']}", lambda name=row["name"]: _kernel(name)))  # type: ignore[misc]
    for backend in ("cuda", "hip"):
        if not any(row["built"] for row in _core.kernels() if row["backend"] == backend):
            checks.append(Check(backend, "absent", f"this build has no {backend} kernels"))
        else:
            checks.append(_driver(backend))
    return Report((*checks, *_gpu_checks(None)))


def selftest(device: str | None = None) -> Report:
    """Runs one small problem with each kernel of a device, "cuda:0", "hip:0" or "cpu"; None: of every device.

    A portable kernel must give the CPU's bytes, v1 and v2 must be right against float64. Memory on a GPU is the driver's own
    and is freed at the end. A check that raises has failed.

    Raises:
        UnsupportedDevice: there is no such device.
    """
    names = [d["device"] for d in _core.devices()]
    if device is not None and device not in names:
        raise _core.UnsupportedDevice(f"there is no device {device!r}; devices: {', '.join(names)}")
    checks = []
    if device in (None, "cpu"):
        rows = [row["name"] for row in _core.kernels() if row["backend"] == "cpu"]
        checks = [_checked(f"cpu {name}", lambda name=name: _kernel(name)) for name in rows]  # type: ignore[misc]
    return Report((*checks, *_gpu_checks(device)))


def _checked(name: str, work: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", work())
    except Exception as error:
        return Check(name, "failed", f"{type(error).__name__}: {error}")


def _gpu_checks(device: str | None) -> Iterator[Check]:
    """Of one GPU, or of all; a GPU that no kernel serves is absent, not failed."""
    from ._selftest import check_kernel

    try:
        found = [d for d in _core.devices() if d["backend"] != "cpu" and device in (None, d["device"])]
    except _core.Error:  # what is wrong is another check's business
        return
    portable = {row["name"]: row["portable"] for row in _core.kernels()}
    for d in found:
        what = f"{d['name']}, {d['architecture']}"
        if not d["kernels"]:
            yield Check(d["device"], "absent", f"{what}: {'; '.join(d['refused'][0][1])}")
            continue
        yield Check(d["device"], "ok", f"{what}, kernels {', '.join(d['kernels'])}, default {d['default']}")
        for name in d["kernels"]:
            yield _checked(f"{d['device']} {name}", lambda name=name, d=d: check_kernel(d["device"], name, portable[name]))  # type: ignore[misc]


def _build() -> str:
    build = _core.build_info()
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}"
    return f"strata_pa {build['version']} ({build['compiler']}), {versions}"


def _environment() -> str:
    _core.devices()  # reads and checks every variable
    names = [variable["name"] for variable in _core.environment_variables()]
    return ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name)) or "no variable is set"


def _driver(backend: str) -> Check:
    """No driver, or one without a device, is absent: the CPU's kernels still run. One too old for the images has failed."""
    try:
        if backend == "cuda":
            cuda = _core.cuda_driver()
            found = f"{cuda['path']} supports CUDA {cuda['cuda']}; kernels by nvcc {_core.build_info()['nvcc']}"
        else:
            hip = _core.hip_driver()
            found = f"{hip['path']} is of ROCm {hip['hip']}; kernels by {_core.build_info()['hip_compiler']}"
    except _core.UnsupportedDevice as error:
        return Check(backend, "failed" if "needs >= " in str(error) else "absent", str(error))
    return Check(backend, "ok", found)


def _cpu() -> str:
    (cpu,) = (device for device in _core.devices() if device["backend"] == "cpu")
    return f"{cpu['architecture']} path, {cpu['num_threads']} threads, kernels {', '.join(cpu['kernels'])}, default {cpu['default']}"


def _kernel(name: str) -> str:
    """One small problem: right against float64, and the same bytes on every path and for 1 and 2 threads."""
    q, kv, expected = _small_problem()
    digests = set()
    paths = list(_paths())
    for isa in paths:
        for threads in (1, 2):
            out = np.empty_like(q)
            make_call(q, kv, kernel=name, num_threads=threads, isa=isa).run(out, None)
            digests.add(out.tobytes())
    if len(digests) != 1:
        raise RuntimeError(f"{len(digests)} different results on the paths {', '.join(paths)}")
    error = float(np.abs(out - expected).max() / np.abs(expected).max())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"the relative error is {error:.2e}, more than {_TOLERANCE:.0e}")
    return f"relative error {error:.1e}, the same bytes on {', '.join(paths)}"


def _paths() -> Iterator[str]:
    for device in _core.devices():
        for isa in device["isas"]:
            if isa["supported"]:
                yield isa["name"]


def _small_problem() -> tuple[Any, PagedKV, Any]:
    """Queries, a cache of 75 cells in pages of 4, and the answer in float64."""
    n_q, n_head, n_kv, dim, cells, page_size = 9, 4, 2, 64, 75, 4
    rng = np.random.default_rng(1)
    pages = -(-cells // page_size)
    q = rng.standard_normal((n_q, n_head, dim), np.float32)
    k, k_scale = quantize_kv(rng.standard_normal((pages, n_kv, page_size, dim), np.float32))
    v, v_scale = quantize_kv(rng.standard_normal((pages, n_kv, page_size, dim), np.float32))
    table = rng.permutation(pages).astype(np.int32)
    kv = PagedKV(k, v, k_scale, v_scale, table)
    n_cells = pages * page_size

    def values(codes: Any, scales: Any) -> Any:  # [n_kv, cells, dim]
        return (codes[table].astype(np.float64) * scales[table]).transpose(1, 0, 2, 3).reshape(n_kv, n_cells, dim)

    heads = np.arange(n_head) // (n_head // n_kv)
    score = np.einsum("ihd,hcd->ihc", q.astype(np.float64), values(k, k_scale)[heads]) / np.sqrt(dim)
    position = n_cells - n_q + np.arange(n_q)
    score[np.broadcast_to(np.arange(n_cells) > position[:, None, None], score.shape)] = -np.inf
    weight = np.exp(score - score.max(-1, keepdims=True))
    return q, kv, np.einsum("ihc,hcd->ihd", weight / weight.sum(-1, keepdims=True), values(v, v_scale)[heads])
