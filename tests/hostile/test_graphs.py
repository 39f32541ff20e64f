"""CUDA graphs: a replay reads everything anew, with whatever an earlier one left in the workspace."""

import numpy as np
import pytest
from place import Shape, call, on_gpus, problem

import strata_pa

POOLS = ("k", "v", "k_scale", "v_scale", "page_table")


@on_gpus
def test_replay_with_changed_contents(where):
    torch = pytest.importorskip("torch")
    shape, cells, cap, rng = Shape(12, 2, 256, 64), 300, 90, np.random.default_rng(1)
    p = problem(where, n_q=37, cells=cells, shape=shape, seed=2)
    host = {x: getattr(p.kv, x) for x in POOLS}
    kv = strata_pa.PagedKV(**{x: torch.from_numpy(y).cuda() for x, y in host.items()})
    ids, widths = (torch.zeros(s, dtype=torch.int32, device="cuda") for s in ((37, cap), (37,)))
    q, out = torch.from_numpy(p.q).cuda(), torch.empty(p.q.shape, device="cuda")
    options = {"ids": ids, "widths": widths, "kernel": where.kernel}
    size = strata_pa.plan(q, kv, **options).workspace_bytes
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda") if size else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strata_pa.prompt_attention(q, kv, out=out, workspace=workspace, **options)
    for seed in range(6):
        changed = problem(where, n_q=37, cells=cells, shape=shape, seed=10 + seed)
        new_ids = rng.integers(-1, cells, (37, cap)).astype(np.int32)
        if seed % 2:  # ascending lists without repeats: the fast forms' own case
            new_ids = np.sort(np.stack([rng.choice(cells, cap, replace=False) for _ in range(37)])).astype(np.int32)
        new_widths = rng.integers(0, cap + 1, 37).astype(np.int32)
        if seed == 4:
            changed.kv.k_scale[3, 0, 1, 2] = np.nan
        q.copy_(torch.from_numpy(changed.q))
        for x in POOLS:
            getattr(kv, x).copy_(torch.from_numpy(getattr(changed.kv, x)))
        ids.copy_(torch.from_numpy(new_ids))
        widths.copy_(torch.from_numpy(new_widths))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        want, _ = call(where, changed, ids=new_ids, widths=new_widths, workspace=False)
        assert out.cpu().numpy().tobytes() == want.tobytes(), seed
        if size and seed == 3:
            workspace.fill_(0x5A)
