"""Quantizing on a card: what is launched, and what is refused before."""

import numpy as np
import pytest
from fake import FakeArray

import strata_pa
from strata_pa import _core


def arrays(n=5, ordinal=0, **other):
    kinds = {
        "x": ((n, 2, 64), np.float16),
        "codes": ((3, 2, 4, 64), np.int8),
        "scales": ((3, 2, 4, 2), np.float16),
        "slots": ((n,), np.int64),
    }
    return {name: other.get(name, FakeArray(*kind, ordinal=ordinal)) for name, kind in kinds.items()}


def quantize(x, codes, scales, slots=None, **options):
    _core.quantize(x, 32, codes, scales, slots, **options)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_the_launch(driver, ordinal):
    fake = driver(75, 90)
    quantize(**arrays(ordinal=ordinal), stream=0x5000)
    (launch,) = fake.launches
    assert (launch.symbol, launch.ordinal, launch.stream) == (b"strata_quantize", ordinal, 0x5000)
    assert (launch.grid, launch.block, launch.shared) == (5, 128, 0)  # 5 * 2 rows of 2 groups, a warp each
    fake.forget()
    quantize(**arrays(n=0, ordinal=ordinal))
    assert fake.launches == []


def test_refusals(driver):
    fake = driver(90, 90)
    for other, match in (
        ({"codes": FakeArray((3, 2, 4, 64), np.int8, ordinal=1)}, "x is on cuda:0, codes on cuda:1"),
        ({"slots": np.zeros(5, np.int64)}, "slots in host memory"),
        ({"codes": FakeArray((3, 2, 4, 64), np.int8, readonly=True)}, "codes is read-only"),
        ({"codes": FakeArray((3, 1, 4, 64), np.int8)}, r"codes must be \[pages, 2, page_size, 64\]"),
        ({"scales": FakeArray((4, 2, 4, 2), np.float16)}, "same pages and page_size"),
        ({"slots": FakeArray((4,), np.int64)}, r"slots must be \[5\]"),
        ({"slots": None}, r"codes must be int8, got|codes must have 3 dimensions|codes must be \[5, 2, 64\]"),
    ):
        with pytest.raises(strata_pa.InvalidInput, match=match):
            quantize(**arrays(**other))
    with pytest.raises(strata_pa.InvalidInput, match="new arrays on cuda:0 are made for PyTorch, CuPy and JAX"):
        strata_pa.quantize_kv(FakeArray((5, 64), np.float32))
    assert fake.launches == []
    fake.fail("cuLaunchKernel", 719)
    with pytest.raises(strata_pa.DriverError, match="cuLaunchKernel"):
        quantize(**arrays())
    fake.heal()
    fake.fail("cuModuleGetFunction", 500, "strata_quantize")
    driver(90).fail("cuModuleGetFunction", 500, "strata_quantize")
    with pytest.raises(strata_pa.UnsupportedDevice, match="quantizing on cuda:0"):
        quantize(**arrays())


def test_slots_in_host_memory_are_checked():
    x = np.ones((2, 2, 64), np.float32)
    pools = np.zeros((3, 2, 4, 64), np.int8), np.zeros((3, 2, 4, 2), np.float16)
    for wrong in (-1, 12):
        with pytest.raises(strata_pa.InvalidInput, match=rf"slots\[1\] is {wrong}, the pool has 12 slots"):
            quantize(x, *pools, np.array([0, wrong]))
    assert not pools[0].any()
    quantize(x, *pools, np.array([5, 0]))
    assert pools[0].any(-1).tolist() == [[[True, False, False, False]] * 2, [[False, True, False, False]] * 2, [[False] * 4] * 2]
    with pytest.raises(strata_pa.InvalidInput, match="stream is for GPU arrays"):
        quantize(x, *pools, np.array([5, 0]), stream=1)
