"""Check versions, data, device and the results folder."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Callable, Iterable

from packaging.requirements import Requirement

from ...core.errors import UserError
from .. import add_options, located

# Of extras, and what is so without them.
OPTIONAL = {"privacy": "epsilons of clipped uploads are looser bounds", "ray": "--ray cannot be used",
            "flower": "--engine flower cannot be used"}


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "results", "plugins")


def _requirements(extra: str = "") -> list[Requirement]:
    """What the suite needs here, or one of its extras alone; of a checkout that is not installed nothing is known."""
    try:
        every = [Requirement(text) for text in requires("fedcl_bench") or []]
    except PackageNotFoundError:
        return []
    return [each for each in every if (each.marker.evaluate({"extra": extra}) if each.marker else not extra)]


def _package(requirement: Requirement) -> str:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        raise UserError(f"{requirement.name} is missing: python -m pip install '{requirement}'") from None
    if not requirement.specifier.contains(installed, prereleases=True):
        raise UserError(f"{requirement.name} {installed}: need {requirement.specifier}; "
                        f"python -m pip install '{requirement}'")
    return f"{requirement.name} {installed}"


def _optional(extra: str) -> str:
    try:
        return ", ".join(map(_package, _requirements(extra)))
    except UserError as error:
        return f"optional: {error}; {OPTIONAL[extra]} until then"


def _data() -> str:
    from ...data.datasets import load_stream, statistics

    source, settings = located("ml-100k", None, {})
    counts = statistics(load_stream(source, settings))
    if wrong := [name for name, values in source.config.expected.items() if list(values) != counts[name]]:
        raise UserError(f"ml-100k: {', '.join(wrong)} differ from the expected counts; {source.path} is not the "
                        f"published file, reinstall recbole==1.2.0 or remove ./data/ml-100k")
    as_published = ", all block counts as published" if source.config.expected else ""
    return f"ml-100k: {sum(counts['interactions']):,} interactions{as_published}"


def _device() -> str:
    import torch

    threads = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores"
    if torch.cuda.is_available():
        return f"CUDA: {torch.cuda.get_device_name()} (--device cuda); {threads}"
    return f"no CUDA device, --device cpu is used; {threads}"


def _kernels() -> str:
    from ...kernels import ops

    if (why := ops.why_not()) is not None:
        return f"optional: {why}; PyTorch's operations are used, whose rounds of lists take several times as long"
    return "compiled kernels for this processor"


def _results(folder: Path) -> str:
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())  # runs make all below
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(f"results folder {folder}: cannot be written ({error.strerror}); use --results DIR") from None
    return f"results folder {folder} can be written"


def _plugins(folders: Iterable[Path]) -> str:
    from ...runs.registry import discover

    registry = discover(folders)
    if registry.broken:
        raise UserError("plugins that cannot be loaded: " + "; ".join(registry.broken.values()))
    return f"{len(registry.plugins)} plugins load"


def run(args: argparse.Namespace) -> int:
    """Print every check; return 0 if all pass, else 1."""
    python = f"Python {platform.python_version()}"
    checks: list[Callable[[], str]] = [lambda: python, *(lambda r=r: _package(r) for r in _requirements()),
                                       *(lambda e=e: _optional(e) for e in OPTIONAL if _requirements(e))]
    failed = 0
    for check in [*checks, lambda: _plugins(args.plugins), _data, _device, _kernels, lambda: _results(args.results)]:
        try:
            print(f"ok    {check()}")
        except UserError as error:
            failed += 1
            print(f"FIX   {' '.join(str(error).split())}")
    print(f"{failed} to fix." if failed else "Everything is in order.")
    return 1 if failed else 0
