# STRATA_PA_CUDA_ARCHITECTURES: the list in ci/matrix.toml. Nothing else names an architecture but the table's min_sm (core/table.cpp);
# core/cuda_images.cpp reads what was built.
file(STRINGS ${PROJECT_SOURCE_DIR}/ci/matrix.toml listed REGEX "^cuda_architectures = ")
string(REGEX MATCHALL "[0-9]+" STRATA_PA_CUDA_ARCHITECTURES "${listed}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/ci/matrix.toml)
