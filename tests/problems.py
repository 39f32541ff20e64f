"""Problems that several test files use: the golden cases, and random ones of every shape that is served."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

import strata_pa

PORTABLE = json.loads((Path(__file__).parent / "golden" / "portable.json").read_text())["cases"]
KERNELS = ("fp32", "imma", "exact")


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def paged(kv):
    """The cache of a reference's or a random problem's arrays."""
    return strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table, kv.layout)


def random_kv(rng, n_seq, max_pages, n_kv, page_size, dim, group, layout="HND", spare=2):
    """Pools of random cells, in shuffled pages."""
    pages = n_seq * max_pages + spare
    shape = (pages, n_kv, page_size) if layout == "HND" else (pages, page_size, n_kv)
    return SimpleNamespace(
        k=rng.integers(-128, 128, (*shape, dim)).astype(np.int8),
        v=rng.integers(-128, 128, (*shape, dim)).astype(np.int8),
        k_scale=rng.uniform(0.002, 0.02, (*shape, dim // group)).astype(np.float16),
        v_scale=rng.uniform(0.002, 0.02, (*shape, dim // group)).astype(np.float16),
        page_table=rng.permutation(pages)[: n_seq * max_pages].reshape(n_seq, max_pages).astype(np.int32),
        layout=layout,
    )


def random_q(rng, n_q, n_head, dim):
    return rng.standard_normal((n_q, n_head, dim)).astype(np.float32)


SPECS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "dim_group": st.sampled_from([(d, g) for d in (64, 128, 256) for g in (32, 64, 128, 256) if g <= d]),
        "n_kv": st.integers(1, 2),
        "n_rep": st.integers(1, 16),
        "page_size": st.sampled_from([1, 3, 4, 16]),
        "layout": st.sampled_from(["HND", "NHD"]),
        "sequences": st.lists(st.tuples(st.integers(0, 4), st.integers(0, 150)), min_size=1, max_size=3),  # (queries, cells)
        "absent": st.sampled_from([0, 0, 0.2]),
        "causal": st.booleans(),
        "window_left": st.sampled_from([-1, -1, 0, 5, 70]),
        "lists": st.sampled_from([None, "shared", "per head"]),
        "granularity": st.sampled_from([1, 4]),
        "cap": st.integers(0, 25),
        "widths": st.booleans(),
        "varlen": st.booleans(),
    }
)


# What a spec of one's own need not name: it adds seed, dim_group, n_rep and sequences.
PLAIN = {
    "n_kv": 2, "page_size": 4, "layout": "HND", "absent": 0, "causal": True, "window_left": -1, "lists": None, "granularity": 1, "cap": 0,
    "widths": False, "varlen": False,
}  # fmt: skip


def build(s):
    """(q, kv, options) of a spec: every shape that is served, small, at times with more queries than cells."""
    rng = np.random.default_rng(s["seed"])
    counts, kv_len = np.array(s["sequences"]).T
    n_q, longest = int(counts.sum()), int(kv_len.max())
    max_pages = max(1, -(-longest // s["page_size"]))
    kv = random_kv(rng, len(counts), max_pages, s["n_kv"], s["page_size"], *s["dim_group"], s["layout"])
    kv.page_table[rng.random(kv.page_table.shape) < s["absent"]] = -1
    options = {"kv_len": kv_len, "cu_seqlens_q": np.cumsum([0, *counts]), "causal": s["causal"], "window_left": s["window_left"]}
    if s["lists"]:
        cap = s["cap"] * 4 // s["granularity"]
        shape = (n_q, cap) if s["lists"] == "shared" else (n_q, s["n_kv"], cap)
        ids = rng.integers(0, 1 + longest // s["granularity"], shape)
        options |= {"ids": np.where(rng.random(shape) < 0.1, -1, ids).astype(np.int32), "granularity": s["granularity"]}
        if s["widths"]:
            options["widths"] = rng.integers(0, cap + 1, n_q).astype(np.int32)
    if len(counts) == 1 and not s["varlen"]:
        kv.page_table, options["kv_len"] = kv.page_table[0], int(kv_len[0])
        del options["cu_seqlens_q"]
    return random_q(rng, n_q, s["n_kv"] * s["n_rep"], s["dim_group"][0]), kv, options
