"""The machine of cpu_machine.cpp itself: it finds what would go wrong on a card, and does what a card does."""

import ctypes

import numpy as np
import pytest
from fake_hip import include_flags
from fakes import Params, compile_library

SOURCE = r"""
#include "cuda/query.cuh"
#include "hip/kernel.h"
using strata_pa::cuda::Params;
namespace strata_pa::hip {
static void shuffle(const Params& p) {
  const int x = __shfl_xor_sync(~0u, static_cast<int>(threadIdx.x) * 3, 5);
  static_cast<int*>(p.out)[threadIdx.x] = x + static_cast<int>(__ballot_sync(~0u, threadIdx.x % 3 == 0) & 0xff) * 1000;
}
static void other_half(const Params& p) {
  const int other = static_cast<int>(threadIdx.x + 32) & (machine::kWave - 1);
  static_cast<int*>(p.out)[threadIdx.x] = machine::permute(static_cast<int>(threadIdx.x), other);
}
static void not_all(const Params&) {
  if (threadIdx.x < 40) __syncthreads();
}
static void half_a_warp(const Params&) {
  if (threadIdx.x % 2) __ballot_sync(~0u, true);
}
static void past_the_end(const Params&) {
  extern __shared__ __align__(16) unsigned char raw_shared[];
  raw_shared[256 + threadIdx.x] = 1;
}
static void unset(const Params& p) {
  extern __shared__ __align__(16) unsigned char raw_shared[];
  static_cast<int*>(p.out)[threadIdx.x] = raw_shared[threadIdx.x];
}
static void ordered(const Params& p) {
  extern __shared__ __align__(16) unsigned char raw_shared[];
  raw_shared[threadIdx.x] = static_cast<unsigned char>(threadIdx.x);
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = raw_shared[63 - threadIdx.x];
}
}  // namespace strata_pa::hip
#define KERNEL(name) STRATA_PA_KERNEL(name, 64, strata_pa::hip::name)
KERNEL(shuffle) KERNEL(other_half) KERNEL(not_all) KERNEL(half_a_warp) KERNEL(past_the_end) KERNEL(unset) KERNEL(ordered)
"""


@pytest.fixture(scope="module", params=[32, 64])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    source = folder / "kernels.cpp"
    source.write_text(SOURCE)
    flags = include_flags(request.param)
    lib = ctypes.CDLL(str(compile_library(folder / "small.so", source, *flags.machine, options=flags.options)))
    lib.run_on_cpu.restype = ctypes.c_char_p

    def call(name):
        """(the complaint, out[64])"""
        out = np.full(64, -1, np.int32)
        params = Params(out=out.ctypes.data)
        complaint = lib.run_on_cpu(ctypes.cast(getattr(lib, name), ctypes.c_void_p), ctypes.byref(params), 1, 64, 256)
        return complaint.decode(), out

    call.wave = request.param
    return call


def test_exchanges_within_a_warp(run):
    complaint, out = run("shuffle")
    lanes = np.arange(64)
    low_bits = [sum((32 * warp + i) % 3 == 0 and 1 << i for i in range(8)) for warp in (0, 1)]
    assert not complaint
    assert out.tolist() == ((lanes ^ 5) * 3 + np.repeat(low_bits, 32) * 1000).tolist()


def test_the_other_half_of_a_wave_is_noise(run):
    complaint, out = run("other_half")
    lanes = np.arange(64)
    assert not complaint
    assert (out == lanes).all() if run.wave == 32 else not np.isin(out, lanes).any()


@pytest.mark.parametrize(("name", "who"), [("not_all", "40 (0, 1, 2, 3, "), ("half_a_warp", "32 (1, 3, 5, 7, ")])
def test_threads_that_wait_for_others_that_never_come(run, name, who):
    assert run(name)[0].startswith(f"its threads wait for each other: {who}")


def test_shared_memory(run):
    assert run("past_the_end")[0] == "it writes past its shared memory"
    assert (run("unset")[1] == 0xA5).all()
    complaint, out = run("ordered")
    assert not complaint
    assert out.tolist() == list(range(63, -1, -1))
