"""The paged int8 KV cache of PyTorch tensors: strata_pa.torch.PagedInt8KVCache."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import _core
from .cache import PagedKV


class PagedInt8KVCache:
    """The paged int8 KV cache of one attention layer: sequences of cells in a pool of pages, quantized as they are appended.

    A sequence is named by the int that `add` or `fork` gives. A fork shares the pages of its source; a page that is shared is copied before
    one of its sequences writes to it. Nothing is kept in floating point. The host decides where cells go, so `append` is not for a compiled
    or captured function; attention over a `view` is.
    """

    def __init__(
        self,
        n_kv: int,
        head_dim: int,
        *,
        group: int = 64,
        page_size: int = 16,
        pages: int = 0,
        layout: str = "HND",
        device: torch.device | str = "cpu",
    ) -> None:
        """An empty cache.

        Args:
            n_kv: KV heads.
            head_dim: dims of a head.
            group: dims that share a scale; it divides head_dim.
            page_size: cells of a page.
            pages: of the pool at the start; it doubles when it is full.
            layout: "HND" or "NHD", the order of the pool's dimensions, as in `PagedKV`.
            device: where the pool is.

        Raises:
            InvalidInput: a size that cannot be, a group that does not divide head_dim, another layout.
        """
        sizes = {"n_kv": n_kv, "head_dim": head_dim, "group": group, "page_size": page_size, "1 + pages": 1 + pages}
        if wrong := [f"{name} is {value}" for name, value in sizes.items() if value < 1]:
            raise _core.InvalidInput(f"sizes must be at least 1: {', '.join(wrong)}")
        if head_dim % group:
            raise _core.InvalidInput(f"group {group} does not divide head_dim {head_dim}")
        if layout not in ("HND", "NHD"):
            raise _core.InvalidInput(f"layout must be 'HND' or 'NHD', got {layout!r}")
        self.n_kv, self.head_dim, self.group, self.page_size, self.layout = n_kv, head_dim, group, page_size, layout
        cells = (n_kv, page_size) if layout == "HND" else (page_size, n_kv)
        codes, scales = (*cells, head_dim), (*cells, head_dim // group)
        self._pools = [
            torch.zeros((pages, *shape), dtype=dtype, device=device)
            for shape, dtype in ((codes, torch.int8), (codes, torch.int8), (scales, torch.float16), (scales, torch.float16))
        ]
        self._users = [0] * pages  # of a page: how many sequences have it
        self._free = list(range(pages))[::-1]
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._names = 0
        self._version = 0  # of all page lists together
        self._table: tuple[tuple[object, ...], Tensor] | None = None

    def __repr__(self) -> str:
        return (
            f"PagedInt8KVCache({len(self._lengths)} sequences, {sum(self._lengths.values())} cells in {self.used_pages} of "
            f"{len(self._users)} pages of {self.page_size}, {self.n_kv} KV heads, head_dim {self.head_dim}, group {self.group}, "
            f"{self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self._pools[0].device

    @property
    def sequences(self) -> list[int]:
        """The sequences, oldest first."""
        return list(self._lengths)

    @property
    def used_pages(self) -> int:
        """Pages that some sequence has."""
        return len(self._users) - len(self._free)

    def length(self, sequence: int) -> int:
        """Cells of a sequence."""
        self._check([sequence])
        return self._lengths[sequence]

    def lengths(self, sequences: Iterable[int]) -> list[int]:
        """Cells of several sequences: the `kv_len` of their `view`."""
        return [self.length(s) for s in sequences]

    def add(self) -> int:
        """A new, empty sequence."""
        self._names += 1
        self._pages[self._names], self._lengths[self._names] = [], 0
        return self._names

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` cells of another one, by default all, and shares their pages."""
        length = self.length(sequence) if length is None else length
        self._check_length(sequence, length)
        new = self.add()
        self._pages[new], self._lengths[new] = self._pages[sequence][: self._pages_of(length)], length
        for page in self._pages[new]:
            self._users[page] += 1
        return new

    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` cells of a sequence."""
        self._check_length(sequence, length)
        keep = self._pages_of(length)
        self._release(self._pages[sequence][keep:])
        del self._pages[sequence][keep:]
        self._lengths[sequence] = length

    def remove(self, sequence: int) -> None:
        """Forgets a sequence; pages that no other one has are free for new cells."""
        self.truncate(sequence, 0)
        del self._pages[sequence], self._lengths[sequence]

    def append(self, sequences: int | Sequence[int], k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> None:
        """Quantizes keys and values and appends them as new cells.

        Args:
            sequences: one, or several different ones.
            k, v: float32, float16 or bfloat16 `[n, n_kv, head_dim]`, on the pool's device; the cells of all sequences, one after another.
            counts: how many of them belong to each sequence; None: all to the one.

        Raises:
            InvalidInput: shapes that do not fit, a tensor that requires a gradient, and in host memory a value that `quantize_kv` refuses:
                the sequences keep their lengths then.
        """
        names = [sequences] if isinstance(sequences, int) else list(sequences)
        self._check(names)
        counts = [len(k)] if counts is None and len(names) == 1 else list(counts or ())
        if len(counts) != len(names) or len(set(names)) != len(names) or min(counts, default=0) < 0 or sum(counts) != len(k):
            raise _core.InvalidInput(f"counts {counts} do not deal out {len(k)} cells to the sequences {names}, each named once")
        for argument, x in (("k", k), ("v", v)):
            if x.shape != (len(k), self.n_kv, self.head_dim):
                raise _core.InvalidInput(f"{argument} must be [{len(k)}, {self.n_kv}, {self.head_dim}], got {list(x.shape)}")
            if x.requires_grad and torch.is_grad_enabled():
                raise _core.InvalidInput(f"{argument} requires a gradient; codes have none: use torch.no_grad()")
        places = [slot for pair in zip(names, counts, strict=True) for slot in self._slots(*pair)]
        slots = torch.tensor(places, dtype=torch.int64, device=self.device)
        for x, codes, scales in ((k, 0, 2), (v, 1, 3)):
            _core.quantize(x.detach(), self.group, self._heads_first(codes), self._heads_first(scales), slots)
        for name, count in zip(names, counts, strict=True):
            self._lengths[name] += count

    def view(self, sequences: int | Sequence[int]) -> PagedKV:
        """The cache of these sequences, for `prompt_attention`; good until one of them changes.

        One sequence as an int has a page table `[max_pages]`, several have `[n_seq, max_pages]`. `lengths` gives the `kv_len` to it.
        """
        names = [sequences] if isinstance(sequences, int) else list(sequences)
        self._check(names)
        key = (isinstance(sequences, int), tuple(names), self._version)
        if self._table is None or self._table[0] != key:
            rows = [self._pages[name] for name in names]
            width = max(1, *map(len, rows)) if rows else 1
            table = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).reshape(len(rows), width)
            self._table = key, (table[0] if key[0] else table).to(self.device)
        k, v, k_scale, v_scale = self._pools
        return PagedKV(k, v, k_scale, v_scale, self._table[1], self.layout)

    def dequantized(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence as the attention sees them, float32 `[n, n_kv, head_dim]`: a copy, for checks."""
        cells = torch.arange(self.length(sequence), device=self.device)
        pages = torch.tensor(self._pages[sequence], dtype=torch.int64, device=self.device)[cells // self.page_size]
        codes_k, codes_v, scales_k, scales_v = (self._heads_first(i)[pages, :, cells % self.page_size].float() for i in range(4))
        return codes_k * scales_k.repeat_interleave(self.group, -1), codes_v * scales_v.repeat_interleave(self.group, -1)

    def _check(self, sequences: Sequence[int]) -> None:
        if unknown := [s for s in sequences if s not in self._lengths]:
            raise _core.InvalidInput(f"there is no sequence {unknown[0]!r}; there are {self.sequences}")

    def _check_length(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self.length(sequence):
            raise _core.InvalidInput(f"sequence {sequence} has {self.length(sequence)} cells, not {length}")

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _heads_first(self, pool: int) -> Tensor:
        return self._pools[pool] if self.layout == "HND" else self._pools[pool].transpose(1, 2)

    def _slots(self, sequence: int, count: int) -> list[int]:
        """Where the next cells go: a shared last page is copied, new pages are taken."""
        pages, first = self._pages[sequence], self._lengths[sequence]
        end = first + count
        if count and first % self.page_size and self._users[shared := pages[first // self.page_size]] > 1:
            mine = self._take(1)[0]
            for pool in self._pools:
                pool[mine] = pool[shared]
            self._release([shared])
            pages[first // self.page_size] = mine
        if (missing := self._pages_of(end) - len(pages)) > 0:
            pages += self._take(missing)
        return [pages[cell // self.page_size] * self.page_size + cell % self.page_size for cell in range(first, end)]

    def _take(self, count: int) -> list[int]:
        self._version += 1
        if (short := count - len(self._free)) > 0:
            old = len(self._users)
            more = max(short, old)
            self._pools = [torch.cat([pool, pool.new_zeros((more, *pool.shape[1:]))]) for pool in self._pools]
            self._users += [0] * more
            self._free = list(range(old, old + more))[::-1] + self._free
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def _release(self, pages: Iterable[int]) -> None:
        self._version += 1
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
