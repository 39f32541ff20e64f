"""Threads, forks, streams, the environment, and calls that fail."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from place import Problem, Shape, at, call, check, everywhere, on_gpus, on_the_cpu, problem, same

import strata_pa
from strata_pa._device import DeviceArray, ordinal_of
from strata_pa.attention import make_call

SHAPES = [Shape(2, 2, 64, 32), Shape(4, 1, 128, 64), Shape(12, 2, 256, 64), Shape(1, 3, 64, 64)]


@everywhere
def test_eight_threads(where):
    """Different head_dims at once, many times: no call sees another."""
    shapes = SHAPES if where.portable else [where.shape]
    problems = [problem(where, n_q=3 + i, cells=60, seed=i, shape=shapes[i % len(shapes)]) for i in range(8)]
    want = [call(where, p) for p in problems]
    wrong, start = [], threading.Barrier(8)

    def work(i):
        start.wait()
        for _ in range(10):
            if not same(call(where, problems[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@everywhere
def test_errors_do_not_stay(where):
    """A call after a refused one, and one after an exception in a thread, is right."""
    p = problem(where, seed=1)
    want = check(where, p)
    for _ in range(3):
        with pytest.raises(strata_pa.Error):
            call(where, p, kv_len=99)
        assert same(call(where, p), want)


@everywhere
def test_the_environment_between_two_calls(where, monkeypatch):
    """Read anew by every call, and never by the one that names its kernel."""
    p = problem(where, shape=Shape(12, 2, 256, 64), seed=2)
    want = {k: call(where._replace(kernel=k), p) for k in kernels_of(where)}
    for kernel in [*want, *want]:
        monkeypatch.setenv("STRATA_PA_KERNEL", kernel)
        assert same(call(where._replace(kernel=None), p), want[kernel])
        assert same(call(where, p), want[where.kernel])


def kernels_of(where):
    return next(d["kernels"] for d in strata_pa.capabilities()["devices"] if d["device"] == where.device)


@everywhere
def test_fork(where):
    """In a child the CPU works; the GPU of its parent is an error by name, not a crash or a hang."""
    code = f"""
        import os, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        import numpy as np
        import strata_pa
        from place import Where, call, problem, same
        where, cpu = Where({where.device!r}, {where.kernel!r}), Where("cpu", "exact")
        p, q = problem(where, seed=3), problem(cpu, seed=4)
        want, want_cpu = call(where, p), call(cpu, q)
        child = os.fork()
        if child == 0:
            status = 9
            try:
                assert same(call(cpu, q), want_cpu)
                if where.on_gpu:
                    try:
                        call(where, p)
                        status = 8
                    except strata_pa.Error as error:
                        status = 0 if len(str(error)) > 20 else 7
                else:
                    status = 0 if same(call(where, p), want) else 6
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(call(where, p), want)
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_spawn():
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        digests = pool.map(_in_a_child, [5, 5, 6])
    assert digests == [_in_a_child(5), _in_a_child(5), _in_a_child(6)]
    assert digests[0] != digests[2]


def _in_a_child(seed):
    from place import Where

    cpu = Where("cpu", "exact")
    return call(cpu, problem(cpu, seed=seed))[0].tobytes()


@on_gpus
def test_a_slow_producer_on_a_side_stream(where):
    """The call waits for what its stream does before it, 50 times."""
    torch = pytest.importorskip("torch")
    p = problem(where, n_q=16, cells=200, seed=7)
    want = call(where, p, workspace=False)[0]
    arrays = {x: torch.from_numpy(getattr(p.kv, x)).cuda() for x in ("k", "v", "k_scale", "v_scale", "page_table")}
    kv, source = strata_pa.PagedKV(**arrays), torch.from_numpy(p.q).cuda()
    stream = torch.cuda.Stream()
    for _ in range(50):
        q, out = torch.full_like(source, torch.nan), torch.full_like(source, torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            q.copy_(source)
            strata_pa.prompt_attention(q, kv, out=out, kernel=where.kernel)
        stream.synchronize()
        assert np.array_equal(out.cpu().numpy(), want)


@on_gpus
def test_ways_to_name_a_stream(where):
    torch = pytest.importorskip("torch")
    p = problem(where, n_q=4, cells=60, seed=8)
    want = call(where, p, workspace=False)[0]
    kv = strata_pa.PagedKV(*(torch.from_numpy(getattr(p.kv, x)).cuda() for x in ("k", "v", "k_scale", "v_scale", "page_table")))
    q, side = torch.from_numpy(p.q).cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (0, None, side, side.cuda_stream):
        out = torch.full_like(q, torch.nan)
        torch.cuda.synchronize()
        strata_pa.prompt_attention(q, kv, out=out, kernel=where.kernel, stream=stream)
        torch.cuda.synchronize()
        assert np.array_equal(out.cpu().numpy(), want), stream


@on_gpus
def test_two_devices(where):
    """The device of the pointers is the one that works, whatever is current; arguments of two are refused."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("for two GPUs")
    p = problem(where, n_q=4, cells=60, seed=9)
    want = call(where, p, workspace=False)[0]
    other = f"cuda:{1 - ordinal_of(where.device)}"
    kv = strata_pa.PagedKV(*(torch.from_numpy(getattr(p.kv, x)).to(other) for x in ("k", "v", "k_scale", "v_scale", "page_table")))
    q = torch.from_numpy(p.q).to(other)
    current = torch.cuda.current_device()
    out = strata_pa.prompt_attention(q, kv, kernel=where.kernel)
    assert (str(out.device), torch.cuda.current_device()) == (other, current)
    assert np.array_equal(out.cpu().numpy(), want)
    with pytest.raises(strata_pa.InvalidInput, match="all arrays must be on one device"):
        strata_pa.prompt_attention(q.to(where.device), kv, kernel=where.kernel)


@on_gpus
def test_host_and_device_arrays_together(where):
    p = problem(where, seed=10)
    there = strata_pa.PagedKV(*(at(where, getattr(p.kv, x)) for x in ("k", "v", "k_scale", "v_scale", "page_table")))
    with pytest.raises(strata_pa.InvalidInput, match="in host memory"):
        make_call(p.q, there, kernel=where.kernel)
    with pytest.raises(strata_pa.InvalidInput, match="in host memory"):
        make_call(at(where, p.q), there, ids=np.zeros((5, 1), np.int32), kernel=where.kernel)


@on_gpus
def test_a_workspace_that_does_not_do(where):
    """Too small, or not aligned: refused before a launch; one for another problem is too small or enough."""
    p = Problem(*problem(where, n_q=9, cells=90, shape=Shape(12, 2, 256, 64), seed=11))
    there = strata_pa.PagedKV(*(at(where, getattr(p.kv, x)) for x in ("k", "v", "k_scale", "v_scale", "page_table")))
    one = make_call(at(where, p.q), there, kernel=where.kernel)
    size = one.plan()["workspace_bytes"]
    if not size:
        pytest.skip("this kernel takes no workspace")
    out = DeviceArray(np.full(p.q.shape, 7, np.float32), ordinal_of(where.device))
    with pytest.raises(strata_pa.InvalidInput, match="workspace"):
        one.run(out, None, False, DeviceArray(np.zeros(size - 1, np.uint8), ordinal_of(where.device)))
    assert (out.read() == 7).all()


@on_the_cpu
def test_nothing_of_the_process_is_left_open(where):
    """Calls leave no file descriptor and no thread behind."""
    p = problem(where)
    call(where, p)

    def open_things():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = open_things()
    for _ in range(20):
        call(where, p, num_threads=2)
    assert open_things() == before
