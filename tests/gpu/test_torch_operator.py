"""strata_pa.torch on the GPU: opcheck, compiled functions, CUDA graphs; and a model of Transformers."""

import numpy as np
import pytest
from on_gpu import device
from test_libraries import problem

import strata_pa

torch = pytest.importorskip("torch")
from strata_pa.torch import prompt_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
KERNELS = [None, *(k for k in ("v2", "fp32", "imma", "exact") if device() and k in device()["kernels"])]
OPERATOR = torch.ops.strata_pa.prompt_attention.default


def placed(dtype=torch.float32, seed=1):
    q, arrays, lists = problem(seed)
    there = {name: torch.from_numpy(x).cuda() for name, x in lists.items()}
    return torch.from_numpy(q).to("cuda", dtype), strata_pa.PagedKV(*(torch.from_numpy(a).cuda() for a in arrays)), there


def equal(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_opcheck(dtype):
    q, kv, lists = placed(dtype)
    arrays = (q, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table, kv.layout)
    for kernel in (None, "fp32", "exact"):
        torch.library.opcheck(OPERATOR, (*arrays, lists["ids"], lists["widths"], 1, [297], None, True, -1, None, kernel, True))
    torch.library.opcheck(OPERATOR, (*arrays, None, None, 1, None, None, True, -1, None, None, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_without_a_break(kernel, dtype):
    q, kv, lists = placed(dtype)

    def layer(q, kv, ids, widths, kv_len):
        out, lse = prompt_attention(q * 2, kv, ids=ids, widths=widths, kv_len=kv_len, kernel=kernel, return_lse=True)
        return out + 1, lse

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for kv_len in (300, 287):
        got, want = (f(q, kv, lists["ids"], lists["widths"], kv_len) for f in (compiled, layer))
        assert all(equal(a, b) for a, b in zip(got, want, strict=True))
    host = strata_pa.PagedKV(*(getattr(kv, name).cpu() for name in ("k", "v", "k_scale", "v_scale", "page_table")))
    if kernel in ("fp32", "imma", "exact"):
        on_host = prompt_attention(q.cpu() * 2, host, ids=lists["ids"].cpu(), widths=lists["widths"].cpu(), kv_len=287, kernel=kernel)
        assert equal(got[0].cpu(), on_host + 1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_captured(kernel):
    """A graph of the operator reads its arrays anew; one that the compiler makes does so too."""
    q, kv, lists = placed()
    static = [q, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table, *lists.values()]

    def call(q=q):
        return prompt_attention(q, kv, **lists, kernel=kernel)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for seed in (2, 3, 4):
        new_q, new_kv, new_lists = placed(seed=seed)
        new = [new_q, new_kv.k, new_kv.v, new_kv.k_scale, new_kv.v_scale, new_kv.page_table, *new_lists.values()]
        for old, x in zip(static, new, strict=True):
            old.copy_(x)
        want = prompt_attention(new_q, new_kv, **new_lists, kernel=kernel)
        out.fill_(float("nan"))
        graph.replay()
        assert equal(out, want), seed
        assert equal(compiled(q).clone(), want), seed


def test_no_gradient():
    q, kv, _ = placed()
    with pytest.raises(strata_pa.InvalidInput, match="inference"):
        prompt_attention(q.requires_grad_(), kv)


def test_a_model_of_transformers():
    """A padded batch: the attention of each layer is float64's for the cells that the layer holds."""
    pytest.importorskip("transformers")
    from test_transformers import HEADS, SIZES, Checked, cache_of, generate, prompts, run
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval().cuda()
    tokens, known = (x.cuda() for x in prompts())
    for kernel in (k for k in KERNELS if k != "v2"):
        cache = cache_of(Checked, kernel=kernel)
        assert run(model, tokens, cache, known).isfinite().all()
        assert generate(model, tokens, cache_of(Checked, kernel=kernel), known, num_beams=2).shape == (2, 8)
        assert np.array_equal(cache.layers[0].cells.lengths(cache.layers[0].sequences), [20, 13])
