"""ci/matrix.toml, and that everything else says the same; ci/audit_literals.py."""

import copy
import importlib
import os
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


def test_cibuildwheel_builds_the_matrix():
    settings = PROJECT["tool"]["cibuildwheel"]
    assert settings["build"].split() == [f"cp{python.replace('.', '')}-*" for python in MATRIX.pythons]
    for machine, glibc in MATRIX.platforms.items():
        target = settings["linux"]["environment"]["STRATA_PA_ZIG_TARGET"].replace("$(uname -m)", machine)
        assert target == f"{machine}-linux-gnu.{glibc}"
        assert MATRIX.tag(machine) in settings["linux"]["repair-wheel-command"].replace("$(uname -m)", machine)
        assert f"manylinux-{machine}-image" in settings["linux"]
    assert any(f"ziglang=={MATRIX.zig}" in command for command in settings["linux"]["before-all"])


def test_cibuildwheel_takes_its_configuration():
    pytest.importorskip("cibuildwheel", reason="pip install '.[wheels]'")
    command = [
        sys.executable,
        "-m",
        "cibuildwheel",
        "--print-build-identifiers",
        "--platform",
        "linux",
        "--archs",
        ",".join(MATRIX.platforms),
        ROOT,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(MATRIX.identifiers())


def workflow(name):
    yaml = pytest.importorskip("yaml", reason="pip install '.[wheels]'")
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text), text


def scripts(text):
    """The programs of ci/ that a workflow calls."""
    return re.findall(r"(?:python|bash) (\.?ci/[\w.]+)", text)


@pytest.mark.parametrize("name", ["tests", "wheels", "release"])
def test_workflows(name):
    """They may only read, they end, and the programs they call are there."""
    document, text = workflow(name)
    assert document["permissions"] == {"contents": "read"}
    for job in document["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 60
        for step in job.get("steps", ()):
            assert ("run" in step) != ("uses" in step)
    assert all((ROOT / script).exists() for script in scripts(text))
    assert "secrets." not in text


def test_the_workflow_for_wheels_has_the_platforms_of_the_matrix():
    document, text = workflow("wheels")
    assert [cell["machine"] for cell in document["jobs"]["wheels"]["strategy"]["matrix"]["include"]] == list(MATRIX.platforms)
    assert document["jobs"]["wheels"]["needs"] == "images"
    audits = {f"ci/audit_{what}.py" for what in ("wheel", "images", "code_objects")}
    assert set(scripts(text)) == {"ci/build_images.py", "ci/test_wheel.py", *audits}
    paths = [
        step["with"]["path"] for job in document["jobs"].values() for step in job["steps"] if step.get("with", {}).get("name") == "images"
    ]
    left, taken = paths
    assert left.split() == [f"{taken}/cuda", f"{taken}/hip"]
    assert PROJECT["tool"]["cibuildwheel"]["linux"]["config-settings"]["cmake.define.STRATA_PA_IMAGES"] == f"/project/{taken}/cuda"


def test_a_release_is_published_by_trust():
    document, text = workflow("release")
    publish = document["jobs"]["publish"]
    assert publish["permissions"] == {"contents": "read", "id-token": "write"}
    assert document["jobs"]["wheels"]["uses"] == "./.github/workflows/wheels.yml"
    assert "--complete --tag" in text
    assert [job for job, entry in document["jobs"].items() if "permissions" in entry] == ["publish"]


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


# The record


def test_cells_of_the_record():
    record, images = (importlib.import_module(name) for name in ("matrix_record", "audit_images"))
    want = images.Expected(least={"strata_fp32_d64_r4": 75, "strata_fp32_d128_r4": 75, "strata_v2_d256_g64": 80}, shared={}, archs=(75, 90))
    sound = [images.Code(s, a, "", 1, 0, 0, 0, 0) for s in want.least for a in want.archs if want.has(s, a)]
    checks = [["cuda:0 fp32", "ok", ""], ["cuda:0 v2", "failed", ""], ["cpu v2", "ok", ""]]
    steps = {"selftest": {"checks": checks}, "test": {"ok": True}}
    gpu = {"card": {"name": "A card", "compute_cap": "9.0"}, "steps": steps}
    assert record.ran_on([gpu | {"steps": steps | {"test": {"ok": False}}}]) == {}
    cells = record.kernels(sound, ["strata_v2_d256_g64 sm_90: 8 bytes of stack"], want, record.ran_on([gpu]))
    assert cells == {
        "fp32 sm_75": {"built": True, "audited": True, "run": "not run"},
        "fp32 sm_90": {"built": True, "audited": True, "run": "A card"},
        "v2 sm_90": {"built": True, "audited": False, "run": "not run"},
    }
    cells = record.kernels(sound[1:], [], want, {})
    assert cells["fp32 sm_75"] == {"built": False, "audited": False, "run": "not run"}


def test_forms_of_the_record():
    """A form counts as run where the tests that are its own passed."""
    record = importlib.import_module("matrix_record")
    symbols = ["exact_d64_g32", "exact_part_d256_g64", "exact_rows_d64_g32", "rows_cells", "exact_tile_d256_g64",
               "exact_tile_sums_d256_g64", "exact_rest_d256_g64", "tile_union", "partial_merge", "quantize", "v2_d256_g64"]  # fmt: skip
    said = ["exact", "exact_part", *["exact_rows"] * 2, *["exact_tile"] * 4, "partial", "quantize", "v2"]
    assert [record.kernel_of(f"strata_{symbol}") for symbol in symbols] == said
    tests = {
        "ok": True,
        "note": "by file",
        "test_tiled.py": {"passed": 3},
        "test_identity.py test_ranks.py": {"passed": 1},
        "test_quantize_gpu.py": {"skipped": 2},
    }
    gpu = {"card": {"name": "A card", "compute_cap": "9.0"}, "steps": {"selftest": {"checks": []}, "test": tests}}
    assert record.ran_on([gpu]) == {"90": dict.fromkeys(["exact_rows", "exact_tile", "exact_part", "partial"], "A card")}
    assert record.ran_on([gpu | {"steps": {"selftest": {"checks": []}, "test": tests | {"ok": False}}}]) == {}
    whole = {"selftest": {"checks": []}, "test": {"ok": True, "all": {"passed": 9, "skipped": 1}}}
    assert set(record.ran_on([gpu | {"steps": whole}])["90"]) == {form for forms in record.TESTED.values() for form in forms}
    whole["test"]["all"] = {"skipped": 10}
    assert record.ran_on([gpu | {"steps": whole}]) == {"90": {}}


def test_code_objects_of_the_record():
    pytest.importorskip("msgpack", reason="pip install '.[test]'")
    record = importlib.import_module("matrix_record")
    found = [{"amdhsa.target": "amdgcn-amd-amdhsa--gfx90a", "amdhsa.kernels": [{".name": f"strata_{k}_d64_r4"}]} for k in ("fp32", "imma")]
    cells = record.code_objects(found, ["imma gfx90a: 3 sgpr"], ["gfx90a", "gfx942"])
    assert cells["fp32 gfx90a"] == {"built": True, "audited": True, "run": "not run"}
    assert cells["imma gfx90a"] == {"built": True, "audited": False, "run": "not run"}
    assert cells["exact gfx90a"] == cells["fp32 gfx942"] == {"built": False, "audited": False, "run": "not run"}
    assert len(cells) == 6


def test_wheels_of_the_record():
    record = importlib.import_module("matrix_record")
    tested = {"runs": [{"numpy": "2.5.5", "tests": "12 passed in 3.21s"}], "qemu Nehalem": {"right": ["fp32"]}}
    report = {"3.12 x86_64": {"python": "3.12", "machine": "x86_64", "built": True, "audited": True, "tested": tested, "bytes": 5}}
    report["3.13 x86_64"] = {"python": "3.13", "machine": "x86_64", "built": True, "error": "the audit"}
    report["3.13t x86_64"] = {"python": "3.13t", "machine": "x86_64", "built": True}
    cells = record.wheels(MATRIX, [report])
    assert list(cells) == [*MATRIX.identifiers(), "cp313t-manylinux_x86_64"]
    how = ["NumPy 2.5.5: 12 passed", "qemu Nehalem: the golden bytes of fp32"]
    assert cells["cp312-manylinux_x86_64"] == {"built": True, "audited": True, "run": how, "bytes": 5}
    assert cells["cp313-manylinux_x86_64"] == {"built": True, "audited": False, "run": "not run", "bytes": None}
    assert cells["cp310-manylinux_aarch64"] == {"built": False, "audited": False, "run": "not run", "bytes": None}


# Images of another build


CMAKE = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


def configure(folder, *options):
    command = [CMAKE, "-S", ROOT, "-B", folder, "-DSTRATA_PA_PYTHON=OFF", "-DSTRATA_PA_CUDA=ON", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(("manifest", "words"), [
    (None, "has no images.cmake"),
    ("set(nvcc_version 13.0.88)\nset(known 80;90)\n", "has no v2_sm80 of these sources, flags and architectures"),
    ("set(nvcc_version 13.0.88)\nset(known 80;90)\nset(key_v2_sm80 0123)\n", "has no v2_sm80 of these sources"),
])  # fmt: skip
def test_images_that_do_not_fit_are_refused(tmp_path, manifest, words):
    if not CMAKE:
        pytest.skip("cmake is not here")
    images = tmp_path / "images"
    images.mkdir()
    (images / "v2_sm80.fatbin").write_bytes(b"")
    if manifest:
        (images / "images.cmake").write_text(manifest)
    done = configure(tmp_path / "build", f"-DSTRATA_PA_IMAGES={images}")
    assert done.returncode != 0
    assert re.search(words, re.sub(r"\s+", " ", done.stderr)), done.stderr
