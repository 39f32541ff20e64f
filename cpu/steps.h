// Steps that several kernels share.

// tree() of docs/numerics.md, section 1.6, over N vectors.
template <class S, int N>
static STRATA_PA_FN float tree(const typename S::F* x) {
  typename S::F y[N];
  for (int i = 0; i < N; ++i) y[i] = x[i];
  for (int n = N / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) y[i] = S::add(y[i], y[i + n]);
  return S::tree_tail(y[0]);
}

// The state of an online softmax before the first entry.
template <class Buffers>
static void start_online(const Job& job, int rows, Buffers& b) {
  for (int r = 0; r < rows; ++r) {
    b.m[r] = -__builtin_inff();
    b.l[r] = 0.0f;
    b.seen[r] = 0;
  }
  memset(b.acc, 0, sizeof(float) * rows * job.dim);
}
