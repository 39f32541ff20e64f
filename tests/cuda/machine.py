"""The CUDA kernels' own source on the CPU: what a launch through the fake driver would compute. See cuda_machine.cpp."""

import ctypes
import itertools
import re
import subprocess
from pathlib import Path

import numpy as np
from fakes import Params, at, compile_library, fields, i32, u64

import strata_pa
from strata_pa._device import on_device, to_device
from strata_pa.attention import make_call

ROOT = Path(__file__).parent.parent.parent
FILES = {  # by how their kernels' names begin
    "strata_tile_": "exact_tile_sm90a",
    "strata_exact_tile_": "exact_tile_sm90a",
    "strata_exact_rest_": "exact_tile_sm90a",
    "strata_rows_": "exact_tile_sm80",
    "strata_exact_rows_": "exact_tile_sm80",
    "strata_exact_part_": "exact_part_sm80",
    "strata_exact_": "exact_sm80",
    "strata_imma_": "imma_sm80",
    "strata_fp32_": "fp32_sm75",
    "strata_partial_": "partial_sm75",
    "strata_quantize": "quantize_sm75",
}

# Its calls are answered by cuda_machine.cpp.
WATCHED = ("-fsanitize=thread", *("--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1"))


def compiler_options(sm):
    """As for a card: nothing is contracted, nothing assumed of what a pointer points to; what a kernel does not set is noise."""
    features = ["-D__CUDA_ARCH_FEAT_SM90_ALL"] if sm == 90 else []
    places = [x for place in (ROOT, ROOT / "tests", ROOT / "tests" / "hip", ROOT / "tests" / "cuda") for x in ("-I", place)]
    new = int(subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout.split(".")[0]) >= 12
    noise = ["-ftrivial-auto-var-init=pattern"] if new else []
    options = "-g -march=native -ffp-contract=off -fno-strict-aliasing -fno-extern-tls-init -fno-gnu-unique -fvisibility=default"
    return (*options.split(), "-Wno-unknown-pragmas", f"-D__CUDA_ARCH__={sm}0", *features, *noise, *places)


class Tiles(ctypes.Structure):
    """The beginning of cuda/tile_launch.h's."""

    _fields_ = (
        *fields(u64, "records words counts flags next"),
        *fields(i32, "queries tiles blocks record_tiles block_tiles window groups listed heads writers splits first_item"),
    )


class Rows(ctypes.Structure):
    """The beginning of cuda/exact_tile_sm80.h's."""

    _fields_ = (
        *fields(u64, "records words counts flags next cleared tops sums outs done cleared_bytes"),
        *fields(i32, "queries tiles item_tiles record_tiles first_item end_item splits phases groups record_bytes v_ahead heads"),
    )


def line_of(lib, place):
    """The line of code before a place that a library's function returns to."""
    command = ("addr2line", "-i", "-s", "-e", lib._name, hex(int(place, 16) - 1))
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()  # from the innermost function on
    return next((line.split()[0] for line in lines if not line.startswith(("cuda_on_cpu.h", "gpu.h", "cpu_machine.h"))), lines[0])


class Machine:
    """A card of the compute capability `sm`: a library for each file of kernels, made when a launch asks for it."""

    def __init__(self, folder, sm):
        self.folder, self.sm, self.options, self.libraries = folder, sm, compiler_options(sm), {}
        self.seeds = itertools.count(1)

    def compile(self, *, to, source, optimize):
        watched = WATCHED if source.suffix == ".cu" else ()
        command = ("g++", "-std=c++17", optimize, "-fPIC", *self.options, *watched, "-x", "c++", "-c", source, "-o", self.folder / to)
        return subprocess.Popen(command)

    def library(self, source):
        if source not in self.libraries:
            wanted = {source.stem: (source, "-O1")}
            if not self.libraries:
                wanted["fibers"] = ROOT / "tests" / "fibers.cpp", "-O2"
                wanted["machine"] = ROOT / "tests" / "cuda" / "cuda_machine.cpp", "-O3"
                wanted["order"] = ROOT / "tests" / "cuda" / "memory_order.cpp", "-O2"
            compiling = [self.compile(to=f"{name}.o", source=x, optimize=level) for name, (x, level) in wanted.items()]
            assert [process.wait() for process in compiling] == [0] * len(compiling)
            parts = [self.folder / f"{name}.o" for name in ("fibers", "machine", "order", source.stem)]
            lib = ctypes.CDLL(str(compile_library(self.folder / f"{source.stem}.so", *parts)))
            lib.run_on_cpu.restype = ctypes.c_char_p
            self.libraries[source] = lib
        return self.libraries[source]

    def run(self, lib, launch, parameters, owns=None):
        """The complaint, or ""."""
        kernel = ctypes.cast(getattr(lib, launch.symbol.decode()), ctypes.c_void_p)
        complaint = lib.run_on_cpu(
            kernel, launch.symbol, parameters, launch.grid, launch.block, launch.shared, next(self.seeds), owns
        ).decode()
        return re.sub(r"@(0x[0-9a-f]+)", lambda place: line_of(lib, place[1]), complaint)

    def hook(self, driver):
        """Launches on the driver's cards are computed. driver.flags: of each call in tiles, those left to the plain form; driver.plans: how
        the launches of exact_tile_sm80 go about it, (splits, phases, heads); driver.rounds: of sm_90's launches for cells that are split,
        (splits, first item)."""
        owns = ctypes.cast(driver.lib.fake_owns, ctypes.c_void_p)

        def launched(launch, parameters):
            symbol = launch.symbol.decode()
            file = next(file for start, file in FILES.items() if symbol.startswith(start))
            complaint = self.run(self.library(ROOT / "cuda" / f"{file}.cu"), launch, parameters, owns)
            assert not complaint, f"{symbol}: {complaint}"
            if symbol.startswith("strata_exact_rows_"):
                rows = Rows.from_address(parameters[1])
                driver.plans.append((rows.splits, rows.phases, rows.heads))
            if symbol.startswith("strata_exact_tile_scores_"):
                tiles = Tiles.from_address(parameters[1])
                driver.rounds.append((tiles.splits, tiles.first_item))
            kind = Tiles if symbol.startswith("strata_exact_rest_") else Rows if file == "exact_sm80" else None
            if kind and (lists := kind.from_address(parameters[1])).flags:
                count = lists.tiles * Params.from_address(parameters[0]).n_kv
                driver.flags.append(at(lists.flags, np.int32, (count,), (1,)).tolist())

        driver.hook_all(launched)


def on_card(driver, q, kv, kernel, options):
    """(out, lse) of the card; its workspace and results begin as noise."""
    there, kv_there, options_there = to_device(q, kv, options, "cuda:0")
    out = on_device(np.full(q.shape, np.nan, q.dtype), "cuda:0")
    lse = on_device(np.full(q.shape[:2], np.nan, np.float32), "cuda:0")
    call = make_call(there, kv_there, kernel=kernel, **options_there)
    size = strata_pa.plan(there, kv_there, kernel=kernel, **options_there).workspace_bytes
    workspace = on_device(np.full(size, 0xA5, np.uint8), "cuda:0") if size else None
    driver.forget()
    driver.flags, driver.plans, driver.rounds = [], [], []
    try:
        call.run(out, lse, False, workspace)
    except strata_pa.Error:
        raise driver.raised or None from None
    return out.read(), lse.read()
