// How the library was built.
#pragma once
#include <string>
#include <vector>

namespace strata_pa {

struct BuildFacts {
  std::string version, compiler, build_type, sanitize;
  std::vector<std::string> cpu_paths;
  std::string nvcc;  // its version; "": a build without CUDA
  std::vector<std::string> cuda_archs;
  std::string hip_compiler;  // "": a build without HIP
  std::vector<std::string> hip_archs;
};
BuildFacts build_facts();

}  // namespace strata_pa
