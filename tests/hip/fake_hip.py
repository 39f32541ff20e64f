"""The fake AMD driver from Python, and the kernels of hip/ on the CPU."""

import ctypes
import subprocess
from pathlib import Path

from fakes import FakeDriver, compile_library

import strata_pa

DRIVER = "STRATA_PA_HIP_DRIVER"
ROOT = Path(__file__).parent.parent.parent
BUILT = tuple(strata_pa.build_info()["hip_archs"])
KERNELS = ("fp32", "imma", "exact")
WAVES = {32: "gfx1100", 64: "gfx942"}  # one architecture for each


class Driver(FakeDriver):
    def __init__(self, library, folder, cards, version=60241133):
        super().__init__(library, folder)
        self.lib.fake_version(version)
        for arch in cards:
            self.lib.fake_card(arch.encode(), f"Card {arch}".encode())


class Machine:
    """Blocks of the kernels, a fiber for each thread, on a processor with waves of 32 or 64."""

    def __init__(self, folder, wave):
        path = folder / f"machine{wave}.so"
        # As the kernels are compiled for AMD: no contraction, no assumption about what a pointer points to.
        options = ("-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=default", f"-DSTRATA_PA_WAVE={wave}")
        include = ("-I", ROOT, "-I", ROOT / "tests", "-I", ROOT / "tests" / "hip", "-std=c++17", "-O1", "-fPIC")
        quiet = ("-Wno-unknown-pragmas",)
        parts = [folder / f"{kernel}{wave}.o" for kernel in KERNELS]
        compiling = [
            subprocess.Popen(["g++", *options, *include, *quiet, "-x", "c++", "-c", ROOT / "hip" / f"{kernel}.hip", "-o", part])
            for kernel, part in zip(KERNELS, parts, strict=True)
        ]
        assert [process.wait() for process in compiling] == [0] * len(parts)
        self.lib = ctypes.CDLL(str(compile_library(path, ROOT / "tests" / "hip" / "cpu_machine.cpp", *parts, options=(*options, *include))))
        self.lib.run_on_cpu.restype = ctypes.c_char_p

    def run(self, launch, params):
        """A hook for launches: what the card would compute."""
        body = ctypes.cast(getattr(self.lib, launch.symbol.decode()), ctypes.c_void_p)
        went_wrong = self.lib.run_on_cpu(body, ctypes.byref(params), launch.grid, launch.block, launch.shared)
        assert not went_wrong, f"{launch.symbol.decode()}: {went_wrong.decode()}"
