"""int8 KV and the package's kernels for the decoder-only models of Transformers.

    strata_pa.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="strata_pa")
    model.generate(**inputs, cache=strata_pa.transformers.Int8Cache())  # past_key_values= in releases where it has that name

Importing this module imports PyTorch and Transformers. Tested with the releases in docs/frameworks.md.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from . import _core
from .torch import PagedInt8KVCache, prompt_attention

NAME = "strata_pa"


def register() -> str:
    """Makes `attn_implementation="strata_pa"` known to Transformers, and returns that name. Once is enough; again does no harm."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


class Int8Cache(Cache):
    """The int8 KV cache of a model, in place of the cache that `generate` would make: each layer has a `PagedInt8KVCache`.

    A batch may be padded on either side: padding is neither stored nor attended to, and gets zeros. Beam search, assisted generation and
    sliding windows are served; a sliding layer keeps its cells. Attention runs under `attn_implementation="strata_pa"` only.
    """

    def __init__(self, *, group: int = 64, page_size: int = 16, kernel: str | None = None) -> None:
        """An empty cache.

        Args:
            group: dims that share a scale; it divides head_dim.
            page_size: cells of a page.
            kernel: as in `strata_pa.prompt_attention`, for the prompt and each token after it; None: as `set_imma` and the environment say.
        """
        register()
        super().__init__(layer_class_to_replicate=functools.partial(Int8Layer, group=group, page_size=page_size, kernel=kernel))


class Int8Layer(CacheLayerMixin):
    """One layer of an `Int8Cache`. Its `update` hands itself to the attention function, which appends what is not padding."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, *, group: int = 64, page_size: int = 16, kernel: str | None = None) -> None:
        super().__init__()
        self.group, self.page_size, self.kernel = group, page_size, kernel
        self.cells: PagedInt8KVCache | None = None
        self.sequences: list[int] = []
        self.seen = 0  # tokens, with padding
        self._new: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, n_kv, _, dim = key_states.shape
        if value_states.shape[-1] != dim:
            raise _core.UnsupportedProblem(f"head_dim of the keys is {dim}, of the values {value_states.shape[-1]}; they must be the same")
        self.cells = PagedInt8KVCache(n_kv, dim, group=self.group, page_size=self.page_size, device=key_states.device)
        self.sequences = [self.cells.add() for _ in range(batch)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._new is not None or len(key_states) != len(self.sequences):
            raise _core.InvalidInput(
                f"an Int8Cache of {len(self.sequences)} sequences was updated with {len(key_states)}, or twice without attention "
                f"between; call reset() before other prompts, and use attn_implementation={NAME!r}"
            )
        self._new = key_states, value_states
        self.seen += key_states.shape[-2]
        return self, self

    @property
    def shape(self) -> Any:
        """What other attention functions look at first."""
        raise _core.InvalidInput(f"an Int8Cache is read by attn_implementation={NAME!r} only; the model has another one")

    def attend(self, query: Tensor, padding: "Padding", scale: float | None) -> Tensor:
        """Appends what `update` was given and attends to it: [batch, heads, n, head_dim] -> [batch, n, heads, head_dim]."""
        if self._new is None or self.cells is None:
            raise _core.InvalidInput("the layer's cache was not updated before its attention")
        (k, v), self._new = self._new, None
        batch, _, n, _ = query.shape
        rows = padding.rows
        if rows is not None and list(padding.before) != (held := self.cells.lengths(self.sequences)):
            raise _core.InvalidInput(f"attention_mask has {list(padding.before)} tokens before the new ones, the cache {held}")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) if rows is None else x.transpose(1, 2).flatten(0, 1)[rows] for x in (query, k, v))
        counts = [n] * batch if rows is None else list(padding.counts)
        self.append(k, v, counts)
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        out = self.run(q, ends, padding.window_left, scale)
        if rows is not None:
            out = out.new_zeros(batch * n, *out.shape[1:]).index_copy_(0, rows, out)
        return out.unflatten(0, (batch, n))

    def append(self, k: Tensor, v: Tensor, counts: list[int]) -> None:
        """New cells of all sequences."""
        assert self.cells is not None
        self.cells.append(self.sequences, k, v, counts)

    def run(self, q: Tensor, ends: list[int], window_left: int, scale: float | None) -> Tensor:
        """Attention of the queries of all sequences; sequence i has those from ends[i] to ends[i + 1]."""
        assert self.cells is not None
        return prompt_attention(
            q,
            self.cells.view(self.sequences),
            kv_len=self.cells.lengths(self.sequences),
            cu_seqlens_q=ends,
            window_left=window_left,
            sm_scale=scale,
            kernel=self.kernel,
        )

    # What `generate` asks of a layer

    @property
    def batch_size(self) -> int:
        return len(self.sequences)

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in earlier releases

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.cells, self.sequences, self.seen, self._new, self.is_initialized = None, [], 0, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens of each sequence: -3 three of them, 0 none.

        Raises:
            InvalidInput: a positive number (a length to keep, in earlier releases), or more tokens than a sequence has.
        """
        if tokens_to_remove > 0:
            raise _core.InvalidInput(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if tokens_to_remove and self.cells is not None:
            for sequence in self.sequences:
                self.cells.truncate(sequence, self.cells.length(sequence) + tokens_to_remove)
            self.seen += tokens_to_remove

    def _select(self, indices: list[int]) -> None:
        """Sequences become forks of those at `indices`, which share their pages."""
        if self.cells is None:
            return
        old, self.sequences = self.sequences, [self.cells.fork(self.sequences[i]) for i in indices]
        for sequence in old:
            self.cells.remove(sequence)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(len(self.sequences))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def offload(self) -> None:
        raise _core.UnsupportedProblem("an Int8Cache is not offloaded")

    prefetch = offload


@dataclass(frozen=True)
class Padding:
    """What a forward pass's attention mask says: which new tokens there are (rows of [batch * n]; None: all), and the window.

    counts: new tokens of each sequence; before: those that the cache should have already.
    """

    rows: Tensor | None = None
    counts: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    window_left: int = -1


def mask(
    *,
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Padding:
    """The mask function of Transformers: causal, with a window or without, and padding."""
    if not allow_is_causal_skip or kv_offset:
        raise _core.UnsupportedProblem(
            "attention that is not causal with at most a sliding window (packed sequences, blocks, prefixes that see each other, "
            "bidirectional) is not served"
        )
    window_left = -1 if local_size is None else local_size - 1
    if attention_mask is None:
        return Padding(window_left=window_left)
    if attention_mask.ndim != 2 or attention_mask.shape[-1] != kv_length:
        raise _core.UnsupportedProblem(f"attention_mask must be [batch, {kv_length}], got {list(attention_mask.shape)}")
    known = attention_mask.bool().cpu()
    if bool(known.all()):
        return Padding(window_left=window_left)
    begins = known[:, 0].int() + (known[:, 1:] & ~known[:, :-1]).sum(1)
    if int(begins.max()) > 1:
        row = int(begins.argmax())
        raise _core.UnsupportedProblem(
            f"attention_mask has padding between the tokens of sequence {row}; pad on one side (for generate on the left)"
        )
    new = known[:, kv_length - q_length :]
    return Padding(
        rows=new.flatten().nonzero()[:, 0].to(attention_mask.device),
        counts=tuple(new.sum(1).tolist()),
        before=tuple(known[:, : kv_length - q_length].sum(1).tolist()),
        window_left=window_left,
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of Transformers: [batch, heads, n, head_dim] -> [batch, n, heads, head_dim], and no weights.

    Raises:
        InvalidInput: a cache that is no `Int8Cache`.
        UnsupportedProblem: dropout, a soft cap, sinks, a position bias, attention weights, or a mask that `mask` did not make.
    """
    if not isinstance(key, Int8Layer):
        raise _core.InvalidInput(
            f"attn_implementation={NAME!r} reads an Int8Cache: pass cache=strata_pa.transformers.Int8Cache() (past_key_values= in releases "
            f"where it has that name) to generate or the model; got {type(key).__name__}"
        )
    asked = [name for name in ("softcap", "s_aux", "position_bias", "head_mask") if others.get(name) is not None]
    asked += ["output_attentions"] if others.get("output_attentions") else []
    asked += [f"dropout {dropout}"] if dropout else []
    asked += ["attention that is not causal"] if not (getattr(module, "is_causal", True) if is_causal is None else is_causal) else []
    if asked:
        raise _core.UnsupportedProblem(f"not served by attn_implementation={NAME!r}: {', '.join(asked)}")
    window_left = -1 if sliding_window is None else sliding_window - 1
    padding = Padding(window_left=window_left) if attention_mask is None else attention_mask
    if not isinstance(padding, Padding):
        raise _core.UnsupportedProblem(f"attention_mask must be [batch, tokens], not a mask of one's own ({type(attention_mask).__name__})")
    if padding.window_left != window_left:
        raise _core.UnsupportedProblem(
            f"the layer's sliding_window is {sliding_window}, but its mask was made for a local size of {padding.window_left + 1 or None}"
        )
    return key.attend(query, padding, scaling), None
