"""Quantizing on the GPU: the bytes of the host, for arrays of every library, into arrays and into a cache."""

import numpy as np
import pytest
from on_gpu import device
from problems import same_bytes

import strata_pa
from strata_pa import _core
from strata_pa._device import DeviceArray, ordinal_of

DTYPES = (np.float32, np.float16)
ORDINAL = ordinal_of(device()["device"]) if device() else 0


def values(seed, shape, dtype=np.float32):
    """Ordinary numbers, tiny ones, subnormal ones, zeros, and groups near the largest scale."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    kind = rng.integers(0, 8, shape[:-1])[..., None]
    factors = np.array([1, 1, 1, 0, 3e-6, 1e-7, 1e-40, 8.3e6 / 5 if dtype == np.float32 else 6e4 / 5], np.float32)
    with np.errstate(over="ignore"):
        x = np.clip(x * factors[kind], -8.3e6, 8.3e6)
        x = np.where(rng.random(shape) < 0.05, np.sign(x) * np.abs(x).max(-1, keepdims=True), x)  # codes at and beside +-127
        return x.astype(dtype) if dtype == np.float32 else np.clip(x, -65504, 65504).astype(dtype)


def on_device(x, group):
    """By the compiled module alone."""
    there = DeviceArray(x, ORDINAL)
    codes = DeviceArray(np.full(x.shape, 99, np.int8), ORDINAL)
    scales = DeviceArray(np.full((*x.shape[:-1], x.shape[-1] // group), 9, np.float16), ORDINAL)
    _core.quantize(there, group, codes, scales)
    return codes.read(), scales.read()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (64, 32), (128, 128), (256, 64), (256, 256), (96, 8), (7, 7), (5, 1)])
def test_the_bytes_of_the_host(dim, group, dtype):
    x = values(dim + group, (300, 7, dim), dtype)
    for got, want in zip(on_device(x, group), strata_pa.quantize_kv(x, group), strict=True):
        assert same_bytes(got, want)


def test_every_float16():
    """All finite binary16 numbers, and each binary16 scale from the numbers at its borders."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].reshape(-1, 32)
    scale = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (scale[:-1] + scale[1:]) / 2 * 127
    borders = np.stack([f(middle.astype(np.float32), np.float32(np.inf)) for f in (lambda a, _: a, np.nextafter)], 1)
    borders = np.concatenate([borders, np.nextafter(borders[:, :1], np.float32(0))], 1)
    borders = np.concatenate([borders, borders / 3], 1).astype(np.float32)
    for x, group in ((every, 1), (every, 32), (borders.reshape(-1, 1), 1), (borders, 6)):
        for got, want in zip(on_device(x, group), strata_pa.quantize_kv(x, group), strict=True):
            assert same_bytes(got, want)


def test_what_the_host_refuses_becomes_a_scale_of_nan():
    x = values(1, (64, 2, 64))
    bad = {(0, 0, 5): np.nan, (3, 1, 63): np.inf, (9, 0, 32): -np.inf, (11, 1, 0): np.float32(8.33e6)}
    for place, value in bad.items():
        x[place] = value
    codes, scales = on_device(x, 32)
    groups = {(*place[:2], place[2] // 32) for place in bad}
    assert {tuple(map(int, p)) for p in np.argwhere(~np.isfinite(scales))} == groups
    assert set(scales.view(np.uint16)[~np.isfinite(scales)].tolist()) == {0x7E00}
    for place in bad:
        x[place] = 0
    for i, head, g in groups:
        part = slice(32 * g, 32 * g + 32)
        assert not codes[i, head, part].any()
        codes[i, head, part], scales[i, head, g] = 0, 0
        x[i, head, part] = 0
    for got, want in zip((codes, scales), strata_pa.quantize_kv(x, 32), strict=True):
        assert same_bytes(got, want)


@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_arrays_of_libraries(library, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = pytest.importorskip(library)
    x = values(2, (40, 5, 2, 64), np.float16).astype(np.float32)
    want = strata_pa.quantize_kv(x, 32)
    if library == "torch":
        there, back = module.from_numpy(x).cuda(), lambda a: a.cpu().numpy()
        kinds = [there, there.half().float().half(), there.transpose(0, 2)[:, ::2]]
    elif library == "cupy":
        there, back = module.asarray(x), module.asnumpy
        kinds = [there, there.astype(np.float16), there.transpose(2, 1, 0, 3)[:, ::2]]
    else:
        there, back = module.device_put(x, module.devices("cuda")[0]), np.asarray
        kinds = [there, (there * 1).astype(np.float16)]
    for kind in kinds:
        codes, scales = strata_pa.quantize_kv(kind, 32)
        assert type(codes) is type(kind)
        for got, wanted in zip((codes, scales), strata_pa.quantize_kv(np.ascontiguousarray(back(kind)), 32), strict=True):
            assert same_bytes(back(got), wanted)
    assert same_bytes(back(strata_pa.quantize_kv(there, 32)[0]), want[0])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_cache_on_the_gpu_holds_what_one_on_the_host_holds(layout):
    """The same history in both; page 0 of 2, growth, forks, copies before a write, bfloat16."""
    torch = pytest.importorskip("torch")
    from strata_pa.torch import PagedInt8KVCache, prompt_attention

    rng = np.random.default_rng(4)
    caches = [PagedInt8KVCache(2, 128, group=32, page_size=4, layout=layout, device=where) for where in ("cpu", "cuda")]

    def both(n):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            k, v = (torch.from_numpy(values(int(rng.integers(1000)), (n, 2, 128), np.float16).astype(np.float32)).to(dtype) for _ in "kv")
            yield k, v

    names = [[cache.add() for cache in caches]]
    for n in (5, 30, 1):
        for k, v in both(n):
            for cache, name in zip(caches, names[0], strict=True):
                cache.append(name, k.to(cache.device), v.to(cache.device))
    names.append([cache.fork(name, 33) for cache, name in zip(caches, names[0], strict=True)])
    for k, v in both(6):
        for cache, a, b in zip(caches, *names, strict=True):
            cache.append([b, a], k.to(cache.device), v.to(cache.device), counts=[2, 4])
    views = [cache.view([a, b]) for cache, a, b in zip(caches, *names, strict=True)]
    for name in ("k", "v", "k_scale", "v_scale", "page_table"):
        host, gpu = (getattr(view, name) for view in views)
        assert same_bytes(gpu.cpu().numpy(), host.numpy()), name
    q = torch.from_numpy(rng.standard_normal((9, 8, 128), np.float32))
    lengths = caches[0].lengths([names[0][0], names[1][0]])
    for kernel in (k for k in ("fp32", "imma", "exact") if k in device()["kernels"]):
        host, gpu = (
            prompt_attention(q.to(cache.device), view, kv_len=lengths, cu_seqlens_q=[0, 4, 9], kernel=kernel)
            for cache, view in zip(caches, views, strict=True)
        )
        assert same_bytes(gpu.cpu().numpy(), host.numpy()), kernel


def test_append_is_in_order_with_the_current_stream():
    torch = pytest.importorskip("torch")
    from strata_pa.torch import PagedInt8KVCache

    host = torch.from_numpy(values(6, (50, 2, 64))).pin_memory()
    cache = PagedInt8KVCache(2, 64, device="cuda")
    sequence = cache.add()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros(host.shape, device="cuda")
        torch.cuda._sleep(50_000_000)
        late.copy_(host, non_blocking=True)
        cache.append(sequence, late, late)
        k, _ = cache.dequantized(sequence)
        torch.cuda.current_stream().synchronize()
    codes, scales = strata_pa.quantize_kv(host.numpy())
    assert same_bytes(k.cpu().numpy(), codes.astype(np.float32) * np.repeat(scales, 64, -1).astype(np.float32))
