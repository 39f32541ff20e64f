"""Exact prompt attention over a paged int8 KV cache, with the same bytes on every machine.

    out = strata_pa.prompt_attention(q, strata_pa.PagedKV(k, v, k_scale, v_scale, page_table))

Names are imported on first use, so `import strata_pa` itself loads neither NumPy nor the compiled module.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import DriverError, Error, InvalidInput, InvalidType, UnsupportedDevice, UnsupportedProblem
    from ._core import __version__ as __version__
    from .attention import Plan, plan, prompt_attention
    from .cache import PagedKV, quantize_kv
    from .diagnosis import Check, Report, doctor, selftest
    from .info import build_info, capabilities, environment_variables, get_imma, kernels, set_imma
    from .partial import ExactAnchors, ExactSums, exact_anchors, exact_finish, exact_sums, merge_anchors, merge_partials, merge_sums
    from .paths import get_cmake_dir, get_include, get_library, get_pkgconfig_dir

__all__ = [
    "Check",
    "DriverError",
    "Error",
    "ExactAnchors",
    "ExactSums",
    "InvalidInput",
    "InvalidType",
    "PagedKV",
    "Plan",
    "Report",
    "UnsupportedDevice",
    "UnsupportedProblem",
    "build_info",
    "capabilities",
    "doctor",
    "environment_variables",
    "exact_anchors",
    "exact_finish",
    "exact_sums",
    "get_cmake_dir",
    "get_imma",
    "get_include",
    "get_library",
    "get_pkgconfig_dir",
    "kernels",
    "merge_anchors",
    "merge_partials",
    "merge_sums",
    "plan",
    "prompt_attention",
    "quantize_kv",
    "selftest",
    "set_imma",
]

_HOMES = {
    "_core": "__version__ DriverError Error InvalidInput InvalidType UnsupportedDevice UnsupportedProblem",
    "attention": "Plan plan prompt_attention",
    "cache": "PagedKV quantize_kv",
    "diagnosis": "Check Report doctor selftest",
    "info": "build_info capabilities environment_variables get_imma kernels set_imma",
    "partial": "ExactAnchors ExactSums exact_anchors exact_finish exact_sums merge_anchors merge_partials merge_sums",
    "paths": "get_cmake_dir get_include get_library get_pkgconfig_dir",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
