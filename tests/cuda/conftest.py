from pathlib import Path

import fake
import pytest
from fakes import compile_library

import strata_pa


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    return compile_library(tmp_path_factory.mktemp("driver") / "libcuda.so", Path(__file__).with_name("fake_driver.cpp"))


@pytest.fixture
def driver(fake_library, tmp_path, monkeypatch):
    """driver(75, 90): a fake driver with these cards takes the place of the real one."""
    if not strata_pa.build_info()["cuda_archs"]:
        pytest.skip("this build is without CUDA")
    for variable in strata_pa.environment_variables():
        monkeypatch.delenv(variable["name"], raising=False)

    def make(*cards, **options):
        if fake.NARROWED and not set(cards) <= set(fake.BUILT):
            pytest.skip("this build is for some architectures only")
        made = fake.Driver(fake_library, tmp_path, cards, **options)
        monkeypatch.setenv(fake.DRIVER, str(made.path))
        return made

    yield make
    strata_pa.set_imma(None)
