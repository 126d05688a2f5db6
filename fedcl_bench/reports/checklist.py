"""The questions of a reproducibility checklist, answered from records.

They are those that reviewers of ACM TORS and RecSys ask of experiments: data, protocol, baselines and their tuning,
randomness, statistics, computing. What no record knows is left to the authors, and says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from ..core.settings import as_text
from ..core.text import for_latex, for_markdown
from ..records.store import LEAKS, Run, describe, leaks, why_failed
from ..runs.registry import Registry
from ..runs.specs import Tuned, has_settings, read_tuned, seed_text
from .comparison import NAMES, changes_of, words_of

AUTHORS = "to be answered by the authors"
DATA = ("k_core", "tie_order", "train_share", "pilot_users", "pilot_core", "session_gap", "min_sessions",
        "min_session_length")
SPLIT = ("stream", "blocks", "base_share", "base_split", "inc_split", "split_seed", "split_file", "domain_blocks",
         "topology")
RANKING = ("candidates", "sampled_candidates", "candidate_lists", "mask_history", "evaluate_users",
           "negative_pool")
SELECTION = ("valid_metric", "rounds", "patience", "evaluate_every", "best_round", "tolerance")


@dataclass(frozen=True)
class Answered:
    """The runs that are asked about."""

    runs: Sequence[Run]  # that are finished
    failed: Sequence[Mapping[str, Any]]  # the content of ``run.json`` of those that are not
    registry: Registry
    tuned: Tuned | None  # where settings that were tuned are; None: nobody says that they were

    def settings(self, *names: str) -> str:
        """The values of settings, over all runs that have them."""
        every = [words_of({"candidates": "all", **run.head["settings"]}) for run in self.runs]  # where it is inactive
        found = {name: sorted({words[name] for words in every if name in words}) for name in names}
        return "; ".join(f"{name} {' or '.join(value or 'none' for value in values)}"
                         for name, values in found.items() if values not in ([], ["False"]))

    def distinct(self, of: Callable[[dict[str, Any]], Any]) -> list[Any]:
        return list(dict.fromkeys(of(run.meta) for run in self.runs))

    @property
    def cells(self) -> dict[tuple[str, ...], list[Run]]:
        cells: dict[tuple[str, ...], list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: [run.head[name] for name in NAMES]):
            cells.setdefault(tuple(run.head[name] for name in NAMES), []).append(run)
        return cells


def _tested(of: Answered) -> str:
    def said(meta: dict[str, Any]) -> str:
        users, interactions = (", ".join(map(str, meta["tested"].get(name) or "?"))
                               for name in ("users", "interactions"))
        return f"{meta['dataset']}: {users} users, {interactions} interactions, by block"
    return "; ".join(of.distinct(said))


def _leaks(of: Answered) -> str:
    leaking = sum(leaks(run.head["settings"]) for run in of.runs)
    return f"{leaking} of {len(of.runs)} runs: {LEAKS}" if leaking else \
        "not by negatives; which other channels are open, as ties in time, `run_bench.py leaks` says"


def _metrics(of: Answered) -> str:
    names = ", ".join(of.distinct(lambda meta: ", ".join(meta["metrics"])))
    return f"{names}; means over users, per block and over the blocks but block 0"


def _changed(of: Answered) -> str:
    """Settings beside the defaults, and which methods have them where."""
    said: dict[str, dict[str, None]] = {}
    for (method, backbone, dataset), runs in of.cells.items():
        for run in runs:
            changed = ", ".join(f"{name}={value}" for name, value in changes_of(of.registry, run).items())
            said.setdefault(changed or "none", {})[f"{method} on {backbone}, {dataset}"] = None
    return "; ".join(f"{changed} ({', '.join(where)})" for changed, where in said.items())


def _tuning(of: Answered) -> str:
    if of.tuned is None:
        return f"{AUTHORS} (with --tuned, from the files of `tune`)"
    said = []
    for names, runs in of.cells.items():
        found = read_tuned(path) if (path := of.tuned.file(*names)).is_file() else None
        if found and all(has_settings(run.head, found["settings"]) for run in runs):
            space = ", ".join(f"{name} ({', '.join(map(as_text, values))})"
                              for name, values in found["space"].items())
            tried = (f"{len(found['trials'])} of {found['grid_points']} points of {space}, budget "
                     f"of {found['budget']} runs of FT on {found['seeds']} seed{'s' * (found['seeds'] > 1)}, by "
                     f"{found['objective']}")
        else:
            tried = "not tuned"
        said.append(f"{names[0]} on {names[1]}, {names[2]}: {tried}")
    return "; ".join(said)


def _seeds(of: Answered) -> str:
    seeds_of: dict[tuple[Any, ...], set[int]] = {}
    for run in of.runs:
        settings = sorted((name, as_text(value)) for name, value in run.head["settings"].items())
        names = (run.head[kind] for kind in ("method", "backbone", "dataset"))
        seeds_of.setdefault((*names, *settings), set()).add(run.seed)
    seeds = Counter(map(seed_text, seeds_of.values()))
    return "; ".join(f"{text} ({count} combination{'s' * (count > 1)})" for text, count in seeds.items())


def _computing(of: Answered) -> str:
    def machine(meta: dict[str, Any]) -> str:
        here = meta["environment"]
        return f"{here['cores']} cores of {here['processor']}, {here['accelerator'] or 'no accelerator'}"
    return "; ".join(of.distinct(machine))


def _time(of: Answered) -> str:
    seconds = [run.meta["seconds"]["total"] for run in of.runs]
    memory = max(run.meta["peak_memory_mib"] for run in of.runs)
    return (f"{sum(seconds) / 3600:.2f} hours for {len(seconds)} runs, {min(seconds):.0f} to {max(seconds):.0f} s "
            f"each, at most {memory:.0f} MiB; without tuning")


def _versions(of: Answered) -> str:
    names = ("fedcl_bench", "python", "torch", "recbole", "numpy", "pandas", "scipy")
    return "; ".join(of.distinct(lambda meta: ", ".join(f"{name} {meta['environment'][name]}" for name in names)
                                 + f", {meta['environment']['system']}"))


def _failed(of: Answered) -> str:
    return "; ".join([str(len(of.failed)), *(f"{describe(head)}: {why_failed(head)}" for head in of.failed)])


QUESTIONS: dict[str, dict[str, Callable[[Answered], str] | str]] = {
    "Data": {
        "Which datasets, exactly?": lambda of: "; ".join(of.distinct(
            lambda meta: f"{meta['dataset']} (fingerprint {meta['data_fingerprint'][:12]})")),
        "How were they filtered?": lambda of: of.settings(*DATA),
        "How many users and interactions are tested?": _tested,
        "Under which licences, and where can they be had?": AUTHORS},
    "Protocol": {
        "How are the data split?": lambda of: of.settings(*SPLIT),
        "Among which items are those to find ranked?": lambda of: of.settings(*RANKING),
        "Does information of the test reach training or ranking?": _leaks,
        "Which metrics, at which cut-offs, averaged how?": _metrics,
        "What chooses the model that is tested?": lambda of: of.settings(*SELECTION) + "; the test chooses nothing"},
    "Methods": {
        "Which methods and baselines?": lambda of: "; ".join("{} on {}, {}".format(*names) for names in of.cells),
        "Which settings beside the defaults?": _changed,
        "How were methods and baselines tuned, with which budgets?": _tuning,
        "Where paper and code differ, whose reading?": lambda of: "; ".join(of.distinct(
            lambda meta: f"{meta['method']} on {meta['backbone']}: "
                         f"{', '.join(meta.get('readings', ['not recorded'])) or 'neither alone'}")),
        "Where is the code, under which licence?": AUTHORS},
    "Randomness and statistics": {
        "Which seeds?": _seeds,
        "What is random?": "all draws are keyed by seed, block, round, client and purpose; one machine repeats a run "
                           "to the bit",
        "Which tests, over what, with which correction?":
            "two-sided paired t-tests over users (averaged over seeds), with Holm's correction, and over seeds, "
            "without (`run_bench.py compare`)",
        "Which runs failed?": _failed},
    "Computing": {
        "On which hardware?": _computing,
        "How long, with how much memory?": _time,
        "With which versions?": _versions,
        "What do clients send?": lambda of: "; ".join(of.distinct(
            lambda meta: f"{meta['method']} on {meta['backbone']}, {meta['dataset']}: "
                         f"{', '.join(meta['privacy']['uploaded']) * bool(meta['bytes']['total_up']) or 'nothing'}"))},
}


def answers(of: Answered) -> dict[str, dict[str, str]]:
    return {part: {question: (answer if isinstance(answer, str) else answer(of)) or AUTHORS
                   for question, answer in questions.items()} for part, questions in QUESTIONS.items()}


def as_markdown(parts: Mapping[str, Mapping[str, str]]) -> str:
    return "\n".join(["# Reproducibility checklist", *(line for part, questions in parts.items() for line in (
        "", f"## {part}", "",
        *(f"- **{question}** {for_markdown(answer)}" for question, answer in questions.items())))]) + "\n"


def as_latex(parts: Mapping[str, Mapping[str, str]]) -> str:
    """The same as descriptions, for the appendix of a paper."""
    return "\n".join(line for part, questions in parts.items() for line in (
        rf"\subsection*{{{part}}}", r"\begin{description}",
        *(rf"  \item[{for_latex(question)}] {for_latex(answer)}" for question, answer in questions.items()),
        r"\end{description}")) + "\n"
