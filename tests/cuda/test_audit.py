"""ci/audit_images.py finds what it is there to find."""

import dataclasses
import hashlib
import importlib.util
import struct
import subprocess
from pathlib import Path

import pytest

import strata_pa

PATH = Path(__file__).resolve().parents[2] / "ci" / "audit_images.py"
if not PATH.exists():
    pytest.skip("ci/ is not here", allow_module_level=True)
spec = importlib.util.spec_from_file_location("audit_images", PATH)
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)

FP32, IMMA, V2 = "strata_fp32_d256_r12", "strata_imma_d256_g64", audit.V2
EXPECTED = audit.Expected(least={FP32: 75, IMMA: 80, V2: 80}, shared={FP32: 20_000, IMMA: 40_000, V2: 30_000}, archs=(75, 80, 90))


def code(symbol, arch, **changes):
    int8 = 48 if symbol == IMMA else 0
    made = audit.Code(symbol, arch, f"{symbol}{arch}", 128, 0, 0, 0 if arch < 80 else 1024, int8)
    return dataclasses.replace(made, **changes)


SOUND = [code(FP32, 75), *(code(symbol, arch) for symbol in EXPECTED.least for arch in (80, 90))]


def with_changed(symbol, arch, **changes):
    return [dataclasses.replace(c, **changes) if (c.symbol, c.arch) == (symbol, arch) else c for c in SOUND]


def test_sound_images():
    assert audit.problems(SOUND, EXPECTED) == []


@pytest.mark.parametrize(("codes", "problem"), [
    ([c for c in SOUND if (c.symbol, c.arch) != (IMMA, 90)], f"{IMMA} sm_90: missing"),
    ([c for c in SOUND if c.arch != 75], f"{FP32} sm_75: missing"),
    ([*SOUND, code("strata_new_d64", 80)], "strata_new_d64 sm_80: no kernel of the table"),
    ([*SOUND, code(V2, 86)], f"{V2} sm_86: not one of its architectures"),
    ([*SOUND, code(IMMA, 75, int8_mma=0)], f"{IMMA} sm_75: not one of its architectures"),
    (with_changed(IMMA, 80, int8_mma=0), f"{IMMA} sm_80: no INT8 MMA instruction"),
    (with_changed(IMMA, 80, int8_mma=None), f"{IMMA} sm_80: its instructions were not read"),
    (with_changed(FP32, 75, int8_mma=3), f"{FP32} sm_75: 3 INT8 MMA instructions"),
    (with_changed(V2, 90, stack=16), f"{V2} sm_90: 16 bytes of stack, 0 of local memory"),
    (with_changed(V2, 80, local=8), f"{V2} sm_80: 0 bytes of stack, 8 of local memory"),
    (with_changed(FP32, 75, static_shared=50_000), f"{FP32} sm_75: 68976 bytes of shared memory, a block there may take 65536"),
])  # fmt: skip
def test_each_problem_is_found(codes, problem):
    found = audit.problems(codes, EXPECTED)
    assert len(found) >= 1
    assert any(line.startswith(problem) for line in found), found


def test_changed_machine_code_is_found():
    mine = audit.v2_code(SOUND)
    assert mine == {"sm_80": f"{V2}80", "sm_90": f"{V2}90"}
    assert audit.differences("so", mine, dict(mine)) == []
    assert audit.differences("so", mine, mine | {"sm_90": "other"}) == [f"{V2} sm_90: its machine code is not so"]
    assert audit.differences("so", mine, {"sm_80": mine["sm_80"]}) == [f"{V2} sm_90: its machine code is not so"]
    assert audit.differences("so", {}, mine) == [f"{V2} {arch}: its machine code is not so" for arch in ("sm_80", "sm_90")]


def test_what_the_tools_print_is_understood():
    assert audit.resources("""
Resource usage:
 Common:
  GLOBAL:0
 Function strata_v2_d256_g64:
  REG:125 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:1696 TEXTURE:0
""") == {V2: {"REG": 125, "STACK": 8, "SHARED": 1024, "LOCAL": 0, "TEXTURE": 0}}
    assert audit.int8_mma("""
		Function : strata_imma_d256_g64
	.headerflags	@"EF_CUDA_SM90"
        /*5780*/                   IMMA.16832.S8.S8 R60, R52.ROW, R68.reuse.COL, RZ ;
        /*5790*/                   HMMA.16816.F32 R64, R36, R68, RZ ;
        /*57a0*/                   IMMA.16832.U8.S8 R96, R40.ROW, R68.COL, RZ ;
        /*57b0*/                   IGMMA.64x48x32.S8.S8 R48, gdesc[UR16], R48, gsb0 ;
		Function : strata_v2_d256_g64
        /*5790*/                   HMMA.16816.F32 R64, R36, R68, RZ ;
""") == {IMMA: 3, V2: 0}


def test_what_build_info_says_is_compared():
    elf = "ELF file    1: a.1.sm_100.cubin\nELF file    2: a.2.sm_90.cubin\nELF file    3: b.3.sm_90a.cubin\n"
    there = audit.architectures(elf, "PTX file    1: a.1.sm_75.ptx\n")
    assert there == ["sm_90", "sm_100", "compute_75"]
    assert audit.disagreement(there, there) == []
    (line,) = audit.disagreement(["sm_90", "sm_100"], there)
    assert line.endswith("the library holds sm_90, sm_100, compute_75")


def test_machine_code_is_cut_out_of_elf_files():
    names = b"\0.text.strata_a\0.shstrtab\0"
    body, start = b"code of a kernel", 64
    header = bytearray(b"\x7fELF\x02" + bytes(59))
    table = start + len(body) + len(names)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)

    def section(name, offset, size):
        return struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size) + bytes(24)

    file = bytes(header) + body + names + section(0, 0, 0) + section(1, start, len(body)) + section(16, start + len(body), len(names))
    assert audit.text_sections(file) == {"strata_a": body}
    with pytest.raises(ValueError, match="ELF"):
        audit.text_sections(b"MZ")


def test_the_one_list():
    """What the build holds comes from it, and every architecture's shared memory is known."""
    archs = audit.listed()
    assert set(archs) <= set(audit.SHARED_KIB)
    assert list(archs) == sorted(archs)
    built = {int(a.removeprefix("sm_")) for a in strata_pa.build_info()["cuda_archs"] if a.startswith("sm_")}
    assert built <= set(archs)


def test_symbols_and_shared_memory_of_the_table():
    want = audit.expected(audit.listed())
    assert {V2, FP32, IMMA, "strata_v1_d256_g64", "strata_exact_d64_g32", "strata_fp32_d64_r4"} <= set(want.least)
    assert len(want.least) == 2 + 3 * 4 + 4 * 9 + 2 + 16 + 1 + 6
    assert set(want.only) == {symbol for symbol in want.least if want.has(symbol, 90) and not want.has(symbol, 100)}
    assert all(size <= 227 * 1024 for size in want.shared.values())
    assert (want.least[V2], want.least[FP32]) == (80, 75)
    assert all(
        0 < size <= 99 * 1024
        for symbol, size in want.shared.items()
        if symbol not in want.only and not symbol.startswith(("strata_quantize", "strata_partial_", "strata_rows_cells"))
    )
    assert (want.least["strata_quantize"], want.shared["strata_quantize"]) == (75, 0)


@pytest.mark.slow
def test_the_library(tmp_path):
    """The built images: complete, and the machine code that the file holds for this compiler."""
    try:
        audit.tool("cuobjdump")
    except SystemExit:
        pytest.skip("cuobjdump is not here")
    if not strata_pa.build_info()["cuda_archs"]:
        pytest.skip("this build is without CUDA")
    codes = audit.read(strata_pa.get_library())
    archs = tuple(sorted({c.arch for c in codes}))
    assert [line for line in audit.problems(codes, audit.expected(archs)) if "missing" in line or "MMA" in line or "table" in line] == []
    cubin = tmp_path / "broken.cubin"
    cubin.write_bytes(b"\x7fELF\x02" + bytes(100))
    with pytest.raises((SystemExit, subprocess.CalledProcessError)):
        audit.read(cubin)
    assert hashlib.sha256(b"").hexdigest() not in {c.sha256 for c in codes}
