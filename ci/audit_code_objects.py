"""Audits the AMD code objects of a built libstrata_pa, in a wheel or beside the installed package, by their notes.

    python ci/audit_code_objects.py [--archs gfx90a,gfx1100] [WHEEL or LIBRARY ...]     the installed package's by default

Prints what is wrong, each in a line; the exit status is 1 if anything is. Looked at: every kernel for every architecture of ci/matrix.toml
(or of --archs), once, and no other; the target, the wave, registers within ci/hip_limits.json, no scratch memory, nothing spilled; for the
installed package that build_info()["hip_archs"] is what is there. Needs pyelftools and msgpack.
"""

import argparse
import io
import json
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).resolve().parent))
import matrix
from matrix import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
SECTION = ".hip_code_objects"  # hip/CMakeLists.txt
LIMITS = json.loads((ROOT / "ci" / "hip_limits.json").read_text(encoding="utf-8"))
BLOCKS = {"fp32": 256, "imma": 128, "exact": 128}  # threads; hip/launch.h
SHAPES = [(dim, rows) for dim in (64, 128, 256) for rows in (4, 8, 12, 16)]
MATRIX = matrix.load()


def notes(code: bytes) -> dict[str, Any]:
    """The metadata of a code object: amdhsa.target, amdhsa.kernels."""
    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if section.name == ".note":
            (note,) = (n for n in section.iter_notes() if n["n_name"] == "AMDGPU" and n["n_type"] in (32, "NT_AMDGPU_METADATA"))
            data = note["n_descdata"] if isinstance(note["n_descdata"], bytes) else note["n_desc"].encode("latin-1")
            return dict(msgpack.unpackb(data))
    raise ValueError("a code object without notes")


def objects(section: bytes) -> Iterator[bytes]:
    """The ELF files that lie in a section, with padding between them."""
    at = 0
    while (at := section.find(b"\x7fELF\x02", at)) >= 0:
        (table,) = struct.unpack_from("<Q", section, at + 0x28)
        size, count = struct.unpack_from("<HH", section, at + 0x3A)
        yield section[at : at + table + size * count]
        at += table + size * count


def read(path: Path) -> list[dict[str, Any]]:
    """The notes of every code object of a wheel or a library."""
    data = path.read_bytes()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            data = wheel.read(LIBRARY)
    section = ELFFile(io.BytesIO(data)).get_section_by_name(SECTION)
    return [notes(code) for code in objects(section.data())] if section else []


def names(found: dict[str, Any]) -> tuple[str, str]:
    """The kernel and the architecture that a code object says it is for."""
    symbols = {k[".name"].split("_")[1] for k in found["amdhsa.kernels"] if k[".name"].startswith("strata_")}
    return ", ".join(sorted(symbols)) or "no kernel", found["amdhsa.target"].rpartition("--")[2]


def of_object(kernel: str, arch: str, found: dict[str, Any], limits: dict[str, dict[str, int]] = LIMITS) -> list[str]:
    """Everything that is wrong with the notes of this kernel's code object for this architecture, each in a line."""
    wrong = []
    if found["amdhsa.target"] != f"amdgcn-amd-amdhsa--{arch}":
        wrong.append(f"its target is {found['amdhsa.target']}")
    kernels = {k[".name"]: k for k in found["amdhsa.kernels"]}
    wanted = {f"strata_{kernel}_d{dim}_r{rows}" for dim, rows in SHAPES}
    wrong += [f"{name}: {'missing' if name in wanted else 'not of the table'}" for name in sorted(wanted ^ set(kernels))]
    for name, k in kernels.items():
        if k[".wavefront_size"] != (64 if arch in MATRIX.hip_wave64 else 32):
            wrong.append(f"{name}: waves of {k['.wavefront_size']}")
        for what in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count", ".group_segment_fixed_size"):
            if k[what]:
                wrong.append(f"{name}: {what} is {k[what]}")
        if k.get(".uses_dynamic_stack"):
            wrong.append(f"{name}: a stack")
        for what in ("vgpr", "sgpr"):
            if k[f".{what}_count"] > limits[what][kernel]:
                wrong.append(f"{name}: {k[f'.{what}_count']} {what}, the limit is {limits[what][kernel]}")
        if k[".max_flat_workgroup_size"] != BLOCKS[kernel]:
            wrong.append(f"{name}: blocks of {k['.max_flat_workgroup_size']}")
    return wrong


def problems(found: Iterable[dict[str, Any]], archs: Iterable[str]) -> list[str]:
    """Everything that is wrong with a library's code objects, each in a line that begins with the kernel and the architecture."""
    wanted = {(kernel, arch) for kernel in BLOCKS for arch in archs}
    cells = Counter(map(names, found))
    wrong = [f"{kernel} {arch}: missing" for kernel, arch in sorted(wanted - set(cells))]
    wrong += [f"{kernel} {arch}: not one that is wanted" for kernel, arch in sorted(set(cells) - wanted)]
    wrong += [f"{kernel} {arch}: there {count} times" for (kernel, arch), count in sorted(cells.items()) if count > 1]
    for code in found:
        kernel, arch = names(code)
        if (kernel, arch) in wanted:
            wrong += [f"{kernel} {arch}: {line}" for line in of_object(kernel, arch, code)]
    return wrong


def disagreement(told: Iterable[str], found: Iterable[dict[str, Any]]) -> list[str]:
    """build_info()["hip_archs"] against what is there."""
    told, there = sorted(told), sorted({names(code)[1] for code in found})
    return [] if told == there else [f'build_info()["hip_archs"] is {", ".join(told)}; the library holds {", ".join(there) or "none"}']


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="WHEEL or LIBRARY")
    parser.add_argument("--archs", help="the library was built for these only")
    asked = parser.parse_args()
    archs = asked.archs.split(",") if asked.archs else MATRIX.hip_architectures()
    failed = False
    for path in asked.files or [None]:
        if path:
            found = read(path)
            wrong = problems(found, archs)
        else:
            import strata_pa

            path = strata_pa.get_library()
            found = read(path)
            wrong = problems(found, archs) + disagreement(strata_pa.build_info()["hip_archs"], found)
        failed |= bool(wrong)
        for line in wrong:
            print(line)
        print(
            f"{path.name}: {len(found)} code objects for {', '.join(archs)}: {f'{len(wrong)} problems' if wrong else 'as they should be'}"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
