"""`generate` with int8 KV: a padded batch, greedy and with beams.

    pip install 'strata_pa[transformers]' && python examples/transformers_generate.py

A small model with random weights stands in for yours, which from_pretrained(..., attn_implementation="strata_pa") would load.
"""

import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import strata_pa.transformers
from strata_pa.transformers import Int8Cache

strata_pa.transformers.register()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval().to(device)
model.set_attn_implementation("strata_pa")

# The second prompt is shorter: padded on the left, as generate wants it.
prompts = torch.randint(3, 500, (2, 40), device=device)
known = torch.ones_like(prompts)
prompts[1, :15], known[1, :15] = 0, 0

# The argument's name depends on the release of Transformers.
argument = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
for options in ({}, {"num_beams": 3}):
    cache = Int8Cache()
    tokens = model.generate(prompts, attention_mask=known, max_new_tokens=12, do_sample=False, **{argument: cache}, **options)
    print(options or "greedy", tokens[:, 40:].tolist())
    print(" ", cache.layers[0].cells)

alone = model.generate(prompts[1:, 15:], max_new_tokens=12, do_sample=False, **{argument: Int8Cache()})
print("the second prompt alone", alone[:, 25:].tolist())
