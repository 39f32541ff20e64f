"""Small problems for tests of behaviour, where the numbers do not matter."""

import numpy as np

import strata_pa


def pool(pages=5, page_size=4, n_kv=2, head_dim=64, group=32, seed=0):
    """(codes, scales) in HND order."""
    x = np.random.default_rng(seed).standard_normal((pages, n_kv, page_size, head_dim), np.float32)
    return strata_pa.quantize_kv(x, group)


def cache(pages=5, page_size=4, n_kv=2, head_dim=64, group=32, page_table=None):
    k, k_scale = pool(pages, page_size, n_kv, head_dim, group, 1)
    v, v_scale = pool(pages, page_size, n_kv, head_dim, group, 2)
    table = np.arange(pages, dtype=np.int32)[::-1].copy() if page_table is None else page_table
    return strata_pa.PagedKV(k, v, k_scale, v_scale, table)


def queries(n_q=3, n_head=4, head_dim=64, dtype=np.float32):
    return np.random.default_rng(3).standard_normal((n_q, n_head, head_dim), np.float32).astype(dtype)


def replace(kv, **fields):
    names = ("k", "v", "k_scale", "v_scale", "page_table", "layout")
    return strata_pa.PagedKV(**{name: fields.get(name, getattr(kv, name)) for name in names})
