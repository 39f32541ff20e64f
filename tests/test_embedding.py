"""The examples in C and C++, built against the installed package as their users would build them, and against the library alone."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import inputs
import numpy as np
import pytest
from problems import KERNELS, PORTABLE, same_bytes

import strata_pa

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SANITIZE = strata_pa.build_info()["sanitize"]
if not shutil.which("gcc") or not shutil.which("g++"):
    pytest.skip("needs gcc and g++", allow_module_level=True)


def environment():
    """Without a preloaded sanitizer and without switches."""
    return {key: value for key, value in os.environ.items() if key != "LD_PRELOAD" and not key.startswith("STRATA_")}


def output(*command, status=0, **variables):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment() | variables, check=False)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def cmake(*arguments):
    program = shutil.which("cmake") or str(Path(pytest.importorskip("cmake").CMAKE_BIN_DIR) / "cmake")
    return output(program, *arguments, CC="gcc", CXX="g++")


def build(source, folder, package, *options):
    flags = [f"-DCMAKE_{language}_FLAGS=-Werror" + f" -fsanitize={SANITIZE}" * bool(SANITIZE) for language in ("C", "CXX")]
    cmake("-S", source, "-B", folder, f"-Dstrata_pa_DIR={package}", *flags, *options)
    cmake("--build", folder, "--parallel", "2")
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return build(EXAMPLES / "engine", tmp_path_factory.mktemp("engine"), strata_pa.get_cmake_dir())


def digests(printed):
    """{kernel: digest} of lines that end in "ok"."""
    return {
        line.split()[0]: re.search(r"\b[0-9a-f]{64} ok$", line)[0][:64] for line in printed.splitlines() if re.search(r"[0-9a-f]{64}", line)
    }


def test_c(tmp_path):
    printed = output(build(EXAMPLES / "c", tmp_path, strata_pa.get_cmake_dir()) / "tiny")
    assert printed.startswith(f"strata_pa {strata_pa.__version__} on cpu (")
    assert digests(printed) == PORTABLE["tiny"]


def test_engine(engine):
    printed = output(engine / "engine")
    assert digests(printed) == PORTABLE["tiny"]
    assert "chosen by default" in printed
    assert output(engine / "engine", "abacus", status=2) == ""


def test_parity(engine):
    for shape, words in ((["300"], "300 / 300 dense"), (["2100", "5", "2"], "2100 / 5 selected")):
        printed = output(engine / "strata_pa_parity", "--device", "cpu", *shape)
        assert words in printed
        rows = re.findall(r"^  (\w+) +max rel. error (\S+) \(bound 1.0e-06\) ok +([\d.]+) ms", printed, re.M)
        assert [row[0] for row in rows] == list(KERNELS)
        assert all(0 < float(error) <= 1e-6 and float(ms) > 0 for _, error, ms in rows)
    for wrong in (["x"], ["8", "9"], ["0"], ["8", "8", "8", "8"]):
        output(engine / "strata_pa_parity", "--device", "cpu", *wrong, status=2)


@pytest.mark.skipif(bool(SANITIZE), reason="the sanitizer wants to be loaded first")
def test_parity_sees_an_output_that_is_not_written(engine, tmp_path):
    source, library = tmp_path / "idle.c", tmp_path / "idle.so"
    source.write_text("int strata_pa_run(void) { return 0; }\n")
    output("gcc", "-shared", "-fPIC", "-o", library, source)
    printed = output(engine / "strata_pa_parity", "--device", "cpu", "64", status=1, LD_PRELOAD=str(library))
    assert printed.count("BROKEN") == 3
    assert "3 bounds are broken" in printed


def test_pkg_config(tmp_path):
    """The file's variables lead to the header and the library."""
    folder = strata_pa.get_pkgconfig_dir()
    values, flags = {"pcfiledir": str(folder)}, {}
    for line in (folder / "strata_pa.pc").read_text().splitlines():
        line = re.sub(r"\$\{(\w+)\}", lambda m: values[m[1]], line)
        if found := re.fullmatch(r"(\w+)=(.*)", line):
            values[found[1]] = found[2]
        elif found := re.fullmatch(r"(\w+): (.*)", line):
            flags[found[1]] = found[2]
    assert flags["Version"] == strata_pa.__version__
    source = tmp_path / "x.c"
    source.write_text("#include <stdio.h>\n#include <strata_pa.h>\nint main(void) { puts(strata_pa_version()); return 0; }\n")
    sanitize = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
    rpath = f"-Wl,-rpath,{values['libdir']}"
    output("gcc", *sanitize, "-o", tmp_path / "x", source, *flags["Cflags"].split(), *flags["Libs"].split(), rpath)
    assert output(tmp_path / "x") == f"{strata_pa.__version__}\n"


class Golden(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("context", "n_q", "page_size", "pages", "cap")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_scale", "v_scale", "page_table", "ids", "widths")),
    )


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "golden.so"
    output(
        "gcc",
        "-std=c99",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        path,
        EXAMPLES / "golden" / "golden.c",
        "-lm",
    )
    library = ctypes.CDLL(str(path))
    library.golden_tiny.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize("name", ["tiny", "causal600", "select2100", "page1", "page17", "page512"])
def test_the_golden_problems(golden, name):
    context, n_q, page_size, seed, _ = inputs.CASES[name]
    want = inputs.make(name)
    made = Golden()
    assert golden.golden_make(ctypes.byref(made), *map(ctypes.c_int64, (context, n_q, page_size)), ctypes.c_uint64(seed)) == 1
    for array in ("q", "k", "v", "k_scale", "v_scale", "page_table", "ids", "widths"):
        expected = want[array]
        got = np.frombuffer((ctypes.c_char * expected.nbytes).from_address(getattr(made, array)), expected.dtype).reshape(expected.shape)
        assert same_bytes(got, expected), array
    golden.golden_free(ctypes.byref(made))


def test_the_golden_digests(golden):
    assert {kernel: golden.golden_tiny(kernel.encode()).decode() for kernel in KERNELS} == PORTABLE["tiny"]
    assert golden.golden_tiny(b"v2") is None


@pytest.mark.slow
def test_the_library_without_python(tmp_path):
    """From the build folder, and installed."""
    if not (ROOT / "CMakeLists.txt").exists() or not (ROOT / "cpu").exists():
        pytest.skip("needs the whole checkout")
    tree, prefix = tmp_path / "tree", tmp_path / "prefix"
    cmake(
        "-S",
        ROOT,
        "-B",
        tree,
        "-DSTRATA_PA_PYTHON=OFF",
        "-DSTRATA_PA_CUDA=OFF",
        "-DCMAKE_INSTALL_LIBDIR=lib",
        f"-DSTRATA_PA_SANITIZE={SANITIZE}",
    )
    cmake("--build", tree, "--parallel", "2")
    cmake("--install", tree, "--prefix", prefix)
    assert digests(output(build(EXAMPLES / "c", tmp_path / "one", tree) / "tiny")) == PORTABLE["tiny"]
    assert {path.name for path in (prefix / "lib").iterdir()} >= {"libstrata_pa.so", "libstrata_pa.so.1", "cmake", "pkgconfig"}
    shutil.rmtree(tree)
    installed = build(EXAMPLES / "c", tmp_path / "two", prefix / "lib" / "cmake" / "strata_pa")
    assert digests(output(installed / "tiny")) == PORTABLE["tiny"]
    assert [path.name for path in (prefix / "include").iterdir()] == ["strata_pa.h"]
