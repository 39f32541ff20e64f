"""Arrays on cards: which are taken, on which stream and card their kernel runs, what a call asks of the driver."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from fake import FakeArray, Params, birth, field_bytes
from fakes import Exporter
from small import cache, queries

import strata_pa
from strata_pa import InvalidInput, InvalidType, UnsupportedDevice, UnsupportedProblem


def run(q, kv, out, **arguments):
    return strata_pa.prompt_attention(q, kv, out=out, **arguments)


def test_a_call_launches_and_nothing_else(driver):
    """What a stream capture allows: no allocation, no synchronisation, no copy. The first call loads modules, in the relaxed mode."""
    fake = driver(90)
    q, kv, out = birth()
    ids, widths = FakeArray((3, 9), np.int32), FakeArray((3,), np.int32)
    run(q, kv, out, ids=ids, widths=widths, kv_len=24)
    assert fake.calls("cuModuleLoadData") == 1
    assert fake.lib.fake_capture_mode() == 0
    fake.forget()
    run(q, kv, out, ids=ids, widths=widths, kv_len=24)
    assert fake.calls("cuLaunchKernel") == 1
    for name in (
        "cuMemAlloc_v2",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD_v2",
        "cuStreamSynchronize",
        "cuModuleLoadData",
        "cuDevicePrimaryCtxRetain",
        "cuEventCreate",
    ):
        assert fake.calls(name) == 0, name
    assert fake.lib.fake_depth() == 0


def test_no_queries_no_launch(driver):
    fake = driver(90)
    q, kv, out = birth(n_q=0)
    run(q, kv, out)
    assert not fake.launches
    plan = strata_pa.plan(q, kv)
    assert (plan.kernel, plan.workspace_bytes) == ("v2", 0)


@pytest.mark.parametrize("kernel", ["v2", "fp32", "exact"])
def test_a_pool_without_pages(driver, kernel):
    """The kernels load a masked cell's codes from page 0: there must be memory of the card behind it."""
    fake = driver(90)
    seen = []
    fake.hook(lambda launch, p: seen.append((p.k, p.v, p.k_stride.head, p.pages)))
    pools = [FakeArray((0, 2, 4, inner), kind) for inner, kind in ((256, np.int8),) * 2 + ((4, np.float16),) * 2]
    for address in (0x1000000, 0x1000004):
        q, out = FakeArray((3, 24, 256), np.float32, address=address), FakeArray((3, 24, 256), np.float32)
        run(q, strata_pa.PagedKV(*pools, FakeArray((6,), np.int32)), out, kernel=kernel, kv_len=24)
        assert seen.pop() == (-(-address // 16) * 16, -(-address // 16) * 16, 0, 0)


def test_the_pointers_own_card(driver):
    fake = driver(90, 90, 90)
    for ordinal in (2, 0, 1):
        run(*birth(ordinal=ordinal))
    assert [launch.ordinal for launch in fake.launches] == [2, 0, 1]


def other(name, **changes):
    """birth() with one array on cuda:1."""
    shapes = {
        "q": ((3, 24, 256), np.float32),
        "out": ((3, 24, 256), np.float32),
        "v": ((6, 2, 4, 256), np.int8),
        "page_table": ((6,), np.int32),
    }
    shapes["k_scale"] = shapes["v_scale"] = ((6, 2, 4, 4), np.float16)
    return birth(**{name: FakeArray(*shapes[name], ordinal=1, **changes)})


@pytest.mark.parametrize("name", ["v", "k_scale", "v_scale", "page_table", "out"])
def test_two_devices_are_refused(driver, name):
    fake = driver(90, 90)
    with pytest.raises(InvalidInput, match=rf"\w+ is on cuda:0, {name} on cuda:1; all arrays must be on one device"):
        run(*other(name))
    assert not fake.launches


def test_lists_on_another_device(driver):
    driver(90, 90)
    q, kv, out = birth()
    with pytest.raises(InvalidInput, match="q is on cuda:0, ids on cuda:1"):
        run(q, kv, out, ids=FakeArray((3, 9), np.int32, ordinal=1))
    with pytest.raises(InvalidInput, match="q is on cuda:0, ids in host memory"):
        run(q, kv, out, ids=np.zeros((3, 9), np.int32))
    with pytest.raises(InvalidInput, match="q is on cuda:0, out in host memory"):
        run(q, kv, np.zeros((3, 24, 256), np.float32))
    with pytest.raises(InvalidInput, match="q is in host memory, k on cuda:0"):
        run(np.zeros((3, 24, 256), np.float32), kv, out)


def test_what_stays_on_the_host(driver):
    driver(90)
    q, kv, out = birth()
    run(q, kv, out, kv_len=np.array([24]), cu_seqlens_q=[0, 3])
    with pytest.raises(UnsupportedDevice, match=r"kv_len is in the memory of a CUDA device \(cuda:0\); it must be in host memory"):
        run(q, kv, out, kv_len=FakeArray((1,), np.int32))


def test_arguments_of_the_other_backend(driver):
    driver(90)
    q, kv, out = birth()
    with pytest.raises(InvalidInput, match="num_threads is for arrays in host memory"):
        run(q, kv, out, num_threads=2)
    with pytest.raises(InvalidInput, match="stream is for GPU arrays"):
        strata_pa.prompt_attention(queries(), cache(), stream=0)


def test_host_arrays_stay_on_the_cpu(driver):
    fake = driver(90)
    strata_pa.prompt_attention(queries(), cache())
    assert fake.calls("cuInit") == 0


# Streams


def stream_of(fake, **arguments):
    fake.forget()
    run(*birth(), **arguments)
    (launch,) = fake.launches
    return launch.stream


def test_streams(driver):
    fake = driver(90)
    assert stream_of(fake) == 0
    assert stream_of(fake, stream=None) == 0
    for handle in (0, 1, 2, 0x1234, np.int64(77)):
        assert stream_of(fake, stream=handle) == handle
    assert stream_of(fake, stream=SimpleNamespace(cuda_stream=0x50)) == 0x50
    assert stream_of(fake, stream=SimpleNamespace(ptr=0x60)) == 0x60
    assert stream_of(fake, stream=SimpleNamespace(__cuda_stream__=lambda: (0, 0x70))) == 0x70
    assert stream_of(fake, stream=SimpleNamespace(__cuda_stream__=(0, 0x80), ptr=1)) == 0x80
    for bad, match in ((True, "got bool"), ("s", "got str"), (1.5, "got float"), (SimpleNamespace(__cuda_stream__=3), "pair")):
        with pytest.raises(InvalidType, match=match):
            stream_of(fake, stream=bad)
    with pytest.raises(InvalidInput, match="address of a stream, or 0, got -1"):
        stream_of(fake, stream=-1)


def library(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_the_current_stream_of_the_library_of_q(driver, monkeypatch):
    fake = driver(90, 90)

    class Tensor(FakeArray):
        device = "cuda:1"

    current = {0: 0xA0, 1: 0xA1}
    library(
        monkeypatch,
        "torch",
        Tensor=Tensor,
        cuda=SimpleNamespace(current_stream=lambda ordinal: SimpleNamespace(cuda_stream=current[ordinal])),
        float32="f32",
        empty=lambda shape, dtype, device: Tensor(shape, np.float32, ordinal=int(device[-1])),
    )
    assert stream_of(fake) == 0  # q is of another library
    q = Tensor((3, 24, 256), np.float32, ordinal=1)
    _, kv, out = birth(ordinal=1)
    run(q, kv, out)
    assert fake.launches[-1].stream == 0xA1
    run(q, kv, out, stream=5)
    assert fake.launches[-1].stream == 5
    made, lse = strata_pa.prompt_attention(q, kv, return_lse=True)
    assert isinstance(made, Tensor)
    assert isinstance(lse, Tensor)
    assert fake.launches[-1].stream == 0xA1


def test_cupy_keeps_a_current_stream_for_each_device(driver, monkeypatch):
    fake = driver(90, 90)
    entered = []

    class ndarray(FakeArray):
        pass

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            entered.append(self.ordinal)

        def __exit__(self, *error):
            entered.pop()

    ndarray.device = Device(1)
    library(
        monkeypatch,
        "cupy",
        ndarray=ndarray,
        cuda=SimpleNamespace(Device=Device, get_current_stream=lambda: SimpleNamespace(ptr=0xC0 + entered[-1])),
        empty=lambda shape, dtype: ndarray(shape, dtype, ordinal=entered[-1]),
    )
    q = ndarray((3, 24, 256), np.float32, ordinal=1)
    out = strata_pa.prompt_attention(q, birth(ordinal=1)[1])
    assert isinstance(out, ndarray)
    assert fake.launches[-1].stream == 0xC1
    assert not entered


def test_the_stream_of_an_array_interface_is_waited_for(driver):
    fake = driver(90)
    _, kv, out = birth()
    for stream, waits in ((None, 0), (1, 0), (0x99, 1)):
        fake.forget()
        run(FakeArray((3, 24, 256), np.float32, stream=stream), kv, out)
        assert fake.calls("cuStreamWaitEvent") == waits
        assert fake.calls("cuEventDestroy_v2") == fake.calls("cuEventCreate") == waits
        assert fake.calls("cuStreamSynchronize") == 0
    fake.fail("cuStreamWaitEvent", 400)
    with pytest.raises(strata_pa.DriverError, match="cuStreamWaitEvent"):
        run(FakeArray((3, 24, 256), np.float32, stream=0x99), kv, out)
    assert fake.lib.fake_depth() == 0


def test_new_arrays_need_a_known_library(driver):
    fake = driver(90)
    q, kv, _ = birth()
    with pytest.raises(InvalidInput, match="new arrays on cuda:0 are made for PyTorch, CuPy and JAX; pass out= for a FakeArray"):
        strata_pa.prompt_attention(q, kv)
    assert not fake.launches


# DLPack


@pytest.mark.parametrize("kind", [2, 13])
@pytest.mark.parametrize(("stream", "named"), [(None, 1), (0, 1), (1, 1), (2, 2), (0x700, 0x700)])
def test_dlpack(driver, kind, stream, named):
    """Exporters order their work before the stream that is named to them: 1 is the legacy default one, -1 asks for nothing."""
    fake = driver(90, 90)
    arrays = {"q": Exporter((3, 24, 256), np.float32, 1, kind), "k": Exporter((6, 2, 4, 256), np.int8, 1, kind)}
    q, kv, out = birth(ordinal=1, **arrays)
    assert arrays["k"].streams == [-1]
    run(q, kv, out, stream=stream)
    assert arrays["q"].streams == [named]
    assert arrays["k"].streams == [-1, named]
    (launch,) = fake.launches
    assert (launch.ordinal, launch.stream) == (1, stream or 0)


def test_arrays_on_their_own_current_stream_need_no_order(driver, monkeypatch):
    driver(90)
    tensor = type("Tensor", (Exporter,), {})
    library(monkeypatch, "torch", Tensor=tensor, cuda=SimpleNamespace(current_stream=lambda ordinal: SimpleNamespace(cuda_stream=0xA0)))
    arrays = {"q": tensor((3, 24, 256), np.float32), "k": tensor((6, 2, 4, 256), np.int8), "v": Exporter((6, 2, 4, 256), np.int8)}
    q, kv, out = birth(**arrays)
    run(q, kv, out)
    assert [a.streams[-1] for a in arrays.values()] == [-1, -1, 0xA0]
    run(q, kv, out, stream=0xA0)
    assert [a.streams[-1] for a in arrays.values()] == [0xA0] * 3


def test_jax_arrays_are_exported_without_a_stream(driver, monkeypatch):
    driver(90)
    array = type("ArrayImpl", (Exporter,), {"__module__": "jaxlib._jax"})((3, 24, 256), np.float32)
    _, kv, out = birth()
    run(array, kv, out)
    assert array.streams == [None]
    with pytest.raises(InvalidInput, match="out is read-only"):
        run(array, kv, array)


# Layouts


@pytest.mark.parametrize(("changes", "match"), [
    ({"k": {"address": 0x100008}}, r"k's address is not a multiple of 16 bytes \(the remainder is 8\)"),
    ({"v": {"strides": (2056, 1024, 256, 1)}}, "v's stride of a page, 2056 bytes, is not a multiple of 16"),
    ({"v": {"strides": (2048, 1032, 256, 1)}}, "v's stride of a KV head, 1032 bytes"),
    ({"k": {"strides": (4096, 1024, 257, 1)}}, "k's stride of a cell, 257 bytes"),
    ({"k": {"strides": (2**31, 1024, 256, 1)}}, "k's pages are 2147483648 elements apart, more than 2147483647"),
])  # fmt: skip
def test_layouts_that_the_kernels_do_not_serve(driver, changes, match):
    fake = driver(90)
    ((name, options),) = changes.items()
    q, kv, out = birth(**{name: FakeArray((6, 2, 4, 256), np.int8, **options)})
    with pytest.raises(UnsupportedProblem, match=match) as error:
        run(q, kv, out)
    for kernel in ("v2", "v1", "fp32", "imma", "exact"):
        assert f"\n  {kernel}: " in str(error.value)
    assert not fake.launches


def test_strides_of_dimensions_of_one_do_not_matter(driver):
    fake = driver(90)
    shape = (1, 2, 4, 256)
    pools = {"k": FakeArray(shape, np.int8, strides=(3, 1024, 256, 1)), "v": FakeArray(shape, np.int8)}
    scales = {name: FakeArray((1, 2, 4, 4), np.float16) for name in ("k_scale", "v_scale")}
    run(*birth(**pools, **scales, page_table=FakeArray((1,), np.int32)))
    assert len(fake.launches) == 1


@pytest.mark.parametrize(("interface", "match"), [
    ({"mask": 1}, "q has a mask"),
    ({"typestr": ">f4"}, "foreign byte order"),
    ({"typestr": "<V4"}, r"q must be float32 or float16 or bfloat16, got void32"),
    ({"typestr": "f"}, "'f' is not a type"),
    ({"shape": 3}, "no usable 'shape'"),
    ({"data": None}, "no usable 'data'"),
    ({"strides": (1, 2)}, "3 dimensions and 2 strides"),
    ({"strides": (24576, 1026, 4)}, "stride of 1026 bytes"),
    ({"strides": (24576, -1024, 4)}, "negative stride"),
])  # fmt: skip
def test_array_interfaces_that_are_refused(driver, interface, match):
    driver(90)
    q, kv, out = birth()
    q.__cuda_array_interface__ |= interface
    with pytest.raises(InvalidInput, match=match):
        run(q, kv, out)


def test_read_only_arrays(driver):
    driver(90)
    q, kv, out = birth(q=FakeArray((3, 24, 256), np.float32, readonly=True))
    run(q, kv, out)
    with pytest.raises(InvalidInput, match="out is read-only"):
        run(q, kv, FakeArray((3, 24, 256), np.float32, readonly=True))
    with pytest.raises(InvalidInput, match="out overlaps the memory of q"):
        run(out, kv, out)


# Many launches


def launched(fake):
    """(rows, sequences, first row) of each launch."""
    seen = []
    fake.hook(lambda launch, p: seen.append((Params.from_buffer_copy(field_bytes(p)), launch.grid)))
    return seen


@pytest.mark.parametrize("counts", [[1] * 64, [1] * 65, [2] * 200, [0] * 130 + [3], [3] + [0] * 130, [5, 0] * 70])
def test_more_sequences_than_a_launch_takes(driver, counts):
    fake = driver(90)
    seen = launched(fake)
    n_seq, starts = len(counts), np.cumsum([0, *counts]).tolist()
    n_q = starts[-1]
    table = FakeArray((n_seq, 6), np.int32, address=0x2000000)
    q = FakeArray((n_q, 24, 256), np.float32, address=0x10000000)
    out = FakeArray((n_q, 24, 256), np.float32, address=0x50000000)
    lengths = [10 + s % 13 for s in range(n_seq)]
    run(q, birth(page_table=table)[1], out, cu_seqlens_q=starts, kv_len=lengths, causal=False)
    rows = []
    for p, grid in seen:
        assert grid == p.n_q * 2
        assert p.n_seq <= 64
        first, base = (p.q - 0x10000000) // (24 * 256 * 4), (p.page_table - 0x2000000) // (6 * 4)
        assert p.out == 0x50000000 + first * 24 * 256 * 4
        for i in range(p.n_q):  # as the kernels find a row's sequence
            s = next(s for s in range(p.n_seq) if i < p.seq[s].q_end)
            rows.append((first + i, base + s, p.seq[s].kv_len - p.seq[s].q_end + i))
    want = [(starts[s] + i, s, lengths[s] - counts[s] + i) for s in range(n_seq) for i in range(counts[s])]
    assert rows == want


def test_more_blocks_than_a_grid_has(driver):
    fake = driver(90)
    seen = launched(fake)
    n_q, kv_len, row = 2**31 - 1, 2**31 - 4, 2 * 64 * 2
    q, out = (FakeArray((n_q, 2, 64), np.float16, address=a) for a in (1 << 20, (1 << 20) + n_q * row))
    pool, scales = (9, 2, 4, 64), (9, 2, 4, 1)
    kv = strata_pa.PagedKV(
        *(FakeArray(pool, np.int8) for _ in "kv"), *(FakeArray(scales, np.float16) for _ in "kv"), FakeArray((2**29 - 1,), np.int32)
    )
    run(q, kv, out, kv_len=kv_len, ids=FakeArray((n_q, 1), np.int32))
    assert len(seen) == 3
    first = 0
    for p, grid in seen:
        assert grid == 2 * p.n_q < 2**31
        assert p.q == (1 << 20) + first * row
        assert p.seq[0].kv_len - p.seq[0].q_end == kv_len - n_q + first
        first += p.n_q
    assert first == n_q
