// `exact` (docs/numerics.md, section 5): first all anchors, then order-free integer sums. Scores are kept between the two passes where they fit
// into RunOptions::score_bytes, and computed twice where they do not.

// The last step of a row, from its sums: `x` holds dim results.
static float exact_row(const int64_t* O, int64_t L, float A, float b, int dim, float* x) {
  const float l = static_cast<float>(L), scale = Arith<Scalar1>::shift(1.0f, b);
  for (int d = 0; d < dim; ++d) x[d] = (static_cast<float>(O[d]) / l) * scale;
  return Arith<Scalar1>::lse(A, l * 0x1p-30f);
}

template <class S>
struct Exact {
  using D = Digits<S, kBiasExact>;
  using F = typename S::F;
  using I = typename S::I;
  using A = Arith<S>;
  static constexpr int L = S::L;
  static constexpr int64_t kSpill = 65536;  // entries whose products surely fit the int32 planes

  struct Buffers : D::Buffers {
    float *s, *A, *b, *lv, *x;  // lv: [entry]; x: one row, or all of q at the start
    int64_t *L, *O;             // [row], [row][dim]
    int32_t* planes;            // [row][4 digits][dim]
    uint8_t* w;                 // one row: [group][entry / 4][4 digits][4 entries]
  };
  static bool keeps(const Job& job, int rows, int64_t entries) {
    return job.options->step == ExactStep::kWhole && rows * round_up(entries, kBlock) * 4 <= job.options->score_bytes;
  }
  static Buffers buffers(Arena& a, const Job& job, int rows, int64_t entries) {
    Buffers b;
    static_cast<typename D::Buffers&>(b) = D::buffers(a, job, rows);
    b.s = carve<float>(a, rows * (keeps(job, rows, entries) ? round_up(entries, kBlock) : kBlock));
    b.A = carve<float>(a, rows);
    b.b = carve<float>(a, rows);
    b.lv = carve<float>(a, kBlock);
    b.x = carve<float>(a, int64_t{rows} * job.dim);
    b.L = carve<int64_t>(a, rows);
    b.O = carve<int64_t>(a, int64_t{rows} * job.dim);
    b.planes = carve<int32_t>(a, int64_t{rows} * 4 * job.dim);
    b.w = carve<uint8_t>(a, int64_t{job.groups} * kBlock * 4);
    return b;
  }

  // The least integer with |v_scale| <= 2^lv in all groups; -inf where they are all zero.
  static void levels(const Job& job, Buffers& b) {
    for (int j = 0; j < b.block->n; ++j) {
      int top = 0;
      for (int g = 0; g < job.groups; ++g) {
        const int s = b.block->v_scale[g][j] & 0x7fff;
        top = s > top ? s : top;
      }
      const int32_t bits = Scalar1::as_int(half_to_float(static_cast<uint16_t>(top)));
      b.lv[j] = top ? static_cast<float>((bits >> 23) - 127 + ((bits & 0x7fffff) != 0)) : -__builtin_inff();
    }
  }

  static void anchors(Buffers& b, int row, const uint64_t* visible, const float* s) {
    F top = S::set(-__builtin_inff());
    bool finite = true;
    for (int j = 0; j < b.block->n; j += L) {
      const typename S::M mask = S::mask(seen_bits(visible, j));
      const F x = S::load(s + j);
      finite &= S::all_finite(mask, x);
      top = S::max(top, S::keep(mask, S::rint(x), -__builtin_inff()));
    }
    if (!finite) b.bad[row] = 1;
    b.seen[row] = 1;
    const float a = Scalar1::max(b.A[row], S::hmax(top));
    F level = S::set(-__builtin_inff());
    for (int j = 0; j < b.block->n; j += L) {
      const F d = S::sub(S::rint(S::load(s + j)), S::set(a));
      level = S::max(level, S::keep(S::mask(seen_bits(visible, j)), S::add(d, S::load(b.lv + j)), -__builtin_inff()));
    }
    b.b[row] = Scalar1::max(Scalar1::max(b.b[row] + (b.A[row] - a), S::hmax(level)), kBFloor);
    b.A[row] = a;
  }

  // One row's block: L, the weights' digits, products with V into the planes.
  static void sums(const Job& job, Buffers& b, int row, const uint64_t* visible, const float* s) {
    const int n = b.block->n;
    typename S::Wide l = S::wide_zero();
    for (int j = 0; j < n; j += L) {
      const typename S::M mask = S::mask(seen_bits(visible, j));
      const F x = S::load(s + j), whole = S::rint(x), p = A::poly(S::sub(x, whole)), d = S::sub(whole, S::set(b.A[row]));
      const F e = S::keep(mask, A::shift(p, S::add(d, S::set(kFixedPoint))), 0.0f);
      l = S::wide_add(l, S::to_int(S::rint(e)));
      const F w = S::keep(mask, A::shift(p, S::add(S::sub(d, S::set(b.b[row])), S::set(kFixedPoint))), 0.0f);
      for (int g = 0; g < job.groups; ++g) {
        const I W = S::to_int(S::rint(S::mul(w, S::load(b.vs + g * kBlock + j))));
        S::storei(b.w + (g * kBlock + j) * 4, S::digits(S::ixor(W, static_cast<int>(0x80000000))));
      }
    }
    b.L[row] += S::wide_sum(l);
    const int step = job.group < 64 ? job.group : 64;
    for (int d = 0; d < job.dim; d += step) {
      if (step == 64)
        values<64 / L>(job, b, row, d);
      else
        values<32 / L>(job, b, row, d);
    }
  }
  template <int T>
  static STRATA_PA_FN void values(const Job& job, Buffers& b, int row, int d) {
    constexpr int W = T < S::kVecsW ? T : S::kVecsW;
    for (int t = 0; t < T; t += W, d += W * L) {
      int32_t* at = b.planes + int64_t{row} * 4 * job.dim + d;
      I x[4][W];
      for (int j = 0; j < W; ++j) {
        for (int i = 0; i < 4; ++i) x[i][j] = S::loadi(at + i * job.dim + j * L);
        x[3][j] = S::iadd(x[3][j], S::loadi(b.vsum + d + j * L));
      }
      D::template values<4, W>(D::v_at(b, d, 0), b.w + d / job.group * (kBlock * 4), b.block->n, x);
      for (int j = 0; j < W; ++j)
        for (int i = 0; i < 4; ++i) S::storei(at + i * job.dim + j * L, x[i][j]);
    }
  }

  // Joins the planes into O, and clears them.
  static void spill(const Job& job, int rows, Buffers& b) {
    for (int r = 0; r < rows; ++r) {
      int32_t* x = b.planes + int64_t{r} * 4 * job.dim;
      int64_t* O = b.O + int64_t{r} * job.dim;
      for (int d = 0; d < job.dim; ++d)
        O[d] += x[d] + int64_t{x[job.dim + d]} * 256 + int64_t{x[2 * job.dim + d]} * 65536 + int64_t{x[3 * job.dim + d]} * 16777216;
      memset(x, 0, sizeof(int32_t) * 4 * job.dim);
    }
  }

  static int64_t scratch(const Job& job, int rows, int64_t entries) {
    Arena a{nullptr, 0};
    buffers(a, job, rows, entries);
    return a.used;
  }

  static void run(const Job& job, const Tile& t, char* scratch) {
    const int rows = static_cast<int>(t.nq) * job.heads, dim = job.dim;
    const int64_t entries = max64(t.end - t.begin, 0);
    Arena a{scratch, 0};
    Buffers b = buffers(a, job, rows, entries);
    load_rows(job, t, b.x, b.bad);
    D::split_q(job, rows, b.x, b);
    for (int r = 0; r < rows; ++r) {
      b.A[r] = -__builtin_inff();
      b.b[r] = kBFloor;
      b.seen[r] = 0;
    }
    const ExactStep step = job.options->step;
    const bool kept = keeps(job, rows, entries);
    const int64_t stride = kept ? round_up(entries, kBlock) : kBlock;

    if (step != ExactStep::kSums) {
      for (int64_t e0 = t.begin; e0 < t.end; e0 += kBlock) {
        if (!load_block(job, t, e0, D::kWidth, *b.block)) continue;
        mark_bad(job, t, *b.block, b.bad);
        D::pack_k(job, 0, b.block->n, b);
        levels(job, b);
        float* s = b.s + (kept ? e0 - t.begin : 0);
        D::all_scores(job, b, rows, 0, b.block->n, s, stride);
        for (int r = 0; r < rows; ++r)
          if (sees_any(b.block->visible[r / job.heads])) anchors(b, r, b.block->visible[r / job.heads], s + r * stride);
      }
    }
    if (step == ExactStep::kAnchors) return store_anchors(job, t, rows, b);
    if (step == ExactStep::kSums) load_anchors(job, t, rows, b);

    memset(b.L, 0, sizeof(int64_t) * rows);
    memset(b.O, 0, sizeof(int64_t) * rows * dim);
    memset(b.planes, 0, sizeof(int32_t) * rows * 4 * dim);
    int64_t unspilled = 0;
    for (int64_t e0 = t.begin; e0 < t.end; e0 += kBlock) {
      if (!load_block(job, t, e0, D::kWidth, *b.block)) continue;
      float* s = b.s + (kept ? e0 - t.begin : 0);
      if (!kept) {
        D::pack_k(job, 0, b.block->n, b);
        D::all_scores(job, b, rows, 0, b.block->n, s, stride);
      }
      D::pack_v(job, 0, b.block->n, b);
      for (int r = 0; r < rows; ++r)
        if (sees_any(b.block->visible[r / job.heads]) && !b.bad[r]) sums(job, b, r, b.block->visible[r / job.heads], s + r * stride);
      if ((unspilled += kBlock) == kSpill) {
        spill(job, rows, b);
        unspilled = 0;
      }
    }
    spill(job, rows, b);
    if (step == ExactStep::kSums) return store_sums(job, t, rows, b);
    for (int r = 0; r < rows; ++r) {
      float* x = b.x + r * dim;
      const float lse = exact_row(b.O + int64_t{r} * dim, b.L[r], b.A[r], b.b[r], dim, x);
      store_row(job, t, r, x, lse, !b.seen[r], b.bad[r]);
    }
  }

  static bool sees_any(const uint64_t* visible) {
    uint64_t all = 0;
    for (int w = 0; w < kWords; ++w) all |= visible[w];
    return all != 0;
  }

  // Partial state, in the caller's arrays [query][head].
  static int64_t state_row(const Job& job, const Tile& t, int r) {
    return (t.q0 + r / job.heads) * job.p->n_head + t.head * job.heads + r % job.heads;
  }
  static void store_anchors(const Job& job, const Tile& t, int rows, const Buffers& b) {
    for (int r = 0; r < rows; ++r) {
      const bool bad = b.seen[r] && b.bad[r];
      job.options->state.A[state_row(job, t, r)] = bad ? Scalar1::as_float(0x7fc00000) : b.A[r];
      job.options->state.b[state_row(job, t, r)] = bad ? kBFloor : b.b[r];
    }
  }
  static void load_anchors(const Job& job, const Tile& t, int rows, Buffers& b) {
    for (int r = 0; r < rows; ++r) {
      b.A[r] = job.options->state.A[state_row(job, t, r)];
      b.b[r] = job.options->state.b[state_row(job, t, r)];
      b.bad[r] = b.A[r] != b.A[r];  // a bad row has no sums
    }
  }
  static void store_sums(const Job& job, const Tile& t, int rows, const Buffers& b) {
    for (int r = 0; r < rows; ++r) {
      job.options->state.L[state_row(job, t, r)] = b.L[r];
      memcpy(job.options->state.O + state_row(job, t, r) * job.dim, b.O + int64_t{r} * job.dim, sizeof(int64_t) * job.dim);
    }
  }
};
