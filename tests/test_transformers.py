"""strata_pa.transformers: models of several families.

Two runs that differ in the last bit of an activation may round a code to another integer, which shows in the logits
(docs/accuracy.md). So the attention itself is compared within a run, with float64 over the same cells, and runs are compared with
FLIPS of room.
"""

import functools
import inspect

import pytest
from optional import need

import strata_pa

torch = need("torch")
transformers = need("transformers")
from strata_pa.transformers import NAME, Int8Cache, Int8Layer, register  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES | {"hidden_size": 256}, num_attention_heads=4, num_key_value_heads=2)
    ),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **HEADS)),
    "Mistral, a window of 8": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **HEADS, sliding_window=8)),
    "Gemma": lambda: transformers.GemmaForCausalLM(
        transformers.GemmaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=256)
    ),
    "Gemma3, windows of 8": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES, **HEADS, sliding_window=8, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=40
        )
    ),
}


@functools.cache
def model_of(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.ndim > 1 else 1)  # attention that looks somewhere
    model.generation_config.eos_token_id = None
    return model


class Checked(Int8Layer):
    """Compares with attention in float64 over the same cells."""

    def run(self, q, ends, window_left, scale):
        out = super().run(q, ends, window_left, scale)
        for sequence, first, end in zip(self.sequences, ends, ends[1:], strict=False):
            if first == end:
                continue
            k, v = (x.double().transpose(0, 1) for x in self.cells.dequantized(sequence))
            rows = q[first:end].double().transpose(0, 1)
            k, v = (x.repeat_interleave(len(rows) // len(k), 0) for x in (k, v))
            cell = torch.arange(k.shape[1], device=k.device)
            pos = k.shape[1] - (end - first) + torch.arange(end - first, device=k.device)[:, None]
            seen = (cell <= pos) & ((cell >= pos - window_left) if window_left >= 0 else True)
            scores = torch.where(seen, rows @ k.transpose(1, 2) * (scale or rows.shape[-1] ** -0.5), -torch.inf)
            want = (scores.softmax(-1) @ v).transpose(0, 1)
            room = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[q.dtype]
            assert (out[first:end].double() - want).abs().max() <= room * want.abs().max()
            self.checks = getattr(self, "checks", 0) + 1
        return out


class Copied(Int8Layer):
    """Copies cells where a fork shares them."""

    def _select(self, indices):
        old, self.sequences = self.sequences, [self.cells.add() for _ in indices]
        for new, i in zip(self.sequences, indices, strict=True):
            self.cells.append(new, *self.cells.dequantized(old[i]))


def cache_of(layer=Int8Layer, **options):
    cache = Int8Cache()
    cache.layer_class_to_replicate = functools.partial(layer, **options)
    return cache


def name_of_cache(model):
    """The argument for a cache: its name differs between releases."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


@torch.no_grad()
def run(model, tokens, cache, known=None, implementation=NAME, **options):
    register()
    model.set_attn_implementation(implementation)
    return model(tokens, attention_mask=known, use_cache=True, **{name_of_cache(model): cache}, **options).logits


@torch.no_grad()
def generate(model, tokens, cache, known=None, **options):
    register()
    model.set_attn_implementation(NAME)
    known = torch.ones_like(tokens) if known is None else known
    options = {"max_new_tokens": 8, "do_sample": False, name_of_cache(model): cache, **options}
    done = model.generate(tokens, attention_mask=known, **options)
    return done[:, tokens.shape[1] :] if isinstance(done, torch.Tensor) else done


def prompts(padding="left"):
    """Two prompts of 20 and 13 tokens."""
    tokens = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(2))
    known = torch.ones_like(tokens)
    at = slice(0, 7) if padding == "left" else slice(13, 20)
    tokens[1, at], known[1, at] = 0, 0
    return tokens, known


FLIPS = 5e-3  # of the logits


def near(a, b):
    return torch.linalg.norm(a - b) <= FLIPS * torch.linalg.norm(b)


@pytest.mark.parametrize("kernel", [None, "imma", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_attention(name, kernel):
    """A padded prompt in two parts, then a token; the positions are those of one pass."""
    model, (tokens, known) = model_of(name), prompts()
    cache = cache_of(Checked, kernel=kernel, page_size=4)
    at = (known.cumsum(1) - 1).clamp(min=0)
    parts = [run(model, tokens[:, a:b], cache, known[:, :b], position_ids=at[:, a:b]) for a, b in ((0, 14), (14, 19), (19, 20))]
    assert [layer.checks for layer in cache.layers] == [6, 6]
    assert cache.get_seq_length() == 20
    assert cache.layers[0].cells.lengths(cache.layers[0].sequences) == [20, 13]
    whole = run(model, tokens, cache_of(kernel=kernel), known, position_ids=at)
    assert near(torch.cat(parts, 1)[known.bool()], whole[known.bool()])


@pytest.mark.parametrize("name", MODELS)
def test_int8_is_close_to_what_the_model_does_without(name):
    """Not the same numbers, but the same model: windows, scales and rotary positions are where they belong."""
    model, (tokens, known) = model_of(name), prompts()
    kept = {"position_ids": (known.cumsum(1) - 1).clamp(min=0)}
    ours = run(model, tokens, cache_of(), known, **kept)[known.bool()]
    floats = run(model, tokens, None, known, "eager", **kept)[known.bool()]
    assert torch.linalg.norm(ours - floats) < 0.05 * torch.linalg.norm(floats)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name, padding):
    model, (tokens, known) = model_of(name), prompts(padding)
    cache = cache_of()
    batch = run(model, tokens, cache, known, position_ids=(known.cumsum(1) - 1).clamp(min=0))
    assert cache.layers[1].cells.lengths(cache.layers[1].sequences) == [20, 13]
    for i in range(2):
        there = known[i].bool()
        assert near(batch[i][there], run(model, tokens[i : i + 1, there], cache_of())[0])


@pytest.mark.parametrize("name", MODELS)
def test_generate(name):
    """A padded batch gives what each prompt gives alone, until two tokens are too close to call."""
    model, (tokens, known) = model_of(name), prompts()
    logits = {"return_dict_in_generate": True, "output_logits": True}
    cache = cache_of(Checked)
    together = generate(model, tokens, cache, known, **logits)
    assert together.sequences.shape == (2, 28)
    assert [layer.checks for layer in cache.layers] == [16, 16]
    for i in range(2):
        alone = generate(model, tokens[i : i + 1, known[i].bool()], cache_of(), **logits)
        for step, (a, b) in enumerate(zip(together.logits, alone.logits, strict=True)):
            assert near(a[i], b[0])
            assert together.sequences[i, 20 + step] == a[i].argmax()
            if a[i].argmax() != b[0].argmax():
                first, second = b[0].topk(2).values
                assert first - second < 4 * FLIPS * b[0].std()
                break


def test_beams():
    """Beams fork; with copies in place of forks the same comes out."""
    model, (tokens, known) = model_of("Llama"), prompts()
    beams = {"num_beams": 4, "num_return_sequences": 2}
    cache = cache_of(page_size=4)
    ours = generate(model, tokens, cache, known, **beams)
    assert torch.equal(ours, generate(model, tokens, cache_of(Copied, page_size=4), known, **beams))
    layer = cache.layers[0]
    assert len(layer.sequences) == 8
    assert layer.cells.used_pages < 8 * 7  # prompts are shared


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, (tokens, known) = model_of("Llama"), prompts()
    model = type(model)(model.config).eval().to(dtype)
    cache = cache_of(Checked)
    assert run(model, tokens, cache, known).dtype == dtype
    assert [layer.checks for layer in cache.layers] == [2, 2]


def test_a_prompt_is_read_on():
    """A second turn of a conversation appends to the cache of the first."""
    model, (tokens, _) = model_of("Qwen3"), prompts()
    cache = cache_of()
    first = generate(model, tokens[:1], cache)
    longer = torch.cat([tokens[:1], first, tokens[1:, 8:12]], 1)
    assert torch.equal(generate(model, longer, cache), generate(model, longer, cache_of()))


def test_what_generate_asks_of_a_cache():
    model, (tokens, _) = model_of("Llama"), prompts()
    cache = cache_of(page_size=4)
    run(model, tokens, cache)
    layer = cache.layers[0]
    before = [layer.cells.dequantized(s) for s in layer.sequences]

    def holds(*wanted):
        for sequence, (index, length) in zip(layer.sequences, wanted, strict=True):
            for x, y in zip(layer.cells.dequantized(sequence), before[index], strict=True):
                assert torch.equal(x, y[:length])

    cache.crop(-3)
    holds((0, 17), (1, 17))
    assert cache.get_seq_length() == 17
    cache.reorder_cache(torch.tensor([1, 1]))
    holds((1, 17), (1, 17))
    assert layer.cells.used_pages == 5
    cache.batch_repeat_interleave(2)
    holds(*[(1, 17)] * 4)
    cache.batch_select_indices(torch.tensor([True, False, False, False]))
    holds((1, 17))
    assert layer.batch_size == 1
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(strata_pa.InvalidInput, match="negative number, got 3"):
        cache.crop(3)
    assert near(run(model, tokens, cache), run(model, tokens, cache_of()))


def test_refusals():
    model, (tokens, known) = model_of("Llama"), prompts()
    with pytest.raises(strata_pa.InvalidInput, match=r"reads an Int8Cache.*got Tensor"):
        run(model, tokens, transformers.DynamicCache())
    for implementation in ("eager", "sdpa"):
        with pytest.raises(strata_pa.InvalidInput, match="the model has another one"):
            run(model, tokens, cache_of(), implementation=implementation)
    holes = known.clone()
    holes[0, 5] = 0
    with pytest.raises(strata_pa.UnsupportedProblem, match="padding between the tokens of sequence 0; pad on one side"):
        run(model, tokens, cache_of(), holes)
    with pytest.raises(strata_pa.UnsupportedProblem, match="not a mask of one's own"):
        run(model, tokens, cache_of(), torch.zeros(2, 1, 20, 20))
    cache = cache_of()
    run(model, tokens, cache, known)
    other = torch.ones(2, 21, dtype=torch.long)
    other[1, :5] = 0
    with pytest.raises(strata_pa.InvalidInput, match=r"has \[20, 15\] tokens before the new ones, the cache \[20, 13\]"):
        run(model, tokens[:, :1], cache, other)
    cache.reset()
    run(model, tokens, cache, known)
    with pytest.raises(strata_pa.InvalidInput, match="of 2 sequences was updated with 1"):
        run(model, tokens[:1], cache)
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **HEADS)).eval()
    with pytest.raises(strata_pa.UnsupportedProblem, match="softcap"):
        run(gemma, tokens, cache_of())
    model.set_attn_implementation(NAME)
    with pytest.raises(strata_pa.InvalidInput, match="requires a gradient"):
        model(tokens, use_cache=True, **{name_of_cache(model): cache_of()})
    with pytest.raises(strata_pa.UnsupportedProblem, match="v2: exists for CUDA devices"):
        run(model, tokens, cache_of(kernel="v2"))
