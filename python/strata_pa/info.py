"""What this build and this machine have, and the process-wide switch."""

from . import _core
from .facts import BuildInfo, Capabilities, EnvironmentVariable, KernelInfo


def kernels() -> list[KernelInfo]:
    """The one ordered table of kernels: for each backend its defaults in the order of choice, then the opt-in kernels.

    Each row: `name`, `backend`, `built` (in this build), `opt_in` (runs only when switched on), `portable` (the same bytes on every
    device), `needs` and `what` (in words), and what it serves: `head_dims`, `groups` (dims of a scale; they divide head_dim),
    `heads_per_kv` (least and most query heads of a KV head), `granularities`, `dtypes` (of q), `max_entries` (of a row's list).
    """
    return _core.kernels()


def capabilities() -> Capabilities:
    """The devices that can be used now, and which kernels run on each.

    `devices`: for each `device` ("cpu", "cuda:0", "hip:0", ...), `backend`, `name` (of a GPU), `architecture` (the instruction-set path
    in use, "sm_90" or "gfx942"), `num_threads`, `default` (a kernel's name, or None: no kernel serves the device), `kernels` (all that it
    has), `refused` (pairs of a kernel and its reasons), `isas` (the CPU's compiled paths with `name`, `requires`, `supported`). GPUs are
    asked for what they are only: whether their driver takes each kernel, `selftest` finds out.
    `backends`: which were built.

    Raises:
        InvalidInput, UnsupportedDevice: an environment variable has a value that it cannot have.
    """
    built = dict.fromkeys(("cpu", "cuda", "hip"), False)
    for kernel in _core.kernels():
        built[kernel["backend"]] |= kernel["built"]
    return {"devices": _core.devices(), "backends": built}


def build_info() -> BuildInfo:
    """How the compiled module was built: `version`, `compiler`, `build_type`, `sanitize`, `pybind11`, `python`, `cpu_paths`, `nvcc` (its
    version), `cuda_archs` (cubins as "sm_90", PTX as "compute_90"), `hip_compiler`, `hip_archs` (code objects as
    "gfx942")."""
    return _core.build_info()


def environment_variables() -> list[EnvironmentVariable]:
    """Every environment variable that is read, with its `values` and `meaning`. A call reads them once, before it plans."""
    return _core.environment_variables()


def set_imma(value: bool | None) -> None:
    """Switches the `imma` kernel on or off for the whole process, from any thread.

    True: run `imma` where the device has it. False: the environment cannot switch `imma` on. None: as the environment says. An explicit
    `kernel=` beats it; a device without `imma` keeps its default kernel, and the plan says so.
    """
    _core.set_imma(value)


def get_imma() -> bool | None:
    """What `set_imma` last said."""
    return _core.get_imma()
