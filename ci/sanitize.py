"""Small launches of every kernel of the first GPU, for compute-sanitizer; portable answers are compared with the CPU's."""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "golden")]
import inputs  # noqa: E402

import strata_pa  # noqa: E402
from strata_pa._device import DeviceArray, ordinal_of, to_device  # noqa: E402


def problems():
    """The last queries of tiny and widths, shortened, whole and with pages that are not resident."""
    for name in ("tiny", "widths"):
        q, kv, options = inputs.arguments(inputs.load(name))
        options = options | {"ids": options["ids"][-4:], "widths": np.minimum(options["widths"][-4:], 131)}
        absent = np.where(np.arange(len(kv.page_table)) % 5 == 0, -1, kv.page_table).astype(np.int32)
        for what, table in (("", kv.page_table), (" masked", absent)):
            yield name + what, q[-4:], strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, table), options


def main() -> int:
    here = next((d for d in strata_pa.capabilities()["devices"] if d["backend"] == "cuda" and d["kernels"]), None)
    if here is None:
        print("no GPU that this build serves")
        return 1
    portable = {row["name"] for row in strata_pa.kernels() if row["backend"] == "cuda" and row["portable"]}
    wrong = 0
    for name, q, kv, options in problems():
        there, kv_there, options_there = to_device(q, kv, options, here["device"])
        for kernel in here["kernels"]:
            out = DeviceArray(np.full_like(q, np.nan), ordinal_of(here["device"]))
            strata_pa.prompt_attention(there, kv_there, out=out, kernel=kernel, **options_there)
            answer = out.read()
            right = not np.isnan(answer).any()
            if kernel in portable:
                right = answer.tobytes() == strata_pa.prompt_attention(q, kv, kernel=kernel, **options).tobytes()
            wrong += not right
            print(f"{name} {kernel}: {'ok' if right else 'WRONG'}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
