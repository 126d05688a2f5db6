"""Checking one plugin with its partners."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Collection, Iterable

from ..data.datasets import load_stream
from ..data.stream import Stream
from ..core.errors import UserError, unknown
from ..plugin.method import does_something
from ..runs.config import make_config
from ..runs.metadata import NO_BACKBONE
from ..runs.registry import Plugin, Registry
from . import domain_checks, elsewhere, interference, metric_checks, properties
from .report import Inapplicable, Report, Verdict, Violated
from .trials import Pair, finished, is_of_domains, is_sequential, stable, where, with_plugin

# Partners that between them have every kind of parameter and loss: private rows, public dense layers, personal tables,
# served tables, pairs, turns within a batch, representations.
FEW = {"method": ("fedmf", "ncf", "gpfedrec", "sasrec"), "backbone": ("ft", "f3crec", "fcucr", "popularity")}
PROPERTIES = ("names of hooks", "settings", "declares its parameters", "finite losses", "has a partner",
              *(name for name, _ in (*properties.OF_PAIRS, *interference.OF_PAIRS, *metric_checks.OF_METRICS,
                                     *properties.OF_ATTACKS)),
              "clients elsewhere", *(name for name, _ in elsewhere.IN_PROCESSES), "ML-100K", "reads its settings")
# Properties by the statement of docs/constraints.md that they show, which a method may give up.
_SHOW = {"F1": "(a) other clients' data", "F4": "(c) the server's knowledge", "C1": "(d) past data"}
Property = tuple[str, Callable[..., str]]
_OF_EVERY_RUN = [each for each in properties.OF_PAIRS if each[0] in ("threads", "random numbers", "resumes")]
Watch = Callable[[Verdict], None]


def check_class(cls: type, **options) -> Report:
    """Check a class with its partners on small streams, a metric on lists and in two small runs; options as
    ``check_plugin``'s."""
    return check_plugin(*with_plugin(cls), **options)


check_method = check_backbone = check_metric = check_attack = check_class


def check_plugin(registry: Registry, plugin: Plugin, full: bool = False, partners: Iterable[str] = (),
                 process: bool = True, only: Collection[str] = (), watch: Watch = lambda verdict: None) -> Report:
    """Check a plugin of a registry. Raises UserError for a name in ``only`` or ``partners`` that does not exist.

    Args:
        full: with every partner it goes with, and on a slice of ML-100K; otherwise with a few.
        partners: names of the partners to check with instead.
        process: whether to try what needs processes of its own, which takes some seconds.
        only: names of properties, as reports have them, to try alone; "runs" and "declares its parameters" are always
            tried, as the others build on them.
        watch: called with every verdict as it comes.
    """
    for name in only:
        if name not in PROPERTIES:
            raise unknown("property", name, PROPERTIES)
    checker = _Checker(plugin, watch, {*only, "runs", "declares its parameters"} if only else None)
    checker.holds("names of hooks", properties.names_of_hooks, plugin)
    if plugin.kind == "metric":
        return _of_metric(checker, registry, partners)
    checker.holds("settings", properties.valid_settings, plugin)
    if plugin.kind == "attack":
        return _of_attack(checker, registry, partners)
    if plugin.kind == "backbone" and not is_of_domains(plugin.cls):
        if not checker.holds("declares its parameters", properties.declared_parameters, plugin):
            return checker.report
        checker.holds("finite losses", properties.finite_losses, plugin)
    partners = partners if getattr(plugin.cls, "needs_backbone", True) else (NO_BACKBONE,)
    chosen = partners or (() if full or is_of_domains(plugin.cls) else FEW[plugin.kind])
    pairs = [stable_or_same(pair) for pair in pairs_of(registry, plugin, chosen)]
    if not pairs:
        checker.holds("has a partner", _no_partner, registry, plugin, chosen)
    for name in partners if pairs else ():  # that were asked for, so they are not left out in silence
        if all(name not in (pair.method, pair.backbone) for pair in pairs):
            checker.holds("has a partner", _no_partner, registry, plugin, [name])
    for number, pair in enumerate(pairs):
        tests = [*_after_runs(pair), *(elsewhere.IN_PROCESSES if number == 0 and process else ()),
                 *([("ML-100K", on_real_data)] if full and pair.kind == "blocks" else ())]
        if checker.holds("runs", domain_checks.runs if pair.kind == "domains" else properties.runs, pair):
            checker.all_hold(tests, pair)
    if pairs:
        checker.holds("reads its settings", properties.settings_read, plugin, pairs)
    return checker.report


def _after_runs(pair: Pair) -> list[Property]:
    if pair.kind == "domains":
        return [*_OF_EVERY_RUN, *domain_checks.OF_PAIRS[1:]]
    if pair.method_cls.trains != "clients":
        return _OF_EVERY_RUN
    given_up = [_SHOW[name] for name in pair.method_cls.gives_up if name in _SHOW]
    apart = "clients elsewhere", elsewhere.clients_elsewhere
    return [each for each in (*properties.OF_PAIRS[1:], *interference.OF_PAIRS, apart) if each[0] not in given_up]


def _of_metric(checker: _Checker, registry: Registry, partners: Iterable[str]) -> Report:
    if partners:
        raise UserError(f"--with: found {', '.join(partners)}; a metric is checked without partners, leave it out.")
    checker.all_hold(metric_checks.OF_METRICS, checker.plugin)
    checker.holds("runs", metric_checks.runs, registry, checker.plugin)
    return checker.report


def _of_attack(checker: _Checker, registry: Registry, partners: Iterable[str]) -> Report:
    """What is asked of an attack: with FT on backbones."""
    for backbone in partners or ("fedmf",):
        registry.get("backbone", backbone)  # or a UserError
        pair = Pair(registry, "ft", backbone, "blocks", {"attack": checker.plugin.name, "malicious": 0.2})
        if checker.holds("runs", properties.runs, pair):
            checker.all_hold([*properties.OF_ATTACKS, *_OF_EVERY_RUN], pair)
    return checker.report


class _Checker:
    """Tries properties of a plugin and adds the verdicts to its report."""

    def __init__(self, plugin: Plugin, watch: Watch, only: Collection[str] | None):
        self.plugin, self.watch, self.only = plugin, watch, only
        self.report = Report(plugin.kind, plugin.name)

    def all_hold(self, properties: Iterable[Property], subject: Pair | Plugin) -> None:
        for name, test in properties:
            self.holds(name, test, subject)

    def holds(self, name: str, test: Callable[..., str], *subjects: Any) -> bool:
        """Try a property if it is to be tried; False if it is violated. ``test`` takes what it is a property of, and
        returns the evidence, or raises."""
        if self.only is not None and name not in self.only:
            return True
        pair = str(subjects[0]) if isinstance(subjects[0], Pair) else ""
        verdict = Verdict(name, pair, *self._tried(test, *subjects))
        self.report.verdicts.append(verdict)
        self.watch(verdict)
        return verdict.passed is not False

    def _tried(self, test: Callable[..., str], *subjects: Any) -> tuple[bool | None, str]:
        try:
            return True, test(*subjects)
        except Inapplicable as reason:
            return None, str(reason)
        except (Violated, UserError) as evidence:
            return False, str(evidence)
        except Exception as error:  # whatever a plugin's code raises is evidence
            return False, where(error, self.plugin.path)


def pairs_of(registry: Registry, plugin: Plugin, partners: Iterable[str] = ()) -> list[Pair]:
    """The plugin with each partner it goes with, on blocks and on sessions; a few partners, or all of them."""
    kind = "backbone" if plugin.kind == "method" else "method"
    result = []
    every = [name for name in registry.names(kind) if name != NO_BACKBONE]  # which is for methods that need none
    for partner in partners or every:
        registry.get(kind, partner)  # an unknown name is an error at once
        names = (plugin.name, partner) if plugin.kind == "method" else (partner, plugin.name)
        for stream in ("domains",) if is_of_domains(plugin.cls) else ("blocks", "sessions"):
            pair = Pair(registry, *names, stream)
            alone = stream == "sessions" and not is_sequential(pair.backbone_cls)
            method = pair.method_cls(pair.method_cls.Settings())
            if alone and does_something(method) and not method.overrides("rescore_session"):
                continue  # methods for blocks; sessions as lists of items add nothing to them
            if pair.fits() is None:
                result.append(pair)
    return result


def _no_partner(registry: Registry, plugin: Plugin, partners: Iterable[str] = ()) -> str:
    """Raises Violated, with the reason why the first of them does not go with the plugin."""
    kind = "backbone" if plugin.kind == "method" else "method"
    first, *_ = names = list(partners) or registry.names(kind)
    pairs = (Pair(registry, *((plugin.name, first) if kind == "backbone" else (first, plugin.name)), stream)
             for stream in (("domains",) if is_of_domains(plugin.cls) else ("sessions", "blocks")))
    reason = next((reason for pair in pairs if (reason := pair.fits())), "")
    raise Violated(f"no {kind} goes with it; tried {', '.join(names)}; '{first}': {reason}")


def stable_or_same(pair: Pair) -> Pair:
    """The pair at learning rates at which it does not diverge; the pair itself if it fails otherwise."""
    try:
        return stable(pair)
    except Exception:  # `runs` reports it
        return pair


def on_real_data(pair: Pair) -> str:
    """Two rounds in each block of a dense slice of ML-100K: the users and items with at least 70 interactions."""
    names = (pair.method, pair.backbone) if pair.needs_features else ("ft", "fedmf")
    config = make_config(pair.registry, *names, "ml-100k", overrides=[("check", {"k_core": 70})])
    stream: Stream = load_stream(config.source, config.stream, config.features)
    real, runs = dataclasses.replace(pair, settings={**pair.settings, "topk": "10,20", "valid_metric": "ndcg@20"}), []
    stable(real, lambda pair: runs.append(finished(pair.federation(stream))))
    values = ", ".join(f"{scores.mean('ndcg@20'):.3f}" for t, s, scores in runs[-1].tests if t == s)
    return f"{stream.steps[-1].n_users} users, {stream.steps[-1].n_items} items, N@20 {values}"
