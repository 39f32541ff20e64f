#include "core/run.h"

namespace strata_pa {

void run(const Plan& plan, const Problem& p, const Launch& launch) {
  if (p.device.kind == DeviceKind::kCPU) check_lists(p);
  if (p.n_q > 0) plan.kernel->launch(*plan.kernel, p, plan.device, launch);
}

}  // namespace strata_pa
