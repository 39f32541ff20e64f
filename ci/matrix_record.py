"""Writes the record of the matrix: every cell as built, audited, and run on what, or not run.

    python ci/matrix_record.py --wheels REPORT ... [--gpu RECORD ... [--changed KERNEL ...]] --record FILE

REPORTs are what ci/wheels wrote, RECORDs what ci/gpu wrote. The images are the installed package's, one of the wheels.
Needs cuobjdump, pyelftools and msgpack.
ci/make_docs.py makes the table in docs/building.md from the newest record.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import audit_code_objects
import audit_images
import matrix

NOT_RUN = "not run"
# Helpers of a form of exact, and the operations on partial results, are told of with what they belong to.
BELONGS = {"exact_tile": "exact_tile", "exact_rest": "exact_tile", "tile": "exact_tile", "rows": "exact_rows", "partial": "partial"}
# The forms that no selftest runs, by the tests on the GPU that compare their bytes with the CPU's (tests/gpu/, which ci/gpu runs as "all").
TESTED = {"test_tiled": ("exact_rows", "exact_tile"), "test_ranks": ("exact_part", "partial"), "test_quantize": ("quantize",)}


def wheels(limits: matrix.Matrix, reports: Iterable[dict]) -> dict[str, dict]:
    """What the reports say of each wheel of the matrix, and of others that they tell of."""
    told = {f"cp{cell['python'].replace('.', '')}-manylinux_{cell['machine']}": cell for report in reports for cell in report.values()}
    cells: dict[str, dict] = {}
    for name in dict.fromkeys([*limits.identifiers(), *told]):
        cell = told.get(name, {})
        tested = cell.get("tested", {})
        how = [f"NumPy {run['numpy']}: {re.sub(r' in [0-9.]+s.*', '', run['tests'])}" for run in tested.get("runs", ())]
        how += [f"{key}: the golden bytes of {', '.join(x['right'])}" for key, x in tested.items() if key.startswith("qemu")]
        cells[name] = {
            "built": bool(cell.get("built")),
            "audited": bool(cell.get("audited")),
            "run": how or NOT_RUN,
            "bytes": cell.get("bytes"),
        }
    return cells


def kernel_of(symbol: str) -> str:
    """The kernel, or the form of one: "fp32" of strata_fp32_d64_r4, "exact_tile" of strata_tile_union."""
    name = re.sub(r"_d\d.*", "", symbol.removeprefix("strata_"))
    return next((whole for start, whole in BELONGS.items() if name.startswith(start)), name)


def kernels(
    codes: Iterable[audit_images.Code], problems: list[str], want: audit_images.Expected, ran: dict[str, dict[str, str]]
) -> dict[str, dict]:
    """For each kernel and architecture; `ran`: architecture -> {kernel: device}."""
    built = {(code.symbol, code.arch) for code in codes}
    cells: dict[str, dict] = {}
    for symbol in want.least:
        name = kernel_of(symbol)
        for arch in want.archs:
            if not want.has(symbol, arch):
                continue
            cell = cells.setdefault(f"{name} sm_{arch}", {"built": True, "audited": True, "run": ran.get(str(arch), {}).get(name, NOT_RUN)})
            cell["built"] &= (symbol, arch) in built
            cell["audited"] &= cell["built"] and not any(line.startswith(f"{symbol} sm_{arch}:") for line in problems)
    return cells


def code_objects(found: list[dict], problems: list[str], archs: Iterable[str]) -> dict[str, dict]:
    """For each kernel and architecture of AMD, of which no card was at hand."""
    there = set(map(audit_code_objects.names, found))
    cells: dict[str, dict] = {}
    for arch in archs:
        for kernel in audit_code_objects.BLOCKS:
            built = (kernel, arch) in there
            audited = built and not any(line.startswith(f"{kernel} {arch}:") for line in problems)
            cells[f"{kernel} {arch}"] = {"built": built, "audited": audited, "run": NOT_RUN}
    return cells


def ran_on(records: Iterable[dict]) -> dict[str, dict[str, str]]:
    """architecture -> {kernel: device} of the kernels that passed selftest and the forms in TESTED, where the tests on the GPU passed."""
    ran: dict[str, dict[str, str]] = {}
    for record in records:
        card, steps = record["card"], record["steps"]
        tests = steps.get("test", {})
        if not tests.get("ok"):
            continue
        mine = ran.setdefault(card["compute_cap"].replace(".", ""), {})
        for name, status, _ in steps["selftest"]["checks"]:
            if status == "ok" and name.startswith("cuda:0 "):
                mine[name.removeprefix("cuda:0 ")] = card["name"]
        for files, counts in tests.items():
            if isinstance(counts, dict) and counts.get("passed"):
                for start, names in TESTED.items():
                    if files == "all" or any(file.startswith(start) for file in files.split()):
                        mine |= dict.fromkeys(names, card["name"])
    return ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, nargs="+", required=True)
    parser.add_argument("--gpu", type=Path, nargs="*", default=[])
    parser.add_argument("--changed", nargs="*", default=[], metavar="KERNEL", help="whose machine code is no longer what the RECORDs ran")
    parser.add_argument("--record", type=Path, required=True)
    asked = parser.parse_args()
    import strata_pa
    from strata_pa import _record

    limits = matrix.load()
    library = strata_pa.get_library()
    codes = audit_images.read(library)
    want = audit_images.expected(limits.cuda_architectures)
    wrong = audit_images.problems(codes, want)
    amd, amd_archs = audit_code_objects.read(library), limits.hip_architectures()
    amd_wrong = audit_code_objects.problems(amd, amd_archs)
    gpu = [json.loads(path.read_text()) for path in asked.gpu]
    ran = {arch: {name: card for name, card in cards.items() if name not in asked.changed} for arch, cards in ran_on(gpu).items()}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    record: dict = {
        "what": "the matrix: every wheel and every kernel x architecture as built, audited and run",
        **_record.header(["python", "ci/matrix_record.py", *(re.sub(r".*/", "", x) for x in sys.argv[1:])]),
        "commit": None if head.returncode else head.stdout.strip(),
        "wheels": wheels(limits, [json.loads(path.read_text()) for path in asked.wheels]),
        "kernels": kernels(codes, wrong, want, ran) | code_objects(amd, amd_wrong, amd_archs),
        "gpu": [path.name for path in asked.gpu],
        "changed": asked.changed,
        "problems": wrong + amd_wrong,
    }
    asked.record.write_text(json.dumps(record, indent=1) + "\n")
    for group in ("wheels", "kernels"):
        cells: dict[str, dict] = record[group]
        missing = [name for name, cell in cells.items() if not (cell["built"] and cell["audited"])]
        print(f"{len(cells)} {group}; not built or not audited: {', '.join(missing) or 'none'}")
    return bool(record["problems"])


if __name__ == "__main__":
    sys.exit(main())
