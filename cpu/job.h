// What the dispatcher hands to an instruction-set path: plain data, no inline functions.
#pragma once
#include "cpu/cpu.h"

namespace strata_pa::cpu {

constexpr int kMaxHeads = 16;     // query heads per KV head
constexpr int kMaxTileRows = 96;  // rows of a tile: neighbouring queries x query heads of one KV head
constexpr int kMaxDim = 256;
constexpr int kMaxGroups = 8;
constexpr int kBlock = 128;  // list entries loaded at once: a multiple of every kernel's chunk

// A call, with what all tiles share.
struct Job {
  const Problem* p;
  const RunOptions* options;
  int heads, dim, group, groups;
  float c;  // sm_scale * log2 e
};

// Rows [queries q0 .. q0 + nq) x [query heads of KV head `head`] of one sequence. nq is 1 where there are ids.
struct Tile {
  int seq, head;
  int64_t q0, nq;
  int64_t pos0;   // the cell of query q0
  int64_t begin;  // list entries: first block's first entry (a multiple of kBlock), and the end
  int64_t end;
};

// One compiled instruction-set path.
struct Path {
  Isa isa;
  int64_t (*scratch)(Kernel, const Job&, int rows, int64_t entries);  // bytes, 64-byte aligned pieces
  void (*run)(Kernel, const Job&, const Tile&, char* scratch);
  int64_t (*peak)(int64_t rounds, char* bytes);  // path.h; null: no instruction for byte dot products
};
extern const Path kScalarPath;
#ifdef STRATA_PA_X86
extern const Path kAvx2Path, kAvxVnniPath, kAvx512Path;
#endif

}  // namespace strata_pa::cpu
