"""fp32, imma and exact give the CPU's bytes: digests, and problems of every shape that is served."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_gpu import Placed, device, digest
from problems import SPECS, build, paged, same_bytes

import strata_pa
from strata_pa._device import DeviceArray, ordinal_of, to_device

PORTABLE = json.loads((Path(__file__).parents[1] / "golden" / "portable.json").read_text())["cases"]
HERE = device()
KERNELS = [k for k in ("fp32", "imma", "exact") if HERE and k in HERE["kernels"]]

kernels = pytest.mark.parametrize("kernel", KERNELS)
cases = pytest.mark.parametrize("name", PORTABLE)


@kernels
@cases
def test_whole(name, kernel):
    assert digest(Placed(name).run(kernel=kernel)) == PORTABLE[name][kernel]


@kernels
@cases
@pytest.mark.parametrize("step", [1, 7, 64])
def test_queries_in_several_calls(name, kernel, step):
    assert digest(Placed(name).run(step, kernel=kernel)) == PORTABLE[name][kernel]


@kernels
@cases
def test_shuffled_pages(name, kernel):
    assert digest(Placed(name, shuffle=11).run(kernel=kernel)) == PORTABLE[name][kernel]


@kernels
@cases
def test_on_a_side_stream(name, kernel):
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    placed = Placed(name)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
    strata_pa.prompt_attention(placed.q, placed.kv, out=placed.out, kernel=kernel, stream=stream, **placed.options)
    stream.synchronize()
    assert digest(placed.out.read()) == PORTABLE[name][kernel]


@kernels
def test_switches(kernel, monkeypatch):
    """The same by every way to ask for it."""
    monkeypatch.setenv("STRATA_PA_KERNEL", kernel)
    assert digest(Placed("tiny").run()) == PORTABLE["tiny"][kernel]
    if kernel == "imma":
        monkeypatch.delenv("STRATA_PA_KERNEL")
        strata_pa.set_imma(True)
        assert digest(Placed("tiny").run()) == PORTABLE["tiny"][kernel]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SPECS, st.sampled_from([np.float32, np.float16]))
def test_random_problems(spec, dtype):
    q, kv, options = build(spec)
    q, kv = q.astype(dtype), paged(kv)
    there, kv_there, options_there = to_device(q, kv, options, HERE["device"])
    for kernel in KERNELS:
        want = strata_pa.prompt_attention(q, kv, kernel=kernel, **options)
        out = DeviceArray(np.full(q.shape, 7, dtype), ordinal_of(HERE["device"]))
        strata_pa.prompt_attention(there, kv_there, kernel=kernel, out=out, **options_there)
        assert same_bytes(out.read(), want), kernel


def test_many_sequences():
    """More than one launch takes."""
    rng = np.random.default_rng(5)
    counts = rng.integers(0, 4, 150)
    n_seq, n_q, page_size = len(counts), int(counts.sum()), 4
    k, ks = strata_pa.quantize_kv(rng.standard_normal((60, 2, page_size, 64), np.float32), 32)
    v, vs = strata_pa.quantize_kv(rng.standard_normal((60, 2, page_size, 64), np.float32), 32)
    table = rng.integers(0, 60, (n_seq, 9)).astype(np.int32)
    q, kv = rng.standard_normal((n_q, 6, 64), np.float32), strata_pa.PagedKV(k, v, ks, vs, table)
    options = {"cu_seqlens_q": np.cumsum([0, *counts]), "kv_len": rng.integers(4, 37, n_seq)}
    there, kv_there, options_there = to_device(q, kv, options, HERE["device"])
    for kernel in KERNELS:
        out = DeviceArray(np.full_like(q, np.nan), ordinal_of(HERE["device"]))
        strata_pa.prompt_attention(there, kv_there, kernel=kernel, out=out, **options_there)
        assert same_bytes(out.read(), strata_pa.prompt_attention(q, kv, kernel=kernel, **options)), kernel


def test_selftest():
    report = strata_pa.selftest(HERE["device"])
    assert report.ok, str(report)
