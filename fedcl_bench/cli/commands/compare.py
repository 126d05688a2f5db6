"""Test the first method against each other one: paired t-test, sign-flip permutation, Holm, bootstrap interval."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Mapping

from ...core.errors import UserError, unknown
from .. import (OF_RECORDS, add_methods, add_options, left_out, methods_of, print_json, say_tuned, settings_of,
                tuned_of, where_of)

if TYPE_CHECKING:
    from ...records.run import Run
    from ...reports.comparison import Comparison, GridRow
    from ...runs.registry import Registry
    from ...runs.specs import RunSpec
    from ...stats.significance import FriedmanComparison, PairedComparison

EXAMPLES = """\
examples:
  run_bench.py compare f3crec ft reg kd --backbone fedmf                 F3CRec against each of the others
  run_bench.py compare f3crec ft --backbone fedmf --dataset lastfm-2k --metric recall@20 --blocks 2
  run_bench.py compare f3crec f3crec:without=arm --backbone fedmf        against its own ablation
  run_bench.py compare f3crec ft --backbone fedmf --records results/published/f3crec --tuned
  run_bench.py compare --friedman f3crec ft reg kd --backbones fedmf,fedncf --datasets ml-100k,lastfm-2k

The runs must be finished: nothing is run here. Units are users, each with the metric on the block just trained averaged
over blocks and over the seeds that both methods have; beside it stands the same test over the seeds' averages.
docs/tables.md explains every column.
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_methods(parser, "two or more; with settings of its own as f3crec:without=arm,eps=0.01")
    parser.add_argument("--proposed", metavar="METHOD", help="the one tested against the others (default: the first)")
    add_options(parser, backbones="backbone, as fedmf; several, with commas, only with --friedman",
                datasets="dataset, as ml-100k; several, with commas, only with --friedman (default: ml-100k)")
    parser.add_argument("--friedman", action="store_true",
                        help="average ranks, Friedman's test and Nemenyi's critical difference over all backbones x "
                             "datasets; 3 or more methods")
    add_options(parser, "metric")
    parser.add_argument("--blocks", metavar="A-B",
                        help="blocks to average over, as 1-3 or 2 (default: all but block 0)")
    add_options(parser, "records", set="take the runs with this setting; repeatable", tuned=OF_RECORDS)
    add_options(parser, "json", "plugins")


def run(args: argparse.Namespace) -> int:
    from ...records.store import incremental, leak_notes
    from ...reports.selection import DAGGER
    from ...runs.registry import discover

    registry = discover(args.plugins)
    methods, proposed = _compared(args, registry)
    blocks = _asked_blocks(args)
    specs, runs = _gathered(args, registry, methods)
    first = next(iter(runs.values()))[proposed][0]
    # The rows of a grid may have different numbers of blocks.
    about = {"metric": args.metric or first.head["settings"]["valid_metric"],
             "blocks": blocks if blocks or args.friedman else incremental(first)}
    labels = {text: text + DAGGER * registry.reimplemented(spec.method) for text, spec in specs.items()}
    notes = leak_notes((labels[text], run.head["settings"]) for of_cell in runs.values()
                       for text, several in of_cell.items() for run in several)
    if args.friedman:
        _over_grid(args, runs, about, labels, notes)
    else:
        about |= {"proposed": proposed, **dict(zip(("backbone", "dataset"), next(iter(runs))))}
        _against_each(args, registry, next(iter(runs.values())), about, labels, notes)
    return 0


def _compared(args: argparse.Namespace, registry: Registry) -> tuple[list[str], str]:
    """The methods, and the one that is tested against the others. Raises UserError unless this command can do so."""
    if args.backbones is None:
        raise UserError(f"--backbone is missing. Known: {', '.join(registry.names('backbone'))}.")
    if not args.friedman and len(args.backbones) * len(args.datasets or ["ml-100k"]) > 1:
        raise UserError("several backbones or datasets: compare one of them at a time, or all with --friedman.")
    methods = methods_of(args)
    if repeated := [method for method in methods if methods.count(method) > 1]:
        raise UserError(f"compare: found '{repeated[0]}' {len(repeated)} times, accepted: different methods.")
    if len(methods) < 2:
        raise UserError(f"compare: found only {methods[0]}, accepted: two methods or more, as compare f3crec ft.")
    proposed = args.proposed or methods[0]
    if proposed not in methods:
        raise unknown("method in --proposed (one of those compared)", proposed, methods)
    return methods, proposed


def _asked_blocks(args: argparse.Namespace) -> tuple[int, ...] | None:
    from ...reports.frame import parse_blocks

    return None if args.blocks is None else parse_blocks(args.blocks)


def _gathered(args: argparse.Namespace, registry: Registry, methods: list[str]
              ) -> tuple[dict[str, RunSpec], dict[tuple[str, str], dict[str, list[Run]]]]:
    """What each method stands for in the first cell; and by backbone and dataset, the runs of each method."""
    from ...records.store import load_all
    from ...reports.selection import Source, checked_spec, find_all
    from ...runs.specs import RunSpec

    changes, tuned = settings_of(args), tuned_of(args)
    cells = {(backbone, dataset): {
        text: checked_spec(registry, RunSpec.of(text, backbone, dataset), changes, tuned) for text in methods}
        for backbone in args.backbones for dataset in args.datasets or ("ml-100k",)}
    specs = [spec for row in cells.values() for spec in row.values()]
    recorded, failed = load_all(args.records, left_out())
    runs_of = find_all(Source(recorded, registry, tuned, where=where_of(args), failed=failed), specs, args.records)
    say_tuned(tuned, specs)
    return (next(iter(cells.values())),
            {cell: {text: runs_of[spec] for text, spec in row.items()} for cell, row in cells.items()})


def _over_grid(args: argparse.Namespace, runs: Mapping[tuple[str, str], dict[str, list[Run]]], about: dict[str, Any],
               labels: dict[str, str], notes: list[str]) -> None:
    """Friedman's test over all cells."""
    from ...reports.comparison import over_grid

    rows, test = over_grid(runs, about["metric"], about["blocks"])
    if args.json:
        print_json({**about, "methods": list(labels), "rows": [asdict(row) for row in rows], **asdict(test),
                    "notes": notes})
    else:
        _show_friedman(about, list(labels.values()), rows, test, notes)


def _against_each(args: argparse.Namespace, registry: Registry, of_cell: dict[str, list[Run]], about: dict[str, Any],
                  labels: dict[str, str], notes: list[str]) -> None:
    """The proposed method of one cell against each other one."""
    from ...reports.comparison import against_each, unequal

    proposed, metric = about["proposed"], about["metric"]
    comparisons = against_each(of_cell, proposed, metric, _asked_blocks(args))
    notes = [*notes, *(f"{labels[text]}: other settings than {labels[proposed]}: {names}."
                       for text, several in of_cell.items()
                       if (names := unequal(several[0], of_cell[proposed][0], registry, tuned_of(args)))),
             *_few_users(comparisons, proposed, metric)]
    if args.json:
        print_json({**about, "comparisons": [_as_json(comparison) for comparison in comparisons], "notes": notes})
    else:
        _show(about, labels, comparisons, notes)


def _as_json(c: Comparison) -> dict[str, Any]:
    from ...reports.comparison import ONE_SEED

    by_seed = {"computed": True, **asdict(c.seeds)} if c.seeds else {"computed": False, "reason": ONE_SEED}
    return {"method": c.other, "seeds": c.common, "seeds_left_out": c.left_out,
            "per_user": {**asdict(c.users), "means": c.means, "p_holm": c.p_holm, "users_left_out": c.users_left_out},
            "per_seed": by_seed}


def _p(p: float) -> str:
    return f"{p:.4f}" if p >= 1e-4 else f"{p:.0e}"


def _test(test: PairedComparison) -> tuple[str, str, str]:
    return f"{test.difference:+.4f}", f"{test.t:.2f}", _p(test.p)


def _blocks(about: dict[str, Any]) -> str:
    from ...runs.specs import seed_text

    if about["blocks"] is None:
        return "all blocks but 0"
    return f"block{'s' if len(about['blocks']) > 1 else ''} {seed_text(about['blocks'])}"


def _show(about: dict[str, Any], labels: dict[str, str], comparisons: list[Comparison], more: list[str]) -> None:
    from ...runs.specs import seed_text
    from ..show import print_table

    notes = [note for c in comparisons for note in _left_out(c, labels[c.other])]
    seeds = set.union(*(set(comparison.common) for comparison in comparisons))
    print(f"{labels[about['proposed']]} on {about['backbone']}, {about['dataset']}: {about['metric']} on the block "
          f"just trained, {_blocks(about)}")
    print_table(("against", "difference", "95 % interval", "t", "p", "p Holm", "p sign flip", "d_z", "users", "by seed",
                 "t", "p", "seeds"), [_row(c, labels[c.other]) for c in comparisons])
    print(f"Positive: {labels[about['proposed']]} is better. Unit: a user, averaged over blocks and the common seeds "
          f"({seed_text(seeds)}); by seed: a seed's average.")
    print("p: two-sided paired t-test. p Holm: adjusted for the "
          f"{len(comparisons)} comparison{'s' if len(comparisons) > 1 else ''}.")
    _print_notes(notes + more, labels)


def _row(c: Comparison, label: str) -> tuple[str, ...]:
    """A comparison as a row of the table, beginning with the other method's label."""
    difference, t, p = _test(c.users)
    return (label, difference, f"{c.users.low:+.4f} … {c.users.high:+.4f}", t, p, _p(c.p_holm),
            _p(c.users.p_permutation), f"{c.users.effect:.3f}", str(c.users.n),
            *(_test(c.seeds) if c.seeds else ("–", "–", "–")), str(len(c.common)))


def _left_out(c: Comparison, label: str) -> list[str]:
    """Sentences on the seeds and users that a comparison lacks."""
    from ...reports.comparison import ONE_SEED
    from ...runs.specs import seed_text

    notes = []
    if c.left_out:
        notes.append(f"{label}: over the common seeds {seed_text(c.common)}; left out, as not both have them with the "
                     f"metric: {seed_text(c.left_out)}.")
    if c.users_left_out:
        notes.append(f"{label}: {c.users_left_out} users that only one of the two has are left out.")
    if c.seeds is None:
        notes.append(f"{label}: {ONE_SEED}.")
    return notes


def _few_users(comparisons: list[Comparison], proposed: str, metric: str) -> list[str]:
    """A sentence for each comparison over fewer users than ``FEW_USERS``: the bootstrap sees too little of them."""
    from ...evaluation.metrics import is_share
    from ...stats.significance import FEW_USERS
    from ..show import intervals

    return [f"{c.other}: {intervals(c.users.n, {proposed: c.means[0], c.other: c.means[1]})}" if is_share(metric) else
            f"{c.other}: only {c.users.n} test users" for c in comparisons if c.users.n < FEW_USERS]


def _print_notes(notes: list[str], labels: dict[str, str]) -> None:
    from ...reports.selection import DAGGER, FOOTNOTE

    if any(DAGGER in label for label in labels.values()):
        notes = [*notes, FOOTNOTE]
    for note in notes:
        print(note)


def _show_friedman(about: dict[str, Any], methods: list[str], rows: list[GridRow], test: FriedmanComparison,
                   notes: list[str]) -> None:
    from ...runs.specs import seed_text
    from ...stats.significance import LEVEL
    from ..show import print_table

    order = sorted(range(len(methods)), key=lambda i: test.ranks[i])
    lines = [(f"{row.backbone}, {row.dataset}", *(f"{row.scores[i]:.4f}" for i in order), seed_text(row.seeds))
             for row in rows]
    print(f"{about['metric']} on the block just trained, {_blocks(about)}, mean over the seeds that all methods have")
    print_table(("backbone, dataset", *(methods[i] for i in order), "common seeds"),
                [*lines, ("average rank", *(f"{test.ranks[i]:.2f}" for i in order))])
    print(f"Friedman: chi2({len(methods) - 1}) = {test.chi2:.2f}, p = {_p(test.p)}, {test.n} rows. "
          f"Critical difference of average ranks (Nemenyi, {100 * LEVEL:.0f} %): {test.critical_difference:.2f}.")
    if test.p > LEVEL:
        print("No difference between the methods is significant at 5 %; the critical difference is not to be read.")
    elif not test.groups:
        print("All methods differ from each other.")
    else:
        print("Not significantly different from each other: "
              + "; ".join(", ".join(methods[i] for i in group) for group in test.groups) + ".")
    _print_notes(notes, dict(zip(methods, methods)))
