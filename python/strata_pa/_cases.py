"""The problems of `strata-pa parity` and `bench`: made ones, the same bytes on every machine, and captures read from a file."""

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
MOST_QUERIES = 2048  # that are made; more repeat them
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


@dataclass(frozen=True)
class Shape:
    """What a made problem looks like; the queries are the last ones of the context."""

    context: int
    queries: int
    cells: int = MOST_CELLS  # that a query selects, at most; 0: every cell up to its own
    n_head: int = N_HEAD
    n_kv: int = N_KV
    head_dim: int = HEAD_DIM
    apart: bool = False  # neighbouring selections share no cell

    @property
    def name(self) -> str:
        what = "dense" if not self.cells else "selected" if self.cells == MOST_CELLS else f"selected {self.cells}"
        geometry = (self.n_head, self.n_kv, self.head_dim)
        heads = "" if geometry == (N_HEAD, N_KV, HEAD_DIM) else " {}/{}/{}".format(*geometry)
        return f"{self.context}/{self.queries} {what}{heads}{' apart' if self.apart else ''}"


def shape_of(context: int, queries: int) -> Shape:
    """With as many queries as cells every cell up to the query's own is seen, otherwise each query selects some."""
    return Shape(context, queries, 0 if queries == context else MOST_CELLS)


def make_case(shape: Shape, seed: int = 0) -> Case:
    """A random problem with one scale per 64 dims. A selection has the most recent cells (512, a quarter of a narrow one) and others, of
    which 3% change from one query to the next."""
    random = _Random(seed)
    pages = -(-shape.context // PAGE_SIZE)
    pool = (pages, shape.n_kv, PAGE_SIZE)
    kv = PagedKV(
        random.codes(*pool, shape.head_dim),
        random.codes(*pool, shape.head_dim),
        random.scales(*pool, shape.head_dim // GROUP),
        random.scales(*pool, shape.head_dim // GROUP),
        random.permutation(pages),
    )
    q = random.normal(2, min(shape.queries, MOST_QUERIES), shape.n_head, shape.head_dim)
    if shape.queries > MOST_QUERIES:
        q = np.resize(q, (shape.queries, *q.shape[1:]))
    ids, widths = None, None
    if shape.cells:
        ids, widths = _apart(random, shape) if shape.apart else _selections(random, shape.context, shape.queries, shape.cells)
    return Case(shape.name, shape.context, shape.queries, q, kv, {"ids": ids, "widths": widths, "kv_len": shape.context, "sm_scale": None})


def _apart(random: _Random, shape: Shape) -> tuple[Array, Array]:
    """Every list comes back once all the cells that all queries see are taken.

    Raises:
        DataError: not even two lists fit.
    """
    seen = shape.context - shape.queries
    lists = seen // shape.cells
    if lists < 2:
        raise DataError(f"{shape.name}: {seen} cells that every query sees are not two lists")
    cells = np.sort(random.permutation(seen)[: lists * shape.cells].reshape(lists, shape.cells), 1)
    return np.resize(cells, (shape.queries, shape.cells)), np.full(shape.queries, shape.cells, np.int32)


def _selections(random: _Random, context: int, queries: int, most: int) -> tuple[Array, Array]:
    recent = min(RECENT_CELLS, most // 4)
    ids = np.full((queries, min(context, most)), -1, np.int32)
    widths = np.empty(queries, np.int32)
    older = np.empty(0, np.int64)
    inside = np.zeros(context, bool)
    for i in range(queries):
        visible = context - queries + i + 1
        border = max(visible - recent, 0)
        wanted = min(border, most - recent)
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
