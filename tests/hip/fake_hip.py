"""The fake AMD driver from Python, and the kernels of hip/ on the CPU."""

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

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


def include_flags(wave):
    """How the kernels are compiled for the CPU: as for AMD, without contraction or assumptions about what a pointer points to."""
    places = [x for place in (ROOT, ROOT / "tests", ROOT / "tests" / "hip") for x in ("-I", place)]
    options = ("-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=default", f"-DSTRATA_PA_WAVE={wave}")
    machine = (ROOT / "tests" / "hip" / "cpu_machine.cpp", ROOT / "tests" / "fibers.cpp")
    return SimpleNamespace(options=(*options, "-Wno-unknown-pragmas", *places), machine=machine)


class Machine:
    """Blocks of the kernels, a fiber for each thread, on a processor with waves of 32 or 64."""

    def __init__(self, folder, wave):
        flags = include_flags(wave)
        parts = [folder / f"{kernel}{wave}.o" for kernel in KERNELS]
        compile_part = ("g++", "-std=c++17", "-O1", "-fPIC", *flags.options, "-x", "c++", "-c")
        compiling = [subprocess.Popen([*compile_part, ROOT / "hip" / f"{part.stem[:-2]}.hip", "-o", part]) for part in parts]
        assert [process.wait() for process in compiling] == [0] * len(parts)
        self.lib = ctypes.CDLL(str(compile_library(folder / f"machine{wave}.so", *flags.machine, *parts, options=flags.options)))
        self.lib.run_on_cpu.restype = ctypes.c_char_p

    def run(self, launch, params):
        """A hook for launches: what the card would compute."""
        body = ctypes.cast(getattr(self.lib, launch.symbol.decode()), ctypes.c_void_p)
        went_wrong = self.lib.run_on_cpu(body, ctypes.byref(params), launch.grid, launch.block, launch.shared)
        assert not went_wrong, f"{launch.symbol.decode()}: {went_wrong.decode()}"
