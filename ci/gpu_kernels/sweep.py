"""Small random problems over everything that the portable kernels serve, with the referee's answers."""

import concurrent.futures
import pathlib
import sys
from types import SimpleNamespace

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python")]

GEOMETRIES = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128), (256, 32), (256, 64), (256, 128), (256, 256)]
KERNELS = ("fp32", "imma", "exact")


def bfloat16():
    import ml_dtypes

    return ml_dtypes.bfloat16


def problem(seed, birth=False):
    """(arrays, layout, options of the referee and of Problem, kind) of one seed; birth: ordinary numbers, geometry 24 / 2 / 256 / 64."""
    r = np.random.default_rng(1000 + seed)
    dim, group = (256, 64) if birth else GEOMETRIES[seed % len(GEOMETRIES)]
    reps, n_kv = (12, 2) if birth or seed % 5 == 0 else (int(r.integers(1, 17)), int(r.integers(1, 4)))
    page_size = int(r.choice([1, 3, 4, 16, 17, 64]))
    n_seq = int(r.choice([1, 1, 1, 2, 3]))
    lengths = [int(r.choice([1, 31, 64, 65, 130, 257, 400])) for _ in range(n_seq)]
    counts = [int(min(r.integers(0, 6) if n_seq > 1 else r.integers(1, 7), n)) for n in lengths]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    n_q = int(starts[-1])
    longest = max(lengths)
    max_pages = -(-longest // page_size) + int(r.integers(0, 3))
    pages = max_pages * n_seq + 2
    layout = "NHD" if r.random() < 0.3 else "HND"
    shape = (pages, n_kv, page_size) if layout == "HND" else (pages, page_size, n_kv)
    k, v = (r.integers(-128, 128, (*shape, dim)).astype(np.int8) for _ in range(2))
    k_scale, v_scale = (r.uniform(0.002, 0.03, (*shape, dim // group)).astype(np.float16) for _ in range(2))
    kind = r.choice(["plain", "plain", "signs", "zeros", "large", "tiny", "mixed", "nan_q", "inf_scale", "overflow"])
    kind = "plain" if birth else kind
    q = r.normal(0, 2, (n_q, reps * n_kv, dim)).astype(np.float32)
    if kind == "signs":
        k_scale *= r.choice([-1, 1], k_scale.shape).astype(np.float16)
        v_scale *= r.choice([-1, 1], v_scale.shape).astype(np.float16)
    elif kind == "zeros":
        k_scale[r.random(k_scale.shape) < 0.3] = 0
        v_scale[r.random(v_scale.shape) < 0.5] = 0
        v_scale[r.random(shape) < 0.3] = 0
        q[r.random(q.shape[:2]) < 0.3] = 0
    elif kind == "large":
        q *= np.float32(10.0) ** r.integers(0, 12)
    elif kind == "tiny":
        q *= np.float32(2.0) ** np.float32(r.choice([-90, -101, -105, -130, -140]))
        v_scale[:] = (v_scale.astype(np.float32) * 2.0**-16).astype(np.float16)
    elif kind == "mixed":
        v_scale[:] = (v_scale.astype(np.float32) * 2.0 ** r.integers(-18, 20, v_scale.shape)).astype(np.float16)
        q *= (2.0 ** r.integers(-20, 4, (n_q, reps * n_kv, dim // group))).astype(np.float32).repeat(group, -1)
    elif kind == "nan_q":
        q[r.random(q.shape) < 0.002] = r.choice([np.nan, np.inf, -np.inf])
    elif kind == "inf_scale":
        for s in (k_scale, v_scale):
            s[r.random(s.shape) < 0.0005] = r.choice([np.nan, np.inf, -np.inf])
    elif kind == "overflow":
        q[r.random(q.shape[:2]) < 0.3] *= np.float32(1e37)
        k_scale *= np.float16(1000)
    table = r.permutation(pages)[: n_seq * max_pages].reshape(n_seq, max_pages).astype(np.int32)
    if r.random() < 0.3:
        table[r.random(table.shape) < 0.15] = -1
    if r.random() < 0.1:
        table[r.random(table.shape) < 0.1] = pages + 5
    ids = widths = None
    granularity = 1
    if r.random() < 0.6:
        granularity = int(r.choice([1, 1, 1, 4, 16, 64, 128]))
        cap = max(1, -(-longest // granularity)) if r.random() < 0.7 else int(r.integers(1, 90))
        size = (n_q, cap) if r.random() < 0.5 else (n_q, n_kv, cap)
        ids = r.integers(0, -(-longest // granularity), size).astype(np.int32)
        if r.random() < 0.5:
            ids = np.sort(ids, -1)
        if r.random() < 0.4:
            ids[r.random(ids.shape) < 0.2] = -1
        if r.random() < 0.2:
            ids[r.random(ids.shape) < 0.05] = r.choice([-(2**31), -7, 2**31 - 1, 2**30, 2**24, longest + 3])
        if r.random() < 0.6:
            widths = r.integers(0, cap + 1, n_q).astype(np.int32)
    options = dict(
        granularity=granularity,
        causal=bool(r.random() < 0.8),
        window_left=int(r.choice([-1, -1, 0, 5, 40, 100])),
        sm_scale=None if r.random() < 0.7 else float(r.uniform(0.01, 0.2)),
        cu_seqlens_q=starts,
    )
    if seed % 4 == 2:
        q = q.astype(np.float16)
    elif seed % 4 == 3:
        q = q.astype(bfloat16())
    arrays = dict(
        q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, page_table=table, ids=ids, widths=widths, kv_len=np.array(lengths, np.int32)
    )
    return arrays, layout, options, str(kind)


def answer(seed):
    from strata_pa import reference

    p, layout, options, _ = problem(seed)
    kv = SimpleNamespace(**{x: p[x] for x in ("k", "v", "k_scale", "v_scale", "page_table")}, layout=layout)
    options = {**options, **{x: p[x] for x in ("ids", "widths", "kv_len")}}
    with np.errstate(all="ignore"):
        return {kernel: reference.portable(kernel, p["q"], kv, return_lse=True, **options) for kernel in KERNELS}


def answer_birth(seed):
    """In float64."""
    from strata_pa import reference

    p, layout, options, _ = problem(seed, birth=True)
    kv = SimpleNamespace(**{x: p[x] for x in ("k", "v", "k_scale", "v_scale", "page_table")}, layout=layout)
    return reference.attention_float64(p["q"], kv, return_lse=True, **options, **{x: p[x] for x in ("ids", "widths", "kv_len")})


def answers(seeds, answer=answer):
    with concurrent.futures.ProcessPoolExecutor() as pool:
        yield from zip(seeds, pool.map(answer, seeds, chunksize=4), strict=True)
