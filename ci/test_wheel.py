"""Tests a wheel as users have it: installed in fresh virtual environments, from a folder outside the source tree.

    python ci/test_wheel.py WHEEL [--python PYTHON] [--json FILE]
    python ci/test_wheel.py WHEEL --machine aarch64 --root DIR     under qemu-user, in an extracted Debian with python3.x

- tests/wheel/ with each NumPy of ci/matrix.toml that has a wheel for the Python;
- where qemu-x86_64 is: every path that a CPU without AVX2 has gives the golden bytes, and none stops at an unknown instruction;
- on another machine: the golden bytes under qemu-user.

Exit status 1 with the reason if something fails; the JSON file says what was run.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import matrix

ROOT = Path(__file__).resolve().parent.parent
DIGESTS = ROOT / "tests" / "wheel" / "digests.py"
OLD_CPU = "Nehalem"  # SSE4.2, no AVX


class Failed(Exception):
    """A check of the wheel."""


def run(*command: object, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # OPENBLAS_CORETYPE would force instructions on NumPy that an emulated CPU has not.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("STRATA_", "PYTHON", "OPENBLAS_"))} | variables
    return subprocess.run([str(c) for c in command], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def succeeds(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise Failed(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def requirement(numpy: str) -> str:
    return "numpy" if numpy == "newest" else f"numpy=={numpy}.*"


def installed(python: Path, wheel: Path, numpy: str, folder: Path) -> Path | None:
    """A fresh environment's Python; None: this NumPy has no wheel for it."""
    succeeds(run(python, "-m", "venv", folder / "venv", folder=folder))
    mine = folder / "venv" / "bin" / "python"
    pip = (mine, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:")
    done = run(*pip, wheel, requirement(numpy), "pytest>=8", folder=folder)
    if done.returncode and re.search(r"No matching distribution found for numpy", done.stdout):
        return None
    succeeds(done)
    return mine


def suite(python: Path, folder: Path) -> dict[str, object]:
    """tests/wheel and the command, from `folder`."""
    numpy = succeeds(run(python, "-c", "import numpy; print(numpy.__version__)", folder=folder)).strip()
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT)
    told = succeeds(run(python, *pytest, ROOT / "tests" / "wheel", folder=folder))
    where = succeeds(run(python, "-c", "import strata_pa; print(strata_pa.__file__)", folder=folder)).strip()
    if not Path(where).is_relative_to(folder):
        raise Failed(f"strata_pa was imported from {where}, not from the wheel")
    succeeds(run(folder / "venv" / "bin" / "strata-pa", "doctor", folder=folder))
    return {"numpy": numpy, "tests": told.strip().splitlines()[-1].strip("= ")}


def emulated(*command: object, folder: Path, **variables: str) -> dict[str, object]:
    """What digests.py found under an emulator."""
    return dict(json.loads(succeeds(run(*command, DIGESTS, folder=folder, **variables)).splitlines()[-1]))


def on_an_old_cpu(python: Path, folder: Path) -> dict[str, object]:
    """On a CPU without AVX2, by qemu-user."""
    result = emulated("qemu-x86_64", "-cpu", OLD_CPU, python.resolve(), folder=folder, PYTHONPATH=site_packages(python, folder))
    if result["isas"] != ["scalar"]:
        raise Failed(f"a {OLD_CPU} has the paths {result['isas']}")
    return result


def site_packages(python: Path, folder: Path) -> str:
    return succeeds(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)).strip()


def elsewhere(wheel: Path, machine: str, root: Path, folder: Path) -> dict[str, object]:
    """On another machine, by qemu-user and an extracted Debian: the wheel and NumPy's, unpacked."""
    minor, threads = re.search(r"-cp3\d+-cp3(\d+)(t?)-", wheel.name).groups()  # type: ignore[union-attr]
    python = f"python3.{minor}{threads}"
    pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary", ":all:", "--no-deps")
    pip += ("--platform", f"manylinux2014_{machine}", "--platform", f"manylinux_2_28_{machine}", "--python-version", f"3.{minor}")
    pip += ("--abi", f"cp3{minor}{threads}")
    succeeds(run(*pip, "-d", folder, "numpy", folder=folder))
    for file in (wheel, *folder.glob("numpy-*.whl")):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder / "site")
    qemu = shutil.which(f"qemu-{machine}") or shutil.which(f"qemu-{machine}-static")
    if not qemu:
        raise Failed(f"qemu-{machine} is not here: it is in Debian's qemu-user")
    binary = root / "usr" / "bin" / python
    result = emulated(qemu, "-L", root, binary, folder=folder, PYTHONPATH=str(folder / "site"), PYTHONHOME=str(root / "usr"))
    if threads and result["gil"]:
        raise Failed("it switched the GIL on")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--numpy", action="append", help="only these versions; default: those of ci/matrix.toml")
    parser.add_argument("--machine", help="another machine than this one")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    wheel = asked.wheel.resolve()
    result: dict[str, object] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            if asked.root:
                result["qemu"] = elsewhere(wheel, asked.machine, asked.root.resolve(), Path(name))
            else:
                runs, absent, last = [], [], None
                for i, numpy in enumerate(asked.numpy or matrix.load().numpys):
                    folder = Path(name) / str(i)
                    folder.mkdir()
                    python = installed(asked.python, wheel, numpy, folder)
                    if python:
                        runs.append(suite(python, folder))
                        last = python, folder
                    else:
                        absent.append(numpy)
                if not last:
                    raise Failed(f"no NumPy has a wheel for {asked.python}")
                result |= {"runs": runs, "numpy without a wheel": absent}
                if shutil.which("qemu-x86_64"):
                    result[f"qemu {OLD_CPU}"] = on_an_old_cpu(*last)
    except Failed as failure:
        print(f"{wheel.name}: {failure}")
        return 1
    print(f"{wheel.name}: {json.dumps(result)}")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
