#include "core/build_facts.h"

#include "core/cuda_images.h"
#include "core/hip_images.h"
#include "cpu/cpu.h"

namespace strata_pa {

BuildFacts build_facts() {
  BuildFacts facts;
  facts.version = STRATA_PA_VERSION;
#if defined(__clang__)
  facts.compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
  facts.compiler = "g++ " __VERSION__;
#else
  facts.compiler = "unknown";
#endif
  facts.build_type = STRATA_PA_BUILD_TYPE;
  facts.sanitize = STRATA_PA_SANITIZE;
  for (const cpu::Isa& isa : cpu::isas()) facts.cpu_paths.push_back(isa.name);
  facts.nvcc = cuda::built_images().compiler;
  facts.cuda_archs = cuda::built_archs();
  facts.hip_compiler = hip::built_images().compiler;
  facts.hip_archs = hip::built_archs();
  return facts;
}

}  // namespace strata_pa
