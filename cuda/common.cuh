// What the CUDA kernels share beyond query.cuh: copies into tiles, MMA instructions.
#pragma once
#include "query.cuh"

namespace strata_pa {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Runs ahead of the chunks of 32 entries: the ids of one chunk and the page table's words of the one before are in flight.
struct Feeder {
  int cell, physical, raw;

  // `entry`: this lane's in the first chunk, then in the chunk that is written.
  __device__ void start(const Params& p, const Query& query, int entry) {
    raw = query.raw(p, entry);
    look_up(p, query, entry);
  }
  // places: [2][32]. masks: [4], a bit per visible entry: still read when the places of two chunks later are written.
  __device__ void write(const Params& p, const Query& query, int entry, Place* places, uint32_t* masks) {
    const Place at = query.place(p, cell, physical);
    places[entry & 63] = at;
    const uint32_t mask = __ballot_sync(~0u, at.page >= 0);
    if ((entry & 31) == 0) masks[entry >> 5 & 3] = mask;
    look_up(p, query, entry + 32);
  }

 private:
  __device__ void look_up(const Params& p, const Query& query, int entry) {
    cell = query.cell(p, entry, raw);
    physical = query.physical(p, cell);
    raw = query.raw(p, entry + 32);
  }
};

// ---- copies: a warp's slice of a tile, 32 cells x 64 bytes

// Where the 16 bytes `part` of a cell lie. Padded: free of bank conflicts for 4-byte reads down columns. Swizzled: for ldmatrix.
struct PaddedTile {
  static constexpr int kBytes = 32 * shared::kTileRow;
  static __device__ __forceinline__ int at(int cell, int part) { return cell * shared::kTileRow + part * 16; }
};
struct SwizzledTile {
  static constexpr int kBytes = 32 * 64;
  static __device__ __forceinline__ int at(int cell, int part) { return cell * 64 + (part ^ (cell >> 1 & 3)) * 16; }
};

template <class Tile>
struct TileCopyAsync {
  __device__ void issue(unsigned char* tile, const int8_t* base, const PoolStride& stride, const Place* places, int lane) {
#ifdef STRATA_PA_SM80
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int cell = i * 8 + (lane >> 2);
      Place at = places[cell];
      at.page = max(at.page, 0);  // a masked cell: any codes will do, its weight is 0
      const int8_t* from = base + offset(stride, at) + (lane & 3) * 16;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile + Tile::at(cell, lane & 3))), "l"(from)
                   : "memory");
    }
#endif
  }
  __device__ void commit() {
#ifdef STRATA_PA_SM80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  // Lands the copy whose commit was followed by `newer` others.
  template <int newer>
  __device__ void land(unsigned char*, int) {
#ifdef STRATA_PA_SM80
    asm volatile("cp.async.wait_group %0;" ::"n"(newer) : "memory");
#endif
    __syncwarp();
  }
};

// The same through registers, for sm_75.
template <class Tile>
struct TileCopyRegisters {
  uint4 word[4];
  __device__ void issue(unsigned char*, const int8_t* base, const PoolStride& stride, const Place* places, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Place at = places[i * 8 + (lane >> 2)];
      at.page = max(at.page, 0);
      word[i] = __ldg(reinterpret_cast<const uint4*>(base + offset(stride, at) + (lane & 3) * 16));
    }
  }
  __device__ void commit() {}
  template <int newer>
  __device__ void land(unsigned char* tile, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(tile + Tile::at(i * 8 + (lane >> 2), lane & 3)) = word[i];
    __syncwarp();
  }
};

// ---- MMA

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

#ifdef STRATA_PA_SM80
__device__ __forceinline__ void mma_s8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
#endif

}  // namespace cuda
}  // namespace strata_pa
