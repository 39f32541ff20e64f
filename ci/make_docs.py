"""Writes the tables of README.md from the installed package, and those of docs/benchmarks.md from the records.

python ci/make_docs.py            rewrites the generated regions
python ci/make_docs.py --check    exit status 1 if one is out of date
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import report

import strata_pa


def support_region() -> str:
    """Where each row of the kernel table runs, and what problems it serves."""
    where, serves = [], {}
    for k in strata_pa.kernels():
        # A build may leave CUDA out; the version has it.
        built, chosen = "yes" if k["built"] or k["backend"] == "cuda" else "not yet", "when switched on" if k["opt_in"] else "by default"
        where.append([f"`{k['name']}`", k["needs"], built, chosen, "the same everywhere" if k["portable"] else "one vendor's"])
        least, most = k["heads_per_kv"]
        heads = str(least) if least == most else f"{least} to {most}"
        lists = [", ".join(map(str, k[key])) for key in ("head_dims", "groups", "granularities", "dtypes")]
        serves.setdefault((*lists[:2], heads, *lists[2:]), {})[f"`{k['name']}`"] = None
    problems = [[", ".join(names), *columns] for columns, names in serves.items()]
    return "\n\n".join(
        [
            report.table(["kernel", "runs on", "in this version", "chosen", "its bytes"], where),
            report.table(["kernel", "head_dim", "dims per scale", "query heads per KV head", "granularity of ids", "q"], problems),
        ]
    )


def environment_region() -> str:
    rows = [[f"`{v['name']}`", v["values"], v["meaning"]] for v in strata_pa.environment_variables()]
    return report.table(["variable", "values", "meaning"], rows)


def documents() -> dict[Path, dict[str, str]]:
    """Every page with generated regions."""
    return {report.ROOT / "README.md": {"support": support_region(), "environment": environment_region()}, **report.documents()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="rewrite nothing; exit status 1 if a region is out of date")
    return report.update(documents(), parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
