"""Runs an installed wheel on this machine's GPU: selftest and the tests of tests/gpu; writes what ci/matrix_record.py reads.

    python ci/wheel_on_gpu.py WHEEL REPORT

Without network: the wheel is unpacked, and NumPy, rich, pytest and what tests/gpu uses have to be there already.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SELFTEST = "import json, strata_pa; print(json.dumps([[c.name, c.status, c.detail] for c in strata_pa.selftest().checks]))"
LATE = """
import json, os, strata_pa
before = [line for line in open("/proc/self/maps") if "libcuda" in line]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(json.dumps({"mapped": len(before), "devices": [d["device"] for d in strata_pa.capabilities()["devices"]]}))
"""


def main() -> int:
    wheel, report = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    query = "name,compute_cap,driver_version"
    card = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    result: dict = {
        "card": dict(zip(query.split(","), (x.strip() for x in card.stdout.splitlines()[0].split(",")), strict=True)),
        "wheel": wheel.name,
    }
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
        env = dict(os.environ, PYTHONPATH=folder)

        def python(*arguments: object) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, *map(str, arguments)]
            return subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

        checks = json.loads(python("-c", SELFTEST).stdout.splitlines()[-1])
        result["checks"] = checks
        found = [re.fullmatch(r"cuda:0 (\w+)", name) for name, _, _ in checks]
        result["kernels"] = {match[1]: status for match, (_, status, _) in zip(found, checks, strict=True) if match}
        result["CUDA_VISIBLE_DEVICES set after the import"] = late = json.loads(python("-c", LATE).stdout.splitlines()[-1])
        done = python(
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
            "-m",
            "gpu",
            ROOT / "tests" / "gpu",
        )
        result["tests/gpu"] = done.stdout.strip().splitlines()[-1].strip("= ")
        installed = python(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, ROOT / "tests" / "wheel"
        )
        result["tests/wheel"] = installed.stdout.strip().splitlines()[-1].strip("= ")
    report.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    wrong = {k: v for k, v in result["kernels"].items() if v != "ok"}
    if done.returncode or installed.returncode:
        print(done.stdout[-6000:], installed.stdout[-4000:])
    return bool(done.returncode or installed.returncode or wrong or not result["kernels"] or late != {"mapped": 0, "devices": ["cpu"]})


if __name__ == "__main__":
    sys.exit(main())
