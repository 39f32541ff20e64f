"""A cache that quantizes what is appended to it, two sequences that share a prompt, and the operator in a compiled function.

pip install strata_pa torch && python examples/pytorch_cache.py
"""

import torch

from strata_pa.torch import PagedInt8KVCache, prompt_attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def tokens(n, heads):
    return torch.randn(n, heads, HEAD_DIM, device=device)


# The prompt's 100 tokens are read once, in two calls.
cache = PagedInt8KVCache(KV_HEADS, HEAD_DIM, device=device)
prompt = cache.add()
for n in (64, 36):
    cache.append(prompt, tokens(n, KV_HEADS), tokens(n, KV_HEADS))
    out = prompt_attention(tokens(n, HEADS), cache.view(prompt), kv_len=cache.length(prompt))
    print(f"{n} queries over {cache.length(prompt)} cells: {list(out.shape)}")

# Two continuations share its pages; one step of both is one call.
both = [cache.fork(prompt), cache.fork(prompt)]
cache.append(both, tokens(2, KV_HEADS), tokens(2, KV_HEADS), counts=[1, 1])
print(cache)


@torch.compile(fullgraph=True)
def step(q, kv, kv_len, cu_seqlens_q):
    return prompt_attention(q, kv, kv_len=kv_len, cu_seqlens_q=cu_seqlens_q)


q = tokens(2, HEADS)
out = step(q, cache.view(both), cache.lengths(both), [0, 1, 2])

# A token's result does not depend on what else is in the call: the bytes are those of two calls.
for i, sequence in enumerate(both):
    alone = prompt_attention(q[i : i + 1], cache.view(sequence), kv_len=cache.length(sequence))
    assert torch.equal(out[i : i + 1], alone)
print("the batch and each sequence alone: the same bytes")
