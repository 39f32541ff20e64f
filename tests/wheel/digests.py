"""Runs every CPU kernel on the golden case "tiny" and compares the bytes; exit status 1 if one differs. Also what runs under an emulator.

Needs NumPy and strata_pa only. Prints {"architecture": ..., "isas": [...], "gil": ..., "right": [...], "wrong": [...]} as JSON.
"""

import hashlib
import json
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))
import inputs  # noqa: E402

import strata_pa  # noqa: E402


def main() -> int:
    q, kv, options = inputs.arguments(inputs.load("tiny"))
    kv = strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)
    options = {key: value for key, value in options.items() if value is not None}
    want = json.loads((GOLDEN / "portable.json").read_text())["cases"]["tiny"]
    got = {name: hashlib.sha256(strata_pa.prompt_attention(q, kv, kernel=name, **options).tobytes()).hexdigest() for name in want}
    cpu = strata_pa.capabilities()["devices"][0]
    result = {
        "architecture": cpu["architecture"],
        "isas": [isa["name"] for isa in cpu["isas"] if isa["supported"]],
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "right": [name for name in want if got[name] == want[name]],
        "wrong": [name for name in want if got[name] != want[name]],
    }
    print(json.dumps(result))
    return bool(result["wrong"])


if __name__ == "__main__":
    sys.exit(main())
