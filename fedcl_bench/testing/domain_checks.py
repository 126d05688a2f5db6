"""What every plugin of domains must do, and what must not leave a domain.

A domain may learn of the others by what the server answers and by nothing else; so the same answers are given to it in
a second world, in which the others hold other interactions and features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import torch
from torch import Tensor

from ..training.silo_modules import carried, histories
from ..training.silo_parts import Silo
from ..data.stream import Stream
from ..plugin.silo import DomainData, DomainMethod, DomainModule
from ..rng import DrawKey, Tables
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..federation.cross_silo import CrossSilo, stages_of
from .report import Inapplicable, Violated
from .trials import DOMAINS, Pair, all_tables, tables_differ
from .worlds import domain_stream

_OTHER = 9  # a seed that is none of the domains'
_MINE = 0  # the domain that must not notice


def of_domain(f: Federation, progress: Progress, number: int) -> Tables:
    """A domain's parameters after a round."""
    tables, prefix = progress.model.public | progress.model.dense, f"{f.stream.domains[number].name}/"
    return {name: table for name, table in tables.items() if name.startswith(prefix)}


def runs(pair: Pair) -> str:
    """It trains and tests every domain, with finite parameters."""
    last, domains = pair.points[-1], pair.stream.domains
    if [t for t, _, _ in last.tests] != list(range(len(domains))):
        raise Violated(f"tested {[t for t, _, _ in last.tests]}, expected all {len(domains)} domains")
    for name, table in all_tables(last).items():
        if table.isnan().any():
            raise Violated(f"{name} has entries that are no number at the end")
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
    """The loss of all samples of a silo's domains."""
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
    """What the first domain sends, its parameters and its test after each round, when the server answers otherwise.

    Args:
        answered: what it answers, given what the method made and the number of the answer.
    """
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


def uploads(pair: Pair) -> str:
    """(b) A domain uploads no row per user, and no table of its items as it keeps it unless the method names it."""
    sent = _sent(pair)
    silos = CrossSilo(pair.federation())
    for upload, domain in zip(sent, silos.domains):
        kept = {name: value for name, value in carried(domain.module).items() if name in domain.module.rows}
        for name, value in upload.items():
            if value.dim() and domain.step.n_users in value.shape:
                raise Violated(f"upload: '{name}' has the shape {tuple(value.shape)}, a row for each of the domain's "
                               f"{domain.step.n_users} users; what users did stays at the domain")
            if name in kept and name not in pair.method_cls.sent:
                raise Violated(f"upload: '{name}' is the domain's own table of its items; name it in `sent`, or keep "
                               f"it")
    few = f"{len(sent[0])} tables" if len(sent[0]) > 5 else ", ".join(sent[0])
    return f"{few} of {len(sent)} domains; nothing has a row per user"


def _sent(pair: Pair) -> list[Tables]:
    """What each domain uploads in the first round."""
    f = pair.federation()
    if not isinstance(f.method, DomainMethod) or f.topology != "federated":
        raise Inapplicable("no uploads of the method's own")
    sent: list[list[Tables]] = []
    aggregate = f.method.aggregate
    f.method.aggregate = lambda uploads, *args: sent.append(list(uploads)) or aggregate(uploads, *args)
    for progress in run(f):
        if sent:
            return sent[0]
    raise Inapplicable("no stage of it exchanges anything")


def server_knows(pair: Pair) -> str:
    """(c) The server makes its answers of the uploads alone: an object that has seen no domain answers the same."""
    sent, f = _sent(pair), pair.federation()
    weights, draw = torch.full((len(sent),), 1.0 / len(sent), dtype=torch.float64), DrawKey(f.seed, 0, 0)
    trained = pair.federation()
    for progress in run(trained):
        pass
    left, right = (list(method.aggregate(sent, weights, draw)) for method in (f.method, trained.method))
    for number, (fresh, after) in enumerate(zip(left, right)):
        if mismatch := tables_differ(dict(fresh), dict(after), 0.0):
            raise Violated(f"aggregate: {mismatch} for domain {number} after a run; the method keeps something between "
                           f"calls, and so the server knows more than it was sent")
    return f"the same answers to {len(sent)} domains before and after a run"


def evaluation_data(pair: Pair) -> str:
    """(e) Other items to find in validation and test change no training; those of validation choose the round that a
    stage may start from."""
    chooses = any(stage.from_best for stage in stages_of(pair.federation())[1:])

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
