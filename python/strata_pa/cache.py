"""The paged int8 KV cache's arrays, and quantization to its format."""

from dataclasses import dataclass

from . import _core
from .arrays import Array, empty_like_kind, is_jax
from .facts import CacheShape


@dataclass(frozen=True, eq=False)
class PagedKV:
    """A paged int8 KV cache: a view of the caller's arrays, which are read anew by every call.

    Args:
        k, v: int8 `[pages, n_kv, page_size, head_dim]` ("HND") or `[pages, page_size, n_kv, head_dim]` ("NHD"); codes, -128 is legal.
        k_scale, v_scale: float16, as `k` with `head_dim / group` in place of `head_dim`; value = code * scale.
        page_table: int32 `[max_pages]`, or `[n_seq, max_pages]` for a batch; logical page -> physical page, -1: not resident (its cells are
            masked). Cell c of a sequence is slot `c % page_size` of page `page_table[c // page_size]`.
        layout: "HND" or "NHD".

    Any strides, as long as the innermost dimension is contiguous.

    Raises:
        InvalidInput: shapes that do not fit each other, or strides that cannot be served.
        InvalidType: a wrong dtype, or something that is no array.
        UnsupportedDevice: memory that this build cannot reach.
    """

    k: Array
    v: Array
    k_scale: Array
    v_scale: Array
    page_table: Array
    layout: str = "HND"

    def __post_init__(self) -> None:
        self._shape()

    def _shape(self) -> CacheShape:
        return _core.check_cache(self.k, self.v, self.k_scale, self.v_scale, self.page_table, self.layout)

    @property
    def pages(self) -> int:
        """Physical pages of the pool."""
        return self._shape()["pages"]

    @property
    def page_size(self) -> int:
        """Cells of one page."""
        return self._shape()["page_size"]

    @property
    def n_kv(self) -> int:
        """KV heads."""
        return self._shape()["n_kv"]

    @property
    def head_dim(self) -> int:
        """Dims of one head."""
        return self._shape()["head_dim"]

    @property
    def group(self) -> int:
        """Dims that share one scale."""
        return self._shape()["group"]

    def __repr__(self) -> str:
        s = self._shape()
        return (
            f"PagedKV({s['pages']} pages of {s['page_size']} cells, {s['n_kv']} KV heads, head_dim {s['head_dim']}, group {s['group']}, "
            f"layout {self.layout!r})"
        )


def quantize_kv(x: Array, group: int = 64) -> tuple[Array, Array]:
    """Quantizes keys or values to the cache's format.

    Per group of `group` dims, in float32: `scale = float16(max|x| / 127)`, `code = clamp(rint(x / scale), -127, 127)`. Where the scale is 0
    (every x is 0, or max|x| is at most 127 * 2^-25, below float16's range) the codes are 0.

    Args:
        x: float32, float16 or bfloat16 `[..., head_dim]`, up to 6 dimensions, in host memory or on a GPU.
        group: dims that share a scale; it divides head_dim.

    Returns:
        codes int8 `[..., head_dim]` and scales float16 `[..., head_dim / group]`, C-contiguous; of x's library (PyTorch; on a GPU also CuPy
        and JAX), otherwise NumPy arrays. On a GPU the work is on the current stream of x's library.

    Raises:
        InvalidInput: a value that is not finite or too large for a float16 scale (|x| of about 8.32e6), with its position. On a GPU nothing
            is read back: there the group gets codes 0 and the scale NaN, which makes every row NaN that sees the cell.
        InvalidType: a wrong dtype.
    """
    shape, groups, device = _core.check_quantize(x, group)
    codes = empty_like_kind(x, shape, "int8", device)
    scales = empty_like_kind(x, (*shape[:-1], groups), "float16", device)
    _core.quantize(x, group, codes, scales, fresh=True, wait=device != "cpu" and is_jax(codes))
    return codes, scales
