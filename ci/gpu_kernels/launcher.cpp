// The host side of cuda/launch.h as C functions, so that the checks launch by the numbers that a host would use.
#include "../../cuda/launch.h"

using namespace strata_pa::cuda;

extern "C" {
int params_bytes() { return static_cast<int>(sizeof(Params)); }
void set_page(Params* p, int page_size) { set_page_size(*p, page_size); }
float scale_for(int kernel, double sm_scale) { return score_scale(static_cast<KernelId>(kernel), sm_scale); }
void config_for(int kernel, const Params* p, int head_dim, unsigned* grid, unsigned* block, unsigned* shared_bytes) {
  Config c = config(static_cast<KernelId>(kernel), *p, head_dim);
  *grid = c.grid, *block = c.block, *shared_bytes = c.shared_bytes;
}
}
