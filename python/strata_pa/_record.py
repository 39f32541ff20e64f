"""What every measurement says about itself: the machine, the versions, the date and the command."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
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
    }


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


def command_line(program: str) -> list[str]:
    """The command that runs now, with `program` in place of the file that Python was given."""
    return [*program.split(), *sys.argv[1:]]
