"""FFMSR's tables as figures: a dot per line and domain, with its deviation over seeds."""

from __future__ import annotations

from functools import partial
from typing import Any, Mapping, Sequence

from matplotlib.figure import Figure

from ..core.text import JOIN
from ..runs.specs import seed_text
from .cells import Cell, Table
from .draw import GREY, PAGE, missing_key, styled
from .paper_figures import Drawn, Job, Skip
from .selection import Source
from .tables import build


@styled
def dots(domains: Mapping[str, Sequence[Cell]], labels: Sequence[str], strong: str, metric: str, title: str) -> Figure:
    """A panel per domain: of each line the mean over seeds, with a whisker of one standard deviation.

    Args:
        domains: name to the cells of all lines; a cell without a number is a grey cross.
        labels: of the lines, from the top.
        strong: the label of the line that stands out, by which a thin upright line is drawn.
    """
    figure = Figure(figsize=(PAGE, 0.17 * len(labels) + 0.75), layout="constrained")
    for axes, (domain, cells) in zip(figure.subplots(1, len(domains), sharey=True), domains.items()):
        for y, (label, cell) in enumerate(zip(labels, cells)):
            color = "#D55E00" if label == strong else "#000000"
            if cell.mean is None:
                axes.plot(0.02, y, "x", color=GREY, transform=axes.get_yaxis_transform(), gid=f"missing:{label}")
                continue
            axes.errorbar(cell.mean, y, xerr=cell.std or None, color=color, linewidth=0.9)
            axes.plot(cell.mean, y, "o", color=color, gid=f"{domain}:{label}")
            if label == strong:
                axes.axvline(cell.mean, color=color, linewidth=0.6, linestyle=":", zorder=0)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(axis="y", color="#E0E0E0", linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(domain)
        axes.set_xlabel(metric)
    if any(cell.mean is None for cells in domains.values() for cell in cells):
        figure.legend(handles=[missing_key()], loc="outside lower right")
    figure.suptitle(title)
    return figure


def _title(job: Job, built: Table, dataset: str, source: Source) -> str:
    seeds = {cell.seeds for cell in built.cells() if cell.seeds}
    users = source.pilot_users
    return ", ".join([f"Table {built.number}: {built.title}", job.label(dataset),
                      *([f"pilot of {users:,} users of each domain"] if users else []),
                      f"mean ± std over seeds {'; '.join(map(seed_text, sorted(seeds)))}"])


def _of_table(number: int, job: Job) -> Drawn:
    """A table of the paper, as far as there are records of the job's datasets and backbones."""
    assignments: tuple[tuple[str, Any], ...] = tuple(job.changes.items())
    source = Source(job.runs, job.registry, job.tuned, assignments, lambda dataset: {}, job.where, job.failed)
    table = job.paper.TABLES[number]
    drawn = False
    for dataset in job.datasets:
        built = build(job.paper_name, table, source, [dataset], job.backbones)
        cells = {cell.key: cell for cell in built.cells()} if built else {}
        lines = dict.fromkeys((key.backbone, key.row) for key in cells)
        if not any(cell.mean is not None for cell in cells.values()):
            continue
        names = dataset.split(JOIN)
        columns = {f"D{i}": name for i, name in enumerate(names)}
        labels = {line: _line_label(job, number, line, len({backbone for backbone, _ in lines})) for line in lines}
        domains = {name: [cell for line in lines for key, cell in cells.items()
                          if (key.backbone, key.row, key.metric, key.column) == (*line, job.metric, column)]
                   for column, name in columns.items()}
        ours = next((label for (_, row), label in labels.items() if row == job.paper.OURS), "")
        drawn = True
        yield (job.file(f"table{number}", dataset),
               dots(domains, list(labels.values()), ours, job.label(job.metric), _title(job, built, dataset, source)))
    if not drawn:
        raise Skip(f"no records of its runs.\nMake them with: "
                   f"{job.command(str(number), job.datasets).replace('--figure', '--table')}")


def _line_label(job: Job, number: int, line: tuple[str, str], backbones: int) -> str:
    """What a line is called: its row, and where its table has several, its backbone. Table 3 has a line per method,
    and of what trains alone or pooled a line per backbone."""
    backbone, row = line
    if number == 3:
        return job.label(backbone if row == job.paper.BASELINE else row)
    return f"{job.label(backbone)}, " * (backbones > 1) + job.paper.label(number, row)


MAKERS = {str(number): partial(_of_table, number) for number in (3, 4, 5, 6, 7)}
