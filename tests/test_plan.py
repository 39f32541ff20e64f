"""Which kernel runs: the switches and their order, refusals, forced instruction sets, threads."""

import itertools
import json
import threading

import numpy as np
import pytest
from small import cache, queries

import strata_pa

CPU_KERNELS = ("fp32", "imma", "exact")
VARIABLES = [v["name"] for v in strata_pa.environment_variables()]
OLD, IMMA, KERNEL, FORCE_ISA, NUM_THREADS, CUDA_DRIVER, HIP_DRIVER = VARIABLES


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    strata_pa.set_imma(None)


Q, KV = queries(), cache()


def plan(**arguments):
    return strata_pa.plan(Q, KV, **arguments)


def test_the_default():
    p = plan()
    assert (p.kernel, p.backend, p.device, p.chosen_by, p.notes) == ("fp32", "cpu", "cpu", "default", ())
    assert p.workspace_bytes > 0
    refused = dict(p.refused)
    assert set(refused) == {"imma", "exact", "v1", "v2"}
    assert "opt-in" in refused["imma"][0]
    assert "CUDA devices" in refused["v1"][0]
    assert "sm_80" in refused["v2"][0]
    with pytest.raises(AttributeError):
        p.kernel = "imma"
    assert "fp32 on cpu" in repr(p)
    assert "refused v2" in repr(p)


def expected(kernel, imma, old, env_imma, env_kernel):
    """(kernel, chosen_by) by the written order; None for a switch that the CPU cannot follow."""
    if kernel:
        return kernel, "kernel="
    if imma is True:
        return "imma", "set_imma(True)"
    if old == "1":
        return "fp32", f"{OLD}=1"
    if env_imma == "1" and imma is not False:
        return "imma", f"{IMMA}=1"
    if env_kernel in CPU_KERNELS and not (env_kernel == "imma" and imma is False):
        return env_kernel, f"{KERNEL}={env_kernel}"
    return "fp32", "default"


def test_every_combination_of_switches(monkeypatch):
    flags = (None, "", "0", "1")
    for kernel, imma, old, env_imma, env_kernel in itertools.product(
        (None, *CPU_KERNELS), (None, True, False), flags, flags, (None, "", *CPU_KERNELS, "v1", "v2")
    ):
        strata_pa.set_imma(imma)
        for name, value in ((OLD, old), (IMMA, env_imma), (KERNEL, env_kernel)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        p = plan(kernel=kernel)
        combination = (kernel, imma, old, env_imma, env_kernel)
        assert (p.kernel, p.chosen_by) == expected(*combination), combination
        asked_for_v = p.chosen_by == "default" and env_kernel in ("v1", "v2")
        assert any("was not followed" in note for note in p.notes) == asked_for_v, combination


def test_the_kernel_that_is_planned_runs():
    outputs = {kernel: strata_pa.prompt_attention(Q, KV, kernel=kernel).tobytes() for kernel in CPU_KERNELS}
    assert len(set(outputs.values())) == 3
    assert strata_pa.prompt_attention(Q, KV).tobytes() == outputs["fp32"]
    strata_pa.set_imma(True)
    assert strata_pa.prompt_attention(Q, KV).tobytes() == outputs["imma"]
    assert strata_pa.prompt_attention(Q, KV, kernel="exact").tobytes() == outputs["exact"]
    strata_pa.set_imma(None)
    assert strata_pa.prompt_attention(Q, KV).tobytes() == outputs["fp32"]


def test_the_environment_is_read_in_each_call(monkeypatch):
    for kernel in CPU_KERNELS:
        monkeypatch.setenv(KERNEL, kernel)
        assert plan().kernel == kernel


def test_set_imma():
    assert strata_pa.get_imma() is None
    for value in (True, False, None):
        strata_pa.set_imma(value)
        assert strata_pa.get_imma() is value
    strata_pa.set_imma(np.bool_(True))
    assert strata_pa.get_imma() is True
    for value in (1, "on"):
        with pytest.raises(strata_pa.InvalidType, match="True or False"):
            strata_pa.set_imma(value)


def test_set_imma_holds_for_every_thread():
    strata_pa.set_imma(True)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((strata_pa.get_imma(), plan().kernel)))
    thread.start()
    thread.join()
    assert seen == [(True, "imma")]


def test_set_imma_false_says_what_it_overrules(monkeypatch):
    monkeypatch.setenv(IMMA, "1")
    strata_pa.set_imma(False)
    assert any(IMMA in note and "set_imma(False)" in note for note in plan().notes)


def test_a_switch_that_cannot_be_followed_leaves_the_default_and_says_why(monkeypatch):
    default = strata_pa.prompt_attention(Q, KV)
    monkeypatch.setenv(KERNEL, "v2")
    p = plan()
    assert (p.kernel, p.chosen_by) == ("fp32", "default")
    (note,) = p.notes
    assert f"{KERNEL}=v2" in note
    assert "sm_80" in note
    assert strata_pa.prompt_attention(Q, KV).tobytes() == default.tobytes()


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_an_explicit_kernel_runs_or_raises(name):
    with pytest.raises(strata_pa.UnsupportedProblem) as info:
        strata_pa.prompt_attention(Q, KV, kernel=name)
    message = str(info.value)
    for kernel in ("fp32", "imma", "exact", "v1", "v2"):
        assert f"\n  {kernel}: " in message
    assert f"{name}: exists for CUDA devices" in message


def test_unknown_kernel_names(monkeypatch):
    with pytest.raises(strata_pa.InvalidInput, match=r"'fp64' is not a kernel; known kernels: fp32, imma, exact, v2, v1"):
        plan(kernel="fp64")
    with pytest.raises(strata_pa.InvalidType, match="kernel must be a string, got int"):
        plan(kernel=2)
    monkeypatch.setenv(KERNEL, "FP32")
    with pytest.raises(strata_pa.InvalidInput, match=f"{KERNEL} 'FP32' is not a kernel; known"):
        plan(kernel="exact")


@pytest.mark.parametrize("name", [OLD, IMMA])
@pytest.mark.parametrize("value", ["2", "true", " 1", "on", "-1"])
def test_flags_are_0_1_or_empty(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(strata_pa.InvalidInput, match=f"{name} must be 1, 0 or empty, got '{value}'"):
        plan()


def test_threads(monkeypatch):
    assert plan(num_threads=3).num_threads == 3
    monkeypatch.setenv(NUM_THREADS, "5")
    assert plan().num_threads == 5
    assert plan(num_threads=1).num_threads == 1
    monkeypatch.setenv(NUM_THREADS, "")
    assert plan().num_threads >= 1
    for value in (0, -1, 1025, 2**40):
        with pytest.raises(strata_pa.InvalidInput, match=f"num_threads must be from 1 to 1024, got {value}"):
            plan(num_threads=value)
    for value in ("0", "1025", "two", "-1", "1.0", "99999999999"):
        monkeypatch.setenv(NUM_THREADS, value)
        with pytest.raises(strata_pa.InvalidInput, match=f"{NUM_THREADS} must be a number from 1 to 1024, got '{value}'"):
            plan(num_threads=1)


def test_forced_instruction_sets(monkeypatch):
    default = strata_pa.prompt_attention(Q, KV)
    cpu = strata_pa.capabilities()["devices"][0]
    for isa in cpu["isas"]:
        monkeypatch.setenv(FORCE_ISA, isa["name"])
        if isa["supported"]:
            assert plan().architecture == isa["name"]
            assert strata_pa.capabilities()["devices"][0]["architecture"] == isa["name"]
            assert strata_pa.prompt_attention(Q, KV).tobytes() == default.tobytes()
        else:
            with pytest.raises(strata_pa.UnsupportedDevice, match=f"'{isa['name']}' is not supported by this machine; paths: scalar"):
                plan()
    monkeypatch.setenv(FORCE_ISA, "")
    assert plan().architecture == cpu["architecture"]
    monkeypatch.setenv(FORCE_ISA, "sse9")
    for call in (plan, strata_pa.capabilities, lambda: strata_pa.prompt_attention(Q, KV)):
        with pytest.raises(strata_pa.UnsupportedDevice, match=r"STRATA_PA_FORCE_ISA='sse9' is not .* of this build; paths: scalar"):
            call()
    with pytest.raises(RuntimeError):
        plan()


REFUSED = [
    (queries(head_dim=96), cache(head_dim=96), {}, "head_dim 96 is not one of 64, 128, 256"),
    (queries(), cache(group=16), {}, "scale group 16 is not one of 32, 64, 128, 256"),
    (queries(n_head=34), cache(), {}, r"17 query heads per KV head \(34 / 2\) are not from 1 to 16"),
    (queries(), cache(), {"ids": np.zeros((3, 2), np.int32), "granularity": 2}, "granularity 2 is not one of 1, 4, 16, 64, 128"),
    (
        queries(1),
        cache(),
        {"ids": np.zeros((1, 2**17 + 1), np.int32), "granularity": 128},
        "a row's list has up to 16777344 entries, more than 16777216",
    ),
]


@pytest.mark.parametrize(("q", "kv", "arguments", "reason"), REFUSED, ids=[reason[:12] for *_, reason in REFUSED])
def test_problems_that_no_kernel_serves(q, kv, arguments, reason):
    for call in (strata_pa.plan, strata_pa.prompt_attention, strata_pa.exact_anchors):
        with pytest.raises(strata_pa.UnsupportedProblem, match=reason) as info:
            call(q, kv, **arguments)
        assert isinstance(info.value, ValueError)
        for kernel in CPU_KERNELS:
            assert f"\n  {kernel}: " in str(info.value)
    strata_pa.prompt_attention(Q, KV)  # the next call works


def test_every_reason_is_given():
    with pytest.raises(strata_pa.UnsupportedProblem, match=r"fp32: head_dim 96 .*; scale group 96 .*; 17 query heads"):
        strata_pa.plan(queries(head_dim=96, n_head=34), cache(head_dim=96, group=96))


def test_a_long_dense_list():
    k, scale = np.zeros((1, 1, 1, 64), np.int8), np.zeros((1, 1, 1, 1), np.float16)
    cells = 2**24 + 1
    kv = strata_pa.PagedKV(
        *(np.broadcast_to(k, (1, 1, cells, 64)) for _ in range(2)),
        *(np.broadcast_to(scale, (1, 1, cells, 1)) for _ in range(2)),
        np.zeros(1, np.int32),
    )
    with pytest.raises(strata_pa.UnsupportedProblem, match="16777217 entries"):
        strata_pa.plan(queries(), kv)
    assert strata_pa.plan(queries(n_head=1), kv, kv_len=cells - 1).kernel == "fp32"


def test_the_table_describes_what_is_served():
    rows = strata_pa.kernels()
    assert [row["name"] for row in rows if row["backend"] == "cpu"] == list(CPU_KERNELS)
    assert [row["name"] for row in rows if row["backend"] == "cuda" and not row["opt_in"]] == ["v2", "v1", "fp32"]
    cpu = strata_pa.capabilities()["devices"][0]
    for row in rows:
        if row["backend"] != "cpu":
            continue
        assert row["built"]
        assert row["name"] in cpu["kernels"]
        for head_dim in row["head_dims"]:
            for group in row["groups"]:
                if head_dim % group == 0:
                    kv = cache(head_dim=head_dim, group=group)
                    for heads in row["heads_per_kv"]:
                        p = strata_pa.plan(queries(n_head=heads * 2, head_dim=head_dim), kv, kernel=row["name"])
                        assert p.kernel == row["name"]
    assert cpu["default"] == "fp32"
    assert {name for name, _ in cpu["refused"]} == {"v1", "v2"}


def test_facts_are_fit_for_json():
    facts = (strata_pa.kernels(), strata_pa.capabilities(), strata_pa.build_info(), strata_pa.environment_variables())
    assert json.loads(json.dumps(facts))[2]["version"] == strata_pa.__version__
    built = {backend: bool(strata_pa.build_info()[f"{backend}_archs"]) for backend in ("cuda", "hip")}
    assert strata_pa.capabilities()["backends"] == {"cpu": True, **built}


def test_doctor(monkeypatch):
    report = strata_pa.doctor()
    assert report.ok, str(report)
    assert {check.name for check in report.checks} >= {"build", "environment", "cpu", "kernel fp32", "kernel imma", "kernel exact"}
    monkeypatch.setenv(FORCE_ISA, "sse9")
    report = strata_pa.doctor()
    assert not report.ok
    assert "sse9" in str(report)
