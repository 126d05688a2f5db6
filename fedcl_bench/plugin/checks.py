"""What plugins must return: checked wherever the engine calls a hook, with errors that name the plugin and the hook."""

from __future__ import annotations

import math
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .backbone import Backbone
from .method import Pull, SoftTargets
from .state import Snapshot
from ..rng import Tables
from ..core.errors import PluginError, RunFailed


def _named(plugin: Any, hook: str) -> str:
    return f"{plugin.kind} '{plugin.name}': {hook}"


def _described(value: Any) -> str:
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def _wrong(plugin: Any, hook: str, value: Any, expected: str, verb: str = "returned") -> PluginError:
    return PluginError(f"{_named(plugin, hook)} {verb} {_described(value)},\nexpected {expected}.")


def check_tensor(plugin: Any, hook: str, value: Any, shape: tuple[int, ...], meaning: str, whole: bool = False) -> None:
    """Raise PluginError unless a hook's result is a tensor of this shape. ``meaning``: the shape's letters and what
    stands in them, as ``(C,): one number per client``; ``whole``: the numbers must be int64 instead of floating."""
    if (not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape)
            or (value.dtype != torch.int64 if whole else not value.is_floating_point())):
        kind = "int64" if whole else "floating"
        raise _wrong(plugin, hook, value, f"a {kind} tensor of shape {tuple(shape)} = {meaning}")


def check_pull(method: Any, name: str, pull: Any, value: Tensor, private: bool) -> None:
    """Raise PluginError unless ``Method.pull`` returned what a parameter can be kept near; ``value``: as the server has
    it, or with a row per user."""
    shapes, to = f"{len(value)} or fewer, as {tuple(value.shape[1:])} each", getattr(pull, "to", pull)
    if not isinstance(pull, Pull) or not 0.0 <= pull.weight < math.inf or (to is None and private):
        raise PluginError(f"{_named(method, 'pull')} returned {str(pull)[:80]} for '{name}',\nexpected None or a Pull, "
                          f"with a weight from 0 and, of a private parameter, what to.")
    if to is not None and (not isinstance(to, Tensor) or not to.is_floating_point() or to.dim() != value.dim()
                           or not len(to) or any(n > most for n, most in zip(to.shape, value.shape))
                           or to.shape[2:] != value.shape[2:]):
        raise PluginError(f"{_named(method, 'pull')} returned {_described(to)} as 'to' of '{name}',\n"
                          f"expected a floating tensor of {shapes}.")


def check_soft_targets(method: Any, soft: Any, model: Snapshot, sessions: bool, round_: int) -> None:
    """Raise PluginError unless ``Method.soft_targets`` returned lists that the first users of a model can be trained
    on; ``sessions``: they train on sessions instead, where nothing reads lists."""
    if sessions:
        raise PluginError(f"{_named(method, 'soft_targets')} returned lists to a sequential backbone,\nexpected None; "
                          f"a term on sessions is one of local_loss.")
    if not isinstance(soft, SoftTargets) or soft.reduction not in ("mean", "sum"):
        raise PluginError(f"{_named(method, 'soft_targets')} returned {str(soft)[:80]},\nexpected None or SoftTargets, "
                          f"whose reduction is mean or sum.")
    shape = tuple(soft.items.shape) if isinstance(soft.items, Tensor) else ()
    if len(shape) != 2 or shape[0] > model.n_users:
        raise _wrong(method, "soft_targets", soft.items, f"items (n, N): lists of the first n of {model.n_users} users")
    check_items(method, "soft_targets", soft.items, shape[0], model.n_items, round_)
    check_tensor(method, "soft_targets", soft.targets, shape, "(n, N): a probability per item of the lists")
    if soft.chosen is not None and (soft.chosen.shape != shape or soft.chosen.dtype != torch.bool):
        raise _wrong(method, "soft_targets", soft.chosen, f"chosen, bool of shape {shape}")
    if isinstance(soft.weights, Tensor):
        check_tensor(method, "soft_targets", soft.weights, shape[:1], "(n,): a weight per user")


def check_correction(method: Any, result: Any, parameters: Tables) -> None:
    """Raise PluginError unless ``Method.gradient_correction`` returned numbers for the clients' public parameters."""
    if not isinstance(result, Mapping) or any(name not in parameters for name in result):
        raise PluginError(f"{_named(method, 'gradient_correction')} returned "
                          f"{', '.join(map(str, result)) if isinstance(result, Mapping) else _described(result)},\n"
                          f"expected a dictionary of some of the public parameters: {', '.join(parameters)}.")
    for name, value in result.items():
        check_tensor(method, f"gradient_correction['{name}']", value, tuple(parameters[name].shape),
                     "(C, ...), of an item table (C, n, ...)")


def check_metric(metric: Any, values: Any, users: int) -> None:
    """Raise PluginError unless a metric's values are finite numbers, one per user."""
    check_tensor(metric, "values", values, (users,), "(n,): a number per user")
    if not bool(torch.isfinite(values).all()):
        wrong = int((~torch.isfinite(values)).nonzero()[0])
        raise PluginError(f"{_named(metric, 'values')} returned {float(values[wrong])} for list {wrong},\n"
                          f"expected finite numbers, also of lists without a hit or with fewer items than places.")


def require_finite_scores(plugin: Any, hook: str, scores: Tensor, users: Tensor) -> None:
    """Raise RunFailed, naming the plugin, if a score of one of the users is nan or infinite. ``scores``: (n, ...),
    before items are masked: those not to be ranked get -inf by design."""
    if math.isfinite(float(scores.sum())):  # what is not finite stays so in sums, the quickest pass there is
        return
    wrong = ~scores.isfinite()
    if not bool(wrong.any()):  # large numbers, whose sum alone is infinite
        return
    value, theirs = float(scores[wrong][0]), users[wrong.flatten(1).any(1)]
    raise RunFailed(f"{_named(plugin, hook)} returned {value:g} as a score for {len(theirs)} of {len(users)} users "
                    f"ranked together (user {int(theirs[0])} first),\nexpected finite numbers, which can be ranked.")


def check_items(plugin: Any, hook: str, items: Any, clients: int, n_items: int, round_: int) -> None:
    """Raise PluginError unless these are item ids of C clients. On a GPU, whose ids have to be waited for, they are
    looked at in a step's first round only."""
    columns = items.shape[1] if isinstance(items, Tensor) and items.dim() == 2 else 0
    check_tensor(plugin, hook, items, (clients, columns), "(C, n): item ids of each client", whole=True)
    looks = items.numel() and (round_ == 0 or items.device.type == "cpu")
    if looks and not (0 <= int(items.min()) and int(items.max()) < n_items):
        raise PluginError(f"{_named(plugin, hook)} returned ids from {int(items.min())} to {int(items.max())},\n"
                          f"expected ids of the {n_items} items known, from 0.")


def check_sessions(plugin: Any, numbers: Any, count: Tensor, round_: int) -> None:
    """Raise PluginError unless ``replayed_sessions`` gives numbers of C clients' sessions, of which each has ``count``,
    (C,). On a GPU they are looked at as ``check_items`` looks at its."""
    columns = numbers.shape[1] if isinstance(numbers, Tensor) and numbers.dim() == 2 else 0
    check_tensor(plugin, "replayed_sessions", numbers, (len(count), columns), "(C, K): numbers of each client's "
                 "training sessions", whole=True)
    looks = columns and (round_ == 0 or numbers.device.type == "cpu")
    if looks and not bool(((numbers >= -1) & (numbers < count[:, None])).all()):
        raise PluginError(f"{_named(plugin, 'replayed_sessions')} returned numbers from {int(numbers.min())} to "
                          f"{int(numbers.max())},\nexpected those of each client's training sessions, from 0, or -1.")


def check_upload(method: Any, declared: Mapping[str, tuple[int, ...]], name: str, value: Tensor, clients: int,
                 private: Tables) -> None:
    """Raise PluginError if a method's upload is not what ``Method.uploads`` declares, or is a private parameter."""
    if not isinstance(declared, Mapping) or not all(isinstance(shape, (tuple, list)) for shape in declared.values()):
        raise _wrong(method, "uploads", declared, "each upload's shape per client by name, as {'norm': (), 'sketch': "
                     "(8,)}")
    if name not in declared:
        raise PluginError(f"{_named(method, 'local.upload')} sends '{name}', which uploads() does not declare; "
                          f"declared: {', '.join(declared) or 'nothing'}.")
    shape = tuple(declared[name])
    if not isinstance(value, Tensor):
        raise PluginError(f"{_named(method, 'local.upload')} sends '{name}' = {_described(value)},\n"
                          f"expected a tensor of shape {(clients, *shape)} = (C, ...).")
    if tuple(value.shape) != (clients, *shape):
        raise PluginError(f"{_named(method, 'local.upload')} sends '{name}' of shape {tuple(value.shape)},\n"
                          f"expected {(clients, *shape)} = (C, ...): uploads() declares {shape} per client.")
    for parameter, values in private.items():
        if values.numel() != value.numel() or not bool(value.any()):  # zeros say nothing
            continue
        like = value.dtype if value.is_floating_point() else values.dtype  # of a whole number, not what is left of 1.7
        if torch.equal(values.flatten().to(like), value.flatten().to(like)):
            raise PluginError(f"{_named(method, 'local.upload')} sends '{name}', which is the private parameter "
                              f"'{parameter}'; private parameters stay at the client.")


def check_sum(method: Any, declared: Mapping[str, tuple[int, ...]], name: str, value: Tensor | tuple[Tensor, Tensor],
              items: Tensor | None, clients: int) -> None:
    """Raise PluginError if what a client adds to a sum is not what ``Method.sums`` declares."""
    if name not in declared:
        raise PluginError(f"{_named(method, 'local.add')} sends '{name}', which sums() does not declare; declared: "
                          f"{', '.join(declared) or 'nothing'}.")
    shape = tuple(declared[name])
    if isinstance(value, tuple):
        left, right = value
        if items is not None:
            raise PluginError(f"{_named(method, 'local.add')} sends '{name}' as a pair of matrices with items; give "
                              f"all {shape[0]} rows and no items, or the product of the two.")
        check_tensor(method, f"local.add('{name}')", left, (clients, shape[0], left.shape[-1]), "(C, n, k)")
        check_tensor(method, f"local.add('{name}')", right, (clients, left.shape[-1], *shape[1:]), "(C, k, m)")
        return
    expected = (clients, *shape) if items is None else (*items.shape, *shape[1:])
    check_tensor(method, f"local.add('{name}')", value, expected, f"(C, ...): sums() declares {shape}")
    if items is not None:
        check_items(method, f"local.add('{name}')", items, clients, shape[0], 0)


def check_sent(method: Any, declared: Mapping[str, tuple[int, ...]], sent: Mapping[str, Any], summed: bool = False
               ) -> None:
    """Raise PluginError if clients did not send all that the method declares: uploads, or what the server sums up."""
    if missing := [name for name in declared if name not in sent]:
        hook = "before_training" if method.uploads_first and not summed else "end_local"
        declares, call = ("sums", "add") if summed else ("uploads", "upload")
        raise PluginError(f"{_named(method, hook)} did not send {', '.join(missing)}, which {declares}() declares; "
                          f"call local.{call}(name, value).")


def checked_tables(method: Any, hook: str, result: Any, public: Tables) -> Tables:
    """What a hook of the server made of the public parameters; raises PluginError unless all are there with the same
    shapes and precision."""
    if not isinstance(result, Mapping) or list(result) != list(public):
        raise PluginError(f"{_named(method, hook)} returned "
                          f"{', '.join(map(str, result)) if isinstance(result, Mapping) else _described(result)},\n"
                          f"expected the public {'item tables' if hook == 'aggregate' else 'parameters'} in their "
                          f"order: {', '.join(public)}.")
    for name, table in public.items():
        check_tensor(method, f"{hook}['{name}']", result[name], tuple(table.shape), "the shape that was sent")
        if result[name].dtype != table.dtype:
            raise _wrong(method, f"{hook}['{name}']", result[name], f"{table.dtype}, as the parameter has")
    return dict(result)


def check_domain_upload(method: Any, upload: Any, declared: Iterable[str]) -> None:
    """Raise PluginError unless a domain uploads tensors under names with declared beginnings."""
    if not isinstance(upload, Mapping) or not all(isinstance(value, Tensor) for value in upload.values()):
        raise _wrong(method, "upload", upload, "a dictionary of tensors")
    if undeclared := [name for name in upload if not name.startswith(tuple(declared))]:
        raise PluginError(f"{_named(method, 'upload')} sends '{undeclared[0]}', which is not declared;\n"
                          f"expected: {', '.join(declared)} (`sent` of the method names what is sent).")


def check_downloads(method: Any, downloads: Any, domains: int) -> None:
    """Raise PluginError unless the server answers each of so many domains."""
    if not isinstance(downloads, Sequence) or len(downloads) != domains:
        raise _wrong(method, "aggregate", downloads, f"a list of {domains} dictionaries: what each domain receives")


def check_download(method: Any, model: Any, download: Any) -> None:
    """Raise PluginError unless what a domain receives are values of its parameters and buffers, in their shapes."""
    if not isinstance(download, Mapping):
        raise PluginError(f"{_named(method, 'aggregate')} returned {_described(download)} for a domain,\n"
                          f"expected a dictionary of values of its parameters and buffers.")
    own = model.public | model.dense
    for name, value in download.items():
        if name not in own or not isinstance(value, Tensor) or value.shape != own[name].shape:
            raise PluginError(f"{_named(method, 'aggregate')} answers '{name}', {_described(value)},\nexpected "
                              + (f"the shape {tuple(own[name].shape)}." if name in own else
                                 f"one of {', '.join(own)}."))


def check_state(method: Any) -> None:
    """Raise PluginError unless what a method keeps are tensors, those of clients with rows."""
    for kind, rows in (("client_state", True), ("server_state", False)):
        for name, value in getattr(method, kind).items():
            if not isinstance(value, Tensor) or rows and value.dim() == 0:
                raise _wrong(method, f"{kind}['{name}']", value, f"a tensor{' of shape (users, ...)' if rows else ''}",
                             "is")


def check_answer(method: Any, name: str, rows: Tensor, kept: Tensor | None) -> None:
    """Raise PluginError unless the server's answers, (N, ...), have the form of those that clients keep of a name."""
    if kept is not None and (kept.shape[1:] != rows.shape[1:] or kept.dtype != rows.dtype):
        raise _wrong(method, f"end_round['{name}']", rows, f"{kept.dtype} of shape {(len(rows), *kept.shape[1:])}, as "
                     f"clients keep in client_state['{name}']", "is")


def checked_answers(method: Any, answers: Any, participants: int) -> Tables:
    """What ``Method.end_round`` returned; raises PluginError unless it has one row per participant."""
    if not isinstance(answers, Mapping):
        raise _wrong(method, "end_round", answers, "a dictionary of what the server answers, each (N, ...), or {}")
    for name, rows in answers.items():
        if not isinstance(rows, Tensor) or rows.dim() == 0 or len(rows) != participants:
            raise _wrong(method, f"end_round['{name}']", rows, f"({participants}, ...) = (N, ...): one row per "
                         "participant", "is")
    return dict(answers)


def check_moved(backbone: Backbone, hook: str, moved: Iterable[Tensor | None], parameters: Iterable[Tensor],
                users: Tensor) -> None:
    """Raise PluginError if a client's first round changed none of its parameters: it would never learn. From parameters
    that are all zero it may well not. ``hook``: what makes the backbone's logits; ``moved``: what was added to all
    parameters, or their gradients, each (C, ...); ``parameters``: themselves, each (C, ...)."""
    def any_nonzero(tensors: Iterable[Tensor | None]) -> Tensor:
        nonzero = torch.zeros(len(users), dtype=torch.bool, device=users.device)
        for tensor in sorted((t for t in tensors if t is not None and t.numel()), key=Tensor.numel):
            nonzero |= (tensor.detach().flatten(1) != 0).any(1)
            if bool(nonzero.all()):  # the small ones tell of almost all clients, and item rows need not be read
                break
        return nonzero

    alive = any_nonzero(moved)
    if not bool(alive.all()) and bool((dead := ~alive & any_nonzero(parameters)).any()):
        raise PluginError(f"{_named(backbone, hook)} leaves {int(dead.sum())} of {len(users)} clients (user "
                          f"{int(users[dead][0])} first) without gradient: no parameter of theirs moved in their first "
                          f"round.\nExpected logits that depend on the parameters of every client.")


def require_gradient(backbone: Backbone, loss: Tensor) -> None:
    """Raise PluginError if the loss does not depend on any parameter."""
    if not loss.requires_grad:
        raise PluginError(f"{_named(backbone, 'score')} returned logits that are cut off from all parameters (detach, "
                          f"no_grad, .data or numpy?),\nexpected a differentiable tensor.")


def check_declaration(backbone: Backbone) -> None:
    """Raise PluginError if a backbone's parameters, their shapes and what else it says of them do not agree."""
    users, items = range(2, 5), range(3, 10)
    tables = backbone.new_rows(0, users, items)
    if not (isinstance(tables, tuple) and len(tables) == 2 and all(isinstance(kind, Mapping) for kind in tables)):
        raise _wrong(backbone, "new_rows", tables, "a pair of dictionaries: public item tables, private tables")
    kinds = [("new_rows (public)", tables[0], len(items), "items"),
             ("new_rows (private)", tables[1], len(users), "users"), ("new_dense", backbone.new_dense(0), None, ""),
             ("new_personal", backbone.new_personal(0, items), len(items), "items")]
    names: list[str] = []
    for hook, kind, count, rows in kinds:
        for name, value in kind.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() \
                    or value.dim() < (2 if rows else 1) or rows and len(value) != count:
                shape = f"({count}, d, ...) = ({rows}, d, ...)" if rows else "(d, ...), as (1,) of one number"
                raise _wrong(backbone, f"{hook}['{name}']", value, f"a floating tensor of shape {shape}", "is")
            if name in names:
                raise PluginError(f"{_named(backbone, hook)} declares '{name}', which is declared before; every "
                                  f"parameter needs a name of its own.")
            names.append(name)
    if backbone.overrides("serve") and not (backbone.serves_tables and backbone.keeps_local_tables):
        raise PluginError(f"{_named(backbone, 'serve')} makes tables for clients; expected serves_tables = True and "
                          f"keeps_local_tables = True in the class.")
    if not tables[0]:
        raise PluginError(f"{_named(backbone, 'new_rows')} declares no public item table; expected at least one of "
                          f"shape (items, ...): it is what clients share.")
    for hook, named in (("learning_rates", list(backbone.learning_rates(len(items)))),
                        ("groups", [name for group in backbone.groups(list(names)) for name in group])):
        wrong = [name for name in named if name not in names]
        missing = [name for name in names if name not in named]
        if wrong:
            raise PluginError(f"{_named(backbone, hook)} names '{wrong[0]}', a parameter that does not exist;\n"
                              f"declared: {', '.join(names)}.")
        if missing:
            raise PluginError(f"{_named(backbone, hook)} lacks '{missing[0]}'; expected every parameter: "
                              f"{', '.join(names)}.")
        if len(set(named)) < len(named):
            raise PluginError(f"{_named(backbone, hook)} names a parameter twice: {', '.join(named)}.")
