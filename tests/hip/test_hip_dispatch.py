"""Which kernel runs on which AMD card, whose memory an array is, and what becomes of a driver's failures."""

import sys
from types import ModuleType, SimpleNamespace

import fake_hip
import numpy as np
import pytest
from fake_hip import BUILT, KERNELS
from fakes import Exporter, FakeArray, Params, birth, field_bytes

import strata_pa
from strata_pa import DriverError, InvalidInput, UnsupportedDevice, UnsupportedProblem, _core, cli

UNLISTED = ("gfx900", "gfx1010", "gfx1103", "gfx9", "gfx11000")


def run(q, kv, out, **arguments):
    return strata_pa.prompt_attention(q, kv, out=out, **arguments)


@pytest.fixture(params=BUILT or ["none"])
def arch(request):
    return request.param


# Which kernel


def test_fp32_is_the_default_and_the_others_are_opt_in(hip, monkeypatch, arch):
    fake = hip(f"{arch}:sramecc+:xnack-")
    q, kv, out = birth()
    run(q, kv, out)
    for kernel in KERNELS:
        run(q, kv, out, kernel=kernel)
        monkeypatch.setenv("STRATA_PA_KERNEL", kernel)
        run(q, kv, out)
        monkeypatch.delenv("STRATA_PA_KERNEL")
    strata_pa.set_imma(True)
    run(q, kv, out)
    assert [launch.kernel for launch in fake.launches] == ["fp32", *(k for k in KERNELS for _ in range(2)), "imma"]
    for launch in fake.launches:
        assert launch.symbol.decode() == f"strata_{launch.kernel}_d256_r12"
        assert (launch.grid, launch.block) == (3 * 2, 256 if launch.kernel == "fp32" else 128)
        assert 0 < launch.shared <= 64 << 10


def test_the_wave_and_the_architecture_choose_one_code_object(hip, arch):
    fake = hip(arch)
    run(*birth())
    assert fake.calls("hipModuleLoadData") == 1
    assert strata_pa.plan(*birth()[:2]).device == "hip:0"
    objects = _core.hip_code_objects()
    assert set(objects) == set(KERNELS)
    assert all(tuple(files) == BUILT for files in objects.values())


def test_a_kernel_of_the_other_vendor_is_not_followed(hip, monkeypatch, arch):
    fake = hip(arch)
    q, kv, out = birth()
    monkeypatch.setenv("STRATA_PA_KERNEL", "v2")
    plan = strata_pa.plan(q, kv)
    assert (plan.kernel, plan.backend, plan.architecture, plan.chosen_by) == ("fp32", "hip", arch, "default")
    where = f"hip:0 (Card {arch}, {arch})"
    assert plan.notes == (
        f"STRATA_PA_KERNEL=v2 was not followed on {where}: v2: exists for CUDA devices from sm_80 only, this device is hip:0",
    )
    assert [name for name, _ in plan.refused] == ["imma", "exact", "v2", "v1"]
    with pytest.raises(UnsupportedProblem, match=r"kernel='v1' cannot run this problem on hip:0"):
        run(q, kv, out, kernel="v1")
    assert not fake.launches


@pytest.mark.parametrize("unlisted", UNLISTED)
def test_an_unlisted_architecture_is_refused_with_the_built_list(hip, unlisted):
    fake = hip(unlisted)
    with pytest.raises(UnsupportedDevice) as error:
        run(*birth())
    assert (
        str(error.value) == f"hip:0 (Card {unlisted}, {unlisted}) is not served: the HIP kernels of this build are for {', '.join(BUILT)}"
    )
    assert fake.calls("hipModuleLoadData") == 0
    (device,) = (d for d in strata_pa.capabilities()["devices"] if d["backend"] == "hip")
    assert (device["kernels"], device["default"]) == ([], None)
    reasons = {f"its image has code objects for {', '.join(BUILT)}, nothing for {unlisted}"}
    assert {r for name, why in device["refused"] if name in KERNELS for r in why} == reasons
    check = next(check for check in strata_pa.doctor().checks if check.name == "hip:0")
    assert check.status == "absent"


def test_info_lists_per_card_what_it_has_and_why_others_are_refused(hip, capsys):
    hip(*BUILT, UNLISTED[0])
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for ordinal, arch in enumerate(BUILT):
        part = text.split(f"Device hip:{ordinal}: Card {arch}, {arch}\n")[1].split("\n\n")[0]
        assert "fp32         the default\n" in part
        assert "exact        when switched on" in part
        assert "v2           refused: exists for CUDA devices from sm_80 only" in part
    part = text.split(f"Device hip:{len(BUILT)}: Card {UNLISTED[0]}, {UNLISTED[0]}\n")[1].split("\n\n")[0]
    assert f"fp32         refused: its image has code objects for {', '.join(BUILT)}, nothing for {UNLISTED[0]}" in part
    assert f"hip_archs    {', '.join(BUILT)}" in text


def test_problems_that_no_kernel_serves(hip, arch):
    fake = hip(arch)
    q, kv, out = birth(k=FakeArray((6, 2, 4, 256), np.int8, address=0x100008))
    with pytest.raises(UnsupportedProblem, match=r"k's address is not a multiple of 16 bytes"):
        run(q, kv, out)
    assert not fake.launches


# The driver


def test_no_driver(hip, monkeypatch, tmp_path):
    hip("gfx1100")
    monkeypatch.setenv(fake_hip.DRIVER, str(tmp_path / "absent.so"))
    assert [d["device"] for d in strata_pa.capabilities()["devices"]] == ["cpu"]
    report = strata_pa.doctor()
    check = next(check for check in report.checks if check.name == "hip")
    assert (check.status, report.ok) == ("absent", True)
    assert "the HIP driver cannot be opened" in check.detail
    with pytest.raises(UnsupportedDevice, match="the HIP driver cannot be opened"):
        _core.hip_driver()


def test_a_driver_that_is_too_old(hip):
    hip("gfx1100", version=50731921)
    with pytest.raises(UnsupportedDevice, match=r"is of ROCm 5\.7; this build needs >= 6\.0"):
        _core.hip_driver()
    check = next(check for check in strata_pa.doctor().checks if check.name == "hip")
    assert check.status == "failed"


def test_a_driver_without_a_card(hip):
    fake = hip()
    with pytest.raises(UnsupportedDevice, match=r"no HIP device can be used: hipGetDeviceCount: hipFake100 \(the words for 100\)"):
        _core.hip_driver()
    assert fake.lib.fake_last_error() == 0


def test_the_driver_in_use(hip, arch):
    fake = hip(arch)
    assert _core.hip_driver() == {"path": str(fake.path), "hip": "6.2"}


def test_host_arrays_touch_no_driver(hip, arch):
    from small import cache, queries

    fake = hip(arch)
    strata_pa.prompt_attention(queries(), cache())
    assert fake.calls("hipInit") == 0


@pytest.mark.parametrize("call", ["hipModuleLoadData", "hipModuleGetFunction"])
def test_a_kernel_that_the_driver_refuses_for_good(hip, arch, call):
    fake = hip(arch)
    fake.fail(call, 200, "strata_fp32" if call == "hipModuleGetFunction" else "")
    q, kv, out = birth()
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match=rf"fp32: the driver refused its .*: {call}: hipFake200 \(the words for 200\)"):
            run(q, kv, out)
    assert fake.calls(call) == 1
    assert fake.lib.fake_last_error() == 0
    assert not fake.launches


@pytest.mark.parametrize("call", [
    "hipGetDeviceCount", "hipGetDevicePropertiesR0600", "hipGetDevice", "hipModuleLoadData", "hipModuleGetFunction",
    "hipModuleLaunchKernel", "hipThreadExchangeStreamCaptureMode",
])  # fmt: skip
def test_other_failures_are_exceptions_and_pass(hip, arch, call):
    fake = hip(arch)
    _core.hip_driver()
    q, kv, out = birth()
    fake.fail(call, 2)
    with pytest.raises(DriverError, match=rf"{call}: hipFake2 \(the words for 2\)"):
        run(q, kv, out)
    assert fake.lib.fake_last_error() == 0  # nobody else finds it
    assert fake.lib.fake_capture_mode() == 0
    fake.heal()
    run(q, kv, out)
    assert [launch.kernel for launch in fake.launches] == ["fp32"]


def test_the_current_device_is_restored(hip, arch):
    fake = hip(arch, arch, arch)
    fake.lib.fake_current(1)
    for ordinal in (2, 1, 0):
        run(*birth(ordinal=ordinal), kernel="exact")
        assert fake.lib.fake_current_now() == 1
    assert [launch.ordinal for launch in fake.launches] == [2, 1, 0]
    fake.fail("hipModuleLaunchKernel", 2)
    with pytest.raises(DriverError):
        run(*birth(ordinal=2))
    assert fake.lib.fake_current_now() == 1


def test_a_first_call_may_be_captured(hip, arch):
    """The fake driver loads modules in the relaxed mode only, as a capturing thread may."""
    fake = hip(arch)
    run(*birth())
    assert fake.calls("hipThreadExchangeStreamCaptureMode") == 2
    assert fake.calls("hipMalloc") == fake.calls("hipStreamSynchronize") == 0
    fake.forget()
    run(*birth())
    assert fake.calls("hipThreadExchangeStreamCaptureMode") == fake.calls("hipModuleLoadData") == 0


# Whose memory


@pytest.mark.parametrize("kind", [2, 10])
@pytest.mark.parametrize(("stream", "cuda", "rocm"), [(None, 1, 0), (0, 1, 0), (0x700, 0x700, 0x700)])
def test_dlpack_from_a_library_that_says_cuda_or_rocm(hip, arch, kind, stream, cuda, rocm):
    """The pointer decides. The default stream has the number 1 for CUDA's exporters and 0 for ROCm's."""
    fake = hip(arch, arch)
    arrays = {"q": Exporter((3, 24, 256), np.float32, 1, kind), "k": Exporter((6, 2, 4, 256), np.int8, 1, kind)}
    q, kv, out = birth(ordinal=1, **arrays)
    run(q, kv, out, stream=stream)
    (launch,) = fake.launches
    assert (launch.ordinal, launch.stream) == (1, stream or 0)
    assert arrays["q"].streams == [cuda if kind == 2 else rocm]


def test_a_pointer_that_is_no_memory_of_a_card(hip, arch):
    fake = hip(arch)
    _, kv, out = birth()
    nowhere = Exporter((3, 24, 256), np.float32, ordinal=7, kind=10, says=0)
    for is_an_error in (1, 0):
        fake.lib.fake_unregistered(is_an_error)
        with pytest.raises(InvalidInput, match="q is not memory of a HIP device"):
            run(nowhere, kv, out)
        with pytest.raises((InvalidInput, UnsupportedDevice), match=r"q is not memory of a HIP device|the CUDA driver cannot be opened"):
            run(FakeArray((3, 24, 256), np.float32, ordinal=7), kv, out)
        assert fake.lib.fake_last_error() == 0


@pytest.mark.skipif(not strata_pa.build_info()["cuda_archs"], reason="this build is without CUDA")
def test_cards_of_both_vendors(hip, arch, tmp_path, monkeypatch, request):
    """An address that HIP's driver does not know is CUDA's."""
    from pathlib import Path

    from fakes import FakeDriver, compile_library

    both = compile_library(tmp_path / "libcuda.so", Path(__file__).parent.parent / "cuda" / "fake_driver.cpp")
    nvidia = FakeDriver(both, tmp_path)
    built = [int(a[3:]) for a in strata_pa.build_info()["cuda_archs"] if a.startswith("sm_")]
    for _ in range(2):
        nvidia.lib.fake_card(built[-1], 227 << 10, b"N")
    amd = hip(arch)  # addresses of ordinal 0 are its own, those of 1 CUDA's
    monkeypatch.setenv("STRATA_PA_CUDA_DRIVER", str(nvidia.path))
    run(*birth(ordinal=0))
    run(*birth(ordinal=1))
    assert [(launch.ordinal, launch.kernel) for launch in amd.launches] == [(0, "fp32")]
    assert [launch.ordinal for launch in nvidia.launches] == [1]
    q, kv, _ = birth(ordinal=0)
    with pytest.raises(InvalidInput, match=r"q is on hip:0, out on cuda:1; all arrays must be on one device"):
        run(q, kv, FakeArray((3, 24, 256), np.float32, ordinal=1))


def test_two_cards_are_refused(hip, arch):
    fake = hip(arch, arch)
    q, kv, _ = birth()
    with pytest.raises(InvalidInput, match=r"q is on hip:0, out on hip:1; all arrays must be on one device"):
        run(q, kv, FakeArray((3, 24, 256), np.float32, ordinal=1))
    assert not fake.launches


def test_what_stays_on_the_host(hip, arch):
    hip(arch)
    q, kv, out = birth()
    with pytest.raises(UnsupportedDevice, match=r"kv_len is in the memory of a HIP device \(hip:0\); it must be in host memory"):
        run(q, kv, out, kv_len=FakeArray((1,), np.int32))
    with pytest.raises(UnsupportedDevice, match="x is on hip:0; quantizing there is not in this version"):
        _core.quantize(q, 64, FakeArray((3, 24, 256), np.int8), FakeArray((3, 24, 4), np.float16))


# Streams, and many launches


def test_the_current_stream_of_pytorch_and_the_producer_of_an_array(hip, arch, monkeypatch):
    fake = hip(arch)
    torch = ModuleType("torch")
    torch.Tensor = type("Tensor", (FakeArray,), {})
    torch.cuda = SimpleNamespace(current_stream=lambda ordinal: SimpleNamespace(cuda_stream=0xA0 + ordinal))
    monkeypatch.setitem(sys.modules, "torch", torch)
    _, kv, out = birth()
    run(torch.Tensor((3, 24, 256), np.float32), kv, out)
    assert fake.launches[-1].stream == 0xA0
    assert fake.calls("hipStreamWaitEvent") == 0
    run(FakeArray((3, 24, 256), np.float32, stream=0x99), kv, out)
    assert fake.calls("hipStreamWaitEvent") == fake.calls("hipEventDestroy") == 1
    fake.fail("hipStreamWaitEvent", 400)
    with pytest.raises(DriverError, match="hipStreamWaitEvent"):
        run(FakeArray((3, 24, 256), np.float32, stream=0x99), kv, out)
    assert fake.lib.fake_last_error() == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_grid_has_fewer_than_2_to_the_32_threads(hip, arch, kernel):
    """The fake driver refuses larger ones, as HIP does."""
    fake = hip(arch)
    seen = []
    fake.hook(lambda launch, p: seen.append((Params.from_buffer_copy(field_bytes(p)), launch.grid)))
    n_q, row = 40_000_001, 2 * 64 * 2
    q, out = (FakeArray((n_q, 2, 64), np.float16, address=a) for a in (1 << 20, 1 << 38))
    pool, scales = (9, 2, 4, 64), (9, 2, 4, 1)
    kv = strata_pa.PagedKV(
        *(FakeArray(pool, np.int8) for _ in "kv"), *(FakeArray(scales, np.float16) for _ in "kv"), FakeArray((2**29 - 1,), np.int32)
    )
    run(q, kv, out, kv_len=50_000_000, ids=FakeArray((n_q, 1), np.int32), kernel=kernel)
    assert len(seen) > 1
    first = 0
    for p, grid in seen:
        assert grid == 2 * p.n_q
        assert p.q == (1 << 20) + first * row
        assert p.seq[0].kv_len - p.seq[0].q_end == 50_000_000 - n_q + first
        first += p.n_q
    assert first == n_q
