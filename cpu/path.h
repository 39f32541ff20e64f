// Instantiates the kernels for one vocabulary. Included by each isa_*.cpp after the standard headers, inside the anonymous namespace.

template <class S>
static int64_t path_scratch(Kernel kernel, const Job& job, int rows, int64_t entries) {
  switch (kernel) {
    case Kernel::kFp32: return Fp32<S>::scratch(job, rows, entries);
    case Kernel::kImma: return Imma<S>::scratch(job, rows, entries);
    case Kernel::kExact: return Exact<S>::scratch(job, rows, entries);
  }
  return 0;
}
template <class S>
static void path_run(Kernel kernel, const Job& job, const Tile& tile, char* scratch) {
  switch (kernel) {
    case Kernel::kFp32: return Fp32<S>::run(job, tile, scratch);
    case Kernel::kImma: return Imma<S>::run(job, tile, scratch);
    case Kernel::kExact: return Exact<S>::run(job, tile, scratch);
  }
}

// `rounds` times kDots byte dot products of vectors that stay in registers: what the machine does at most. Returns the multiplications and
// additions. `bytes` [8 L]: operands that the compiler does not know, and where the sums go.
template <class S>
static int64_t path_peak(int64_t rounds, char* bytes) {
  constexpr int kSums = S::L == 16 ? 16 : 12, kDots = 8 * kSums;  // sums that do not wait for each other: they hide the latency and fit the registers
  typename S::I x[kSums], u = S::loadi(bytes), s = S::loadi(bytes + 4 * S::L);
  for (int j = 0; j < kSums; ++j) x[j] = S::iset(j);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 128
    for (int j = 0; j < kDots; ++j) x[j % kSums] = S::dot(x[j % kSums], u, s);
  }
  for (const typename S::I& sum : x) S::storei(bytes, S::iadd(S::loadi(bytes), sum));
  return rounds * kDots * S::L * 4 * 2;
}
