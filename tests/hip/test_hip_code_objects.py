"""The embedded code objects by their notes, and that ci/audit_code_objects.py finds what it is there to find."""

import copy
import importlib
import struct
import sys
import zipfile

import pytest
from fake_hip import BUILT, KERNELS, ROOT

import strata_pa
from strata_pa import _core

if not (ROOT / "ci" / "audit_code_objects.py").exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "ci"))
audit, matrix = (importlib.import_module(name) for name in ("audit_code_objects", "matrix"))
MATRIX = matrix.load()
ARCHS = (MATRIX.hip_wave32[0], MATRIX.hip_wave64[0])


@pytest.mark.skipif(not BUILT, reason="this build is without HIP")
def test_every_architecture_is_one_of_the_matrix():
    assert set(BUILT) <= {*MATRIX.hip_architectures()}


@pytest.mark.parametrize("arch", BUILT)
@pytest.mark.parametrize("kernel", KERNELS)
def test_notes(kernel, arch):
    """What the package's own list has under this name."""
    assert audit.of_object(kernel, arch, audit.notes(_core.hip_code_objects()[kernel][arch])) == []


@pytest.mark.skipif(not BUILT, reason="this build is without HIP")
def test_the_library(tmp_path):
    """Read as a file, alone and in a wheel: all that the package's list has, and nothing else."""
    library = strata_pa.get_library()
    found = audit.read(library)
    assert len(found) == len(KERNELS) * len(BUILT)
    assert audit.problems(found, BUILT) == []
    assert audit.disagreement(BUILT, found) == []
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.write(library, audit.LIBRARY)
    assert audit.read(tmp_path / "a.whl") == found


def sound(kernel, arch):
    """The notes of a sound code object."""
    zero = (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count", ".group_segment_fixed_size")
    wave, block = 64 if arch in MATRIX.hip_wave64 else 32, 256 if kernel == "fp32" else 128
    good = {".wavefront_size": wave, ".vgpr_count": 96, ".sgpr_count": 40, ".max_flat_workgroup_size": block, **dict.fromkeys(zero, 0)}
    shapes = [(dim, rows) for dim in (64, 128, 256) for rows in (4, 8, 12, 16)]
    kernels = [{".name": f"strata_{kernel}_d{dim}_r{rows}", **good} for dim, rows in shapes]
    return {"amdhsa.target": f"amdgcn-amd-amdhsa--{arch}", "amdhsa.kernels": kernels}


SOUND = [sound(kernel, arch) for kernel in KERNELS for arch in ARCHS]


def test_sound_code_objects():
    assert audit.problems(SOUND, ARCHS) == []
    assert audit.disagreement(ARCHS, SOUND) == []


@pytest.mark.parametrize(("key", "value", "words"), [
    (".wavefront_size", 64, "waves of 64"),
    (".private_segment_fixed_size", 16, "private_segment_fixed_size is 16"),
    (".vgpr_spill_count", 1, "vgpr_spill_count is 1"),
    (".sgpr_spill_count", 1, "sgpr_spill_count is 1"),
    (".group_segment_fixed_size", 4, "group_segment_fixed_size is 4"),
    (".uses_dynamic_stack", True, "a stack"),
    (".vgpr_count", 257, "257 vgpr"),
    (".sgpr_count", 107, "107 sgpr"),
    (".max_flat_workgroup_size", 1024, "blocks of 1024"),
    (".name", "strata_fp32_d96_r4", "strata_fp32_d96_r4: not of the table"),
    (".name", "strata_fp32_d96_r4", "strata_fp32_d64_r4: missing"),
])  # fmt: skip
def test_each_problem_of_a_kernel_is_found(key, value, words):
    wrong = copy.deepcopy(SOUND)
    wrong[0]["amdhsa.kernels"][0][key] = value
    found = audit.problems(wrong, ARCHS)
    assert all(line.startswith(f"fp32 {ARCHS[0]}: ") for line in found)
    assert any(words in line for line in found), found


@pytest.mark.parametrize(("found", "words"), [
    (SOUND[1:], [f"fp32 {ARCHS[0]}: missing"]),
    ([*SOUND, SOUND[-1]], [f"exact {ARCHS[1]}: there 2 times"]),
    ([*SOUND, sound("fp32", "gfx803")], ["fp32 gfx803: not one that is wanted"]),
    ([sound("fp32", ARCHS[1]), *SOUND[1:]], [f"fp32 {ARCHS[0]}: missing", f"fp32 {ARCHS[1]}: there 2 times"]),
    ([], [f"{kernel} {arch}: missing" for kernel in sorted(KERNELS) for arch in sorted(ARCHS)]),
])  # fmt: skip
def test_each_cell_has_to_be_there_once(found, words):
    assert audit.problems(found, ARCHS) == words


def test_another_target_than_its_place_in_the_list():
    assert audit.of_object("exact", ARCHS[0], SOUND[-1])[0] == f"its target is amdgcn-amd-amdhsa--{ARCHS[1]}"


def test_what_build_info_says_is_compared():
    (line,) = audit.disagreement([ARCHS[0]], SOUND)
    assert line.endswith(f"the library holds {', '.join(sorted(ARCHS))}")
    assert audit.disagreement(ARCHS, [])[0].endswith("the library holds none")


def test_files_are_cut_out_of_a_section():
    def file(body):
        header = bytearray(b"\x7fELF\x02" + bytes(59))
        struct.pack_into("<Q", header, 0x28, 64 + len(body))
        struct.pack_into("<HH", header, 0x3A, 64, 2)
        return bytes(header) + body + bytes(128)

    first, second = file(b"code \x7fELF\x02 of a kernel"), file(b"more")
    assert list(audit.objects(first + bytes(77) + second)) == [first, second]
    assert list(audit.objects(bytes(9))) == []


def test_the_command(tmp_path, monkeypatch, capsys):
    """A library without code objects."""
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        header = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
        struct.pack_into("<HHI", header, 0x10, 3, 62, 1)
        struct.pack_into("<HHH", header, 0x34, 64, 0, 0)
        wheel.writestr(audit.LIBRARY, bytes(header))
    monkeypatch.setattr(sys, "argv", ["audit_code_objects.py", str(tmp_path / "a.whl")])
    assert audit.main() == 1
    assert f"fp32 {ARCHS[0]}: missing" in capsys.readouterr().out
