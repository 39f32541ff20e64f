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
