"""Arrays of PyTorch, CuPy, JAX and Numba in and out, in CUDA graphs and on their streams."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from on_gpu import device
from problems import same_bytes

import strata_pa

KERNELS = [k for k in ("fp32", "imma", "exact") if device() and k in device()["kernels"]]
kernels = pytest.mark.parametrize("kernel", KERNELS)


def problem(seed=1, n_q=40, cells=300):
    """(q, cache's arrays, lists) in the birth geometry."""
    rng = np.random.default_rng(seed)
    pages = cells // 4
    k, ks = strata_pa.quantize_kv(rng.standard_normal((pages, 2, 4, 256), np.float32))
    v, vs = strata_pa.quantize_kv(rng.standard_normal((pages, 2, 4, 256), np.float32))
    arrays = [k, v, ks, vs, rng.permutation(pages).astype(np.int32)]
    lists = {"ids": rng.integers(-1, cells, (n_q, 2, 90)).astype(np.int32), "widths": rng.integers(0, 91, n_q).astype(np.int32)}
    return rng.standard_normal((n_q, 24, 256), np.float32), arrays, lists


def on_cpu(q, arrays, lists, **options):
    return strata_pa.prompt_attention(q, strata_pa.PagedKV(*arrays), **lists, **options)


def check(convert, back, kind, dtypes=(np.float32, np.float16)):
    """New arrays and given ones, lse, each kernel."""
    for dtype in dtypes:
        q, arrays, lists = problem()
        q = q.astype(dtype)
        kv = strata_pa.PagedKV(*map(convert, arrays))
        there = {x: convert(y) for x, y in lists.items()}
        for kernel in KERNELS:
            want, want_lse = on_cpu(q, arrays, lists, kernel=kernel, return_lse=True)
            out, lse = strata_pa.prompt_attention(convert(q), kv, **there, kernel=kernel, return_lse=True)
            assert isinstance(out, kind)
            assert isinstance(lse, kind)
            assert same_bytes(back(out), want), kernel
            assert same_bytes(back(lse), want_lse), kernel
        default = back(strata_pa.prompt_attention(convert(q), kv, **there))
        assert np.abs(default - want).max() <= 1e-2 if dtype == np.float16 else np.abs(default - want).max() <= 2e-6 * np.abs(want).max()


def test_torch():
    torch = pytest.importorskip("torch")
    check(lambda a: torch.from_numpy(a).cuda(), lambda t: t.cpu().numpy(), torch.Tensor)
    q, arrays, lists = problem()
    kv = strata_pa.PagedKV(*(torch.from_numpy(a).cuda() for a in arrays))
    there = {x: torch.from_numpy(y).cuda() for x, y in lists.items()}
    q = torch.from_numpy(q).cuda().bfloat16()
    for kernel in KERNELS:
        out = strata_pa.prompt_attention(q, kv, **there, kernel=kernel)
        assert out.dtype == torch.bfloat16
        want = strata_pa.prompt_attention(q.cpu(), strata_pa.PagedKV(*(torch.from_numpy(a) for a in arrays)), **lists, kernel=kernel)
        assert torch.equal(out.cpu().view(torch.int16), want.view(torch.int16)), kernel
    given = torch.full((40, 24, 256), torch.nan, device="cuda").transpose(0, 1).contiguous().transpose(0, 1)
    assert strata_pa.prompt_attention(q.float(), kv, **there, kernel="fp32", out=given) is given
    assert torch.equal(given, strata_pa.prompt_attention(q.float(), kv, **there, kernel="fp32"))


def test_cupy():
    cupy = pytest.importorskip("cupy")
    check(cupy.asarray, cupy.asnumpy, cupy.ndarray)
    with cupy.cuda.Stream(non_blocking=True):
        check(cupy.asarray, cupy.asnumpy, cupy.ndarray, (np.float32,))


def test_jax(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("JAX has no GPU here")
    check(lambda a: jax.device_put(a, gpu), np.asarray, jax.Array)
    q, arrays, lists = problem()
    kv = strata_pa.PagedKV(*(jax.device_put(a, gpu) for a in arrays))
    out = strata_pa.prompt_attention(jax.device_put(q, gpu) * 1, kv, kernel="fp32", **{x: jax.device_put(y, gpu) for x, y in lists.items()})
    assert same_bytes(np.asarray(out + 0), on_cpu(q, arrays, lists, kernel="fp32"))  # JAX may read it at once
    with pytest.raises(strata_pa.InvalidInput, match="out is read-only"):
        strata_pa.prompt_attention(jax.device_put(q, gpu), kv, out=out)


def test_numba():
    cuda = pytest.importorskip("numba.cuda")
    q, arrays, lists = problem()
    out = cuda.to_device(np.zeros_like(q))
    there = {x: cuda.to_device(y) for x, y in lists.items()}
    strata_pa.prompt_attention(cuda.to_device(q), strata_pa.PagedKV(*map(cuda.to_device, arrays)), **there, kernel="fp32", out=out)
    assert same_bytes(out.copy_to_host(), on_cpu(q, arrays, lists, kernel="fp32"))


def test_the_current_stream():
    torch = pytest.importorskip("torch")
    q, arrays, lists = problem()
    want = on_cpu(q, arrays, lists, kernel="fp32")
    host = torch.from_numpy(q).pin_memory()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kv = strata_pa.PagedKV(*(torch.from_numpy(a).cuda() for a in arrays))
        there = {x: torch.from_numpy(y).cuda() for x, y in lists.items()}
        late = torch.zeros(q.shape, device="cuda")
        torch.cuda._sleep(50_000_000)
        late.copy_(host, non_blocking=True)  # on this stream alone; another one would see zeros
        out = strata_pa.prompt_attention(late, kv, **there, kernel="fp32")
    stream.synchronize()
    assert same_bytes(out.cpu().numpy(), want)


@kernels
def test_a_captured_call_reads_its_arrays_anew(kernel):
    torch = pytest.importorskip("torch")
    q, arrays, lists = problem()
    static = [torch.from_numpy(a).cuda() for a in arrays]
    there = {x: torch.from_numpy(y).cuda() for x, y in lists.items()}
    there_q, out = torch.from_numpy(q).cuda(), torch.empty((40, 24, 256), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strata_pa.prompt_attention(there_q, strata_pa.PagedKV(*static), **there, kernel=kernel, out=out)
    for seed in (1, 2, 3):
        new_q, new, new_lists = problem(seed)
        there_q.copy_(torch.from_numpy(new_q))
        for old, a in zip([*static, *there.values()], [*new, *new_lists.values()], strict=True):
            old.copy_(torch.from_numpy(a))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(out.cpu().numpy(), on_cpu(new_q, new, new_lists, kernel=kernel)), seed


@pytest.mark.parametrize("kernel", ["v2", "v1", "fp32"])
def test_the_first_call_of_a_process_may_be_captured(kernel):
    """Modules are loaded within the capture. New arrays come from the graph's own pool."""
    pytest.importorskip("torch")
    code = textwrap.dedent(f"""
        import sys, torch
        sys.path[:0] = {sys.path!r}
        from test_libraries import problem
        import strata_pa
        q, arrays, lists = problem()
        kv = strata_pa.PagedKV(*(torch.from_numpy(a).cuda() for a in arrays))
        q, there = torch.from_numpy(q).cuda(), {{x: torch.from_numpy(y).cuda() for x, y in lists.items()}}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = strata_pa.prompt_attention(q, kv, **there, kernel={kernel!r}, return_lse=True)
        graph.replay()
        again = strata_pa.prompt_attention(q, kv, **there, kernel={kernel!r})
        torch.cuda.synchronize()
        assert torch.equal(out, again) and not lse.isnan().any()
    """)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_devices():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, arrays, lists = problem()
    want = on_cpu(q, arrays, lists, kernel="fp32")
    for ordinal in (1, 0, 1):
        where = f"cuda:{ordinal}"
        kv = strata_pa.PagedKV(*(torch.from_numpy(a).to(where) for a in arrays))
        there = {x: torch.from_numpy(y).to(where) for x, y in lists.items()}
        out = strata_pa.prompt_attention(torch.from_numpy(q).to(where), kv, **there, kernel="fp32")
        assert out.device == torch.device(where)
        assert torch.cuda.current_device() == 0
        assert same_bytes(out.cpu().numpy(), want)
    with pytest.raises(strata_pa.InvalidInput, match="q is on cuda:0, k on cuda:1"):
        strata_pa.prompt_attention(torch.from_numpy(q).to("cuda:0"), kv, **there)


def test_errors_name_the_memory():
    torch = pytest.importorskip("torch")
    q, arrays, lists = problem()
    kv = strata_pa.PagedKV(*(torch.from_numpy(a).cuda() for a in arrays))
    with pytest.raises(strata_pa.InvalidInput, match="q is in host memory, k on cuda:0"):
        strata_pa.prompt_attention(torch.from_numpy(q), kv)
    with pytest.raises(strata_pa.InvalidInput, match="ids in host memory"):
        strata_pa.prompt_attention(torch.from_numpy(q).cuda(), kv, **lists)
