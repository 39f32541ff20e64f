"""Finds architectures that are named in code: the lists in ci/matrix.toml are the only ones.

python ci/audit_literals.py    prints each place; exit status 1 if there is one

Looked at: what is built and shipped, and what builds and audits it. Comments and docstrings may name architectures, kernel files in their
names (v2_sm80), and so may the documentation and the tests. The programs in ci/gpu_kernels try out kernels on one card and are left out.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = "ci/matrix.toml"
LOOKED_AT = (".ci", ".github", "ci", "core", "cpu", "cuda", "hip", "include", "python", "CMakeLists.txt", "pyproject.toml")
LEFT_OUT = ("ci/gpu_kernels",)
NAMED = re.compile(r"(?<![A-Za-z0-9_])(?:sm_|compute_|gfx)[0-9]\w*")
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
HASH_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*")


def blank(match: re.Match[str]) -> str:
    """Nothing but the line ends."""
    return "\n" * match[0].count("\n")


def python_code(text: str) -> str:
    """Without docstrings; comments go later."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for i in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[i] = ""
    return "\n".join(lines)


def code(name: str, text: str) -> str:
    """The text of a file without its comments, line by line."""
    if name.endswith((".cpp", ".h", ".cu", ".cuh", ".S", ".c", ".hip")):
        return C_COMMENT.sub(blank, text)
    if name.endswith((".py", ".pyi")) or text.startswith("#!/usr/bin/env python"):
        text = python_code(text)
    return HASH_COMMENT.sub(blank, text)


def literals(name: str, text: str) -> Iterator[str]:
    """Every place of a file that names an architecture."""
    for i, line in enumerate(code(name, text).split("\n"), 1):
        for match in NAMED.finditer(line):
            yield f"{name}:{i}: {match[0]}"


def files() -> Iterator[Path]:
    for place in LOOKED_AT:
        path = ROOT / place
        for found in sorted(path.rglob("*")) if path.is_dir() else [path]:
            inner = found.relative_to(path).parts
            if found.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inner):  # tools' own
                yield found


def main() -> int:
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name == LIST or name.startswith(LEFT_OUT) or path.suffix in (".md", ".json", ".npz", ".pyc", ".so"):
            continue
        found += literals(name, path.read_text(encoding="utf-8"))
    for line in found:
        print(f"{line} is named in code; {LIST} has the lists")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
