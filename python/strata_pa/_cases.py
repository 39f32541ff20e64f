"""The problems of `strata-pa parity`: made ones, the same bytes on every machine, and captures read from a file."""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .cache import PagedKV

Array = npt.NDArray[Any]

N_HEAD, N_KV, HEAD_DIM, GROUP, PAGE_SIZE = 24, 2, 256, 64, 4
MOST_CELLS, RECENT_CELLS = 2051, 512  # of a selection
DRIFT = 0.03  # the part of a selection's older cells that the next query replaces

# (context, queries): what `parity` measures when nothing is asked for.
CPU_SHAPES: tuple[tuple[int, int], ...] = ((8192, 64), (600, 600), (2100, 64))
GPU_SHAPES: tuple[tuple[int, int], ...] = ((32768, 2048), (1500, 1500), (2100, 256))

SAMPLE = Path(__file__).with_name("data") / "sample_layer.npz"


class DataError(Exception):
    """A capture that cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Case:
    """One call: `prompt_attention(q, kv, **options)`."""

    name: str
    context: int
    queries: int
    q: Array  # [queries, n_head, D]
    kv: PagedKV
    options: dict[str, Any]

    @property
    def cells(self) -> int:
        """The cells that the rows see, over all queries (of one KV head)."""
        ids = self.options["ids"]
        if ids is None:
            return self.queries * self.context - self.queries * (self.queries - 1) // 2
        widths = self.options["widths"]
        return int((ids >= 0).sum()) if widths is None else int(widths.sum())

    @property
    def widest(self) -> int:
        """The cells of the longest row."""
        ids = self.options["ids"]
        if ids is None:
            return self.context
        widths = self.options["widths"]
        return int((ids >= 0).sum(1).max(initial=0) if widths is None else widths.max(initial=0))

    @property
    def flop(self) -> int:
        """Multiplications and additions of the two products."""
        n_head, dim = self.q.shape[1:]
        return 4 * self.cells * int(n_head * dim)

    def sampled(self, most: int) -> list[int]:
        """At most `most` of the queries, evenly spread, the first and the last among them."""
        return sorted({int(i) for i in np.linspace(0, self.queries - 1, min(most, self.queries)).round()})


class _Random:
    """Numbers from PCG64's raw words and exact arithmetic: NumPy promises those words for good, a Generator's streams it does not."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def words(self, n: int) -> Array:
        return np.asarray(self._bits.random_raw(n), "<u8")

    def below(self, limit: int, n: int) -> Array:
        return ((self.words(n) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def codes(self, *shape: int) -> Array:
        n = math.prod(shape)
        codes: Array = self.words(-(-n // 8)).view(np.int8)[:n].reshape(shape)
        codes[codes == -128] = -127
        return codes

    def scales(self, *shape: int) -> Array:
        n = math.prod(shape)
        unit: Array = self.words(-(-n // 4)).view("<u2")[:n] / 65536
        return (0.005 + 0.025 * unit).astype(np.float16).reshape(shape)

    def normal(self, deviation: float, *shape: int) -> Array:
        """About normal: sums of 12 uniform numbers."""
        n = math.prod(shape)
        sums: Array = self.words(3 * n).view("<u2").reshape(n, 12).sum(1, dtype=np.int64)
        values: Array = (sums / 65536 - 6) * deviation
        return values.astype(np.float32).reshape(shape)

    def permutation(self, n: int) -> Array:
        return np.argsort(self.words(n), kind="stable").astype(np.int32)


def make_case(context: int, queries: int, seed: int = 0) -> Case:
    """A random problem of the geometry above; the queries are the last ones of the context.

    With as many queries as cells every cell up to the query's own is seen (no ids); otherwise each query selects its
    512 most recent cells and others, 2,051 at most, and 3% of the others change from one query to the next.
    """
    random = _Random(seed)
    pages = -(-context // PAGE_SIZE)
    pool = (pages, N_KV, PAGE_SIZE)
    kv = PagedKV(
        random.codes(*pool, HEAD_DIM),
        random.codes(*pool, HEAD_DIM),
        random.scales(*pool, HEAD_DIM // GROUP),
        random.scales(*pool, HEAD_DIM // GROUP),
        random.permutation(pages),
    )
    q = random.normal(2, queries, N_HEAD, HEAD_DIM)
    ids, widths = (None, None) if queries == context else _selections(random, context, queries)
    name = f"{context}/{queries} {'dense' if ids is None else 'selected'}"
    return Case(name, context, queries, q, kv, {"ids": ids, "widths": widths, "kv_len": context, "sm_scale": None})


def _selections(random: _Random, context: int, queries: int) -> tuple[Array, Array]:
    ids = np.full((queries, min(context, MOST_CELLS)), -1, np.int32)
    widths = np.empty(queries, np.int32)
    older = np.empty(0, np.int64)
    inside = np.zeros(context, bool)
    for i in range(queries):
        visible = context - queries + i + 1
        border = max(visible - RECENT_CELLS, 0)
        wanted = min(border, MOST_CELLS - RECENT_CELLS)
        if len(older):
            leaving = np.unique(random.below(len(older), max(1, round(DRIFT * len(older)))))
            inside[older[leaving]] = False
            older = np.delete(older, leaving)
        while len(older) < wanted:
            more = random.below(border, wanted - len(older))
            more = np.unique(more[~inside[more]])
            inside[more] = True
            older = np.concatenate([older, more])
        widths[i] = wanted + visible - border
        ids[i, : widths[i]] = np.concatenate([np.sort(older), np.arange(border, visible)])
    return ids, widths


def read_case(path: Path, name: str | None = None, seed: int = 0) -> Case:
    """The capture in a file as `parity --help` describes it (cli.py), put into shuffled pages of 16 cells.

    Raises:
        DataError: no such file, not an .npz, or arrays that are missing or do not fit.
    """
    try:
        with path.open("rb") as raw:  # np.load(path) leaves a damaged file open
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise DataError(f"{path}: a single array, not an .npz with named arrays")
            with file:
                arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        raise DataError(f"{path}: not an .npz of plain arrays, or a damaged one") from None

    def take(key: str, dtype: str, dims: int) -> Array:
        if key not in arrays:
            raise DataError(f"{path}: has no array {key!r}; it has {', '.join(sorted(arrays)) or 'none'}")
        a = arrays[key]
        if a.dtype != dtype or a.ndim != dims:
            raise DataError(f"{path}: {key} must be {dtype} with {dims} dimensions, got {a.dtype} {list(a.shape)}")
        return np.ascontiguousarray(a)

    q = take("q", "float32", 3)
    k, v = take("k", "int8", 3), take("v", "int8", 3)
    k_scale, v_scale = take("k_scale", "float16", 3), take("v_scale", "float16", 3)
    lengths = 0 < len(q) <= len(k)
    heads = lengths and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not (heads and k.shape == v.shape and k.shape[2] == q.shape[2] > 0):
        raise DataError(f"{path}: shapes do not fit: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    groups = k_scale.shape[2]
    if k_scale.shape != v_scale.shape or k_scale.shape[:2] != k.shape[:2] or not groups or k.shape[2] % groups:
        raise DataError(f"{path}: shapes do not fit: k {list(k.shape)}, k_scale {list(k_scale.shape)}, v_scale {list(v_scale.shape)}")
    ids = take("ids", "int32", 2) if "ids" in arrays else None
    if ids is not None and (len(ids) != len(q) or ids.min(initial=-1) < -1 or ids.max(initial=-1) >= len(k)):
        raise DataError(f"{path}: ids must be [{len(q)}, cap] with cells from 0 to {len(k) - 1}, or -1")
    sm_scale = None
    if "sm_scale" in arrays:
        scale = arrays["sm_scale"]
        if scale.size != 1 or scale.dtype.kind not in "fiu" or not np.isfinite(scale).all():
            raise DataError(f"{path}: sm_scale must be one finite number")
        sm_scale = float(scale.reshape(())[()])

    page_size, context = 16, len(k)
    table = _Random(seed).permutation(-(-context // page_size))

    def paged(x: Array) -> Array:
        """[context, n_kv, d] -> [pages, n_kv, page_size, d], zeros past the context"""
        logical = np.zeros((len(table) * page_size, *x.shape[1:]), x.dtype)
        logical[:context] = x
        physical = np.empty((len(table), x.shape[1], page_size, x.shape[2]), x.dtype)
        physical[table] = logical.reshape(len(table), page_size, *x.shape[1:]).swapaxes(1, 2)
        return physical

    kv = PagedKV(paged(k), paged(v), paged(k_scale), paged(v_scale), table)
    options = {"ids": ids, "widths": None, "kv_len": context, "sm_scale": sm_scale}
    return Case(name or path.name, context, len(q), q, kv, options)
