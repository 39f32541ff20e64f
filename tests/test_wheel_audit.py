"""ci/audit_wheel.py finds what it is there to find: wheels made wrong, each in its own way."""

import dataclasses
import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "ci" / "audit_wheel.py").exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
pytest.importorskip("auditwheel", reason="pip install '.[wheels]'")
if not shutil.which("g++"):
    pytest.skip("makes its wheels with g++", allow_module_level=True)
sys.path.insert(0, str(ROOT / "ci"))
audit, matrix = (importlib.import_module(name) for name in ("audit_wheel", "matrix"))

# The wrong wheels are made here for this machine, with symbols of glibc 2.2.5 as the only ones unless one is asked for.
LIMITS = dataclasses.replace(matrix.load(), platforms={"x86_64": "2.17"}, max_bytes=100_000)
PLATFORM = "manylinux_2_17_x86_64.manylinux2014_x86_64"
NAME = f"strata_pa-0.1.0-cp311-cp311-{PLATFORM}.whl"
MODULE, LIBRARY = "strata_pa/_core.cpython-311-x86_64-linux-gnu.so", audit.LIBRARY
GOOD_MODULE = 'extern "C" void PyInit__core() {}'
GOOD_LIBRARY = 'extern "C" void strata_pa_private_border() {}'
MAP = "STRATA_PA { global: strata_pa_*; local: *; };"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(source, *flags): a shared object's bytes; the same request is compiled once."""
    folder, made = tmp_path_factory.mktemp("objects"), {}
    (folder / "map").write_text(MAP)
    (folder / "stub.cpp").write_text("void stub() {}")
    machine = subprocess.run(["g++", "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    if not machine.startswith("x86_64"):
        pytest.skip("makes its wheels for x86-64")

    def make(source, *flags, needs=()):
        key = (source, flags, needs)
        if key not in made:
            for soname in needs:
                stub = ["g++", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "-o", folder / soname, folder / "stub.cpp"]
                subprocess.run(stub, check=True)
            (folder / "a.cpp").write_text(source)
            libraries = ["-Wl,--no-as-needed", *(folder / soname for soname in needs)]
            command = ["g++", "-shared", "-fPIC", "-nostdlib", "-o", folder / "a.so", folder / "a.cpp", *libraries, *flags]
            subprocess.run([str(x).replace("MAP", str(folder / "map")) for x in command], check=True)
            made[key] = (folder / "a.so").read_bytes()
        return made[key]

    return make


@pytest.fixture
def wheel(compiled, tmp_path):
    """wheel(name, files): a sound wheel with these files changed; None: left out."""

    def make(files=(), name=NAME):
        contents = {
            "strata_pa/__init__.py": b"",
            "strata_pa/py.typed": b"",
            "strata_pa-0.1.0.dist-info/licenses/LICENSE": b"",
            MODULE: compiled(GOOD_MODULE, "-Wl,-rpath,$ORIGIN/lib", needs=("libstrata_pa.so",)),
            LIBRARY: compiled(GOOD_LIBRARY, "-Wl,--version-script=MAP"),
        } | dict(files)
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as file:
            for entry, data in contents.items():
                if data is not None:
                    file.writestr(entry, data)
        return audit.problems(path, LIMITS)

    return make


def test_a_sound_wheel(wheel):
    assert wheel() == []


@pytest.mark.parametrize(("name", "words"), [
    (NAME.replace(PLATFORM, "linux_x86_64"), ["its platform is linux_x86_64, no manylinux_X_Y"]),
    (NAME.replace(PLATFORM, "manylinux_2_28_x86_64"), ["its tag promises glibc 2.28, ci/matrix.toml says 2.17"]),
    (NAME.replace("0.1.0", "9.9"), ["it is strata-pa 9.9, not strata-pa 0.1.0"]),
    (NAME.replace("cp311-cp311", "cp312-cp312"), [f"{MODULE}: the wheel is tagged cp312"]),
    (NAME.replace(PLATFORM, "manylinux_2_17_aarch64"), ["aarch64 is not among the platforms", "is for x86_64"]),
])  # fmt: skip
def test_names(wheel, name, words):
    found = wheel(name=name)
    assert all(any(w in line for line in found) for w in words), found


@pytest.mark.parametrize(("files", "words"), [
    ({LIBRARY: None}, "and no strata_pa/lib/libstrata_pa.so"),
    ({MODULE: None}, "it has the modules []"),
    ({"strata_pa/py.typed": None}, "it has no strata_pa/py.typed"),
    ({"strata_pa-0.1.0.dist-info/licenses/LICENSE": None}, "it has no license"),
    ({"tests/test_a.py": b""}, "tests/test_a.py: belongs into no wheel"),
    ({"strata_pa.libs/readme": b""}, "strata_pa.libs/readme: grafted"),
    ({"strata_pa/data/big": bytes(200_000)}, "bytes, ci/matrix.toml allows 100000"),
])  # fmt: skip
def test_contents(wheel, files, words):
    found = wheel(files)
    assert any(words in line for line in found), found


M, OWN = ("-Wl,--version-script=MAP",), ("libstrata_pa.so",)
OPENS = '\n#include <dlfcn.h>\nvoid* open() __asm__("strata_pa_open"); void* open() { return dlopen("x", 1); }'
CONVERTS = "\n#include <charconv>\n__attribute__((used)) static char* f(char* p, double x) { return std::to_chars(p, p + 9, x).ptr; }"
C10 = "\nnamespace c10 { void error(); } __attribute__((used)) static void f() { c10::error(); }"
LOST = "\nnamespace strata_pa { void lost(); } __attribute__((used)) static void f() { strata_pa::lost(); }"
BUILD = {  # what is wrong: (the file, its source, flags, libraries needed, what is said)
    "a newer glibc": (LIBRARY, GOOD_LIBRARY + OPENS, (*M, "-lc"), (), "needs GLIBC_2.34, which manylinux_2_17 does not promise"),
    "a newer libstdc++": (LIBRARY, GOOD_LIBRARY + CONVERTS, (*M, "-lstdc++"), (), "needs GLIBCXX_3.4.29, which manylinux_2_17 does not"),
    "the driver": (LIBRARY, GOOD_LIBRARY, M, ("libcuda.so.1",), "needs libcuda.so.1, which a wheel may not need"),
    "the runtime": (LIBRARY, GOOD_LIBRARY, M, ("libcudart.so.13",), "needs libcudart.so.13, which a wheel may not need"),
    "AMD's runtime": (LIBRARY, GOOD_LIBRARY, M, ("libamdhip64.so.7",), "needs libamdhip64.so.7, which a wheel may not need"),
    "PyTorch's library": (MODULE, GOOD_MODULE, (), (*OWN, "libtorch_cpu.so"), "needs libtorch_cpu.so, which a wheel may not need"),
    "PyTorch's other one": (LIBRARY, GOOD_LIBRARY, M, ("libc10.so",), "needs libc10.so, which a wheel may not need"),
    "BLAS": (LIBRARY, GOOD_LIBRARY, M, ("libopenblas.so.0",), "needs libopenblas.so.0, which a wheel may not need"),
    "an unknown library": (LIBRARY, GOOD_LIBRARY, M, ("libfoo.so.1",), "needs libfoo.so.1, which manylinux_2_17 does not promise"),
    "PyTorch": (MODULE, GOOD_MODULE + C10, (), OWN, "wants PyTorch's symbol _ZN3c105errorEv"),
    "a file left out": (MODULE, GOOD_MODULE + LOST, (), OWN, "wants _ZN9strata_pa4lostEv, which nothing exports"),
    "one export too many": (MODULE, GOOD_MODULE + "\nint other;", (), OWN, f"{MODULE}: exports other"),
    "no init function": (MODULE, "static int x;", (), OWN, f"{MODULE}: does not export PyInit__core"),
    "a C++ symbol": (LIBRARY, GOOD_LIBRARY + "\nvoid f() {}", (), (), f"{LIBRARY}: exports _Z1fv"),
    "no versions": (LIBRARY, GOOD_LIBRARY, (), (), f"{LIBRARY}: exports without a version: strata_pa_private_border"),
    "an absolute path": (MODULE, GOOD_MODULE, ("-Wl,-rpath,/usr/local/lib",), OWN, "searches /usr/local/lib"),
    "an executable stack": (LIBRARY, GOOD_LIBRARY, (*M, "-Wl,-z,execstack"), (), "asks for an executable stack"),
    "a grafted library": ("strata_pa.libs/libcudart-12.so", GOOD_LIBRARY, (), (), "libcudart-12.so: grafted, or not the package's"),
}


@pytest.mark.parametrize("what", BUILD)
def test_shared_objects(wheel, compiled, what):
    name, source, flags, needs, words = BUILD[what]
    found = wheel({name: compiled(source, *flags, needs=needs)})
    assert any(words in line for line in found), found


def test_the_command(compiled, tmp_path, monkeypatch, capsys):
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(LIBRARY, compiled(GOOD_LIBRARY))
    monkeypatch.setattr(sys, "argv", ["audit_wheel.py", str(path)])
    assert audit.main() == 1
    assert f"{NAME}: it has the modules []" in capsys.readouterr().out


def test_a_release_is_complete():
    limits = matrix.load()
    abis = [f"cp{python.replace('.', '')}" for python in limits.pythons]
    wheels = [Path(f"strata_pa-0.1.0-{abi.rstrip('t')}-{abi}-{limits.tag(machine)}.whl") for machine in limits.platforms for abi in abis]
    assert audit.missing(wheels, limits) == []
    assert audit.missing(wheels[1:], limits) == [f"there are 0 wheels for {limits.identifiers()[0]}"]
    other = Path(f"strata_pa-0.1.0-cp39-cp39-{limits.tag('x86_64')}.whl")
    assert audit.missing([*wheels, other], limits) == ["cp39-manylinux_x86_64 is not in ci/matrix.toml"]


def test_the_tag_of_a_release():
    assert audit.mistagged("v0.1.0") == []
    assert audit.mistagged("v9.9") == ["the tag is v9.9, the version 0.1.0"]
    assert audit.mistagged("0.1.0") == ["the tag is 0.1.0, the version 0.1.0"]


def test_the_images(compiled, tmp_path):
    """Of both vendors, byte for byte; AMD's in a wheel for x86-64 only."""
    path, arm = tmp_path / NAME, tmp_path / NAME.replace("x86_64", "aarch64")
    sections = "".join(f'\n__attribute__((section("{s}"), used)) const char {n}[8] = "{text}";'
                       for s, n, text in ((".nv_fatbin", "cuda", "abcdefg"), (".hip_code_objects", "hip", "hijklmn")))  # fmt: skip
    for wheel in (path, arm):
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(LIBRARY, compiled(GOOD_LIBRARY + sections, "-Wl,--version-script=MAP"))
    cuda, hip = tmp_path / "cuda", tmp_path / "hip"
    cuda.mkdir()
    hip.mkdir()
    assert [line.rpartition("/")[2] for line in audit.lacking(path, cuda)] == ["cuda has no *.fatbin", "hip has no *.co"]
    (cuda / "v2_sm80.fatbin").write_bytes(b"abc")
    assert audit.lacking(arm, cuda) == []
    (hip / "fp32.gfx90a.co").write_bytes(b"ijk")
    assert audit.lacking(path, cuda) == []
    (cuda / "v1_sm75.fatbin").write_bytes(b"hij")
    (hip / "imma.gfx90a.co").write_bytes(b"abc")
    assert audit.lacking(path, cuda) == ["it does not hold v1_sm75.fatbin", "it does not hold imma.gfx90a.co"]
