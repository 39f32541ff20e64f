"""The kernels of hip/, from a call down to their own source on the CPU, for waves of 32 and of 64 lanes."""

import hashlib

import inputs
import numpy as np
import pytest
from fake_hip import KERNELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import PLAIN, PORTABLE, SPECS, build, paged, same_bytes

import strata_pa
from strata_pa._device import on_device, to_device
from strata_pa.attention import make_call


def on_card(q, kv, kernel, options):
    """(out, lse) of the card."""
    there, kv_there, options_there = to_device(q, kv, options, "hip:0")
    out = on_device(np.full(q.shape, np.nan, q.dtype), "hip:0")
    lse = on_device(np.full(q.shape[:2], np.nan, np.float32), "hip:0")
    call = make_call(there, kv_there, kernel=kernel, **options_there)
    assert call.run(out, lse)["kernel"] == kernel
    return out.read(), lse.read()


CASES = ["tiny", "widths", *(pytest.param(name, marks=pytest.mark.slow) for name in ("page17", "layer0"))]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_golden_digests(card, name, kernel):
    q, kv, options = inputs.arguments(inputs.load(name))
    out, _ = on_card(q, paged(kv), kernel, options)
    assert hashlib.sha256(out.tobytes()).hexdigest() == PORTABLE[name][kernel]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(SPECS, st.sampled_from([np.float32, np.float16]))
def test_random_problems(card, spec, dtype):
    q, kv, options = build(spec)
    q = q.astype(dtype)
    for kernel in KERNELS:
        want, want_lse = strata_pa.prompt_attention(q, paged(kv), kernel=kernel, return_lse=True, **options)
        out, lse = on_card(q, paged(kv), kernel, options)
        assert same_bytes(out, want), kernel
        assert same_bytes(lse, want_lse), kernel


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_that_are_not_finite(card, kernel):
    q, kv, options = build(PLAIN | {"seed": 5, "dim_group": (128, 32), "n_rep": 5, "sequences": [(6, 90)]})
    q[0, 3, 7], q[2, 9, 0], q[4, 1] = np.nan, -np.inf, 0
    q[5, 8] = 3e38
    last = kv.page_table[89 // 4]
    kv.v_scale[last, 1, 1, 2] = np.inf  # cell 89, which the last query alone sees
    want, want_lse = strata_pa.prompt_attention(q, paged(kv), kernel=kernel, return_lse=True, **options)
    assert np.isnan(want).any(-1).sum() > 5
    out, lse = on_card(q, paged(kv), kernel, options)
    assert same_bytes(out, want)
    assert same_bytes(lse, want_lse)


def test_selftest(card):
    report = strata_pa.selftest("hip:0")
    assert report.ok, str(report)
    assert [check.name for check in report.checks] == ["hip:0", *(f"hip:0 {kernel}" for kernel in KERNELS)]
