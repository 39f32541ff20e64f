"""A paged int8 KV cache in NumPy arrays: quantize keys and values, attend to them, compare with float64.

pip install strata_pa && python examples/numpy_attention.py
"""

import numpy as np

import strata_pa

HEADS, KV_HEADS, HEAD_DIM, CELLS, PAGE = 8, 2, 128, 1200, 16

rng = np.random.default_rng(0)
keys, values = rng.standard_normal((2, CELLS, KV_HEADS, HEAD_DIM), np.float32)


def pages_of(x):
    """[cells, heads, head_dim] -> [pages, heads, cells of a page, head_dim]"""
    return np.ascontiguousarray(x.reshape(CELLS // PAGE, PAGE, KV_HEADS, -1).swapaxes(1, 2))


# The cells of a sequence lie in pages of a pool, in any order; the page table says where.
k, k_scale = strata_pa.quantize_kv(pages_of(keys))
v, v_scale = strata_pa.quantize_kv(pages_of(values))
order = rng.permutation(CELLS // PAGE)
place = np.argsort(order)
kv = strata_pa.PagedKV(k[place], v[place], k_scale[place], v_scale[place], page_table=order.astype(np.int32))

# The last 100 tokens of the prompt: each attends to every cell up to its own.
q = rng.standard_normal((100, HEADS, HEAD_DIM), np.float32)
out = strata_pa.prompt_attention(q, kv, kv_len=CELLS)


# The same in float64, for the cache as it is stored.
def stored(codes, scales):
    """[cells, heads, head_dim] in the order of the tokens"""
    return (codes * np.repeat(scales, 64, -1).astype(np.float64)).swapaxes(1, 2).reshape(CELLS, KV_HEADS, -1)


stored_k, stored_v = stored(k, k_scale), stored(v, v_scale)
want = np.empty(out.shape)
for i, row in enumerate(q.astype(np.float64)):
    seen = CELLS - len(q) + i + 1
    for head in range(HEADS):
        ks, vs = (x[:seen, head // (HEADS // KV_HEADS)] for x in (stored_k, stored_v))
        scores = ks @ row[head] / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        want[i, head] = weights @ vs / weights.sum()

error = np.abs(out - want).max() / np.abs(want).max()
print(strata_pa.plan(q, kv, kv_len=CELLS))
print(f"greatest difference to float64, over its greatest value: {error:.1e}")
assert error < 1e-6
