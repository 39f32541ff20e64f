"""Compiles the GPU images once, to be handed to the builds of every wheel (-C cmake.define.STRATA_PA_IMAGES=FOLDER/cuda).

    python ci/build_images.py FOLDER

The compiler comes from PyPI, by the build requirements in pyproject.toml; g++ has to be there. Images in FOLDER/cuda are kept: the build
that takes them refuses those of other sources.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements() -> list[str]:
    """The build requirements of pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"])


def build(python: Path, folder: Path) -> Path:
    """Compiles them with the tools of a Python that has the build requirements, cmake and ninja; returns the folder of the images.

    Raises:
        subprocess.CalledProcessError: a command failed; `output` is what it printed.
    """
    images = folder / "cuda"
    if (images / "images.cmake").exists():
        return images
    where = "import nvidia, pathlib; print(next(p for r in nvidia.__path__ if (p := pathlib.Path(r) / 'cu13' / 'bin' / 'nvcc').exists()))"
    nvcc = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "CMAKE_GENERATOR": "Ninja"}
    options = ["-DSTRATA_PA_PYTHON=OFF", "-DSTRATA_PA_CUDA=ON", f"-DSTRATA_PA_NVCC={nvcc}"]
    targets = ["strata_pa_images"]
    where = "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
    zig = subprocess.run([python, "-c", where], capture_output=True, text=True)
    if zig.returncode == 0:  # a build requirement where AMD's kernels are built
        options += ["-DSTRATA_PA_HIP=ON", f"-DSTRATA_PA_ZIG={zig.stdout.strip()}"]
        targets += ["strata_pa_hip_images"]
    for command in (("-S", ROOT, "-B", folder, *options), ("--build", folder, "--target", *targets)):
        subprocess.run(["cmake", *command], env=env, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return images


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    tools = folder / "tools"
    python = tools / "bin" / "python"
    try:
        if not (folder / "cuda" / "images.cmake").exists():
            subprocess.run([sys.executable, "-m", "venv", tools], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *requirements(), "cmake", "ninja"], check=True)
        print(build(python, folder))
    except subprocess.CalledProcessError as error:
        print(f"{error}\n{error.output or ''}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
