"""Compiles cuda/*.cu to one cubin per file and architecture, and the launcher, into build/gpu_kernels; prints registers and spills.

python build.py [sm_90 ...]
"""

import concurrent.futures
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu_kernels"
ALL = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
FLAGS = ("-std=c++17", "-O3", "--resource-usage", "-Werror", "all-warnings", "--split-compile", "2")


def compile_one(source, arch):
    target = OUT / f"{source.stem}.{arch}.cubin"
    run = subprocess.run(["nvcc", *FLAGS, "-cubin", f"-arch={arch}", "-o", target, source], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{source.name} {arch}\n{run.stdout}{run.stderr}")
    rows = []
    for part in re.split(r"Compiling entry function '", run.stderr)[1:]:
        numbers = [re.search(p, part) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack")]
        rows.append((part.split("'")[0], arch, *(int(m[1]) if m else 0 for m in numbers)))
    return rows


def main():
    archs = sys.argv[1:] or ALL
    OUT.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", OUT / "launcher.so", ROOT / "ci/gpu_kernels/launcher.cpp"], check=True
    )
    if "sm_90" in archs:
        compile_one(ROOT / "ci/gpu_kernels/divide.cu", "sm_90")
    sources = [s for s in sorted((ROOT / "cuda").glob("*.cu")) if s.stem[-1].isdigit()]  # not sm90a's, which exact_tile.py builds
    jobs = [(s, a) for s in sources for a in archs if int(a[3:]) >= int(s.stem.rsplit("sm", 1)[1])]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for rows in pool.map(lambda job: compile_one(*job), jobs):
            for name, arch, registers, spills, stack in rows:
                print(f"{name:24s} {arch:7s} {registers:4d} registers {spills:4d} spill bytes {stack:4d} stack bytes", flush=True)


if __name__ == "__main__":
    main()
