"""Launches whose answers are computed: the parameters that reach a kernel say what the problem was."""

import json
import sys
from types import SimpleNamespace

import fake as fakes
import numpy as np
import pytest
from fake import Params, answer_on_the_cpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import KERNELS, SPECS, build, paged, same_bytes

import strata_pa
from strata_pa import _core, cli
from strata_pa._device import DeviceArray, to_device


class View:
    """A strided view of device memory, with the strides that `array` has in host memory."""

    def __init__(self, array):
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        self.whole = DeviceArray(base, 0)
        shift = array.__array_interface__["data"][0] - base.__array_interface__["data"][0] if array.size else 0
        address = self.whole.__cuda_array_interface__["data"][0] + shift
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (address, False), "strides": array.strides, "version": 2,
        }  # fmt: skip
        self.host, self.base = array, base

    def read(self):
        """The view's content, and whether the rest of the memory is as it was."""
        whole = self.whole.read()
        base = np.ndarray(self.host.shape, self.host.dtype, whole, 0, self.host.strides) if self.host.size else self.host
        return base


@pytest.fixture
def card(driver):
    made = driver(90)
    made.hook(answer_on_the_cpu)
    return made


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(SPECS, st.sampled_from([np.float32, np.float16]))
def test_random_problems_reach_the_kernels_whole(card, spec, dtype):
    q, kv, options = build(spec)
    q = q.astype(dtype)
    there, kv_there, options_there = to_device(q, paged(kv), options, "cuda:0")
    for kernel in KERNELS:
        want = strata_pa.prompt_attention(q, paged(kv), kernel=kernel, **options)
        out = DeviceArray(np.full(q.shape, np.nan, dtype), 0)
        strata_pa.prompt_attention(there, kv_there, kernel=kernel, out=out, **options_there)
        assert same_bytes(out.read(), want), kernel


def test_strided_arrays(card):
    rng = np.random.default_rng(1)
    s = SimpleNamespace(pages=5, n_kv=2, page_size=4, dim=64, group=32)
    codes = rng.integers(-128, 128, (2, s.pages, s.page_size, 3, s.dim)).astype(np.int8)  # NHD, K and V in one pool, a head too many
    scales = rng.uniform(0.002, 0.02, (s.pages, 2, s.n_kv, s.page_size, s.dim // s.group)).astype(np.float16)
    table = rng.permutation(s.pages).astype(np.int32)
    hnd = [codes[i, :, :, :2].transpose(0, 2, 1, 3) for i in range(2)]
    pools = [*hnd, scales[:, 0], scales[:, 1]]
    q = rng.standard_normal((6, 9, s.dim)).astype(np.float32)[::2, 1:9:2]
    ids = rng.integers(0, 20, (3, 2, 40)).astype(np.int32)[:, :, 3:33]
    widths = np.arange(9, dtype=np.int32)[1::3]
    out = np.zeros((4, 3, 5, s.dim), np.float32)[1, :, 1:]
    want = strata_pa.prompt_attention(q, strata_pa.PagedKV(*pools, table), ids=ids, widths=widths, kernel="exact")
    there = View(out)
    kv = strata_pa.PagedKV(*map(View, pools), View(table))
    strata_pa.prompt_attention(View(q), kv, ids=View(ids), widths=View(widths), kernel="exact", out=there)
    shift = (there.__cuda_array_interface__["data"][0] - there.whole.__cuda_array_interface__["data"][0]) // 4
    got = there.whole.read().ravel()
    rows = np.lib.stride_tricks.as_strided(got[shift:], out.shape, out.strides)
    assert same_bytes(np.ascontiguousarray(rows), want)
    assert np.count_nonzero(got) == np.count_nonzero(want)


def test_selftest(card):
    before = card.lib.fake_allocations()
    card.hook(answer_with_float64)
    report = strata_pa.selftest("cuda:0")
    assert report.ok, str(report)
    assert [check.name for check in report.checks] == ["cuda:0", *(f"cuda:0 {k}" for k in ("v2", "v1", "fp32", "imma", "exact"))]
    assert card.lib.fake_allocations() == before
    assert strata_pa.doctor().ok
    assert {check.name for check in strata_pa.selftest().checks} > {"cpu fp32", "cuda:0 exact"}
    with pytest.raises(strata_pa.UnsupportedDevice, match=r"no device 'cuda:1'; devices: cpu, cuda:0"):
        strata_pa.selftest("cuda:1")


def answer_with_float64(launch, p):
    """Portable kernels: their bytes; v1 and v2: exact's, which are close enough to float64."""
    portable = launch.kernel not in ("v1", "v2")
    if not portable:
        launch = fakes.Launch.from_buffer_copy(bytes(memoryview(launch).cast("B")))
        launch.symbol = launch.symbol.replace(b"_v1_", b"_exact_").replace(b"_v2_", b"_exact_")
    answer_on_the_cpu(launch, p)


def test_selftest_sees_wrong_bytes(card):
    def wrong(launch, p):
        answer_with_float64(launch, p)
        out = fakes.at(p.out, np.float32, (p.n_q, 24, 256), (p.out_stride, p.out_head_stride, 1))
        out[0, 3, 5] *= np.float32(1.01)

    card.hook(wrong)
    report = strata_pa.selftest("cuda:0")
    assert [check.status for check in report.checks] == ["ok", *["failed"] * 5]
    assert "1 of 120 rows differ from the CPU's bytes" in str(report)
    assert "the relative error is" in str(report)
    assert not strata_pa.doctor().ok


def test_selftest_reports_a_driver_that_fails(card):
    card.fail("cuMemAlloc_v2", 2)
    report = strata_pa.selftest("cuda:0")
    assert [check.status for check in report.checks] == ["ok", *["failed"] * 5]
    assert "DriverError: cuMemAlloc_v2: FAKE_ERROR_2" in str(report)


def test_selftest_of_a_card_that_needs_ptx(driver):
    made = driver(110, 70)
    made.hook(answer_with_float64)
    report = strata_pa.selftest()
    assert report.ok
    assert "the driver compiles its PTX" in str(report)
    assert [check.status for check in report.checks if check.name == "cuda:1"] == ["absent"]


def test_parity(card, tmp_path):
    card.hook(answer_with_float64)
    path = tmp_path / "record.json"
    assert cli.main(["parity", "--device", "cuda:0", "--context", "70", "--queries", "5", "--reps", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    assert [(row["kernel"], row["device"], row["architecture"]) for row in rows] == [
        (k, "cuda:0", "sm_90") for k in ("v2", "v1", "fp32", "imma", "exact")
    ]
    assert all(row["median_ms"] == 1.0 for row in rows)
    cpu = tmp_path / "cpu.json"
    assert cli.main(["parity", "--device", "cpu", "--context", "70", "--queries", "5", "--reps", "1", "--json", str(cpu)]) == 0
    digests = {row["kernel"]: row["sha256"] for row in json.loads(cpu.read_text())["results"]}
    assert {row["kernel"]: row["sha256"] for row in rows if row["kernel"] in digests} == digests


def test_bench(card, tmp_path, monkeypatch):
    """Without PyTorch: calls in a queue and single ones, by the driver's events; what was timed is what was compared."""
    monkeypatch.setitem(sys.modules, "torch", None)
    card.hook(answer_with_float64)
    path = tmp_path / "record.json"
    arguments = ["bench", "--shapes", "70/5/16", "--kernels", "fp32,exact", "--reps", "2", "--json", str(path)]
    assert cli.main([*arguments, "--device", "cuda:0"]) == 0
    record = json.loads(path.read_text())
    assert (list(record["cards"]), record["refused"]) == (["cuda:0"], [])
    assert [(r["kernel"], r["architecture"], r["timed"], r["cold"]) for r in record["results"]] == [
        (k, "sm_90", "calls", None) for k in ("fp32", "exact")
    ]
    assert all((r["median_ms"], r["eager"]["median_ms"], r["eager"]["reps"]) == (1.0, 1.0, 2) for r in record["results"])
    assert cli.main([*arguments, "--device", "cpu"]) == 0
    cpu = json.loads(path.read_text())["results"]
    assert [r["sha256"] for r in record["results"]] == [r["sha256"] for r in cpu]


def test_device_memory(card):
    memory = _core.DeviceMemory(0, 12)
    memory.write(np.arange(3, dtype=np.int32))
    back = np.zeros(3, np.int32)
    memory.read(back)
    assert back.tolist() == [0, 1, 2]
    with pytest.raises(strata_pa.InvalidInput, match="array has 16 bytes, the memory 12"):
        memory.read(np.zeros(4, np.int32))
    memory.free()
    lost = _core.DeviceMemory(0, 1)
    card.fail("cuCtxPushCurrent_v2", 4)  # deinitialized, as at the end of a process
    del lost
    card.heal()
    assert card.lib.fake_allocations() == 1
    with pytest.raises(strata_pa.UnsupportedDevice, match="there is no cuda:3; the driver has 1 device"):
        _core.DeviceMemory(3, 1)


def test_params_are_as_the_kernels_have_them(card):
    """The layout that these tests read is the compiler's."""
    seen = []
    card.hook(lambda launch, p: seen.append((p.n_q, p.n_seq, p.seq[0].q_end, p.seq[0].kv_len, p.dtype)))
    q, kv, out = fakes.birth(n_q=5)
    strata_pa.prompt_attention(q, kv, out=out, kv_len=23)
    assert seen == [(5, 1, 5, 23, 0)]
    assert Params.seq.offset % 4 == 0
