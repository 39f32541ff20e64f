"""ci/matrix.toml, and that everything else says the same; ci/audit_literals.py."""

import copy
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strata_pa

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "ci" / "matrix.py").exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "ci"))
matrix, audit_literals = (importlib.import_module(name) for name in ("matrix", "audit_literals"))

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MATRIX = matrix.load()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENT = tomllib.loads(matrix.PATH.read_text(encoding="utf-8"))


# The file


@pytest.mark.parametrize(("table", "entry", "value", "words"), [
    ("architectures", "cuda_architectures", [90, 80], "cuda_architectures is .90, 80., it has to be ascending numbers"),
    ("architectures", "cuda_architectures", [80, 80], "ascending"),
    ("architectures", "cuda_architectures", ["sm_80"], "ascending"),
    ("architectures", "cuda_architectures", [], "ascending"),
    ("compilers", "nvcc", 13.0, "nvcc is 13.0, it has to be a version"),
    ("wheels", "pythons", ["3"], "pythons is"),
    ("wheels", "pythons", ["3.12", "3.12"], "3.12 stands there twice"),
    ("wheels", "max_bytes", "12 MB", "max_bytes is '12 MB'"),
    ("wheels", "max_bytes", True, "max_bytes is True"),
    ("wheels", "platforms", {"sparc": "2.17"}, "platforms is"),
    ("wheels", "extra", 1, "unknown entries: wheels.extra"),
    ("more", "extra", 1, "unknown entries: more.extra"),
    ("hardware", "91", "a card", "hardware: 91 is not among the architectures"),
])  # fmt: skip
def test_what_is_wrong_is_named(table, entry, value, words):
    wrong = copy.deepcopy(DOCUMENT)
    wrong.setdefault(table, {})[entry] = value
    with pytest.raises(ValueError, match=words):
        matrix.checked(wrong)


@pytest.mark.parametrize("entry", ["pythons", "platforms", "max_bytes"])
def test_what_is_missing_is_named(entry):
    wrong = copy.deepcopy(DOCUMENT)
    del wrong["wheels"][entry]
    with pytest.raises(ValueError, match=f"wheels has no {entry}"):
        matrix.checked(wrong)


def test_a_file_that_is_no_toml(tmp_path):
    path = tmp_path / "matrix.toml"
    path.write_text("nvcc = ")
    with pytest.raises(ValueError, match=r"matrix\.toml: "):
        matrix.load(path)


# What else has to say the same


def test_cmake_reads_the_list():
    """In one line, as it expects."""
    line = f"cuda_architectures = [{', '.join(map(str, MATRIX.cuda_architectures))}]"
    assert line in matrix.PATH.read_text(encoding="utf-8").splitlines()
    assert '"^cuda_architectures = "' in (ROOT / "cuda" / "architectures.cmake").read_text(encoding="utf-8")
    built = {int(a.removeprefix("sm_")) for a in strata_pa.build_info()["cuda_archs"] if a.startswith("sm_")}
    assert built <= set(MATRIX.cuda_architectures)


def test_build_requirements_have_the_compiler_of_the_matrix():
    pins = [r.split(";")[0].strip() for r in PROJECT["build-system"]["requires"] if r.startswith("nvidia")]
    assert len(pins) == 5
    assert all(pin.endswith(f"=={MATRIX.nvcc}.*") for pin in pins), pins
    assert all(
        pin == f"ziglang=={MATRIX.zig}" for r in PROJECT["build-system"]["requires"] if (pin := r.split(";")[0].strip()).startswith("zig")
    )


def test_classifiers_and_least_python():
    prefix = "Programming Language :: Python :: 3."
    said = {"3." + c.removeprefix(prefix) for c in PROJECT["project"]["classifiers"] if c.startswith(prefix)}
    assert said == {python.rstrip("t") for python in MATRIX.pythons}
    assert PROJECT["project"]["requires-python"] == f">={MATRIX.pythons[0]}"


# Architectures that are named in code


@pytest.mark.parametrize(("name", "text", "found"), [
    ("a.cpp", 'int x; // sm_90\nauto s = "sm_90";', ["a.cpp:2: sm_90"]),
    ("a.cuh", "/* sm_75\nsm_80 */ compute_80 v2_sm80", ["a.cuh:2: compute_80"]),
    ("a.py", '"""sm_90"""\nx = "gfx942"  # gfx90a\ndef f():\n    """sm_80\n    sm_90"""\n', ["a.py:2: gfx942"]),
    ("CMakeLists.txt", "# sm_75\nset(x sm_75)\nset(y compute_${arch}) # sm_80", ["CMakeLists.txt:2: sm_75"]),
    ("run", "#!/usr/bin/env python3\n# sm_90\nx = 'sm_103a'", ["run:3: sm_103a"]),
])  # fmt: skip
def test_named_architectures_are_found(name, text, found):
    assert list(audit_literals.literals(name, text)) == found


def test_no_architecture_is_named_in_code(capsys):
    status = audit_literals.main()
    assert status == 0, capsys.readouterr().out


# Images of another build


def configure(folder, *options):
    command = ["cmake", "-S", ROOT, "-B", folder, "-DSTRATA_PA_PYTHON=OFF", "-DSTRATA_PA_CUDA=ON", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(("manifest", "words"), [
    (None, "has no images.cmake"),
    ("set(nvcc_version 13.0.88)\nset(known 80;90)\n", "has no v2_sm80 of these sources, flags and architectures"),
    ("set(nvcc_version 13.0.88)\nset(known 80;90)\nset(key_v2_sm80 0123)\n", "has no v2_sm80 of these sources"),
])  # fmt: skip
def test_images_that_do_not_fit_are_refused(tmp_path, manifest, words):
    if not shutil.which("cmake"):
        pytest.skip("cmake is not here")
    images = tmp_path / "images"
    images.mkdir()
    (images / "v2_sm80.fatbin").write_bytes(b"")
    if manifest:
        (images / "images.cmake").write_text(manifest)
    done = configure(tmp_path / "build", f"-DSTRATA_PA_IMAGES={images}")
    assert done.returncode != 0
    assert re.search(words, re.sub(r"\s+", " ", done.stderr)), done.stderr
