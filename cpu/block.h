// The rows of a tile and the list entries of a block: which are visible, where they lie, their scales.

struct Arena {  // carves one scratch allocation; with base null it only measures
  char* base;
  int64_t used;
};
template <class T>
static T* carve(Arena& a, int64_t count) {
  T* r = a.base ? reinterpret_cast<T*>(a.base + a.used) : nullptr;
  a.used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  return r;
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

constexpr int kWords = kBlock / 64;
alignas(64) static const int8_t kNoCodes[kMaxDim] = {};  // stands in for entries that no row of the tile sees

struct Block {
  int n;  // entries, rounded up to the kernel's chunk; those past the list are masked
  const int8_t* k[kBlock];
  const int8_t* v[kBlock];
  alignas(64) uint16_t k_scale[kMaxGroups][kBlock];  // +0 for masked entries and those that are not finite
  alignas(64) uint16_t v_scale[kMaxGroups][kBlock];
  uint64_t visible[kMaxTileRows][kWords];  // per query of the tile
  uint64_t any[kWords];                    // union of the above
  uint64_t bad[kWords];                    // an entry with a scale that is not finite
};

// Bits lo .. hi - 1, for the block's word w.
static inline uint64_t bit_range(int64_t lo, int64_t hi, int w) {
  lo = max64(lo - 64 * w, 0);
  hi = min64(hi - 64 * w, 64);
  if (hi <= lo) return 0;
  return (hi - lo == 64 ? ~uint64_t{0} : ((uint64_t{1} << (hi - lo)) - 1)) << lo;
}

static inline bool bit(const uint64_t* words, int j) { return words[j / 64] >> (j % 64) & 1; }

// Copies a cell's scales into column j; true if one is not finite (it becomes +0).
static inline bool load_scales(uint16_t (*to)[kBlock], const uint16_t* from, int groups, int j) {
  bool bad = false;
  for (int g = 0; g < groups; ++g) {
    const bool inf = (from[g] & 0x7c00) == 0x7c00;
    bad |= inf;
    to[g][j] = inf ? 0 : from[g];
  }
  return bad;
}

// x / d: a shift where it can be one, since every list entry needs one.
struct Divisor {
  uint32_t d;
  int shift;  // -1: not a power of two
};
static inline Divisor divisor(int64_t d) {
  const uint32_t x = static_cast<uint32_t>(d);
  return {x, (x & (x - 1)) == 0 ? __builtin_ctz(x) : -1};
}
static inline uint32_t quotient(uint32_t x, Divisor d) { return d.shift >= 0 ? x >> d.shift : x / d.d; }

// Loads entries e0 .. e0 + kBlock - 1 of the tile's list. False: no row sees any of them.
static bool load_block(const Job& job, const Tile& t, int64_t e0, int chunk, Block& b) {
  const Problem& p = *job.p;
  const int32_t* table = p.page_table + t.seq * p.page_table_stride;
  const int64_t kv_len = p.kv_len[t.seq];
  const int n = static_cast<int>(min64(t.end - e0, kBlock));
  b.n = static_cast<int>(round_up(n, chunk));
  for (int w = 0; w < kWords; ++w) b.any[w] = b.bad[w] = 0;

  // Where the entries lie. A list (one query) also tells here what that query sees.
  int64_t page_of[kBlock], slot_of[kBlock];
  uint64_t resident[kWords] = {};
  const int32_t* ids = p.ids ? p.ids + t.q0 * p.ids_stride + t.head * p.ids_head_stride : nullptr;
  const int64_t oldest = p.window_left < 0 ? 0 : max64(0, t.pos0 - p.window_left);
  const int64_t newest = p.causal ? min64(kv_len - 1, t.pos0) : kv_len - 1;
  const Divisor page_size = divisor(p.page_size);
  const int fine = __builtin_ctzll(static_cast<uint64_t>(p.granularity));  // granularities are powers of two that divide kBlock
  for (int j = 0; j < n; ++j) {
    int64_t cell = e0 + j;
    if (ids) {
      const int64_t id = ids[cell >> fine];
      cell = id * p.granularity + (j & (p.granularity - 1));
      if (id < 0 || cell < oldest || cell > newest) continue;
    }
    const int64_t logical = quotient(static_cast<uint32_t>(cell), page_size);  // visible cells are below kv_len, a 32-bit number
    if (logical >= p.max_pages) continue;
    const int64_t page = table[logical];
    if (page < 0 || page >= p.pages) continue;
    page_of[j] = page;
    slot_of[j] = cell - logical * p.page_size;
    resident[j / 64] |= uint64_t{1} << (j % 64);
  }
  for (int64_t q = 0; q < t.nq; ++q)
    for (int w = 0; w < kWords; ++w) {
      uint64_t seen = resident[w];
      if (!ids) {
        const int64_t pos = t.pos0 + q;
        const int64_t first = p.window_left < 0 ? 0 : pos - p.window_left;
        seen &= bit_range(first - e0, (p.causal ? min64(kv_len - 1, pos) : kv_len - 1) + 1 - e0, w);
      }
      b.visible[q][w] = seen;
      b.any[w] |= seen;
    }
  uint64_t all = 0;
  for (int w = 0; w < kWords; ++w) all |= b.any[w];
  if (!all) return false;

  for (int j = 0; j < b.n; ++j) {
    if (bit(b.any, j)) {
      const int64_t page = page_of[j], slot = slot_of[j];
      b.k[j] = p.k + page * p.k_stride.page + t.head * p.k_stride.head + slot * p.k_stride.slot;
      b.v[j] = p.v + page * p.v_stride.page + t.head * p.v_stride.head + slot * p.v_stride.slot;
      for (int at = 0; at < job.dim; at += 64) __builtin_prefetch(b.v[j] + at);  // needed only after the scores
      const uint16_t* ks = p.k_scale + page * p.k_scale_stride.page + t.head * p.k_scale_stride.head + slot * p.k_scale_stride.slot;
      const uint16_t* vs = p.v_scale + page * p.v_scale_stride.page + t.head * p.v_scale_stride.head + slot * p.v_scale_stride.slot;
      const bool bad_k = load_scales(b.k_scale, ks, job.groups, j), bad_v = load_scales(b.v_scale, vs, job.groups, j);
      if (bad_k || bad_v) b.bad[j / 64] |= uint64_t{1} << (j % 64);
    } else {
      b.k[j] = b.v[j] = kNoCodes;
      for (int g = 0; g < job.groups; ++g) b.k_scale[g][j] = b.v_scale[g][j] = 0;
    }
  }
  return true;
}

// A row's visible entries among the block's entries first .. first + 63 (first a multiple of 32).
static inline uint64_t seen_bits(const uint64_t* words, int first) { return words[first / 64] >> (first % 64); }

// q as FP32, converted exactly.
static inline float load_q(const Problem& p, int64_t query, int64_t head, int d) {
  const int64_t at = query * p.q_stride + head * p.q_head_stride + d;
  if (p.dtype == DType::kFloat32) return static_cast<const float*>(p.q)[at];
  const uint16_t bits = static_cast<const uint16_t*>(p.q)[at];
  return p.dtype == DType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

// Loads a tile's rows (row = query * heads + head of the group), and marks those whose q is not finite.
static void load_rows(const Job& job, const Tile& t, float* q, uint8_t* bad) {
  for (int64_t i = 0; i < t.nq; ++i)
    for (int h = 0; h < job.heads; ++h) {
      const int64_t row = i * job.heads + h;
      bool finite = true;
      for (int d = 0; d < job.dim; ++d) {
        const float x = load_q(*job.p, t.q0 + i, t.head * job.heads + h, d);
        finite &= __builtin_fabsf(x) <= 0x1.fffffep127f;
        q[row * job.dim + d] = x;
      }
      bad[row] = !finite;
    }
}

// Stores a finished row: `x` its dims (overwritten), empty: no visible entry, bad: NaN.
static void store_row(const Job& job, const Tile& t, int64_t row, float* x, float lse, bool empty, bool bad) {
  const Problem& p = *job.p;
  const int64_t query = t.q0 + row / job.heads, head = t.head * job.heads + row % job.heads;
  const float nan = Scalar1::as_float(0x7fc00000);
  if (empty || bad) {
    lse = empty ? -__builtin_inff() : nan;
    for (int d = 0; d < job.dim; ++d) x[d] = empty ? 0.0f : nan;
  }
  const int64_t at = query * p.out_stride + head * p.out_head_stride;
  if (p.dtype == DType::kFloat32) {
    float* out = static_cast<float*>(p.out) + at;
    for (int d = 0; d < job.dim; ++d) out[d] = x[d] + 0.0f;
  } else {
    uint16_t* out = static_cast<uint16_t*>(p.out) + at;
    for (int d = 0; d < job.dim; ++d) out[d] = p.dtype == DType::kFloat16 ? float_to_half(x[d] + 0.0f) : float_to_bfloat16(x[d] + 0.0f);
  }
  if (p.lse) p.lse[query * p.lse_stride + head] = lse;
}

// Marks the rows that see an entry with a scale that is not finite.
static void mark_bad(const Job& job, const Tile& t, const Block& b, uint8_t* bad) {
  for (int64_t i = 0; i < t.nq; ++i) {
    uint64_t hit = 0;
    for (int w = 0; w < kWords; ++w) hit |= b.visible[i][w] & b.bad[w];
    for (int h = 0; hit && h < job.heads; ++h) bad[i * job.heads + h] = 1;
  }
}
