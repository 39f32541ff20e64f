"""Audits wheels by their files alone: what their shared objects need and show, against the tag in their name and ci/matrix.toml.

    python ci/audit_wheel.py [--images DIR] [--complete] [--tag v1.2.3] WHEEL ...

Prints what is wrong, each in a line; the exit status is 1 if anything is. Looked at:

- the tag: symbol versions of GLIBC, GLIBCXX, CXXABI and the like, and libraries needed, within what that manylinux policy allows;
- nothing grafted: the module and libstrata_pa only, no CUDA, ROCm, BLAS, OpenMP or PyTorch library needed, no symbol of PyTorch;
- exports: the module's init function, and versioned strata_pa_ symbols of libstrata_pa; relative search paths; no executable stack;
- the wheel: the name's tags and version, the license, no tests, and the size.

--images: the images in a build's folder cuda/, and the AMD code objects in hip/ beside it, are in each wheel.
--complete: there is a wheel for every Python and platform of the matrix.
--tag: the release's tag names the version.

What the images hold is the business of ci/audit_images.py and ci/audit_code_objects.py.
Needs pyelftools, and auditwheel for its table of policies.
"""

import argparse
import importlib.resources
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

sys.path.insert(0, str(Path(__file__).resolve().parent))
import matrix
from matrix import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
MODULE = re.compile(r"strata_pa/_core\.cpython-(\d+t?)-(\w+)-linux-gnu\.so")
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}  # part of glibc
NEVER = re.compile(
    r"lib(?:cuda|nvidia|nv|cu[a-z]+|amdhip|hip|hsa|roc|torch|c10|openblas|blas|lapack|mkl|gomp|omp|iomp|onednn|dnnl|python)[\w.+-]*\.so.*"
)
TORCH = re.compile(r"^_ZNK?(?:2at|3c10|5torch|5caffe)|c10|torch")

OWN = re.compile(r"^_Z\w*9strata_pa")  # C++ of the package; the border between its two objects is C


@dataclass(frozen=True)
class Object:
    """What the dynamic linker sees of a shared object."""

    machine: str
    needed: tuple[str, ...]
    paths: tuple[str, ...]
    versions: frozenset[tuple[str, str]]  # of which library: ("libc.so.6", "GLIBC_2.17")
    wanted: frozenset[str]  # symbols from elsewhere
    exported: frozenset[str]
    unversioned: frozenset[str]  # of the exported ones
    stack: bool  # executable


def read(data: bytes) -> Object:
    """Of an ELF file."""
    elf = ELFFile(io.BytesIO(data))
    dynamic = elf.get_section_by_name(".dynamic")
    tags = list(dynamic.iter_tags()) if dynamic else []
    needs = elf.get_section_by_name(".gnu.version_r")
    versions = frozenset((library.name, entry.name) for library, entries in (needs.iter_versions() if needs else ()) for entry in entries)
    indices = elf.get_section_by_name(".gnu.version")
    wanted, exported, unversioned = set(), set(), set()
    symbols = elf.get_section_by_name(".dynsym")
    for i, symbol in enumerate(symbols.iter_symbols() if symbols else ()):
        if not symbol.name or symbol["st_shndx"] == "SHN_ABS" or symbol["st_info"]["bind"] == "STB_LOCAL":
            continue
        if symbol["st_shndx"] == "SHN_UNDEF":
            wanted.add(symbol.name)
        elif symbol["st_other"]["visibility"] in ("STV_DEFAULT", "STV_PROTECTED"):
            exported.add(symbol.name)
            if not indices or indices.get_symbol(i)["ndx"] == "VER_NDX_GLOBAL":
                unversioned.add(symbol.name)
    return Object(
        machine=MACHINES.get(elf["e_machine"], elf["e_machine"]),
        needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        paths=tuple(p for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")
                    for p in (tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath).split(":") if p),
        versions=versions,
        wanted=frozenset(wanted),
        exported=frozenset(exported),
        unversioned=frozenset(unversioned),
        stack=any(s["p_type"] == "PT_GNU_STACK" and s["p_flags"] & 1 for s in elf.iter_segments()),
    )  # fmt: skip


def policy(name: str) -> dict:
    """auditwheel's: {"symbol_versions": {machine: {"GLIBC": [...]}}, "lib_whitelist": [...]}."""
    table = json.loads((importlib.resources.files("auditwheel.policy") / "manylinux-policy.json").read_text(encoding="utf-8"))
    return next(entry for entry in table if entry["name"] == name)


def of_object(name: str, x: Object, machine: str, allowed: dict, own: set[str]) -> Iterator[str]:
    """What is wrong with one shared object; `own`: the libraries of the wheel itself."""
    if x.machine != machine:
        yield f"{name}: it is for {x.machine}, the tag says {machine}"
    known = allowed["symbol_versions"].get(machine, {})
    for library, version in sorted(x.versions):
        family, _, number = version.partition("_")
        if library not in own and number not in known.get(family, ()):
            yield f"{name}: needs {version}, which {allowed['name']} does not promise"
    for library in x.needed:
        if NEVER.fullmatch(library):
            yield f"{name}: needs {library}, which a wheel may not need"
        elif library not in own and library != LOADERS.get(machine) and library not in allowed["lib_whitelist"]:
            yield f"{name}: needs {library}, which {allowed['name']} does not promise"
    for symbol in sorted(x.wanted):
        if TORCH.search(symbol):
            yield f"{name}: wants PyTorch's symbol {symbol}"
        elif OWN.match(symbol):
            yield f"{name}: wants {symbol}, which nothing exports"
    init = "PyInit__core" if MODULE.fullmatch(name) else None
    if extra := sorted(s for s in x.exported if s != init and (init or not s.startswith("strata_pa_"))):
        yield f"{name}: exports {', '.join(extra[:5])}"
    if init and init not in x.exported:
        yield f"{name}: does not export {init}"
    if not init and x.unversioned:
        yield f"{name}: exports without a version: {', '.join(sorted(x.unversioned)[:5])}"
    for path in x.paths:
        if path != "$ORIGIN" and not path.startswith("$ORIGIN/"):
            yield f"{name}: searches {path}, which is not relative to the wheel"
    if x.stack:
        yield f"{name}: asks for an executable stack"


def of_platform(tags: frozenset[Tag], limits: matrix.Matrix) -> tuple[str, str, list[str]]:
    """The policy and the machine that the wheel's tags name, and what is wrong with the tags."""
    oldest: tuple[int, int, str] | None = None
    for tag in tags:
        if found := re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag.platform):
            entry = (int(found[1]), int(found[2]), found[3])
            oldest = min(oldest, entry) if oldest else entry
    if not oldest:
        return "", "", [f"its platform is {', '.join(sorted({t.platform for t in tags}))}, no manylinux_X_Y"]
    major, minor, machine = oldest
    wrong = []
    if machine not in limits.platforms:
        wrong.append(f"{machine} is not among the platforms of ci/matrix.toml")
    elif limits.platforms[machine] != f"{major}.{minor}":
        wrong.append(f"its tag promises glibc {major}.{minor}, ci/matrix.toml says {limits.platforms[machine]}")
    return f"manylinux_{major}_{minor}", machine, wrong


def problems(wheel: Path, limits: matrix.Matrix) -> list[str]:
    """Everything that is wrong with a wheel, each in a line."""
    name, number, _, tags = parse_wheel_filename(wheel.name)
    policy_name, machine, wrong = of_platform(tags, limits)
    if wheel.stat().st_size > limits.max_bytes:
        wrong.append(f"it has {wheel.stat().st_size} bytes, ci/matrix.toml allows {limits.max_bytes}")
    if (name, str(number)) != ("strata-pa", version()):
        wrong.append(f"it is {name} {number}, not strata-pa {version()}")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        objects = {n: read(data) for n in names if (data := file.read(n))[:4] == b"\x7fELF"}
    modules = [n for n in objects if MODULE.fullmatch(n)]
    wrong += [f"{n}: grafted, or not the package's" for n in objects if n not in modules and n != LIBRARY]
    wrong += [f"{n}: grafted" for n in names if ".libs/" in n and n not in objects]
    if len(modules) != 1 or LIBRARY not in objects:
        wrong.append(f"it has the modules {modules}, and {'a' if LIBRARY in objects else 'no'} {LIBRARY}")
    for module in modules:
        if f"cp{MODULE.fullmatch(module)[1]}" not in {tag.abi for tag in tags}:  # type: ignore[index]
            wrong.append(f"{module}: the wheel is tagged {', '.join(sorted({tag.abi for tag in tags}))}")
    for needed in ("strata_pa/py.typed", "strata_pa/__init__.py"):
        if needed not in names:
            wrong.append(f"it has no {needed}")
    if not any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", n) for n in names):
        wrong.append("it has no license")
    wrong += [f"{n}: belongs into no wheel" for n in names if not re.match(r"strata_pa/|strata_pa-[^/]+\.dist-info/|strata_pa\.libs/", n)]
    if policy_name:
        own = {Path(n).name for n in objects}
        wrong += [line for n, x in objects.items() for line in of_object(n, x, machine, policy(policy_name), own)]
    return wrong


def version() -> str:
    """The one in pyproject.toml."""
    (said,) = re.findall(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return str(said)


def missing(wheels: list[Path], limits: matrix.Matrix) -> list[str]:
    """What a release would lack, or have twice."""
    names = []
    for wheel in wheels:
        _, _, _, tags = parse_wheel_filename(wheel.name)
        _, machine, _ = of_platform(tags, limits)
        names.append(f"{next(iter(tags)).abi}-manylinux_{machine}")
    wrong = [f"there are {names.count(name)} wheels for {name}" for name in limits.identifiers() if names.count(name) != 1]
    return wrong + [f"{name} is not in ci/matrix.toml" for name in names if name not in limits.identifiers()]


def mistagged(tag: str) -> list[str]:
    """A release's tag is its version's."""
    return [] if tag == f"v{version()}" else [f"the tag is {tag}, the version {version()}"]


def lacking(wheel: Path, images: Path) -> list[str]:
    """The images of a build's folders cuda/ and hip/ that the wheel does not hold byte for byte; AMD's are for x86-64 only."""
    kinds = [(".nv_fatbin", images, "*.fatbin")]
    if wheel.stem.endswith("x86_64"):
        kinds.append((".hip_code_objects", images.parent / "hip", "*.co"))
    wrong = []
    with zipfile.ZipFile(wheel) as file:
        library = ELFFile(io.BytesIO(file.read(LIBRARY))) if LIBRARY in file.namelist() else None
    for name, folder, pattern in kinds:
        section = library.get_section_by_name(name) if library else None
        held, made = section.data() if section else b"", sorted(folder.glob(pattern))
        wrong += (
            [f"it does not hold {path.name}" for path in made if path.read_bytes() not in held] if made else [f"{folder} has no {pattern}"]
        )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--images", type=Path, metavar="DIR")
    parser.add_argument("--complete", action="store_true")
    parser.add_argument("--tag", metavar="v1.2.3")
    asked = parser.parse_args()
    limits = matrix.load()
    whole = (missing(asked.wheels, limits) if asked.complete else []) + (mistagged(asked.tag) if asked.tag else [])
    for line in whole:
        print(line)
    failed = bool(whole)
    for wheel in asked.wheels:
        wrong = problems(wheel, limits) + (lacking(wheel, asked.images) if asked.images else [])
        failed |= bool(wrong)
        for line in wrong:
            print(f"{wheel.name}: {line}")
        print(f"{wheel.name}: {f'{len(wrong)} problems' if wrong else 'as it should be'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
