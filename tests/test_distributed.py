"""strata_pa.distributed over Gloo: processes of their own for 1, 2, 3 and 4 ranks (tests/distributed_ranks.py)."""

import json
import threading

import numpy as np
import pytest
from groups import check_digests, run_group
from optional import need
from problems import same_bytes

import strata_pa
from strata_pa import InvalidInput

torch = need("torch")
from strata_pa import distributed  # noqa: E402


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request, tmp_path_factory):
    return run_group("schemes", request.param, tmp_path_factory.mktemp("group"))


@pytest.mark.slow
def test_every_way_gives_the_bytes_of_one_device(ranks):
    check_digests(ranks)


@pytest.mark.slow
def test_merged_results_are_near_float64(ranks):
    for answer in ranks:
        assert len(answer["errors"]) == 6
        assert max(answer["errors"].values()) <= 1.5e-6, answer["errors"]


@pytest.mark.slow
def test_merged_results_are_the_same_on_every_rank(ranks):
    assert len({json.dumps(answer, sort_keys=True) for answer in ranks}) == 1


MESSAGES = {
    "rows": "the ranks' calls differ: n_q is 8 on rank 0, 7 on rank 2",
    "window": "the ranks' calls differ: window_left is -1 on rank 0, 5 on rank 2",
    "kernel": "the ranks' calls differ: kernel is fp32 on rank 0, exact on rank 2",
    "scheme": "the ranks' calls differ: the call is context_parallel on rank 0, head_parallel on rank 2",
    "one page on all": "logical page 0 is on 3 ranks; each page must be on one at most",
}
MISTAKES = {
    "one rank's mistake": "no such",
    "one rank's ids": "-7",
    "one rank's ids, merged": "-7",
    "rows of a span": "rows of the spans",
    "heads": "rank 2 has",
}


@pytest.mark.slow
def test_ranks_that_differ_are_refused_on_every_one(tmp_path):
    answers = run_group("differing", 3, tmp_path)
    for rank, answer in enumerate(answers):
        assert set(answer["raised"]) == {*MESSAGES, *MISTAKES}
        for name, text in MESSAGES.items():
            assert answer["raised"][name]["error"] == "InvalidInput", (name, answer["raised"][name])
            assert text in answer["raised"][name]["text"], (name, answer["raised"][name])
        for name, text in MISTAKES.items():
            got = answer["raised"][name]
            assert text in got["text"], (name, got)
            if rank == 2:
                assert got["error"] == "InvalidInput", (name, got)
            else:
                assert got["error"] == "GroupError", (name, got)
                assert "rank 2 refused its part: InvalidInput" in got["text"]
        assert answer["after"]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "size"), [("lost", 3), ("lost_within", 2), ("late", 2)])
def test_a_rank_that_is_gone_is_noticed(scenario, size, tmp_path):
    *answers, last = run_group(scenario, size, tmp_path)
    assert last == ({"error": "none"} if scenario == "late" else None)
    for answer in answers:
        assert answer["error"] == "GroupError", answer
        assert answer["seconds"] < 25
        assert f"of {size} ranks failed on rank" in answer["text"]


# Without a group


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 1024])
@pytest.mark.parametrize("n_q", [0, 1, 5, 100, 4096])
def test_query_spans(size, n_q):
    spans = [distributed.query_spans(n_q, size, rank) for rank in range(size)]
    rows = np.concatenate([np.arange(first, end) for pair in spans for first, end in pair])
    assert np.array_equal(np.sort(rows), np.arange(n_q))
    work = [sum((end * (end + 1) - first * (first + 1)) / 2 for first, end in pair) for pair in spans]
    if n_q >= 4 * size:  # cells seen by a causal prompt: within the rounding of the chunks to whole rows
        assert max(work) - min(work) <= 2 * n_q


@pytest.mark.parametrize(("n_head", "n_kv"), [(24, 2), (8, 8), (9, 3), (16, 1)])
def test_head_spans(n_head, n_kv):
    for size in range(1, n_head + 1):
        spans = [distributed.head_spans(n_head, n_kv, size, rank) for rank in range(size)]
        assert [x for (first, end), _ in spans for x in range(first, end)] == list(range(n_head))
        for (first, end), (first_kv, end_kv) in spans:
            assert {h // (n_head // n_kv) for h in range(first, end)} == set(range(first_kv, end_kv))
            pieces = list(distributed._pieces(first, end, n_head // n_kv))
            assert [x for (a, b), _ in pieces for x in range(a, b)] == list(range(first, end))
            for (a, b), (c, d) in pieces:
                assert (b - a) % (d - c) == 0
                assert all(h // (n_head // n_kv) == c + (h - a) // ((b - a) // (d - c)) for h in range(a, b))
    with pytest.raises(InvalidInput, match=f"{n_head + 1} ranks cannot share {n_head} query heads"):
        distributed.head_spans(n_head, n_kv, n_head + 1, 0)


@pytest.mark.parametrize("grain", [1, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("per_head", [False, True])
def test_lists_go_to_the_owner(grain, page_size, per_head):
    """A rank walks the entries whose cells it holds, in their order, and no others."""
    rng = np.random.default_rng(page_size)
    pages = -(-120 // page_size)
    table = torch.from_numpy(np.where(rng.random(pages) < 0.4, np.arange(pages), -1).astype(np.int32))
    pool, scale = torch.zeros((pages, 2, page_size, 64), dtype=torch.int8), torch.zeros((pages, 2, page_size, 2), dtype=torch.float16)
    kv = strata_pa.PagedKV(pool, pool, scale, scale, table)
    ids = rng.integers(-1, 125 // grain, (7, 2, 30) if per_head else (7, 30)).astype(np.int32)
    widths = rng.integers(0, 31, 7).astype(np.int32)
    widths[:2] = 0, 30
    shape = {"granularity": grain, "causal": True, "window_left": -1}
    parts = distributed._Parts(torch.zeros(7, 4, 64), kv, 120, None, torch.from_numpy(ids), torch.from_numpy(widths), shape, 2)
    (piece,) = parts.pieces((0, 7))
    got, count = piece.options["ids"].numpy().reshape(7, -1, 30), piece.options["widths"].numpy()
    for i, lists in enumerate(ids.reshape(7, -1, 30)):
        cells = [[range(e * grain, (e + 1) * grain) for e in one[: widths[i]]] for one in lists]
        own = [
            [r.start // grain for r in one if r.start >= 0 and any(c // page_size < pages and table[c // page_size] >= 0 for c in r)]
            for one in cells
        ]
        assert count[i] == max(map(len, own))
        assert [[e for e in one[: count[i]] if e >= 0] for one in got[i]] == own


def test_what_is_refused_without_a_group():
    q = torch.zeros(2, 4, 64)
    pool, scale = torch.zeros((3, 2, 4, 64), dtype=torch.int8), torch.zeros((3, 2, 4, 2), dtype=torch.float16)
    kv = strata_pa.PagedKV(pool, pool, scale, scale, torch.arange(3, dtype=torch.int32))
    with pytest.raises(InvalidInput, match="there is no process group"):
        distributed.context_parallel(q, kv)
    with pytest.raises(strata_pa.InvalidType, match="q must be a PyTorch tensor, got ndarray"):
        distributed.context_parallel(q.numpy(), kv)
    with pytest.raises(InvalidInput, match="rank must be 0 to size - 1, got rank 2 of 2"):
        distributed.query_spans(5, 2, 2)
    with pytest.raises(InvalidInput, match="n_q must not be negative"):
        distributed.query_spans(-1, 2, 1)
    with pytest.raises(InvalidInput, match="n_head must be a multiple of n_kv, got 5 and 2"):
        distributed.head_spans(5, 2, 1, 0)


def test_calls_from_threads():
    """Each thread its own kernel and problem, as one thread for each device would: no call sees another's."""
    rng = np.random.default_rng(1)
    jobs = []
    for i in range(6):
        k, ks = strata_pa.quantize_kv(rng.standard_normal((20, 2, 4, 64), np.float32))
        v, vs = strata_pa.quantize_kv(rng.standard_normal((20, 2, 4, 64), np.float32))
        kv = strata_pa.PagedKV(k, v, ks, vs, rng.permutation(20).astype(np.int32))
        jobs.append((rng.standard_normal((30, 4, 64), np.float32), kv, ("fp32", "imma", "exact")[i % 3]))
    want = [strata_pa.prompt_attention(q, kv, kernel=kernel, num_threads=1) for q, kv, kernel in jobs]
    got = [[] for _ in jobs]

    def work(i):
        q, kv, kernel = jobs[i]
        got[i] = [strata_pa.prompt_attention(q, kv, kernel=kernel, num_threads=1) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(results) == 5 and all(same_bytes(x, want[i]) for x in results) for i, results in enumerate(got))
