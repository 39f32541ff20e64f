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
