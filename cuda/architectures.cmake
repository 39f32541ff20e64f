# The one list of CUDA architectures. Every kernel file gets a cubin for each of them from its own least one (the sm in the file's name) up,
# as far as the compiler knows them, and PTX of the lowest and the highest, for cards between and above. core/cuda_images.cpp reads what was
# built; nothing else names an architecture but the table's min_sm (core/table.cpp).
set(STRATA_PA_CUDA_ARCHITECTURES 75 80 86 89 90 100 103 120)
