"""With nothing switched on, v2 runs and its bytes are the published ones."""

import json
from pathlib import Path

import inputs
import numpy as np
import pytest
from on_gpu import Placed, device, digest

import strata_pa

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "v2_sm90.json").read_text())["cases"]


def as_published(name, **arguments):
    placed = Placed(name)
    plan = strata_pa.plan(placed.q, placed.kv, out=placed.out, **placed.options, **arguments)
    assert plan.kernel == "v2"
    return digest(placed.run(**arguments)) == GOLDEN[name]["v2_sha256"]


@pytest.fixture(autouse=True)
def _hopper():
    if device()["architecture"] != "sm_90":
        pytest.skip("the digests were made on sm_90; ex2.approx may differ elsewhere")


def test_the_inputs():
    assert set(GOLDEN) == set(inputs.CASES)


@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_is_switched_on(name):
    assert as_published(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_imma_off_in_the_environment(name, monkeypatch):
    monkeypatch.setenv("STRATA_PROMPT_ATTN_IMMA", "0")
    assert as_published(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_imma_switched_on_and_back(name):
    imma = "imma" in device()["kernels"]  # a build without it keeps v2 in between as well
    strata_pa.set_imma(True)
    placed = Placed(name)
    between = placed.run()
    assert (digest(between) == GOLDEN[name]["v2_sha256"]) == (not imma)
    strata_pa.set_imma(None)
    assert as_published(name)


def test_the_kernel_by_name():
    assert as_published("tiny", kernel="v2")


@pytest.mark.parametrize("name", ["tiny", "widths"])
def test_v1_is_near(name):
    """v1 adds in another order; it has no published digests."""
    placed = Placed(name)
    v2, v1 = placed.run(), placed.run(kernel="v1")
    assert np.abs(v1 - v2).max() <= 2e-6 * np.abs(v2).max()
