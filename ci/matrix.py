"""Reads ci/matrix.toml and checks it: what is built, for whom, by which compilers.

python ci/matrix.py    prints it as JSON; exit status 1 with the reason if something in it is wrong
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH = Path(__file__).with_name("matrix.toml")
LIBRARY = "strata_pa/lib/libstrata_pa.so"  # in a wheel


@dataclass(frozen=True)
class Matrix:
    """The file's entries; `hardware`: architecture -> the device that its kernels were run on."""

    cuda_architectures: tuple[int, ...]
    hip_wave32: tuple[str, ...]
    hip_wave64: tuple[str, ...]
    nvcc: str
    zig: str
    pythons: tuple[str, ...]
    numpys: tuple[str, ...]
    max_bytes: int
    platforms: dict[str, str]
    hardware: dict[str, str]

    def hip_architectures(self) -> tuple[str, ...]:
        return (*self.hip_wave64, *self.hip_wave32)

    def architectures(self) -> tuple[int | str, ...]:
        """Of both vendors."""
        return (*self.cuda_architectures, *self.hip_architectures())

    def tag(self, machine: str) -> str:
        """The wheels' platform tag: "manylinux_2_17_x86_64"."""
        return f"manylinux_{self.platforms[machine].replace('.', '_')}_{machine}"

    def identifiers(self) -> list[str]:
        """Every wheel's name for cibuildwheel: "cp310-manylinux_x86_64", ..."""
        return [f"cp{python.replace('.', '')}-manylinux_{machine}" for machine in self.platforms for python in self.pythons]


def strings(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(isinstance(x, str) and re.fullmatch(pattern, x) for x in value)


def string(pattern: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def mapping(key: str, pattern: str) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, dict)
        and bool(value)
        and all(re.fullmatch(key, k) and isinstance(v, str) and re.fullmatch(pattern, v) for k, v in value.items())
    )


def ascending(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int and 50 <= x < 200 for x in value) and value == sorted({*value})


# Each entry: its table, what it has to be in words, and the check.
ENTRIES: dict[str, tuple[str, str, Callable[[object], bool]]] = {
    "cuda_architectures": ("architectures", "ascending numbers such as 90", ascending),
    "hip_wave32": ("architectures", "AMD's names", strings("gfx[0-9a-f]+")),
    "hip_wave64": ("architectures", "AMD's names", strings("gfx[0-9a-f]+")),
    "nvcc": ("compilers", 'a version such as "13.0"', string(r"\d+\.\d+")),
    "zig": ("compilers", 'a version such as "0.17.1"', string(r"\d+\.\d+\.\d+")),
    "pythons": ("wheels", 'versions such as "3.12" or "3.14t"', strings(r"3\.\d+t?")),
    "numpys": ("wheels", 'versions such as "2.0", and "newest"', strings(r"\d+\.\d+|newest")),
    "max_bytes": ("wheels", "a number of bytes", lambda value: type(value) is int and value > 0),
    "platforms": ("wheels", 'machines and their glibc, such as x86_64 = "2.17"', mapping("x86_64|aarch64", r"2\.\d+")),
    "hardware": ("", "architectures and devices", mapping(r"\d+|gfx[0-9a-f]+", ".+")),
}


def checked(document: dict[str, Any]) -> Matrix:
    """The matrix of a parsed file.

    Raises:
        ValueError: an entry is missing, unknown or not what it has to be.
    """
    values: dict[str, Any] = {}
    left = {table: dict(entries) for table, entries in document.items() if isinstance(entries, dict)}
    if unknown := set(document) - set(left):
        raise ValueError(f"{', '.join(sorted(unknown))}: every entry belongs into a table")
    for name, (table, words, right) in ENTRIES.items():
        place = left if not table else left.get(table, {})
        if name not in place:
            raise ValueError(f"{table or 'the file'} has no {name}")
        value = place.pop(name)
        if not right(value):
            raise ValueError(f"{name} is {value!r}, it has to be {words}")
        values[name] = tuple(value) if isinstance(value, list) else value
    if unknown := {f"{table}.{name}" for table, entries in left.items() for name in entries or [""]} - {
        f"{e[0]}." for e in ENTRIES.values()
    }:
        raise ValueError(f"unknown entries: {', '.join(sorted(unknown))}")
    matrix = Matrix(**values)
    if unlisted := set(matrix.hardware) - set(map(str, matrix.architectures())):
        raise ValueError(f"hardware: {', '.join(sorted(unlisted))} is not among the architectures")
    if twice := {python for python in matrix.pythons if matrix.pythons.count(python) > 1}:
        raise ValueError(f"pythons: {', '.join(sorted(twice))} stands there twice")
    return matrix


def load(path: Path = PATH) -> Matrix:
    """The checked matrix.

    Raises:
        ValueError: the file is no TOML, or as `checked` says.
    """
    try:
        return checked(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # TOMLDecodeError is one
        raise ValueError(f"{path.name}: {error}") from None


if __name__ == "__main__":
    try:
        print(json.dumps(dataclasses.asdict(load()), indent=1))
    except ValueError as error:
        sys.exit(str(error))
