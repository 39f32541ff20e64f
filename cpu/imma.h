// `imma` (docs/numerics.md, section 4): chunks of 32 entries, online softmax, weights split anew in every chunk.

template <class S>
struct Imma {
  using D = Digits<S, kBiasImma>;
  using F = typename S::F;
  using I = typename S::I;
  using A = Arith<S>;
  using A1 = Arith<Scalar1>;
  static constexpr int L = S::L, kChunk = 32, V = kChunk / L;
  static_assert(kChunk % D::kWidth == 0, "a register tile must not cross a chunk");

  struct Buffers : D::Buffers {
    float *s, *acc, *m, *l;
    uint8_t* w;  // one row: [group][entry / 4][4 digits][4 entries]
    float* q;
  };
  static Buffers buffers(Arena& a, const Job& job, int rows) {
    Buffers b;
    static_cast<typename D::Buffers&>(b) = D::buffers(a, job, rows);
    b.s = carve<float>(a, int64_t{rows} * kChunk);
    b.acc = carve<float>(a, int64_t{rows} * job.dim);
    b.m = carve<float>(a, rows);
    b.l = carve<float>(a, rows);
    b.w = carve<uint8_t>(a, int64_t{job.groups} * kChunk * 4);
    b.q = carve<float>(a, int64_t{rows} * job.dim);
    return b;
  }

  // One row's chunk: softmax, digits of the weights, products with V.
  static void chunk(const Job& job, Buffers& b, int row, int first, uint64_t seen) {
    const float* s = b.s + row * kChunk;
    b.seen[row] = 1;
    F top = S::set(-__builtin_inff()), e[V];
    bool finite = true;
    for (int j = 0; j < V; ++j) {
      const typename S::M mask = S::mask(seen >> (j * L));
      e[j] = S::load(s + j * L);
      finite &= S::all_finite(mask, e[j]);
      top = S::max(top, S::keep(mask, e[j], -__builtin_inff()));
    }
    if (!finite) b.bad[row] = 1;
    const float m = Scalar1::max(b.m[row], S::hmax(top)), alpha = A1::exp2(b.m[row] - m);
    for (int j = 0; j < V; ++j) e[j] = S::keep(S::mask(seen >> (j * L)), A::exp2(S::sub(e[j], S::set(m))), 0.0f);
    b.l[row] = Scalar1::fma(b.l[row], alpha, tree<S, V>(e));
    b.m[row] = m;

    float back[kMaxGroups];  // mx / 127 of each group
    for (int g = 0; g < job.groups; ++g) {
      F y[V], mx = S::set(0.0f);
      for (int j = 0; j < V; ++j) {
        y[j] = S::mul(e[j], S::load(b.vs + g * kBlock + first + j * L));
        mx = S::max(mx, S::abs(y[j]));
      }
      const float most = S::hmax(mx);
      const F scale = S::set(A1::digit_scale(most));
      back[g] = most * kInv127;
      for (int j = 0; j < V; ++j) {  // bytes m, l + 128, h + 128
        const I X = S::ixor(S::iadd(A::fixed(y[j], scale), S::iset(kBiasImma)), 0x800000);
        S::storei(b.w + g * (kChunk * 4) + j * L * 4, S::digits(X));
      }
    }
    const int step = job.group < 64 ? job.group : 64;
    for (int d = 0; d < job.dim; d += step) {
      if (step == 64)
        values<64 / L>(job, b, row, first, d, alpha, back[d / job.group]);
      else
        values<32 / L>(job, b, row, first, d, alpha, back[d / job.group]);
    }
  }

  // acc[row][d ...] of T vectors, in register tiles.
  template <int T>
  static STRATA_PA_FN void values(const Job& job, Buffers& b, int row, int first, int d, float alpha, float back) {
    constexpr int W = T < S::kVecsW ? T : S::kVecsW;
    for (int t = 0; t < T; t += W, d += W * L) {
      I x[3][W];
      for (int j = 0; j < W; ++j) {
        x[0][j] = S::iset(0);
        x[1][j] = x[2][j] = S::loadi(b.vsum + d + j * L);
      }
      D::template values<3, W>(D::v_at(b, d, first), b.w + d / job.group * (kChunk * 4), kChunk, x);
      for (int j = 0; j < W; ++j) {
        const F sum = A::join(x[2][j], S::iadd(S::template shl<8>(x[1][j]), x[0][j]));
        float* at = b.acc + row * job.dim + d + j * L;
        S::store(at, S::fma(S::load(at), S::set(alpha), S::mul(sum, S::set(back))));
      }
    }
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
    D::split_q(job, rows, b.q, b);
    start_online(job, rows, b);

    for (int64_t e0 = t.begin; e0 < t.end; e0 += kBlock) {
      if (!load_block(job, t, e0, kChunk, *b.block)) continue;
      mark_bad(job, t, *b.block, b.bad);
      for (int first = 0; first < b.block->n; first += kChunk) {
        const uint32_t any = static_cast<uint32_t>(seen_bits(b.block->any, first));
        if (!any) continue;
        D::pack_k(job, first, kChunk, b);
        D::pack_v(job, first, kChunk, b);
        D::all_scores(job, b, rows, first, kChunk, b.s, kChunk);
        for (int r = 0; r < rows; ++r) {
          const uint32_t seen = static_cast<uint32_t>(seen_bits(b.block->visible[r / job.heads], first));
          if (seen) chunk(job, b, r, first, seen);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* x = b.acc + r * dim;
      const float inverse = 1.0f / b.l[r];
      for (int d = 0; d < dim; ++d) x[d] *= inverse;
      store_row(job, t, r, x, A1::lse(b.m[r], b.l[r]), !b.seen[r], b.bad[r]);
    }
  }
};
