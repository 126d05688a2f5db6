"""``run.json``: what it must hold, and what of it is asked of every record.

It holds the checksums of the record's Parquet files, and has none itself: it is written whole or not at all, and each
field is validated when it is read. Its numbers are compared with ``metrics.parquet`` (``record.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from ..core.text import ACCEPTED_IN_RECORD, is_safe_in_record
from ..core.schema import (Check, Wrong, fields_of, flag, lists, mapping, number, one_of, or_none, parsed_json, plain,
                           read_json, text, whole)

NAME = "run.json"
SCHEMA = 2  # of a record's files; raised when their content changes
FILES = ("metrics.parquet", "rounds.parquet", "users.parquet", "analysis.parquet")
CURE = "Take its folder away, or run it again: the command that made it does."
_COUNT = whole()


def _name(value: Any, field: str) -> None:
    """A name of a plugin or dataset, which becomes part of paths."""
    if not is_safe_in_record(value):
        raise Wrong(field, value, ACCEPTED_IN_RECORD)


def _hash(value: Any, field: str) -> None:
    if not isinstance(value, str) or not 12 <= len(value) <= 128 or not value.isalnum() or not value.isascii():
        raise Wrong(field, value, "a hash in hexadecimal digits")


def _value(value: Any, field: str) -> None:
    """A setting's value: what ``--set`` can write."""
    if isinstance(value, dict):
        raise Wrong(field, value, "a text, a number, true, false or a list of them")
    plain(value, field)
    for each in value if isinstance(value, list) else ():
        _value(each, field)


def _settings(value: Any, field: str) -> None:
    """All settings that have an effect; some are looked at by name."""
    fields_of({"valid_metric": text})(value, field)
    mapping(_value)(value, field)
    fields_of({}, {"split_file": or_none(text), "extra_metrics": lists(text)} | {
        name: _value for name in value if name not in ("split_file", "extra_metrics")})(value, field)


def _schema(value: Any, field: str) -> None:
    if value != SCHEMA or isinstance(value, (bool, float)):
        raise Wrong(field, value, f"{SCHEMA}, the version of records that this version of the suite reads")


_RUN: dict[str, Check] = {"method": _name, "backbone": _name, "dataset": _name, "seed": _COUNT,
                          "settings": _settings, "hash": _hash, "environment": mapping(plain)}
_CONTINUAL = fields_of(dict.fromkeys(("LA", "RA", "HM", "BWT", "forgetting"), or_none(number)), {})
_MACHINE = fields_of({"processor": text, "torch": text, "python": text}, None)
_FAILED = fields_of({"status": one_of("failed"), "error": text, **_RUN},
                    {"client_updates": lists(_COUNT), "schema": _schema})


def _finished(blocks: int) -> Check:
    """A finished run of so many blocks; most fields have a value per block."""
    each, counts = lists(number, blocks), lists(_COUNT, blocks)
    if_any = lists(or_none(number), blocks)

    def group(value: Any, field: str) -> None:
        fields_of({"users": counts})(value, field)
        mapping(if_any)(value, field)
        if len(value) < 2:
            raise Wrong(field, value, "users and a metric of theirs")
    per_block = fields_of({"per_block": each, "avg_incremental": or_none(number)})
    asked = {"status": one_of("finished"), **_RUN, "device": text, "base_hash": _hash, "data_fingerprint": _hash,
             "metrics": mapping(per_block), "matrix": mapping(lists(lists(number), blocks)),
             "continual": mapping(_CONTINUAL),
             "environment": _MACHINE, "rounds": counts, "best_round": counts,
             "seconds": fields_of(dict.fromkeys(("total", "train", "evaluate"), number)),
             "bytes": fields_of({"up_per_client_round": counts, "down_per_client_round": counts, "total_up": _COUNT,
                                 "total_down": _COUNT}),
             "privacy": mapping(plain), "peak_memory_mib": number, "block0_shared": flag}
    later = {"idle_settings": mapping(text), "lists": mapping(if_any), "groups": mapping(group),
             "tested": fields_of({"users": counts, "interactions": or_none(counts)}),
             "nearly_best": fields_of({"share": number, "rounds": counts, "seconds": each, "bytes_up": counts,
                                       "bytes_down": counts}),
             "features": fields_of({"fingerprint": _hash,
                                    **dict.fromkeys(("items", "silent", "layers", "dim"), counts)}),
             "files": mapping(_hash), "schema": _schema}
    return fields_of(asked, later)


def check(value: Any, field: str = "") -> None:
    """Whether a value can be the content of ``run.json``: the fields, and their lengths against each other."""
    fields_of({"schema": _schema, "status": one_of("finished", "failed")})(value, field)
    if value["status"] == "failed":
        return _FAILED(value, field)
    lists(_COUNT)(value.get("rounds"), "rounds")
    _finished(len(value["rounds"]))(value, field)
    if not value["rounds"] or not value["metrics"]:
        raise Wrong("metrics" if value["rounds"] else "rounds", None, "at least one")
    _check_numbers(value)


def _check_numbers(content: Mapping[str, Any]) -> None:
    """Metrics, matrices and summaries are of the same metrics and blocks."""
    for field in ("matrix", "continual"):
        if content[field].keys() != content["metrics"].keys():
            raise Wrong(field, ", ".join(content[field]), f"the metrics {', '.join(content['metrics'])}")
    for t, (best, rounds) in enumerate(zip(content["best_round"], content["rounds"])):
        if not 1 <= best <= rounds:
            raise Wrong(f"best_round[{t}]", best, f"a round from 1 to {rounds}")
    for name, rows in content["matrix"].items():
        for t, row in enumerate(rows):
            diagonal = content["metrics"][name]["per_block"][t]
            if len(row) != t + 1 or (row[t] != diagonal and row[t] == row[t]):
                raise Wrong(f"matrix.{name}[{t}]", row, f"{t + 1} numbers, the last {diagonal}")


def read_run(folder: Path) -> dict[str, Any] | None:
    """The content of a record's ``run.json``, validated; None if there is none.

    Raises:
        Corrupt: if it is not what a run wrote.
    """
    return _read(folder / NAME, check)


def read_head(folder: Path) -> dict[str, Any] | None:
    """The head of a record; the rest is checked when the record is used. Otherwise as ``read_run``."""
    content = _read(folder / NAME, _check_for_head)
    return content and head_of(content)


def _check_for_head(value: Any, field: str) -> None:
    """Whether a head can be made of a value."""
    fields_of({"status": one_of("finished", "failed"), **_RUN})(value, field)
    fields_of({"error": text} if value["status"] == "failed" else
              {"rounds": lists(_COUNT), "metrics": mapping(_anything), "device": text, "data_fingerprint": _hash})(
        value, field)


def _anything(value: Any, field: str) -> None:
    pass


def _read(path: Path, known: Check) -> dict[str, Any] | None:
    try:
        return read_json(path, known, CURE)
    except FileNotFoundError:
        return None


def parse_meta(line: str, where: str, cure: str) -> dict[str, Any]:
    """The content of a ``run.json`` that compact records hold; raises Corrupt."""
    return parsed_json(line, check, where, cure)


def head_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record says which run it is, and whether it fits a table: small, and asked of thousands of records."""
    names = ("status", "method", "backbone", "dataset", "seed", "hash", "settings")
    head = {name: content[name] for name in names}
    if content["status"] == "failed":
        return {**head, "error": content["error"]}
    return {**head, "device": content["device"], "data_fingerprint": content["data_fingerprint"],
            "blocks": len(content["rounds"]), "metrics": list(content["metrics"])}


_NAMED = {name: _RUN[name] for name in ("method", "backbone", "dataset", "seed", "hash", "settings")}
_HEADS = {"failed": fields_of({"status": text, **_NAMED, "error": text}, {}),
          "finished": fields_of({"status": text, **_NAMED, "device": text, "data_fingerprint": _hash, "blocks": _COUNT,
                                 "metrics": lists(text)}, {})}


def check_head(value: Any, field: str) -> None:
    """Whether a value can be what ``head_of`` returned."""
    fields_of({"status": one_of(*_HEADS)})(value, field)
    _HEADS[value["status"]](value, field)
