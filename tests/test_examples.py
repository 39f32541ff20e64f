"""Each example runs as its first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest
from optional import need

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NEEDS = {"numpy_attention": [], "pytorch_cache": ["torch"], "transformers_generate": ["torch", "transformers"]}


def test_all_are_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_example(name, tmp_path):
    for package in NEEDS[name]:
        need(package)
    run = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout
