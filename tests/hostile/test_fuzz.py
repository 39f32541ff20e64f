"""The fuzzer's corpus again, and a thousand inputs made from it for each entry; ci/fuzz goes on for longer."""

import importlib
import random
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
ENTRIES = sorted(p.name.removesuffix("_entry.py") for p in FUZZ.glob("*_entry.py"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES)
def test_corpus(entry, monkeypatch):
    monkeypatch.syspath_prepend(str(FUZZ))
    run = importlib.import_module(f"{entry}_entry").run
    corpus = [bytes.fromhex(line) for line in (FUZZ / f"{entry}_corpus.txt").read_text().splitlines()]
    outcomes = {run(data).split(":")[0] for data in corpus}
    assert any(outcome.startswith("ok") for outcome in outcomes)
    assert {"InvalidInput", "InvalidType", "UnsupportedProblem"} <= outcomes
    rng = random.Random(1)
    for _ in range(1000):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        run(bytes(data))
