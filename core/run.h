// Runs a plan; any number of threads may run plans at once. On the CPU the call blocks. On a GPU it enqueues the work on launch.stream (an
// address; null: the legacy default stream): pointers are the device's, and the device is the one of cuda_device(ordinal).
#pragma once
#include "core/plan.h"

namespace strata_pa {

// Checks the lists in host memory, then runs. Step kWhole writes p.out and p.lse (which check_output has seen), the others launch.state.
void run(const Plan& plan, const Problem& p, const Launch& launch = {});

}  // namespace strata_pa
