"""The fake CUDA driver from Python."""

from fakes import FakeArray, FakeDriver, Launch, Params, answer_on_the_cpu, at, birth, field_bytes

import strata_pa

__all__ = ["BUILT", "DRIVER", "NARROWED", "Driver", "FakeArray", "Launch", "Params", "answer_on_the_cpu", "at", "birth", "field_bytes"]

DRIVER = "STRATA_PA_CUDA_DRIVER"

# The architectures that have cubins, and whether this build was narrowed to some of them (STRATA_PA_CUDA_ARCHS).
LISTED = (75, 80, 86, 89, 90, 100, 103, 120)
BUILT = tuple(int(a[3:]) for a in strata_pa.build_info()["cuda_archs"] if a.startswith("sm_"))
NARROWED = BUILT != LISTED

# What the cards of the tests allow a block, by compute capability (CUDA's documentation); others: as the newest.
SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


class Driver(FakeDriver):
    def __init__(self, library, folder, cards, version=13000):
        super().__init__(library, folder)
        self.lib.fake_version(version)
        for sm in cards:
            self.lib.fake_card(sm, SHARED_KIB.get(sm, 227) << 10, f"Card {sm}".encode())
