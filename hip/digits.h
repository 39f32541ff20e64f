// What imma and exact share: digits of q, scores and weighted sums through dot products of signed bytes (docs/numerics.md, section 3).
#pragma once
#include "block.h"

namespace strata_pa {
namespace hip {

// A digit that is an unsigned byte is kept as the signed byte that is 128 less; 128 times the sum of the codes makes up for it.
constexpr uint32_t kOnes = 0x01010101;

// Word i of the result holds byte i of the four words.
__device__ __forceinline__ void transpose(uint32_t (&x)[4]) {
  const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  const uint32_t c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, b, 0x5410), x[1] = __byte_perm(a, b, 0x7632);
  x[2] = __byte_perm(c, d, 0x5410), x[3] = __byte_perm(c, d, 0x7632);
}

// bias: kBiasImma or kBiasExact, which says whether the low digit is unsigned or signed.
template <int D, int R, int bias>
struct DigitBlock : Block<D, R, 32> {
  using Base = Block<D, R, 32>;
  using Base::kColumns;
  using Base::kPitch;
  using Base::kRows;
  using Base::kSets;
  using Base::kThreads;
  static constexpr int kOwn = R / 4;  // rows of a thread's scores
  static constexpr bool kUnsigned = bias == kBiasImma;
  static_assert(kColumns == 8, "four entries of a column make a word of weights, eight such words a chunk");

  uint4* q;        // [3][D / 16][R]: digits, high first; a word is four dims
  float* most;     // [R][groups]: max |q|; then imma's unit of a chunk's weights
  float* factor;   // [R][groups]: f of section 3
  uint4* weights;  // [R][groups][8]: the digits, lowest first, of the entries column + 8 i

  __device__ DigitBlock(const Params& p, unsigned char* at) : Base(p, at) {
    const int groups = this->groups, tid = this->tid;
    q = reinterpret_cast<uint4*>(this->rest);
    weights = reinterpret_cast<uint4*>(this->rest + 3 * D * R);
    most = reinterpret_cast<float*>(this->rest + 3 * D * R + R * groups * 8 * 16);
    factor = most + R * groups;
    for (int i = tid; i < R * groups; i += kThreads) most[i] = 0.0f;
    __syncthreads();
    // The bits of numbers that are not negative are in order as integers.
    this->each_q([&](int row, int d, const float (&x)[4]) {
      const float x_most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
      atomicMax(reinterpret_cast<int*>(most) + row * groups + (d >> this->group_log2), __float_as_int(x_most));
    });
    __syncthreads();
    for (int i = tid; i < R * groups; i += kThreads) factor[i] = __fmul_rn(__fmul_rn(most[i], kInv127), p.score_scale);
    this->each_q([&](int row, int d, const float (&x)[4]) {
      const float scale = A::digit_scale(most[row * groups + (d >> this->group_log2)]);
      uint32_t digit[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) digit[i] = digits(A::fixed(x[i], scale));
      transpose(digit);
      uint32_t* const words = reinterpret_cast<uint32_t*>(q + (d / 16 * R + row)) + d / 4 % 4;
#pragma unroll
      for (int i = 0; i < 3; ++i) words[i * (D / 16) * R * 4] = digit[2 - i];
    });
  }

  // The three digits of X as signed bytes, the lowest first; the top byte is not one of them.
  __device__ static uint32_t digits(int X) {
    return (static_cast<uint32_t>(X) + bias) ^ 0x8080;
  }

  // The scores of the thread's entry for its rows.
  __device__ __forceinline__ void scores() const {
    const int entry = this->entry(), first = this->part() * kOwn, steps = this->p.group / 16;
    const uint4* k = this->codes(this->from->k, this->k_at[entry]);
    float s[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) s[r] = 0.0f;
    const uint4* digit = q + first;
    uint4 next = __ldg(k);
#pragma unroll 1
    for (int g = 0; g < this->groups; ++g) {
      int h[kOwn], l[kOwn], m[kOwn], codes = 0;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) h[r] = l[r] = m[r] = 0;
#pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const uint4 now = next;
        if (g + 1 < this->groups || i + 1 < steps) next = __ldg(++k);
        if constexpr (kUnsigned) codes = dot16(now, {kOnes, kOnes, kOnes, kOnes}, codes);
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
          h[r] = dot16(now, digit[r], h[r]);
          l[r] = dot16(now, digit[r + D / 16 * R], l[r]);
          m[r] = dot16(now, digit[r + 2 * (D / 16) * R], m[r]);
        }
        digit += R;
      }
      const float scale = this->k_scale[entry * this->groups + g];
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        const float u = __fmul_rn(A::join(h[r], l[r] * 256 + m[r] + 128 * codes), factor[(first + r) * this->groups + g]);
        s[r] = g == 0 ? __fmul_rn(u, scale) : __fmaf_rn(u, scale, s[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) this->score[(first + r) * kPitch + entry] = s[r];
  }

  // The weights' digits, one word for each of the four entries, of the thread's row and column.
  __device__ __forceinline__ void store_weights(int g, uint32_t (&digit)[4]) const {
    transpose(digit);
    weights[(this->row() * this->groups + g) * 8 + this->column()] = uint4{digit[0], digit[1], digit[2], digit[3]};
  }

  // The chunk's codes of v in the thread's four dims: word i of `v[c]` is dim i, entries c + 8 j.
  __device__ __forceinline__ void load_v(uint32_t (&v)[8][4]) const {
    const int8_t* const pool = this->from->v + this->quad() * 4;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[c][i] = __ldg(reinterpret_cast<const uint32_t*>(pool + this->v_at[c + 8 * i]));
      transpose(v[c]);
    }
  }
  // sum[digit][dim] over the chunk, for the thread's i-th row.
  template <int n>
  __device__ __forceinline__ void weighted(const uint32_t (&v)[8][4], int i, int (&sum)[n][4]) const {
    const int row = min(this->set() + kSets * i, R - 1), g = this->quad() * 4 >> this->group_log2;
    machine::in_order();
    const uint4* const w = weights + (row * this->groups + g) * 8;
#pragma unroll
    for (int x = 0; x < n; ++x) sum[x][0] = sum[x][1] = sum[x][2] = sum[x][3] = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint4 word = w[c];
      const uint32_t digit[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int x = 0; x < n; ++x)
#pragma unroll
        for (int d = 0; d < 4; ++d) sum[x][d] = machine::dot4(digit[x], v[c][d], sum[x][d]);
    }
  }

  static __device__ __forceinline__ int dot16(const uint4& a, const uint4& b, int sum) {
    return machine::dot4(a.w, b.w, machine::dot4(a.z, b.z, machine::dot4(a.y, b.y, machine::dot4(a.x, b.x, sum))));
  }
};

}  // namespace hip
}  // namespace strata_pa
