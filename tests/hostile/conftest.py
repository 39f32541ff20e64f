import pytest

import strata_pa


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    for variable in strata_pa.environment_variables():
        if variable["name"] != "STRATA_PA_CUDA_DRIVER":
            monkeypatch.delenv(variable["name"], raising=False)
    yield
    strata_pa.set_imma(None)
