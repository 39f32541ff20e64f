"""Writes portable.json: the SHA-256 of what fp32, imma and exact answer, by the referee, over the float32 output in C order.

Computes every case and prints its errors against float64.  Case names as arguments: only these (the others keep their digests).
--check: compares with portable.json instead of writing it.
"""

import argparse
import hashlib
import json
import pathlib
import sys

import inputs
import numpy as np

from strata_pa import reference

KERNELS = ("fp32", "imma", "exact")
PATH = pathlib.Path(__file__).with_name("portable.json")


def digest(out):
    return hashlib.sha256(np.ascontiguousarray(out).tobytes()).hexdigest()


def answers(name):
    """{kernel: digest} of one case; prints max|out - float64| / max|float64| over 16 query rows."""
    q, kv, options = inputs.arguments(inputs.load(name))
    rows = sorted({*np.linspace(0, len(q) - 1, 16).astype(int).tolist()})
    want = reference.attention_float64(q, kv, rows=rows, **options)
    digests = {}
    for kernel in KERNELS:
        out = reference.portable(kernel, q, kv, **options)
        digests[kernel] = digest(out)
        print(f"{name:12s} {kernel:6s} {np.abs(out[rows] - want).max() / np.abs(want).max():.3e}  {digests[kernel]}", flush=True)
    return digests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="case", help="default: all")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    names = asked.names or [*inputs.CASES, *inputs.REAL_LAYERS]
    known = json.loads(PATH.read_text())["cases"] if PATH.exists() else {}
    got = {name: answers(name) for name in names}
    if asked.check:
        wrong = [f"{name} {kernel}" for name in names for kernel in KERNELS if known.get(name, {}).get(kernel) != got[name][kernel]]
        sys.exit(f"not as in {PATH.name}: {', '.join(wrong)}" if wrong else 0)
    PATH.write_text(json.dumps({"cases": known | got}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
