"""Partial results on a card: what is launched, and what is refused before."""

import numpy as np
import pytest
from fake import FakeArray, birth

import strata_pa
from strata_pa import ExactAnchors, ExactSums, InvalidInput, _core
from strata_pa.attention import make_call


def state(ordinal=0, rows=(3, 24), dim=256):
    A, b = (FakeArray(rows, np.float32, ordinal=ordinal) for _ in range(2))
    L, O = FakeArray(rows, np.int64, ordinal=ordinal), FakeArray((*rows, dim), np.int64, ordinal=ordinal)  # noqa: E741
    return A, b, L, O


@pytest.mark.parametrize("ordinal", [0, 1])
def test_the_steps_of_exact(driver, ordinal):
    fake = driver(90, 90)
    q, kv, _ = birth(ordinal=ordinal)
    A, b, L, O = state(ordinal)  # noqa: E741
    for stream in (0, 0x5000):
        fake.forget()
        make_call(q, kv, kernel="exact", stream=stream).exact_anchors(A, b)
        make_call(q, kv, kernel="exact", stream=stream).exact_sums(A, b, L, O)
        strata_pa.prompt_attention(q, kv, kernel="exact", out=FakeArray((3, 24, 256), np.float32, ordinal=ordinal), stream=stream)
        first, second, whole = fake.launches
        assert first.symbol == second.symbol == b"strata_exact_part_d256_g64"
        for launch in (first, second):
            assert (launch.ordinal, launch.stream) == (ordinal, stream)
            assert (launch.grid, launch.block, launch.shared) == (whole.grid, whole.block, whole.shared)


def test_work_on_states(driver):
    fake = driver(75, 90)
    A, b, L, O = state()  # noqa: E741
    out = FakeArray((3, 24, 256), np.float16)
    lse, keys = FakeArray((3, 24), np.float32), FakeArray((2, 3, 24), np.int64)
    fake.forget()
    _core.add_anchors(A, b, *state()[:2])
    _core.add_sums(L, state()[2], "L")
    _core.add_sums(O, state()[3], "O")
    _core.anchors_to_keys(A, b, keys)
    _core.anchors_from_keys(keys, A, b)
    _core.exact_finish(A, b, L, O, out, lse)
    _core.merge_partials([out, out], [lse, lse], out, lse)
    rows, numbers = 72, 72 * 256
    want = [
        ("anchors", rows),
        ("sums", rows),
        ("sums", numbers),
        ("to_keys", rows),
        ("from_keys", rows),
        ("finish", rows * 32),
        ("merge", rows * 32),
    ]
    assert [(x.symbol, x.grid, x.block, x.ordinal) for x in fake.launches] == [
        (f"strata_partial_{name}".encode(), -(-threads // 128), 128, 0) for name, threads in want
    ]
    for name in ("cuMemAlloc_v2", "cuStreamSynchronize", "cuMemcpyDtoH_v2"):
        assert fake.calls(name) == 0
    fake.forget()
    _core.merge_partials([FakeArray((0, 24, 256), np.float32)], [FakeArray((0, 24), np.float32)], FakeArray((0, 24, 256), np.float32),
                         FakeArray((0, 24), np.float32))  # fmt: skip
    assert not fake.launches


def test_refusals(driver):
    fake = driver(90, 90)
    q, kv, _ = birth()
    A, b, L, O = state()  # noqa: E741
    call = make_call(q, kv, kernel="exact")
    with pytest.raises(InvalidInput, match="q is on cuda:0, A on cuda:1"):
        call.exact_anchors(*state(1)[:2])
    with pytest.raises(InvalidInput, match="q is on cuda:0, L in host memory"):
        call.exact_sums(A, b, np.zeros((3, 24), np.int64), O)
    with pytest.raises(InvalidInput, match="O must be of the shape"):
        call.exact_sums(A, b, L, state(dim=64)[3])
    with pytest.raises(InvalidInput, match="A is on cuda:0, b on cuda:1"):
        _core.add_anchors(A, b, A, state(1)[1])
    with pytest.raises(InvalidInput, match="out is on cuda:0, A in host memory"):
        _core.exact_finish(*(np.zeros((3, 24), np.float32),) * 2, L, O, FakeArray((3, 24, 256), np.float32), b)
    with pytest.raises(InvalidInput, match=r"outs\[0\] is on cuda:0, lses\[0\] on cuda:1"):
        _core.merge_partials([FakeArray((3, 24, 256), np.float32)], [state(1)[0]], FakeArray((3, 24, 256), np.float32), A)
    for make in (
        lambda: strata_pa.exact_anchors(q, kv),
        lambda: ExactAnchors(A, b).keys(),
        lambda: strata_pa.exact_finish(ExactAnchors(A, b), ExactSums(L, O)),
    ):
        with pytest.raises(InvalidInput, match="new arrays on cuda:0 are made for PyTorch, CuPy and JAX"):
            make()
    assert fake.launches == []
    fake.fail("cuLaunchKernel", 719)
    with pytest.raises(strata_pa.DriverError, match="cuLaunchKernel"):
        _core.add_sums(L, L, "L")
    with pytest.raises(strata_pa.DriverError, match="cuLaunchKernel"):
        call.exact_anchors(A, b)
    driver(90).fail("cuModuleGetFunction", 500, "strata_partial_sums")
    with pytest.raises(strata_pa.UnsupportedDevice, match="partial results on cuda:0"):
        _core.add_sums(L, L, "L")
