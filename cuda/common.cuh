// What the CUDA kernels share beyond query.cuh: copies into tiles.
#pragma once
#include "query.cuh"

namespace strata_pa {
namespace cuda {

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
      copy16(shared_address(tile + Tile::at(cell, lane & 3)), from);
    }
#endif
  }
  __device__ void commit() {
#ifdef STRATA_PA_SM80
    commit_copies();
#endif
  }
  // Lands the copy whose commit was followed by `newer` others.
  template <int newer>
  __device__ void land(unsigned char*, int) {
#ifdef STRATA_PA_SM80
    land_copies<newer>();
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

}  // namespace cuda
}  // namespace strata_pa
