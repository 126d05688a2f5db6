"""Test the first method against each other one: paired t-test, sign-flip permutation, Holm, bootstrap interval."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

from ...core.errors import UserError, require_known
from .. import OF_RECORDS, add_methods, add_options, backbones_of, found_by_cell, methods_of, print_json, tuned_of

if TYPE_CHECKING:
    from ...records.store import Run
    from ...reports.comparison import Comparison
    from ...runs.registry import Registry
    from ...stats.significance import PairedComparison

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


def run(args: argparse.Namespace) -> None:
    from ...records.store import leak_notes
    from ...reports.frame import parse_blocks
    from ...reports.selection import DAGGER, FOOTNOTE
    from ...runs.registry import discover
    from ..show import print_table

    registry = discover(args.plugins)
    methods, args.proposed = _compared(args, registry)
    args.blocks = args.blocks if args.blocks is None else parse_blocks(args.blocks)
    specs, runs = found_by_cell(args, registry, methods)
    args.metric = args.metric or next(iter(runs.values()))[args.proposed][0].head["settings"]["valid_metric"]
    labels = {text: text + DAGGER * registry.reimplemented(spec.method) for text, spec in specs.items()}
    leaks = leak_notes((labels[text], run.head["settings"]) for of_cell in runs.values()
                       for text, several in of_cell.items() for run in several)
    shown = _over_grid(args, runs, labels) if args.friedman else _against_each(args, registry, runs, labels)
    if args.json:
        print_json({"metric": args.metric, **shown.content, "notes": [*leaks, *shown.notes]})
        return
    print(shown.title)
    print_table(shown.heads, shown.rows)
    print(*shown.below, *leaks, *shown.notes, sep="\n")
    if any(DAGGER in label for label in labels.values()):
        print(FOOTNOTE)


class _Shown(NamedTuple):
    """What came of a comparison: for ``--json``, as a table, and sentences below it, ``notes`` in both."""

    content: dict[str, Any]
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[str]
    notes: Sequence[str] = ()


def _compared(args: argparse.Namespace, registry: Registry) -> tuple[list[str], str]:
    """The methods, and the one that is tested against the others. Raises UserError unless this command can do so."""
    backbones, methods = backbones_of(args, registry), methods_of(args)
    if not args.friedman and len(backbones) * len(args.datasets or ["ml-100k"]) > 1:
        raise UserError("several backbones or datasets: compare one of them at a time, or all with --friedman.")
    if repeated := [method for method in methods if methods.count(method) > 1]:
        raise UserError(f"compare: found '{repeated[0]}' {len(repeated)} times, accepted: different methods.")
    if len(methods) < 2:
        raise UserError(f"compare: found only {methods[0]}, accepted: two methods or more, as compare f3crec ft.")
    proposed = args.proposed or methods[0]
    require_known("method in --proposed (one of those compared)", [proposed], methods)
    return methods, proposed


def _over_grid(args: argparse.Namespace, runs: Mapping[tuple[str, str], dict[str, list[Run]]],
               labels: dict[str, str]) -> _Shown:
    """Friedman's test over all cells, which may have different numbers of blocks."""
    from ...records.store import incremental
    from ...reports.comparison import over_grid
    from ...runs.specs import seed_text
    from ...stats.significance import LEVEL

    grid, test = over_grid(runs, args.metric, args.blocks)
    averaged = {incremental(run) for of_cell in runs.values() for run, *_ in of_cell.values()}
    blocks = args.blocks or (next(iter(averaged)) if len(averaged) == 1 else None)
    methods, order = list(labels.values()), sorted(range(len(labels)), key=lambda i: test.ranks[i])
    rows = [(f"{row.backbone}, {row.dataset}", *(f"{row.scores[i]:.4f}" for i in order), seed_text(row.seeds))
            for row in grid]
    rows.append(("average rank", *(f"{test.ranks[i]:.2f}" for i in order), ""))
    below = [f"Friedman: chi2({len(methods) - 1}) = {test.chi2:.2f}, p = {_p(test.p)}, {test.n} rows. "
             f"Critical difference of average ranks (Nemenyi, {100 * LEVEL:.0f} %): {test.critical_difference:.2f}."]
    if test.p > LEVEL:
        below.append("No difference between the methods is significant at 5 %; the critical difference is not to be "
                     "read.")
    elif not test.groups:
        below.append("All methods differ from each other.")
    else:
        groups = (", ".join(methods[i] for i in group) for group in test.groups)
        below.append(f"Not significantly different from each other: {'; '.join(groups)}.")
    content = {"blocks": blocks, "methods": list(labels), "rows": [asdict(row) for row in grid], **asdict(test)}
    title = (f"{args.metric} on the block just trained, {_blocks(blocks)}, mean over the seeds that all methods "
             f"have")
    return _Shown(content, title, ("backbone, dataset", *(methods[i] for i in order), "common seeds"), rows, below)


def _against_each(args: argparse.Namespace, registry: Registry,
                  runs: Mapping[tuple[str, str], dict[str, list[Run]]], labels: dict[str, str]) -> _Shown:
    """The proposed method of the only cell against each other one."""
    from ...records.store import incremental
    from ...reports.comparison import against_each, unequal
    from ...runs.specs import seed_text

    ((backbone, dataset), of_cell), = runs.items()
    mine, proposed = of_cell[args.proposed], labels[args.proposed]
    blocks = args.blocks or incremental(mine[0])
    comparisons = against_each(of_cell, args.proposed, args.metric, args.blocks)
    differing = {text: unequal(several[0], mine[0], registry, tuned_of(args)) for text, several in of_cell.items()}
    notes = [f"{labels[text]}: other settings than {proposed}: {names}." for text, names in differing.items() if names]
    notes += _few_users(comparisons, args.proposed, args.metric)
    seeds, count = {seed for c in comparisons for seed in c.common}, len(comparisons)
    below = [f"Positive: {proposed} is better. Unit: a user, averaged over blocks and the common seeds "
             f"({seed_text(seeds)}); by seed: a seed's average.",
             f"p: two-sided paired t-test. p Holm: adjusted for the {count} comparison{'s' * (count > 1)}.",
             *(note for c in comparisons for note in _left_out(c, labels[c.other]))]
    content = {"blocks": blocks, "proposed": args.proposed, "backbone": backbone, "dataset": dataset,
               "comparisons": [_as_json(comparison) for comparison in comparisons]}
    return _Shown(content, f"{proposed} on {backbone}, {dataset}: {args.metric} on the block just trained, "
                           f"{_blocks(blocks)}",
                  ("against", "difference", "95 % interval", "t", "p", "p Holm", "p sign flip", "d_z", "users",
                   "by seed", "t", "p", "seeds"), [_row(c, labels[c.other]) for c in comparisons], below, notes)


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


def _blocks(blocks: Sequence[int] | None) -> str:
    from ...runs.specs import seed_text

    return "the blocks after the first" if blocks is None else f"block{'s' * (len(blocks) > 1)} {seed_text(blocks)}"


def _row(c: Comparison, label: str) -> tuple[str, ...]:
    difference, t, p = _test(c.users)
    return (label, difference, f"{c.users.low:+.4f} … {c.users.high:+.4f}", t, p, _p(c.p_holm),
            _p(c.users.p_permutation), f"{c.users.effect:.3f}", str(c.users.n),
            *(_test(c.seeds) if c.seeds else ("–", "–", "–")), str(len(c.common)))


def _left_out(c: Comparison, label: str) -> list[str]:
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
