"""Launches the tiled form of exact for cards from sm_80 (cuda/exact_tile_sm80.h), as its plan lists the launches."""

import ctypes

import numpy as np

SYMBOLS = ("strata_rows_lists", "strata_rows_cells", "strata_exact_rows_d{}_g{}", "strata_exact_d{}_g{}")
STEPS = ("first", "first", "tile", "rest")
WORDS, RECORDS = 256 << 20, 512 << 20


class RowsKernels:
    """`processors`, `words`, `records`: of the plan; other than the card's own they make it split or go by rounds."""

    def __init__(self, kernels, image, folder):
        self.k, self.lib, d = kernels, ctypes.CDLL(str(folder / "exact_tile.so")), kernels.driver
        self.lib.rows_plan.restype = ctypes.c_longlong
        self.lib.rows_flags.restype = ctypes.c_uint64
        self.module, self.functions = d.load(image), {}
        self.processors = d.device_attribute(16)
        self.max_shared = d.device_attribute(97)
        self.own = {}

    def function(self, symbol, shared):
        if symbol not in self.functions:
            self.functions[symbol] = [self.k.driver.function(self.module, symbol), 0]
        entry = self.functions[symbol]
        if shared > entry[1]:
            self.k.driver.allow_shared(entry[0], shared)
            entry[1] = shared
        return entry[0]

    def serves(self, problem):
        return bool(self.lib.rows_serves(ctypes.byref(problem.params), ctypes.c_longlong(0)))

    def plan(self, problem, params, at, processors=None, words=WORDS, records=RECORDS, max_shared=None, most=4096):
        """(bytes, launches): each (step, grid, block, shared bytes, Rows)."""
        plain, other = ctypes.c_uint(), ctypes.byref(ctypes.c_uint())
        self.k.lib.config_for(4, ctypes.byref(params), problem.dim, other, other, ctypes.byref(plain))
        size, count = self.lib.rows_launch_bytes(), ctypes.c_int()
        store = ctypes.create_string_buffer(size * most)
        used = self.lib.rows_plan(
            ctypes.byref(params), problem.dim, processors or self.processors, max_shared or self.max_shared, plain,
            ctypes.c_void_p(at), ctypes.c_longlong(words), ctypes.c_longlong(records), store, most, ctypes.byref(count),
        )  # fmt: skip
        assert count.value <= most
        launches = []
        for i in range(count.value):
            one = store[i * size : (i + 1) * size]
            head = np.frombuffer(one, np.uint32, 4)
            launches.append((*map(int, head), ctypes.create_string_buffer(one[16 : 16 + self.lib.rows_bytes()], self.lib.rows_bytes()), one))
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
        for step, grid, block, shared, rows, _ in launches:
            if STEPS[step] in parts:
                symbol = SYMBOLS[step].format(problem.dim, own.group)
                f = ks.function("exact", symbol, shared) if step == 3 else self.function(symbol, shared)
                calls.append((f, grid, block, shared, own, rows))

        def work():
            for f, grid, block, shared, params, rows in calls:
                d.launch(f, grid, block, shared, params, rows)

        last = ctypes.create_string_buffer(launches[-1][-1])
        numbers = (ctypes.c_int * 4)()
        self.lib.rows_shape(ctypes.create_string_buffer(launches[-2][-1]), numbers)
        work.workspace, work.launches = size, len(launches)
        work.shape = dict(zip(("tiles", "splits", "phases", "item_tiles"), numbers, strict=True))
        items = numbers[0] * own.n_kv
        return work, lambda: (d.get(self.lib.rows_flags(last), items, np.int32), None)

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
            flags()[0],
        )
