"""Writes the tables of README.md from the installed package and ci/matrix.toml, those of docs/ and the plots from the records.

python ci/make_docs.py            rewrites the generated regions
python ci/make_docs.py --check    exit status 1 if one is out of date
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import accuracy
import distributed_model
import matrix
import report

import strata_pa


def support_region() -> str:
    """Where each row of the kernel table runs, and what problems it serves."""
    where, serves = [], {}
    for k in strata_pa.kernels():
        chosen = "when switched on" if k["opt_in"] else "by default"
        where.append([f"`{k['name']}`", k["needs"], chosen, "the same everywhere" if k["portable"] else "one vendor's"])
        least, most = k["heads_per_kv"]
        heads = str(least) if least == most else f"{least} to {most}"
        lists = [", ".join(map(str, k[key])) for key in ("head_dims", "groups", "granularities", "dtypes")]
        serves.setdefault((*lists[:2], heads, *lists[2:]), {})[f"`{k['name']}`"] = None
    problems = [[", ".join(names), *columns] for columns, names in serves.items()]
    return "\n\n".join(
        [
            report.table(["kernel", "runs on", "chosen", "its bytes"], where),
            report.table(["kernel", "head_dim", "dims per scale", "query heads per KV head", "granularity of ids", "q"], problems),
        ]
    )


def platforms_region() -> str:
    """What wheels there are, and which architectures are in them."""
    limits = matrix.load()
    linux = ", ".join(f"{machine} (glibc {glibc} or newer)" for machine, glibc in limits.platforms.items())
    cards = [
        f"sm_{arch}" + (f" (run on an {limits.hardware[str(arch)]})" if str(arch) in limits.hardware else "")
        for arch in limits.cuda_architectures
    ]
    rows = [
        ["Python", ", ".join(limits.pythons)],
        ["Linux", linux],
        ["NumPy", f"{limits.numpys[0]} or newer"],
        ["NVIDIA, machine code for", ", ".join(cards)],
        ["NVIDIA, driver for", f"CUDA {limits.nvcc} or newer"],
        ["AMD, machine code for", ", ".join(limits.hip_architectures()) + " (x86_64 only; not run on a card)"],
        ["AMD, runtime of", "ROCm 6.0 or newer"],
    ]
    return report.table(["", "a wheel serves"], rows)


def matrix_region() -> str:
    """Every cell of the matrix, from its newest record."""
    path = max(report.RECORDS.glob("matrix_*.json"), default=None)
    if not path:
        return "No record yet."
    record = json.loads(path.read_text(encoding="utf-8"))
    yes = {True: "yes", False: "no"}
    wheels = []
    for name, cell in record["wheels"].items():
        size = f"{cell['bytes'] / 1e6:.1f}" if cell["bytes"] else ""
        run = cell["run"] if isinstance(cell["run"], str) else "; ".join(cell["run"])
        wheels.append([f"`{name}`", yes[cell["built"]], yes[cell["audited"]], size, run])
    limits = matrix.load()
    cuda = kernel_table(record["kernels"], [f"sm_{arch}" for arch in limits.cuda_architectures])
    hip = kernel_table(record["kernels"], limits.hip_architectures())
    return "\n\n".join(
        [
            f"From `{path.relative_to(report.ROOT)}`, {record['date'][:10]}, commit {record['commit'][:12]}; later changes are not in it.",
            report.table(["wheel", "built", "audited", "MB", "tested with"], wheels),
            "Kernels in the wheels, by architecture: a device is one that they were run on; audited: built and audited, not run. "
            "`exact_rows`, `exact_tile` and `exact_part` are forms of `exact`."
            + "".join(f" `{name}` was changed after it had run on a device." for name in record["changed"]),
            cuda,
            hip,
        ]
    )


def kernel_table(cells: dict[str, dict], archs: Sequence[str]) -> str:
    """A row for each architecture, a column for each kernel that any of them has."""
    names = list(dict.fromkeys(name for key in cells for name, arch in [key.split()] if arch in archs))

    def said(cell: dict | None) -> str:
        return "" if cell is None else cell["run"] if cell["run"] != "not run" else "audited" if cell["audited"] else "no"

    return report.table(
        ["", *(f"`{name}`" for name in names)], [[arch, *(said(cells.get(f"{name} {arch}")) for name in names)] for arch in archs]
    )


def environment_region() -> str:
    rows = [[f"`{v['name']}`", v["values"], v["meaning"]] for v in strata_pa.environment_variables()]
    return report.table(["variable", "values", "meaning"], rows)


def documents() -> dict[Path, dict[str, str]]:
    """Every page with generated regions."""
    readme = {"support": support_region(), "platforms": platforms_region(), "environment": environment_region()}
    building = {"matrix": matrix_region()}
    mine = {report.ROOT / "README.md": readme, report.ROOT / "docs" / "building.md": building}
    return {**mine, **accuracy.documents(), **report.documents(), **distributed_model.documents()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="rewrite nothing; exit status 1 if a region is out of date")
    check = parser.parse_args().check
    return report.update(documents(), check) | report.update_plots(check)


if __name__ == "__main__":
    sys.exit(main())
