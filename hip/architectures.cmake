# The one list of AMD architectures, by the lanes of a wave. Every kernel file gets a code object for each of them; a card runs the one of exactly
# its name. core/hip_images.cpp reads what was built; nothing else names an architecture.
set(STRATA_PA_HIP_WAVE64 gfx906 gfx90a gfx942 gfx950)
set(STRATA_PA_HIP_WAVE32 gfx1030 gfx1100 gfx1101 gfx1102 gfx1151 gfx1200 gfx1201)
