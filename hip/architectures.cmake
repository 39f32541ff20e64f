# STRATA_PA_HIP_WAVE32, STRATA_PA_HIP_WAVE64: the lists in ci/matrix.toml, by the lanes of a wave. core/hip_images.cpp reads what was built.
foreach(wave 32 64)
  file(STRINGS ${PROJECT_SOURCE_DIR}/ci/matrix.toml listed REGEX "^hip_wave${wave} = ")
  string(REGEX MATCHALL "gfx[0-9a-f]+" STRATA_PA_HIP_WAVE${wave} "${listed}")
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/ci/matrix.toml)
