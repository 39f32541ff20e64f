"""A pytest plugin: --shard 2/8 runs every eighth of the chosen tests, from the third on. `ci/gpu` spreads memcheck over processes by it.

--first NAME,...: these test functions come before the others, so that shards get as many of them as each other.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", metavar="I/N")
    parser.addoption("--first", default="", metavar="NAME,...")


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--shard").split("/"))
    names = [name for name in config.getoption("--first").split(",") if name]
    if unknown := set(names) - {name_of(item) for item in items}:
        raise pytest.UsageError(f"--first: no such tests among those chosen: {', '.join(sorted(unknown))}")
    items.sort(key=lambda item: names.index(name_of(item)) if name_of(item) in names else len(names))
    items[:] = items[first::step]


def name_of(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)
