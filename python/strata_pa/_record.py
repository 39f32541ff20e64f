"""What every measurement says about itself: the machine, the versions, the date and the command."""

import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import numpy as np

from .info import build_info, capabilities


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The machine as it is used: the CPUs that the process may run on, the instruction-set path in use."""
    devices = capabilities()["devices"]
    cpu = next(device for device in devices if device["backend"] == "cpu")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": available,
        "isa": cpu["architecture"],
        "isas": [isa["name"] for isa in cpu["isas"] if isa["supported"]],
        "architecture": platform.machine(),
        "system": platform.platform(),
        "devices": [device["device"] for device in devices],
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "scheduling": "real-time" if _real_time() else "normal",
    }


def _real_time() -> bool:
    """This process goes before all normal ones (`chrt -f`), so what else a machine does is not in its times."""
    return hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)


def versions() -> dict[str, str]:
    build = build_info()
    return {
        "strata_pa": build["version"],
        "compiler": build["compiler"],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def header(command: Sequence[str]) -> dict[str, Any]:
    """The first entries of a JSON record; `results` and others follow."""
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }


def outcome(results: Sequence[Any], refused: Sequence[Any]) -> dict[str, Any]:
    """The entries of a record for what was measured and what could not be."""
    return {
        "results": [asdict(r) | {"max_rel_err": None if math.isnan(r.max_rel_err) else r.max_rel_err} for r in results],  # JSON has no NaN
        "refused": [asdict(r) for r in refused],
    }


def command_line(program: str) -> list[str]:
    """The command that runs now, with `program` in place of the file that Python was given."""
    return [*program.split(), *sys.argv[1:]]
