"""Which kernel runs on which card: the contract, stated here anew and small, against what the fake driver saw."""

import itertools
import sys

import numpy as np
import pytest
from fake import BUILT, NARROWED, FakeArray, birth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strata_pa
from strata_pa import DriverError, InvalidInput, UnsupportedDevice, UnsupportedProblem, _core

OLD, IMMA, KERNEL = "STRATA_PROMPT_ATTN_OLD", "STRATA_PROMPT_ATTN_IMMA", "STRATA_PA_KERNEL"
CARDS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121, 130)
KERNELS = ("fp32", "v1", "v2", "imma", "exact")


def has(kernel, sm):
    """Tensor cores for FP16 with 16-step products, cp.async and INT8 with 32 came with sm_80."""
    return sm >= 75 if kernel in ("v1", "fp32") else sm >= 80


def default(sm):
    return "v2" if has("v2", sm) else "v1"


def wish(kernel, imma, old, env_imma, env_kernel):
    """(kernel, who says so, must) by the contract's order; (None, ...): nothing is switched on."""
    if kernel:
        return kernel, "kernel=", True
    if imma is True:
        return "imma", "set_imma(True)", False
    if old:
        return "fp32", f"{OLD}=1", False
    if env_imma and imma is None:
        return "imma", f"{IMMA}=1", False
    if env_kernel and not (env_kernel == "imma" and imma is False):
        return env_kernel, f"{KERNEL}={env_kernel}", False
    return None, "default", False


def run(q, kv, out, **arguments):
    return strata_pa.prompt_attention(q, kv, out=out, **arguments)


@pytest.mark.parametrize("sm", CARDS)
def test_every_combination_of_switches(driver, monkeypatch, sm):
    fake = driver(sm)
    q, kv, out = birth()
    combinations = itertools.product((None, *KERNELS), (None, True, False), (False, True), (False, True), (None, *KERNELS))
    for kernel, imma, old, env_imma, env_kernel in combinations:
        strata_pa.set_imma(imma)
        monkeypatch.setenv(OLD, "1" if old else "")
        monkeypatch.setenv(IMMA, "1" if env_imma else "0")
        monkeypatch.setenv(KERNEL, env_kernel or "")
        fake.forget()
        wanted, by, must = wish(kernel, imma, old, env_imma, env_kernel)
        if must and not has(wanted, sm):
            for call in (strata_pa.plan, run):
                with pytest.raises(UnsupportedProblem, match=f"kernel='{wanted}' cannot run .* sm_75") as error:
                    call(q, kv, out=out, kernel=kernel)
                assert all(f"\n  {name}: " in str(error.value) for name in KERNELS)
            assert not fake.launches
            continue
        runs, said = (wanted, by) if wanted and has(wanted, sm) else (default(sm), "default")
        plan = strata_pa.plan(q, kv, out=out, kernel=kernel)
        assert (plan.kernel, plan.chosen_by, plan.device, plan.backend, plan.architecture) == (runs, said, "cuda:0", "cuda", f"sm_{sm}")
        assert {name for name, _ in plan.refused} == {*KERNELS} - {runs}
        not_followed = [note for note in plan.notes if "was not followed" in note]
        assert len(not_followed) == (wanted is not None and not has(wanted, sm))
        assert all(by in note and f"{wanted}: needs sm_80" in note for note in not_followed)
        assert run(q, kv, out, kernel=kernel) is out
        (launch,) = fake.launches
        assert (launch.kernel, launch.ordinal) == (runs, 0), (kernel, imma, old, env_imma, env_kernel)


def test_symbols_and_shapes(driver):
    """What each kernel is launched with, as cuda/launch.h writes it."""
    fake = driver(90)
    q, kv, out = birth(n_q=5)
    for kernel in KERNELS:
        run(q, kv, out, kernel=kernel)
    launches = {launch.symbol.decode(): (launch.grid, launch.block) for launch in fake.launches}
    assert set(launches) == {"strata_fp32_d256_r12", *(f"strata_{kernel}_d256_g64" for kernel in KERNELS[1:])}
    assert {grid for grid, _ in launches.values()} == {10}
    assert all(block in (64, 128) for _, block in launches.values())


def test_exact_takes_its_tiled_form_with_a_workspace(driver):
    fake = driver(90, 80)
    for ids, first in ((None, ("strata_tile_cells", 2, 256, 0)), (FakeArray((9, 30), np.int32), ("strata_tile_union8", 6, 512, 288))):
        q, kv, out = birth(n_q=9)
        plan = strata_pa.plan(q, kv, ids=ids, kernel="exact")
        size = plan.workspace_bytes
        items, records, words = 3 * 2, 32 * 64, 4 * 48 * 64  # 24 cells: one record of 64; three tiles, two KV heads
        assert size >= (items if ids else 2) * records + items * words
        fake.forget()
        run(q, kv, out, ids=ids, kernel="exact", workspace=FakeArray((size,), np.uint8))
        launches = [(launch.symbol.decode(), launch.grid, launch.block, launch.shared) for launch in fake.launches]
        assert launches[0] == first
        assert [x[:3] for x in launches[1:]] == [("strata_exact_tile_d256_g64", 6, 512), ("strata_exact_rest_d256_g64", 6, 128)]
        assert 200 << 10 < launches[1][3] < 227 << 10
        fake.forget()
        run(q, kv, out, ids=ids, kernel="exact")
        assert [launch.symbol for launch in fake.launches] == [b"strata_exact_d256_g64"]
        for wrong, words_of_it in (
            (FakeArray((size - 1,), np.uint8), f"workspace has {size - 1} bytes, the plan's workspace_bytes are {size}"),
            (
                FakeArray((size,), np.uint8, address=(1 << 30) + 16),
                "workspace's address is not a multiple of 256 bytes .the remainder is 16",
            ),
            (FakeArray((size,), np.uint8, readonly=True), "workspace is read-only"),
            (FakeArray((size,), np.uint8, ordinal=1), "workspace"),
            (FakeArray((size,), np.int8), "workspace"),
        ):
            with pytest.raises(strata_pa.InvalidInput, match=words_of_it):
                run(q, kv, out, ids=ids, kernel="exact", workspace=wrong)


def test_the_plain_form_stands_in_for_a_tiled_one_that_the_driver_refuses(driver):
    fake = driver(90)
    fake.fail("cuFuncSetAttribute", 1, symbol="strata_exact_tile_")
    q, kv, out = birth()
    size = strata_pa.plan(q, kv, kernel="exact").workspace_bytes
    run(q, kv, out, kernel="exact", workspace=FakeArray((size,), np.uint8))
    assert [launch.symbol for launch in fake.launches] == [b"strata_exact_d256_g64"]


def launched(fake, q, kv, out, **options):
    """Symbol, grid, block and shared memory of each launch of exact with its workspace; the workspace's bytes."""
    size = strata_pa.plan(q, kv, kernel="exact", **options).workspace_bytes
    fake.forget()
    run(q, kv, out, kernel="exact", workspace=FakeArray((size,), np.uint8), **options)
    return [(launch.symbol.decode(), launch.grid, launch.block, launch.shared) for launch in fake.launches], size


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 100, 120, 130])
def test_exact_in_tiles_of_rows(driver, sm):
    """Other cards than sm_90: 48 rows of neighbouring queries, any geometry; cells split over blocks where items are few."""
    fake = driver(sm)
    q, kv, out = birth(n_q=9)
    launches, size = launched(fake, q, kv, out)  # 24 cells: one step, so no splits and each block does both passes
    assert [x[:3] for x in launches] == [
        ("strata_rows_cells", 2, 256), ("strata_exact_rows_d256_g64", 6, 384), ("strata_exact_d256_g64", 18, 128),
    ]  # fmt: skip
    assert launches[1][3] <= 99 << 10
    assert size >= 2 * 2048 + 6 * 48 * 64 * 4
    launches, _ = launched(fake, q, kv, out, ids=FakeArray((9, 30), np.int32))
    assert [x[:3] for x in launches] == [
        ("strata_rows_lists", 6, 512), ("strata_exact_rows_d256_g64", 6, 384), ("strata_exact_d256_g64", 18, 128),
    ]  # fmt: skip
    long = birth(n_q=9, page_table=FakeArray((2048,), np.int32))  # 8,192 cells: 128 steps
    launches, _ = launched(fake, *long)
    assert [x[0] for x in launches] == ["strata_rows_cells", *["strata_exact_rows_d256_g64"] * 2, "strata_exact_d256_g64"]
    splits, rest = divmod(launches[1][1], 6)
    assert (rest, launches[2][1]) == (0, launches[1][1])
    assert 120 <= 6 * splits <= 264
    fake.forget()
    run(q, kv, out, kernel="exact")
    assert [launch.symbol for launch in fake.launches] == [b"strata_exact_d256_g64"]


def test_tiles_of_rows_by_rounds(driver):
    """What a round takes is bounded: contexts of any length, within what one item's words may take."""
    fake = driver(80)
    launches, size = launched(fake, *birth(n_q=600, page_table=FakeArray((1 << 16,), np.int32)))  # 262,144 cells
    rounds = [x for x in launches if "_rows_d" in x[0]]
    assert len(rounds) > 4
    assert len(rounds) % 2 == 0
    assert size < 3 << 30
    too_long = birth(n_q=2, page_table=FakeArray((1 << 21,), np.int32))
    assert strata_pa.plan(*too_long[:2], kernel="exact").workspace_bytes == 0


def test_many_sequences_are_several_launches_of_tiles(driver):
    fake = driver(80)
    q, kv, out = birth(n_q=70, page_table=FakeArray((70, 6), np.int32))
    launches, _ = launched(fake, q, kv, out, cu_seqlens_q=list(range(71)))
    assert [x[:2] for x in launches if x[0] == "strata_exact_d256_g64"] == [("strata_exact_d256_g64", 128), ("strata_exact_d256_g64", 12)]
    assert [x[1] for x in launches if x[0] == "strata_exact_rows_d256_g64"] == [128, 12]


def in_geometry(dim, group, n_kv, heads_per_kv, n_q, cells=24):
    pool, rows = (cells // 4, n_kv, 4, dim), (n_q, n_kv * heads_per_kv, dim)
    scales = {name: FakeArray((*pool[:3], dim // group), np.float16) for name in ("k_scale", "v_scale")}
    codes = {name: FakeArray(pool, np.int8) for name in ("k", "v")}
    return birth(
        q=FakeArray(rows, np.float32), out=FakeArray(rows, np.float32), page_table=FakeArray((cells // 4,), np.int32), **codes, **scales
    )


@pytest.mark.parametrize(
    ("dim", "heads_per_kv", "queries", "union"),
    [(256, 12, 4, "8"), (256, 7, 6, "8"), (128, 4, 12, "16"), (128, 1, 32, "32"), (64, 3, 16, "32"), (64, 16, 3, "8")],
)
def test_tiles_of_every_geometry(driver, dim, heads_per_kv, queries, union):
    fake = driver(90)
    problem = in_geometry(dim, 64, 3, heads_per_kv, 33)
    tiles = -(-33 // queries)
    launches, _ = launched(fake, *problem)
    assert [x[0] for x in launches] == ["strata_tile_cells", f"strata_exact_tile_d{dim}_g64", f"strata_exact_rest_d{dim}_g64"]
    blocks, threads = (2, 256) if dim == 64 else (1, 512)  # of a processor: two blocks share its threads and its shared memory
    assert [x[1:3] for x in launches] == [(3, 256), (3 * tiles, threads), (3 * tiles, dim // 2)]
    assert (228 << 10) // (blocks + 1) < launches[1][3] + 1024 <= (228 << 10) // blocks
    launches, _ = launched(fake, *problem, ids=FakeArray((33, 30), np.int32))
    assert launches[0][:3] == (f"strata_tile_union{union}", 3 * tiles, 512)


@pytest.mark.parametrize(("dim", "blocks"), [(64, 4), (128, 2), (256, 2)])
def test_blocks_of_tiles_stay(driver, dim, blocks):
    """Of many items a block takes one after the other; of head_dim 64 a processor has two blocks."""
    fake = driver(90)
    fake.lib.fake_processors(2)
    assert launched(fake, *in_geometry(dim, 64, 3, 12, 33))[0][1][1] == blocks


def test_which_form_serves(driver):
    """sm_90 has a form of its own for groups of 64 dims and one sequence; tiles of rows do the rest."""
    fake = driver(90)
    q, kv, out = birth()
    own, general = "strata_exact_tile_d256_g64", "strata_exact_rows_d256_g64"
    assert own in [x[0] for x in launched(fake, q, kv, out)[0]]
    for kernel in ("v2", "v1", "fp32", "imma"):
        assert strata_pa.plan(q, kv, kernel=kernel).workspace_bytes == 0
    two = birth(page_table=FakeArray((2, 3), np.int32))
    assert general in [x[0] for x in launched(fake, *two, cu_seqlens_q=[0, 1, 3])[0]]
    other = in_geometry(256, 128, 2, 12, 3)
    assert "strata_exact_rows_d256_g128" in [x[0] for x in launched(fake, *other)[0]]


@pytest.mark.parametrize(
    ("cells", "n_q", "cap", "rounds"),  # rounds: blocks of each pair of launches where an item's cells are split
    [
        (24, 3, None, []),
        (16000, 3, None, [2 * 36]),  # two items
        (16000, 3, 0, []),
        (16000, 3, 40, []),
        (16000, 3, 6000, [2 * 19]),
        (16000, 80, None, [40 * 3]),
        (16000, 255, None, []),  # 128 items on 132 processors
        (16000, 300, None, [132 * 4, 18 * 4]),  # one each would leave most processors idle in the end
        (16000, 2200, None, []),
        (65536, 600, None, [132 * 3, 132 * 3, 36 * 3]),  # a block for each of so long items: words of 1.6 GB as it is
        (65536, 1600, None, []),
        (68000, 600, 8000, [132 * 4, 18 * 4]),
        (68000, 600, 65536, [132 * 3, 132 * 3, 36 * 3]),  # more cells than 32-bit sums hold
        (262144, 256, None, [33 * 4, 33 * 4, 33 * 4, 29 * 4]),
    ],
)
def test_cells_are_split_where_items_are_few_or_long(driver, cells, n_q, cap, rounds):
    fake = driver(90)
    problem = birth(n_q=n_q, page_table=FakeArray((cells // 4,), np.int32))
    launches, size = launched(fake, *problem, **({} if cap is None else {"ids": FakeArray((n_q, cap), np.int32)}))
    first, *middle, rest = [x[0] for x in launches]
    assert (first, rest) == ("strata_tile_cells" if cap is None else "strata_tile_union8", "strata_exact_rest_d256_g64")
    assert middle == [f"strata_exact_tile_{kind}_d256_g64" for _ in rounds for kind in ("scores", "sums")] or not rounds
    assert rounds or middle == ["strata_exact_tile_d256_g64"]
    assert [x[1] for x in launches[1:-1]] == [blocks for blocks in rounds for _ in range(2)] or not rounds
    assert size < 3 << 30


def test_the_plain_form_stands_in_for_split_tiles_that_the_driver_refuses(driver):
    for kind in ("scores", "sums"):
        fake = driver(90)
        fake.fail("cuFuncSetAttribute", 1, symbol=f"strata_exact_tile_{kind}_")
        launches, _ = launched(fake, *birth(page_table=FakeArray((4000,), np.int32)))
        assert [x[0] for x in launches] == ["strata_exact_d256_g64"]


@pytest.mark.parametrize(("cells", "shared"), [(2000, 10192), (9008, 45104), (9392, 47024), (11904, 47616 + 11904)])
def test_shared_memory_that_a_kernel_declares_counts(driver, cells, shared):
    """A launch's part is beside it, within what a block has without asking for more."""
    fake = driver(90)
    launches, _ = launched(fake, *birth(n_q=8, page_table=FakeArray((cells // 4,), np.int32)), ids=FakeArray((8, 4500), np.int32))
    assert launches[0] == ("strata_tile_union8", launches[0][1], 512, shared)


@pytest.mark.parametrize("queries", [8, 40, 128, 300])
def test_the_blocks_of_an_items_union(driver, queries):
    """A list's cells are written by several blocks where items are few."""
    fake = driver(90)
    launches, _ = launched(fake, *birth(n_q=queries, page_table=FakeArray((8000,), np.int32)), ids=FakeArray((queries, 2051), np.int32))
    items = -(-queries // 4) * 2
    assert launches[0][:2] == ("strata_tile_union8", {8: 3 * items, 40: 3 * items, 128: 2 * items, 300: items // 2}[queries])


def test_the_plain_form_stands_in_for_tiles_of_rows_that_the_driver_refuses(driver):
    fake = driver(80)
    fake.fail("cuFuncSetAttribute", 1, symbol="strata_exact_rows_")
    launches, _ = launched(fake, *birth())
    assert [x[0] for x in launches] == ["strata_exact_d256_g64"]


@pytest.mark.parametrize(("sm", "compiled"), [(75, False), (80, False), (87, False), (90, False), (110, True), (121, False), (130, True)])
def test_ptx_is_noted(driver, sm, compiled):
    """87 runs 86's cubin and 121 runs 120's; 110 has no relative among the cubins, 130 is newer than all."""
    driver(sm)
    notes = strata_pa.plan(*birth()[:2]).notes
    assert any("the driver compiles its PTX" in note and f"no cubin for sm_{sm}" in note for note in notes) == compiled


@pytest.mark.parametrize("sm", [30, 52, 60, 70, 72])
@pytest.mark.skipif(NARROWED, reason="this build is for some architectures only")
def test_cards_below_the_list_are_refused_by_name(driver, sm):
    fake = driver(sm)
    q, kv, out = birth()
    for call in (strata_pa.plan, run):
        with pytest.raises(UnsupportedDevice, match=rf"cuda:0 \(Card {sm}, sm_{sm}\) is not served: .* sm_75, sm_80, .*compute_75"):
            call(q, kv, out=out)
    assert not fake.launches
    cpu, card = strata_pa.capabilities()["devices"]
    assert cpu["kernels"] == ["fp32", "imma", "exact"]
    assert (card["name"], card["kernels"], card["default"]) == (f"Card {sm}", [], None)


def runs_as(major, minor, least, only=False):
    """CUDA's rules: a cubin runs on its major version from its minor one up; PTX is compiled for any later card. None: refused.
    only: code for one architecture ("sm_90a")."""
    sm = 10 * major + minor
    if only:
        return f"sm_{sm}" if sm == least else None
    mine = [arch for arch in BUILT if arch >= least]
    cubins = [arch for arch in mine if arch // 10 == major and arch % 10 <= minor]
    ptx = [arch for arch in mine[:1] if arch <= sm]
    return f"sm_{max(cubins)}" if cubins else f"compute_{max(ptx)}" if ptx else None


@given(st.integers(1, 40), st.integers(0, 9))
def test_any_capability_is_listed_or_refused(major, minor):
    if not BUILT:
        pytest.skip("this build is without CUDA")
    want = {}
    for image in _core.cuda_images():
        least = image["name"].rpartition("_sm")[2]
        best = runs_as(major, minor, int(least.removesuffix("a")), only=least.endswith("a"))
        want |= {image["name"]: best} if best else {}
    assert _core.cuda_choose("nvidia", major, minor) == want
    assert _core.cuda_choose("amd", major, minor) == {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.integers(1, 20), st.integers(0, 9))
def test_any_card_is_served_or_refused(driver, major, minor):
    fake = driver(10 * major + minor)
    q, kv, out = birth()
    if runs_as(major, minor, 75):
        run(q, kv, out)
        (launch,) = fake.launches
        assert launch.kernel == ("v2" if runs_as(major, minor, 80) else "v1")
    else:
        with pytest.raises(UnsupportedDevice, match=rf"sm_{10 * major + minor}\) is not served"):
            run(q, kv, out)


@pytest.mark.parametrize("cards", [(75, 90), (90, 75), (120, 75), (70, 80)])
def test_two_cards_are_decided_for_themselves(driver, cards):
    fake = driver(*cards)
    for _ in range(2):
        for ordinal, sm in enumerate(cards):
            fake.forget()
            q, kv, out = birth(ordinal=ordinal)
            if sm < 75:
                with pytest.raises(UnsupportedDevice, match=f"cuda:{ordinal}"):
                    run(q, kv, out)
                continue
            run(q, kv, out)
            (launch,) = fake.launches
            assert (launch.kernel, launch.ordinal) == (default(sm), ordinal)
    assert [d["device"] for d in strata_pa.capabilities()["devices"]] == ["cpu", "cuda:0", "cuda:1"]


def test_no_driver(monkeypatch, driver, tmp_path):
    monkeypatch.setenv("STRATA_PA_CUDA_DRIVER", str(tmp_path / "none.so"))
    q = FakeArray((3, 24, 256), np.float32)
    with pytest.raises(UnsupportedDevice, match=r"the CUDA driver cannot be opened: .*none.so"):
        strata_pa.PagedKV(*[q] * 5)
    assert [d["device"] for d in strata_pa.capabilities()["devices"]] == ["cpu"]
    assert [c.status for c in strata_pa.doctor().checks if c.name == "cuda"] == ["absent"]
    driver(90)  # one that comes later is found
    assert run(*birth()) is not None


def test_no_card(driver):
    driver()
    with pytest.raises(UnsupportedDevice, match=r"no CUDA device can be used: cuInit: FAKE_ERROR_100 \(the words for 100\)"):
        birth()
    assert [d["device"] for d in strata_pa.capabilities()["devices"]] == ["cpu"]
    report = strata_pa.doctor()
    assert report.ok
    assert "FAKE_ERROR_100" in str(report)


@pytest.mark.parametrize(("version", "text"), [(12090, r"12\.9"), (11040, r"11\.4")])
def test_a_driver_that_is_too_old(driver, version, text):
    driver(90, version=version)
    with pytest.raises(UnsupportedDevice, match=rf"supports CUDA {text}; this build, by nvcc 13\..*, needs >= 13\.0"):
        birth()
    report = strata_pa.doctor()
    assert not report.ok
    assert "needs >= 13.0" in str(report)


def test_a_library_that_is_no_driver(monkeypatch, driver):
    monkeypatch.setenv("STRATA_PA_CUDA_DRIVER", np._core._multiarray_umath.__file__)
    with pytest.raises(UnsupportedDevice, match=r"the CUDA driver .* has no cuDriverGetVersion"):
        birth()


def test_a_missing_ordinal(driver):
    driver(90)
    with pytest.raises(InvalidInput, match=r"not memory of a CUDA device: cuPointerGetAttribute: FAKE_ERROR_1"):
        birth(ordinal=1)


IMAGE_ERRORS = (200, 209, 218, 222)  # invalid image, no binary, invalid PTX, unsupported PTX version


@pytest.mark.parametrize("status", IMAGE_ERRORS)
@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"])
def test_a_refused_kernel_is_not_available_and_the_next_serves(driver, call, status):
    fake = driver(90)
    if call == "cuModuleLoadData":
        fake.fail(call, status)  # every image, v2's first
    else:
        fake.fail(call, status, symbol="strata_v2_")
    q, kv, out = birth()
    if call == "cuModuleLoadData":
        with pytest.raises(UnsupportedProblem, match="no default kernel") as error:
            run(q, kv, out)
        for kernel in ("v2", "v1", "fp32"):
            assert f"{kernel}: the driver refused its image: cuModuleLoadData: FAKE_ERROR_{status} (the words for {status})" in str(
                error.value
            )
        fake.heal()
        with pytest.raises(UnsupportedProblem):
            run(q, kv, out)  # decided for this device
        return
    for _ in range(2):
        fake.forget()
        plan = strata_pa.plan(q, kv)
        assert (plan.kernel, plan.chosen_by) == ("v1", "default")
        assert f"{call}: FAKE_ERROR_{status}" in dict(plan.refused)["v2"][0]
        assert any("v2 does not run on cuda:0" in note for note in plan.notes)
        run(q, kv, out)
        assert [launch.kernel for launch in fake.launches] == ["v1"]
    with pytest.raises(UnsupportedProblem, match=rf"v2: the driver refused its function: {call}"):
        run(q, kv, out, kernel="v2")


def test_a_refused_switch_keeps_the_default(driver):
    fake = driver(90)
    fake.fail("cuModuleGetFunction", 500, symbol="strata_imma_")
    strata_pa.set_imma(True)
    q, kv, out = birth()
    plan = strata_pa.plan(q, kv)
    assert (plan.kernel, plan.chosen_by) == ("v2", "default")
    assert any("set_imma(True) was not followed" in note and "cuModuleGetFunction" in note for note in plan.notes)
    run(q, kv, out)
    assert [launch.kernel for launch in fake.launches] == ["v2"]


def test_a_refused_shared_memory_request(driver, monkeypatch):
    """The kernel is not available for that problem; the next of the order serves. Smaller problems keep it."""
    fake = driver(90)
    fake.fail("cuFuncSetAttribute", 1, symbol="strata_exact_")
    q, kv, out = birth(page_table=FakeArray((30000,), np.int32))  # lists so long that exact spills to 64-bit sums
    reason = r"exact: the driver refused its shared memory: cuFuncSetAttribute: FAKE_ERROR_1 \(the words for 1\), \d+ bytes"
    with pytest.raises(UnsupportedProblem, match=reason):
        run(q, kv, out, kernel="exact")
    monkeypatch.setenv(KERNEL, "exact")
    plan = strata_pa.plan(q, kv)
    assert (plan.kernel, plan.chosen_by) == ("v2", "default")
    assert any("was not followed" in note and "cuFuncSetAttribute" in note for note in plan.notes)
    run(q, kv, out)
    run(q, kv, out, kv_len=1000)
    assert [(launch.kernel, launch.shared <= 48 << 10) for launch in fake.launches] == [("v2", True), ("exact", True)]
    fake.heal()
    run(q, kv, out)
    assert (fake.launches[-1].kernel, fake.launches[-1].shared > 48 << 10) == ("exact", True)


def test_shared_memory_beyond_the_card(fake_library, tmp_path, monkeypatch, driver):
    fake = driver()
    fake.lib.fake_card(90, 16 << 10, b"Small")
    with pytest.raises(UnsupportedProblem, match=r"v2: needs \d+ bytes of shared memory in a block, cuda:0 \(Small, sm_90\) allows 16384"):
        strata_pa.plan(*birth()[:2])


@pytest.mark.parametrize("status", [2, 700, 999])
def test_failures_that_say_nothing_about_the_kernel_are_raised(driver, status):
    """Out of memory or a dead context must not move a call to another kernel."""
    fake = driver(90)
    q, kv, out = birth()
    for call in ("cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"):
        fake.fail(call, status)
        with pytest.raises(DriverError, match=rf"{call}: FAKE_ERROR_{status} \(the words for {status}\)") as error:
            run(q, kv, out)
        assert isinstance(error.value, RuntimeError)
        assert not fake.launches
        fake.heal()
    run(q, kv, out)
    assert [launch.kernel for launch in fake.launches] == ["v2"]


def test_a_launch_that_fails(driver):
    fake = driver(90)
    q, kv, out = birth()
    fake.fail("cuLaunchKernel", 719)
    with pytest.raises(DriverError, match=r"cuLaunchKernel: FAKE_ERROR_719 \(the words for 719\)"):
        run(q, kv, out)
    assert fake.lib.fake_depth() == 0
    fake.heal()
    run(q, kv, out)


def test_importing_touches_no_driver(driver):
    import subprocess

    fake = driver(90)
    code = "import strata_pa, strata_pa.attention; strata_pa.kernels(); strata_pa.build_info(); strata_pa.set_imma(True)"
    code += f"; assert '{fake.path.name}' not in open('/proc/self/maps').read()"
    subprocess.run([sys.executable, "-c", code], check=True)
