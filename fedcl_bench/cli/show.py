"""Results and statistics as tables on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..api.result_table import texts
from ..core.errors import UserError
from ..core.settings import flat, inactive
from ..core.text import for_terminal
from ..data.source import DatasetSource
from ..data.settings import StreamSettings
from ..evaluation.metrics import is_share
from ..records.frames import still_improving
from ..records.record import Record
from ..records.store import block_names, domains_of, leak_notes, why_no_groups
from ..runs.config import RunConfig
from ..stats.significance import FEW_USERS, interval_of_mean


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table at its own width, so that a narrow or redirected output never cuts a number."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=1_000_000, markup=False)
    with console.capture() as capture:
        console.print(table)
    print(for_terminal("\n".join(line.rstrip() for line in capture.get().splitlines())))


def show_groups(result: Mapping[str, Any], groups: Iterable[str]) -> None:
    if "groups" not in result:
        raise UserError(f"--by: the record {result['record']} has no groups, as "
                        f"{why_no_groups(result, 'run it again with --rerun')}.")
    blocks, groups = len(result["rounds"]), list(groups)
    print_table(["test metric by group", *(f"block {t}" for t in range(blocks))],
                [(f"{name} {group}", *("--" if value is None else format(value, ",.10g" if name == "users" else ".4f")
                                       for value in values))
                 for group in groups for name, values in result["groups"][group].items()])
    if empty := [group for group in groups if not any(result["groups"][group]["users"])]:
        print(f"nobody is in {', '.join(empty)}{', as the stream has a single step' if blocks == 1 else ''}")


def _show_traffic(runs: Sequence[Mapping[str, Any]]) -> None:
    """What all clients sent and received, and what of it brought a run near its best."""
    up, down = (np.mean([run["bytes"][f"total_{way}"] for run in runs]) for way in ("up", "down"))
    near = [run["nearly_best"] for run in runs]
    rounds = "/".join(f"{n:g}" for n in np.mean([part["rounds"] for part in near], axis=0))
    sent, seconds = (np.mean([sum(part[what]) for part in near]) for what in ("bytes_up", "seconds"))
    print(f"all clients sent {amount(up)} and received {amount(down)}; {near[0]['share']:.0%} of the best validation "
          f"took {rounds} rounds, {seconds:.1f} s and {amount(sent)} sent")


def amount(n_bytes: float) -> str:
    """Bytes in a unit in which they have one to four digits before the point."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 10_000:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.4g} TiB"


def show_result(config: RunConfig, result: Mapping[str, Any], start: float | None = None) -> None:
    """Print the result table of one run or of several seeds, and where the record is; ``start``: seconds from the
    beginning of the process to that of the run, which its record does not count."""
    _show_heading(config, result)
    _show_table(result)
    _show_beside(config, result)
    seconds = result["seconds"]
    parts = "" if start is None else f"start {start:.1f}, "
    print(f"{'from its record: ' if result['reused'] else ''}{seconds['total'] + (start or 0.0):.1f} s "
          f"({parts}training {seconds['train']:.1f}, evaluation {seconds['evaluate']:.1f}), "
          f"peak memory {result['peak_memory_mib']:.0f} MiB")
    runs = result.get("runs", [result])
    _show_traffic(runs)
    for text in runs[0]["privacy"].get("notes", ()):
        print(for_terminal(text))
    for run in runs:
        print(f"record: {run['record']}")


def _show_heading(config: RunConfig, result: Mapping[str, Any]) -> None:
    seeds = f"seed {result['seed']}" if "seeds" not in result else \
        f"seeds {result['seeds'][0]}-{result['seeds'][-1]}, mean ± std"
    mark = " (re-implemented from its description)" if config.method.cls.reimplementation else ""
    print(f"{config.method.name}{mark} on {config.backbone.name}, {config.source.name}, {seeds}")
    if given_up := config.gives_up:
        print(f"gives up: {'; '.join(f'{how} ({name})' for name, how in given_up.items())} (docs/constraints.md)")
    if config.evaluation.candidates == "sampled":
        print(f"ranked among {config.evaluation.sampled_candidates} sampled items: not comparable with full ranking")
    if config.stream.pilot_users and config.stream.of_domains:
        print(f"a pilot: {config.stream.pilot_users:,} users of each domain, {config.stream.pilot_core}-core; not "
              f"comparable with all users")
    for note in [*leak_notes([("", config.settings)]), *sampling_notes(result)]:
        print(note)


def _show_table(result: Mapping[str, Any]) -> None:
    columns, metrics = texts(result)
    counts = [("rounds", result["rounds"]), *((f"rounds of {name}", n) for name, n in result.get("stages", {}).items())]
    rows = [(name, *values) for name, values in metrics.items()]
    rows += [(name, *(f"{n:g}" for n in each)) for name, each in counts]
    rows += [(f"test {what}", *(f"{n:,}" for n in result["tested"][what]))
             for what in ("users", "interactions") if result["tested"][what]]
    print_table(["test metric", *columns], rows)
    for note in [*few_users(result), *improvement_notes(result)]:
        print(note)


def _show_beside(config: RunConfig, result: Mapping[str, Any]) -> None:
    """Errors of ratings, exposure of promoted items, and R[t,s] in short."""
    for name, values in result.get("ratings", {}).items():
        print(f"{name} over all ratings of a block: {', '.join(f'{value:.4f}' for value in values)}")
    for name, values in result.get("lists", {}).items():
        if name.startswith("er@"):
            print(f"{name}, exposure of promoted items: "
                  f"{', '.join('-' if value is None else f'{value:.4f}' for value in values)}")
    if len(result["rounds"]) > config.per_step:
        metric = config.evaluation.valid_metric
        parts = [f"{name} {value:.4f}" for name, value in result["continual"][metric].items() if value is not None]
        print(f"{metric} over R[t,s]: {', '.join(parts)}")


def few_users(result: Mapping[str, Any]) -> list[str]:
    """What the 95 % intervals are of means over fewer users than ``FEW_USERS``, a sentence per block or domain."""
    names = block_names(domains_of(result), len(result["rounds"]))
    return [f"{names[block]} has {intervals(users, means)}" for block, users in enumerate(result["tested"]["users"])
            if users < FEW_USERS
            for means in [{name: values["per_block"][block] for name, values in result["metrics"].items()
                           if is_share(name)}]]


def sampling_notes(result: Mapping[str, Any]) -> list[str]:
    """What was measured on samples of users, a sentence each; of one run with the intervals of its means."""
    first = result.get("runs", [result])[0]
    if (sampled := first.get("sampled")) is None:
        return []
    notes, settings = [], sampled["settings"]
    if "evaluate_users" in settings:
        names = block_names([], len(first["rounds"]))
        seen = "; ".join(f"{name} {users:,} of {every:,}" for name, users, every in
                         zip(names, first["tested"]["users"], sampled["to_find"]))
        notes.append(f"evaluated on a sample of users (evaluate_users={settings['evaluate_users']}): {seen} with "
                     f"something to find")
        for block, name in enumerate(names if first is result else ()):
            found = [f"{metric} {of_blocks[block][0]:.4f} to {of_blocks[block][1]:.4f}" for metric, of_blocks in
                     sampled["intervals"].items() if of_blocks[block]]
            notes.append(f"{name}: 95 % intervals of the means over all users: {', '.join(found)}" if found else
                         f"{name}: too few users for intervals of the means; a larger evaluate_users gives them")
    if "drift_users" in settings:
        notes.append(f"changes of ranks are of a sample of about {settings['drift_users']:,} of {sampled['clients']:,} "
                     f"users (drift_users)")
    return notes


def improvement_notes(result: Mapping[str, Any]) -> list[str]:
    """That validation was still improving when blocks ended, if it was, of one run or over all seeds: a sentence."""
    runs = result.get("runs", [result])
    blocks = [still_improving(Record(Path(run["record"])).rounds()) for run in runs]
    if not (count := sum(map(len, blocks))):
        return []
    names = block_names(domains_of(result), len(result["rounds"]))
    which = ", ".join(names[block] for block in sorted(set().union(*blocks)))
    return [f"still improving in the last round: validation of {count} of {len(names) * len(runs)} blocks ({which}); "
            f"more rounds may give other numbers"]


def intervals(users: int, means: Mapping[str, float]) -> str:
    """That there are few users, and the 95 % interval of each named mean over them; the means are shares."""
    parts = (f"{name} {low:.4f} to {high:.4f}" for name, mean in means.items()
             for low, high in [interval_of_mean(mean, users)])
    return f"only {users} test user{'s' if users > 1 else ''}; 95 % intervals of the means: {', '.join(parts)}"


_LABELS = {"accumulated_users": "# of accumulated users", "accumulated_items": "# of accumulated items",
           "interactions": "# of interactions", "sparsity": "sparsity (%)", "samples": "training samples",
           "train_users": "users with train items", "test_users": "users with test items",
           "users": "Users", "items": "Items", "sessions": "Sessions", "average_length": "Averaged Length"}


def _label(name: str) -> str:
    """What a table calls a statistic: ``unfiltered_users``, ``valid_rows`` and ``test_sessions`` too."""
    before, split, what = name.removeprefix("unfiltered_"), *name.partition("_")[::2]
    if before != name:
        return f"{_LABELS[before]} before the item filter"
    if what in ("rows", "sessions"):
        return f"{split} {'interactions' if what == 'rows' else what}"
    return _LABELS.get(name, name)


def show_statistics(source: DatasetSource, settings: StreamSettings, counts: Mapping[str, list],
                    expected: Mapping[str, list]) -> int:
    """A stream's statistics (see ``datasets.statistics``) beside the expected ones; exit status 1 if one is missed or
    not known."""
    of_sessions = "train_sessions" in counts
    columns = [part.name for part in source.parts] or (
        ["value"] if of_sessions else [f"D{t}" for t in range(len(counts["interactions"]))])
    differs = [name for name, values in counts.items() if name in expected and list(expected[name]) != list(values)]
    rows = []
    for name, values in counts.items():
        row = [_label(name), *(f"{v:.2f}" if name == "sparsity" or name.endswith("average_length") else f"{v:,}"
                               for v in values)]
        if expected:
            row.append("" if name not in expected else "same" if name not in differs else
                       "/".join(f"{v:,}" for v in expected[name]))
        rows.append(row)
    print_table([source.name, *columns, *(["expected"] if expected else [])], rows)
    for part in source.parts or (source,):
        print(f"file: {part.path}")
    if settings.split_file:
        print("blocks and splits as the file says")
    else:
        without = {"split_file", *inactive([settings])}
        print(", ".join(f"{k}={v}" for k, v in flat([settings]).items() if k not in without))
    if of_sessions and settings.topology == "federated" and not settings.split_file:
        print("FCUCR's Table 1 counts before items that nobody trains on are left out"
              + ("." if "unfiltered_average_length" in counts else
                 "; a file that says its split does not tell how many those were."))
    if source.config.notes:
        print(f"note: {source.config.notes}")
    others = [name for name in expected if name not in counts]
    if others:
        print(f"NOT COMPARED are the expected counts {', '.join(others)}; names of counts here: {', '.join(counts)}.")
    elif expected and not differs:
        print("All counts are those expected by its config.")
    if differs:
        print(f"DIFFERS from the expected counts of its config: {', '.join(differs)}.")
    return 1 if differs or others else 0
