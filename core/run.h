// Runs a plan. On the CPU the call blocks and needs no lock: any number of threads may run plans at once.
#pragma once
#include "core/plan.h"

namespace strata_pa {

// Checks the lists in host memory, then runs. Step kWhole writes p.out and p.lse (which check_output has seen), the others launch.state.
void run(const Plan& plan, const Problem& p, const Launch& launch = {});

}  // namespace strata_pa
