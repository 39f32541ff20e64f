// exact for tiles of 4 neighbouring queries x 12 heads, head_dim 256, groups of 64 (docs/numerics.md, section 5): the rows of a tile walk the
// union of their cells, once for scores and anchors, once for the sums. The bytes are those of the plain form. See tile_launch.h.
//
// Scores come from int8 wgmma, cells by 3 digits x 48 rows. A score s = n + t is kept as one word, the bits of 2^t with n added to its exponent
// (less 127), so that any anchor is one more addition to it. The sums are four int32 planes per output, a warp owning 16 rows x 64 dims.
#include "exact_plain.cuh"
#include "exact_union.cuh"

namespace strata_pa {
namespace cuda {

#ifdef STRATA_PA_SM80
using namespace tile;

constexpr int kMaskedWord = -(254 << 23);
constexpr float kLowestScore = -250.0f, kLowestAnchor = -100.0f, kHighestAnchor = 250.0f;  // of what a word holds; the rest is another kernel's
constexpr float kLargestFactor = 0x1p60f;  // no score overflows below it

struct TileShared {
  float factors[4][kRows];
  float top[2][12][kRows];  // per warp: greatest n, greatest n + level
  int4 anchors[kRows];      // the least word, what to add to one for W and for L, b
  unsigned long long sums[kRows];
  unsigned long long full[kStages], empty[kStages];
  int next, bad;
};
static_assert(sizeof(TileShared) <= 8192, "");

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int newer>
__device__ __forceinline__ void land_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
}
__device__ __forceinline__ void barrier_init(uint32_t at, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t@done bra end;\n\tbra again;\n\tend:\n\t}" ::"r"(at),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void join_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// A matrix of rows of 128 bytes, swizzled, eight rows apart by 1024.
__device__ __forceinline__ uint64_t matrix(uint32_t at) { return (at & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62; }

// d (+)= 64 cells by 144 columns over 32 dims.
__device__ __forceinline__ void wgmma144(int (&d)[72], uint64_t a, uint64_t b, int more) {
  asm volatile(
      "{\n\t.reg .pred more;\n\tsetp.ne.b32 more, %74, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n144k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
      "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,"
      "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
      "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71"
      "}, %72, %73, more;\n\t}"
      :
        "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
        "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]),
        "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]),
        "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
        "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]),
        "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]),
        "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]),
        "+r"(d[63]), "+r"(d[64]), "+r"(d[65]), "+r"(d[66]), "+r"(d[67]), "+r"(d[68]), "+r"(d[69]), "+r"(d[70]), "+r"(d[71])
      : "l"(a), "l"(b), "r"(more));
}

template <int dtype>
__device__ __forceinline__ void load_q8(const Params& p, int64_t at, float (&x)[8]) {
  float y[4];
  load_q4<dtype>(p, at, y);
  x[0] = y[0], x[1] = y[1], x[2] = y[2], x[3] = y[3];
  load_q4<dtype>(p, at + 4, y);
  x[4] = y[0], x[5] = y[1], x[6] = y[2], x[7] = y[3];
}

struct TileBlock {
  const Params& p;
  const Tiles& w;
  unsigned char* const raw;  // digits of q, stages
  TileShared& s;
  const int tid, lane, warp, group, g, t;  // group: the warpgroup
  int query, kv, item;                     // the tile's first query
  int nt;                                  // tiles of 64 cells
  int first_cell;                          // without ids: the number of the first one
  const unsigned char* records;

  __device__ TileBlock(const Params& p, const Tiles& w, unsigned char* raw, TileShared& s)
      : p(p), w(w), raw(raw), s(s), tid(static_cast<int>(threadIdx.x)), lane(tid & 31), warp(tid >> 5), group(warp >> 2), g(lane >> 2), t(lane & 3) {}

  __device__ uint32_t stage(int i) const { return shared_address(raw) + kDigitBytes + i * kStageBytes; }
  __device__ uint32_t* words() const { return w.scores + static_cast<int64_t>(blockIdx.x) * (w.item_cells >> 6) * (kRows * 64); }

  // Takes on item i. False: it is another kernel's.
  __device__ bool start(int i) {
    item = i;
    kv = i % p.n_kv;
    query = (w.tiles - 1 - i / p.n_kv) * kQueries;
    if (p.ids) {
      if (w.flags[i]) return false;
      nt = (w.counts[i] + 63) >> 6;
      first_cell = 0;
      records = w.records + i * (w.item_cells >> 6) * kRecordBytes;
    } else {
      const int last = Span(p, min(query + kQueries, p.n_q) - 1).last;
      first_cell = Span(p, query).first & ~63;
      nt = last < first_cell ? 0 : ((last - first_cell) >> 6) + 1;
      records = w.records + (kv * (w.item_cells >> 6) + (first_cell >> 6)) * kRecordBytes;
    }
    return true;
  }

  // Digits of q as wgmma's second matrix: rows of digit h, then l, then m; two halves of 128 dims.
  __device__ void digits() {
    with_dtype(p, [&](auto dtype) {
#pragma unroll 2
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 4 + i, index = query + row / kHeads;
        float x[8] = {};
        if (index < p.n_q) load_q8<decltype(dtype)::value>(p, index * p.q_stride + (kv * kHeads + row % kHeads) * p.q_head_stride + lane * 8, x);
        float top = 0.0f;
        bool finite = true;
#pragma unroll
        for (int u = 0; u < 8; ++u) top = fmaxf(top, fabsf(x[u])), finite &= is_finite(x[u]);
#pragma unroll
        for (int o = 1; o < 8; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
        const float factor = __fmul_rn(__fmul_rn(top, kInv127), p.score_scale), scale = A::digit_scale(top);
        if (!finite || !(fabsf(factor) < kLargestFactor)) s.bad = 1;
        uint32_t digit[3][2] = {};
#pragma unroll
        for (int u = 0; u < 8; ++u) {
          const int low = A::fixed(x[u], scale), middle = low + (kBiasExact & 255), high = low + kBiasExact;
          digit[0][u >> 2] |= (high >> 16 & 255u) << 8 * (u & 3);
          digit[1][u >> 2] |= (middle >> 8 & 255u) << 8 * (u & 3);
          digit[2][u >> 2] |= (low & 255u) << 8 * (u & 3);
        }
        const int chunk = lane >> 1;
#pragma unroll
        for (int d = 0; d < 3; ++d) {
          const int r = d * kRows + row;
          *reinterpret_cast<uint2*>(raw + (chunk >> 3) * (3 * kRows * 128) + r * 128 + ((chunk ^ r) & 7) * 16 + (lane & 1) * 8) = make_uint2(digit[d][0], digit[d][1]);
        }
        if ((lane & 7) == 0) s.factors[lane >> 3][row] = factor;
      }
    });
  }

  // The places of this warp's 16 cells, one a lane (twice), of tile i.
  __device__ uint32_t places(int i, int at) const {
    return i < nt ? __ldg(reinterpret_cast<const uint32_t*>(records + i * kRecordBytes + at) + (warp & 3) * 16 + (lane & 15)) : 0;
  }
  // The warp's quarter of 64 cells, laid out as matrix() says, in two halves of 128 dims.
  __device__ void copy_codes(uint32_t to, const int8_t* pool, uint32_t place) const {
    const int chunk = lane & 15, odd = lane >> 4;
    const int8_t* const from = pool + chunk * 16;
    to += (chunk >> 3) * 8192 + ((warp & 3) * 16 + odd) * 128;
    const uint32_t swizzle = ((chunk ^ odd) & 7) * 16;
#pragma unroll
    for (int u = 0; u < 8; ++u)
      copy16(to + u * 256 + (swizzle ^ (u & 3) * 32), from + static_cast<uint64_t>(__shfl_sync(~0u, place, 2 * u + odd)) * 16);
  }
  __device__ void copy_record(uint32_t to, int i, int at, int bytes) const {
    const int j = (tid & 127) * 16;
    if (j < bytes) copy16(to + kCodeBytes + kWordBytes + j, records + i * kRecordBytes + at + j);
  }

  // Bits of the queries that may see a cell by its number.
  __device__ uint32_t in_reach(int cell) const {
    uint32_t mask = 0;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      const Span span(p, query + r);
      if (cell >= span.first && cell <= span.last && query + r < p.n_q) mask |= 1u << r;
    }
    return mask;
  }

  // Scores of all cells, as words; the anchors. Each warpgroup takes every third tile.
  __device__ void scores() {
    const int8_t* const pool = p.k + kv * p.k_stride.head;
    float top[12], raised[12];
#pragma unroll
    for (int u = 0; u < 12; ++u) top[u] = raised[u] = kMinusInf;
    auto issue = [&](int i, int st, uint32_t place) {
      copy_codes(stage(st), pool, place);
      copy_record(stage(st), i, kKScales, kVPlaces - kKScales);
    };
    if (group < nt) issue(group, group, places(group, 0));
    commit_copies();
    if (group + 3 < nt) issue(group + 3, group + 3, places(group + 3, 0));
    commit_copies();
    const int cell = (warp & 3) * 16 + g;
    uint32_t* const out = words() + t * 128;
    bool bad = false;
    int st = group;
    for (int i = group; i < nt; i += 3, st = st < 3 ? st + 3 : st - 3) {
      const uint32_t ahead = places(i + 6, 0);
      land_copies<1>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      join_warpgroup(group);
      const unsigned char* const record = raw + kDigitBytes + st * kStageBytes + kCodeBytes + kWordBytes;
      const uint2 ks0 = *reinterpret_cast<const uint2*>(record + cell * 8), ks1 = *reinterpret_cast<const uint2*>(record + cell * 8 + 64);
      const int at0 = *reinterpret_cast<const int*>(record + 512 + cell * 4), at1 = *reinterpret_cast<const int*>(record + 544 + cell * 4);
      const uint32_t a = stage(st), b = shared_address(raw);
      float x[24];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        int d[72];
        const uint32_t ai = a + (part >> 1) * 8192 + (part & 1) * 64, bi = b + (part >> 1) * (3 * kRows * 128) + (part & 1) * 64;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        wgmma144(d, matrix(ai), matrix(bi), 0);
        wgmma144(d, matrix(ai + 32), matrix(bi + 32), 1);
        asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int u = 0; u < 72; ++u) asm volatile("" : "+r"(d[u])::"memory");
        if (part == 3) {
          join_warpgroup(group);
          if (i + 6 < nt) issue(i + 6, st, ahead);
          commit_copies();
        }
        const uint32_t pair0 = part < 2 ? ks0.x : ks0.y, pair1 = part < 2 ? ks1.x : ks1.y;
        const float k0 = half_to_float(static_cast<uint16_t>(part & 1 ? pair0 >> 16 : pair0)), k1 = half_to_float(static_cast<uint16_t>(part & 1 ? pair1 >> 16 : pair1));
#pragma unroll
        for (int n = 0; n < 6; ++n) {
          const float2 f = *reinterpret_cast<const float2*>(&s.factors[part][n * 8 + t * 2]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int u = n * 4 + e;
            const float y = __fmul_rn(A::join(d[u], d[24 + u] * 256 + d[48 + u]), e & 1 ? f.y : f.x), k = e & 2 ? k1 : k0;
            x[u] = part == 0 ? __fmul_rn(y, k) : __fmaf_rn(y, k, x[u]);
          }
        }
      }
      uint32_t mask0 = at0 & 15, mask1 = at1 & 15;
      if (!p.ids) mask0 &= in_reach(first_cell + i * 64 + cell), mask1 &= in_reach(first_cell + i * 64 + cell + 8);
      bad |= ((at0 & kBadCell) && mask0) || ((at1 & kBadCell) && mask1);
      const float level0 = static_cast<float>(at0 >> 8), level1 = static_cast<float>(at1 >> 8);
      uint32_t* const even = out + static_cast<int64_t>(i) * (kRows * 64) + cell;
      uint32_t* const odd = out + static_cast<int64_t>(i) * (kRows * 64) + 64 + (cell ^ 16);
#pragma unroll
      for (int n = 0; n < 6; ++n) {
        // Rows 8n + 2t and the next: query 0 has rows 0 .. 11, and so on.
        const uint32_t bit = n == 0 ? 1u : n == 1 ? (t < 2 ? 1u : 2u) : n == 2 ? 2u : n == 3 ? 4u : n == 4 ? (t < 2 ? 4u : 8u) : 8u;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool on = ((e & 2 ? mask1 : mask0) & bit) != 0;
          const float y = fmaxf(x[n * 4 + e], kLowestScore), z = __fadd_rn(y, kMagic), whole = __fsub_rn(z, kMagic);
          const int word = __float_as_int(A::poly(__fsub_rn(y, whole))) + static_cast<int>(static_cast<uint32_t>(__float_as_int(z)) << 23) - (127 << 23);
          (e & 1 ? odd : even)[n * 512 + (e >> 1) * 8] = static_cast<uint32_t>(on ? word : kMaskedWord);
          const float seen = on ? whole : kMinusInf;
          const int u = n * 2 + (e & 1);
          top[u] = fmaxf(top[u], seen);
          raised[u] = fmaxf(raised[u], __fadd_rn(seen, e & 2 ? level1 : level0));
        }
      }
    }
    land_copies<0>();
    if (bad) s.bad = 1;
#pragma unroll
    for (int u = 0; u < 12; ++u) {
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) {
        top[u] = fmaxf(top[u], __shfl_xor_sync(~0u, top[u], o));
        raised[u] = fmaxf(raised[u], __shfl_xor_sync(~0u, raised[u], o));
      }
      if (g == 0) {
        const int row = (u >> 1) * 8 + t * 2 + (u & 1);
        s.top[0][warp][row] = top[u], s.top[1][warp][row] = raised[u];
      }
    }
  }

  __device__ void anchors() {
    if (tid >= kRows) return;
    float top = kMinusInf, raised = kMinusInf;
    for (int i = 0; i < 12; ++i) top = fmaxf(top, s.top[0][i][tid]), raised = fmaxf(raised, s.top[1][i][tid]);
    if (top > kHighestAnchor || (top < kLowestAnchor && top != kMinusInf)) s.bad = 1;
    const bool any = top != kMinusInf;
    const int anchor = any ? static_cast<int>(top) : 0, base = any ? static_cast<int>(fmaxf(kBFloor, __fsub_rn(raised, top))) : 0;
    s.top[0][0][tid] = top;
    s.anchors[tid] = make_int4((anchor - 125) * (1 << 23), (157 - anchor - base) * (1 << 23), (157 - anchor) * (1 << 23), base);
  }

  // V's tile i into stage st: copies by this warpgroup; the scores by one thread.
  __device__ void issue_codes(int i, int st, uint32_t place) const {
    copy_codes(stage(st), p.v + kv * p.v_stride.head, place);
    copy_record(stage(st), i, kVScales, kRecordBytes - kVScales);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&s.full[st])) : "memory");
  }
  __device__ void issue_words(int i, int st) const {
    if ((tid & 127) != 0) return;
    const uint32_t full = shared_address(&s.full[st]);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "n"(kWordBytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage(st) + kCodeBytes),
                 "l"(words() + static_cast<int64_t>(i) * (kRows * 64)), "n"(kWordBytes), "r"(full)
                 : "memory");
  }

  // The sums over all cells, and out. `uses`: a bit per stage, how often it was filled for sums, modulo 2.
  __device__ void sums(uint32_t& uses) {
    const int j = warp & 3, row = group * 16 + g;  // 16 rows per warpgroup, 64 dims per warp
    uint32_t sum_low = 0, sum_high = 0;
    int plane[4][8][4];
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int n = 0; n < 8; ++n) plane[d][n][0] = plane[d][n][1] = plane[d][n][2] = plane[d][n][3] = 0;
    // Offsets in a stage.
    const uint32_t word0 = kCodeBytes + row * 256 + t * 16 + (g & 1) * 64, word1 = word0 ^ 64;
    const uint32_t scale = kCodeBytes + kWordBytes + j * 128 + t * 8;
    const uint32_t code = (j >> 1) * 8192 + lane * 128 + (((j & 1) * 4 ^ lane) & 7) * 16;
    const uint32_t anchor = shared_address(&s.anchors[row]);
    const uint32_t full = shared_address(s.full), empty = shared_address(s.empty);
    uint32_t ahead = places(group + 3, kVPlaces);
    int turn = 0, st = 0;
    for (int i = 0; i < nt; ++i) {
      if (turn == group && i + 3 < nt) {
        const int later = st < 3 ? st + 3 : st - 3;
        barrier_wait(empty + later * 8, ~uses >> later & 1);
        issue_words(i + 3, later);
        issue_codes(i + 3, later, ahead);
        ahead = places(i + 6, kVPlaces);
      }
      turn = turn == 2 ? 0 : turn + 1;
      barrier_wait(full + st * 8, uses >> st & 1);
      const uint32_t at = stage(st);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t a[4][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int least, add, add_sum;
          asm volatile("{\n\t.reg .b32 base;\n\tld.shared.v4.b32 {%0,%1,%2,base}, [%3];\n\t}" : "=r"(least), "=r"(add), "=r"(add_sum) : "r"(anchor + r * 128) : "memory");
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            int x[4];
            uint32_t h0, h1;
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(at + (b ? word1 : word0) + r * 2048 + k * 128) : "memory");
            asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(h0), "=r"(h1) : "r"(at + scale + (k * 32 + b * 16) * 2) : "memory");
            const float v[4] = {half_to_float(static_cast<uint16_t>(h0)), half_to_float(static_cast<uint16_t>(h0 >> 16)),
                                half_to_float(static_cast<uint16_t>(h1)), half_to_float(static_cast<uint16_t>(h1 >> 16))};
#pragma unroll
            for (int u = 0; u < 4; ++u) x[u] = max(x[u], least);
            if (j == k * 2 + r) {  // L's terms are shared out among the four warps
#pragma unroll
              for (int u = 0; u < 4; ++u) {
                const int term = __float2int_rn(__int_as_float(x[u] + add_sum));
                asm("add.cc.u32 %0, %0, %2;\n\taddc.u32 %1, %1, 0;" : "+r"(sum_low), "+r"(sum_high) : "r"(term));
              }
            }
#pragma unroll
            for (int u = 0; u < 4; ++u) x[u] = __float2int_rn(__fmul_rn(__int_as_float(x[u] + add), v[u]));
            const uint32_t y0 = byte_permute(x[0], x[1], 0x5140), y1 = byte_permute(x[2], x[3], 0x5140);
            const uint32_t y2 = byte_permute(x[0], x[1], 0x7362), y3 = byte_permute(x[2], x[3], 0x7362);
            a[0][b * 2 + r] = byte_permute(y0, y1, 0x5410);
            a[1][b * 2 + r] = byte_permute(y0, y1, 0x7632);
            a[2][b * 2 + r] = byte_permute(y2, y3, 0x5410);
            a[3][b * 2 + r] = byte_permute(y2, y3, 0x7632);
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          uint32_t v[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                       : "r"((at + code + k * 4096) ^ c * 16) : "memory");
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const uint32_t selector = odd ? 0x7531 : 0x6420, b0 = byte_permute(v[0], v[1], selector), b1 = byte_permute(v[2], v[3], selector);
            mma_s8s8(plane[3][2 * c + odd], a[3], b0, b1, plane[3][2 * c + odd]);
#pragma unroll
            for (int d = 0; d < 3; ++d) mma_u8s8(plane[d][2 * c + odd], a[d], b0, b1, plane[d][2 * c + odd]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + st * 8);
      uses ^= 1u << st;
      st = st == kStages - 1 ? 0 : st + 1;
    }

    unsigned long long sum = static_cast<unsigned long long>(sum_high) << 32 | sum_low;
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (t == 0) atomicAdd(&s.sums[row + 8 * (j & 1)], sum);
    __syncthreads();
    with_dtype(p, [&](auto dtype) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = row + 8 * r, index = query + own / kHeads, head = kv * kHeads + own % kHeads;
        if (index >= p.n_q) continue;
        const float total = __ll2float_rn(static_cast<long long>(s.sums[own])), unit = shift(1.0f, static_cast<float>(s.anchors[own].w));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float x[4];
#pragma unroll
          for (int u = 0; u < 4; ++u) {
            const int n = 2 * c + (u & 1), e = 2 * r + (u >> 1);
            int64_t o = plane[3][n][e];
            o = (o << 8) + plane[2][n][e];
            o = (o << 8) + plane[1][n][e];
            o = (o << 8) + plane[0][n][e];
            x[u] = total > 0.0f ? __fadd_rn(__fmul_rn(divide_ordinary(__ll2float_rn(o), total), unit), 0.0f) : 0.0f;
          }
          store_out4<decltype(dtype)::value>(p, index * p.out_stride + head * p.out_head_stride + j * 64 + c * 16 + t * 4, x);
        }
      }
    });
    if (p.lse && tid < kRows && query + tid / kHeads < p.n_q) {
      const float top = s.top[0][0][tid], total = __ll2float_rn(static_cast<long long>(s.sums[tid]));
      p.lse[(query + tid / kHeads) * p.lse_stride + kv * kHeads + tid % kHeads] = top == kMinusInf ? kMinusInf : A::lse(top, __fmul_rn(total, 0x1p-30f));
    }
  }
};

__device__ __forceinline__ void tile_kernel(const Params& p, const Tiles& w) {
  extern __shared__ __align__(1024) unsigned char raw_tile[];
  TileShared& s = *reinterpret_cast<TileShared*>(raw_tile + kDigitBytes + kStages * kStageBytes);
  TileBlock b(p, w, raw_tile, s);
  if (b.tid < kStages) {
    barrier_init(shared_address(&s.full[b.tid]), 129);
    barrier_init(shared_address(&s.empty[b.tid]), kThreads / 32);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const int items = w.tiles * p.n_kv;
  uint32_t uses = 0;
  for (int item = static_cast<int>(blockIdx.x); item < items;) {
    if (b.tid == 0) s.next = atomicAdd(w.next, 1) + static_cast<int>(gridDim.x), s.bad = 0;
    if (b.tid < kRows) s.sums[b.tid] = 0;
    __syncthreads();
    if (b.start(item)) {
      b.digits();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      b.scores();
      __threadfence();
      asm volatile("fence.proxy.async;" ::: "memory");
      __syncthreads();
      b.anchors();
      __syncthreads();
      if (s.bad) {
        if (b.tid == 0) w.flags[item] = 1;
      } else {
        if (b.group < b.nt) {
          b.issue_words(b.group, b.group);
          b.issue_codes(b.group, b.group, b.places(b.group, kVPlaces));
        }
        b.sums(uses);
      }
    }
    item = s.next;
    __syncthreads();
  }
}
#endif

}  // namespace cuda
}  // namespace strata_pa

using strata_pa::cuda::Params;
using strata_pa::cuda::Tiles;

#ifdef STRATA_PA_SM80
#define STRATA_PA_BODY(call) strata_pa::cuda::call
#else
#define STRATA_PA_BODY(call)
#endif

extern "C" __global__ void __launch_bounds__(512, 4) strata_exact_union(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(union_kernel(p, w));
}
extern "C" __global__ void __launch_bounds__(256, 8) strata_exact_cells(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(cells_kernel(p, w));
}
extern "C" __global__ void __launch_bounds__(384, 1) strata_exact_tile_d256_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
  STRATA_PA_BODY(tile_kernel(p, w));
}
// The items that the kernels before have flagged, in the plain form.
extern "C" __global__ void __launch_bounds__(128, 2) strata_exact_rest_d256_g64(const __grid_constant__ Params p, const __grid_constant__ Tiles w) {
#ifdef STRATA_PA_SM80
  const int b = static_cast<int>(blockIdx.x), kv = b % p.n_kv, index = p.n_q - 1 - b / p.n_kv;  // as Query has it
  if (w.flags[(w.tiles - 1 - index / strata_pa::cuda::tile::kQueries) * p.n_kv + kv] == 0) return;
  strata_pa::cuda::exact_kernel<256, 64>(p);
#endif
}
