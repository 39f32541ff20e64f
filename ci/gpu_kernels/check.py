"""Checks and times the kernels of cuda/ on the GPU that is here. Needs build.py's output and NumPy; writes one JSON record.

python check.py [--arch sm_90] [--only identity,portable,...] [--json record.json]
python check.py --tiny                 two cases and no more, for compute-sanitizer
"""

import argparse
import ctypes
import datetime
import hashlib
import json
import pathlib
import statistics
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "golden")]
import inputs  # noqa: E402
import sweep  # noqa: E402
from kernels import Kernels, Problem  # noqa: E402

from strata_pa import reference  # noqa: E402

PORTABLE = ("fp32", "imma", "exact")
SHAPES = {"32768/2048": (32768, 2048), "1500/1500": (1500, 1500), "2100/256": (2100, 256)}


def digest(a):
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()


def bits(a):
    return a.view({2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def shape_problem(context, n_q, seed=1):
    """Selections of at most 2,051 cells: 512 recent ones, the rest a set that drifts 3% per query."""
    r = np.random.default_rng(seed)
    page_size, width, recent = 4, 2051, 512
    pages = -(-context // page_size)
    k, v = (r.integers(-127, 128, (pages, 2, page_size, 256)).astype(np.int8) for _ in range(2))
    ks, vs = (r.uniform(0.005, 0.03, (pages, 2, page_size, 4)).astype(np.float16) for _ in range(2))
    q = r.normal(0, 2, (n_q, 24, 256)).astype(np.float32)
    ids, widths = np.zeros((n_q, min(context, width)), np.int32), np.zeros(n_q, np.int32)
    older = None
    for i in range(n_q):
        visible = context - n_q + i + 1
        if visible <= width:
            ids[i, :visible], widths[i] = np.arange(visible), visible
            continue
        pool = visible - recent
        if older is None:
            older = r.permutation(pool)[: width - recent]
        else:
            others = np.setdiff1d(np.arange(pool), older, assume_unique=True)
            drop = min(int(0.03 * len(older)), len(others))
            older = np.concatenate([r.permutation(older)[drop:], r.permutation(others)[:drop]])
        ids[i], widths[i] = np.sort(np.concatenate([older, np.arange(visible - recent, visible)])), width
    return dict(
        q=q, k=k, v=v, k_scale=ks, v_scale=vs, page_table=r.permutation(pages).astype(np.int32), ids=ids, widths=widths, kv_len=context
    )


def shuffled(p, seed=3):
    """The same problem with its pages elsewhere."""
    order = np.random.default_rng(seed).permutation(len(p["k"]))
    p = dict(p)
    for x in ("k", "v", "k_scale", "v_scale"):
        p[x] = p[x][np.argsort(order)]
    p["page_table"] = order[p["page_table"]].astype(np.int32)
    return p


class Checks:
    def __init__(self, kernels):
        self.k, self.record, self.failures = kernels, {}, []

    def note(self, ok, text):
        if not ok:
            self.failures.append(text)
            print("FAILED", text, flush=True)

    def has(self, kernel):
        return kernel in self.k.modules

    def in_parts(self, p, kernel, step):
        if not step:
            return Problem(self.k, p).run(kernel)[0]
        n = len(p["q"])
        return np.concatenate([Problem(self.k, p, q_rows=slice(i, min(i + step, n))).run(kernel)[0] for i in range(0, n, step)])

    def identity(self):
        golden = json.loads((ROOT / "tests/golden/v2_sm90.json").read_text())
        hits = {}
        for name in inputs.CASES:
            p = inputs.make(name)
            out, _ = Problem(self.k, p).run("v2")
            hits[name] = digest(out) == golden["cases"][name]["v2_sha256"]
            line = f"v2 {name:12s} {'as published' if hits[name] else 'DIFFERS'}"
            if self.has("v1"):
                out1, _ = Problem(self.k, p).run("v1")
                line += f"   max |v1 - v2| {np.abs(out1 - out).max():.2e}"
            print(line, flush=True)
            self.note(hits[name], f"v2 {name}: not the published bytes")
            sample = ROOT / f"tests/golden/{name}_v2_sm90.npy"
            if not hits[name] and sample.exists():
                want = np.load(sample).reshape(out.shape)
                wrong = np.argwhere(bits(out) != bits(want))
                print(
                    "  ",
                    len(wrong),
                    "of",
                    out.size,
                    "differ, first at",
                    wrong[:3].tolist(),
                    "largest",
                    np.nanmax(np.abs(out - want)),
                    flush=True,
                )
            self.k.driver.free_all()
        self.record["v2 as published"] = hits

    def portable(self):
        known = json.loads((ROOT / "tests/golden/portable.json").read_text())["cases"]
        hits = {}
        for name, want in known.items():
            p = inputs.load(name)
            for kernel in filter(self.has, PORTABLE):
                for step in (0, 1, 7, 64):
                    variants = {"": p} if step else {"": p, " shuffled": shuffled(p)}
                    for label, variant in variants.items():
                        ok = digest(self.in_parts(variant, kernel, step)) == want[kernel]
                        hits[f"{name} {kernel}"] = hits.get(f"{name} {kernel}", True) and ok
                        self.note(ok, f"{kernel} {name}{label}, calls of {step or 'all'} rows: not the referee's bytes")
                        self.k.driver.free_all()
            print("portable", name, {k: hits.get(f"{name} {k}") for k in PORTABLE}, flush=True)
        self.record["portable digests, whole, in calls of 1, 7 and 64 rows, with shuffled pages"] = hits

    def sweep(self, count=216):
        right = dict.fromkeys(filter(self.has, PORTABLE), 0)
        for seed, want in sweep.answers(range(count)):
            p, layout, options, kind = sweep.problem(seed)
            bf = p["q"].dtype.itemsize == 2 and p["q"].dtype != np.float16
            mine = {**p, "q": p["q"].view(np.uint16)} if bf else p
            problem = Problem(self.k, mine, layout=layout, bfloat16=bf, **options)
            for kernel in right:
                out, lse = problem.run(kernel)
                want_out, want_lse = want[kernel]
                want_bits, nan = bits(want_out), np.isnan(want_out.astype(np.float32))
                want_bits = np.where(nan, {0: 0x7FC00000, 1: 0x7E00, 2: 0x7FC0}[problem.params.dtype], want_bits)
                same_out = np.array_equal(bits(out), want_bits)
                same_lse = np.array_equal(lse, want_lse, equal_nan=True)
                right[kernel] += same_out and same_lse
                if not (same_out and same_lse):
                    rows = np.argwhere((bits(out) != want_bits).any(-1))
                    self.note(
                        False,
                        f"sweep {seed} {kernel} {kind} D {problem.dim} G {problem.params.group} reps {problem.params.heads_per_kv} "
                        f"out {same_out} lse {same_lse} rows {rows[:3].tolist()} of {out.shape[:2]} {problem.out_type}",
                    )
            self.k.driver.free_all()
        print("sweep", right, "of", count, flush=True)
        self.record["sweep"] = {"problems": count, "right": right}

    def split(self, count=64):
        """v1 and v2 over all that they serve, against float64; and their bytes in calls of a few rows, with shuffled pages, dense."""
        worst, seeds = {}, range(count)
        for seed, (want, want_lse) in sweep.answers(seeds, sweep.answer_birth):
            p, layout, options, _ = sweep.problem(seed, birth=True)
            bf = p["q"].dtype.itemsize == 2 and p["q"].dtype != np.float16
            problem = Problem(self.k, {**p, "q": p["q"].view(np.uint16)} if bf else p, layout=layout, bfloat16=bf, **options)
            for kernel in filter(self.has, ("v1", "v2")):
                out, lse = problem.run(kernel)
                out = out.view(p["q"].dtype).astype(np.float64)
                bound = {4: 3e-6, 2: 4e-3 if bf else 5e-4}[p["q"].dtype.itemsize]
                error = np.abs(out - want).max() / max(np.abs(want).max(), 1e-30)
                seen = np.isfinite(want_lse)
                lse_error = np.abs(lse[seen] - want_lse[seen]).max(initial=0.0)
                self.note(
                    error <= bound and lse_error < 1e-4 and (lse[~seen] == -np.inf).all(),
                    f"{kernel} split {seed}: error {error:.2e}, lse {lse_error:.2e}",
                )
                if p["q"].dtype.itemsize == 4:
                    worst[kernel] = max(worst.get(kernel, 0.0), float(error))
            self.k.driver.free_all()
        same = {}
        for name in ("tiny", "widths", "causal600", "page17"):
            p = inputs.make(name)
            for kernel in filter(self.has, ("v1", "v2")):
                whole = self.in_parts(p, kernel, 0)
                others = [self.in_parts(p, kernel, 1), self.in_parts(p, kernel, 7), self.in_parts(shuffled(p), kernel, 0)]
                if (p["widths"] == np.arange(p["kv_len"] - len(p["q"]), p["kv_len"]) + 1).all():
                    others.append(self.in_parts({**p, "ids": None, "widths": None}, kernel, 0))
                same[f"{kernel} {name}"] = all(np.array_equal(bits(whole), bits(x)) for x in others)
                self.note(same[f"{kernel} {name}"], f"{kernel} {name}: other bytes in parts, with shuffled pages or dense")
                self.k.driver.free_all()
        print("split", worst, "of", count, same, flush=True)
        self.record["v1 and v2 on random problems"] = {"problems": count, "max_rel_error": worst, "bytes in parts, shuffled, dense": same}

    def long_lists(self):
        """exact past the entries that its 32-bit planes hold, against the sums of the referee."""
        if not self.has("exact"):
            return
        r = np.random.default_rng(5)
        n, n_q, dim = 150_000, 2, 64
        k, v = (r.integers(-128, 128, (n, 1, 1, dim)).astype(np.int8) for _ in range(2))
        v[:] = 127
        ks, vs = (r.uniform(0.01, 0.03, (n, 1, 1, 1)).astype(np.float16) for _ in range(2))
        p = dict(
            q=(r.normal(0, 0.001, (n_q, 3, dim))).astype(np.float32),
            k=k,
            v=v,
            k_scale=ks,
            v_scale=vs,
            page_table=r.permutation(n).astype(np.int32),
            ids=None,
            widths=None,
            kv_len=n,
        )
        q, kv, options = inputs.arguments(p)
        want = reference.portable("exact", q, kv, **options)
        ok = np.array_equal(bits(Problem(self.k, p).run("exact")[0]), bits(want))
        self.note(ok, "exact: 150,000 entries")
        self.record["exact with 150,000 entries"] = bool(ok)

    def division(self):
        d = self.k.driver
        f = d.function(d.load(ROOT / "build/gpu_kernels/divide.sm_90.cubin"), "strata_divide")
        wrong = {}
        for a in (127.0, 1.0, 16384.0, 0.0, 2.0**-23, -0.292, 123.456):
            counts = d.put(np.zeros(2, np.uint64))
            d.launch(f, (228, 16), 256, 0, ctypes.c_float(a), ctypes.c_uint64(counts))
            d.sync()
            wrong[str(a)] = [int(x) for x in d.get(counts, 2, np.uint64)]
        print("division: not correctly rounded", wrong, flush=True)
        self.note(not any(map(any, wrong.values())), "division")
        self.record["divisions of a by 2^-100 .. 2^128 not correctly rounded"] = wrong

    def speed(self, repeats):
        table = {}
        for name, (context, n_q) in SHAPES.items():
            p = shape_problem(context, n_q)
            problem = Problem(self.k, p)
            rows = sorted({*np.linspace(0, n_q - 1, 16).astype(int).tolist()})
            q, kv, options = inputs.arguments(p)
            want = reference.attention_float64(q, kv, rows=rows, **options)
            for kernel in filter(self.has, ("fp32", "v1", "v2", "imma", "exact")):
                out, _ = problem.run(kernel)
                error = float(np.abs(out[rows] - want).max() / np.abs(want).max())
                ms = self.k.driver.times(problem.launcher(kernel), repeats)
                table.setdefault(kernel, {})[name] = {
                    "ms": round(statistics.median(ms), 4),
                    "least": round(min(ms), 4),
                    "most": round(max(ms), 4),
                    "max_rel_error": float(f"{error:.3e}"),
                }
                self.note(kernel == "v1" or error <= (1.0e-6 if kernel in PORTABLE else 1.3e-6), f"{kernel} {name}: error {error:.2e}")
            self.k.driver.free_all()
        for kernel, row in table.items():
            print(f"{kernel:6s}", "  ".join(f"{name} {x['ms']:.3f} ms {x['max_rel_error']:.1e}" for name, x in row.items()), flush=True)
        self.record["speed"] = table

    def profile(self):
        for name in ("32768/2048", "2100/256"):
            problem = Problem(self.k, shape_problem(*SHAPES[name]))
            for kernel in filter(self.has, ("fp32", "v2", "imma", "exact")):
                problem.run(kernel)

    def tiny(self):
        for name in ("tiny", "widths"):
            p = inputs.make(name)
            p = {**p, "q": p["q"][-4:], "ids": p["ids"][-4:], "widths": np.minimum(p["widths"][-4:], 131)}
            masked = {**p, "page_table": np.where(np.arange(len(p["page_table"])) % 5 == 0, -1, p["page_table"]).astype(np.int32)}
            for kernel in filter(self.has, ("v1", "v2", *PORTABLE)):
                Problem(self.k, p).run(kernel)
                Problem(self.k, masked).run(kernel)
        print("tiny: ran", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--only", default="identity,division,portable,sweep,split,long_lists,speed")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--variant", default=".", help="a folder of other images in build/gpu_kernels")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    kernels = Kernels(ROOT / "build/gpu_kernels" / asked.variant, asked.arch)
    checks = Checks(kernels)
    if asked.tiny:
        checks.tiny()
        return
    for part in asked.only.split(","):
        began = time.time()
        checks.speed(asked.repeats) if part == "speed" else getattr(checks, part)()
        print(f"-- {part}: {time.time() - began:.1f} s", flush=True)
    record = {
        "what": "The CUDA kernels alone, launched through the driver: bytes, errors against float64, medians of CUDA events",
        "card": kernels.driver.name,
        "cuda_driver": kernels.driver.version,
        "date": datetime.date.today().isoformat(),
        "repeats": asked.repeats,
        "failures": checks.failures,
        **checks.record,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    print("FAILURES", len(checks.failures), flush=True)
    sys.exit(bool(checks.failures))


if __name__ == "__main__":
    main()
