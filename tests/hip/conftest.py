import platform
from pathlib import Path

import fake_hip
import pytest
from fakes import compile_library

import strata_pa


@pytest.fixture(scope="session")
def hip_library(tmp_path_factory):
    return compile_library(tmp_path_factory.mktemp("driver") / "libamdhip64.so", Path(__file__).with_name("fake_hip.cpp"))


@pytest.fixture
def hip(hip_library, tmp_path, monkeypatch):
    """hip("gfx1100", "gfx90a"): a fake driver with these cards takes the place of the real one; there is none of CUDA's."""
    if not fake_hip.BUILT:
        pytest.skip("this build is without HIP")
    for variable in strata_pa.environment_variables():
        monkeypatch.delenv(variable["name"], raising=False)
    monkeypatch.setenv("STRATA_PA_CUDA_DRIVER", str(tmp_path / "none.so"))

    def make(*cards, **options):
        made = fake_hip.Driver(hip_library, tmp_path, cards, **options)
        monkeypatch.setenv(fake_hip.DRIVER, str(made.path))
        return made

    yield make
    strata_pa.set_imma(None)


@pytest.fixture(scope="session", params=[32, 64])
def machine(request, tmp_path_factory):
    if platform.machine() != "x86_64":
        pytest.skip("the switch between fibers is written for x86-64")
    made = fake_hip.Machine(tmp_path_factory.mktemp("machine"), request.param)
    made.arch = fake_hip.WAVES[request.param]
    return made


@pytest.fixture
def card(hip, machine):
    """A card whose launches are computed by its kernels' own source."""
    if machine.arch not in fake_hip.BUILT:
        pytest.skip(f"this build has no code object for {machine.arch}")
    made = hip(machine.arch)
    made.hook(machine.run)
    return made
