// The operations vocabulary for AVX-512 (F, BW, VL, DQ) with VNNI: see simd_scalar.h.

struct SimdAvx512 {
  static constexpr int L = 16;
  static constexpr int kRowsF = 6, kVecsF = 4;
  static constexpr int kRowsQ = 4, kVecsQ = 2;
  static constexpr int kVecsW = 4;
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  struct Wide {
    __m512i a;
  };

  static F set(float x) { return _mm512_set1_ps(x); }
  static I iset(int x) { return _mm512_set1_epi32(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F rint(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I to_int(F a) { return _mm512_cvtps_epi32(a); }
  static I as_int(F a) { return _mm512_castps_si512(a); }
  static F as_float(I a) { return _mm512_castsi512_ps(a); }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I ixor(I a, int b) { return _mm512_xor_si512(a, _mm512_set1_epi32(b)); }
  template <int k>
  static I shl(I a) {
    return _mm512_slli_epi32(a, k);
  }
  template <int k>
  static I sar(I a) {
    return _mm512_srai_epi32(a, k);
  }
  static F zero_below(F x, F d, float limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(d, set(limit), _CMP_NLT_UQ), x); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static I loadi(const void* p) { return _mm512_loadu_si512(p); }
  static void storei(void* p, I a) { _mm512_storeu_si512(p, a); }
  static I load4(const void* p) {
    int x;
    memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  static F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load_code(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }

  static M mask(uint64_t bits) { return static_cast<M>(bits); }
  static F keep(M m, F a, float other) { return _mm512_mask_mov_ps(set(other), m, a); }
  static bool all_finite(M m, F a) { return (m & ~_mm512_cmp_ps_mask(abs(a), set(0x1.fffffep127f), _CMP_LE_OQ) & 0xffff) == 0; }
  static float hmax(F a) { return _mm512_reduce_max_ps(a); }
  static float tree_tail(F a) {
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_hadd_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    x = _mm_hadd_ps(x, x);
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  static I dot(I acc, I u, I s) { return _mm512_dpbusd_epi32(acc, u, s); }
  static void transpose(const int8_t* const* rows, int64_t offset, I* out) {
    I a[16], b[16];
    for (int c = 0; c < 16; ++c) a[c] = loadi(rows[c] + offset);
    for (int c = 0; c < 8; ++c) {
      b[2 * c] = _mm512_unpacklo_epi32(a[2 * c], a[2 * c + 1]);
      b[2 * c + 1] = _mm512_unpackhi_epi32(a[2 * c], a[2 * c + 1]);
    }
    for (int c = 0; c < 4; ++c) {  // a[4c + j]: dwords j, 4 + j, 8 + j, 12 + j of rows 4c .. 4c + 3
      a[4 * c] = _mm512_unpacklo_epi64(b[4 * c], b[4 * c + 2]);
      a[4 * c + 1] = _mm512_unpackhi_epi64(b[4 * c], b[4 * c + 2]);
      a[4 * c + 2] = _mm512_unpacklo_epi64(b[4 * c + 1], b[4 * c + 3]);
      a[4 * c + 3] = _mm512_unpackhi_epi64(b[4 * c + 1], b[4 * c + 3]);
    }
    for (int j = 0; j < 4; ++j) {
      const I lo01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), hi01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
      const I lo23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88), hi23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
      out[j] = _mm512_shuffle_i32x4(lo01, lo23, 0x88);
      out[4 + j] = _mm512_shuffle_i32x4(hi01, hi23, 0x88);
      out[8 + j] = _mm512_shuffle_i32x4(lo01, lo23, 0xdd);
      out[12 + j] = _mm512_shuffle_i32x4(hi01, hi23, 0xdd);
    }
  }
  static void interleave(const int8_t* const* rows, int64_t offset, I* out) {
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    I r[4];
    for (int j = 0; j < 4; ++j) r[j] = _mm512_permutexvar_epi32(order, loadi(rows[j] + offset));
    const I lo01 = _mm512_unpacklo_epi8(r[0], r[1]), hi01 = _mm512_unpackhi_epi8(r[0], r[1]);
    const I lo23 = _mm512_unpacklo_epi8(r[2], r[3]), hi23 = _mm512_unpackhi_epi8(r[2], r[3]);
    out[0] = _mm512_unpacklo_epi16(lo01, lo23);
    out[1] = _mm512_unpackhi_epi16(lo01, lo23);
    out[2] = _mm512_unpacklo_epi16(hi01, hi23);
    out[3] = _mm512_unpackhi_epi16(hi01, hi23);
  }
  static I digits(I a) {
    const I order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(a, order);
  }
  static Wide wide_zero() { return {_mm512_setzero_si512()}; }
  static Wide wide_add(Wide w, I a) {
    const I lo = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(a)), hi = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(a, 1));
    return {_mm512_add_epi64(w.a, _mm512_add_epi64(lo, hi))};
  }
  static int64_t wide_sum(Wide w) { return _mm512_reduce_add_epi64(w.a); }
};
