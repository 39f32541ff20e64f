"""`strata-pa info` and `strata-pa doctor`. Standard library only: what cannot be imported is reported, not raised."""

import importlib
import importlib.machinery
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDED = {"numpy": "install it with: pip install numpy", "strata_pa._core": "reinstall strata_pa for this Python"}


def broken_imports() -> dict[str, str]:
    """The needed modules that cannot be imported: name -> what is wrong and what to do."""
    broken = {}
    for name, advice in NEEDED.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # a damaged library may raise anything
            broken[name] = f"cannot be imported: {type(error).__name__}: {error}; {advice}{_compiled_files(name)}"
    return broken


def _compiled_files(name: str) -> str:
    """Which compiled modules lie in the package: one for another Python is the usual mistake."""
    if name != "strata_pa._core":
        return ""
    found = sorted(path.name for path in Path(__file__).parent.glob("_core.*") if path.suffix != ".pyi")
    return f" (it has {', '.join(found) or 'no compiled module'}; this Python loads _core{importlib.machinery.EXTENSION_SUFFIXES[0]})"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """What `info --json` prints. `problems` is empty if all is well; what cannot be known is None or empty."""
    result: dict[str, Any] = {
        "version": _version("strata_pa"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "system": platform.platform(),
        "package": str(Path(__file__).parent),
        "build": None,
        "devices": [],
        "kernels": [],
        "environment": [],
        "set_imma": None,
        "problems": [f"{name} {what}" for name, what in broken_imports().items()],
    }
    if any(problem.startswith("strata_pa._core") for problem in result["problems"]):
        return result
    from . import _core, info

    result |= {"build": info.build_info(), "kernels": info.kernels(), "set_imma": info.get_imma()}
    result["environment"] = [{**row, "value": os.environ.get(row["name"])} for row in info.environment_variables()]
    try:
        result["devices"] = info.capabilities()["devices"]
    except _core.Error as error:  # a variable with a value that it cannot have
        result["problems"].append(str(error))
    return result


def info_text(facts: dict[str, Any]) -> str:
    """The facts, to read."""
    return "\n".join(_info_lines(facts))


def _info_lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"strata_pa {facts['version'] or '(not installed as a distribution)'} in {facts['package']}"
    yield f"Python {facts['python']}, NumPy {facts['numpy'] or '(not installed)'}, {facts['system']}"
    if facts["build"]:
        build = facts["build"]
        yield ""
        yield "Build"
        for key, value in build.items():
            shown = ", ".join(value) or "none" if isinstance(value, list) else value or "none"
            yield f"  {key:12} {shown}"
    for device in facts["devices"]:
        yield ""
        named = [device.get("name"), device["architecture"], f"{device['num_threads']} threads" if device["num_threads"] else ""]
        yield f"Device {device['device']}: {', '.join(filter(None, named))}"
        opt_in = {row["name"] for row in facts["kernels"] if row["backend"] == device["backend"] and row["opt_in"]}
        for name in device["kernels"]:
            role = "when switched on" if name in opt_in else "runs where those before it cannot"
            yield f"  {name:12} {'the default' if name == device['default'] else role}"
        for name, reasons in device["refused"]:
            yield f"  {name:12} refused: {'; '.join(reasons)}"
        for isa in device["isas"]:
            use = "in use" if isa["name"] == device["architecture"] else "ok" if isa["supported"] else "not on this machine"
            yield f"  path {isa['name']:12} {use}; needs {isa['requires']}"
    if facts["kernels"]:
        yield ""
        yield "Kernels"
        for row in facts["kernels"]:
            built = "" if row["built"] else " (not in this build)"
            yield f"  {row['backend']:5} {row['name']:6} {row['what']}; {row['needs']}{built}"
    if facts["environment"]:
        yield ""
        yield "Environment"
        for row in facts["environment"]:
            value = "not set" if row["value"] is None else repr(row["value"])
            yield f"  {row['name']:24} {value:10} {row['meaning']} ({row['values']})"
        if facts["set_imma"] is not None:
            yield f"  set_imma({facts['set_imma']})"
    for problem in facts["problems"]:
        yield ""
        yield f"PROBLEM: {problem}"


def checks() -> list[tuple[str, str, str]]:
    """What `doctor` found: name, "ok", "failed" or "absent", detail."""
    broken = broken_imports()
    found = [(name, "failed" if name in broken else "ok", broken.get(name, "can be imported")) for name in NEEDED]
    if not broken:
        from .diagnosis import doctor

        found += [(check.name, check.status, check.detail) for check in doctor().checks]
    return found


def checks_text(found: list[tuple[str, str, str]]) -> str:
    width = max(len(name) for name, _, _ in found)
    lines = [f"{status:6}  {name:{width}}  {detail}" for name, status, detail in found]
    failed = sum(status == "failed" for _, status, _ in found)
    return "\n".join([*lines, f"{failed} of {len(found)} checks failed" if failed else f"all {len(found)} checks passed"])
