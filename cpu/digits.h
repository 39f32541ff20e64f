// Products of digits and codes, for `imma` and `exact`. The byte dot product takes unsigned by signed bytes, so one operand is stored with 128
// added, and the accumulators start at the value that takes the surplus out again: every sum is the exact integer of docs/numerics.md.

template <class S, int kBias>
struct Digits {
  using F = typename S::F;
  using I = typename S::I;
  using A = Arith<S>;
  using A1 = Arith<Scalar1>;
  static constexpr int L = S::L;
  static constexpr bool kImma = kBias == kBiasImma;
  static constexpr int kWidth = S::kVecsQ * L;  // entries of a register tile of q.k
  static constexpr int kQuad = 256;             // bytes of 64 dims x 4 entries of packed V

  struct Buffers {
    int8_t* q;      // [row][3 digits][dim], signed
    int32_t* q0;    // [row][group][3]: what the accumulators start at
    float* f;       // [row][group]
    uint8_t* k;     // [entry / L][dim / 4][L][4], code + 128
    int32_t* ksum;  // imma: [group][entry], 128 times the sum of a group's codes
    float* ks;      // [group][entry], k_scale
    float* vs;      // [group][entry], v_scale
    int8_t* v;      // [dim / 64][entry / 4][64][4]
    int32_t* vsum;  // [dim], -128 times the sum of a dim's codes
    uint8_t *bad, *seen;
    Block* block;
  };
  static Buffers buffers(Arena& a, const Job& job, int rows) {
    Buffers b;
    b.q = carve<int8_t>(a, int64_t{rows} * 3 * job.dim);
    b.q0 = carve<int32_t>(a, int64_t{rows} * job.groups * 3);
    b.f = carve<float>(a, int64_t{rows} * job.groups);
    b.k = carve<uint8_t>(a, int64_t{kBlock} * job.dim);
    b.ksum = carve<int32_t>(a, kImma ? int64_t{kBlock} * job.groups : 0);
    b.ks = carve<float>(a, int64_t{kBlock} * job.groups);
    b.vs = carve<float>(a, int64_t{kBlock} * job.groups);
    b.v = carve<int8_t>(a, int64_t{kBlock} * job.dim);
    b.vsum = carve<int32_t>(a, job.dim);
    b.bad = carve<uint8_t>(a, rows);
    b.seen = carve<uint8_t>(a, rows);
    b.block = carve<Block>(a, 1);
    return b;
  }

  // q's digits. `q` has the rows in FP32.
  static void split_q(const Job& job, int rows, const float* q, Buffers& b) {
    for (int row = 0; row < rows; ++row)
      for (int g = 0; g < job.groups; ++g) {
        const float* x = q + row * job.dim + g * job.group;
        float mx = 0;
        for (int d = 0; d < job.group; ++d) mx = Scalar1::max(__builtin_fabsf(x[d]), mx);
        const float scale = A1::digit_scale(mx);
        int32_t sum[3] = {};
        for (int d = 0; d < job.group; ++d) {
          const int32_t X = A1::fixed(x[d], scale), h = A1::high(X, kBias), r = A1::rest(X, h);
          const int32_t l = kImma ? r >> 8 : (r + 128) >> 8, m = r - 256 * l;
          const int32_t digit[3] = {h, l, kImma ? m - 128 : m};
          for (int k = 0; k < 3; ++k) {
            b.q[(row * 3 + k) * job.dim + g * job.group + d] = static_cast<int8_t>(digit[k]);
            sum[k] += digit[k];
          }
        }
        for (int k = 0; k < 3; ++k) b.q0[(row * job.groups + g) * 3 + k] = -128 * sum[k];
        b.f[row * job.groups + g] = (mx * kInv127) * job.c;
      }
  }

  static void pack_k(const Job& job, int first, int n, Buffers& b) {
    for (int c = first; c < first + n; c += L)
      for (int d = 0; d < job.dim; d += 4 * L) {
        I word[L];
        S::transpose(b.block->k + c, d, word);
        for (int j = 0; j < L; ++j) S::storei(b.k + int64_t{c} * job.dim + (d + 4 * j) * L, S::ixor(word[j], static_cast<int>(0x80808080)));
      }
    for (int g = 0; g < job.groups; ++g)
      for (int c = first; c < first + n; c += L) {
        S::store(b.ks + g * kBlock + c, S::load_half(&b.block->k_scale[g][c]));
        if constexpr (kImma) {
          I sum = S::iset(-128 * job.group);
          for (int d = g * job.group; d < (g + 1) * job.group; d += 4) sum = S::dot(sum, S::loadi(b.k + int64_t{c} * job.dim + d * L), S::iset(0x01010101));
          S::storei(b.ksum + g * kBlock + c, S::template shl<7>(sum));
        }
      }
  }

  static void pack_v(const Job& job, int first, int n, Buffers& b) {
    for (int d = 0; d < job.dim; d += 4 * L) {
      I sum[4];
      for (int j = 0; j < 4; ++j) sum[j] = S::iset(0);
      for (int c = first; c < first + n; c += 4) {
        I word[4];
        S::interleave(b.block->v + c, d, word);
        int8_t* to = v_at(b, d, c);
        for (int j = 0; j < 4; ++j) {
          S::storei(to + 4 * L * j, word[j]);
          sum[j] = S::dot(sum[j], S::iset(0x01010101), word[j]);
        }
      }
      for (int j = 0; j < 4; ++j) S::storei(b.vsum + d + L * j, S::isub(S::iset(0), S::template shl<7>(sum[j])));
    }
    for (int g = 0; g < job.groups; ++g)
      for (int c = first; c < first + n; c += L) S::store(b.vs + g * kBlock + c, S::load_half(&b.block->v_scale[g][c]));
  }
  static int8_t* v_at(const Buffers& b, int d, int entry) {
    return b.v + d / 64 * (kBlock / 4 * kQuad) + entry / 4 * kQuad + d % 64 * 4;
  }

  // Scores of R rows x kWidth entries from `first` on, to s (row stride `stride`).
  template <int R>
  static void scores(const Job& job, const Buffers& b, int row, int first, float* s, int64_t stride) {
    constexpr int V = S::kVecsQ;
    const int8_t* q = b.q + int64_t{row} * 3 * job.dim;
    const uint8_t* k = b.k + int64_t{first} * job.dim;
    const int64_t next = int64_t{L} * job.dim;  // bytes of L entries
    for (int g = 0; g < job.groups; ++g) {
      I x[R][3][V];
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < 3; ++i)
          for (int v = 0; v < V; ++v) x[r][i][v] = S::load4(&b.q0[((row + r) * job.groups + g) * 3 + i]);
      for (int d = g * job.group; d < (g + 1) * job.group; d += 4) {
        I y[V];
        for (int v = 0; v < V; ++v) y[v] = S::loadi(k + v * next + d * L);
        for (int r = 0; r < R; ++r)
          for (int i = 0; i < 3; ++i) {
            const I w = S::load4(q + (r * 3 + i) * job.dim + d);
            for (int v = 0; v < V; ++v) x[r][i][v] = S::dot(x[r][i][v], y[v], w);
          }
      }
      for (int v = 0; v < V; ++v) {
        const F ks = S::load(b.ks + g * kBlock + first + v * L);
        for (int r = 0; r < R; ++r) {
          I rest = S::iadd(S::template shl<8>(x[r][1][v]), x[r][2][v]);
          if constexpr (kImma) rest = S::iadd(rest, S::loadi(b.ksum + g * kBlock + first + v * L));
          const F tf = S::mul(A::join(x[r][0][v], rest), S::set(b.f[(row + r) * job.groups + g]));
          float* at = s + r * stride + v * L;
          S::store(at, g == 0 ? S::mul(tf, ks) : S::fma(tf, ks, S::load(at)));
        }
      }
    }
  }
  template <int R>
  static void scores_from(const Job& job, const Buffers& b, int row, int rows, int first, float* s, int64_t stride) {
    for (; row + R <= rows; row += R) scores<R>(job, b, row, first, s + row * stride, stride);
    if constexpr (R > 1)
      if (row < rows) scores_from<R - 1>(job, b, row, rows, first, s, stride);
  }
  // Scores of all rows for n entries from `first` on (a multiple of kWidth), to s[row][entry - first].
  static void all_scores(const Job& job, const Buffers& b, int rows, int first, int n, float* s, int64_t stride) {
    for (int c = 0; c < n; c += kWidth) scores_from<S::kRowsQ>(job, b, 0, rows, first + c, s + c, stride);
  }

  // One row's products with V: n entries from `first` on, V vectors of dims from d on. w: the digits of the weights [entry / 4][4 digits][4 entries];
  // x: [digit][vector], started by the caller.
  template <int D, int V>
  static STRATA_PA_FN void values(const int8_t* v, const uint8_t* w, int n, I (*x)[V]) {
    for (int c = 0; c < n; c += 4) {
      I y[V];
      for (int j = 0; j < V; ++j) y[j] = S::loadi(v + c / 4 * kQuad + 4 * L * j);
      for (int i = 0; i < D; ++i) {
        const I u = S::load4(w + 4 * c + 4 * i);
        for (int j = 0; j < V; ++j) x[i][j] = S::dot(x[i][j], u, y[j]);
      }
    }
  }
};
