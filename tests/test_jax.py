"""Arrays of JAX in host memory, through DLPack."""

import numpy as np
import pytest
from optional import need
from problems import KERNELS, same_bytes
from small import cache, queries

import strata_pa

jax = need("jax")
jnp = jax.numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_attention():
    """In: any of them. Out: NumPy arrays, or those that are given."""
    kv, q = cache(), queries()
    ids = np.array([[0, 3, 5], [1, -1, 2], [9, 9, 4]], np.int32)
    there = strata_pa.PagedKV(*(jnp.asarray(getattr(kv, x)) for x in ("k", "v", "k_scale", "v_scale", "page_table")))
    for kernel in KERNELS:
        want, want_lse = strata_pa.prompt_attention(q, kv, ids=ids, kernel=kernel, return_lse=True)
        out, lse = strata_pa.prompt_attention(jnp.asarray(q), there, ids=jnp.asarray(ids), kernel=kernel, return_lse=True)
        assert same_bytes(out, want)
        assert same_bytes(lse, want_lse)
        given = np.empty_like(q)
        assert strata_pa.prompt_attention(jnp.asarray(q), there, ids=ids, kernel=kernel, out=given) is given
        assert same_bytes(given, want)
        assert same_bytes(np.asarray(jnp.asarray(given) + 0), want)
    for dtype in (jnp.float16, jnp.bfloat16):
        half = jnp.asarray(q).astype(dtype)
        assert same_bytes(strata_pa.prompt_attention(half, there), strata_pa.prompt_attention(np.asarray(half), kv))


def test_quantize():
    x = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float32)
    for kind in (jnp.asarray(x), jnp.asarray(x).astype(jnp.bfloat16), jnp.asarray(x).astype(jnp.float16)):
        for got, want in zip(strata_pa.quantize_kv(kind, 32), strata_pa.quantize_kv(np.asarray(kind), 32), strict=True):
            assert same_bytes(got, want)


def test_it_is_immutable():
    kv, q = cache(), queries()
    with pytest.raises(strata_pa.InvalidInput, match="out is read-only"):
        strata_pa.prompt_attention(q, kv, out=jnp.zeros(q.shape, q.dtype))
