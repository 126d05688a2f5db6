"""Checking one plugin with its partners."""

from __future__ import annotations

import dataclasses
from typing import Callable, Collection, Iterable

from ..data.stream import Stream
from ..core.errors import UserError, unknown
from ..federation.loop import run
from ..plugin.method import does_something
from ..runs.metadata import NO_BACKBONE
from ..runs.registry import Plugin, Registry
from . import domain_checks, elsewhere, interference, metric_checks, properties
from .report import Inapplicable, Report, Verdict, Violated
from .trials import Pair, is_of_domains, is_sequential, stable, where, with_plugin

# Partners that between them have every kind of parameter and loss: private rows, public dense layers, personal tables,
# served tables, pairs, turns within a batch, representations.
FEW = {"method": ("fedmf", "ncf", "gpfedrec", "sasrec"), "backbone": ("ft", "f3crec", "fcucr", "popularity")}
PROPERTIES = ("names of hooks", "settings", "declares its parameters", "finite losses", "has a partner",
              *(name for name, _ in (*properties.OF_PAIRS, *interference.OF_PAIRS, *metric_checks.OF_METRICS,
                                     *properties.OF_ATTACKS)),
              "clients elsewhere", "a new process", "worlds of their own", "ML-100K",
              "reads its settings")
# Properties by the statement of docs/constraints.md that they show, which a method may give up.
_SHOW = {"F1": "(a) other clients' data", "F4": "(c) the server's knowledge", "C1": "(d) past data"}
_OF_EVERY_RUN = ("threads", "random numbers", "resumes")
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
    checker.holds("names of hooks", "", lambda: properties.names_of_hooks(plugin))
    if plugin.kind == "metric":
        return _of_metric(checker, registry, partners)
    checker.holds("settings", "", lambda: properties.valid_settings(plugin))
    if plugin.kind == "attack":
        return _of_attack(checker, registry, partners)
    if plugin.kind == "backbone" and not is_of_domains(plugin.cls) and not _declares(checker):
        return checker.report
    partners = partners if getattr(plugin.cls, "needs_backbone", True) else (NO_BACKBONE,)
    chosen = partners or (() if full or is_of_domains(plugin.cls) else FEW[plugin.kind])
    pairs = [stable_or_same(pair) for pair in pairs_of(registry, plugin, chosen)]
    if not pairs:
        checker.holds("has a partner", "", lambda: _no_partner(registry, plugin, chosen))
    for number, pair in enumerate(pairs):
        run_through = domain_checks.runs if pair.kind == "domains" else properties.runs
        if not checker.holds("runs", str(pair), lambda: run_through(pair)):
            continue
        for name, test in _after_runs(pair):
            checker.holds(name, str(pair), lambda: test(pair))
        if number == 0 and process:
            checker.holds("a new process", str(pair), lambda: elsewhere.a_new_process(pair))
            checker.holds("worlds of their own", str(pair), lambda: elsewhere.worlds_of_their_own(pair))
        if full and pair.kind == "blocks":
            checker.holds("ML-100K", str(pair), lambda: on_real_data(pair))
    if pairs:
        checker.holds("reads its settings", "", lambda: properties.settings_read(plugin, pairs))
    return checker.report


def _after_runs(pair: Pair) -> list[tuple[str, Callable[[Pair], str]]]:
    of_every_run = [each for each in properties.OF_PAIRS if each[0] in _OF_EVERY_RUN]
    if pair.kind == "domains":
        return [*of_every_run, *domain_checks.OF_PAIRS[1:]]
    if pair.method_cls.trains != "clients":
        return of_every_run
    given_up = [_SHOW[name] for name in pair.method_cls.gives_up if name in _SHOW]
    apart = "clients elsewhere", elsewhere.clients_elsewhere
    return [each for each in (*properties.OF_PAIRS[1:], *interference.OF_PAIRS, apart) if each[0] not in given_up]


def _of_metric(checker: _Checker, registry: Registry, partners: Iterable[str]) -> Report:
    if partners:
        raise UserError(f"--with: found {', '.join(partners)}; a metric is checked without partners, leave it out.")
    for name, test in metric_checks.OF_METRICS:
        checker.holds(name, "", lambda: test(checker.plugin))
    checker.holds("runs", "", lambda: metric_checks.runs(registry, checker.plugin))
    return checker.report


def _of_attack(checker: _Checker, registry: Registry, partners: Iterable[str]) -> Report:
    """What is asked of an attack: with FT on backbones."""
    for backbone in partners or ("fedmf",):
        pair = Pair(registry, "ft", backbone, "blocks", {"attack": checker.plugin.name, "malicious": 0.2})
        if checker.holds("runs", str(pair), lambda: properties.runs(pair)):
            for name, test in (*properties.OF_ATTACKS, *(p for p in properties.OF_PAIRS if p[0] in _OF_EVERY_RUN)):
                checker.holds(name, str(pair), lambda: test(pair))
    return checker.report


class _Checker:
    """Tries properties of a plugin and adds the verdicts to its report."""

    def __init__(self, plugin: Plugin, watch: Watch, only: Collection[str] | None):
        self.plugin, self.watch, self.only = plugin, watch, only
        self.report = Report(plugin.kind, plugin.name)

    def holds(self, name: str, pair: str, test: Callable[[], str]) -> bool:
        """Try a property if it is to be tried; False if it is violated. ``test`` returns the evidence, or raises."""
        if self.only is not None and name not in self.only:
            return True
        verdict = Verdict(name, pair, *self._tried(test))
        self.report.verdicts.append(verdict)
        self.watch(verdict)
        return verdict.passed is not False

    def _tried(self, test: Callable[[], str]) -> tuple[bool | None, str]:
        try:
            return True, test()
        except Inapplicable as reason:
            return None, str(reason)
        except (Violated, UserError) as evidence:
            return False, str(evidence)
        except Exception as error:  # whatever a plugin's code raises is evidence
            return False, where(error, self.plugin.path)


def _declares(checker: _Checker) -> bool:
    """What is asked of a backbone alone; False if its parameters are not declared, without which it cannot run."""
    plugin, made = checker.plugin, []

    def declared() -> str:
        made.append(plugin.cls(plugin.cls.Settings()))
        return properties.declared_parameters(plugin, made[0])

    if not checker.holds("declares its parameters", "", declared):
        return False
    checker.holds("finite losses", "", lambda: properties.finite_losses(plugin, made[0]))
    return True


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
    from ..data.datasets import load_stream
    from ..runs.config import make_config

    names = (pair.method, pair.backbone) if pair.needs_features else ("ft", "fedmf")
    config = make_config(pair.registry, *names, "ml-100k", overrides=[("check", {"k_core": 70})])
    stream: Stream = load_stream(config.source, config.stream, config.features)
    real = dataclasses.replace(pair, settings={**pair.settings, "topk": "10,20", "valid_metric": "ndcg@20"})
    f = real.federation(stream)
    for progress in run(f):
        pass
    values = ", ".join(f"{scores.mean('ndcg@20'):.3f}" for t, s, scores in progress.tests if t == s)
    return f"{stream.steps[-1].n_users} users, {stream.steps[-1].n_items} items, N@20 {values}"
