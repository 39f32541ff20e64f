"""Launches the tiled forms of exact (cuda/exact_tile_sm80.h, cuda/tile_launch.h), as their plans list the launches."""

import ctypes

import numpy as np


class RowsKernels:
    """`processors`, `words`, `records`: of the plan; other than the card's own they make it split or go by rounds."""

    name, plain_symbols, words, records = "rows", ("strata_exact_d{}_g{}",), 1 << 30, 512 << 20
    symbols = ("strata_rows_lists", "strata_rows_cells", "strata_exact_rows_d{}_g{}", *plain_symbols)
    parts = ("first", "first", "tile", "rest")
    shape_names = ("tiles", "splits", "phases", "item_tiles")

    def __init__(self, kernels, image, folder):
        self.k, lib, d = kernels, ctypes.CDLL(str(folder / "exact_tile.so")), kernels.driver
        self.c = {x: getattr(lib, f"{self.name}_{x}") for x in ("plan", "flags", "launch_bytes", "bytes", "shape", "serves")}
        self.c["plan"].restype, self.c["flags"].restype = ctypes.c_longlong, ctypes.c_uint64
        self.lib, self.module, self.functions = lib, d.load(image), {}
        self.processors = d.device_attribute(16)
        self.max_shared = d.device_attribute(97)

    def function(self, symbol, shared):
        if symbol not in self.functions:
            self.functions[symbol] = [self.k.driver.function(self.module, symbol), 0]
        entry = self.functions[symbol]
        if shared > entry[1]:
            self.k.driver.allow_shared(entry[0], shared)
            entry[1] = shared
        return entry[0]

    def serves(self, problem):
        return bool(self.c["serves"](ctypes.byref(problem.params), problem.dim, self.processors, ctypes.c_longlong(0)))

    def symbol(self, step, launch, problem, group):
        return self.symbols[step].format(problem.dim, group)

    def plan(self, problem, params, at, processors=None, words=None, records=None, max_shared=None, most=4096):
        """(bytes, launches): each (step, grid, block, shared bytes, Rows)."""
        plain, other = ctypes.c_uint(), ctypes.byref(ctypes.c_uint())
        self.k.lib.config_for(4, ctypes.byref(params), problem.dim, other, other, ctypes.byref(plain))
        size, count = self.c["launch_bytes"](), ctypes.c_int()
        store = ctypes.create_string_buffer(size * most)
        used = self.c["plan"](
            ctypes.byref(params), problem.dim, processors or self.processors, max_shared or self.max_shared, plain,
            ctypes.c_void_p(at), ctypes.c_longlong(words or self.words), ctypes.c_longlong(records or self.records), store, most,
            ctypes.byref(count),
        )  # fmt: skip
        assert count.value <= most
        launches = []
        for i in range(count.value):
            one = store[i * size : (i + 1) * size]
            head = np.frombuffer(one, np.uint32, 4)
            launches.append((*map(int, head), ctypes.create_string_buffer(one[16 : 16 + self.c["bytes"]()], self.c["bytes"]()), one))
        return used, launches

    def launcher(self, problem, parts=("first", "tile", "rest"), **limits):
        """A function that launches the kernels once, and a function that gives the flags and the shape of the plan."""
        d, ks = self.k.driver, self.k
        own = type(problem.params).from_buffer_copy(problem.params)
        own.score_scale = ks.lib.scale_for(4, problem.sm_scale)
        size, _ = self.plan(problem, own, None, **limits)
        at = d.alloc(size)
        d.fill(at, 0xCD, size)
        _, launches = self.plan(problem, own, at, **limits)
        calls = []
        for step, grid, block, shared, rows, launch in launches:
            if self.parts[step] in parts:
                symbol = self.symbol(step, launch, problem, own.group)
                f = ks.function("exact", symbol, shared) if self.symbols[step] in self.plain_symbols else self.function(symbol, shared)
                calls.append((f, grid, block, shared, own, rows))

        def work():
            for f, grid, block, shared, params, rows in calls:
                d.launch(f, grid, block, shared, params, rows)

        last = ctypes.create_string_buffer(launches[-1][-1])
        numbers = (ctypes.c_int * 4)()
        self.c["shape"](ctypes.create_string_buffer(launches[-2][-1]), numbers)
        work.workspace, work.launches = size, len(launches)
        work.shape = dict(zip(self.shape_names, numbers, strict=True))
        items = numbers[0] * own.n_kv
        return work, lambda: d.get(self.c["flags"](last), items, np.int32)

    def run(self, problem, **limits):
        d = self.k.driver
        d.fill(problem.params.out, 0xAB, problem.bytes)
        d.fill(problem.params.lse, 0xAB, problem.n_q * problem.n_head * 4)
        work, flags = self.launcher(problem, **limits)
        self.shape = work.shape
        work()
        d.sync()
        return (
            d.get(problem.params.out, (problem.n_q, problem.n_head, problem.dim), problem.out_type),
            d.get(problem.params.lse, (problem.n_q, problem.n_head), np.float32),
            flags(),
        )


class TileKernels(RowsKernels):
    """sm_90's own form."""

    name, plain_symbols, words = "tile", (), 2 << 30
    symbols = (
        "", "strata_tile_cells", "strata_exact_tile_d{}_g{}", "strata_exact_tile_scores_d{}_g{}", "strata_exact_tile_sums_d{}_g{}",
        "strata_exact_rest_d{}_g{}",
    )  # fmt: skip
    parts = ("first", "first", "tile", "tile", "tile", "rest")
    shape_names = ("tiles", "splits", "writers", "block_tiles")

    def symbol(self, step, launch, problem, group):
        if step > 0:
            return super().symbol(step, launch, problem, group)
        self.lib.tile_union.restype = ctypes.c_char_p
        return self.lib.tile_union(ctypes.create_string_buffer(launch)).decode()


# Plans that split cells over blocks, or go by rounds, where the card's own would not.
PLANS = {
    "the card's": {},
    "one processor": {"processors": 1},
    "100 processors": {"processors": 100},
    "rounds": {"processors": 40, "words": 600_000, "records": 150_000},
}


def unique_lists(seed):
    """A problem of sweep.py, its lists without repeated cells but for every seventh seed."""
    import sweep

    p, layout, options, kind = sweep.problem(seed)
    r = np.random.default_rng(seed)
    if p["ids"] is not None:
        choices = -(-int(p["kv_len"].max()) // options["granularity"])
        cap = min(p["ids"].shape[-1], choices) if seed % 3 else min(choices, 90)
        ids = np.empty((*p["ids"].shape[:-1], cap), np.int32)
        for at in np.ndindex(ids.shape[:-1]):
            ids[at] = r.permutation(choices)[:cap]
        if seed % 2:
            ids[r.random(ids.shape) < 0.1] = -1
        if seed % 7 == 0:
            ids[r.random(ids.shape) < 0.02] = ids.flat[0]
        p["ids"] = ids
        if p["widths"] is not None:
            p["widths"] = np.minimum(p["widths"], cap)
    bfloat16 = seed % 4 == 3
    if bfloat16:
        p["q"] = p["q"].view(np.uint16)
    return p, dict(layout=layout, bfloat16=bfloat16, **options), kind


def dense(n_q, context, heads, n_kv, dim, group, page_size=16, seed=1):
    """The last n_q queries of a context, causal."""
    r = np.random.default_rng(seed)
    pages = -(-context // page_size)
    shape = (pages, n_kv, page_size)
    k, v = (r.integers(-127, 128, (*shape, dim), dtype=np.int8) for _ in range(2))
    ks, vs = (r.uniform(0.005, 0.03, (*shape, dim // group)).astype(np.float16) for _ in range(2))
    q = r.normal(0, 2, (n_q, heads, dim)).astype(np.float32)
    table = r.permutation(pages).astype(np.int32)
    return dict(q=q, k=k, v=v, k_scale=ks, v_scale=vs, page_table=table, ids=None, widths=None, kv_len=context)


def peers(n_q, context, heads, n_kv, dim, repeats=5):
    """PyTorch's attention on ready, contiguous K and V: median ms. Past cells and the causal square are two calls, which are not merged."""
    import statistics

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    times = {}
    for label, dtype, backend in (
        ("FP16 cuDNN", torch.float16, SDPBackend.CUDNN_ATTENTION),
        ("FP16 flash", torch.float16, SDPBackend.FLASH_ATTENTION),
        ("FP32 memory-efficient", torch.float32, SDPBackend.EFFICIENT_ATTENTION),
    ):
        q = torch.randn(1, heads, n_q, dim, device="cuda", dtype=dtype)
        k, v = (torch.randn(1, n_kv, context, dim, device="cuda", dtype=dtype).repeat_interleave(heads // n_kv, 1) for _ in range(2))
        past = context - n_q

        def call(q=q, k=k, v=v, past=past):
            if past:
                attend(q, k[:, :, :past], v[:, :, :past])
            attend(q, k[:, :, past:], v[:, :, past:], is_causal=True)

        try:
            with sdpa_kernel(backend):
                ms = []
                for i in range(repeats + 2):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    call()
                    end.record()
                    torch.cuda.synchronize()
                    if i > 1:
                        ms.append(begin.elapsed_time(end))
            times[label] = round(statistics.median(ms), 4)
        except RuntimeError as error:
            times[label] = str(error).splitlines()[0]
    return times
