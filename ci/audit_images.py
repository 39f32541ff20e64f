"""Audits the CUDA images of a built libstrata_pa with NVIDIA's binary tools: what is in them, for which architectures, and at what price.

    python ci/audit_images.py [LIBRARY]              the installed package's by default
    python ci/audit_images.py --without-imma OTHER   also: v2's machine code is the same in OTHER, a library built with STRATA_PA_IMMA=OFF
    python ci/audit_images.py --write                takes v2's machine code as the right one for this compiler (ci/v2_code.json)

Needs cuobjdump on PATH or from the package nvidia-cuda-cuobjdump (with nvidia-cuda-nvdisasm), and g++ for the sizes of cuda/launch.h.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import matrix

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / "ci" / "v2_code.json"
V2 = "strata_v2_d256_g64"
INT8_KERNELS = ("imma", "exact")

# Shared memory in KiB that a block may take, by architecture (CUDA C++ programming guide, compute capabilities).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}

# The driver keeps this much of it from sm_80 on; cuobjdump counts it as the kernel's.
RESERVED = 1024


@dataclass(frozen=True)
class Code:
    """One kernel for one architecture."""

    symbol: str
    arch: int
    sha256: str  # of its machine code
    registers: int
    stack: int
    local: int
    static_shared: int
    int8_mma: int | None  # instructions; None: not looked at

    @property
    def where(self) -> str:
        return f"{self.symbol} sm_{self.arch}"


@dataclass(frozen=True)
class Expected:
    """What has to be there: the least architecture and the dynamic shared memory of each symbol, the listed architectures."""

    least: dict[str, int]
    shared: dict[str, int]
    archs: tuple[int, ...]
    only: dict[str, int] = field(default_factory=dict)  # symbols of one architecture

    def has(self, symbol: str, arch: int) -> bool:
        return arch in self.archs and arch >= self.least[symbol] and arch == self.only.get(symbol, arch)


def problems(codes: Iterable[Code], expected: Expected) -> list[str]:
    """Everything that is wrong, each in a line."""
    found = {(code.symbol, code.arch): code for code in codes}
    wrong = []
    for symbol in expected.least:
        wrong += [f"{symbol} sm_{arch}: missing" for arch in expected.archs if expected.has(symbol, arch) and (symbol, arch) not in found]
    for code in found.values():
        if code.symbol not in expected.least:
            wrong.append(f"{code.where}: no kernel of the table has this symbol")
            continue
        if not expected.has(code.symbol, code.arch):
            wrong.append(f"{code.where}: not one of its architectures")
        if code.stack or code.local:
            wrong.append(f"{code.where}: {code.stack} bytes of stack, {code.local} of local memory; there should be none")
        room = SHARED_KIB.get(code.arch, 0) * 1024
        takes = code.static_shared - (RESERVED if code.static_shared >= RESERVED else 0) + expected.shared[code.symbol]
        if takes > room:
            wrong.append(f"{code.where}: {takes} bytes of shared memory, a block there may take {room}")
        uses = code.symbol.split("_")[1] in INT8_KERNELS
        if uses and not code.int8_mma:
            wrong.append(
                f"{code.where}: no INT8 MMA instruction" if code.int8_mma == 0 else f"{code.where}: its instructions were not read"
            )
        if not uses and code.int8_mma:
            wrong.append(f"{code.where}: {code.int8_mma} INT8 MMA instructions")
    return wrong


def v2_code(codes: Iterable[Code]) -> dict[str, str]:
    return {f"sm_{code.arch}": code.sha256 for code in sorted(codes, key=lambda code: code.arch) if code.symbol == V2}


def differences(what: str, got: dict[str, str], want: dict[str, str]) -> list[str]:
    """Architectures in both or either whose code is not the same."""
    return [f"{V2} {arch}: its machine code is not {what}" for arch in sorted({*got, *want}) if got.get(arch) != want.get(arch)]


# --- Reading


def tool(name: str) -> str:
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "cu13" / "bin" / name
        if path.exists():
            return str(path)
    if path_of := shutil.which(name):
        return path_of
    raise SystemExit(f"{name} is neither in the Python packages nor on PATH: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def text_sections(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each kernel of an ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = sections[names_at][4]

    def name(offset: int) -> str:
        return cubin[names + offset : cubin.index(b"\0", names + offset)].decode()

    code = {}
    for name_offset, _, _, _, offset, length in sections:
        if (section := name(name_offset)).startswith(".text."):
            code[section.removeprefix(".text.")] = cubin[offset : offset + length]
    return code


def resources(dump: str) -> dict[str, dict[str, int]]:
    """REG, STACK, SHARED, LOCAL, ... of each function from `cuobjdump -res-usage`."""
    rows = re.findall(r"Function (\w+):\s+(.*)", dump)
    return {symbol: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", row)} for symbol, row in rows}


def int8_mma(dump: str) -> dict[str, int]:
    """INT8 MMA instructions of each function, of a warp or a warpgroup, from `cuobjdump -sass`."""
    parts = re.split(r"Function : (\w+)", dump)[1:]
    return {symbol: len(re.findall(r"\bI(?:M|GM)MA\.", body)) for symbol, body in zip(parts[::2], parts[1::2], strict=True)}


def architectures(elf: str, ptx: str) -> list[str]:
    """Of `cuobjdump -lelf` and `-lptx`, as build_info() has them: cubins as "sm_90", PTX as "compute_90", ascending."""
    found = []
    for prefix, dump in (("sm_", elf), ("compute_", ptx)):
        found += [f"{prefix}{arch}" for arch in sorted({int(x) for x in re.findall(r"\.sm_(\d+)[a-z]?\.(?:cubin|ptx)", dump)})]
    return found


def disagreement(told: list[str], there: list[str]) -> list[str]:
    """build_info()["cuda_archs"] against what cuobjdump found."""
    return [] if told == there else [f'build_info()["cuda_archs"] is {", ".join(told)}; the library holds {", ".join(there)}']


def read(library: Path) -> list[Code]:
    """Every kernel of every cubin in a library, a fat binary or a cubin."""
    dump = tool("cuobjdump")
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([dump, "-xelf", "all", library.resolve()], cwd=folder, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{library}: {run.stderr.strip() or run.stdout.strip()}")
        for path in sorted(Path(folder).glob("*.cubin")):
            arch = int(re.search(r"\.sm_(\d+)[a-z]?\.cubin$", path.name)[1])  # type: ignore[index]
            used = resources(subprocess.run([dump, "-res-usage", path], capture_output=True, text=True, check=True).stdout)
            sass = int8_mma(subprocess.run([dump, "-sass", path], capture_output=True, text=True, check=True).stdout)
            for symbol, code in text_sections(path.read_bytes()).items():
                u = used[symbol]
                digest = hashlib.sha256(code).hexdigest()
                codes.append(Code(symbol, arch, digest, u["REG"], u["STACK"], u["LOCAL"], u["SHARED"], sass.get(symbol)))
    return codes


# --- What is expected, from the one list, the table and cuda/launch.h


def listed() -> tuple[int, ...]:
    return matrix.load().cuda_architectures


SIZES = r"""
#include <cstdio>
#include <initializer_list>
#include "cuda/exact_tile_sm80.h"
#include "cuda/tile_launch.h"
using namespace strata_pa::cuda;
int main() {
  for (int dim : {64, 128, 256}) std::printf("%u ", tile::shared_bytes(dim));
  std::printf("%d %d\n", tile::kMostWindow, rows::kListShared);
  int id, dim, group, rows, entries;
  while (std::scanf("%d %d %d %d %d", &id, &dim, &group, &rows, &entries) == 5) {
    Params p = {};
    p.n_q = p.n_kv = 1, p.heads_per_kv = rows, p.group = group, p.max_entries = entries;
    std::printf("%u %d\n", config(static_cast<KernelId>(id), p, dim).shared_bytes, rows::shared_bytes(dim, dim / group));
  }
}
"""
IDS = {"fp32": 0, "v1": 1, "v2": 2, "imma": 3, "exact": 4}  # enum KernelId


def expected(archs: tuple[int, ...], without: Iterable[str] = ()) -> Expected:
    """From the installed package's table; `without`: kernels that the module was built without."""
    import strata_pa

    asked, symbols, least = [], [], {}
    for row in strata_pa.kernels():
        name = row["name"]
        if row["backend"] != "cuda" or name in without:
            continue
        (min_sm,) = re.findall(r"sm_(\d+)", row["needs"])
        for dim in row["head_dims"]:
            for group in (g for g in row["groups"] if dim % g == 0):
                for rows in range(row["heads_per_kv"][0], row["heads_per_kv"][1] + 1):
                    tail = f"_r{-(-rows // 4) * 4}" if name == "fp32" else f"_g{group}"
                    symbols.append(f"strata_{name}_d{dim}{tail}")
                    least[symbols[-1]] = int(min_sm)
                    asked.append(f"{IDS[name]} {dim} {group} {rows} {row['max_entries']}")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "sizes"
        subprocess.run(["g++", "-std=c++17", "-I", ROOT, "-x", "c++", "-", "-o", program], input=SIZES, text=True, check=True)
        sizes = subprocess.run([program], input="\n".join(asked), capture_output=True, text=True, check=True).stdout.split()
    shared: dict[str, int] = {}
    for symbol, size, rows_size in zip(symbols, sizes[5::2], sizes[6::2], strict=True):
        shared[symbol] = max(int(size), shared.get(symbol, 0))
        if symbol.startswith("strata_exact_"):
            rows_symbol = symbol.replace("exact_", "exact_rows_")
            shared[rows_symbol], least[rows_symbol] = int(rows_size), least[symbol]
    # Not in the table: cuda/quantize_launch.h, cuda/partial_launch.h, ExactPart of cuda/launch.h.
    others = ["strata_quantize", *(f"strata_partial_{name}" for name in ("merge", "finish", "anchors", "sums", "to_keys", "from_keys"))]
    shared |= dict.fromkeys(others, 0)
    least |= dict.fromkeys(others, 75)
    for symbol in [symbol for symbol in shared if symbol.startswith("strata_exact_d")]:
        part = symbol.replace("strata_exact_", "strata_exact_part_")
        shared[part], least[part] = shared[symbol], least[symbol]
    only: dict[str, int] = {}
    if "exact" not in without:
        tiled = {"strata_tile_cells": 0, **{f"strata_tile_union{bits}": int(sizes[3]) for bits in (8, 16, 32)}}
        for dim, size in zip((64, 128, 256), sizes[:3], strict=True):
            tiled |= {f"strata_exact_tile_{kind}d{dim}_g64": int(size) for kind in ("", "scores_", "sums_")}
            tiled[f"strata_exact_rest_d{dim}_g64"] = shared[f"strata_exact_d{dim}_g64"]
        shared |= tiled | {"strata_rows_lists": int(sizes[4]), "strata_rows_cells": 0}
        only = dict.fromkeys(tiled, 90)
        least |= only | dict.fromkeys(("strata_rows_lists", "strata_rows_cells"), least["strata_exact_d64_g64"])
    return Expected(least, shared, archs, only)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, nargs="?")
    parser.add_argument("--without-imma", type=Path, metavar="OTHER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--archs", metavar="75,90", help="the library was built for these only")
    asked = parser.parse_args()
    import strata_pa

    library = asked.library or strata_pa.get_library()
    archs = tuple(map(int, asked.archs.split(","))) if asked.archs else listed()
    codes = read(library)
    wrong = problems(codes, expected(archs))
    if asked.library is None:
        lists = [
            subprocess.run([tool("cuobjdump"), x, library], capture_output=True, text=True, check=True).stdout for x in ("-lelf", "-lptx")
        ]
        wrong += disagreement(strata_pa.build_info()["cuda_archs"], architectures(*lists))
    compiler, mine = strata_pa.build_info()["nvcc"], v2_code(codes)
    hashes = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    if asked.write:
        hashes[compiler] = mine
        HASHES.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
    elif compiler not in hashes:
        wrong.append(f"ci/v2_code.json has no machine code for nvcc {compiler}")
    else:
        pinned = {arch: code for arch, code in hashes[compiler].items() if int(arch.removeprefix("sm_")) in archs}
        wrong += differences(f"that of ci/v2_code.json for nvcc {compiler}", mine, pinned)
    if asked.without_imma:
        other = read(asked.without_imma)
        wrong += differences("the same with and without imma", mine, v2_code(other))
        wrong += problems(other, expected(archs, without=INT8_KERNELS))
    for line in wrong:
        print(line)
    verdict = f"{len(wrong)} problems" if wrong else "as they should be"
    print(f"{library.name}: {len(codes)} kernels for {', '.join(f'sm_{a}' for a in archs)}: {verdict}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
