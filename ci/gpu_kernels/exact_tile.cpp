// The host side of cuda/tile_launch.h as C functions, for the checks.
#include "../../cuda/tile_launch.h"

using namespace strata_pa::cuda;

extern "C" {
int tiles_bytes() { return static_cast<int>(sizeof(Tiles)); }
unsigned tile_shared_bytes() { return tile::kSharedBytes; }
int tile_serves(const Params* p, long long pool_bytes) { return tile::serves(*p, pool_bytes); }
unsigned union_grid(const Params* p, const Tiles* t) { return tile::union_grid(*p, *t); }
unsigned rest_grid(const Params* p, const Tiles* t, int processors) { return tile::rest_grid(*p, *t, processors); }
long long tile_plan(const Params* p, int processors, unsigned char* at, Tiles* t) { return tile::plan(*p, processors, at, *t); }
}
