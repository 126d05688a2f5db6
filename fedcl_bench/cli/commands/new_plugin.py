"""Write a commented plugin file that runs as it stands, and its test."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

from ...core.errors import UserError, require_known
from ...core.files import shipped
from ...data.source import configured
from ...runs.metadata import read_all
from .. import writing

KINDS = ("method", "backbone", "metric", "attack")
METHODS = {"server": "the server averages item tables over blocks (end_step, aggregate); the default",
           "penalty": "item rows are pulled to those of the block before (pull)",
           "proximal": "public parameters are pulled to what the server sent in the round (sees_rows, local_loss)",
           "upload": "clients send their loss, and weigh it by the server's answer (uploads, end_local, end_round)",
           "replay": "clients keep items and train on them again (client_state, replayed_items, local_loss)"}
TEMPLATES = Path(__file__).resolve().parents[1] / "templates"

EXAMPLES = """\
examples:
  run_bench.py new-plugin method ewma                       ./plugins/ewma.py, or ./my_plugins/ewma.py
  run_bench.py new-plugin method ewc --kind penalty         one that adds to the clients' loss
  run_bench.py new-plugin backbone my-mf --plugins mine     mine/my_mf.py and mine/tests/test_my_mf.py
  run_bench.py new-plugin metric first-hit                  a number for each user's ranked list
  run_bench.py new-plugin attack reverse                    malicious clients, and what they upload

The file is a small method (backbone, metric, attack) that runs as it stands and passes `check`, with comments on what
to change. Begin with the kind of method whose hooks yours has; docs/plugins.md shows three of them.

kinds of methods:
""" + "\n".join(f"  {name:10}{meaning}" for name, meaning in METHODS.items())


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help="method, backbone, metric or attack")
    parser.add_argument("name", metavar="NAME", help="lower-case letters, digits, - and _, as ewma")
    parser.add_argument("--kind", dest="starts_as", metavar="KIND",
                        help=f"of a method, which one to start from: {', '.join(METHODS)} (default: server)")
    parser.add_argument("--plugins", type=Path, metavar="DIR",
                        help="folder of the file (default: ./plugins if there is one, else ./my_plugins)")


def run(args: argparse.Namespace) -> None:
    require_known("kind of plugin", [args.kind], KINDS)
    if args.starts_as and args.kind != "method":
        raise UserError(f"--kind: found '{args.starts_as}' for a {args.kind}; only methods come in several, leave it "
                        f"out.")
    require_known("kind of method in --kind", [args.starts_as] if args.starts_as else [], METHODS)
    folder = args.plugins or Path("plugins" if Path("plugins").is_dir() else "my_plugins")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--plugins: '{folder}' is not a folder.")
    words = _names(args.kind, args.name)
    _refuse_taken(args.name, [folder] if folder.is_dir() else [])
    if args.name in configured():
        raise UserError(f"the name '{args.name}' is taken by a dataset; choose another.")
    files = {folder / f"{words['module']}.py": args.starts_as or {"method": "server"}.get(args.kind, args.kind),
             folder / "tests" / f"test_{words['module']}.py": "test"}
    for path in files:
        if path.exists():
            raise UserError(f"{path} exists and is left as it is; choose another name, or another folder with "
                            f"--plugins.")
    for path, template in files.items():
        text = Template((TEMPLATES / f"{template}.py.txt").read_text(encoding="utf-8")).substitute(words)
        with writing(path, "choose another folder with --plugins"), open(path, "x", encoding="utf-8") as file:
            file.write(text)
        print(f"wrote {path}")
    option = "" if folder.resolve() == shipped("plugins").resolve() else f" --plugins {folder}"
    tried = {"method": f"--method {args.name} --backbone fedmf", "backbone": f"--method ft --backbone {args.name}",
             "metric": f"--method ft --backbone fedmf --set extra_metrics={args.name}",
             "attack": f"--method ft --backbone fedmf --set attack={args.name}"}
    print(f"It runs as it stands; edit it and try:\n"
          f"  run_bench.py check {args.name}{option}\n"
          f"  run_bench.py {tried[args.kind]}{option}")


def _refuse_taken(name: str, folders: list[Path]) -> None:
    """Raise UserError if a plugin has the name; plugins are imported if the cache does not say which there are."""
    if (known := read_all(folders)) is not None and name not in {plugin.name for plugin in known}:
        return
    from ...runs.registry import discover

    plugins = discover(folders).plugins
    for kind in KINDS:
        if (kind, name) in plugins:
            raise UserError(f"the name '{name}' is taken by the {kind} in {plugins[kind, name].path}; choose another.")


def _names(kind: str, name: str) -> dict[str, str]:
    """What the templates call the plugin: ``my-mf`` is the class ``MyMf`` in the file ``my_mf.py``; raises UserError
    for a name that is no such thing, or whose file or class would mean something else."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise UserError(f"found the name '{name}', accepted: lower-case letters, digits and, between them, - and _, "
                        f"beginning with a letter, as ewma or my-mf.")
    cls, module = "".join(part.capitalize() for part in re.split("[-_]", name)), name.replace("-", "_")
    if cls in ("None", "True", "False", "Method", "Backbone", "BackboneSettings", "Metric", "Pull", "Attack") \
            or name.startswith(("test_", "test-")) or name in ("conftest", "tests") or iskeyword(module) \
            or find_spec(module):  # a file of a module's name would hide it from tests in its folder
        raise UserError(f"found the name '{name}', which means something else to Python or pytest; choose another.")
    return {"kind": kind, "name": name, "module": module, "cls": cls}
