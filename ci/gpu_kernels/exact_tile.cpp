// The host side of cuda/tile_launch.h and of cuda/exact_tile_sm80.h as C functions, for the checks.
#include "../../cuda/exact_tile_sm80.h"
#include "../../cuda/tile_launch.h"

using namespace strata_pa::cuda;

namespace {
template <class L, class R>
struct Step {
  L launch;
  R rest;
};
using RowsStep = Step<rows::Launch, Rows>;
using TileStep = Step<tile::Launch, Tiles>;

// At most `most` launches are stored; *count says how many there are.
template <class S>
auto store(S* to, int most, int* count) {
  *count = 0;
  return [=](const auto& launch, const auto& rest) {
    if (*count < most) to[*count] = {launch, rest};
    ++*count;
  };
}
}  // namespace

extern "C" {
int rows_launch_bytes() { return static_cast<int>(sizeof(RowsStep)); }
int rows_bytes() { return static_cast<int>(sizeof(Rows)); }
int rows_serves(const Params* p, int, int, long long pool_bytes) { return rows::serves(*p, pool_bytes); }
const int* rows_flags(const RowsStep* x) { return x->rest.flags; }
void rows_shape(const RowsStep* x, int* to) { to[0] = x->rest.tiles, to[1] = x->rest.splits, to[2] = x->rest.phases, to[3] = x->rest.item_tiles; }
long long rows_plan(const Params* p, int dim, int processors, int max_shared, unsigned plain_shared, unsigned char* at, long long words, long long records,
                    RowsStep* to, int most, int* count) {
  return rows::plan(*p, dim, processors, max_shared, plain_shared, at, store(to, most, count), rows::Budget{words, records});
}

int tile_launch_bytes() { return static_cast<int>(sizeof(TileStep)); }
int tile_bytes() { return static_cast<int>(sizeof(Tiles)); }
int tile_serves(const Params* p, int dim, int processors, long long pool_bytes) { return tile::shape(*p, dim, processors, pool_bytes).served; }
const int* tile_flags(const TileStep* x) { return x->rest.flags; }
void tile_shape(const TileStep* x, int* to) { to[0] = x->rest.tiles, to[1] = x->rest.splits, to[2] = x->rest.writers, to[3] = x->rest.block_tiles; }
const char* tile_union(const TileStep* x) { return tile::union_symbol(x->rest); }
long long tile_plan(const Params* p, int dim, int processors, int, unsigned plain_shared, unsigned char* at, long long words, long long, TileStep* to, int most,
                    int* count) {
  return tile::plan(*p, dim, processors, tile::shape(*p, dim, processors, 0, words), plain_shared, at, store(to, most, count));
}
}
