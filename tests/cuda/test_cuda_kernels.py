"""The CUDA kernels, from a call down to their own source on the CPU (machine.py)."""

import hashlib
import platform

import inputs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import Machine, on_card
from problems import PLAIN, PORTABLE, SPECS, build, paged, same_bytes

import strata_pa
from strata_pa import _core
from strata_pa._device import on_device, to_device
from strata_pa.attention import make_call

# What sm_90's own tiles of exact serve: groups of 64 dims, one sequence.
TILE_SPECS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "dim_group": st.sampled_from([(256, 64), (256, 64), (128, 64), (64, 64)]),
        "n_kv": st.integers(1, 2),
        "n_rep": st.sampled_from([12, 12, 12, 1, 3, 4, 7, 16]),
        "page_size": st.sampled_from([1, 3, 16]),
        "layout": st.sampled_from(["HND", "NHD"]),
        "sequences": st.tuples(st.tuples(st.integers(1, 9), st.one_of(st.sampled_from([64, 129, 700, 1025]), st.integers(1, 1100)))),
        "absent": st.sampled_from([0, 0, 0.2]),
        "causal": st.booleans(),
        "window_left": st.sampled_from([-1, -1, -1, -1, 0, 70, 500]),
        "lists": st.sampled_from([None, "shared", "per head"]),
        "granularity": st.sampled_from([1, 4, 16]),
        "cap": st.sampled_from([1, 16, 40, 200]),
        "widths": st.booleans(),
        "varlen": st.just(False),
    }
)


@pytest.fixture(scope="session", params=[90, 80])
def machine(request, tmp_path_factory):
    if platform.machine() != "x86_64":
        pytest.skip("the switch between fibers is written for x86-64")
    return Machine(tmp_path_factory.mktemp("machine"), request.param)


@pytest.fixture
def card(driver, machine):
    """A small card whose launches are computed by its kernels' own source."""
    made = driver(machine.sm)
    made.lib.fake_processors(3)
    machine.hook(made)
    made.sm = machine.sm
    return made


def without_repeats(options):
    """The same lists with -1 in place of cells that stand in them already: exact's tiles leave lists with repeats to the plain form."""
    ids = options["ids"].copy()
    for at in np.ndindex(ids.shape[:-1]):
        again = np.ones(ids.shape[-1], bool)
        again[np.unique(ids[at], return_index=True)[1]] = False
        ids[at][again] = -1
    return options | {"ids": ids}


def build_lists(spec, repeats):
    q, kv, options = build(spec)
    return q, kv, options if repeats or not spec["lists"] else without_repeats(options)


def symbols(card):
    return [launch.symbol.decode() for launch in card.launches]


def check(card, q, kv, kernel, options):
    want, want_lse = strata_pa.prompt_attention(q, paged(kv), kernel=kernel, return_lse=True, **options)
    out, lse = on_card(card, q, paged(kv), kernel, options)
    assert same_bytes(out, want), kernel
    assert same_bytes(lse, want_lse), kernel


def marked_slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


LONGER = ("layer0", "page17", "page1", "page512", "select2100", "select8192", "causal600")


@pytest.mark.parametrize("name", ["tiny", "widths", *marked_slow(*LONGER)])
def test_golden_digests_of_exact(card, name):
    q, kv, options = inputs.arguments(inputs.load(name))
    out, _ = on_card(card, q, paged(kv), "exact", options)
    assert hashlib.sha256(out.tobytes()).hexdigest() == PORTABLE[name]["exact"]
    assert not np.any(card.flags)
    tiles = "strata_exact_tile_" if card.sm == 90 else "strata_exact_rows_"
    assert any(symbol.startswith(tiles) for symbol in symbols(card))


general = pytest.mark.parametrize("machine", [80], indirect=True)  # what sm_90 runs from the same source


@general
@pytest.mark.parametrize("kernel", ["fp32", "imma"])
def test_golden_digests_of_plain_kernels(card, kernel):
    q, kv, options = inputs.arguments(inputs.load("tiny"))
    out, _ = on_card(card, q, paged(kv), kernel, options)
    assert hashlib.sha256(out.tobytes()).hexdigest() == PORTABLE["tiny"][kernel]


def examples(n):
    return settings(max_examples=n, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@examples(30)
@given(TILE_SPECS, st.sampled_from([np.float32, np.float16]), st.booleans(), st.sampled_from([3, 60]))
def test_random_problems_in_tiles(card, spec, dtype, repeats, processors):
    card.lib.fake_processors(processors)
    q, kv, options = build_lists(spec, repeats)
    check(card, q.astype(dtype), kv, "exact", options)


@pytest.mark.parametrize("processors", [1, 60])  # sm_90: an item's cells are one block's, or split over blocks
@pytest.mark.parametrize(
    ("lists", "sequence", "other"),
    [
        (None, (11, 900), {}),
        (None, (10, 700), {"window_left": 500}),
        (None, (5, 900), {"causal": False, "n_kv": 1, "absent": 0.2}),
        ("per head", (6, 800), {}),
        ("shared", (7, 900), {"granularity": 4, "widths": True}),
        ("shared", (5, 700), {"layout": "NHD", "page_size": 3}),
        (None, (11, 1500), {"dim_group": (128, 64)}),
        ("shared", (9, 1300), {"dim_group": (128, 64), "n_rep": 4}),
        (None, (11, 1500), {"dim_group": (64, 64)}),
        ("shared", (9, 1300), {"dim_group": (64, 64), "n_rep": 3}),
    ],
)
def test_long_problems_in_tiles(card, lists, sequence, other, processors):
    card.lib.fake_processors(processors)
    spec = PLAIN | {"seed": 6, "dim_group": (256, 64), "n_rep": 12, "page_size": 16, "sequences": [sequence], "lists": lists, "cap": 200}
    q, kv, options = build_lists(spec | other, False)
    check(card, q, kv, "exact", options)
    assert len(card.flags) == 1
    assert not np.any(card.flags)  # tiles answered everything
    if card.sm == 90:
        assert [splits > 1 for splits, _ in card.rounds] == [True] * (processors == 60)
    if lists:
        q, kv, options = build_lists(spec | other, True)
        check(card, q, kv, "exact", options)
        assert np.any(card.flags)


@pytest.mark.parametrize("machine", [90], indirect=True)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rounds_of_tiles(card, dim):
    """Lists that may have more cells than a block's 32-bit sums hold: two blocks an item, and rounds of four times the card's blocks."""
    spec = PLAIN | {
        "seed": 13, "dim_group": (dim, 64), "n_rep": 12, "page_size": 16, "sequences": [(9, 66000)], "lists": "shared", "cap": 65600,
    }  # fmt: skip
    q, kv, options = build_lists(spec, False)
    options["widths"] = np.array([200, 0, 130, 1, 64, 500, 63, 65, 300], np.int32)
    card.lib.fake_processors(1 if dim == 64 else 2)
    check(card, q, kv, "exact", options)
    assert card.rounds == [(2, 0), (2, 4)]
    assert not np.any(card.flags)


@general
@examples(20)
@given(SPECS, st.sampled_from([np.float32, np.float16]), st.booleans())
def test_random_problems(card, spec, dtype, repeats):
    q, kv, options = build_lists(spec, repeats)
    for kernel in ("fp32", "imma", "exact"):
        check(card, q.astype(dtype), kv, kernel, options)


@general
@pytest.mark.parametrize("dim_group", [(64, 32), (128, 64), (256, 64)])
@pytest.mark.parametrize("n_rep", [3, 8, 12, 16])
def test_lists_that_end_with_a_chunk(card, dim_group, n_rep):
    """fp32 takes two chunks of 64 entries at a time, one per warp: rows of 319 to 322 entries, 127 to 129, 63 to 65."""
    spec = PLAIN | {
        "seed": 12, "dim_group": dim_group, "n_rep": n_rep, "page_size": 16, "sequences": [(4, 322), (3, 129), (3, 65)], "absent": 0.05,
        "varlen": True,
    }  # fmt: skip
    q, kv, options = build_lists(spec, True)
    check(card, q, kv, "fp32", options)


@general
@pytest.mark.parametrize("dim_group", [(64, 32), *marked_slow((128, 64), (256, 64))])
@pytest.mark.parametrize(
    ("lists", "processors", "plan"),
    [  # (split, both passes in one launch, lists of all KV heads by one block)
        (None, 1, (False, True, False)),
        (None, 40, (True, False, False)),
        ("shared", 1, (False, True, True)),
        ("shared", 40, (True, False, False)),
        ("per head", 1, (False, True, False)),
        ("per head", 40, (True, False, False)),
    ],
)
def test_plans_of_tiles(card, lists, processors, plan, dim_group):
    spec = PLAIN | {
        "seed": 11, "dim_group": dim_group, "n_rep": 12, "page_size": 3, "sequences": [(12, 1500), (0, 70), (2, 40)], "absent": 0.02,
        "lists": lists, "cap": 200, "varlen": True,
    }  # fmt: skip
    card.lib.fake_processors(processors)
    q, kv, options = build_lists(spec, False)
    check(card, q, kv, "exact", options)
    assert {(splits > 1, phases == 3, heads > 1) for splits, phases, heads in card.plans} == {plan}
    assert not np.any(card.flags)


def splits_cells(card):
    return any(splits > 1 for splits, _ in card.rounds)


few_or_many_cells = pytest.mark.parametrize(("processors", "cells"), [(3, 190), (60, 1700)])  # of many, sm_90 splits


@few_or_many_cells
@pytest.mark.parametrize("lists", [None, "shared"])
def test_values_that_are_not_finite(card, lists, processors, cells):
    card.lib.fake_processors(processors)
    spec = PLAIN | {"seed": 5, "dim_group": (256, 64), "n_rep": 12, "sequences": [(14, cells)], "lists": lists, "cap": cells // 4}
    q, kv, options = build_lists(spec, False)
    if lists:
        options["ids"][13] = np.where(options["ids"][13] == cells - 1, -1, options["ids"][13])
        options["ids"][13, 0] = cells - 1
    q[0, 3, 7], q[2, 9, 0], q[4, 1] = np.nan, -np.inf, 0
    q[8, 8] = 3e38
    page, slot = divmod(cells - 1, 4)  # the cell that the last query alone sees
    kv.v_scale[kv.page_table[page], 1, slot, 2] = np.inf
    want = strata_pa.prompt_attention(q, paged(kv), kernel="exact", **options)
    assert np.isnan(want).any(-1).sum() > 5
    check(card, q, kv, "exact", options)
    assert 0 < np.mean(card.flags) < 1
    assert splits_cells(card) == (card.sm == 90 and cells > 1000)


@few_or_many_cells
@pytest.mark.parametrize("dim_group", [(64, 64), (256, 64)])
def test_scores_between_two_integers(card, dim_group, processors, cells):
    card.lib.fake_processors(processors)
    spec = PLAIN | {"seed": 8, "dim_group": dim_group, "n_kv": 1, "n_rep": 12, "page_size": 16, "sequences": [(4, cells)], "causal": False}
    q, kv, options = build_lists(spec, False)
    q[:], kv.k[:], kv.k_scale[:] = 0, 0, 0.5
    q[..., 0] = 1
    kv.k[..., 0] = np.random.default_rng(0).integers(-70, -40, kv.k.shape[:-1])
    kv.v_scale[:] = 1
    first = kv.page_table[0]
    kv.k[first, :, :2, 0] = -1  # a score of -0.5, which is rounded to 0: it decides the unit of W, in which the others' terms are few
    kv.v[first, :, 1] = -np.maximum(kv.v[first, :, 0], -127)  # and these two cells' terms leave nothing
    kv.v[first, :, 0] = -kv.v[first, :, 1]
    options["sm_scale"] = 1 / 1.4426950408889634
    check(card, q, kv, "exact", options)


@few_or_many_cells
@pytest.mark.parametrize("dim_group", [(64, 64), (128, 64), (256, 64)])
def test_scales_with_a_minus_sign(card, dim_group, processors, cells):
    """K's change nothing. V's are for the plain form where a card has tiles whose weights are unsigned."""
    card.lib.fake_processors(processors)
    spec = PLAIN | {"seed": 9, "dim_group": dim_group, "n_rep": 12, "sequences": [(9, cells)]}
    q, kv, options = build_lists(spec, False)
    kv.k_scale[:] *= np.random.default_rng(1).choice([-1, 1], kv.k_scale.shape).astype(kv.k_scale.dtype)
    check(card, q, kv, "exact", options)
    assert not np.any(card.flags)
    page, slot = divmod(cells - 1, 4)  # the cell that the last query alone sees
    kv.v_scale[kv.page_table[page], 1, slot, -1] *= -1
    check(card, q, kv, "exact", options)
    assert np.sum(card.flags) == (1 if card.sm == 90 else 0)
    assert splits_cells(card) == (card.sm == 90 and cells > 1000)


@general
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_parts_of_exact(card, dtype):
    spec = PLAIN | {
        "seed": 7, "dim_group": (128, 64), "n_rep": 3, "sequences": [(5, 90), (2, 40)], "lists": "shared", "cap": 15, "varlen": True,
    }  # fmt: skip
    q, kv, options = build(spec)
    q = q.astype(dtype)
    q[1, 2, 5] = np.nan
    want, want_lse = strata_pa.prompt_attention(q, paged(kv), kernel="exact", return_lse=True, **options)
    heads, dim = q.shape[1:]
    there = lambda *shape, kind: on_device(np.full(shape, 9, kind), "cuda:0")  # noqa: E731
    calls, anchors, sums = [], [], []
    for half in (options["ids"][:, :20], options["ids"][:, 20:]):
        q_there, kv_there, options_there = to_device(q, paged(kv), options | {"ids": half}, "cuda:0")
        calls.append(lambda a=(q_there, kv_there), o=options_there: make_call(*a, kernel="exact", **o))
        anchors.append((there(len(q), heads, kind=np.float32), there(len(q), heads, kind=np.float32)))
        calls[-1]().exact_anchors(*anchors[-1])
    _core.add_anchors(*anchors[0], *anchors[1])
    keys = there(2, len(q), heads, kind=np.int64)
    _core.anchors_to_keys(*anchors[0], keys)
    _core.anchors_from_keys(keys, *anchors[0])
    for call in calls:
        sums.append((there(len(q), heads, kind=np.int64), there(len(q), heads, dim, kind=np.int64)))
        call().exact_sums(*anchors[0], *sums[-1])
    for mine, other, name in zip(*sums, "LO", strict=True):
        _core.add_sums(mine, other, name)
    out, lse = there(*q.shape, kind=dtype), there(len(q), heads, kind=np.float32)
    _core.exact_finish(*anchors[0], *sums[0], out, lse)
    assert same_bytes(out.read(), want)
    assert same_bytes(lse.read(), want_lse)


@general
def test_merging_results(card):
    rng = np.random.default_rng(8)
    outs, lses = rng.standard_normal((3, 5, 4, 64)).astype(np.float16), (9 * rng.standard_normal((3, 5, 4))).astype(np.float32)
    lses[:, 0, 0] = lses[1, 2] = -np.inf
    lses[2, 3, 1] = np.nan
    want, want_lse = strata_pa.merge_partials(list(outs), list(lses))
    out, lse = on_device(np.zeros_like(outs[0]), "cuda:0"), on_device(np.zeros_like(lses[0]), "cuda:0")
    _core.merge_partials([on_device(x, "cuda:0") for x in outs], [on_device(x, "cuda:0") for x in lses], out, lse)
    assert same_bytes(out.read(), want)
    assert same_bytes(lse.read(), want_lse)


@general
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_quantizing(card, dtype):
    x = np.random.default_rng(9).standard_normal((7, 2, 64)).astype(dtype)
    x[3, 0, :32], x[5, 1, 40] = 0, np.inf
    places = np.array([4, 0, 11, 7, 1, 9, 3])
    want = np.zeros((3, 2, 4, 64), np.int8), np.zeros((3, 2, 4, 2), np.float16)
    finite = [i for i in range(7) if i != 5]  # the host refuses what a card can only mark
    _core.quantize(x[finite], 32, *want, places[finite])
    codes, scales = on_device(np.zeros_like(want[0]), "cuda:0"), on_device(np.zeros_like(want[1]), "cuda:0")
    _core.quantize(on_device(x, "cuda:0"), 32, codes, scales, on_device(places, "cuda:0"))
    page, slot = divmod(9, 4)
    got = codes.read(), scales.read()
    assert np.isnan(got[1][page, 1, slot, 1])
    for mine, other in zip(got, want, strict=True):
        mine[page, :, slot] = 0
        assert same_bytes(mine, other)
