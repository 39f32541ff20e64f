// The operations vocabulary for AVX2 + FMA + F16C (and AVX-VNNI): see simd_scalar.h.

template <bool kVnni>
struct SimdAvx2 {
  static constexpr int L = 8;
  static constexpr int kRowsF = 6, kVecsF = 2;
  static constexpr int kRowsQ = 2, kVecsQ = 2;
  static constexpr int kVecsW = 2;
  using F = __m256;
  using I = __m256i;
  using M = uint32_t;
  struct Wide {
    __m256i a;
  };

  static F set(float x) { return _mm256_set1_ps(x); }
  static I iset(int x) { return _mm256_set1_epi32(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F rint(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I to_int(F a) { return _mm256_cvtps_epi32(a); }
  static I as_int(F a) { return _mm256_castps_si256(a); }
  static F as_float(I a) { return _mm256_castsi256_ps(a); }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I ixor(I a, int b) { return _mm256_xor_si256(a, _mm256_set1_epi32(b)); }
  template <int k>
  static I shl(I a) {
    return _mm256_slli_epi32(a, k);
  }
  template <int k>
  static I sar(I a) {
    return _mm256_srai_epi32(a, k);
  }
  static F zero_below(F x, F d, float limit) { return _mm256_andnot_ps(_mm256_cmp_ps(d, set(limit), _CMP_LT_OQ), x); }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static I loadi(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void storei(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  static I load4(const void* p) {
    int x;
    memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }
  static F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load_code(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }

  static M mask(uint64_t bits) { return static_cast<M>(bits) & 0xff; }
  static F lanes(M m) {  // all ones in the lanes of m
    const I bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return as_float(_mm256_cmpeq_epi32(_mm256_and_si256(iset(static_cast<int>(m)), bit), bit));
  }
  static F keep(M m, F a, float other) { return _mm256_blendv_ps(set(other), a, lanes(m)); }
  static bool all_finite(M m, F a) {
    unsigned ok = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(abs(a), set(0x1.fffffep127f), _CMP_LE_OQ)));
    return (m & ~ok) == 0;
  }
  static float hmax(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static float tree_tail(F a) {
    __m128 x = _mm_hadd_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_hadd_ps(x, x);
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  static I dot(I acc, I u, I s) {
#ifdef __AVXVNNI__
    if constexpr (kVnni) return _mm256_dpbusd_avx_epi32(acc, u, s);
#endif
    // Through 16 bits, where u8 x s8 pairs cannot saturate.
    const I even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const I odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return iadd(acc, iadd(even, odd));
  }
  static void transpose(const int8_t* const* rows, int64_t offset, I* out) {
    I a[8], b[8];
    for (int c = 0; c < 8; ++c) a[c] = loadi(rows[c] + offset);
    for (int c = 0; c < 4; ++c) {
      b[2 * c] = _mm256_unpacklo_epi32(a[2 * c], a[2 * c + 1]);
      b[2 * c + 1] = _mm256_unpackhi_epi32(a[2 * c], a[2 * c + 1]);
    }
    for (int c = 0; c < 2; ++c) {  // a[4c + j]: dwords j and 4 + j of rows 4c .. 4c + 3
      a[4 * c] = _mm256_unpacklo_epi64(b[4 * c], b[4 * c + 2]);
      a[4 * c + 1] = _mm256_unpackhi_epi64(b[4 * c], b[4 * c + 2]);
      a[4 * c + 2] = _mm256_unpacklo_epi64(b[4 * c + 1], b[4 * c + 3]);
      a[4 * c + 3] = _mm256_unpackhi_epi64(b[4 * c + 1], b[4 * c + 3]);
    }
    for (int j = 0; j < 4; ++j) {
      out[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
      out[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
  }
  static void interleave(const int8_t* const* rows, int64_t offset, I* out) {
    const I order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);  // so that the in-lane unpacks below end in ascending order
    I r[4];
    for (int j = 0; j < 4; ++j) r[j] = _mm256_permutevar8x32_epi32(loadi(rows[j] + offset), order);
    const I lo01 = _mm256_unpacklo_epi8(r[0], r[1]), hi01 = _mm256_unpackhi_epi8(r[0], r[1]);
    const I lo23 = _mm256_unpacklo_epi8(r[2], r[3]), hi23 = _mm256_unpackhi_epi8(r[2], r[3]);
    out[0] = _mm256_unpacklo_epi16(lo01, lo23);
    out[1] = _mm256_unpackhi_epi16(lo01, lo23);
    out[2] = _mm256_unpacklo_epi16(hi01, hi23);
    out[3] = _mm256_unpackhi_epi16(hi01, hi23);
  }
  static I digits(I a) {
    const I order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_shuffle_epi8(a, order);
  }
  static Wide wide_zero() { return {_mm256_setzero_si256()}; }
  static Wide wide_add(Wide w, I a) {
    const I lo = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(a)), hi = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(a, 1));
    return {_mm256_add_epi64(w.a, _mm256_add_epi64(lo, hi))};
  }
  static int64_t wide_sum(Wide w) {
    int64_t x[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), w.a);
    return (x[0] + x[1]) + (x[2] + x[3]);
  }
};
