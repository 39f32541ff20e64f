"""The C API (include/strata_pa.h): its interface is what it was, and its answers are Python's."""

import ctypes
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import capi
import inputs
import numpy as np
import pytest
from capi import Failed, call, context, plan, run
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KERNELS, PORTABLE, SPECS, build, paged, same_bytes
from small import cache, queries

import strata_pa

HEADER = strata_pa.get_include() / "strata_pa.h"
kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for variable in strata_pa.environment_variables():
        monkeypatch.delenv(variable["name"], raising=False)
    yield
    strata_pa.set_imma(None)


@pytest.fixture
def cpu():
    with context() as made:
        yield made


def small(**options):
    """(structure, kept arrays) of a small problem."""
    q = queries()
    return capi.problem(q, cache(), np.zeros_like(q), kv_len=18, **options)


# --- The interface


def kind_of(kind):
    """A type of C or ctypes as far as a caller has to agree: "pointer", "int32_t", ..."""
    if isinstance(kind, str):
        kind = kind.strip()
        return "pointer" if kind.endswith("*") else {"strata_pa_status": "int32_t"}.get(kind, kind)
    numbers = {None: "void", ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_size_t: "size_t"}
    return numbers.get(kind, "pointer")


def test_functions_of_the_header():
    declared = {}
    for result, name, parameters in re.findall(r"^STRATA_PA_API ([\w\s*]+?)strata_pa_(\w+)\(([^)]*)\);", HEADER.read_text(), re.M):
        kinds = [] if parameters == "void" else [kind_of(parameter.rpartition(" ")[0] or parameter) for parameter in parameters.split(",")]
        assert name not in declared
        declared[name] = kind_of(result), kinds
    assert declared == {name: (kind_of(result), list(map(kind_of, arguments))) for name, (result, arguments) in capi.FUNCTIONS.items()}


COMPILERS = [
    pytest.param(["gcc", "-x", "c", "-std=c99"], id="gcc C99"),
    pytest.param(["g++", "-x", "c++", "-std=c++17"], id="g++ C++17"),
    pytest.param(["clang", "-x", "c", "-std=c99"], id="clang C99"),
    pytest.param(["clang++", "-x", "c++", "-std=c++17"], id="clang C++17"),
    pytest.param([sys.executable, "-m", "ziglang", "cc", "-x", "c", "-std=c99"], id="zig C99"),
    pytest.param([sys.executable, "-m", "ziglang", "c++", "-x", "c++", "-std=c++17"], id="zig C++17"),
]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_header_compiles_without_a_warning(compiler, tmp_path):
    if not shutil.which(compiler[0]):
        pytest.skip(f"{compiler[0]} is not here")
    if "ziglang" in compiler:
        pytest.importorskip("ziglang")
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", HEADER.parent, "-c", "-o", tmp_path / "x.o"]
    (tmp_path / "x").write_text("#include <strata_pa.h>\nint main(void) { return strata_pa_abi() != STRATA_PA_ABI; }\n")
    done = subprocess.run([*compiler, *flags, tmp_path / "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# What the structures of ABI 1 are: fields may be added at an end, nothing else.
SIZES = {"context_options": 32, "pool_stride": 24, "problem": 384, "kernel_info": 48}
STRUCTURES = {
    "context_options": capi.ContextOptions,
    "pool_stride": capi.PoolStride,
    "problem": capi.Problem,
    "kernel_info": capi.KernelInfo,
}


def test_structures(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("gcc is not here")
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <strata_pa.h>", "int main(void) {"]
    expected = []
    for name, structure in STRUCTURES.items():
        assert ctypes.sizeof(structure) == SIZES[name]
        lines.append(f'printf("%zu\\n", sizeof(strata_pa_{name}));')
        expected.append(SIZES[name])
        for field, *_ in structure._fields_:
            lines.append(f'printf("%zu %zu\\n", offsetof(strata_pa_{name}, {field}), sizeof((strata_pa_{name}*)0)->{field});')
            expected += [getattr(structure, field).offset, getattr(structure, field).size]
    (tmp_path / "x.c").write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run(["gcc", "-I", HEADER.parent, "-o", tmp_path / "x", tmp_path / "x.c"], check=True)
    printed = subprocess.run([tmp_path / "x"], capture_output=True, text=True, check=True).stdout
    assert [int(x) for x in printed.split()] == expected


def test_constants():
    text = HEADER.read_text()
    assert re.search(r"#define STRATA_PA_ABI (\d+)", text)[1] == str(call("abi")) == "1"
    values = {name: int(value) for name, value in re.findall(r"STRATA_PA_(\w+) = (\d+)", text)}
    statuses = (
        "OK",
        "INVALID_INPUT",
        "INVALID_TYPE",
        "UNSUPPORTED_PROBLEM",
        "UNSUPPORTED_DEVICE",
        "DRIVER_ERROR",
        "OUT_OF_MEMORY",
        "INTERNAL_ERROR",
    )
    assert values == {name: getattr(capi, name) for name in statuses} | {
        "CPU": 0, "CUDA": 1, "HIP": 2, "FLOAT32": 0, "FLOAT16": 1, "BFLOAT16": 2, "HND": 0, "NHD": 1,
    }  # fmt: skip


def test_facts():
    assert call("version") == strata_pa.__version__
    facts = strata_pa.build_info()
    assert json.loads(call("build_info")) == {name: value for name, value in facts.items() if name not in ("pybind11", "python")}
    rows = []
    for i in range(call("kernel_count")):
        info = capi.KernelInfo(ctypes.sizeof(capi.KernelInfo))
        call("kernel_at", i, info)
        rows.append(
            (
                info.name.decode(),
                info.needs.decode(),
                info.what.decode(),
                ("cpu", "cuda", "hip")[info.device],
                info.built,
                info.opt_in,
                info.portable,
            )
        )
    assert rows == [
        tuple(row[x] for x in ("name", "needs", "what", "backend", "built", "opt_in", "portable")) for row in strata_pa.kernels()
    ]


# --- Answers


def answer(where, q, kv, kernel, lse=False, **options):
    out = np.full_like(q, 7)
    sums = np.full(q.shape[:2], 7, np.float32) if lse else None
    p, _keep = capi.problem(q, kv, out, lse=sums, **options)
    with plan(where, p, kernel) as made:
        run(made, p)
    return (out, sums) if lse else out


@kernels
@pytest.mark.parametrize("name", ["tiny", "page17", "layer0"])
def test_golden_digests(cpu, name, kernel):
    q, kv, options = inputs.arguments(inputs.load(name))
    out = answer(cpu, q, kv, kernel, **{x: y for x, y in options.items() if y is not None})
    assert hashlib.sha256(out.tobytes()).hexdigest() == PORTABLE[name][kernel]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(SPECS, st.sampled_from([np.float32, np.float16]), st.sampled_from(KERNELS))
def test_random_problems(spec, dtype, kernel):
    q, kv, options = build(spec)
    q = q.astype(dtype)
    cached = paged(kv)
    want = strata_pa.prompt_attention(q, cached, kernel=kernel, return_lse=True, **options)
    with context() as where:
        out, lse = answer(where, q, kv, kernel, lse=True, **options)
    assert same_bytes(out, want[0])
    assert same_bytes(lse, want[1])


def test_bfloat16(cpu):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, kv = queries(dtype=bfloat16), cache()
    want = answer(cpu, q.astype(np.float32), kv, None).astype(bfloat16)
    assert same_bytes(answer(cpu, q, kv, None), want)


def test_widths_in_an_array_of_records(cpu):
    rng = np.random.default_rng(3)
    records = np.zeros(5, [("position", np.int64), ("flags", np.int32), ("width", np.int32), ("rest", np.int32, 4)])
    records["width"] = [3, 0, 9, 1, 8]
    ids = rng.integers(-1, 18, (5, 9)).astype(np.int32)
    q, kv = queries(5), cache()
    assert records["width"].strides == (32,)
    out = answer(cpu, q, kv, "exact", ids=ids, widths=records["width"], kv_len=18)
    dense = records["width"].copy()
    assert same_bytes(out, strata_pa.prompt_attention(q, kv, ids=ids, widths=dense, kv_len=18, kernel="exact"))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_strides_of_arrays_without_gaps(cpu, layout):
    rng = np.random.default_rng(4)
    shape = (6, 2, 4) if layout == "HND" else (6, 4, 2)
    kv = SimpleNamespace(
        **{x: rng.integers(-127, 128, (*shape, 128)).astype(np.int8) for x in ("k", "v")},
        **{x: rng.uniform(0.01, 0.02, (*shape, 2)).astype(np.float16) for x in ("k_scale", "v_scale")},
        page_table=rng.permutation(6).astype(np.int32),
        layout=layout,
    )
    q = queries(3, 6, 128)
    out, lse = np.zeros_like(q), np.zeros((3, 6), np.float32)
    ids, widths = rng.integers(0, 24, (3, 7)).astype(np.int32), np.array([7, 2, 0], np.int32)
    p, _keep = capi.problem(q, kv, out, ids=ids, widths=widths, lse=lse)
    bare = capi.Problem.from_buffer_copy(p)
    for name, kind in capi.Problem._fields_:
        if name.endswith("_stride"):
            setattr(bare, name, kind())
    call("problem_set_strides", bare, ("HND", "NHD").index(layout))
    assert bytes(bare) == bytes(p)
    with plan(cpu, bare) as made:
        run(made, bare)
    cached = strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table, layout)
    assert same_bytes(out, strata_pa.prompt_attention(q, cached, ids=ids, widths=widths))


def test_defaults_of_a_problem():
    p = capi.Problem()
    ctypes.memset(ctypes.byref(p), 0xFF, ctypes.sizeof(p))
    call("problem_init", p, ctypes.sizeof(p))
    want = capi.Problem(size=ctypes.sizeof(p), n_seq=1, granularity=1, causal=1, window_left=-1)
    assert bytes(p) == bytes(want)


def test_one_plan_for_problems_of_other_sizes(cpu):
    p, _keep = small()
    with plan(cpu, p, "imma") as made:
        for n_q in (0, 1, 4, 17):
            q, kv = queries(n_q), cache()
            out = np.full_like(q, 7)
            other, _keep = capi.problem(q, kv, out)
            run(made, other)
            assert same_bytes(out, strata_pa.prompt_attention(q, kv, kernel="imma"))
        q, kv = queries(2, 4, 96), cache(head_dim=96, group=32)
        other, _keep = capi.problem(q, kv, np.zeros_like(q))
        with pytest.raises(Failed, match=r"the plan's kernel imma cannot run this problem on cpu .*: head_dim 96 is not one of") as failed:
            run(made, other)
        assert failed.value.args[0] == capi.UNSUPPORTED_PROBLEM


def test_exact_over_parts(cpu):
    """Cells that lie in two caches: the pages of the other are not resident."""
    q, kv = queries(5, 4, 64), cache(pages=8)
    want = strata_pa.prompt_attention(q, kv, kernel="exact", return_lse=True)
    parts = []
    for part in range(2):
        table = np.where(np.arange(8) % 2 == part, kv.page_table, -1).astype(np.int32)
        there = SimpleNamespace(**{x: getattr(kv, x) for x in ("k", "v", "k_scale", "v_scale", "layout")}, page_table=table)
        out, lse = np.zeros_like(q), np.zeros((5, 4), np.float32)
        state = SimpleNamespace(
            A=np.zeros((5, 4), np.float32), b=np.zeros((5, 4), np.float32), L=np.zeros((5, 4), np.int64), O=np.zeros(q.shape, np.int64)
        )
        parts.append((*capi.problem(q, there, out, lse=lse), state, out, lse))

    def at(*arrays):
        return [array.ctypes.data for array in arrays]

    with plan(cpu, parts[0][0], "exact") as made:
        for p, _, s, *_ in parts:
            call("exact_anchors", made, p, *at(s.A, s.b))
        one, two = parts[0][2], parts[1][2]
        A, b = one.A.copy(), one.b.copy()
        call("merge_anchors", A.size, *at(A, b, two.A, two.b))
        for p, _, s, *_ in parts:
            call("exact_sums", made, p, *at(A, b, s.L, s.O))
        call("merge_sums", one.L.size, *at(one.L, two.L))
        call("merge_sums", one.O.size, *at(one.O, two.O))
        p, _, _, out, lse = parts[0]
        call("exact_finish", made, p, *at(A, b, one.L, one.O))
        assert same_bytes(out, want[0])
        assert same_bytes(lse, want[1])
        fails(capi.INVALID_INPUT, "L is NULL", "exact_sums", made, p, *at(A, b), None, None)
        fails(capi.INVALID_INPUT, "A is NULL", "exact_finish", made, p, None, None, None, None)
        fails(capi.INVALID_INPUT, "b is NULL", "exact_anchors", made, p, *at(A), None)
        fails(capi.INVALID_INPUT, "part is NULL", "merge_sums", 1, *at(one.L), None)
        fails(capi.INVALID_INPUT, "n must not be negative", "merge_anchors", -1, *at(A, b, A, b))
        one.L[0, 0] = two.L[0, 0] = 2**62
        fails(capi.INVALID_INPUT, "do not fit 64 bits", "merge_sums", one.L.size, *at(one.L, two.L))
    with plan(cpu, p, "imma") as made:
        fails(capi.INVALID_INPUT, "parts are of the kernel exact, the plan's is imma", "exact_anchors", made, p, *at(A, b))


# --- Plans and switches


def texts(made):
    return call("plan_kernel", made), call("plan_chosen_by", made), call("plan_text", made), call("plan_workspace_bytes", made)


@pytest.mark.parametrize(
    ("kernel", "imma", "variables"),
    [
        (None, -1, {}),
        ("exact", 1, {}),
        (None, 1, {}),
        (None, 0, {"STRATA_PROMPT_ATTN_IMMA": "1"}),
        (None, -1, {"STRATA_PROMPT_ATTN_IMMA": "1"}),
        (None, -1, {"STRATA_PROMPT_ATTN_OLD": "1"}),
        (None, -1, {"STRATA_PA_KERNEL": "v2", "STRATA_PA_NUM_THREADS": "1", "STRATA_PA_FORCE_ISA": "scalar"}),
    ],
)
def test_plans_are_pythons(cpu, monkeypatch, kernel, imma, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    call("set_imma", imma)
    assert call("get_imma") == imma
    assert strata_pa.get_imma() == {1: True, 0: False, -1: None}[imma]
    p, _keep = small()
    want = strata_pa.plan(queries(), cache(), kv_len=18, kernel=kernel)
    with plan(cpu, p, kernel) as made:
        assert texts(made) == (want.kernel, want.chosen_by, repr(want), want.workspace_bytes)
        for name, reasons in want.refused:
            assert call("plan_refusal", made, name.encode()) == "; ".join(reasons) != ""
        assert call("plan_refusal", made, want.kernel.encode()) == ""
        assert call("plan_refusal", made, b"fp64") is None


def test_a_context(cpu):
    here = strata_pa.capabilities()["devices"][0]
    assert call("context_text", cpu) == f"cpu ({here['architecture']})"
    for name in KERNELS:
        assert call("context_refusal", cpu, name.encode()) == ""
    assert call("context_refusal", cpu, b"v2") == "exists for CUDA devices from sm_80 only, this device is cpu"
    assert call("context_refusal", cpu, b"fp64") is None


def test_options_of_a_context(monkeypatch):
    monkeypatch.setenv("STRATA_PA_NUM_THREADS", "3")
    p, _keep = small()
    with context(num_threads=2, isa=b"scalar") as where, plan(where, p) as made:
        assert call("plan_text", made).startswith("Plan: fp32 on cpu (scalar, 2 threads), chosen by default")
    with context() as where, plan(where, p) as made:
        assert ", 3 threads)" in call("plan_text", made)


def test_a_plan_outlives_its_context():
    p, keep = small()
    with context() as where:
        made = ctypes.c_void_p()
        call("plan_create", where, p, None, made)
    run(made, p)
    assert call("plan_kernel", made) == "fp32"
    call("plan_destroy", made)
    assert same_bytes(keep[2], strata_pa.prompt_attention(queries(), cache(), kv_len=18))


# --- Errors


def fails(status, words, name, *arguments):
    with pytest.raises(Failed) as failed:
        call(name, *arguments)
    assert failed.value.args[0] == status
    assert re.search(words, failed.value.args[1]), failed.value.args[1]


@pytest.mark.parametrize(
    ("field", "value", "status", "words"),
    [
        ("size", 0, capi.INVALID_INPUT, "problem->size must be the size of the structure, from 384 to 384, got 0"),
        ("size", 392, capi.INVALID_INPUT, "got 392"),
        ("dtype", 3, capi.INVALID_TYPE, "problem->dtype must be STRATA_PA_FLOAT32"),
        ("causal", 2, capi.INVALID_INPUT, "problem->causal must be 0 or 1, got 2"),
        ("q", None, capi.INVALID_INPUT, "q has no memory"),
        ("n_q", -1, capi.INVALID_INPUT, "the number of queries must be from 0"),
        ("n_q", 2**40, capi.INVALID_INPUT, "the number of queries must be from 0"),
        ("group", 7, capi.INVALID_INPUT, "the scale group 7 does not divide head_dim 64"),
        ("head_dim", 0, capi.INVALID_INPUT, "head_dim must be at least 1"),
        ("n_kv", 3, capi.INVALID_INPUT, "4 query heads are not a multiple of 3 KV heads"),
        ("n_seq", 0, capi.INVALID_INPUT, "the number of sequences must be at least 1"),
        ("n_seq", 2, capi.INVALID_INPUT, "cu_seqlens_q and kv_len must be set"),
        ("kv_len", None, capi.INVALID_INPUT, "cu_seqlens_q and kv_len must be set"),
        ("max_pages", 2, capi.INVALID_INPUT, r"kv_len\[0\] must be from 0 to 8"),
        ("page_table", None, capi.INVALID_INPUT, "page_table has no memory"),
        ("granularity", 4, capi.INVALID_INPUT, "granularity 4 needs ids"),
        ("widths", 64, capi.INVALID_INPUT, "widths needs ids"),
        ("window_left", -2, capi.INVALID_INPUT, "window_left"),
        ("sm_scale", float("nan"), capi.INVALID_INPUT, "sm_scale must be a finite"),
    ],
)
def test_problems_that_cannot_be(cpu, field, value, status, words):
    p, _keep = small()
    setattr(p, field, value)
    made = ctypes.c_void_p(5)
    fails(status, words, "plan_create", cpu, p, None, made)
    assert not made


def test_outputs_that_cannot_be(cpu):
    p, _keep = small()
    with plan(cpu, p) as made:
        for field, value, words in (
            ("out", None, "out has no memory"),
            ("out", p.q, "out overlaps the memory of q"),
            ("out_stride", 1, "out overlaps itself"),
            ("lse", p.out + 2, "lse is misaligned"),
        ):
            wrong = capi.Problem.from_buffer_copy(p)
            setattr(wrong, field, value)
            fails(capi.INVALID_INPUT, words, "run", made, wrong, None, None, 0)
        fails(capi.INVALID_INPUT, "stream must be NULL on a CPU", "run", made, p, 8, None, 0)
        fails(capi.INVALID_INPUT, "workspace must be NULL on a CPU", "run", made, p, None, 256, 1 << 20)


def test_lists_that_cannot_be(cpu):
    p, keep = small(ids=np.array([[1], [-2], [3]], np.int32))
    with plan(cpu, p) as made:
        fails(capi.INVALID_INPUT, r"ids\[1, 0\] is -2", "run", made, p, None, None, 0)
    assert not keep[2].any()


def test_kernels_that_cannot_run(cpu):
    p, _keep = small()
    made = ctypes.c_void_p()
    fails(capi.INVALID_INPUT, "kernel= 'fp64' is not a kernel; known kernels: fp32", "plan_create", cpu, p, b"fp64", made)
    fails(capi.UNSUPPORTED_PROBLEM, "kernel='v2' cannot run this problem on cpu.*\n.*fp32: can run", "plan_create", cpu, p, b"v2", made)


def test_the_environment(cpu, monkeypatch):
    p, _keep = small()
    monkeypatch.setenv("STRATA_PROMPT_ATTN_OLD", "yes")
    fails(capi.INVALID_INPUT, "STRATA_PROMPT_ATTN_OLD must be 1, 0 or empty, got 'yes'", "plan_create", cpu, p, None, ctypes.c_void_p())
    monkeypatch.delenv("STRATA_PROMPT_ATTN_OLD")
    monkeypatch.setenv("STRATA_PA_FORCE_ISA", "abacus")
    with pytest.raises(Failed, match="'abacus' is not an instruction-set path") as failed, context():
        pass
    assert failed.value.args[0] == capi.UNSUPPORTED_DEVICE


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"device": 3}, capi.INVALID_TYPE, "options->device must be STRATA_PA_CPU"),
        ({"ordinal": 1}, capi.UNSUPPORTED_DEVICE, "there is one CPU device"),
        ({"num_threads": -1}, capi.INVALID_INPUT, "num_threads must be from 1 to 1024, got -1"),
        ({"num_threads": 1025}, capi.INVALID_INPUT, "num_threads must be from 1 to 1024, got 1025"),
        ({"isa": b"mmx"}, capi.UNSUPPORTED_DEVICE, "'mmx' is not an instruction-set path"),
        ({"device": 1, "num_threads": 1}, capi.INVALID_INPUT, "num_threads and isa are for the CPU"),
        ({"size": 31}, capi.INVALID_INPUT, "options->size must be the size of the structure, from 32 to 32, got 31"),
    ],
)
def test_contexts_that_cannot_be(options, status, words):
    made = ctypes.c_void_p(5)
    fails(status, words, "context_create", capi.ContextOptions(**{"size": 32} | options), made)
    assert not made


def test_null_everywhere(cpu):
    """Every function with a pointer, given none."""
    p, _keep = small()
    made = ctypes.c_void_p()
    with plan(cpu, p) as ready:
        calls = [
            ("context_create", None, made),
            ("context_create", capi.ContextOptions(32), None),
            ("problem_init", None, 384),
            ("problem_set_strides", None, 0),
            ("plan_create", None, p, None, made),
            ("plan_create", cpu, None, None, made),
            ("plan_create", cpu, p, None, None),
            ("run", None, p, None, None, 0),
            ("run", ready, None, None, None, 0),
            ("kernel_at", 0, None),
            ("quantize", None, 0, 1, 32, 32, 0, 64, 0, 64, 0),
            ("quantize", 64, 0, 1, 32, 32, 0, None, 0, 64, 0),
            ("quantize", 64, 0, 1, 32, 32, 0, 64, 0, None, 0),
            ("allocate", None, 1, made),
            ("allocate", cpu, 1, None),
            ("release", None, None),
            ("upload", cpu, None, p.q, 1),
            ("upload", cpu, p.q, None, 1),
            ("download", None, p.q, p.q, 1),
            ("download", cpu, p.q, None, 1),
            ("synchronize", None, None),
        ]
        for one in calls:
            fails(capi.INVALID_INPUT, "NULL", *one)
    for name in ("plan_kernel", "plan_chosen_by", "plan_text", "context_text"):
        assert call(name, None) is None
    assert call("context_refusal", None, b"fp32") is call("context_refusal", cpu, None) is call("plan_refusal", None, b"fp32") is None
    assert call("plan_workspace_bytes", None) == 0
    call("context_destroy", None)
    call("plan_destroy", None)
    call("release", cpu, None)


def test_numbers_that_cannot_be(cpu):
    fails(capi.INVALID_INPUT, "value must be 1, 0 or -1, got 2", "set_imma", 2)
    fails(capi.INVALID_INPUT, "size must be that of strata_pa_problem, 384, got 8", "problem_init", capi.Problem(), 8)
    fails(capi.INVALID_INPUT, "index must be from 0 to", "kernel_at", call("kernel_count"), capi.KernelInfo(48))
    fails(capi.INVALID_INPUT, "info->size", "kernel_at", 0, capi.KernelInfo(0))
    fails(capi.INVALID_TYPE, "layout must be", "problem_set_strides", small()[0], 2)
    fails(capi.INVALID_INPUT, "a size is from 0", "problem_set_strides", capi.Problem(size=384, group=32, cap=2**40), 0)
    fails(capi.INVALID_INPUT, "group must be set", "problem_set_strides", capi.Problem(size=384), 0)
    if not strata_pa.build_info()["sanitize"]:  # which ends the process instead
        fails(capi.OUT_OF_MEMORY, "not enough memory", "allocate", cpu, 2**62, ctypes.c_void_p())


# --- Helpers


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_quantize(dtype):
    x = np.random.default_rng(5).standard_normal((7, 128)).astype(dtype)
    codes, scales = np.zeros((7, 160), np.int8), np.zeros((7, 5), np.uint16)
    call("quantize", x.ctypes.data, capi.DTYPES.index(x.dtype.name), 7, 128, 32, 128, codes.ctypes.data, 160, scales.ctypes.data, 5)
    want_codes, want_scales = strata_pa.quantize_kv(x, 32)
    assert same_bytes(codes[:, :128].copy(), want_codes)
    assert same_bytes(scales[:, :4].copy().view(np.float16), want_scales)
    assert not codes[:, 128:].any()
    x[3, 9] = np.inf
    fails(capi.INVALID_INPUT, r"x\[3, 9\] is not finite", "quantize", x.ctypes.data, capi.DTYPES.index(x.dtype.name), 7, 128, 32, 128,
          codes.ctypes.data, 160, scales.ctypes.data, 5)  # fmt: skip
    fails(
        capi.INVALID_INPUT, "do not fit rows", "quantize", x.ctypes.data, 0, 7, 128, 32, 128, codes.ctypes.data, 100, scales.ctypes.data, 5
    )
    fails(
        capi.INVALID_INPUT,
        "group 33 does not divide",
        "quantize",
        x.ctypes.data,
        0,
        7,
        128,
        33,
        128,
        codes.ctypes.data,
        128,
        scales.ctypes.data,
        5,
    )


def test_memory(cpu):
    memory = ctypes.c_void_p()
    call("allocate", cpu, 1000, memory)
    assert memory.value % 256 == 0
    x, y = np.random.default_rng(6).bytes(1000), ctypes.create_string_buffer(1000)
    call("upload", cpu, memory, x, 1000)
    call("download", cpu, y, memory, 1000)
    assert y.raw == x
    call("synchronize", cpu, None)
    fails(capi.INVALID_INPUT, "stream must be NULL on a CPU", "synchronize", cpu, 8)
    call("release", cpu, memory)


# --- Threads


def test_two_threads_with_two_contexts(cpu):
    """Answers and error texts of one thread do not show in the other."""
    rng = np.random.default_rng(7)
    work = []
    for seed in range(2):
        q, kv = rng.standard_normal((9, 6, 64), np.float32), cache(n_kv=2, pages=6 + seed)
        work.append((q, kv, strata_pa.prompt_attention(q, kv, kernel="exact")))
    wrong, start = [], threading.Barrier(2)

    def loop(index):
        q, kv, want = work[index]
        try:
            with context(num_threads=1 + index) as where:
                start.wait()
                for _ in range(40):
                    if not same_bytes(answer(where, q, kv, "exact"), want):
                        wrong.append("bytes")
                    fails(capi.INVALID_INPUT, f"got {100 + index}$", "set_imma", 100 + index)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_error_before_one():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(call("last_error")))
    thread.start()
    thread.join()
    assert seen == [""]
