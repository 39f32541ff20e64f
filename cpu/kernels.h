// All CPU kernels, for inclusion inside an isa_*.cpp's anonymous namespace (see simd_scalar.h for why).
#include "cpu/steps.h"
#include "cpu/block.h"
#include "cpu/fp32.h"
#include "cpu/digits.h"
#include "cpu/imma.h"
#include "cpu/exact.h"
#include "cpu/path.h"
