"""Checks and times a tiled form of exact on the GPU that is here: the golden digests, and random problems against the plain form.

python exact_tile.py [--form sm90a] [--only golden,sweep,speed,parts] [--json record.json]
python exact_tile.py --form sm80 [--only golden,sweep,speed,growth,long] [--json record.json]
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "golden")]
import check  # noqa: E402
import inputs  # noqa: E402
import rows  # noqa: E402
from kernels import Kernels, Problem  # noqa: E402

from strata_pa import reference  # noqa: E402

OUT = ROOT / "build" / "gpu_kernels"
FLAGS = ("-std=c++17", "-O3", "--resource-usage", "-Werror", "all-warnings")
FORMS = {"sm90a": ("exact_tile_sm90a", "arch=compute_90a,code=sm_90a"), "sm80": ("exact_tile_sm80", "arch=compute_90,code=sm_90")}


def build(name, architecture):
    OUT.mkdir(parents=True, exist_ok=True)
    source = ROOT / "ci/gpu_kernels/exact_tile.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", OUT / "exact_tile.so", source], check=True)
    subprocess.run(
        ["nvcc", *FLAGS, "-gencode", architecture, "-cubin", "-o", OUT / f"{name}.sm_90.cubin", ROOT / f"cuda/{name}.cu"], check=True
    )


def random_problem(seed):
    """One of the problems that the tiled form serves, most of them with lists that it takes itself."""
    r = np.random.default_rng(7000 + seed)
    dim, heads = ((256, 12), (256, 12), (128, 8), (64, 7), (256, 7), (128, 12), (64, 16))[seed % 7]
    dense = r.random() < 0.3
    if dense:
        heads = int(r.choice([1, 2, 3, 4, 5, 8, 12, 16]))
    page_size = int(r.choice([1, 3, 4, 16, 17, 64]))
    n_kv = int(r.choice([1, 2, 3]))
    kv_len = int(r.choice([1, 31, 64, 65, 130, 257, 400, 1000, 2500]))
    n_q = int(min(r.integers(1, 23), kv_len))
    max_pages = -(-kv_len // page_size) + int(r.integers(0, 3))
    pages = max_pages + 2
    layout = "NHD" if r.random() < 0.3 else "HND"
    shape = (pages, n_kv, page_size) if layout == "HND" else (pages, page_size, n_kv)
    k, v = (r.integers(-128, 128, (*shape, dim)).astype(np.int8) for _ in range(2))
    k_scale, v_scale = (r.uniform(0.002, 0.03, (*shape, dim // 64)).astype(np.float16) for _ in range(2))
    q = r.normal(0, 2, (n_q, heads * n_kv, dim)).astype(np.float32)
    kind = str(r.choice(["plain", "plain", "plain", "signs", "zeros", "wide", "large", "tiny", "mixed", "nan_q", "inf_scale", "overflow"]))
    if kind == "signs":
        k_scale *= r.choice([-1, 1], k_scale.shape).astype(np.float16)
        v_scale *= r.choice([-1, 1], v_scale.shape).astype(np.float16)
    elif kind == "zeros":
        k_scale[r.random(k_scale.shape) < 0.3] = 0
        v_scale[r.random(v_scale.shape) < 0.5] = 0
        v_scale[r.random(shape) < 0.3] = 0
        q[r.random(q.shape[:2]) < 0.3] = 0
    elif kind == "wide":  # scores near the ends of what a word holds
        q *= np.float32(r.choice([4, 8, 12, 20]))
    elif kind == "large":
        q *= np.float32(10.0) ** r.integers(0, 12)
    elif kind == "tiny":
        q *= np.float32(2.0) ** np.float32(r.choice([-90, -101, -105, -130, -140]))
        v_scale[:] = (v_scale.astype(np.float32) * 2.0**-16).astype(np.float16)
    elif kind == "mixed":
        v_scale[:] = (v_scale.astype(np.float32) * 2.0 ** r.integers(-18, 20, v_scale.shape)).astype(np.float16)
        q *= (2.0 ** r.integers(-20, 4, (n_q, heads * n_kv, dim // 64))).astype(np.float32).repeat(64, -1)
    elif kind == "nan_q":
        q[r.random(q.shape) < 0.002] = r.choice([np.nan, np.inf, -np.inf])
    elif kind == "inf_scale":
        for s in (k_scale, v_scale):
            s[r.random(s.shape) < 0.0005] = r.choice([np.nan, np.inf, -np.inf])
    elif kind == "overflow":
        q[r.random(q.shape[:2]) < 0.3] *= np.float32(1e37)
        k_scale *= np.float16(1000)
    table = r.permutation(pages)[:max_pages].astype(np.int32)
    if r.random() < 0.3:
        table[r.random(table.shape) < 0.15] = -1
    if r.random() < 0.1:
        table[r.random(table.shape) < 0.1] = pages + 5
    ids = widths = None
    granularity = 1
    if not dense:
        granularity = int(r.choice([1, 1, 1, 4, 16, 64, 128]))
        choices = -(-kv_len // granularity)
        cap = int(r.integers(1, choices + 4))
        size = (n_q, cap) if r.random() < 0.5 else (n_q, n_kv, cap)
        ids = np.full(size, -1, np.int32)
        base = r.permutation(choices)
        style = r.choice(["shared", "own", "twice"])
        for at in np.ndindex(size[:-1]):
            own = r.permutation(choices) if style == "own" else base
            row = own[: min(cap, choices)]
            if r.random() < 0.5:
                row = np.sort(row)
            ids[(*at, slice(0, len(row)))] = row
            if style == "twice" and r.random() < 0.3:
                ids[(*at, int(r.integers(0, cap)))] = row[0]
        if r.random() < 0.4:
            ids[r.random(ids.shape) < 0.2] = -1
        if r.random() < 0.2:
            ids[r.random(ids.shape) < 0.05] = r.choice([-(2**31), -7, 2**31 - 1, 2**30, 2**24, kv_len + 3])
        if r.random() < 0.6:
            widths = r.integers(0, cap + 1, n_q).astype(np.int32)
    options = dict(
        granularity=granularity,
        causal=bool(r.random() < 0.8),
        window_left=int(r.choice([-1, -1, 0, 5, 40, 100])),
        sm_scale=None if r.random() < 0.7 else float(r.uniform(0.01, 0.2)),
    )
    bfloat16 = seed % 4 == 3
    if seed % 4 == 2:
        with np.errstate(over="ignore"):
            q = q.astype(np.float16)
    elif bfloat16:
        q = (q.view(np.uint32) >> 16).astype(np.uint16)
    p = dict(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, page_table=table, ids=ids, widths=widths, kv_len=np.array([kv_len], np.int32))
    return p, dict(layout=layout, bfloat16=bfloat16, **options), kind


def apart(context=32768, n_q=2048, width=2051, seed=1):
    """Neighbours share no cell."""
    p = check.shape_problem(context, 4, seed)
    r = np.random.default_rng(seed)
    q = r.normal(0, 2, (n_q, 24, 256)).astype(np.float32)
    ids = np.empty((n_q, width), np.int32)
    for i in range(0, n_q, 4):
        ids[i : i + 4] = np.sort(r.permutation(context - n_q)[: 4 * width].reshape(4, width), -1)
    return {**p, "q": q, "ids": ids, "widths": np.full(n_q, width, np.int32)}


class TileChecks:
    def __init__(self, image):
        self.k = Kernels(OUT)
        self.t = rows.TileKernels(self.k, image, OUT)
        self.record, self.failures = {}, []

    def note(self, ok, text):
        if not ok:
            self.failures.append(text)
            print("FAILED", text, flush=True)

    def golden(self, steps=(0, 1, 7, 64)):
        known = json.loads((ROOT / "tests/golden/portable.json").read_text())["cases"]
        hits = {}
        for name, want in known.items():
            p = inputs.load(name)
            n = len(p["q"])
            if not self.t.serves(Problem(self.k, p)):
                continue
            for step in steps if n <= 64 else [x for x in steps if x != 1]:
                for variant in (p,) if step else (p, check.shuffled(p)):
                    for label, limits in rows.PLANS.items() if step == 0 else [("the card's", {})]:
                        least = -(-int(p["kv_len"]) // 64) * 12288  # an item's words
                        limits = limits | {"words": max(limits["words"], 4 * least)} if "words" in limits else limits
                        outs = []
                        for i in range(0, n, step or n):
                            q_rows = slice(i, min(i + step, n)) if step else None
                            outs.append(self.t.run(Problem(self.k, variant, q_rows=q_rows), **limits)[0])
                            self.k.driver.free_all()
                        ok = check.digest(np.concatenate(outs)) == want["exact"]
                        hits[name] = hits.get(name, True) and ok
                        self.note(ok, f"{name}, calls of {step or 'all'} rows, plan of {label}: not the golden bytes")
        print("golden", hits, flush=True)
        self.record["golden digests, whole, in calls of 1, 7 and 64 rows, with shuffled pages, by every plan"] = hits

    def quick(self):
        self.golden((0,))
        self.sweep(120)

    def sweep(self, count=300):
        self.sweep_over((seed, *random_problem(seed)) for seed in range(count))

    def sweep_over(self, problems):
        right, runs, items, left = 0, 0, 0, 0
        for seed, p, options, kind in problems:
            problem = Problem(self.k, p, **options)
            want, want_lse = problem.run("exact")
            for label, limits in rows.PLANS.items():
                out, lse, flags = self.t.run(problem, **limits)
                same = np.array_equal(check.bits(out), check.bits(want)) and np.array_equal(check.bits(lse), check.bits(want_lse))
                runs, right, items, left = runs + 1, right + same, items + len(flags), left + int(flags.sum())
                self.note(same, f"sweep {seed} {kind} {label} {options} {self.t.shape}")
            self.k.driver.free_all()
        found = {"problems and plans": runs, "right": right, "items": items, "items left to the plain form": left}
        print("sweep", found, flush=True)
        self.record["sweep against the plain form"] = found

    def profile(self):
        self.t.run(Problem(self.k, check.shape_problem(*check.SHAPES["32768/2048"])))

    def speed(self, repeats=30):
        shapes = {name: check.shape_problem(*shape) for name, shape in check.SHAPES.items()}
        dense = dict(shapes["1500/1500"], ids=None, widths=None)
        shapes["1500/1500 without ids"] = dense
        shapes["32768/2048 no overlap"] = apart()
        table = {}
        for name, p in shapes.items():
            problem = Problem(self.k, p)
            out, _, flags = self.t.run(problem)
            row = {"items": len(flags), "items left to the plain form": int(flags.sum())}
            n_q = len(p["q"])
            rows = sorted({*np.linspace(0, n_q - 1, 8).astype(int).tolist()})
            q, kv, options = inputs.arguments(p)
            if "overlap" not in name:
                want = reference.attention_float64(q, kv, rows=rows, **options)
                row["max_rel_error"] = float(f"{np.abs(out[rows] - want).max() / np.abs(want).max():.3e}")
                self.note(row["max_rel_error"] <= 1e-6, f"{name}: error {row['max_rel_error']}")
            plain, _ = problem.run("exact")
            self.note(np.array_equal(check.bits(out), check.bits(plain)), f"{name}: not the bytes of the plain form")
            for label, parts in (
                ("ms", ("first", "tile", "rest")),
                ("first alone", ("first",)),
                ("tile alone", ("tile",)),
                ("rest alone", ("rest",)),
            ):
                work, _ = self.t.launcher(problem, ("first", "tile", "rest"))
                work()
                only, _ = self.t.launcher(problem, parts)
                if label == "tile alone":  # the first kernel resets the counter: with it, less it
                    only, _ = self.t.launcher(problem, ("first", "tile"))
                    ms = [x - row["first alone"] for x in self.k.driver.times(only, repeats)]
                else:
                    ms = self.k.driver.times(only, repeats)
                row[label] = round(statistics.median(ms), 4)
                if label == "ms":
                    row["least"], row["most"], row["workspace_bytes"] = round(min(ms), 4), round(max(ms), 4), work.workspace
            row["plain ms"] = round(statistics.median(self.k.driver.times(problem.launcher("exact"), 8)), 4)
            print(name, row, flush=True)
            table[name] = row
            self.k.driver.free_all()
        self.record["speed"] = table


class RowsChecks(TileChecks):
    """The form for cards from sm_80: every geometry, and plans that split cells or go by rounds."""

    def __init__(self, image):
        self.k = Kernels(OUT)
        self.t = rows.RowsKernels(self.k, image, OUT)
        self.record, self.failures = {}, []

    def sweep(self, count=360):
        problems = ((seed, *rows.unique_lists(seed)) for seed in range(count))
        self.sweep_over(x for x in problems if len(x[1]["q"]))

    def time(self, p, repeats=15, plain=True):
        problem = Problem(self.k, p)
        row = {}
        out, _, flags = self.t.run(problem)
        if plain:
            want, _ = problem.run("exact")
            self.note(np.array_equal(check.bits(out), check.bits(want)), f"{len(p['q'])} queries: not the bytes of the plain form")
            row["plain ms"] = round(statistics.median(self.k.driver.times(problem.launcher("exact"), 3, 1)), 4)
        work, _ = self.t.launcher(problem)
        ms = self.k.driver.times(work, repeats, 2)
        row |= {"ms": round(statistics.median(ms), 4), "least": round(min(ms), 4), "most": round(max(ms), 4)}
        row |= {
            "items left": int(flags.sum()),
            "workspace_bytes": work.workspace,
            "launches": work.launches,
            "splits": work.shape["splits"],
        }
        self.k.driver.free_all()
        return row

    def speed(self):
        table = {}
        for name, shape in check.SHAPES.items():
            p = check.shape_problem(*shape)
            table[name] = self.time(p)
            if name == "1500/1500":
                table[f"{name} without ids"] = self.time(dict(p, ids=None, widths=None))
        table["32768/2048 no overlap"] = self.time(apart())
        self.record["speed"] = table
        print(json.dumps(table, indent=1), flush=True)

    def growth(self):
        """Time per query: selections of 2,051 cells by n_q, dense causal ones by context."""
        p = check.shape_problem(32768, 2048)
        queries, contexts = {}, {}
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048):
            part = {**p, **{x: p[x][-n:] for x in ("q", "ids", "widths")}}
            queries[n] = self.time(part, plain=n <= 32)
            queries[n]["us a query"] = round(queries[n]["ms"] * 1000 / n, 3)
        for context in (512, 2048, 8192, 32768, 131072, 262144):
            contexts[context] = self.time(rows.dense(64, context, 24, 2, 256, 64), plain=False)
            contexts[context]["ns a query and 1000 cells"] = round(contexts[context]["ms"] * 1e9 / 64 / context, 1)
        self.record["growth"] = {"queries of 32768 / 2048": queries, "64 queries, dense, by context": contexts}
        print(json.dumps(self.record["growth"]), flush=True)

    def long(self):
        """Dense causal prompts, with PyTorch's attention on ready K and V beside them."""
        table = {}
        for shape in ((8192, 32768, 24, 2, 256, 64), (8192, 8192, 9, 3, 64, 64), (8192, 8192, 32, 8, 128, 64)):
            name = "{1}/{0}, {2} heads, {3} KV heads, head_dim {4}, group {5}".format(*shape)
            table[name] = self.time(rows.dense(*shape), repeats=5, plain=False) | rows.peers(*shape[:5])
            print(name, table[name], flush=True)
        self.record["long"] = table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=FORMS, default="sm90a")
    parser.add_argument("--only", default="golden,sweep,speed")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--image", type=pathlib.Path, help="default: what --build makes")
    parser.add_argument("--build", action="store_true", help="compile and stop")
    asked = parser.parse_args()
    if asked.build:
        return build(*FORMS[asked.form])
    image = asked.image or OUT / f"{FORMS[asked.form][0]}.sm_90.cubin"
    checks = (RowsChecks if asked.form == "sm80" else TileChecks)(image)
    for part in asked.only.split(","):
        began = time.time()
        getattr(checks, part)()
        print(f"-- {part}: {time.time() - began:.1f} s", flush=True)
    record = {
        "what": f"The {asked.form} tiles of exact alone, launched by the driver: bytes, errors against float64, medians of CUDA events",
        "card": checks.k.driver.name,
        "cuda_driver": checks.k.driver.version,
        "date": datetime.date.today().isoformat(),
        "failures": checks.failures,
        **checks.record,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    print("FAILURES", len(checks.failures), flush=True)
    sys.exit(bool(checks.failures))


if __name__ == "__main__":
    main()
