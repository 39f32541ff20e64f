"""strata_pa.torch: the operator, and the cache that quantizes on append."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optional import need
from problems import KERNELS, same_bytes

import strata_pa

torch = need("torch")
from strata_pa.torch import PagedInt8KVCache, prompt_attention  # noqa: E402

OPERATOR = torch.ops.strata_pa.prompt_attention.default
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(dtype=torch.float32, n_q=9, cells=40):
    g = torch.Generator().manual_seed(1)
    pages = cells // 4
    k, ks = strata_pa.quantize_kv(torch.randn(pages, 2, 4, 64, generator=g), 32)
    v, vs = strata_pa.quantize_kv(torch.randn(pages, 2, 4, 64, generator=g), 32)
    kv = strata_pa.PagedKV(k, v, ks, vs, torch.randperm(pages, generator=g).int())
    return torch.randn(n_q, 6, 64, generator=g).to(dtype), kv


def arguments(q, kv, *, ids=None, widths=None, kv_len=None, cu_seqlens_q=None, kernel=None, return_lse=False):
    arrays = (q, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table, kv.layout)
    return (*arrays, ids, widths, 1, kv_len, cu_seqlens_q, True, -1, None, kernel, return_lse)


def equal(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_the_operator_is_the_function(kernel, dtype):
    q, kv = problem(dtype)
    ids = torch.randint(-1, 40, (9, 20), dtype=torch.int32)
    widths = torch.randint(0, 21, (9,), dtype=torch.int32)
    for options in ({}, {"ids": ids, "widths": widths}, {"kv_len": 33, "causal": False, "window_left": 5, "sm_scale": 0.3}):
        want, want_lse = strata_pa.prompt_attention(q, kv, kernel=kernel, return_lse=True, **options)
        out, lse = prompt_attention(q, kv, kernel=kernel, return_lse=True, **options)
        assert equal(out, want)
        assert equal(lse, want_lse)
        assert equal(prompt_attention(q, kv, kernel=kernel, **options), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    q, kv = problem(dtype)
    ids, widths = torch.randint(-1, 40, (9, 20), dtype=torch.int32), torch.full((9,), 12, dtype=torch.int32)
    for options in ({}, {"kernel": "exact", "return_lse": True}, {"ids": ids, "widths": widths}, {"kv_len": [31]}):
        torch.library.opcheck(OPERATOR, arguments(q, kv, **options))


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_compiled_without_a_break(kernel):
    """The bytes of eager code, for several lengths."""

    def layer(q, kv, kv_len):
        out, lse = prompt_attention(q * 2, kv, kv_len=kv_len, kernel=kernel, return_lse=True)
        return out + 1, lse

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    q, kv = problem()
    for kv_len in (40, 39, 17):
        for a, b in zip(compiled(q, kv, kv_len), layer(q, kv, kv_len), strict=True):
            assert equal(a, b)


def test_compiled_by_inductor():
    q, kv = problem()
    torch.compiler.reset()
    compiled = torch.compile(lambda q, kv: prompt_attention(q.transpose(0, 1).contiguous().transpose(0, 1), kv, kv_len=38), fullgraph=True)
    assert equal(compiled(q, kv), prompt_attention(q, kv, kv_len=38))


def test_no_gradient(monkeypatch):
    q, kv = problem()
    q.requires_grad_()
    refused = pytest.raises(strata_pa.InvalidInput, match=r"inference.*use torch.no_grad\(\)")
    with refused:
        OPERATOR(*arguments(q, kv))
    with monkeypatch.context() as patch, refused:
        patch.setattr("strata_pa.torch._operator", None)  # nothing runs
        prompt_attention(q, kv)
    with torch.no_grad():
        assert equal(prompt_attention(q, kv), strata_pa.prompt_attention(q.detach(), kv))


def test_errors_are_those_of_the_function():
    q, kv = problem()
    with pytest.raises(strata_pa.UnsupportedProblem, match="v2: exists for CUDA devices"):
        prompt_attention(q, kv, kernel="v2")
    with pytest.raises(strata_pa.InvalidInput, match="kv_len"):
        prompt_attention(q, kv, kv_len=41)


# --- The cache


def random_kv(rng, n, dtype=torch.float32):
    return [torch.from_numpy(rng.standard_normal((n, 2, 64), np.float32)).to(dtype) for _ in range(2)]


def cells_of(cache, sequence):
    """Codes and scales of a sequence's cells, in order."""
    kv, n = cache.view(sequence), cache.length(sequence)
    pools = [getattr(kv, name) for name in ("k", "v", "k_scale", "v_scale")]
    if kv.layout == "NHD":
        pools = [pool.transpose(1, 2) for pool in pools]
    return [torch.stack([pool[kv.page_table[c // cache.page_size], :, c % cache.page_size] for c in range(n)]) for pool in pools]


def as_quantized(k, v, group):
    (kc, ks), (vc, vs) = (strata_pa.quantize_kv(x, group) for x in (k, v))
    return [kc, vc, ks, vs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_append_quantizes(layout, dtype):
    rng = np.random.default_rng(2)
    cache = PagedInt8KVCache(2, 64, group=32, page_size=4, layout=layout)
    a, b = cache.add(), cache.add()
    k, v = random_kv(rng, 11, dtype)
    cache.append(a, k[:5], v[:5])
    cache.append([b, a], k[5:], v[5:], counts=[4, 2])
    assert cache.lengths([a, b]) == [7, 4]
    for sequence, rows in ((a, [0, 1, 2, 3, 4, 9, 10]), (b, [5, 6, 7, 8])):
        for got, want in zip(cells_of(cache, sequence), as_quantized(k[rows], v[rows], 32), strict=True):
            assert equal(got.contiguous(), want)
    assert all(not pool.is_floating_point() or pool.dtype == torch.float16 for pool in cache._pools)
    q = torch.from_numpy(rng.standard_normal((6, 6, 64), np.float32))
    out = prompt_attention(q, cache.view([b, a]), kv_len=cache.lengths([b, a]), cu_seqlens_q=[0, 2, 6])
    assert equal(out[:2], prompt_attention(q[:2], cache.view(b), kv_len=4))
    assert equal(out[2:], prompt_attention(q[2:], cache.view(a), kv_len=7))


def test_a_prefix_is_shared_page_by_page():
    rng = np.random.default_rng(3)
    cache = PagedInt8KVCache(2, 64, page_size=4)
    a = cache.add()
    k, v = random_kv(rng, 10)
    cache.append(a, k, v)
    assert cache.used_pages == 3
    b = cache.fork(a)
    c = cache.fork(a, 8)
    assert cache.used_pages == 3
    more = random_kv(rng, 3)
    cache.append(b, *more)  # the third page is shared: copied, and a fourth one is taken
    assert cache.used_pages == 5
    cache.append(c, *more)  # begins a page
    assert cache.used_pages == 6
    for sequence, keep in ((a, 10), (b, 10), (c, 8)):
        want = [torch.cat([x[:keep], y[: cache.length(sequence) - keep]]) for x, y in zip((k, v), more, strict=True)]
        for got, expected in zip(cells_of(cache, sequence), as_quantized(*want, 64), strict=True):
            assert equal(got.contiguous(), expected)
    cache.remove(a)
    assert cache.used_pages == 5
    cache.truncate(b, 4)
    assert cache.used_pages == 3  # one of b, which c has too, and two of c
    cache.remove(b)
    cache.remove(c)
    assert cache.used_pages == 0
    assert cache.sequences == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add")),
        st.tuples(st.just("append"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("fork"), st.integers(0, 9), st.integers(0, 20)),
        st.tuples(st.just("truncate"), st.integers(0, 9), st.integers(0, 20)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(STEPS, st.sampled_from([1, 3, 4]), st.sampled_from(["HND", "NHD"]))
def test_any_history(steps, page_size, layout):
    """Whatever was added, forked, cut and removed: each sequence holds its own cells, and no page is lost or held twice."""
    rng = np.random.default_rng(4)
    cache = PagedInt8KVCache(2, 64, page_size=page_size, pages=2, layout=layout)
    held = {}
    for name, *numbers in [("add",), *steps]:
        if name == "add":
            held[cache.add()] = [torch.empty(0, 2, 64)] * 2
            continue
        if not held:
            continue
        sequence = sorted(held)[numbers[0] % len(held)]
        if name == "append":
            new = random_kv(rng, numbers[1])
            cache.append(sequence, *new)
            held[sequence] = [torch.cat(pair) for pair in zip(held[sequence], new, strict=True)]
        elif name == "remove":
            cache.remove(sequence)
            del held[sequence]
        else:
            length = min(numbers[1], cache.length(sequence))
            cut = [x[:length] for x in held[sequence]]
            if name == "fork":
                sequence = cache.fork(sequence, length)
            else:
                cache.truncate(sequence, length)
            held[sequence] = cut
    users = [0] * len(cache._users)
    for sequence, (k, v) in held.items():
        assert cache.length(sequence) == len(k)
        for page in cache._pages[sequence]:
            users[page] += 1
        if len(k):
            for got, want in zip(cells_of(cache, sequence), as_quantized(k, v, 64), strict=True):
                assert equal(got.contiguous(), want)
    assert users == cache._users
    assert sorted(cache._free) == [page for page, n in enumerate(users) if not n]


def test_what_cannot_be_appended():
    rng = np.random.default_rng(5)
    cache = PagedInt8KVCache(2, 64, page_size=4)
    a = cache.add()
    k, v = random_kv(rng, 3)
    cache.append(a, k, v)
    before = cells_of(cache, a)
    bad = v.clone()
    bad[1, 1, 7] = float("nan")
    for arguments, match in (
        ((a, k, bad), r"x\[1, 1, 7\] is not finite"),
        ((a, k[:, :1], v), r"k must be \[3, 2, 64\], got \[3, 1, 64\]"),
        ((a, k, v[:2]), r"v must be \[3, 2, 64\], got \[2, 2, 64\]"),
        ((7, k, v), r"no sequence 7; there are \[1\]"),
        (([a, a], k, v, [1, 2]), "each named once"),
        (([a], k, v, [2]), "do not deal out 3 cells"),
        ((a, k.clone().requires_grad_(), v), "k requires a gradient"),
        ((a, k.double(), v), "x must be float32 or float16 or bfloat16"),
    ):
        with pytest.raises(strata_pa.InvalidInput, match=match):
            cache.append(*arguments)
        assert cache.length(a) == 3
    assert all(equal(x, y) for x, y in zip(cells_of(cache, a), before, strict=True))
    cache.append(a, k, v)
    assert all(equal(x[3:].contiguous(), y) for x, y in zip(cells_of(cache, a), as_quantized(k, v, 64), strict=True))
    for arguments, match in (((0, 64), "n_kv is 0"), ((2, 64, 48), "group 48 does not divide"), ((2, 64, 64, 4, 0, "HDN"), "layout")):
        names = ("n_kv", "head_dim", "group", "page_size", "pages", "layout")
        with pytest.raises(strata_pa.InvalidInput, match=match):
            PagedInt8KVCache(**dict(zip(names, arguments, strict=False)))
    with pytest.raises(strata_pa.InvalidInput, match="has 6 cells, not 7"):
        cache.fork(a, 7)


def test_dequantized():
    rng = np.random.default_rng(6)
    cache = PagedInt8KVCache(2, 64, group=32, page_size=4, layout="NHD")
    a = cache.add()
    k, v = random_kv(rng, 9)
    cache.append(a, k, v)
    for x, got in zip((k, v), cache.dequantized(a), strict=True):
        codes, scales = strata_pa.quantize_kv(x, 32)
        assert same_bytes(got.numpy(), codes.numpy().astype(np.float32) * np.repeat(scales.numpy(), 32, -1).astype(np.float32))
