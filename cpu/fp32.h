// `fp32` (docs/numerics.md, section 2): chunks of 64 entries, FP32 products in register tiles, an integer anchor.

template <class S>
struct Fp32 {
  using F = typename S::F;
  using I = typename S::I;
  using A = Arith<S>;
  using A1 = Arith<Scalar1>;
  static constexpr int L = S::L;
  static constexpr int kChunk = 64, kDims = 16;         // entries of a chunk; dims of a block sum
  static constexpr int kTile = S::kVecsF * L;           // entries, or dims, of a register tile
  static constexpr int kTiles = kChunk / kTile;
  static constexpr int kSlots = 5;  // sums that wait at once in a tree over kMaxDim / kDims blocks

  struct Buffers {
    float *q, *k, *v, *s, *acc, *m, *l, *alpha;
    uint8_t *bad, *seen;
    Block* block;
  };
  static Buffers buffers(Arena& a, const Job& job, int rows) {
    Buffers b;
    b.q = carve<float>(a, int64_t{rows} * job.dim);
    b.k = carve<float>(a, int64_t{kChunk} * job.dim);  // [tile][dim][kTile entries]
    b.v = carve<float>(a, int64_t{kChunk} * job.dim);  // [dim / kTile][entry][kTile dims]
    b.s = carve<float>(a, int64_t{rows} * kChunk * kSlots);  // slot 0: scores, then e
    b.acc = carve<float>(a, int64_t{rows} * job.dim);
    b.m = carve<float>(a, rows);
    b.l = carve<float>(a, rows);
    b.alpha = carve<float>(a, rows);
    b.bad = carve<uint8_t>(a, rows);
    b.seen = carve<uint8_t>(a, rows);
    b.block = carve<Block>(a, 1);
    return b;
  }

  // Dequantizes the chunk's K, transposed, and V.
  static void pack_k(const Job& job, const Block& b, int first, float* k) {
    for (int c = 0; c < kChunk; c += L) {
      float* to = k + c / kTile * kTile * job.dim + c % kTile;
      for (int d = 0; d < job.dim; d += 4 * L) {
        I word[L];
        S::transpose(b.k + first + c, d, word);
        for (int j = 0; j < L; ++j) {
          const F scale = S::load_half(&b.k_scale[(d + 4 * j) / job.group][first + c]);
          float* at = to + (d + 4 * j) * kTile;
          S::store(at, S::mul(S::to_float(S::template sar<24>(S::template shl<24>(word[j]))), scale));
          S::store(at + kTile, S::mul(S::to_float(S::template sar<24>(S::template shl<16>(word[j]))), scale));
          S::store(at + 2 * kTile, S::mul(S::to_float(S::template sar<24>(S::template shl<8>(word[j]))), scale));
          S::store(at + 3 * kTile, S::mul(S::to_float(S::template sar<24>(word[j])), scale));
        }
      }
    }
  }
  static void pack_v(const Job& job, const Block& b, int first, float* v) {
    for (int j = 0; j < kChunk; ++j)
      for (int g = 0; g < job.groups; ++g) {
        const F scale = S::set(half_to_float(b.v_scale[g][first + j]));
        for (int d = g * job.group; d < (g + 1) * job.group; d += L)
          S::store(v + d / kTile * kTile * kChunk + j * kTile + d % kTile, S::mul(S::load_code(b.v[first + j] + d), scale));
      }
  }

  // R rows x kTile columns of a product: sums of a[r][i] * b[i] over n steps, each from +0 in ascending order.
  template <int R>
  static STRATA_PA_FN void chains(const float* a, int64_t a_stride, const float* b, int n, F (*x)[S::kVecsF]) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < S::kVecsF; ++v) x[r][v] = S::set(0.0f);
    for (int i = 0; i < n; ++i) {
      F y[S::kVecsF];
      for (int v = 0; v < S::kVecsF; ++v) y[v] = S::load(b + i * kTile + v * L);
      for (int r = 0; r < R; ++r) {
        const F w = S::set(a[r * a_stride + i]);
        for (int v = 0; v < S::kVecsF; ++v) x[r][v] = S::fma(w, y[v], x[r][v]);
      }
    }
  }

  // Block sums are added in adjacent pairs: block i's sum x ends `joins` = (trailing ones of i) pairs, with the sums that wait in slots
  // `slot` - 1, `slot` - 2, ...; the result waits in slot `slot` - joins. s: [slot][row][kChunk], slots `plane` apart.
  // The last block's last pair leaves the score in slot 0 and what its sum rounded away in slot 1.
  template <int R, bool kLast>
  static void scores(const float* q, int64_t dim, const float* k, float* s, int64_t plane, int joins) {
    F x[R][S::kVecsF];
    chains<R>(q, dim, k, kDims, x);
    for (int i = 0; i < joins - kLast; ++i) {
      s -= plane;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < S::kVecsF; ++v) x[r][v] = S::add(S::load(s + r * kChunk + v * L), x[r][v]);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < S::kVecsF; ++v) {
        float* at = s + r * kChunk + v * L;
        if constexpr (kLast) {
          const F lower = S::load(at - plane), sum = S::add(lower, x[r][v]), u = S::sub(sum, lower);
          S::store(at - plane, sum);
          S::store(at, S::add(S::sub(lower, S::sub(sum, u)), S::sub(x[r][v], u)));
        } else {
          S::store(at, x[r][v]);
        }
      }
  }
  // acc[r][tile] = acc * alpha + sum of e * v.
  template <int R>
  static void values(const float* e, const float* v, const float* alpha, float* acc, int64_t dim, int n) {
    F x[R][S::kVecsF];
    chains<R>(e, kChunk, v, n, x);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < S::kVecsF; ++j) {
        float* at = acc + r * dim + j * L;
        S::store(at, S::fma(S::load(at), S::set(alpha[r]), x[r][j]));
      }
  }
  template <int R, bool kLast>
  static void scores_from(int rows, const float* q, int64_t dim, const float* k, float* s, int64_t plane, int joins) {
    for (; rows >= R; rows -= R, q += R * dim, s += R * kChunk) scores<R, kLast>(q, dim, k, s, plane, joins);
    if constexpr (R > 1)
      if (rows) scores_from<R - 1, kLast>(rows, q, dim, k, s, plane, joins);
  }
  static void all_scores(const Job& job, Buffers& b, int rows) {
    const int64_t plane = int64_t{rows} * kChunk;
    const int blocks = job.dim / kDims;
    for (int tile = 0; tile < kTiles; ++tile)
      for (int i = 0; i < blocks; ++i) {
        const auto from = i == blocks - 1 ? scores_from<S::kRowsF, true> : scores_from<S::kRowsF, false>;
        from(rows, b.q + i * kDims, job.dim, b.k + (int64_t{tile} * job.dim + i * kDims) * kTile,
             b.s + tile * kTile + __builtin_popcount(i) * plane, plane, __builtin_ctz(~i));
      }
  }
  template <int R>
  static void values_from(int rows, const float* e, const float* v, const float* alpha, float* acc, int64_t dim, int n) {
    for (; rows >= R; rows -= R, e += R * kChunk, alpha += R, acc += R * dim) values<R>(e, v, alpha, acc, dim, n);
    if constexpr (R > 1)
      if (rows) values_from<R - 1>(rows, e, v, alpha, acc, dim, n);
  }

  // Scores to e, in place; alpha, l and m.
  static void softmax(Buffers& b, int row, int64_t plane, uint64_t seen) {
    float* s = b.s + row * kChunk;
    if (!seen) {
      for (int j = 0; j < kChunk; j += L) S::store(s + j, S::set(0.0f));
      b.alpha[row] = 1.0f;
      return;
    }
    b.seen[row] = 1;
    constexpr int V = kChunk / L;
    F n[V], p[V];
    F top = S::set(-__builtin_inff());
    bool finite = true;
    for (int j = 0; j < V; ++j) {
      const F x = S::load(s + j * L);
      finite &= S::all_finite(S::mask(seen >> (j * L)), x);
      n[j] = S::rint(x);
      const F low = S::zero_below(S::load(s + plane + j * L), S::sub(S::set(0x1.fffffep15f), S::abs(x)), 0.0f);  // where |x| < 65536
      p[j] = A::poly(S::add(S::sub(x, n[j]), low));
      top = S::max(top, S::keep(S::mask(seen >> (j * L)), n[j], -__builtin_inff()));
    }
    if (!finite) b.bad[row] = 1;
    const float m = Scalar1::max(b.m[row], S::hmax(top));
    for (int j = 0; j < V; ++j) {
      p[j] = S::keep(S::mask(seen >> (j * L)), A::shift(p[j], S::sub(n[j], S::set(m))), 0.0f);
      S::store(s + j * L, p[j]);
    }
    b.alpha[row] = A1::shift(1.0f, b.m[row] - m);
    b.l[row] = Scalar1::fma(b.l[row], b.alpha[row], tree<S, V>(p));
    b.m[row] = m;
  }

  static int64_t scratch(const Job& job, int rows, int64_t) {
    Arena a{nullptr, 0};
    buffers(a, job, rows);
    return a.used;
  }

  static void run(const Job& job, const Tile& t, char* scratch) {
    const int rows = static_cast<int>(t.nq) * job.heads, dim = job.dim;
    Arena a{scratch, 0};
    Buffers b = buffers(a, job, rows);
    load_rows(job, t, b.q, b.bad);
    for (int64_t i = 0; i < int64_t{rows} * dim; ++i) b.q[i] *= job.c;
    start_online(job, rows, b);

    for (int64_t e0 = t.begin; e0 < t.end; e0 += kBlock) {
      if (!load_block(job, t, e0, kChunk, *b.block)) continue;
      mark_bad(job, t, *b.block, b.bad);
      for (int first = 0; first < b.block->n; first += kChunk) {
        if (!b.block->any[first / 64]) continue;
        pack_k(job, *b.block, first, b.k);
        all_scores(job, b, rows);
        for (int r = 0; r < rows; ++r) softmax(b, r, int64_t{rows} * kChunk, b.block->visible[r / job.heads][first / 64]);
        pack_v(job, *b.block, first, b.v);
        const int n = 64 - __builtin_clzll(b.block->any[first / 64]);
        for (int d = 0; d < dim; d += kTile)
          values_from<S::kRowsF>(rows, b.s, b.v + d * kChunk, b.alpha, b.acc + d, dim, n);
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* x = b.acc + r * dim;
      for (int d = 0; d < dim; ++d) x[d] = x[d] / b.l[r];
      store_row(job, t, r, x, A1::lse(b.m[r], b.l[r]), !b.seen[r], b.bad[r]);
    }
  }
};
