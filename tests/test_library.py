"""libstrata_pa and the Python module: one copy of everything, and nothing shows that should not."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import capi
import pytest

import strata_pa
from strata_pa import _core

LIBRARY, MODULE = strata_pa.get_library(), Path(_core.__file__)


def exported(path):
    """The names that a library defines for others."""
    if not shutil.which("nm"):
        pytest.skip("nm is not here")
    lines = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if " A " not in line}


def test_exported_symbols():
    assert exported(MODULE) == {"PyInit__core"}
    assert exported(LIBRARY) == {"strata_pa_private_border", *(f"strata_pa_{name}" for name in capi.FUNCTIONS)}


def test_the_module_is_small():
    """The kernels are not in it a second time."""
    assert b"strata_pa_private_border" in MODULE.read_bytes()
    assert b"sm_scale must be a finite float32" in LIBRARY.read_bytes()
    assert b"sm_scale must be a finite float32" not in MODULE.read_bytes()


def test_a_library_of_another_version(tmp_path):
    copy = tmp_path / "strata_pa"
    shutil.copytree(Path(strata_pa.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (LIBRARY, MODULE):  # an editable installation has them elsewhere
        (copy / path.relative_to(MODULE.parent)).parent.mkdir(exist_ok=True)
        shutil.copy(path, copy / path.relative_to(MODULE.parent))
    library = copy / "lib" / LIBRARY.name
    old = strata_pa.__version__.encode() + b"\0"
    assert library.read_bytes().count(old) > 0
    library.write_bytes(library.read_bytes().replace(old, b"9" + old[1:]))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import strata_pa._core"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"strata_pa._core is of version {strata_pa.__version__}, the libstrata_pa that was loaded is not" in done.stderr


@pytest.mark.parametrize(
    ("option", "function", "holds"),
    [
        ("--cmakedir", strata_pa.get_cmake_dir, "strata_paConfig.cmake"),
        ("--includedir", strata_pa.get_include, "strata_pa.h"),
        ("--pkgconfigdir", strata_pa.get_pkgconfig_dir, "strata_pa.pc"),
    ],
)
def test_folders(option, function, holds):
    done = subprocess.run([sys.executable, "-m", "strata_pa", option], capture_output=True, text=True, check=True)
    assert done.stdout == f"{function()}\n"
    assert (function() / holds).is_file()


def test_the_librarys_path_without_numpy():
    code = "import sys; sys.modules['numpy'] = None; from strata_pa.cli import main; main(['--library'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{LIBRARY}\n", "")


def test_the_entry_point_for_cmake():
    (entry,) = importlib.metadata.entry_points(group="cmake.root", name="strata_pa")
    assert entry.value == "strata_pa"
