// The host side of cuda/tile_launch.h and of cuda/exact_tile_sm80.h as C functions, for the checks.
#include "../../cuda/exact_tile_sm80.h"
#include "../../cuda/tile_launch.h"

using namespace strata_pa::cuda;

namespace {
struct RowsLaunch {
  rows::Launch launch;
  Rows rows;
};
}  // namespace

extern "C" {
int rows_launch_bytes() { return static_cast<int>(sizeof(RowsLaunch)); }
int rows_bytes() { return static_cast<int>(sizeof(Rows)); }
int rows_serves(const Params* p, long long pool_bytes) { return rows::serves(*p, pool_bytes); }
const int* rows_flags(const RowsLaunch* x) { return x->rows.flags; }
void rows_shape(const RowsLaunch* x, int* to) { to[0] = x->rows.tiles, to[1] = x->rows.splits, to[2] = x->rows.phases, to[3] = x->rows.item_tiles; }
// At most `most` launches are stored; *count says how many there are.
long long rows_plan(const Params* p, int dim, int processors, int max_shared, unsigned plain_shared, unsigned char* at, long long words, long long records,
                    RowsLaunch* to, int most, int* count) {
  *count = 0;
  return rows::plan(*p, dim, processors, max_shared, plain_shared, at, [&](const rows::Launch& launch, const Rows& r) {
    if (*count < most) to[*count] = {launch, r};
    ++*count;
  }, rows::Budget{words, records});
}
int tiles_bytes() { return static_cast<int>(sizeof(Tiles)); }
int tile_threads(int dim) { return tile::threads(dim); }
unsigned tile_shared_bytes(int dim) { return tile::shared_bytes(dim); }
int tile_serves(const Params* p, int dim, int processors, long long pool_bytes) { return tile::serves(*p, dim, processors, pool_bytes); }
unsigned union_grid(const Params* p, const Tiles* t) { return tile::union_grid(*p, *t); }
unsigned union_shared_bytes(const Tiles* t) { return tile::union_shared_bytes(*t); }
const char* union_symbol(const Tiles* t) { return tile::union_symbol(*t); }
unsigned cells_grid(const Params* p) { return tile::cells_grid(*p); }
unsigned rest_grid(const Params* p, const Tiles* t, int processors) { return tile::rest_grid(*p, *t, processors); }
long long tile_plan(const Params* p, int dim, int processors, unsigned char* at, Tiles* t) { return tile::plan(*p, dim, processors, at, *t); }
}
