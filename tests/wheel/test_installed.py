"""How an installed wheel behaves: in processes of its own, without a GPU's driver, with forks, spawned processes and many threads."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

import strata_pa

HERE = Path(__file__).resolve().parent
# No GPU's driver, also where there is one.
ABSENT = {"STRATA_PA_CUDA_DRIVER": "/nonexistent/libcuda.so.1", "STRATA_PA_HIP_DRIVER": "/nonexistent/libamdhip64.so"}

PROBLEM = """
import numpy as np, strata_pa
rng = np.random.default_rng(1)
k, k_scale = strata_pa.quantize_kv(rng.standard_normal((19, 2, 4, 64), np.float32))
v, v_scale = strata_pa.quantize_kv(rng.standard_normal((19, 2, 4, 64), np.float32))
kv = strata_pa.PagedKV(k, v, k_scale, v_scale, rng.permutation(19).astype(np.int32))
q = rng.standard_normal((9, 4, 64), np.float32)
def answer(kernel="exact", **options):
    return strata_pa.prompt_attention(q, kv, kernel=kernel, **options).tobytes()
"""


def python(code, *arguments, timeout=120, **variables):
    """The finished process; it has no STRATA_ variable but those given."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("STRATA_")} | variables
    command = [sys.executable, *arguments, "-c", code] if code else [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


def succeeds(done):
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def problem():
    names = {}
    exec(PROBLEM, names)
    return names


def test_golden_bytes():
    result = json.loads(succeeds(python(None, str(HERE / "digests.py"), **ABSENT)))
    assert sorted(result["right"]) == ["exact", "fp32", "imma"]


def test_without_a_driver():
    """The CPU works, `info` and `doctor` say what is missing, and that is no failure."""
    assert "ok" in succeeds(python(PROBLEM + "print('ok' if len(answer()) == 9 * 4 * 64 * 4 else 'wrong')", **ABSENT))
    facts = json.loads(succeeds(python(None, "-m", "strata_pa", "info", "--json", **ABSENT)))
    assert [d["device"] for d in facts["devices"]] == ["cpu"]
    report = succeeds(python(None, "-m", "strata_pa", "doctor", **ABSENT))
    for archs, name in (("cuda_archs", "CUDA"), ("hip_archs", "HIP")):
        assert (f"the {name} driver cannot be opened" in report) == bool(strata_pa.build_info()[archs])


DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
int cuDriverGetVersion(int *v) { *v = atoi(getenv("FAKE_VERSION")); return 0; }
int cuGetErrorName(int s, const char **n) { *n = "FAKE"; return 0; }
int cuGetErrorString(int s, const char **n) { *n = "fake"; return 0; }
int cuInit(unsigned f) { fprintf(stderr, "cuInit sees %s\n", getenv("CUDA_VISIBLE_DEVICES")); return 100; }
"""
OTHERS = """
cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuCtxPushCurrent_v2 cuCtxPopCurrent_v2
cuModuleLoadData cuModuleGetFunction cuFuncLoad cuFuncGetAttribute cuFuncSetAttribute cuLaunchKernel cuThreadExchangeStreamCaptureMode
cuPointerGetAttribute cuMemAlloc_v2 cuMemFree_v2 cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuStreamSynchronize cuStreamWaitEvent cuEventCreate
cuEventDestroy_v2 cuEventRecord cuEventElapsedTime
"""


@pytest.fixture(scope="module")
def no_device(tmp_path_factory):
    """Variables for a driver of the version in FAKE_VERSION that finds no device; its cuInit tells CUDA_VISIBLE_DEVICES."""
    if not strata_pa.build_info()["cuda_archs"]:
        pytest.skip("this build is without CUDA")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "g++"))), None)
    if not compiler:
        pytest.skip("no C compiler is here")
    folder = tmp_path_factory.mktemp("driver")
    source = DRIVER + "".join(f"int {name}(void) {{ return 999; }}\n" for name in OTHERS.split())
    (folder / "driver.c").write_text(source)
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return ABSENT | {"STRATA_PA_CUDA_DRIVER": str(folder / "libcuda.so.1")}


MAPS = """
def maps():
    return sorted({line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps") if "libcuda" in line or "libamdhip" in line})
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_import_opens_no_driver(no_device):
    """Nor does a call on the CPU, so variables such as CUDA_VISIBLE_DEVICES may still be set; the first look for devices does."""
    code = MAPS + PROBLEM + "seen = [maps()]; answer(); seen.append(maps()); strata_pa.capabilities(); print([*seen, maps()])"
    done = python(code, FAKE_VERSION="13000", **no_device)
    assert (done.returncode, done.stdout) == (0, "[[], [], ['libcuda.so.1']]\n")


def test_a_driver_too_old_for_the_images(no_device):
    done = python(None, "-m", "strata_pa", "doctor", FAKE_VERSION="11040", **no_device)
    assert done.returncode == 1
    assert "supports CUDA 11.4" in done.stdout
    assert f"needs >= {strata_pa.build_info()['nvcc'].partition('.')[0]}.0" in done.stdout
    assert "cuInit" not in done.stderr


def test_variables_of_the_driver_may_change_after_the_import(no_device):
    """The driver is started by the first call that asks for devices, not before."""
    code = (
        PROBLEM
        + """
import os, sys
answer()
print("before", file=sys.stderr, flush=True)
os.environ["CUDA_VISIBLE_DEVICES"] = "7"
print([d["device"] for d in strata_pa.capabilities()["devices"]])
"""
    )
    done = python(code, FAKE_VERSION="13000", **no_device)
    assert (done.returncode, done.stdout) == (0, "['cpu']\n")
    assert done.stderr.splitlines()[:2] == ["before", "cuInit sees 7"]


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_children(start, tmp_path):
    """After calls in the parent, with threads."""
    code = (
        PROBLEM
        + f"""
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of a fork beside threads

def child(queue):
    queue.put(answer(num_threads=2))

if __name__ == "__main__":
    want = answer(num_threads=2)
    context = multiprocessing.get_context({start!r})
    queue = context.Queue()
    children = [context.Process(target=child, args=(queue,)) for _ in range(2)]
    for c in children: c.start()
    got = [queue.get(timeout=60) for _ in children]
    for c in children: c.join(60)
    assert answer(num_threads=2) == want
    print([x == want for x in got], [c.exitcode for c in children])
"""
    )
    script = tmp_path / "script.py"  # a spawned child imports the main module from its file
    script.write_text(code)
    assert succeeds(python(None, str(script))).strip() == "[True, True] [0, 0]"


def test_eight_threads(problem):
    """100 calls each, at once, with every kernel: one answer."""
    answer = problem["answer"]
    want = {kernel: answer(kernel) for kernel in ("fp32", "imma", "exact")}
    wrong, gate = [], threading.Barrier(8)

    def work():
        gate.wait()
        for i in range(100):
            kernel = ("fp32", "imma", "exact")[i % 3]
            if answer(kernel, num_threads=1 + i % 2) != want[kernel]:
                wrong.append(kernel)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has the GIL")
def test_the_gil_stays_off():
    code = PROBLEM + "import sys; answer(num_threads=2); print(sys._is_gil_enabled())"
    assert succeeds(python(code, "-X", "gil=0")).strip() == "False"
    assert succeeds(python(code)).strip() == "False"  # a module that did not declare itself would have switched it on


def test_numpy_arrays_of_this_version(problem):
    """Reads and writes in place, also through a view."""
    q, kv = problem["q"], problem["kv"]
    out = np.full((9, 8, 64), np.nan, np.float32)[:, ::2]
    assert strata_pa.prompt_attention(q, kv, kernel="exact", out=out) is out
    assert out.tobytes() == problem["answer"]()
