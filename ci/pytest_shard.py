"""A pytest plugin: --shard 2/8 runs every eighth of the chosen tests, from the third on. `ci/gpu` spreads memcheck over processes by it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", metavar="I/N")


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--shard").split("/"))
    items[:] = items[first::step]
