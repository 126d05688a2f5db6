"""Measure which information of validation and test reaches training or ranking, and what it is worth alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...core.errors import UserError
from .. import add_options, print_json, settings_of

EXAMPLES = """\
examples:
  run_bench.py leaks                                             the protocols of papers, as they were measured
  run_bench.py leaks --set stream=static                         a static stream of MovieLens 100K, channel by channel
  run_bench.py leaks --set stream=static --set negative_pool=untouched          as in released code
  run_bench.py leaks --dataset lastfm-2k --data-dir ~/atomic --set k_core=5     blocks of your own data

A channel is a way by which what is to be found becomes known: through negatives, candidates, counts, the catalogue,
ids, times, texts or the choice of a round. Each is measured by a predictor that uses it and nothing else, on the test
items and by the metric of the stream's validation. Where one is open and far above chance, a recommender may seem good
that has learned nothing of its users. Compare with chance, and with items by their training interactions, which every
recommender may count. docs/leaks.md explains the channels.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", metavar="NAME",
                        help="a name, or the path of an atomic file or its folder (with --set alone: ml-100k)")
    add_options(parser, "data-dir", "set", "json")
    parser.add_argument("--papers", action="store_true", help="measure the protocols of papers anew, of data that are "
                                                              "in --data-dir")


def run(args: argparse.Namespace) -> None:
    from ...audit.leaks import audit, papers, shipped_papers
    from ..show import print_table

    if not (args.dataset or args.assignments):
        if args.data_dir and not args.papers:
            raise UserError("--data-dir: has no effect without --dataset, --set or --papers; add one of these.")
        rows = papers(args.data_dir) if args.papers else shipped_papers()
        if args.json:
            print_json(rows)
            return
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        print("From negatives on: a predictor that uses this channel alone, on test items. In parentheses: closed;\n"
              "in brackets: that depends on the backbone. training: items by their training interactions.\n"
              "`leaks --dataset NAME --set NAME=VALUE` tells the channels of one stream.")
        return
    if args.papers:
        raise UserError("--papers: has datasets and settings of its own; leave out --dataset and --set, or it.")
    found = audit(args.dataset or "ml-100k", settings_of(args), args.data_dir)
    if args.json:
        print_json(asdict(found))
        return
    here = {True: "open", False: "closed", None: "depends"}
    print(", ".join([found.dataset, *(f"{name}={value}" for name, value in found.settings.items())]))
    print_table(("channel", "here", f"{found.metric} alone"), [
        *((each.name, here[each.on], "–" if each.alone is None else f"{each.alone:.4f}") for each in found.channels),
        ("chance", "", f"{found.chance:.4f}"), ("training interactions", "", f"{found.training:.4f}")])
    print("\n".join(f"{each.name}: {each.how}." for each in found.channels))
