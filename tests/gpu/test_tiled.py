"""exact with a workspace: the bytes of its plain form, in every call that takes a tiled one."""

import json
from pathlib import Path

import numpy as np
import pytest
from on_gpu import Placed, device, digest
from problems import same_bytes

import strata_pa
from strata_pa._device import DeviceArray, ordinal_of, to_device, workspace_on

PORTABLE = json.loads((Path(__file__).parents[1] / "golden" / "portable.json").read_text())["cases"]
HERE = device()
cases = pytest.mark.parametrize("name", list(PORTABLE))
pytestmark = pytest.mark.skipif(not HERE or "exact" not in HERE["kernels"], reason="no GPU that has exact")


def with_workspace(placed):
    size = strata_pa.plan(placed.q, placed.kv, kernel="exact", **placed.options).workspace_bytes
    assert size > 0
    return workspace_on(HERE["device"], size + (64 << 20))  # calls of a few of its queries may split cells, and ask for more


def on_the_card(q, kv, options):
    """exact with the workspace of its plan, into an array that held something else."""
    there, kv_there, options_there = to_device(q, kv, options, HERE["device"])
    size = strata_pa.plan(there, kv_there, kernel="exact", **options_there).workspace_bytes
    assert size > 0
    out = DeviceArray(np.full(q.shape, 7, q.dtype), ordinal_of(HERE["device"]))
    strata_pa.prompt_attention(there, kv_there, kernel="exact", out=out, workspace=workspace_on(HERE["device"], size), **options_there)
    return out.read()


@cases
@pytest.mark.parametrize("step", [None, 1, 7, 64])
def test_golden_digests(name, step):
    placed = Placed(name)
    assert digest(placed.run(step, kernel="exact", workspace=with_workspace(placed))) == PORTABLE[name]["exact"]


@cases
def test_shuffled_pages(name):
    placed = Placed(name, shuffle=11)
    assert digest(placed.run(kernel="exact", workspace=with_workspace(placed))) == PORTABLE[name]["exact"]


@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed):
    """Lists that are not sorted, name cells twice or nothing; masked pages; large scores; values that are not finite; windows; 16-bit q."""
    r = np.random.default_rng(seed)
    n_kv, page_size, kv_len = int(r.choice([1, 2, 3])), int(r.choice([1, 4, 17])), int(r.choice([1, 65, 300, 1000]))
    n_q, pages = int(min(r.integers(1, 23), kv_len)), -(-kv_len // page_size)
    shape = (pages, n_kv, page_size)
    k, v = (r.integers(-128, 128, (*shape, 256)).astype(np.int8) for _ in range(2))
    ks, vs = (r.uniform(0.002, 0.03, (*shape, 4)).astype(np.float16) for _ in range(2))
    q = r.normal(0, float(r.choice([0.1, 2, 40, 1000])), (n_q, 12 * n_kv, 256)).astype(r.choice([np.float32, np.float16]))
    if seed % 5 == 0:
        q[r.random(q.shape) < 0.001] = np.nan
        vs[r.random(vs.shape) < 0.001] = np.inf
    table = r.permutation(pages).astype(np.int32)
    if seed % 3 == 0:
        table[r.random(pages) < 0.2] = -1
    options = {"kv_len": kv_len, "causal": bool(r.random() < 0.8), "window_left": int(r.choice([-1, 5, 100]))}
    if seed % 4:
        ids = np.stack([r.permutation(kv_len)[: max(1, kv_len // 2)] for _ in range(n_q)]).astype(np.int32)
        ids = np.sort(ids, -1) if seed % 2 else ids
        if seed % 8 == 1:
            ids[r.random(ids.shape) < 0.1] = ids[0, 0]
        options |= {"ids": ids, "widths": r.integers(0, ids.shape[1] + 1, n_q).astype(np.int32)}
    kv = strata_pa.PagedKV(k, v, ks, vs, table)
    want = strata_pa.prompt_attention(q, kv, kernel="exact", return_lse=True, **options)
    assert same_bytes(on_the_card(q, kv, options), want[0])


GEOMETRIES = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 32), (256, 64), (256, 128), (256, 256)]


@pytest.mark.parametrize("seed", range(90))
def test_random_geometries(seed):
    """Every head_dim, group and number of heads; several sequences; few queries beside long contexts, whose cells are split over blocks."""
    r = np.random.default_rng(1000 + seed)
    dim, group = GEOMETRIES[seed % len(GEOMETRIES)]
    n_kv, heads, page_size = int(r.integers(1, 4)), int(r.integers(1, 17)), int(r.choice([1, 4, 16, 17]))
    lengths = [int(x) for x in r.choice([0, 1, 63, 64, 65, 400, 1500, 6000], r.choice([1, 1, 3]))]
    counts = [int(r.integers(0, min(n, 9 if n > 1000 else 70) + 1)) for n in lengths]
    counts[0] = max(counts[0], 1)
    n_q, max_pages = sum(counts), -(-max(*lengths, 1) // page_size)
    pages = max_pages * len(lengths)
    shape = (pages, n_kv, page_size)
    k, v = (r.integers(-128, 128, (*shape, dim)).astype(np.int8) for _ in range(2))
    ks, vs = (r.uniform(0.002, 0.03, (*shape, dim // group)).astype(np.float16) for _ in range(2))
    q = r.normal(0, float(r.choice([0.1, 2, 2, 1000])), (n_q, heads * n_kv, dim)).astype(r.choice([np.float32, np.float16]))
    table = r.permutation(pages).astype(np.int32).reshape(len(lengths), max_pages)
    if seed % 5 == 0:
        q[r.random(q.shape) < 0.0005] = np.inf
        vs[r.random(vs.shape) < 0.0002] = np.nan
    if seed % 3 == 0:
        table[r.random(table.shape) < 0.1] = -1
    options = {
        "kv_len": lengths,
        "cu_seqlens_q": np.cumsum([0, *counts]),
        "causal": bool(r.random() < 0.8),
        "window_left": int(r.choice([-1, -1, 5, 100, 3000])),
    }
    if seed % 2:
        granularity = int(r.choice([1, 1, 4, 64]))
        choices = -(-max(*lengths, 1) // granularity)
        cap = int(r.integers(1, min(choices, 2100) + 1))
        size = (n_q, cap) if r.random() < 0.5 else (n_q, n_kv, cap)
        ids = np.empty(size, np.int32)
        for at in np.ndindex(size[:-1]):
            ids[at] = r.permutation(choices)[:cap]
        if seed % 8 == 1:
            ids[r.random(ids.shape) < 0.02] = ids.flat[0]
        options |= {"ids": ids, "granularity": granularity}
    kv = strata_pa.PagedKV(k, v, ks, vs, table)
    want = strata_pa.prompt_attention(q, kv, kernel="exact", **options)
    assert same_bytes(on_the_card(q, kv, options), want)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("n_q", "cells"), [(1, 9000), (6, 3000), (40, 7000), (130, 4000), (300, 6000)])
@pytest.mark.parametrize("lists", [False, True])
def test_cells_split_over_blocks(dim, n_q, cells, lists):
    """From one query, whose cells many blocks share, to tiles that fill a card a little more than once; windows; repeated cells; NaN."""
    r = np.random.default_rng(n_q)
    n_kv, heads, page_size = 2, int(r.choice([3, 8, 12])), 16
    pages = -(-cells // page_size)
    shape = (pages, n_kv, page_size)
    k, v = (r.integers(-128, 128, (*shape, dim)).astype(np.int8) for _ in range(2))
    ks, vs = (r.uniform(0.002, 0.03, (*shape, dim // 64)).astype(np.float16) for _ in range(2))
    q = r.normal(0, 2, (n_q, heads * n_kv, dim)).astype(np.float32)
    q[n_q // 2, 0, 5] = np.nan
    options = {"kv_len": cells, "window_left": -1 if n_q % 4 else cells // 2}
    if lists:
        base = r.permutation(cells - n_q)[: cells // 2]
        ids = np.stack([np.where(r.random(len(base)) < 0.1, -1, base) for _ in range(n_q)]).astype(np.int32)
        ids[n_q - 1, :2] = base[3], base[3]
        options["ids"] = ids
    kv = strata_pa.PagedKV(k, v, ks, vs, r.permutation(pages).astype(np.int32))
    want = strata_pa.prompt_attention(q, kv, kernel="exact", **options)
    assert same_bytes(on_the_card(q, kv, options), want)


@pytest.mark.parametrize("cells", [65536, 131072])
def test_sums_of_full_blocks(cells):
    """As the next test, dense: 70 tiles, so that a block of a large card has 65,536 cells."""
    shape = (cells // 1024, 1, 1024)
    k, v = np.zeros((*shape, 256), np.int8), np.full((*shape, 256), -128, np.int8)
    scales = np.full((*shape, 4), 2047 / 2048, np.float16)
    kv = strata_pa.PagedKV(k, v, scales, scales, np.arange(cells // 1024, dtype=np.int32))
    q = np.zeros((70 * 32, 1, 256), np.float32)
    options = {"kv_len": cells, "causal": False}
    want = strata_pa.prompt_attention(q[:1], kv, kernel="exact", **options)
    assert same_bytes(on_the_card(q, kv, options), np.broadcast_to(want, q.shape))


@pytest.mark.parametrize("width", [65536, 70000])
def test_sums_beyond_32_bits(width):
    """Equal scores and one code in every cell: a byte of the weights times the code, over the list, is about 2^31."""
    cells, page_size = 70000, 1000
    shape = (cells // page_size, 1, page_size)
    k, v = np.zeros((*shape, 256), np.int8), np.full((*shape, 256), -128, np.int8)
    scales = np.full((*shape, 4), 2047 / 2048, np.float16)
    kv = strata_pa.PagedKV(k, v, scales, scales, np.arange(cells // page_size, dtype=np.int32))
    q = np.zeros((2, 12, 256), np.float32)
    ids = np.stack([np.random.default_rng(i).permutation(cells)[:width] for i in range(2)]).astype(np.int32)
    options = {"kv_len": cells, "causal": False, "ids": ids}
    want = strata_pa.prompt_attention(q, kv, kernel="exact", **options)
    assert np.abs(want + 127.9375).max() < 1e-4
    assert same_bytes(on_the_card(q, kv, options), want)


def test_capture():
    torch = pytest.importorskip("torch")
    placed = Placed("select2100")
    workspace = with_workspace(placed)
    run = {"out": placed.out, "kernel": "exact", "workspace": workspace, **placed.options}
    strata_pa.prompt_attention(placed.q, placed.kv, **run)
    want = digest(placed.out.read())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        strata_pa.prompt_attention(placed.q, placed.kv, stream=stream, **run)
    for _ in range(2):
        placed.out.write(np.full(placed.out.shape, np.nan, placed.out.dtype))
        graph.replay()
        torch.cuda.synchronize()
        assert digest(placed.out.read()) == want == PORTABLE["select2100"]["exact"]
