"""What every plugin of domains must do, and what must not leave a domain.

A domain may learn of the others by what the server answers and by nothing else; so the same answers are given to it in
a second world, in which the others hold other interactions and features.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from ..training.silo_modules import Silo, histories
from ..data.stream import Stream
from ..plugin.silo import DomainData, DomainMethod, DomainModule
from ..rng import DrawKey, Tables
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..federation.cross_silo import CrossSilo, stages_of
from .report import Inapplicable, Violated
from .trials import DOMAINS, Pair, finished, require_numbers, tables_differ
from .worlds import domain_stream

_OTHER = 9  # a seed that is none of the domains'
_MINE = 0  # the domain that must not notice
_CALLS = 12  # of a server after a run


def of_domain(f: Federation, progress: Progress, number: int) -> Tables:
    tables, prefix = progress.model.public | progress.model.dense, f"{f.stream.domains[number].name}/"
    return {name: table for name, table in tables.items() if name.startswith(prefix)}


def runs(pair: Pair) -> str:
    """It trains and tests every domain, with finite parameters."""
    last, domains = pair.points[-1], pair.stream.domains
    if [t for t, _, _ in last.tests] != list(range(len(domains))):
        raise Violated(f"tested {[t for t, _, _ in last.tests]}, expected all {len(domains)} domains")
    require_numbers(pair)
    tables = len(last.model.public) + len(last.model.dense)
    return f"{len(domains)} domains, {len(last.curve)} rounds of {tables} tables"


def every_parameter_trained(pair: Pair) -> str:
    """A loss of some stage that trains it hangs on every parameter of every module."""
    f = pair.federation()
    silos = CrossSilo(f)
    for silo in silos.silos:
        loaded = silo.load(pair.points[-1].model)  # with what the server answered
        parameters, reached = dict(loaded[0].named_parameters()), set()
        for stage in [stage for stage in silos.stages if stage.trains]:
            for module in loaded:
                module.train().stage = stage.name
                with torch.no_grad():
                    module.enter_stage(stage.name)
            gradients = torch.autograd.grad(_loss(f, silo, loaded), parameters.values(), allow_unused=True)
            reached |= {name for name, gradient in zip(parameters, gradients)
                        if gradient is not None and name.startswith(stage.trained or "")}
        still = [name for name in parameters if name not in reached]
        if still and (isinstance(f.method, DomainMethod) or not f.backbone.exchanges):
            raise Violated(f"no training changes {', '.join(still)}; what is no parameter is a buffer")
    return f"losses of {len(silos.stages)} stage(s) hang on {len(reached)} parameters" + (
        f"; {', '.join(still)} may need what another method's server answers" if still else "")


def _loss(f: Federation, silo: Silo, modules: list[DomainModule]) -> Tensor:
    batches, targets = zip(*(histories(domain.samples, torch.arange(len(domain.samples.end)),
                                       f.backbone.settings.max_length, module.fixed_length)
                             for domain, module in zip(silo.domains, modules)))
    if len(modules) == 1:
        return modules[0].loss(batches[0], targets[0])
    return f.backbone.joint_loss(modules, batches, targets)


def other_domains(pair: Pair) -> str:
    """(a) With the same answers of the server, a domain trains and ranks alike whatever the other domains hold."""
    if pair.federation().topology == "central":
        raise Inapplicable("with topology=central all domains' samples are in one place")
    answers: list[Any] = []
    known: list[DomainData] = []
    f = pair.federation()
    _preparing(f, lambda made: known.extend(made) or made)
    mine = _followed(f, lambda made, number: answers.append(made) or made)
    elsewhere = domain_stream([seed if number == _MINE else _OTHER for number, seed in enumerate(DOMAINS)])
    f = pair.federation(elsewhere)
    _preparing(f, lambda made: [known[_MINE], *made[1:]])
    theirs = _followed(f, lambda made, number: [answers[number][_MINE], *made[1:]] if number < len(answers) else made)
    for number, (left, right) in enumerate(zip(mine, theirs)):
        if mismatch := tables_differ(left, right):
            raise Violated(f"round {number + 1}, other domains with other interactions and features: {mismatch} in the "
                           f"first domain, whom the server answered the same; does a class or module keep something of "
                           f"another domain?")
    return f"{min(len(mine), len(theirs))} rounds are the same when the other domains hold other things"


def _preparing(f: Federation, answered: Callable[[list[DomainData]], list[DomainData]]) -> None:
    """Let what is made of the texts of domains that train together be what ``answered`` makes of it."""
    prepared = f.backbone.prepared
    f.backbone.prepared = lambda domains: answered(list(prepared(domains))) if len(domains) > 1 else prepared(domains)


def _followed(f: Federation, answered: Callable[[Any, int], Any]) -> list[Tables]:
    """What the first domain sends, its parameters and its test after each round, when the server answers otherwise;
    ``answered``: what it answers, given what the method made and the number of the answer."""
    sent: list[Tables] = []
    if isinstance(f.method, DomainMethod):
        aggregate = f.method.aggregate

        def replaced(uploads, *args):
            made = list(aggregate(uploads, *args))
            sent.append({f"upload {name}": value for name, value in uploads[_MINE].items()})
            return answered(made, len(sent) - 1)
        f.method.aggregate = replaced
    elif f.topology == "federated":
        f = replace(f, topology="local")
    seen = []
    for progress in run(f):
        if not progress.fraction_done and not progress.step:
            tests = {f"test {name}": values for t, _, scores in progress.tests if t == _MINE
                     for name, values in scores.values.items()}
            seen.append(of_domain(f, progress, _MINE) | tests | (sent[-1] if sent else {}))
    return seen


@dataclass(frozen=True)
class Exchange:
    """A round's ``uploads`` and ``answers``, the domains in their order, and their trained tables of items as it ends,
    ``kept``; ``more``: the server's other arguments."""

    uploads: list[Tables]
    answers: list[Tables]
    kept: list[Tables]
    more: tuple[Tensor, DrawKey]


def _exchanges(f: Federation) -> list[Exchange]:
    """Every exchange of a run, of a method that makes the uploads."""
    if not isinstance(f.method, DomainMethod) or f.topology != "federated":
        raise Inapplicable("no uploads of the method's own")
    result: list[Exchange] = []
    kept: list[Tables] = []
    upload, aggregate = f.method.upload, f.method.aggregate

    def watched(module: DomainModule, draw: DrawKey) -> Tables:
        kept.append({name: value.detach().clone() for name, value in module.named_parameters() if name in module.rows})
        return upload(module, draw)

    def answered(uploads: list[Tables], *more) -> list[Tables]:
        copied, answers = deepcopy(uploads), list(aggregate(uploads, *more))
        result.append(Exchange(copied, deepcopy(answers), kept[-len(copied):], more))
        return answers
    f.method.upload, f.method.aggregate = watched, answered
    finished(f)
    del f.method.upload, f.method.aggregate
    if not result:
        raise Inapplicable("no stage of it exchanges anything")
    return result


def uploads(pair: Pair) -> str:
    """(b) Uploads are as large whatever number of users a domain has, and hold no table of its items as it keeps it, or
    as it has changed, unless the method names it."""
    rounds, more = _exchanges(pair.federation()), _exchanges(pair.federation(domain_stream(DOMAINS, more_users=3)))
    for number, (one, other) in enumerate(zip(rounds, more)):
        _as_large(one.uploads, other.uploads)
        before = rounds[number - 1].kept if number else one.kept
        for upload, now, then in zip(one.uploads, one.kept, before):
            for name, value in upload.items():
                if item := _table_in(value, {own: [table, table - then[own]] for own, table in now.items()
                                             if name != own or own not in pair.method_cls.sent}):
                    raise Violated(f"upload: '{name}' is the domain's own table of its items, '{item}'; name it in "
                                   f"`sent`, or keep it")
    sent = rounds[0].uploads
    few = f"{len(sent[0])} tables" if len(sent[0]) > 5 else ", ".join(sent[0])
    return f"{few} of {len(sent)} domains; nothing has a number per user"


def _as_large(sent: list[Tables], theirs: list[Tables]) -> None:
    """Raise Violated if uploads, or what they hold before they go on with one number, follow the users' number."""
    more = [3 * (number + 1) for number in range(len(sent))]
    for name in sent[0]:
        values, others = ([upload.get(name, torch.empty(0)) for upload in world] for world in (sent, theirs))
        one, other = values[0], others[0]
        grown = [_filled(b) - _filled(a) for a, b in zip(values, others)]
        if one.shape != other.shape or grown[0] and all(size * more[0] == grown[0] * count
                                                        for size, count in zip(grown, more)):
            raise Violated(f"upload: '{name}' of shape {tuple(one.shape)} holds {grown[0]:+d} numbers, in the shape "
                           f"{tuple(other.shape)}, when the domain has {more[0]} users more; what users did stays at "
                           f"the domain")


def _filled(value: Tensor) -> int:
    """How many numbers of a table stand before those at its end that are all the same."""
    flat = value.flatten()
    return int((flat != flat[-1:]).nonzero().max()) + 1 if bool((flat != flat[-1:]).any()) else 0


def _table_in(value: Tensor, tables: Mapping[str, list[Tensor]]) -> str | None:
    """The name of the table whose numbers are all in an upload."""
    sent = value.double().flatten()
    return next((name for name, forms in tables.items() for table in forms
                 if bool((table != table.flatten()[0]).any()) and bool(torch.isin(table.double(), sent).all())), None)


def server_knows(pair: Pair) -> str:
    """(c) The server makes its answers of the uploads alone: an object that has seen no domain answers the same, as
    often as it is asked."""
    f = pair.federation()
    rounds = _exchanges(f)
    for number in range(len(rounds) + _CALLS):
        call, first = rounds[number % len(rounds)], number < len(rounds)
        more = call.more if first else (call.more[0], DrawKey(f.seed, 0, number))
        fresh, again = (partial(method.aggregate, deepcopy(call.uploads), *more)
                        for method in (pair.federation().method, f.method))
        after = call.answers if first else again()
        for domain, answers in enumerate(zip(fresh(), after)):
            if mismatch := tables_differ(*map(dict, answers), 0.0):
                raise Violated(f"aggregate: {mismatch} for domain {domain} in a run or after it; the method keeps "
                               f"something between calls, and so the server knows more than it was sent")
    return f"the same answers to {len(rounds[0].uploads)} domains in a run and in {_CALLS} calls after it"


def evaluation_data(pair: Pair) -> str:
    """(e) Other items to find in validation and test change no training; those of validation choose the round that a
    stage may start from."""
    federation = pair.federation()
    chooses = any(stage.from_best for stage in stages_of(federation.method, federation.backbone)[1:])

    def trained(stream: Stream) -> list[Tables]:
        f = pair.federation(stream)
        return [of_domain(f, progress, number) for progress in run(f) if not progress.fraction_done and not
                progress.step for number in range(len(f.stream.domains))]

    where = "the test" if chooses else "validation and test"
    for left, right in zip(trained(domain_stream(DOMAINS)), trained(domain_stream(DOMAINS, 1 if chooses else 2))):
        if mismatch := tables_differ(left, right):
            raise Violated(f"with other items to find in {where}, {mismatch}: training reads what it is to be tested "
                           f"on; use data.histories only")
    return f"training is the same with other items to find in {where}"


OF_PAIRS: list[tuple[str, Callable[[Pair], str]]] = [
    ("runs", runs),
    ("trains every parameter", every_parameter_trained),
    ("(a) other clients' data", other_domains),
    ("(b) uploads", uploads),
    ("(c) the server's knowledge", server_knows),
    ("(e) evaluation data", evaluation_data),
]
