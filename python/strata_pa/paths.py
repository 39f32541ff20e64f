"""Where the installed package keeps what C and C++ programs need."""

import importlib.util
from pathlib import Path


def _prefix() -> Path:
    spec = importlib.util.find_spec(f"{__package__}._core")  # an editable installation has it elsewhere than this file
    if spec is None or spec.origin is None:
        raise FileNotFoundError("strata_pa._core, the compiled part, is not there: reinstall strata_pa")
    return Path(spec.origin).parent


def get_library() -> Path:
    """The shared library libstrata_pa, which has every kernel."""
    return _prefix() / "lib" / "libstrata_pa.so"


def get_include() -> Path:
    """The folder of strata_pa.h."""
    return _prefix() / "include"


def get_cmake_dir() -> Path:
    """The folder of strata_paConfig.cmake, for `strata_pa_DIR`."""
    return _prefix() / "lib" / "cmake" / "strata_pa"


def get_pkgconfig_dir() -> Path:
    """The folder of strata_pa.pc, for `PKG_CONFIG_PATH`."""
    return _prefix() / "lib" / "pkgconfig"
