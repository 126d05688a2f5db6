"""``doctor``: checks of the installation."""

from __future__ import annotations

import argparse

from .common import add_plugins, add_results


def add(commands) -> None:
    """Declare the command."""
    doctor = commands.add_parser("doctor", help="check this installation and say what to fix",
                                 description="Check versions, data, device and the results folder.")
    doctor.add_argument("--quick", action="store_true",
                        help="without what takes seconds: loading plugins, PyTorch, data and compiled kernels")
    add_results(doctor)
    add_plugins(doctor)


def run(args: argparse.Namespace) -> int:
    from ..doctor import examine

    return examine(args.results, args.plugins, args.quick)
