"""Packages that some tests need and the package itself does not: skipped without them, unless they have to be there."""

import importlib
import os

import pytest

REQUIRED = os.environ.get("STRATA_PA_TEST_REQUIRE", "").split(",")  # as .ci/run sets it where it has installed them


def need(name):
    """The package, imported; a whole file is skipped without it."""
    if name in REQUIRED:
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"needs {name}")
