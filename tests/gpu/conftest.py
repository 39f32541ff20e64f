from pathlib import Path

import on_gpu
import pytest

import strata_pa

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    mine = [item for item in items if HERE in Path(item.path).parents]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
    if mine and on_gpu.device() is None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="no GPU that this build serves"))


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for variable in strata_pa.environment_variables():
        if variable["name"] != "STRATA_PA_CUDA_DRIVER":
            monkeypatch.delenv(variable["name"], raising=False)
    yield
    strata_pa.set_imma(None)
