"""Partial results on the GPU, and strata_pa.distributed over ranks that share one or have one each."""

import threading

import numpy as np
import pytest
from groups import check_digests, run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from on_gpu import device
from problems import PORTABLE, SPECS, build, paged, same_bytes
from test_partial import neighbour, numbers, parts

import strata_pa
from strata_pa import ExactAnchors, ExactSums

torch = pytest.importorskip("torch")
from distributed_ranks import SPECS as SPECS_OF_RANKS  # noqa: E402

pytestmark = pytest.mark.skipif(not device() or "exact" not in device()["kernels"], reason="needs a GPU with exact")


def there(x):
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def back(x):
    return x.cpu().numpy()


def place(q, kv, options):
    kv = strata_pa.PagedKV(*map(there, (kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)), kv.layout)
    return there(q), kv, {x: there(y) if x in ("ids", "widths") else y for x, y in options.items()}


def same_anchors(a, b):
    return np.array_equal(back(a.A), b.A, equal_nan=True) and same_bytes(back(a.b), b.b)


@settings(max_examples=60, deadline=None)
@given(SPECS, st.sampled_from([1.0, 40.0, 1e30]), st.sampled_from([0, 0.0005]))
def test_states_are_those_of_the_cpu(spec, loud, bad):
    """Anchors, sums under higher anchors, and the result; values that are not finite too."""
    q, kv, options = build(spec)
    rng = np.random.default_rng(spec["seed"])
    q *= np.float32(loud)
    q[rng.random(q.shape) < bad] = np.inf
    kv.v_scale[rng.random(kv.v_scale.shape) < bad] = np.nan
    host = paged(kv)
    q_there, kv_there, options_there = place(q, kv, options)
    anchors = strata_pa.exact_anchors(q, host, **options)
    anchors_there = strata_pa.exact_anchors(q_there, kv_there, **options_there)
    assert same_anchors(anchors_there, anchors)
    higher = ExactAnchors(anchors.A + np.float32(rng.integers(0, 3)), anchors.b)
    for given_anchors, given_there in ((anchors, anchors_there), (higher, ExactAnchors(there(higher.A), there(higher.b)))):
        sums = strata_pa.exact_sums(q, host, anchors=given_anchors, **options)
        sums_there = strata_pa.exact_sums(q_there, kv_there, anchors=given_there, **options_there)
        assert same_bytes(back(sums_there.L), sums.L)
        assert same_bytes(back(sums_there.O), sums.O)
    sums_there = strata_pa.exact_sums(q_there, kv_there, anchors=anchors_there, **options_there)
    for dtype in ("float32", "float16"):
        want = strata_pa.prompt_attention(q.astype(dtype), host, kernel="exact", return_lse=True, **options) if dtype == "float32" else None
        want = want or strata_pa.exact_finish(anchors, strata_pa.exact_sums(q, host, anchors=anchors, **options), dtype)
        got = strata_pa.exact_finish(anchors_there, sums_there, dtype)
        assert all(same_bytes(back(x), y) for x, y in zip(got, want, strict=True))


def test_a_list_that_spills():
    """More entries than 32-bit planes hold: sums in 64 bits within the kernel."""
    rng = np.random.default_rng(0)
    k, ks = strata_pa.quantize_kv(rng.standard_normal((64, 1, 16, 64), np.float32))
    v = np.full_like(k, 127)
    host = strata_pa.PagedKV(k, v, ks, ks, np.arange(64, dtype=np.int32))
    ids = rng.integers(0, 1024, (2, 140000)).astype(np.int32)
    q = rng.standard_normal((2, 3, 64), np.float32)
    q_there, kv_there, options = place(q, host, {"ids": ids})
    anchors = strata_pa.exact_anchors(q, host, ids=ids)
    assert same_anchors(strata_pa.exact_anchors(q_there, kv_there, **options), anchors)
    sums = strata_pa.exact_sums(q, host, anchors=anchors, ids=ids)
    got = strata_pa.exact_sums(q_there, kv_there, anchors=ExactAnchors(there(anchors.A), there(anchors.b)), **options)
    assert same_bytes(back(got.L), sums.L)
    assert same_bytes(back(got.O), sums.O)


def test_more_sequences_than_a_launch():
    rng = np.random.default_rng(1)
    k, ks = strata_pa.quantize_kv(rng.standard_normal((200, 2, 4, 64), np.float32))
    host = strata_pa.PagedKV(k, k, ks, ks, rng.integers(0, 200, (100, 3)).astype(np.int32))
    lengths = rng.integers(0, 4, 100)
    options = {"kv_len": rng.integers(1, 13, 100), "cu_seqlens_q": np.cumsum([0, *lengths])}
    q = rng.standard_normal((int(lengths.sum()), 6, 64), np.float32)
    q_there, kv_there, options_there = place(q, host, options)
    anchors, got = strata_pa.exact_anchors(q, host, **options), strata_pa.exact_anchors(q_there, kv_there, **options_there)
    assert same_anchors(got, anchors)
    sums = strata_pa.exact_sums(q, host, anchors=anchors, **options)
    assert same_bytes(back(strata_pa.exact_sums(q_there, kv_there, anchors=got, **options_there).O), sums.O)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_merging_states(seed):
    rng = np.random.default_rng(seed)
    first = numbers(rng, 300)
    for second in (numbers(rng, 300), neighbour(rng, first)):
        pair = [ExactAnchors(there(x.A), there(x.b)) for x in (first, second)]
        assert same_anchors(strata_pa.merge_anchors(pair), strata_pa.merge_anchors([first, second]))
        assert same_bytes(back(pair[0].keys()), first.keys())
        keys = torch.maximum(pair[0].keys(), pair[1].keys())
        assert same_anchors(ExactAnchors.from_keys(keys), strata_pa.merge_anchors([first, second]))
    sums = [ExactSums(rng.integers(-(2**60), 2**60, (7, 3)), rng.integers(-(2**60), 2**60, (7, 3, 64))) for _ in range(3)]
    merged, got = strata_pa.merge_sums(sums), strata_pa.merge_sums([ExactSums(there(x.L), there(x.O)) for x in sums])
    assert same_bytes(back(got.L), merged.L)
    assert same_bytes(back(got.O), merged.O)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 64), st.sampled_from([0.0, 1.0, 10.0, 300.0, 1e30]), st.sampled_from([1, 8, 64, 100, 256, 300])
)
def test_merge_partials(seed, n_parts, spread, dim):
    for dtype in (np.float32, np.float16):
        outs, lses = parts(seed, n_parts, dim=dim, spread=spread, dtype=dtype)
        lses[-1][1, 1] = (np.nan, np.inf, 0)[seed % 3]
        want = strata_pa.merge_partials(outs, lses)
        there_outs = list(map(there, outs))
        got = strata_pa.merge_partials(there_outs, list(map(there, lses)))
        assert all(same_bytes(back(x), y) for x, y in zip(got, want, strict=True))
        in_place, _ = strata_pa.merge_partials(there_outs, list(map(there, lses)), out=there_outs[-1])
        assert same_bytes(back(in_place), want[0])


def test_merge_partials_in_bfloat16():
    outs, lses = parts(5, 4, dim=64)
    outs = [torch.from_numpy(x).bfloat16() for x in outs]
    lses = [torch.from_numpy(x) for x in lses]
    lses[2][0, 1] = torch.nan
    want = strata_pa.merge_partials(outs, lses)
    got = strata_pa.merge_partials([x.cuda() for x in outs], [x.cuda() for x in lses])
    assert torch.equal(got[0].cpu().view(torch.int16), want[0].view(torch.int16))
    assert torch.equal(got[1].cpu().view(torch.int32), want[1].view(torch.int32))


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    outs, lses = parts(6, 3, dim=64)
    got = strata_pa.merge_partials([cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses])
    assert isinstance(got[0], cupy.ndarray)
    assert all(same_bytes(cupy.asnumpy(x), y) for x, y in zip(got, strata_pa.merge_partials(outs, lses), strict=True))
    anchors = [numbers(np.random.default_rng(i), 50) for i in range(3)]
    merged = strata_pa.merge_anchors([ExactAnchors(cupy.asarray(x.A), cupy.asarray(x.b)) for x in anchors])
    assert np.array_equal(cupy.asnumpy(merged.A), strata_pa.merge_anchors(anchors).A, equal_nan=True)


# Ranks


@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo"), (3, "gloo")])
def test_ranks_on_one_gpu(size, backend, tmp_path):
    answers = run_group("schemes", size, tmp_path, "cuda", backend)
    check_digests(answers)
    assert all(answer["digests"]["widths"]["golden"] == PORTABLE["widths"]["exact"] for answer in answers)
    assert max(max(answer["errors"].values()) for answer in answers) <= 1.5e-6


two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two
def test_a_gpu_for_each_rank(tmp_path):
    check_digests(run_group("schemes", 2, tmp_path, "cuda", "nccl"))


@two
def test_ranks_that_differ(tmp_path):
    for rank, answer in enumerate(run_group("differing", 2, tmp_path, "cuda", "nccl")):
        for name, got in answer["raised"].items():
            assert got["error"] in (("InvalidInput",) if rank == 1 else ("InvalidInput", "GroupError")), (name, got)
        assert answer["after"]


@two
@pytest.mark.parametrize("scenario", ["lost", "lost_within", "late"])
def test_a_lost_rank(scenario, tmp_path):
    answers = run_group(scenario, 2, tmp_path, "cuda", "nccl")
    assert answers[0]["error"] == "GroupError", answers
    assert answers[0]["seconds"] < 25


@two
def test_a_thread_for_each_gpu():
    """Calls of two devices at once, each with a kernel of its own."""
    q, kv, options = build({**SPECS_OF_RANKS["window"], "layout": "HND"})
    host = strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)
    failed = []

    def work(ordinal, kernel):
        with torch.cuda.device(1 - ordinal):  # another one is current
            arrays = [torch.from_numpy(x).to(f"cuda:{ordinal}") for x in (kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)]
            want = strata_pa.prompt_attention(q, host, kernel=kernel, **options)
            for _ in range(20):
                got = strata_pa.prompt_attention(
                    torch.from_numpy(q).to(f"cuda:{ordinal}"), strata_pa.PagedKV(*arrays), kernel=kernel, **options
                )
                if got.device.index != ordinal or not same_bytes(got.cpu().numpy(), want):
                    failed.append((ordinal, kernel))

    threads = [threading.Thread(target=work, args=x) for x in ((0, "fp32"), (1, "exact"), (0, "imma"), (1, "fp32"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
