"""Groups of processes, one per rank (tests/distributed_ranks.py), and what their answers must be."""

import json
import subprocess
import sys
from pathlib import Path

from problems import PORTABLE

PROGRAM = Path(__file__).parent / "distributed_ranks.py"
DEADLINE = 240  # seconds for a group of processes


def run_group(scenario, size, folder, *where):
    """What each rank printed; None of one that left without a word."""
    store = folder / f"store-{scenario}-{size}"
    command = [sys.executable, str(PROGRAM), scenario]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(store), *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        ends = [rank.communicate(timeout=DEADLINE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [
        f"rank {i} ended with {rank.returncode}: {ends[i][1][-1500:]}" for i, rank in enumerate(ranks) if rank.returncode not in (0, 7)
    ]
    assert not failed, "\n".join(failed)
    return [json.loads(ends[i][0].splitlines()[-1]) if rank.returncode == 0 else None for i, rank in enumerate(ranks)]


def check_digests(answers):
    """Every way of "schemes" gives the bytes of one device, and those of the golden files."""
    for answer in answers:
        assert len(answer["digests"]) >= 20
        for name, digests in answer["digests"].items():
            expected = {scheme: digests["golden" if scheme == "golden context" else "one"] for scheme in digests if scheme != "golden"}
            assert {scheme: digests[scheme] for scheme in expected} == expected, name
    for name in ("tiny", "page17", "widths"):
        assert all(answer["digests"][name]["golden"] == PORTABLE[name]["exact"] for answer in answers)
