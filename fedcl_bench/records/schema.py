"""``run.json``: all that a record holds, field by field, and the part of it that tells which run it is.

It holds the checksums of the record's Parquet files, and has none itself: it is written whole or not at all, and its
form is checked whenever it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Iterator, Mapping

from msgspec import Meta, Struct, structs

from ..core.errors import Corrupt
from ..core.files import loaded_json, require_form, read_bytes
from ..core.text import LONGEST_IN_RECORD, RECORD_NAME

NAME = "run.json"
SCHEMA = 3  # of a record's files; raised when their content changes
FILES = ("metrics.parquet", "rounds.parquet", "users.parquet", "analysis.parquet")
CURE = "Take its folder away, or run it again: the command that made it does."

Count = Annotated[int, Meta(ge=0, le=2 ** 63 - 1)]
Name = Annotated[str, Meta(pattern=RECORD_NAME, max_length=LONGEST_IN_RECORD)]  # becomes part of paths
Hash = Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{12,128}\Z")]
# Fields in which every list has a value per block.
_PER_BLOCK = ("best_round", "tested", "metrics", "matrix", "bytes", "stages", "lists", "ratings", "groups",
              "nearly_best", "sampled", "features")
Value = str | int | float | bool | None | list[str | int | float | bool | None]  # what --set can write


class _Run(Struct, kw_only=True, tag_field="status", forbid_unknown_fields=True):
    """What every record has; ``settings``: all that have an effect."""

    schema: int
    method: Name
    backbone: Name
    dataset: Name
    seed: Count
    settings: dict[str, Value]
    hash: Hash

    def __post_init__(self) -> None:
        if not isinstance(self.settings.get("valid_metric"), str):
            raise ValueError("field 'settings.valid_metric': expected a text")
        if not isinstance(self.settings.get("split_file", ""), (str, type(None))):
            raise ValueError("field 'settings.split_file': expected a text")
        if not isinstance(extra := self.settings.get("extra_metrics", []), list) \
                or not all(isinstance(name, str) for name in extra):
            raise ValueError("field 'settings.extra_metrics': expected a list of texts")


class FailedRun(_Run, tag="failed", kw_only=True, forbid_unknown_fields=True):
    """A run that could not go on; ``client_updates``: participants summed over the rounds that were done, per block."""

    error: str
    environment: dict[str, Any]
    client_updates: list[Count] = []


class Environment(Struct):
    """Versions and hardware; whatever else is known of them stands beside these."""

    processor: str
    torch: str
    python: str


class MetricMeans(Struct, forbid_unknown_fields=True):
    """Means over users: after each block on that block, and their mean from block 1 on."""

    per_block: list[float]
    avg_incremental: float | None


class Continual(Struct, forbid_unknown_fields=True):
    """Summaries of R[t, s]; None where there is one block."""

    LA: float | None
    RA: float | None
    HM: float | None
    BWT: float | None
    forgetting: float | None


class Tested(Struct, forbid_unknown_fields=True):
    """Of each block's test: users, and interactions that they are to find; None where these were not counted."""

    users: list[Count]
    interactions: list[Count] | None


class Sampled(Struct, forbid_unknown_fields=True):
    """What was measured on samples of users."""

    settings: dict[str, Count]  # those that ask for a sample, with its expected size
    clients: Count  # all of the run
    to_find: list[Count]  # of each block, users with something to find in its test, in the sample or not
    # Of each metric's mean over all users, 95 %, per block; None for a sample that is too small. Empty unless
    # evaluation is of a sample.
    intervals: dict[str, list[list[float] | None]] = {}


class Seconds(Struct, forbid_unknown_fields=True):
    total: float
    train: float
    evaluate: float


class Bytes(Struct, forbid_unknown_fields=True):
    """What is sent: by and to a client per round, for each block; by and to all of them in the whole run."""

    up_per_client_round: list[Count]
    down_per_client_round: list[Count]
    total_up: Count
    total_down: Count


class NearlyBest(Struct, forbid_unknown_fields=True):
    """What it takes to come to a share of each block's best validation metric: see ``runs/summary.py``."""

    share: float
    rounds: list[Count]
    seconds: list[float]
    bytes_up: list[Count]
    bytes_down: list[Count]


class Features(Struct, forbid_unknown_fields=True):
    """What the texts of items became, per domain."""

    fingerprint: Hash
    items: list[Count]
    silent: list[Count]
    layers: list[Count]
    dim: list[Count]


class FinishedRun(_Run, tag="finished", kw_only=True, forbid_unknown_fields=True):
    """A run that ended; ``docs/records.md`` says what most fields are."""

    device: str
    base_hash: Hash
    data_fingerprint: Hash
    environment: Environment
    inactive_settings: dict[str, str]
    metrics: dict[str, MetricMeans]
    matrix: dict[str, list[list[float]]]  # by metric, row t of R[t, s] with s from 0 to t
    continual: dict[str, Continual]
    tested: Tested
    rounds: list[Count]
    best_round: list[Count]
    seconds: Seconds
    bytes: Bytes
    privacy: dict[str, Any]
    peak_memory_mib: float
    block0_shared: bool
    readings: list[str] = []
    stages: dict[str, list[Count]] = {}
    lists: dict[str, list[float | None]] = {}
    ratings: dict[str, list[float]] = {}  # where ratings are predicted, errors over all of a block's test
    groups: dict[str, dict[str, list[float | None]]] = {}  # of users or items: ``users`` and metrics per block
    nearly_best: NearlyBest | None = None
    features: Features | None = None
    sampled: Sampled | None = None  # None if all users were looked at
    files: dict[str, Hash] = {}  # checksums of the Parquet files; compact records have none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rounds or not self.metrics:
            raise ValueError(f"field '{'metrics' if self.rounds else 'rounds'}': expected at least one")
        if not self.metrics.keys() == self.matrix.keys() == self.continual.keys():
            raise ValueError("fields 'metrics', 'matrix' and 'continual': expected the same metrics")
        for field, values in (each for name in _PER_BLOCK for each in _lists(name, getattr(self, name))):
            if len(values) != len(self.rounds):
                raise ValueError(f"field '{field}': found {len(values)} values, expected one per block, "
                                 f"{len(self.rounds)}")
        for t, (best, rounds) in enumerate(zip(self.best_round, self.rounds)):
            if not 1 <= best <= rounds:
                raise ValueError(f"field 'best_round[{t}]': found {best}, expected a round from 1 to {rounds}")
        for name, rows in self.matrix.items():
            for t, row in enumerate(rows):
                diagonal = self.metrics[name].per_block[t]
                if len(row) != t + 1 or (row[t] != diagonal and row[t] == row[t]):
                    raise ValueError(f"field 'matrix.{name}[{t}]': expected {t + 1} numbers, the last {diagonal}")
        for group, of_group in self.groups.items():
            if "users" not in of_group or len(of_group) < 2:
                raise ValueError(f"field 'groups.{group}': expected users and a metric of theirs")


def _lists(name: str, value: Any) -> Iterator[tuple[str, list[Any]]]:
    """The outermost lists in a field, with where they are."""
    if isinstance(value, list):
        yield name, value
    elif isinstance(value, (dict, Struct)):
        each = value if isinstance(value, dict) else structs.asdict(value)
        for key, part in each.items():
            yield from _lists(f"{name}.{key}", part)


def parse_meta(content: bytes | str, where: str, cure: str) -> dict[str, Any]:
    """The content of a ``run.json``, which has the form of a ``FinishedRun`` or ``FailedRun``; raises Corrupt."""
    value = loaded_json(content, where, cure)
    if isinstance(value, dict) and value.get("schema", SCHEMA) != SCHEMA:
        raise Corrupt(f"{where}: field 'schema': found {value['schema']!r}, accepted: {SCHEMA}, the version of records "
                      f"that this version of the suite reads", cure)
    meta: dict[str, Any] = require_form(value, FinishedRun | FailedRun, where, cure)
    return meta


def read_run(folder: Path) -> dict[str, Any] | None:
    """The content of a record's ``run.json``; None if there is none. Raises Corrupt if it is not what a run wrote."""
    try:
        return parse_meta(read_bytes(folder / NAME, CURE), str(folder / NAME), CURE)
    except FileNotFoundError:
        return None


def head_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record says which run it is, and whether it fits a table: small, and kept of thousands of records."""
    names = ("status", "method", "backbone", "dataset", "seed", "hash", "settings")
    head = {name: content[name] for name in names}
    if content["status"] == "failed":
        return {**head, "error": content["error"]}
    return {**head, "device": content["device"], "data_fingerprint": content["data_fingerprint"],
            "inactive_settings": content["inactive_settings"], "blocks": len(content["rounds"]),
            "metrics": list(content["metrics"])}
