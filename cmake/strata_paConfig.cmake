# The target strata_pa::strata_pa: the shared library and its header.
include("${CMAKE_CURRENT_LIST_DIR}/strata_paTargets.cmake")
