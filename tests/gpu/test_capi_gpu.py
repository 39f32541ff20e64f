"""The C API on the GPU that is here: digests, captured graphs, two threads."""

import json
import threading
from pathlib import Path

import capi
import inputs
import numpy as np
import pytest
from capi import call, context, plan, run
from on_gpu import device, digest

import strata_pa
from strata_pa._device import ordinal_of

PORTABLE = json.loads((Path(__file__).parents[1] / "golden" / "portable.json").read_text())["cases"]
PUBLISHED = json.loads((Path(__file__).parents[1] / "golden" / "v2_sm90.json").read_text())["cases"]
HERE = device()
KERNELS = [k for k in ("fp32", "imma", "exact") if HERE and k in HERE["kernels"]]
kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture
def gpu():
    with context(capi.CUDA, ordinal_of(HERE["device"])) as where:
        yield where


class Golden:
    """A golden problem in the memory of a context's device."""

    def __init__(self, where, name):
        self.q, kv, self.options = inputs.arguments(inputs.load(name))
        self.kv = kv
        self.memory = capi.Memory(where)
        self.poison = np.full_like(self.q, np.nan)
        lists = {x: y for x, y in self.options.items() if y is not None}
        self.p, self._keep = capi.problem(self.q, kv, self.poison, self.memory.place, **lists)

    def digest(self):
        """Of the output, which is poisoned for the next run."""
        out = self.memory.read(self.p.out, self.poison)
        self.memory.write(self.p.out, self.poison)
        return digest(out)

    def workspace(self, chosen):
        size = call("plan_workspace_bytes", chosen)
        return (self.memory.allocate(size), size) if size else (None, 0)


@pytest.mark.parametrize("name", ["tiny", "widths", "select2100", "layer0"])
def test_golden_digests(gpu, name):
    golden = Golden(gpu, name)
    for kernel in KERNELS:
        with plan(gpu, golden.p, kernel) as chosen:
            run(chosen, golden.p)
            assert golden.digest() == PORTABLE[name][kernel], kernel
            run(chosen, golden.p, None, *golden.workspace(chosen))
            assert golden.digest() == PORTABLE[name][kernel], f"{kernel} with a workspace"
    with plan(gpu, golden.p) as chosen:
        run(chosen, golden.p)
        answer = golden.digest()
        if name in PUBLISHED and HERE["architecture"] == "sm_90":
            assert (call("plan_kernel", chosen), answer) == ("v2", PUBLISHED[name]["v2_sha256"])
    golden.memory.free()


@kernels
@pytest.mark.parametrize("with_workspace", [False, True])
def test_replays_read_the_lists_anew(gpu, kernel, with_workspace):
    torch = pytest.importorskip("torch")
    golden, stream, graph = Golden(gpu, "select2100"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    ids, widths = golden.options["ids"], golden.options["widths"]
    cached = strata_pa.PagedKV(*(getattr(golden.kv, x) for x in ("k", "v", "k_scale", "v_scale", "page_table")))
    with plan(gpu, golden.p, kernel) as chosen:
        workspace = golden.workspace(chosen) if with_workspace else (None, 0)
        with torch.cuda.graph(graph, stream=stream):
            run(chosen, golden.p, stream.cuda_stream, *workspace)
        assert golden.digest() != PORTABLE["select2100"][kernel], "captured, not run"
        for seed in (None, 1, 2):
            if seed is not None:
                rng = np.random.default_rng(seed)
                ids = rng.integers(-1, 2100, ids.shape).astype(np.int32)
                widths = rng.integers(0, ids.shape[1] + 1, widths.shape).astype(np.int32)
                golden.memory.write(golden.p.ids, ids)
                golden.memory.write(golden.p.widths, widths)
            graph.replay()
            torch.cuda.synchronize()
            want = strata_pa.prompt_attention(golden.q, cached, ids=ids, widths=widths, kv_len=2100, kernel=kernel)
            assert golden.digest() == digest(want), seed
    golden.memory.free()


def test_the_given_stream(gpu):
    torch = pytest.importorskip("torch")
    golden, stream = Golden(gpu, "tiny"), torch.cuda.Stream()
    late = torch.from_numpy(golden.q).cuda()
    copy = torch.zeros_like(late)
    torch.cuda.synchronize()
    golden.p.q = copy.data_ptr()
    with plan(gpu, golden.p, "fp32") as chosen:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            copy.copy_(late)  # on this stream alone; another one would see zeros
        run(chosen, golden.p, stream.cuda_stream)
        call("synchronize", gpu, stream.cuda_stream)
        assert golden.digest() == PORTABLE["tiny"]["fp32"]
    golden.memory.free()


def test_two_threads_with_two_contexts():
    """Each with its stream, its kernel and its problem."""
    torch = pytest.importorskip("torch")
    start, wrong = threading.Barrier(2), []

    def loop(name, kernel):
        try:
            stream = torch.cuda.Stream()
            with context(capi.CUDA, ordinal_of(HERE["device"])) as where:
                golden = Golden(where, name)
                with plan(where, golden.p, kernel) as chosen:
                    start.wait()
                    for _ in range(20):
                        run(chosen, golden.p, stream.cuda_stream)
                        call("synchronize", where, stream.cuda_stream)
                        if golden.digest() != PORTABLE[name][kernel]:
                            wrong.append((name, kernel))
                golden.memory.free()
        except BaseException as error:
            wrong.append(error)

    work = [("select2100", KERNELS[-1]), ("widths", KERNELS[0])]
    threads = [threading.Thread(target=loop, args=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
