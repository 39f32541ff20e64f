"""The dictionaries that describe kernels, devices and the build; all fit for JSON."""

from typing import TypedDict


class PlanFacts(TypedDict):
    """The fields of a `Plan`."""

    kernel: str
    backend: str
    device: str
    workspace_bytes: int
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    architecture: str
    num_threads: int
    chosen_by: str
    notes: tuple[str, ...]


class KernelInfo(TypedDict):
    """One row of `kernels()`."""

    name: str
    backend: str
    built: bool
    opt_in: bool
    portable: bool
    needs: str
    what: str
    head_dims: list[int]
    groups: list[int]
    heads_per_kv: tuple[int, int]
    granularities: list[int]
    dtypes: list[str]
    max_entries: int


class IsaInfo(TypedDict):
    """A compiled instruction-set path of the CPU kernels."""

    name: str
    requires: str
    supported: bool


class DeviceInfo(TypedDict):
    """One device of `capabilities()`."""

    device: str
    backend: str
    name: str
    architecture: str
    num_threads: int
    default: str | None
    kernels: list[str]
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    isas: list[IsaInfo]


class BuildInfo(TypedDict):
    """What `build_info()` returns."""

    version: str
    compiler: str
    build_type: str
    sanitize: str
    pybind11: str
    python: str
    cpu_paths: list[str]
    nvcc: str
    cuda_archs: list[str]
    hip_compiler: str
    hip_archs: list[str]


class ImageInfo(TypedDict):
    """An embedded CUDA image: one file of cuda/."""

    name: str
    cubins: list[int]
    ptx: list[int]
    bytes: int


class DriverInfo(TypedDict):
    """The CUDA driver in use, and the CUDA version that it supports."""

    path: str
    cuda: str


class EnvironmentVariable(TypedDict):
    """One row of `environment_variables()`."""

    name: str
    values: str
    meaning: str


class CacheShape(TypedDict):
    """The sizes of a `PagedKV`."""

    pages: int
    page_size: int
    n_kv: int
    head_dim: int
    group: int


class Capabilities(TypedDict):
    """What `capabilities()` returns."""

    devices: list[DeviceInfo]
    backends: dict[str, bool]
