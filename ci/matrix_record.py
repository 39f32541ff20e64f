"""Writes the record of the matrix: every cell as built, audited, and run on what, or not run.

    python ci/matrix_record.py --wheels REPORT ... [--gpu RECORD ...] --record FILE

REPORTs are what ci/wheels wrote, RECORDs what ci/gpu wrote. The images are the installed package's, one of the wheels (needs cuobjdump).
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
import audit_images
import matrix

NOT_RUN = "not run"


def wheels(limits: matrix.Matrix, reports: Iterable[dict]) -> dict[str, dict]:
    """What the reports say of each wheel of the matrix, and of others that they tell of."""
    told = {f"cp{cell['python'].replace('.', '')}-manylinux_{cell['machine']}": cell for report in reports for cell in report.values()}
    cells: dict[str, dict] = {}
    for name in dict.fromkeys([*limits.identifiers(), *told]):
        cell = told.get(name, {})
        tested = cell.get("tested", {})
        how = [f"NumPy {run['numpy']}: {run['tests']}" for run in tested.get("runs", ())]
        how += [f"{key}: the golden bytes of {', '.join(x['right'])}" for key, x in tested.items() if key.startswith("qemu")]
        cells[name] = {
            "built": bool(cell.get("built")),
            "audited": bool(cell.get("audited")),
            "run": how or NOT_RUN,
            "bytes": cell.get("bytes"),
        }
    return cells


def kernels(
    codes: Iterable[audit_images.Code], problems: list[str], want: audit_images.Expected, ran: dict[str, dict[str, str]]
) -> dict[str, dict]:
    """For each kernel and architecture; `ran`: architecture -> {kernel: device}."""
    built = {(code.symbol, code.arch) for code in codes}
    cells: dict[str, dict] = {}
    for symbol in want.least:
        name = symbol.split("_")[1]
        for arch in want.archs:
            if not want.has(symbol, arch):
                continue
            cell = cells.setdefault(f"{name} sm_{arch}", {"built": True, "audited": True, "run": ran.get(str(arch), {}).get(name, NOT_RUN)})
            cell["built"] &= (symbol, arch) in built
            cell["audited"] &= cell["built"] and not any(line.startswith(f"{symbol} sm_{arch}:") for line in problems)
    return cells


def ran_on(records: Iterable[dict]) -> dict[str, dict[str, str]]:
    """architecture -> {kernel: device} of the kernels that passed selftest, where the tests on the GPU passed as well."""
    ran: dict[str, dict[str, str]] = {}
    for record in records:
        card, steps = record["card"], record["steps"]
        if not steps.get("test", {}).get("ok"):
            continue
        for name, status, _ in steps["selftest"]["checks"]:
            if status == "ok" and name.startswith("cuda:0 "):
                ran.setdefault(card["compute_cap"].replace(".", ""), {})[name.removeprefix("cuda:0 ")] = card["name"]
    return ran


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, nargs="+", required=True)
    parser.add_argument("--gpu", type=Path, nargs="*", default=[])
    parser.add_argument("--record", type=Path, required=True)
    asked = parser.parse_args()
    import strata_pa
    from strata_pa import _record

    limits = matrix.load()
    library = strata_pa.get_library()
    codes = audit_images.read(library)
    want = audit_images.expected(limits.cuda_architectures)
    wrong = audit_images.problems(codes, want)
    gpu = [json.loads(path.read_text()) for path in asked.gpu]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    record: dict = {
        "what": "the matrix: every wheel and every kernel x architecture as built, audited and run",
        **_record.header(["python", "ci/matrix_record.py", *(re.sub(r".*/", "", x) for x in sys.argv[1:])]),
        "commit": None if head.returncode else head.stdout.strip(),
        "wheels": wheels(limits, [json.loads(path.read_text()) for path in asked.wheels]),
        "kernels": kernels(codes, wrong, want, ran_on(gpu)),
        "gpu": [path.name for path in asked.gpu],
        "problems": wrong,
    }
    asked.record.write_text(json.dumps(record, indent=1) + "\n")
    for group in ("wheels", "kernels"):
        cells: dict[str, dict] = record[group]
        missing = [name for name, cell in cells.items() if not (cell["built"] and cell["audited"])]
        print(f"{len(cells)} {group}; not built or not audited: {', '.join(missing) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
