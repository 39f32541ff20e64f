// The operations vocabulary in plain C++: the readable path, for any CPU. Includes are made inside the ISA file's anonymous namespace, so that
// no inline function compiled for one instruction set can be linked into another's code.
// Vocabulary beyond core/arith.h: L lanes; load/store; a mask M; dot products of bytes; the byte shuffles that the packed layouts need.

struct Scalar1 {  // one number: for per-row steps
  using F = float;
  using I = int32_t;
  static F set(float x) { return x; }
  static I iset(int x) { return x; }
  static F fma(F a, F b, F c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    // The product is exact in binary64. Rounding the sum twice is right unless it lies on a midpoint of FP32 numbers, or near their subnormals.
    double s = static_cast<double>(a) * b + c;
    int64_t bits;
    memcpy(&bits, &s, 8);
    if (((bits & 0x1fffffff) != 0x10000000 && __builtin_fabs(s) >= 0x1p-125) || s == 0) return static_cast<float>(s);
    return fmaf(a, b, c);
#endif
  }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F rint(F x) {
    float a = __builtin_fabsf(x);
    return a < 0x1p23f ? __builtin_copysignf((a + 0x1p23f) - 0x1p23f, x) : x;
  }
  static F max(F a, F b) { return a > b ? a : b; }
  static F to_float(I x) { return static_cast<float>(x); }
  // Out of range (a bad row's garbage) gives the value the vector instructions give.
  static I to_int(F x) { return x >= -0x1p31f && x < 0x1p31f ? static_cast<I>(x) : INT32_MIN; }
  static I as_int(F x) {
    I i;
    memcpy(&i, &x, 4);
    return i;
  }
  static F as_float(I i) {
    F x;
    memcpy(&x, &i, 4);
    return x;
  }
  static I iadd(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
  static I isub(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
  template <int k>
  static I shl(I a) {
    return static_cast<I>(static_cast<uint32_t>(a) << k);
  }
  template <int k>
  static I sar(I a) {
    return a >> k;
  }
  static F zero_below(F x, F d, float limit) { return d < limit ? 0.0f : x; }
};

#define STRATA_PA_LANES for (int i = 0; i < L; ++i)

struct SimdScalar {
  static constexpr int L = 8;
  static constexpr int kRowsF = 4, kVecsF = 1;  // register tile of the FP32 products: rows x vectors
  static constexpr int kRowsQ = 4, kVecsQ = 1;  // of q.k by digits
  static constexpr int kVecsW = 4;              // of p.v by digits: vectors of one row
  struct F {
    float v[L];
  };
  struct I {
    int32_t v[L];
  };
  using M = uint32_t;  // bit i: lane i
  struct Wide {
    int64_t v[L];
  };

  static F set(float x) {
    F r;
    STRATA_PA_LANES r.v[i] = x;
    return r;
  }
  static I iset(int x) {
    I r;
    STRATA_PA_LANES r.v[i] = x;
    return r;
  }
#define STRATA_PA_OP2(T, name)            \
  static T name(T a, T b) {               \
    T r;                                  \
    STRATA_PA_LANES r.v[i] = Scalar1::name(a.v[i], b.v[i]); \
    return r;                             \
  }
  STRATA_PA_OP2(F, add)
  STRATA_PA_OP2(F, sub)
  STRATA_PA_OP2(F, mul)
  STRATA_PA_OP2(F, div)
  STRATA_PA_OP2(F, max)
  STRATA_PA_OP2(I, iadd)
  STRATA_PA_OP2(I, isub)
#undef STRATA_PA_OP2
#define STRATA_PA_OP1(R, name, T)         \
  static R name(T a) {                    \
    R r;                                  \
    STRATA_PA_LANES r.v[i] = Scalar1::name(a.v[i]); \
    return r;                             \
  }
  STRATA_PA_OP1(F, rint, F)
  STRATA_PA_OP1(F, to_float, I)
  STRATA_PA_OP1(I, to_int, F)
  STRATA_PA_OP1(I, as_int, F)
  STRATA_PA_OP1(F, as_float, I)
#undef STRATA_PA_OP1
  static F fma(F a, F b, F c) {
    F r;
    STRATA_PA_LANES r.v[i] = Scalar1::fma(a.v[i], b.v[i], c.v[i]);
    return r;
  }
  template <int k>
  static I shl(I a) {
    STRATA_PA_LANES a.v[i] = Scalar1::shl<k>(a.v[i]);
    return a;
  }
  template <int k>
  static I sar(I a) {
    STRATA_PA_LANES a.v[i] = a.v[i] >> k;
    return a;
  }
  static I ixor(I a, int b) {
    STRATA_PA_LANES a.v[i] ^= b;
    return a;
  }
  static F abs(F a) {
    STRATA_PA_LANES a.v[i] = __builtin_fabsf(a.v[i]);
    return a;
  }
  static F zero_below(F x, F d, float limit) {
    STRATA_PA_LANES x.v[i] = Scalar1::zero_below(x.v[i], d.v[i], limit);
    return x;
  }

  static F load(const float* p) {
    F r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static void store(float* p, F a) { memcpy(p, a.v, sizeof a.v); }
  static I loadi(const void* p) {
    I r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static void storei(void* p, I a) { memcpy(p, a.v, sizeof a.v); }
  static I load4(const void* p) {  // four bytes, in every lane
    int32_t x;
    memcpy(&x, p, 4);
    return iset(x);
  }
  static F load_half(const uint16_t* p) {
    F r;
    STRATA_PA_LANES r.v[i] = half_to_float(p[i]);
    return r;
  }
  static F load_code(const int8_t* p) {
    F r;
    STRATA_PA_LANES r.v[i] = static_cast<float>(p[i]);
    return r;
  }

  static M mask(uint64_t bits) { return static_cast<M>(bits) & ((1u << L) - 1); }
  static F keep(M m, F a, float other) {  // lanes outside m become `other`
    STRATA_PA_LANES a.v[i] = m >> i & 1 ? a.v[i] : other;
    return a;
  }
  static bool all_finite(M m, F a) {  // of the lanes in m
    bool ok = true;
    STRATA_PA_LANES ok &= !(m >> i & 1) || __builtin_fabsf(a.v[i]) <= 0x1.fffffep127f;
    return ok;
  }
  static float hmax(F a) {
    float r = a.v[0];
    for (int i = 1; i < L; ++i) r = Scalar1::max(r, a.v[i]);
    return r;
  }
  static float tree_tail(F a) { return ((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])) + ((a.v[4] + a.v[5]) + (a.v[6] + a.v[7])); }

  // acc + sum of four products of unsigned by signed bytes, per lane.
  static I dot(I acc, I u, I s) {
    STRATA_PA_LANES {
      uint8_t a[4];
      int8_t b[4];
      memcpy(a, &u.v[i], 4);
      memcpy(b, &s.v[i], 4);
      acc.v[i] += a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
    }
    return acc;
  }
  // out[j], lane c: bytes 4j .. 4j + 3 of row c.
  static void transpose(const int8_t* const* rows, int64_t offset, I* out) {
    for (int c = 0; c < L; ++c)
      for (int j = 0; j < L; ++j) memcpy(&out[j].v[c], rows[c] + offset + 4 * j, 4);
  }
  // out[j], lane i: byte L * j + i of the four rows; j = 0 .. 3.
  static void interleave(const int8_t* const* rows, int64_t offset, I* out) {
    for (int j = 0; j < 4; ++j)
      STRATA_PA_LANES {
        const int8_t b[4] = {rows[0][offset + L * j + i], rows[1][offset + L * j + i], rows[2][offset + L * j + i], rows[3][offset + L * j + i]};
        memcpy(&out[j].v[i], b, 4);
      }
  }
  // Within each four lanes: lane j gets byte j of the four.
  static I digits(I a) {
    I r;
    STRATA_PA_LANES {
      uint32_t x = 0;
      for (int k = 0; k < 4; ++k) x |= (static_cast<uint32_t>(a.v[(i & ~3) + k]) >> (8 * (i & 3)) & 255) << (8 * k);
      r.v[i] = static_cast<int32_t>(x);
    }
    return r;
  }
  static Wide wide_zero() { return Wide{}; }
  static Wide wide_add(Wide w, I a) {
    STRATA_PA_LANES w.v[i] += a.v[i];
    return w;
  }
  static int64_t wide_sum(Wide w) {
    int64_t r = 0;
    STRATA_PA_LANES r += w.v[i];
    return r;
  }
};
#undef STRATA_PA_LANES
