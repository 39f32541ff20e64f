"""The notes of the embedded code objects: target, wave, registers within ci/hip_limits.json, no scratch memory, nothing spilled."""

import io
import json
import sys

import msgpack
import pytest
from elftools.elf.elffile import ELFFile
from fake_hip import BUILT, KERNELS, ROOT

from strata_pa import _core

if not (ROOT / "ci" / "hip_limits.json").exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "ci"))
import matrix

MATRIX = matrix.load()
LIMITS = json.loads((ROOT / "ci" / "hip_limits.json").read_text(encoding="utf-8"))
SHAPES = [(dim, rows) for dim in (64, 128, 256) for rows in (4, 8, 12, 16)]


def wave_of(arch):
    return 64 if arch in MATRIX.hip_wave64 else 32


def notes(code):
    """The metadata of a code object: amdhsa.target, amdhsa.kernels."""
    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if section.name == ".note":
            (note,) = (n for n in section.iter_notes() if n["n_name"] == "AMDGPU" and n["n_type"] in (32, "NT_AMDGPU_METADATA"))
            return msgpack.unpackb(note["n_descdata"] if isinstance(note["n_descdata"], bytes) else note["n_desc"].encode("latin-1"))
    raise AssertionError("no notes")


def problems(kernel, arch, found, limits=LIMITS):
    """Everything that is wrong with a code object's notes, each in a line."""
    wrong = []
    if found["amdhsa.target"] != f"amdgcn-amd-amdhsa--{arch}":
        wrong.append(f"its target is {found['amdhsa.target']}")
    kernels = {k[".name"]: k for k in found["amdhsa.kernels"]}
    wanted = {f"strata_{kernel}_d{dim}_r{rows}" for dim, rows in SHAPES}
    wrong += [f"{name}: {'missing' if name in wanted else 'not of the table'}" for name in sorted(wanted ^ set(kernels))]
    for name, k in kernels.items():
        if k[".wavefront_size"] != wave_of(arch):
            wrong.append(f"{name}: waves of {k['.wavefront_size']}")
        for what in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count", ".group_segment_fixed_size"):
            if k[what]:
                wrong.append(f"{name}: {what} is {k[what]}")
        if k.get(".uses_dynamic_stack"):
            wrong.append(f"{name}: a stack")
        for what in ("vgpr", "sgpr"):
            if k[f".{what}_count"] > limits[what][kernel]:
                wrong.append(f"{name}: {k[f'.{what}_count']} {what}, the limit is {limits[what][kernel]}")
        if k[".max_flat_workgroup_size"] != (256 if kernel == "fp32" else 128):
            wrong.append(f"{name}: blocks of {k['.max_flat_workgroup_size']}")
    return wrong


@pytest.mark.skipif(not BUILT, reason="this build is without HIP")
def test_every_architecture_is_one_of_the_matrix():
    assert set(BUILT) <= {*MATRIX.hip_wave32, *MATRIX.hip_wave64}


@pytest.mark.parametrize("arch", BUILT)
@pytest.mark.parametrize("kernel", KERNELS)
def test_notes(kernel, arch):
    code = _core.hip_code_objects()[kernel][arch]
    assert problems(kernel, arch, notes(code)) == []


def test_what_is_wrong_is_found():
    zero = (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count", ".group_segment_fixed_size")
    good = {".wavefront_size": 32, ".vgpr_count": 96, ".sgpr_count": 40, ".max_flat_workgroup_size": 128, **dict.fromkeys(zero, 0)}
    arch = MATRIX.hip_wave32[0]
    found = {
        "amdhsa.target": f"amdgcn-amd-amdhsa--{arch}",
        "amdhsa.kernels": [{".name": f"strata_exact_d{dim}_r{rows}", **good} for dim, rows in SHAPES],
    }
    assert problems("exact", arch, found) == []
    first = found["amdhsa.kernels"][0]
    for key, value, words in (
        (".wavefront_size", 64, "waves of 64"),
        (".private_segment_fixed_size", 16, "private_segment_fixed_size is 16"),
        (".vgpr_spill_count", 1, "vgpr_spill_count is 1"),
        (".sgpr_spill_count", 1, "sgpr_spill_count is 1"),
        (".group_segment_fixed_size", 4, "group_segment_fixed_size is 4"),
        (".vgpr_count", 257, "257 vgpr"),
        (".sgpr_count", 107, "107 sgpr"),
        (".max_flat_workgroup_size", 1024, "blocks of 1024"),
        (".name", "strata_other", "missing"),
    ):
        before = first[key]
        first[key] = value
        assert any(words in line for line in problems("exact", arch, found)), key
        first[key] = before
    assert problems("exact", arch, {**found, "amdhsa.target": "amdgcn-amd-amdhsa--x"}) == ["its target is amdgcn-amd-amdhsa--x"]
