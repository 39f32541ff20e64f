"""The machine of cuda_machine.cpp itself: it does what a card does, and finds what would go wrong on one."""

import ctypes
import platform
import re

import numpy as np
import pytest
from fakes import Launch, Params
from machine import ROOT, Machine

SOURCE = r"""
#include "cuda/hopper.cuh"
using namespace strata_pa::cuda;
namespace strata_pa::cuda {
extern __shared__ __align__(1024) unsigned char raw_tile[];
}
static int* out(const Params& p) { return static_cast<int*>(p.out); }
static int tid() { return static_cast<int>(threadIdx.x); }
// A 128-byte-wide, or with `narrow` 64-byte-wide, row-major tile from the places `column` on, swizzled.
static void put(uint32_t at, int rows, const int8_t* x, int width) {
  for (int i = tid(); i < rows * 32; i += 128) {
    const int r = i / 32, c = i % 32;
    uint32_t to = r / 8 * 8 * width + r % 8 * width + c;
    to ^= to >> 3 & (width - 16);
    raw_tile[at + to] = static_cast<unsigned char>(x[i]);
  }
}
static uint64_t narrow(uint32_t at) { return at >> 4 | uint64_t{1} << 16 | uint64_t{32} << 32 | uint64_t{2} << 62; }
enum Slip { kNone, kNoFence, kNoProxyFence, kNoWait, kTouched, kChanged, kChangedHeld, kCrooked };
static void product(const Params& p, int width, Slip slip, bool held, bool is_unsigned = false) {
  put(0, 64, p.k, width), put(16384, 24, p.v, width);
  if (slip != kNoProxyFence) fence_async_shared();
  __syncthreads();
  int d[12];
  for (int& x : d) x = 7;
  uint32_t a[4];
  for (int r = 0; r < 4; ++r) std::memcpy(&a[r], p.k + (tid() / 32 * 16 + tid() % 32 / 4 + r % 2 * 8) * 32 + r / 2 * 16 + tid() % 4 * 4, 4);
  const uint32_t from = slip == kCrooked ? 16384 + width : 16384;
  const uint64_t b = width == 128 ? matrix(place_of_matrix(from)) : narrow(from);
  if (slip != kNoFence) wgmma_fence();
  if (!held) wgmma(d, width == 128 ? matrix(place_of_matrix(0)) : narrow(0), b, 1);
  else if (is_unsigned) wgmma_rs_s8u8(d, a, b, 1);
  else wgmma_rs(d, a, b, 1);
  wgmma_commit();
  if (slip == kTouched) d[3] = 0;
  if (slip == kChangedHeld && tid() == 70) ++a[2];
  __syncthreads();
  if (slip == kChanged && tid() == 5) raw_tile[16384] ^= 1;
  if (slip == kNoWait) wait_for<1>(d);
  else wait_for<0>(d);
  for (int u = 0; u < 12; ++u) out(p)[(tid() / 32 * 16 + tid() % 32 / 4 + (u & 2) * 4) * 24 + u / 4 * 8 + tid() % 4 * 2 + (u & 1)] = d[u];
  __syncthreads();
  wait_for<0>(d);
}
#define KERNEL(name) extern "C" void strata_##name(Params p)
KERNEL(wide) { product(p, 128, kNone, false); }
KERNEL(narrow) { product(p, 64, kNone, false); }
KERNEL(held) { product(p, 128, kNone, true); }
KERNEL(held_unsigned) { product(p, 64, kNone, true, true); }
KERNEL(no_fence) { product(p, 128, kNoFence, false); }
KERNEL(no_proxy_fence) { product(p, 128, kNoProxyFence, false); }
KERNEL(not_waited_for) { product(p, 128, kNoWait, false); }
KERNEL(touched) { product(p, 128, kTouched, false); }
KERNEL(changed) { product(p, 128, kChanged, false); }
KERNEL(changed_held) { product(p, 128, kChangedHeld, true); }
KERNEL(crooked) { product(p, 128, kCrooked, false); }

KERNEL(matrices) {
  uint32_t a[4], b[4];
  for (int i = tid(); i < 24 * 32; i += 128) raw_tile[i] = static_cast<unsigned char>(i < 512 ? p.k[i] : p.v[i - 512]);
  __syncthreads();
  if (tid() >= 32) return;
  const int lane = tid();
  ldmatrix4(a, shared_address(raw_tile + (lane & 15) * 32 + (lane >> 4) * 16));
  ldmatrix4(b, shared_address(raw_tile + 512 + (lane & 7) * 32 + (lane >> 3 & 1) * 16));
  int d[4], c[4] = {1, 1, 1, 1};
  mma_s8s8(d, a, b[0], b[1], c);
  add_u8s8(d, a, b[0], b[1]);
  for (int u = 0; u < 4; ++u) out(p)[(lane / 4 + (u & 2) * 4) * 8 + lane % 4 * 2 + (u & 1)] = d[u];
}
KERNEL(turned) {
  uint32_t r[4];
  if (tid() < 32) {
    for (int i = 0; i < 16; ++i) raw_tile[tid() * 16 + i] = static_cast<unsigned char>(p.k[tid() * 16 + i]);
    __syncwarp();
    ldmatrix4_trans(r, tid() * 16);
    for (int i = 0; i < 4; ++i) out(p)[tid() * 4 + i] = static_cast<int>(r[i]);
  }
}

static void copies(const Params& p, bool wait) {
  copy16(tid() * 16, p.k + tid() * 16);
  commit_copies();
  if (wait) land_copies<0>();
  else land_copies<1>();
  load_shared(reinterpret_cast<uint32_t*>(p.out)[tid()], tid() * 16);
}
KERNEL(copied) { copies(p, true); }
KERNEL(not_landed) { copies(p, false); }
static void bulk(const Params& p, bool wait, int arrivals, bool fence) {
  const uint32_t barrier = 8192;
  if (tid() == 0) barrier_init(barrier, 129);
  for (int i = 0; i < 4; ++i) __stcg(reinterpret_cast<int*>(p.lse) + tid() * 4 + i, tid() * 4 + i);
  if (fence) fence_async();
  __syncthreads();
  if (tid() == 0) {
    expect_bytes<2048>(barrier);
    bulk_copy<2048>(4096, p.lse, barrier);
  }
  copy16(tid() * 16, p.k + tid() * 16);
  arrive_when_copied(barrier);
  for (int i = 1; i < arrivals; ++i) barrier_arrive(barrier);
  if (wait) barrier_wait(barrier, 0);
  uint32_t x, y;
  load_shared(x, (127 - tid()) * 16), load_shared(y, 4096 + (127 - tid()) * 16);
  out(p)[tid()] = static_cast<int>(x ^ y);
  barrier_wait(barrier, 0);
}
KERNEL(bulk_copied) { bulk(p, true, 1, true); }
KERNEL(bulk_not_waited_for) { bulk(p, false, 1, true); }
KERNEL(bulk_not_fenced) { bulk(p, true, 1, false); }
KERNEL(too_many_arrivals) { bulk(p, true, 2, true); }

static void ordered_by(const Params& p, void (*order)()) {
  raw_tile[tid()] = static_cast<unsigned char>(tid());
  order();
  out(p)[tid()] = raw_tile[tid() ^ 1];
}
KERNEL(ordered) { ordered_by(p, [] { __syncwarp(); }); }
KERNEL(read_too_early) { ordered_by(p, [] { __shfl_xor_sync(~0u, 1, 1); }); }
static void reused(const Params& p, int parity) {
  const uint32_t full = 8192, empty = 8256;
  if (tid() == 0) barrier_init(full, 1), barrier_init(full + 8, 1), barrier_init(full + 16, 1), barrier_init(empty, 32);
  __syncthreads();
  for (int i = 0; i < 3; ++i) {
    if (tid() == 0) {
      if (parity >= 0) barrier_wait(empty, (i & 1) ^ parity);
      for (int j = 0; j < 32; ++j) raw_tile[j * 4] = static_cast<unsigned char>(i + j);
      barrier_arrive(full + i * 8);
    } else if (tid() >= 32 && tid() < 64) {
      barrier_wait(full + i * 8, 0);
      out(p)[tid() - 32] = raw_tile[(tid() - 32) * 4];
      barrier_arrive(empty);
    }
  }
}
KERNEL(passed_on) { reused(p, 1); }
KERNEL(passed_on_too_early) { reused(p, -1); }
KERNEL(lists) {
  int* const at = static_cast<int*>(p.out);
  if (tid() < 2) at[tid() + 64] = 1;
  if (tid() == 64) at[0] = at[65];
}
KERNEL(harmless) {
  if (tid() % 2) *reinterpret_cast<int*>(raw_tile) = 1;
  int* const bits = reinterpret_cast<int*>(raw_tile) + 1;
  if (~*const_cast<volatile int*>(bits) & 1 << tid() % 32) atomicOr(bits, 1 << tid() % 32);
  reinterpret_cast<uint16_t*>(raw_tile)[4 + tid()] = static_cast<uint16_t>(tid());
  __syncthreads();
  out(p)[tid()] = *reinterpret_cast<int*>(raw_tile + 4);
}
KERNEL(not_atomic) {
  int* const at = reinterpret_cast<int*>(raw_tile) + 1;
  if (~*at & 1 << tid() % 32) atomicOr(at, 1 << tid() % 32);
}
KERNEL(both_write) {
  if (tid() % 64 == 0) *reinterpret_cast<int*>(raw_tile) = tid();
}

// Blocks that tell each other something: the first one's last thread says it, the second one looks at it.
KERNEL(said_by_a_block) {
  if (blockIdx.x == 0 && tid() == 127) out(p)[200] = 1;
  if (blockIdx.x == 1 && tid() < 2) out(p)[tid()] = out(p)[200];
}
KERNEL(said_by_two_blocks) {
  if (tid() == 127) out(p)[200] = 1;
}
KERNEL(asked_for_by_one) {
  int* const said = static_cast<int*>(p.out) + 200;
  if (blockIdx.x == 0 && tid() == 127) *const_cast<volatile int*>(said) = 5;
  const bool any = __syncthreads_or(tid() == 3 && *const_cast<const volatile int*>(said) == 5);
  const bool none = __syncthreads_or(0);
  if (blockIdx.x == 1) out(p)[tid()] = any + 2 * none;
}

KERNEL(not_all) {
  if (tid() < 40) __syncthreads();
}
KERNEL(half_a_warp) {
  if (tid() % 2) __ballot_sync(~0u, true);
}
KERNEL(different) {
  if (tid() % 2) __syncwarp();
  else __ballot_sync(~0u, true);
}
KERNEL(warpgroup_alone) {
  if (tid() < 64) join_threads(3, 128);
}
KERNEL(announced) {
  if (tid() < 64) raw_tile[tid()] = static_cast<unsigned char>(tid()), announce_threads(3, 128);
  else join_threads(3, 128), out(p)[tid()] = raw_tile[tid() - 64];
}
KERNEL(past_the_end) { raw_tile[32768 + tid()] = 1; }
KERNEL(load_past_the_end) { load_shared(reinterpret_cast<uint32_t*>(p.out)[tid()], 32768); }
KERNEL(unset) {
  __shared__ int own[128];
  if (p.n_q) own[tid()] = p.n_q;  // never
  out(p)[tid()] = raw_tile[tid()] == 0xa5 && own[tid()] == static_cast<int>(0xa5a5a5a5);
}
KERNEL(given_and_taken) {
  if (tid() < 128) more_registers<152>();
  else fewer_registers<120>();
  out(p)[tid()] = 1;
}
KERNEL(registers) {
  if (tid() < 128) more_registers<256>();
}
KERNEL(not_allocated) { out(p)[tid()] = __ldg(p.ids); }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if platform.machine() != "x86_64":
        pytest.skip("the switch between fibers is written for x86-64")
    folder = tmp_path_factory.mktemp("small")
    (folder / "kernels.cu").write_text(SOURCE)
    machine = Machine(folder, 90)
    lib = machine.library(folder / "kernels.cu")
    rng = np.random.default_rng(3)
    arrays = {"k": rng.integers(-128, 128, (64, 32)).astype(np.int8), "v": rng.integers(-128, 128, (24, 32)).astype(np.int8)}

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t)
    def owns(address, size):
        return (address or 0) != 4096

    def call(name, times=1, block=128, grid=1):
        """(the complaints, out) of several runs in different orders."""
        complaints, outs = [], []
        for _ in range(times):
            out, stored = np.full(64 * 24, -1, np.int32), np.zeros(512, np.int32)
            params = Params(out=out.ctypes.data, k=arrays["k"].ctypes.data, v=arrays["v"].ctypes.data, lse=stored.ctypes.data, ids=4096)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            launch = Launch(grid=grid, block=block, shared=32768, symbol=f"strata_{name}".encode())
            complaints.append(machine.run(lib, launch, parameters, ctypes.cast(owns, ctypes.c_void_p)))
            outs.append(out)
        return complaints, outs

    call.a, call.b = arrays["k"].astype(np.int64), arrays["v"].astype(np.int64)
    return call


def test_ptx_stands_where_the_machine_has_its_like():
    told = [file.name for file in (ROOT / "cuda").glob("*.cu*") if re.search(r"\basm\b", file.read_text())]
    assert sorted(told) == ["hopper.cuh", "ptx.cuh", "split.cuh"]  # the last one: v1 and v2


def test_what_sm_75_compiles_reduces_by_shuffles():
    """The reductions of a whole warp, which nvcc knows from sm_80 on, would stop the build for every architecture."""
    folder = ROOT / "cuda"
    read, left = set(), {*folder.glob("*_sm75.cu")}
    while left:
        read |= left
        left = {folder / name for file in left for name in re.findall(r'#include "(.*)"', file.read_text())} & {*folder.iterdir()} - read
    assert folder / "ptx.cuh" in read
    assert [file.name for file in read if "__reduce_" in re.sub(r"(?s)#ifdef STRATA_PA_SM80.*?#else", "", file.read_text())] == []


@pytest.mark.parametrize("name", ["wide", "narrow", "held", "held_unsigned"])
def test_wgmma(run, name):
    b = run.b & 255 if name == "held_unsigned" else run.b
    complaints, outs = run(name, 3)
    assert complaints == [""] * 3
    for out in outs:
        assert (out.reshape(64, 24) == 7 + run.a @ b.T).all()


def test_mma_and_ldmatrix(run):
    complaints, (out,) = run("matrices")
    assert complaints == [""]
    a, b = run.a[:16], run.b[:8]
    assert (out[:128].reshape(16, 8) == 1 + a @ b.T + (a & 255) @ b.T).all()


def test_ldmatrix_turned(run):
    complaints, (out,) = run("turned")
    assert complaints == [""]
    halves = run.a.astype(np.int8).ravel()[:512].view(np.uint16).reshape(4, 8, 8)  # matrix, row, column
    got = out[:128].view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for i in range(4):
            assert got[lane, i].tolist() == [halves[i, lane % 4 * 2 + j, lane // 4] for j in range(2)]


def test_copies(run):
    words = run.a.astype(np.int8).view(np.int32).ravel()[::4]
    complaints, outs = run("copied", 2)
    assert complaints == [""] * 2
    assert all((out[:128] == words).all() for out in outs)
    assert all((out[:128].view(np.uint32) == 0xA5A5A5A5).all() for out in run("not_landed", 2)[1])


def test_bulk_copies(run):
    words = run.a.astype(np.int8).view(np.int32).ravel()[::4]
    complaints, outs = run("bulk_copied", 4)
    assert complaints == [""] * 4
    assert all((out[127::-1] == words ^ np.arange(0, 512, 4)).all() for out in outs)
    complaints, outs = run("bulk_not_waited_for", 4)
    assert complaints == [""] * 4
    assert any((out[127::-1] != words ^ np.arange(0, 512, 4)).any() for out in outs)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_fence", "wgmma without wgmma_fence"),
        ("no_proxy_fence", "no fence for wgmma or bulk copies stands between what thread "),
        ("touched", "wgmma: its sums were touched"),
        ("changed", "wgmma: its operands were changed"),
        ("changed_held", "wgmma: its operands were changed"),
        ("crooked", "a matrix must begin where its swizzle does"),
        ("bulk_not_fenced", "no fence for wgmma or bulk copies stands between what thread "),
        ("too_many_arrivals", "more arrivals than it waits for at the mbarrier at 8192"),
        ("read_too_early", "a race: thread "),
        ("passed_on_too_early", "a race: thread "),
        ("lists", "a race: thread "),
        ("not_atomic", "a race: thread "),
        ("both_write", "a race: thread "),
        ("not_all", "40 (0, 1, 2, 3, 4, 5, 6, 7, ...) at a barrier of the block (kernels.cu:"),
        ("half_a_warp", "64 (1, 3, 5, 7, 9, 11, 13, 15, ...) at an exchange of the warp"),
        ("different", "some of its threads came to "),
        ("warpgroup_alone", "64 (0, 1, 2, 3, 4, 5, 6, 7, ...) at barrier 3 (kernels.cu:"),
        ("past_the_end", "past the end of shared memory, at 32"),
        ("load_past_the_end", "past the end of shared memory, at 32768"),
        ("registers", "at registers that others give back"),
        ("not_allocated", "global memory that nobody has allocated"),
    ],
)
def test_what_would_go_wrong(run, name, complaint):
    assert complaint in run(name)[0][0]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("said_by_a_block", ": reads (kernels.cu:"),
        ("said_by_two_blocks", ": writes (kernels.cu:"),
    ],
)
def test_blocks_that_touch_what_another_has_written(run, name, complaint):
    assert run(name)[0] == [""]
    (found,) = run(name, grid=2)[0]
    assert complaint in found
    assert "what another block of the launch has written, block 0" in found


def test_blocks_that_ask_by_one_thread(run):
    complaints, outs = run("asked_for_by_one", 4, grid=2)
    assert complaints == [""] * 4
    assert all((out[:128] == 1).all() for out in outs)


@pytest.mark.parametrize(
    ("name", "want"), [("ordered", np.arange(128) ^ 1), ("passed_on", np.arange(32) + 2), ("harmless", np.full(128, -1))]
)
def test_what_is_ordered(run, name, want):
    complaints, outs = run(name, 4)
    assert complaints == [""] * 4
    assert all((out[: want.size] == want).all() for out in outs)


def test_sums_before_they_are_waited_for(run):
    complaints, (out,) = run("not_waited_for")
    assert complaints == [""]
    assert (out == 0x5EED5EED).all()


def test_threads_that_only_announce_themselves(run):
    complaints, outs = run("announced", 4)
    assert complaints == [""] * 4
    assert all((out[64:128] == np.arange(64)).all() for out in outs)


def test_registers_that_others_give_back(run):
    complaints, (out,) = run("given_and_taken", block=512)
    assert complaints == [""]
    assert (out[:512] == 1).all()


def test_shared_memory_begins_as_noise(run):
    complaints, (out,) = run("unset")
    assert complaints == [""]
    assert (out[:128] == 1).all()
