"""The C API on cards: what it asks of the driver, and what it refuses before a launch."""

import contextlib
import ctypes
import re
import threading

import capi
import numpy as np
import pytest
from capi import Failed, call, context, plan, run
from fake import BUILT, answer_on_the_cpu
from problems import random_kv, random_q, same_bytes

import strata_pa

ARRAYS = ("q", "k", "v", "k_scale", "v_scale", "page_table", "ids", "widths", "out", "lse")


class Call:
    """A small problem in the geometry that every kernel serves, in a device's memory."""

    def __init__(self, where, n_q=3, seed=1, **options):
        rng = np.random.default_rng(seed)
        self.q, self.kv = random_q(rng, n_q, 24, 256), random_kv(rng, 1, 6, 2, 4, 256, 64)
        self.kv.page_table = self.kv.page_table[0]
        self.lists = {"ids": rng.integers(-1, 24, (n_q, 9)).astype(np.int32), "widths": rng.integers(0, 10, n_q).astype(np.int32)}
        self.kv_len, self.options = 23, options
        self.memory = capi.Memory(where)
        out, lse = np.full_like(self.q, np.nan), np.full(self.q.shape[:2], np.nan, np.float32)
        self.p, self._keep = capi.problem(self.q, self.kv, out, self.memory.place, lse=lse, kv_len=self.kv_len, **self.lists, **options)
        self.out, self.lse = out, lse

    def answer(self):
        return self.memory.read(self.p.out, self.out), self.memory.read(self.p.lse, self.lse)

    def expected(self, kernel):
        kv = strata_pa.PagedKV(*(getattr(self.kv, x) for x in ("k", "v", "k_scale", "v_scale", "page_table")))
        return strata_pa.prompt_attention(self.q, kv, kernel=kernel, return_lse=True, kv_len=self.kv_len, **self.lists, **self.options)


@contextlib.contextmanager
def card(ordinal=0):
    with context(capi.CUDA, ordinal) as where:
        yield where


@contextlib.contextmanager
def on_card(ordinal=0, **options):
    with card(ordinal) as where:
        made = Call(where, **options)
        yield where, made
        made.memory.free()


def fails(status, words, name, *arguments):
    with pytest.raises(Failed) as failed:
        call(name, *arguments)
    assert failed.value.args[0] == status
    assert re.search(words, failed.value.args[1]), failed.value.args[1]


def test_widths_in_an_array_of_records(driver):
    fake = driver(90)
    fake.hook(answer_on_the_cpu)
    with on_card(n_q=5) as (where, made), plan(where, made.p, "imma") as chosen:
        records = np.zeros(5, [("position", np.int64), ("flags", np.int32), ("width", np.int32)])
        records["width"] = made.lists["widths"]
        made.p.widths = made.memory.place(records) + records.dtype.fields["width"][1]
        made.p.widths_stride = records.itemsize // 4
        run(chosen, made.p)
        assert same_bytes(made.answer()[0], made.expected("imma")[0])


@pytest.mark.parametrize("kernel", ["fp32", "imma", "exact"])
def test_answers(driver, kernel):
    fake = driver(90)
    fake.hook(answer_on_the_cpu)
    with on_card(window_left=7) as (where, made), plan(where, made.p, kernel) as chosen:
        run(chosen, made.p)
        for got, want in zip(made.answer(), made.expected(kernel), strict=True):
            assert same_bytes(got, want)
    assert fake.lib.fake_allocations() == 0
    assert fake.lib.fake_depth() == 0


def test_exact_with_a_workspace(driver):
    fake = driver(90)
    with on_card() as (where, made), plan(where, made.p, "exact") as chosen:
        size = call("plan_workspace_bytes", chosen)
        assert size > 0
        workspace = made.memory.allocate(size)
        run(chosen, made.p, None, workspace, size)
        assert [launch.symbol for launch in fake.launches] == [
            b"strata_tile_union8",
            b"strata_exact_tile_d256_g64",
            b"strata_exact_rest_d256_g64",
        ]
        fake.forget()
        run(chosen, made.p)
        assert [launch.symbol for launch in fake.launches] == [b"strata_exact_d256_g64"]
        fake.forget()
        fails(capi.INVALID_INPUT, f"workspace has 8 bytes, the problem's are {size}", "run", chosen, made.p, None, workspace, 8)
        fails(capi.INVALID_INPUT, "multiple of 256 bytes, the remainder is 16", "run", chosen, made.p, None, workspace + 16, size)
        assert not fake.launches


def test_a_run_launches_and_nothing_else(driver):
    """What a stream capture allows. Modules are loaded by the plan, in the relaxed mode."""
    fake = driver(90)
    with on_card() as (where, made), plan(where, made.p) as chosen:
        assert fake.calls("cuModuleLoadData") == 1
        assert fake.lib.fake_capture_mode() == 0
        fake.forget()
        run(chosen, made.p, 0x1230)
        assert [(launch.kernel, launch.stream) for launch in fake.launches] == [("v2", 0x1230)]
        for name in ("cuMemAlloc_v2", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "cuStreamSynchronize", "cuModuleLoadData", "cuEventCreate"):
            assert fake.calls(name) == 0, name
    assert fake.lib.fake_depth() == 0


def test_parts_of_exact_are_for_the_cpu(driver):
    fake = driver(90)
    with on_card() as (where, made), plan(where, made.p, "exact") as chosen:
        state = [made.memory.allocate(made.q.nbytes * 2) for _ in range(4)]
        fails(capi.UNSUPPORTED_PROBLEM, "on a CPU only", "exact_anchors", chosen, made.p, *state[:2])
        fails(capi.UNSUPPORTED_PROBLEM, "on a CPU only", "exact_sums", chosen, made.p, *state)
        fails(capi.UNSUPPORTED_PROBLEM, "on a CPU only", "exact_finish", chosen, made.p, *state)
    assert not fake.launches


def test_any_number_of_queries_is_one_launch(driver):
    fake = driver(90)
    with on_card(n_q=65) as (where, made), plan(where, made.p, "imma") as chosen:
        for n_q in (65, 64, 1, 0):
            fake.forget()
            made.p.n_q = n_q
            run(chosen, made.p)
            assert [launch.grid for launch in fake.launches] == [2 * n_q] * (n_q > 0)


@pytest.mark.parametrize(("sm", "kernel"), [(90, "v2"), (75, "v1"), (89, "v2")])
def test_defaults_and_switches(driver, sm, kernel):
    driver(sm)
    with on_card() as (where, made):
        assert call("context_text", where) == f"cuda:0 (Card {sm}, sm_{sm})"
        has_imma = call("context_refusal", where, b"imma") == ""
        assert has_imma == (sm >= 80 and "imma_sm80" in {i["name"] for i in strata_pa._core.cuda_images()})
        with plan(where, made.p) as chosen:
            assert (call("plan_kernel", chosen), call("plan_chosen_by", chosen)) == (kernel, "default")
            assert call("plan_refusal", chosen, b"fp32") == f"{kernel} was chosen (default)"
        call("set_imma", 1)
        with plan(where, made.p) as chosen:
            assert call("plan_kernel", chosen) == ("imma" if has_imma else kernel)
            if not has_imma:
                assert f"note: set_imma(True) was not followed on cuda:0 (Card {sm}, sm_{sm}): imma: " in call("plan_text", chosen)
        call("set_imma", 0)
        with plan(where, made.p) as chosen:
            assert call("plan_kernel", chosen) == kernel


@pytest.mark.parametrize("name", ARRAYS)
def test_memory_that_the_card_does_not_have(driver, name):
    """A pointer of the host, and one of another card."""
    fake = driver(90, 90)
    host = np.zeros(1 << 16, np.float32)
    with on_card() as (where, made), plan(where, made.p) as chosen:
        with card(1) as other:
            elsewhere = capi.Memory(other)
            there = elsewhere.allocate(1 << 18)
            for address, words in (
                (host.ctypes.data, f"^{name} is not memory of a CUDA device"),
                (there, f"^{name} is memory of cuda:1, the context is of cuda:0$"),
            ):
                setattr(made.p, name, address)
                if name not in ("out", "lse"):
                    fails(capi.INVALID_INPUT, words, "plan_create", where, made.p, None, ctypes.c_void_p())
                fails(capi.INVALID_INPUT, words, "run", chosen, made.p, None, None, 0)
            elsewhere.free()
        assert not fake.launches


def test_a_layout_that_no_kernel_serves(driver):
    driver(90)
    with on_card() as (where, made):
        made.p.k += 8
        fails(capi.UNSUPPORTED_PROBLEM, "k's address is not a multiple of 16 bytes", "plan_create", where, made.p, None, ctypes.c_void_p())


def test_a_driver_that_fails(driver):
    fake = driver(90)
    with on_card() as (where, made), plan(where, made.p) as chosen:
        fake.fail("cuLaunchKernel", 700)
        fails(capi.DRIVER_ERROR, "^cuLaunchKernel: ", "run", chosen, made.p, None, None, 0)
        fake.heal()
        fake.fail("cuMemAlloc_v2", 2)
        fails(capi.DRIVER_ERROR, "^cuMemAlloc_v2: ", "allocate", where, 8, ctypes.c_void_p())
        fake.heal()
        fake.fail("cuModuleLoadData", 2)
        fails(capi.DRIVER_ERROR, "the driver refused its image: cuModuleLoadData", "plan_create", where, made.p, b"fp32", ctypes.c_void_p())
        fake.heal()
        run(chosen, made.p)
        call("synchronize", where, None)
    assert fake.lib.fake_depth() == 0


def test_cards_that_are_not_there(driver, monkeypatch, tmp_path):
    driver(70, 90)
    options = capi.ContextOptions(ctypes.sizeof(capi.ContextOptions), capi.CUDA)
    for ordinal, words in (
        (0, r"cuda:0 \(Card 70, sm_70\) is not served"),
        (2, "there is no cuda:2; the driver has 2 devices"),
        (-1, "there is no cuda:-1"),
    ):
        options.ordinal = ordinal
        fails(capi.UNSUPPORTED_DEVICE, words, "context_create", options, ctypes.c_void_p())
    monkeypatch.setenv("STRATA_PA_CUDA_DRIVER", str(tmp_path / "none.so"))
    fails(capi.UNSUPPORTED_DEVICE, "the CUDA driver cannot be opened", "context_create", options, ctypes.c_void_p())


def test_two_threads_with_two_contexts(driver):
    fake = driver(90, 90)
    assert 90 in BUILT
    start, wrong = threading.Barrier(2), []

    def loop(ordinal):
        try:
            with on_card(ordinal, seed=ordinal) as (where, made), plan(where, made.p, "imma") as chosen:
                start.wait()
                for _ in range(50):
                    run(chosen, made.p, 16 + ordinal)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    seen = [(launch.ordinal, launch.stream) for launch in fake.launches]
    assert sorted(seen) == [(0, 16)] * 50 + [(1, 17)] * 50
