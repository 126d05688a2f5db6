"""Be a client of a federation: train on your own interactions, which stay here, and recommend with the result."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...core.errors import UserError
from ...core.tuning import importing
from .. import add_options, count, print_json, workers

EXAMPLES = """\
examples:
  run_bench.py client --data interactions.csv --server 10.0.0.1:9092       take part until the server ends
  run_bench.py client --data interactions.csv --recommend 196              the best items for a user, then

The table has a row per interaction, with the columns user, item and timestamp; see docs/real-clients.md.
What a client keeps is under --folder; started again, it goes on from its last round.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="FILE", required=True, help="table of this client's interactions")
    parser.add_argument("--server", metavar="HOST:PORT", help="address of the server")
    parser.add_argument("--listen", action="store_true",
                        help="instead: beside a SuperNode of Flower, for the app that `export flower` makes; it finds "
                             "this client by --node-config 'socket=\"DIR/socket\"', DIR the --folder")
    parser.add_argument("--folder", type=Path, metavar="DIR", default=Path("client"),
                        help="where private parameters and models are kept (default: ./client)")
    parser.add_argument("--recommend", metavar="USER", help="instead of taking part: the best items for a user")
    parser.add_argument("-k", type=count, metavar="N", help="how many (default: 10)")
    parser.add_argument("--patience", type=count, default=600, metavar="SECONDS",
                        help="how long a server that has gone is waited for (default: 600)")
    parser.add_argument("--threads", type=workers, default=1, metavar="N", help="threads of PyTorch (default: 1)")
    add_options(parser, "plugins", "json")


def run(args: argparse.Namespace) -> None:
    with importing():
        from ...deployment import flower, flower_app
        from ...deployment.client import Client, Kept, locked, take_part

    if [args.server is not None, args.listen, args.recommend is not None].count(True) != 1:
        raise UserError("client: needs one of --server HOST:PORT, --listen and --recommend USER.")
    plugins = tuple(folder.absolute() for folder in args.plugins)
    if args.recommend is not None:
        table = Kept.latest(args.folder, args.data, plugins).recommend(args.recommend, args.k or 10)
        if args.json:
            print_json(table.to_dict("records"))
        else:
            print(table.to_string(index=False))
        return
    if found := next((name for name in ("-k", "--json") if getattr(args, name.strip("-"))), ""):
        raise UserError(f"client: found {found}, which goes with --recommend USER alone.")
    flower.require()
    with locked(args.folder):
        client = Client(args.data, args.folder, plugins, args.threads,
                        lambda text: print(text, file=sys.stderr, flush=True))
        if not args.listen:
            take_part(client, args.server, args.patience)
            return
        client.read()
        flower_app.listen(args.folder.absolute(), client.answer, lambda: client.over)
    if client.failed:
        raise UserError(client.failed)
