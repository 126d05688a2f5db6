"""Find out by calling RecBole's models what they do, and write it down.

    python tools/probe_recbole.py              write the package's tables of facts and results/pages/recbole-models.md
    python tools/probe_recbole.py NAME ...     print what is found of some models

A model is called on made-up clients, one by one and all at once, and on a made-up domain. Everything that must hold is
looked at: the fields it reads, state that it keeps outside its parameters, global generators that it moves, and that
both ways give the same losses, gradients and scores.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Collection, Mapping

import numpy as np
import torch
from recbole.data.interaction import Interaction
from recbole.utils import ModelType
from torch import Tensor, nn

from fedcl_bench.plugin.silo import Histories
from fedcl_bench.recbole import client_facts, domain_facts, models
from fedcl_bench.recbole.calls import Caller, Host, TrialClients, padded_sequences
from fedcl_bench.recbole.client_facts import Facts
from fedcl_bench.recbole.domain_backbone import random_batch, random_domain
from fedcl_bench.recbole.domain_facts import DomainFacts
from fedcl_bench.recbole.domain_modules import Design, RecBoleModule, prepared
from fedcl_bench.recbole.models import INVERSE, ITEM, LABEL, LENGTH, NEGATIVE, SEQUENCE, USER, Refused, first_line
from fedcl_bench.recbole.parameters import classify
from fedcl_bench.testing.properties import random_state

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "results"))
from make_pages import FOLDER, index, write  # noqa: E402

WIDTH = 8  # of sequences
_FIELDS = (USER, ITEM, LABEL, NEGATIVE, SEQUENCE, LENGTH, INVERSE)
_OF_OTHERS = ("inter_matrix", "inter_feat", "inter_num", "history_user_matrix", "user_counter", "item_counter",
              "net_graph", "ckg_graph")
_HANDED_OVER = "dataset", "same_item_index"  # attributes that every batch of a domain sets anew


# ----------------------------------------------------------------------------------------------- clients of one user


def _reason(refused: Refused) -> str:
    """Why a model is refused; of one that asks its dataset for what is not there, what that is."""
    error = refused.__cause__
    if isinstance(error, AttributeError) and isinstance(error.obj, models.ClientDataset):
        asked = error.name
    elif isinstance(error, KeyError):
        asked = f"num({error.args[0]!r})"
    else:
        return str(refused)
    if asked in _OF_OTHERS:
        return f"needs other users' interactions (dataset.{asked}), which no client has"
    return f"needs features of items or users, or a knowledge graph (dataset.{asked})"


class _Config(models.Config):
    """Notes which hyper-parameters a model asks for."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return self.get(key)


def _builder(name: str, values: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Builds the model for a number of users and items, of negatives per positive, a device and a history; its
    attribute ``asked`` has the names it looked up in its configuration."""
    def build(users, items, negatives=1, device="cpu", history=None):
        config = _Config(models.configuration(name, values, WIDTH, negatives, device))
        dataset = models.ClientDataset(users, items, WIDTH, history)
        model = models.built(models.model_class(name), config, dataset, 0)
        model.asked = frozenset(config.asked)
        return model
    return build


def of_clients(name: str) -> Facts | str:
    """A model's row of ``client_facts.TABLE``."""
    try:
        _check_trainable(name)
        facts, known = _tried(name, {}), models.defaults(name)
        bpr = known.get("loss_type") == "CE" and _variant(name, "loss_type", "BPR")
        switched = {key: _variant(name, key, True) for key, value in known.items() if value is False}
        return replace(facts, bpr=bool(bpr) and bpr.samples == "target pair", loss_alone_with={
            key: other.loss_alone for key, other in switched.items() if other and other.loss_alone != facts.loss_alone})
    except Refused as error:
        return _reason(error)


def _variant(name: str, key: str, value: Any) -> Facts | None:
    """Facts of a model with another hyper-parameter; None if it cannot be trained with it."""
    try:
        return _tried(name, {key: value})
    except Refused:
        return None


def _check_trainable(name: str) -> None:
    """Raise Refused for a model whose kind says that gradients of ``calculate_loss`` do not train it."""
    cls = models.model_class(name)
    if cls.type == ModelType.TRADITIONAL:
        raise Refused(client_facts.COMPUTED)
    transform = models.defaults(name).get("transform")
    if transform not in (None, "inverse_itemseq"):
        raise Refused(f"needs RecBole's transform '{transform}' of every batch")
    if cls.calculate_loss.__code__.co_argcount != 2:
        raise Refused("takes turns in a trainer of its own: calculate_loss has more arguments than the batch")


def _tried(name: str, values: Mapping[str, Any]) -> Facts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of RecBole's code
        build = _builder(name, values)
        parameters = classify(build, [])
        trial = TrialClients(build, parameters, WIDTH)
        facts = _look_at_loss(trial, Facts("", history=_history_attributes(build)))
        facts = replace(facts, loss_alone=_blocked(lambda alone: _losses(trial, replace(facts, loss_alone=alone)),
                                                   "its loss"))
        facts = _look_at_scores(trial, facts)
        return replace(facts, of_users=tuple(p.name for p in parameters if p.follows == "users"))


def _noting(read: set[str], known: Collection[str] | None = None) -> type[Interaction]:
    """Batches that note which fields are read of them, and have no others than the known ones."""
    class Noting(Interaction):
        def __getitem__(self, index):
            if isinstance(index, str) or index is None:
                read.add(index)
                if known is not None and index not in known:
                    raise Refused(f"reads '{index}' of a batch, which is not among {', '.join(_FIELDS)}")
            return super().__getitem__(index)
    return Noting


class _Watching(Caller):
    """Notes what a model reads of its batches."""

    def batch(self, fields):
        self.read: set[str] = set()
        return _noting(self.read, fields)(fields)


class _Keeping(Caller):
    """Keeps what a model returns."""

    raw: list[Tensor]

    def call(self, *arguments):
        result, mode = super().call(*arguments)
        self.raw = [*getattr(self, "raw", []), result]
        return result, mode


def _losses(trial: TrialClients, facts: Facts) -> list[Tensor]:
    """Every client's loss on two batches, and the gradients of all parameters."""
    values = []
    for chosen in ([[0]] if facts.samples == "user" else [[1, 0, 2], [0]]):
        tables = {name: value.clone().requires_grad_() for name, value in trial.tables.items()}
        loss = trial.loss(trial.caller(facts), tables, torch.tensor(chosen).expand(trial.CLIENTS, -1))
        values += [loss, *torch.autograd.grad(loss.sum(), list(tables.values()), allow_unused=True)]
    return [torch.zeros(()) if value is None else value.detach() for value in values]


def _history_attributes(build: Callable[..., nn.Module]) -> dict[str, str]:
    """The attributes of a model that hold the user's history, found by giving it two."""
    seen = []
    for items in ([3, 7, 2, 0], [5, 9, 0, 0]):
        ids = torch.tensor([[0] * 4, items])
        real = (ids > 0).float()
        length = real.long().sum(1)
        model = build(1, TrialClients.ITEMS, history=(ids, real, length))
        values = {attribute: value for attribute, value in [*vars(model).items(), *model.named_buffers()]
                  if isinstance(value, Tensor)}
        seen.append((values, {"ids": ids, "values": real, "lengths": length}))
    (first, _), (second, given) = seen
    history = {}
    for attribute, value in second.items():
        if attribute in first and torch.equal(first[attribute], value):
            continue
        what = [kind for kind, known in given.items() if known.shape == value.shape and torch.equal(known, value)]
        if not what:
            raise Refused(f"makes '{attribute}' of the user's history in a way of its own")
        history[attribute] = what[0]
    return history


def _look_at_loss(trial: TrialClients, facts: Facts) -> Facts:
    """What the loss reads, counts and keeps, by calling it for one client."""
    facts = replace(facts, samples="point")
    count = trial.POSITIVES
    item, length = trial.positives[:1] + 1, torch.full((1, count), count).clamp(max=trial.width)
    fields = {ITEM: item, NEGATIVE: trial.negatives[:1, :count] + 1, LABEL: (torch.arange(count)[None] < 2).double(),
              LENGTH: length, SEQUENCE: padded_sequences(item, torch.zeros_like(length), length, trial.width, False),
              USER: torch.ones_like(item)}
    fields[INVERSE] = fields[SEQUENCE]
    fields = {name: value[0] for name, value in fields.items()}
    caller = trial.caller(facts, _Watching)
    host = caller.host(trial.ITEMS, trial.PER_POSITIVE, trial.keys.device)
    kept = {f"{name}.{attribute}".strip("."): value for name, module in host.model.named_modules()
            for attribute, value in [*vars(module).items(), *module.named_buffers(recurse=False)]
            if isinstance(value, Tensor)}
    versions = {name: value._version for name, value in kept.items()}
    generators = _generators()
    try:
        caller.call(host, "calculate_loss", {name: value[0] for name, value in trial.tables.items()},
                    item[0] if facts.history else None, fields, trial.keys[0], 0)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"its loss fails on one client: {first_line(error)}") from error
    if _generators() != generators:
        raise Refused("draws its loss from a global random generator, which no client owns")
    for name, value in kept.items():
        if value._version != versions[name]:
            raise Refused(f"keeps '{name}' from batch to batch outside its parameters, where the federation does not "
                          f"see it")
    counters = []
    for attribute, (before, now) in _changed(host).items():
        if type(before) in (int, float) and type(now) in (int, float):
            if now != before + 1:
                raise Refused(f"changes '{attribute}' from batch to batch")
            counters.append(attribute)
    return replace(facts, samples=_samples(caller.read, host.model.asked), reversed=INVERSE in caller.read,
                   counters=tuple(counters))


def _samples(read: set[str], asked: frozenset[str]) -> str:
    """What a sample is, from the fields that the loss reads and the hyper-parameters that the model asks for."""
    if read & {SEQUENCE, INVERSE}:
        return "target pair" if NEGATIVE in read else "target"
    if NEGATIVE in read:
        return "group" if "train_neg_sample_args" in asked else "pair"
    if LABEL in read:
        return "point"
    if read == {USER}:
        return "user"
    raise Refused(f"reads {', '.join(sorted(read)) or 'nothing'} of a batch, which is no kind of sample known here")


def _changed(host: Host) -> dict[str, tuple]:
    """Attributes set since the host was made: (before, now)."""
    names = {module: name for name, module in host.model.named_modules()}
    return {f"{names[module]}.{name}".strip("."): (before.get(name), value) for module, before in host.before
            for name, value in vars(module).items()
            if not name.startswith("_") and name != "training" and before.get(name) is not value}


def _look_at_scores(trial: TrialClients, facts: Facts) -> Facts:
    """Which method scores all items, and whether vmap takes it."""
    usable, why = {}, ""
    for method in ("full_sort_predict", "predict"):
        scored = replace(facts, score=method)
        generators = _generators()
        caller = trial.caller(replace(scored, score_alone="trial"), _Keeping)
        try:
            values = trial.scores(caller)
        except NotImplementedError:
            continue
        except Exception as error:
            why = f"{method} fails on one client: {first_line(error)}"
            continue
        if _generators() != generators:
            why = f"draws its scores ({method}) from a global random generator"
        elif values.shape != (trial.CLIENTS, trial.ITEMS):
            why = f"{method} gives scores of shape {tuple(values.shape[1:])} for {trial.ITEMS} items"
        else:
            scored = replace(scored, log=all(bool((raw >= 0.0).all()) and abs(float(raw.sum()) - 1.0) < 1e-9
                                             for raw in caller.raw))
            alone = _blocked(lambda alone: [trial.scores(trial.caller(replace(scored, score_alone=alone)))], "scoring")
            usable[method] = replace(scored, score_alone=alone), values
    if not usable:
        raise Refused(why or "has no method that scores items")
    first, values = next(iter(usable.values()))
    if first.score_alone and "predict" in usable:
        second, others = usable["predict"]
        if not second.score_alone and torch.equal(values.argsort(1), others.argsort(1)):
            first = second
    return first


def _blocked(results: Callable[[str], list[Tensor]], what: str) -> str:
    """Why vmap does not take something, or nothing: ``results`` of both ways must be equal."""
    try:
        alone = results("one by one")
    except Exception as error:
        raise Refused(f"{what} fails on one client: {first_line(error)}") from error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            at_once = results("")
        except Exception as error:
            return _operator(error)
    for warning in said:
        if "batching rule" in str(warning.message):
            return _operator(warning.message)
    for value, other in zip(alone, at_once):
        if not torch.allclose(value, other, rtol=1e-9, atol=1e-9, equal_nan=True):
            return "vmap gives other numbers"
    return ""


def _operator(error: Exception | Warning) -> str:
    """The operator that vmap does not know, from what PyTorch says."""
    operator = re.search(r"aten::\w+(\.\w+)?", str(error))
    if operator:
        return operator[0]
    if ".item()" in str(error) or "data-dependent" in str(error):
        return "control flow that depends on data"
    if "storage" in str(error) or "numpy" in str(error):
        return "Tensor.numpy"
    return first_line(error)


def _generators() -> tuple:
    """The states of PyTorch's generator, and then of NumPy's and Python's."""
    kind, state, *position = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), state.tobytes(), tuple(position), random.getstate()


# ------------------------------------------------------------------------------------------------------------ domains


def of_domains(name: str) -> DomainFacts | str:
    """A sequential model's row of ``domain_facts.TABLE``."""
    if (transform := models.defaults(name).get("transform")) not in (None, "mask_itemseq"):
        return f"needs RecBole's transform '{transform}' of every batch"
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of RecBole's code
            facts, negatives = _tried_in_domain(name, {})
            if models.defaults(name).get("loss_type") == "CE":
                try:
                    _, negatives = _tried_in_domain(name, {"loss_type": "BPR"})
                except Refused:  # it has no such loss
                    pass
            return replace(facts, bpr=negatives)
    except Refused as error:
        return _reason(error)


def _tried_in_domain(name: str, values: Mapping[str, Any]) -> tuple[DomainFacts, bool]:
    """Facts of a model with its own loss, and whether this loss reads negatives.

    The model has noise on all parameters, so that nothing is zero by chance.
    """
    torch.manual_seed(0)
    parameters = tuple(classify(lambda users, items: prepared(name, values, WIDTH, random_domain(users, items))[0], []))
    of_users = [p.name for p in parameters if p.follows == "users"]
    if of_users:
        raise Refused(f"keeps a vector of every user ({', '.join(of_users)}), and domains have different numbers of "
                      f"users")
    module = RecBoleModule(name, values, WIDTH, random_domain(), Design(parameters, DomainFacts(), negatives=True))
    with torch.no_grad():
        for value in module.parameters():
            value += 0.1 * torch.randn_like(value)
    batch, targets = random_batch(torch.arange(7) % 6 + 1, WIDTH)
    negatives, draws = _look_at_domain_loss(module, batch, targets)
    _look_at_domain_scores(module, batch)
    module.design = Design(parameters, DomainFacts(draws=draws), negatives)
    shorter = _can_be_shorter(module)
    return DomainFacts(draws=draws, fixed_length=not shorter, divides=shorter and not draws and _divides(module)), \
        negatives


def _look_at_domain_loss(module: RecBoleModule, batch: Histories, targets: Tensor) -> tuple[bool, bool]:
    """Whether the loss reads negatives, and whether it draws from Python's or NumPy's generator."""
    read: set[str] = set()
    module.interaction = _noting(read)
    host, losses = Host(module.train().model), []
    try:
        for _ in range(2):
            with random_state(0):
                start = _generators()
                losses.append(module.loss(batch, targets))
                draws = _generators()[1:] != start[1:]
    except Exception as error:
        raise error if isinstance(error, Refused) else Refused(f"its loss fails: {first_line(error)}") from error
    finally:
        del module.interaction
    for attribute, (old, new) in _changed(host).items():
        counts = type(old) in (int, float) and type(new) in (int, float)
        if attribute not in _HANDED_OVER and (counts or not torch.equal(*losses)):
            raise Refused(f"keeps '{attribute}' from batch to batch outside its parameters")
    if not losses[0].requires_grad:
        raise Refused("has a loss without a gradient")
    return NEGATIVE in read, draws


def _look_at_domain_scores(module: RecBoleModule, batch: Histories) -> None:
    try:
        with torch.no_grad():
            scores = module.eval().scores(batch)
    except NotImplementedError:
        raise Refused("scores one item at a time, and here all items are ranked") from None
    except Exception as error:
        raise Refused(f"full_sort_predict fails: {first_line(error)}") from error
    if scores.shape != (len(batch.lengths), module.n_items):
        raise Refused(f"gives scores of shape {tuple(scores.shape)} for {len(batch.lengths)} histories and "
                      f"{module.n_items} items")


def _can_be_shorter(module: RecBoleModule) -> bool:
    """Whether loss and scores are the same without padding behind the longest history of a batch."""
    for part in module.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for longest in (1, 3):
        padded, targets = random_batch(torch.arange(7) % longest + 1, WIDTH)
        results = []
        for batch in (padded, replace(padded, items=padded.items[:, :longest])):
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    results.append((module.loss(batch, targets), module.scores(batch)))
            except Exception:  # of a model that knows one length
                return False
        if not all(torch.allclose(value, other, rtol=1e-4, atol=1e-5) for value, other in zip(*results)):
            return False
    return True


def _divides(module: RecBoleModule) -> bool:
    """Whether the loss of a batch is the mean of those of its samples; without dropout, in training mode."""
    batch, targets = random_batch(torch.arange(7) % 6 + 1, WIDTH)
    with torch.no_grad():
        whole = module.train().loss(batch, targets)
        alone = [module.loss(Histories(batch.items[k:k + 2], batch.lengths[k:k + 2], batch.users[k:k + 2]),
                             targets[k:k + 2]) * len(targets[k:k + 2]) for k in range(0, 7, 2)]
    return torch.allclose(whole, sum(alone) / 7, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ tables and the page


def source_of(row: Any) -> str:
    """A row as Python, without what every row has."""
    if isinstance(row, str):
        return "COMPUTED" if row == client_facts.COMPUTED else f'"{row}"'
    values = ((f, getattr(row, f.name)) for f in dataclasses.fields(row))
    required = (f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
                for f in dataclasses.fields(row))
    parts = [repr(value) if needed else f"{f.name}={value!r}" for needed, (f, value) in zip(required, values)
             if needed or value and value != f.default]
    return f"{type(row).__name__}({', '.join(parts)})".replace("'", '"')


def write_table(path: Path, rows: Mapping[str, Any]) -> None:
    """Put rows in the place of those of a module's ``TABLE``, which ends it."""
    head, start, _ = path.read_text(encoding="utf-8").partition("\nTABLE: ")
    lines = []
    for name, row in rows.items():
        line = f'    "{name}": {source_of(row)},'
        if len(line) > 120:
            indented = {"initial_indent": "    ", "subsequent_indent": "        "}
            line = "\n".join(textwrap.wrap(line.strip(), 120, **indented))
        lines.append(line)
    kind = "Facts" if "client" in path.name else "DomainFacts"
    path.write_text(f"{head}{start}dict[str, {kind} | str] = {{\n" + "\n".join(lines) + "\n}\n", encoding="utf-8")


_HEAD = """# RecBole's models as backbones

Made by `python tools/probe_recbole.py`: every general and sequential recommender of RecBole 1.2.0, tried on made-up
clients and domains with its own hyper-parameters. How it works: [plugins.md](../../docs/plugins.md).

- **vectorised**: many clients are trained at once by `torch.func.vmap`.
- **one by one**: an operator that vmap does not take, or Python code that looks at numbers, is in the way; the numbers
  are the same, a round takes longer.
- **refused**: the model cannot be trained at clients that see only their own interactions, or keeps state outside its
  parameters.
- **by domains**: whether domains of many users can train a sequential model, by RecBole's own loss in mini-batches
  ([domains.md](../../docs/domains.md#methods-and-backbones)).

{counts}

| model | kind | as a backbone | a sample of its loss | private | by domains |
|---|---|---|---|---|---|
"""
_SAMPLES = {"point": "item, label", "pair": "item, negative", "group": "item, all its negatives",
            "target": "sequence, next item", "target pair": "sequence, next item, negative",
            "user": "the whole history"}


def page() -> str:
    """``results/pages/recbole-models.md``, from the package's tables."""
    kinds, rows = models.names(), client_facts.TABLE
    status = {name: client_facts.status(name) for name in rows}
    usable = {kind: sum(kinds[name] == kind and isinstance(row, Facts) for name, row in rows.items())
              for kind in ("general", "sequential")}
    vectorised, alone, refused = (sum(text.startswith(start) for text in status.values())
                                  for start in ("vectorised", "one by one", "refused"))
    counts = (f"{usable['general']} general and {usable['sequential']} sequential models can be used: {vectorised} "
              f"vectorised, {alone} one by one. {refused} are refused.\nDomains can train "
              f"{sum(isinstance(row, DomainFacts) for row in domain_facts.TABLE.values())} sequential models.")
    lines = []
    for name, row in rows.items():
        samples, of_users = (_SAMPLES[row.samples], row.of_users) if isinstance(row, Facts) else ("", ())
        private = ", ".join(f"`{parameter}`" for parameter in of_users)
        cells = name, kinds[name], status[name], samples, private, domain_facts.status(name)
        lines.append(f"| {' | '.join(cells)} |")
    return _HEAD.format(counts=counts) + "\n".join(lines) + "\n"


def all_models() -> dict[str, list[str]]:
    """RecBole's names of its general and its sequential models."""
    found = {}
    for kind in ("general", "sequential"):
        module = __import__(f"recbole.model.{kind}_recommender", fromlist=["*"])
        found[kind] = [name for name, value in sorted(vars(module).items()) if isinstance(value, type)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Find out by calling RecBole's models what they do, and write it "
                                                 "down.")
    parser.add_argument("names", nargs="*", help="print what is found of these models, and write nothing")
    names = parser.parse_args().names
    torch.set_num_threads(1)  # operations are tiny
    if names:
        for name in names:
            print(name, of_clients(name), *[of_domains(name)] * (models.names()[name] == "sequential"), sep="\n  ")
        return
    found = all_models()
    client_facts.TABLE.update(dict.fromkeys(sum(found.values(), []), ""))
    domain_facts.TABLE.update(dict.fromkeys(found["sequential"], ""))
    for module, probe in ((client_facts, of_clients), (domain_facts, of_domains)):
        module.TABLE.update({name: probe(name) for name in module.TABLE})
        write_table(Path(module.__file__), module.TABLE)
    write(ROOT / FOLDER / "recbole-models.md", page())
    write(ROOT / FOLDER / "README.md", index(ROOT / FOLDER))


if __name__ == "__main__":
    main()
