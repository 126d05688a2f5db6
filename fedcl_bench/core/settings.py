"""Typed settings: frozen dataclasses whose fields carry their help text, range and search space.

Every part of a run (stream, training, evaluation, backbone, method) declares one such dataclass. On the command line
and in files they share one flat namespace, so ``--set lambda_kd=0.01`` needs no prefix.

A setting that the values of others leave without effect, as an ablation does, is inactive; its field says so with
``only_if``. It does not enter a run's hash, so runs that differ in nothing else are one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import typing
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Iterable, Mapping

from .errors import PluginError, UserError, unknown
from .text import quoted

LARGEST = 1_000_000_000  # whole number that a setting may have if it does not say another
LARGEST_SEED = (1 << 63) - 1
MOST_SEEDS = 10_000  # of one command
_WHOLE, _EXPONENT = "(?:0|[1-9][0-9]{0,39})", "(?:[eE][-+]?[0-9]{1,4})"
_NUMBER = re.compile(rf"[-+]?(?:({_WHOLE})|(?:{_WHOLE}\.[0-9]*|\.[0-9]+){_EXPONENT}?|{_WHOLE}{_EXPONENT})")
_BOUNDS = {"above": ("above", operator.gt), "low": ("at least", operator.ge), "high": ("at most", operator.le),
           "below": ("below", operator.lt)}
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def setting(default, help: str, *, low=None, high=None, above=None, below=None, choices=None,
            search=None, only_if: str | tuple[str, ...] = ()):
    """Declare one setting of a dataclass.

    Args:
        default: value used unless the user or the dataset's config says otherwise.
        help: one line; shown by ``run_bench.py list NAME``.
        low, high: inclusive bounds of a number; above, below: exclusive ones.
        choices: the accepted values of a named choice.
        search: the values that ``tune`` tries: the paper's, without those that diverge.
        only_if: conditions on other settings, all of which must hold for this one to have an effect. Each is one
            comparison or several joined by " or ": ``optimiser=adam``; ``stream=blocks|static``, one of several values
            or of patterns such as ``kmeans*``; ``without!=cc``, none of them; ``fold_in``, which is not 0, false or
            empty. With a condition on itself (``loss!=bpr``) a setting added later leaves the hash of runs at its
            default as it was.
    """
    conditions = (only_if,) if isinstance(only_if, str) else only_if
    for text in conditions:
        _condition(text)
    if isinstance(default, (list, dict, set)):
        raise PluginError(f"setting: found the default {quoted(default)}, accepted: a number, true or false, a text, "
                          f"or a tuple of numbers or texts, as (10, 20).")
    return dataclasses.field(default=default, metadata=dict(
        help=help, low=low, high=high, above=above, below=below, choices=choices, search=search,
        only_if=conditions))


def inherited(base: type, name: str, **changes):
    """The setting of a base class, declared again with some arguments of ``setting`` changed."""
    field = _declared(base)[name][0]
    return setting(**{"default": field.default, **field.metadata, **changes})


class _Comparison(typing.NamedTuple):
    """A part of a condition; ``sign`` is ``=``, ``!=``, or empty where the setting alone stands."""

    name: str
    sign: str
    values: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Whether a value of the setting fulfils it."""
        if not self.sign:
            return bool(value)
        text = as_text(value)
        return (text in self.values or any(fnmatchcase(text, accepted) for accepted in self.values)) \
            == (self.sign == "=")


@functools.cache
def _condition(text: str) -> tuple[_Comparison, ...]:
    """The alternatives of a condition; raises PluginError for one that cannot be read."""
    parts = [re.fullmatch(r"(\w+)(?:(!?=)(.*))?", part) for part in text.split(" or ")]
    if None in parts:
        raise PluginError(f"only_if: found {quoted(text)}, accepted: NAME, NAME=VALUE|VALUE or NAME!=VALUE|VALUE, or "
                          f"several of them joined by ' or '.")
    return tuple(_Comparison(part[1], part[2] or "", tuple((part[3] or "").split("|"))) for part in parts)


def holds(condition: str, instance: Any) -> bool:
    """Whether a condition, as those of ``only_if``, holds of an instance that has all settings it names."""
    return any(part.holds(getattr(instance, part.name)) for part in _condition(condition))


def accepted(field: dataclasses.Field, kind: type) -> str:
    """What a setting accepts, in words."""
    meta = field.metadata
    if meta["choices"]:
        return "one of " + ", ".join(map(str, meta["choices"]))
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
            tuple: ("a list of names, as a,b" if str in typing.get_args(kind) else "a list of whole numbers, as 10,20")
            + (", or none" if field.default == () else "")}[typing.get_origin(kind) or kind]
    bounds = [f"{words} {meta[bound]}" for bound, (words, _) in _BOUNDS.items() if meta[bound] is not None]
    return f"{name} {' and '.join(bounds)}".strip()


def _convert(value: Any, kind: type) -> Any:
    """``value`` as ``kind``; raises ValueError or TypeError when it is not one."""
    if typing.get_origin(kind) is tuple:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        parts = () if value == "none" else parts
        of_part = typing.get_args(kind)[0]
        return tuple(_convert(p, of_part) for p in ([parts] if isinstance(parts, Real) else parts))
    if kind is str:
        if not isinstance(value, str):
            raise TypeError
        return value
    if isinstance(value, str):
        value = _TRUTHS.get(value.strip().lower()) if kind is bool else plain_number(value.strip())
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's numbers are, too
        raise TypeError
    if kind is int:
        if value != int(value):
            raise ValueError
        return int(value)
    return float(value)


def plain_number(text: str) -> int | float:
    """A number as people write it, in decimal; raises ValueError for anything else, as 010, 1:30, 1_000 or inf."""
    match = _NUMBER.fullmatch(text)
    if not match:
        raise ValueError
    return int(text) if match[1] else float(text)


@functools.cache  # Python evaluates every annotation anew, and a table resolves the settings of each of its runs
def _declared(cls: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """A settings class's fields and their types."""
    kinds = typing.get_type_hints(cls)
    return {field.name: (field, kinds[field.name]) for field in dataclasses.fields(cls)}


def checked(cls: type, name: str, value: Any, origin: str) -> Any:
    """One setting's value, converted to its type and checked against its range; raises UserError."""
    field, kind = _declared(cls)[name]
    meta, more = field.metadata, ""
    try:
        result = _convert(value, kind)
        numbers = result if isinstance(result, tuple) else (result,)
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError
            if isinstance(number, int) and abs(number) > (meta["high"] or LARGEST):
                more = f", at most {meta['high'] or LARGEST}"
                raise ValueError
            outside = any(meta[bound] is not None and not within(number, meta[bound])
                          for bound, (_, within) in _BOUNDS.items())
            if outside or meta["choices"] and number not in meta["choices"]:
                raise ValueError
        if not numbers and field.default != ():
            raise ValueError
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise UserError(f"setting '{name}' ({origin}): found {quoted(value)}, accepted: {accepted(field, kind)}"
                        f"{more if meta['high'] is None else ''}.") from None
    return result


def assemble(classes: Iterable[type], layers: Iterable[tuple[str, Mapping[str, Any]]], used_by: str) -> list[Any]:
    """An instance of each settings dataclass of one run, no two of which may declare the same name.

    They are filled from layers, pairs of (where the values come from, mapping of setting name to value), of which later
    ones win. Raises UserError for an unknown name, which says what the settings are ``used_by``, or a value outside its
    range.
    """
    classes = list(classes)
    owner: dict[str, type] = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            if field.name in owner:
                raise UserError(f"setting '{field.name}' is declared by both {owner[field.name].__qualname__} and "
                                f"{cls.__qualname__}; one of the two must rename it.")
            owner[field.name] = cls
    values: dict[str, Any] = {}
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in owner:
                raise unknown_setting(f"setting ({origin}, for {used_by})", name, owner)
            values[name] = checked(owner[name], name, value, origin)
    return [cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}) for cls in classes]


# What RecBole's settings are here.
_OF_RECBOLE = {
    "learning_rate": "is 'lr' here", "embedding_size": "is 'dim' here", "train_batch_size": "is 'batch_size' here",
    "epochs": "is 'rounds' and 'local_epochs' here (rounds of the server, and passes of a client in each of them)",
    "eval_batch_size": "has no counterpart here: pieces of users have the size that memory allows. Leave it out",
    "train_neg_sample_args": "is 'negatives' and 'negative_draw' here (how many per positive, and of which)",
    "metrics": "is 'topk' here (five metrics are always computed, of lists of these lengths; extra_metrics names "
               "others)",
    "stopping_step": "is 'patience' here (counted in rounds)", "eval_step": "is 'evaluate_every' here (in rounds)",
    "learner": "is 'optimiser' here", "max_item_list_length": "is 'max_length' here", "n_layers": "is 'layers' here",
    "n_heads": "is 'heads' here", "dropout_prob": "is 'dropout' here", "hidden_dropout_prob": "is 'dropout' here",
    **dict.fromkeys(("user_inter_num_interval", "item_inter_num_interval"),
                    "is 'k_core' here (one number for users and items)"),
    "eval_args": "is 'stream', 'base_split', 'inc_split' and 'candidates' here",
    "seed": "is the option --seed here", "model": "is the option --backbone here",
    "dataset": "is the option --dataset here", "data_path": "is the option --data-dir here",
    **dict.fromkeys(("device", "gpu_id", "use_gpu"), "is the option --device here"),
    "checkpoint_dir": "is the option --results here"}


def unknown_setting(kind: str, wrong: str, known: Iterable[str]) -> UserError:
    """The error for a setting that is not among ``known``: names ours for a setting of RecBole, else the nearest."""
    known, name = list(known), wrong.lower()
    meaning = _OF_RECBOLE.get(name, "")
    ours = re.findall(r"'(\w+)'", meaning)
    if meaning and (not ours or any(setting in known for setting in ours)):
        return UserError(f"unknown {kind} '{wrong}'.\nRecBole's '{name}' {meaning}.")
    return unknown(kind, wrong, known)


def split_methods(text: str) -> tuple[str, ...]:
    """``"ft,f3crec:without=arm,eps=.01"`` as methods: a setting belongs to the method before it. Raises UserError for
    an empty name."""
    methods: list[str] = []
    for part in map(str.strip, text.split(",")):
        # A number continues a list, as in ft:topk=5,20.
        if methods and ":" in methods[-1] and (part.isdecimal() or "=" in part and ":" not in part.partition("=")[0]):
            methods[-1] += f",{part}"
        else:
            methods.append(part)
    if not all(methods):
        raise UserError(f"--methods: found '{text}', accepted: methods with commas, as ft,f3crec:without=arm.")
    return tuple(dict.fromkeys(methods))


def parse_assignments(pairs: Iterable[str], option: str) -> dict[str, str]:
    """``["lr=0.5", ...]`` as a mapping; raises UserError for one without ``=``."""
    result = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UserError(f"{option}: found '{pair}', accepted: NAME=VALUE, as {option} lr=0.5.")
        name = name.strip().replace("-", "_")
        if name in result:
            raise UserError(f"{option}: found '{name}' twice, {quoted(result[name])} and {quoted(value.strip())}; "
                            f"leave one of them out.")
        result[name] = value.strip()
    return result


def flat(instances: Iterable[Any]) -> dict[str, Any]:
    """All settings of a run as one JSON-ready mapping."""
    return {name: list(value) if isinstance(value, tuple) else value
            for instance in instances for name, value in dataclasses.asdict(instance).items()}


AT_DEFAULT = "at its default"


def inactive(instances: Iterable[Any]) -> dict[str, str]:
    """Settings that the values of others leave without effect, by name with the reason, as ``with optimiser=sgd``. In
    the conditions of others an inactive setting counts with its default.

    ``instances`` are of all settings classes that conditions name; raises PluginError for a condition on another
    setting.
    """
    declared = {field.name: (field, getattr(instance, field.name), type(instance).__qualname__)
                for instance in instances for field in dataclasses.fields(instance)}
    reasons: dict[str, str] = {}

    def reason(name: str) -> str:
        """Why a setting is inactive; empty if it is not."""
        if name not in reasons:
            reasons[name] = ""  # for a condition that leads back to the setting itself
            conditions = declared[name][0].metadata.get("only_if", ())
            reasons[name] = next(filter(None, (missed(text, name) for text in conditions)), "")
        return reasons[name]

    def missed(text: str, of: str) -> str:
        """By which values a condition does not hold, in words; empty if it holds."""
        condition = _condition(text)
        if foreign := [part.name for part in condition if part.name not in declared]:
            raise PluginError(f"{declared[of][2]}.{of}: only_if names '{foreign[0]}', expected another setting of the "
                              f"run.")
        values = [declared[part.name][0].default if reason(part.name) else declared[part.name][1] for part in condition]
        if any(part.holds(value) for part, value in zip(condition, values)):
            return ""
        if any(part.name == of for part in condition):
            return AT_DEFAULT
        if len(condition) == 1 and (why := reason(condition[0].name)) not in ("", AT_DEFAULT):
            return why
        compared = " and ".join(f"{part.name}={as_text(value)}" for part, value in zip(condition, values) if part.sign)
        absent = " or ".join(part.name for part in condition if not part.sign)
        return " and ".join([f"with {compared}"] * bool(compared) + [f"without {absent}"] * bool(absent))

    return {name: why for name in declared if (why := reason(name))}


def as_text(value: Any) -> str:
    """A setting's value as ``--set`` reads it."""
    return ",".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def search_space(cls: type) -> dict[str, tuple]:
    """The settings of a class that are to be searched, and their values."""
    return {field.name: tuple(field.metadata["search"]) for field in dataclasses.fields(cls)
            if field.metadata.get("search")}


def describe(cls: type) -> list[tuple[str, str, str, str]]:
    """Rows (name, default, accepted values or those that are searched, help) of one settings class."""
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata:
            raise PluginError(f"'{field.name}' is not declared with setting(default, help)")
        search = field.metadata["search"]
        space = f"searched: {', '.join(map(str, search))}" if search else accepted(field, hints[field.name])
        rows.append((field.name, as_text(field.default) or "(none)", space, field.metadata["help"]))
    return rows
