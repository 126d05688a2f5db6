"""Results, listings and statistics as tables on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..data.source import DatasetConfig, DatasetSource
from ..data.stream import StreamSettings
from ..core.errors import UserError
from ..evaluation.metrics import OF_EVERY_RUN, is_share
from ..core.text import for_terminal
from ..runs.config import RunConfig
from ..runs.registry import Plugin
from ..api.run_frames import result_columns
from ..records.store import block_names, domains_of
from ..core.settings import as_text, describe, flat, inactive
from ..stats.significance import FEW_USERS, interval_of_mean

def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)


def plain_table(*columns: str, **options) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print at the table's own width, so that a narrow or redirected output never cuts a number."""
    console = Console(highlight=False, width=400, markup=False)
    with console.capture() as capture:
        console.print(table)
    print(for_terminal("\n".join(line.rstrip() for line in capture.get().splitlines())))


def show_groups(result: Mapping[str, Any], groups: Iterable[str]) -> None:
    """Print what groups of users and items get in each block, with their numbers of users."""
    if "groups" not in result:
        raise UserError(f"--by: the record {result['record']} has no groups, as it is of an older version; run it "
                        f"again with --rerun.")
    groups = list(groups)
    table = plain_table("test metric by group", *(f"block {t}" for t in range(len(result["rounds"]))))
    for group in groups:
        for name, values in result["groups"][group].items():
            table.add_row(f"{name} {group}", *("--" if value is None else f"{value:g}" if name == "users" else
                                               f"{value:.4f}" for value in values))
    print_table(table)
    if empty := [group for group in groups if not any(result["groups"][group]["users"])]:
        alone = ", as the stream has a single step" if len(result["rounds"]) == 1 else ""
        print(f"nobody is in {', '.join(empty)}{alone}")


def _show_traffic(runs: Sequence[Mapping[str, Any]]) -> None:
    """What all clients sent and received, and what of it brought a run near its best; of older records the first."""
    up, down = (np.mean([run["bytes"][f"total_{way}"] for run in runs]) for way in ("up", "down"))
    text = f"all clients sent {_amount(up)} and received {_amount(down)}"
    if all("nearly_best" in run for run in runs):
        near = [run["nearly_best"] for run in runs]
        rounds = "/".join(f"{n:g}" for n in np.mean([part["rounds"] for part in near], axis=0))
        sent = np.mean([sum(part["bytes_up"]) for part in near])
        seconds = np.mean([sum(part["seconds"]) for part in near])
        text += (f"; {near[0]['share']:.0%} of the best validation took {rounds} rounds, {seconds:.1f} s and "
                 f"{_amount(sent)} sent")
    print(text)


def _amount(n_bytes: float) -> str:
    """Bytes in a unit in which they have one to four digits before the point."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 10_000:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.4g} TiB"


def show_result(config: RunConfig, result: Mapping[str, Any]) -> None:
    """Print the result table of one run or of several seeds, and where the record is."""
    blocks = len(result["rounds"])
    several = "seeds" in result
    seeds = f"seeds {result['seeds'][0]}-{result['seeds'][-1]}, mean ± std" if several else f"seed {result['seed']}"
    columns = result_columns(result)
    mark = " (re-implemented from its description)" if config.method.cls.reimplementation else ""
    print(f"{config.method.name}{mark} on {config.backbone.name}, {config.source.name}, {seeds}")
    if config.evaluation.candidates == "sampled":
        print(f"ranked among {config.evaluation.sampled_candidates} sampled items: not comparable with full ranking")
    if config.stream.pilot_users and config.stream.of_domains:
        print(f"a pilot: {config.stream.pilot_users:,} users of each domain, {config.stream.pilot_core}-core; not "
              f"comparable with all users")
    table = plain_table("test metric", *columns)
    for name, values in result["metrics"].items():
        numbers = values["per_block"] + ([values["avg_incremental"]] if blocks > 1 else [])
        if several:
            deviations = values["per_block_std"] + ([values["avg_incremental_std"]] if blocks > 1 else [])
            table.add_row(name, *(f"{x:.4f} ± {s:.4f}" for x, s in zip(numbers, deviations)))
        else:
            table.add_row(name, *(f"{x:.4f}" for x in numbers))
    table.add_row("rounds", *(f"{n:g}" for n in result["rounds"]))
    for what in ("users", "interactions"):
        if result["tested"][what]:
            table.add_row(f"test {what}", *(f"{n:,}" for n in result["tested"][what]))
    print_table(table)
    for note in few_users(result):
        print(note)
    if blocks > config.per_step:
        metric = config.evaluation.valid_metric
        parts = [f"{name} {value:.4f}" for name, value in result["continual"][metric].items() if value is not None]
        print(f"{metric} over R[t,s]: {', '.join(parts)}")
    seconds = result["seconds"]
    print(f"{'from its record: ' if result['reused'] else ''}{seconds['total']:.1f} s "
          f"(training {seconds['train']:.1f}, evaluation {seconds['evaluate']:.1f}), "
          f"peak memory {result['peak_memory_mib']:.0f} MiB")
    runs = result.get("runs", [result])
    _show_traffic(runs)
    for text in runs[0]["privacy"].get("notes", ()):
        print(for_terminal(text))
    for run in runs:
        print(f"record: {run['record']}")


def few_users(result: Mapping[str, Any]) -> list[str]:
    """What the 95 % intervals are of means over fewer users than ``FEW_USERS``, a sentence per block or domain."""
    names = block_names(domains_of(result), len(result["rounds"]))
    return [f"{names[block]} has {intervals(users, means)}" for block, users in enumerate(result["tested"]["users"])
            if users < FEW_USERS
            for means in [{name: values["per_block"][block] for name, values in result["metrics"].items()
                           if is_share(name)}]]


def intervals(users: int, means: Mapping[str, float]) -> str:
    """That there are few users, and the 95 % interval of each named mean over them; the means are shares."""
    parts = (f"{name} {low:.4f} to {high:.4f}" for name, mean in means.items()
             for low, high in [interval_of_mean(mean, users)])
    return f"only {users} test user{'s' if users > 1 else ''}; 95 % intervals of the means: {', '.join(parts)}"


def _show_settings(title: str, cls: type) -> None:
    rows = describe(cls)
    if not rows:
        return
    console = _console()
    console.print(title, style="bold")
    for name, default, space, help in rows:
        console.print(f"  {name} = {default}", markup=False)
        console.print(f"      {help}\n      {space}", markup=False, style="dim")


def show_plugin(plugin: Plugin, core: Iterable[type]) -> None:
    """A plugin's reference and settings, then the settings every run has."""
    console = _console()
    console.print(f"{plugin.kind} {plugin.name}: {plugin.cls.title}", markup=False, style="bold")
    for text in (plugin.cls.reference, str(plugin.path)):
        console.print(text, markup=False)
    _show_settings(f"\nsettings of {plugin.name}", plugin.cls.Settings)
    if plugin.cls.ambiguities:
        console.print("\nread differently by paper and code (`sensitivity` varies them)", style="bold")
    for name, values in plugin.cls.ambiguities.items():
        told = ", ".join(f"{as_text(value)} ({whose})" for value, whose in values.items())
        console.print(f"  {name}: {told}", markup=False)
    for cls in core:
        _show_settings(f"\n{cls.__doc__.splitlines()[0]}", cls)
    console.print("\nChange one with --set NAME=VALUE.", markup=False)


def show_metric(plugin: Plugin) -> None:
    """A metric's formula and reference, and how to use it."""
    cls, console = plugin.cls, _console()
    console.print(f"metric {plugin.name}: {cls.title}", markup=False, style="bold")
    formula = " ".join((cls.__doc__ or "no formula: it has no docstring").split())
    for text in (formula, cls.reference, str(plugin.path)):
        if text:
            console.print(text, markup=False)
    uses = ["In every run, as NAME@K for every K of topk." if cls in OF_EVERY_RUN else
            f"In the tests of runs with --set extra_metrics={plugin.name}.",
            *([] if cls.of_items else [f"It can choose the best round: --set valid_metric={plugin.name}@20."])]
    console.print("\n" + " ".join(uses), markup=False)


def show_dataset(name: str, config: DatasetConfig, path: Path) -> None:
    """A dataset's config, for people; ``path`` is its YAML file, or the data of one that has none."""
    console = _console()
    console.print(f"dataset {name}: {config.title or 'your own'}", markup=False, style="bold")
    for label in ("source", "licence", "notes"):
        if getattr(config, label):
            console.print(f"{label}: {getattr(config, label)}", markup=False)
    of_plugins = {**config.backbone_settings, **config.method_settings}
    for label, values in [("settings", config.settings), *((f"settings for {plugin}", values)
                                                          for plugin, values in of_plugins.items()),
                          *((f"search of {name}", values) for name, values in config.search.items())]:
        if values:
            console.print(f"{label}: {', '.join(f'{k}={v}' for k, v in values.items())}", markup=False)
    parts = "sessions" if config.settings.get("stream") == "sessions" else "blocks"
    file = f"file: {path}, without a YAML file" if path.suffix == ".inter" else f"config: {path}"
    console.print(f"{file}\n`data {name}` shows its {parts}"
                  + (f"; `data download {name}` gets it." if config.raw.url else "."), markup=False)


_LABELS = {"accumulated_users": "# of accumulated users", "accumulated_items": "# of accumulated items",
           "interactions": "# of interactions", "sparsity": "sparsity (%)", "train": "train", "valid": "valid",
           "test": "test", "train_users": "users with train items", "test_users": "users with test items"}
_AVERAGES = ("average_length", "unfiltered_average_length")
_LABELS |= {f"{prefix}{name}": f"{label}{' before the item filter' if prefix else ''}"
            for prefix in ("", "unfiltered_")
            for name, label in (("users", "Users"), ("items", "Items"), ("sessions", "Sessions"),
                                ("average_length", "Averaged Length"))}
_LABELS["samples"] = "training samples"
_LABELS |= {f"{split}_{what}": f"{split} {label}" for split in ("train", "valid", "test")
            for what, label in (("rows", "interactions"), ("sessions", "sessions"))}


def show_statistics(source: DatasetSource, settings: StreamSettings, counts: Mapping[str, list],
                    expected: Mapping[str, list]) -> int:
    """A stream's statistics (see ``datasets.statistics``) beside the expected ones; exit status 1 if one is missed."""
    of_sessions = "train_sessions" in counts
    columns = ["value"] if of_sessions else [f"D{t}" for t in range(len(counts["interactions"]))]
    columns = [part.name for part in source.parts] or columns
    table = plain_table(source.name, *columns, *(["expected"] if expected else []))
    differs = []
    for name, values in counts.items():
        row = [f"{v:.2f}" if name in ("sparsity", *_AVERAGES) else f"{v:,}" for v in values]
        if expected:
            agrees = name not in expected or list(expected[name]) == list(values)
            row.append("" if name not in expected else "same" if agrees else
                       "/".join(f"{v:,}" for v in expected[name]))
            if not agrees:
                differs.append(name)
        table.add_row(_LABELS[name], *row)
    print_table(table)
    for part in source.parts or (source,):
        print(f"file: {part.path}")
    if settings.split_file:
        print("blocks and splits as the file says")
    else:
        without = {"split_file", *inactive([settings])}
        print(", ".join(f"{k}={v}" for k, v in flat([settings]).items() if k not in without))
    if of_sessions and settings.topology == "federated" and not settings.split_file:
        print("FCUCR's Table 1 counts before items that nobody trains on are left out"
              + ("." if _AVERAGES[1] in counts else "; a file that says its split does not tell how many those were."))
    if source.config.notes:
        print(f"note: {source.config.notes}")
    if not expected:
        return 0
    print(f"DIFFERS from the expected counts of its config: {', '.join(differs)}." if differs else
          "All counts are those expected by its config.")
    return 1 if differs else 0
