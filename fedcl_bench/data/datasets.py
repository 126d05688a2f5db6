"""From a dataset's files to its stream of steps."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from pathlib import Path
from typing import Collection, Mapping

import numpy as np
import torch

from ..core.errors import UserError
from ..core.text import quoted
from ..kernels.memory import available, in_gib
from .streams import domain_streams, prepared, session_streams
from . import stream as blocks
from .items.features import Callbacks, FeatureSource, load_features, load_item_features, text_vectors
from .streams.overlap import known_users
from .files.recbole_files import Interactions, load_interactions, read_table
from .source import DatasetSource, session_columns
from .settings import StreamSettings
from .files.table_reader import first_lines, listed
from .stream import Stream, build_blocks, build_static, read_split_file, rows_of_blocks, rows_of_static


def load_stream(source: DatasetSource, settings: StreamSettings, features: FeatureSource | None = None,
                hearing: Callbacks = Callbacks()) -> Stream:
    """The dataset's stream, mapped if it was prepared (see ``prepared``), else built, with what ``features`` are asked
    for; ``hearing`` hears of their making. Raises UserError for bad files, settings that leave an empty block, items
    without features, and users of whom nobody is known."""
    kept = prepared.file_of(source, settings)
    stream = prepared.load(kept) if kept.is_file() and not source.rating else build_stream(source, settings)
    if settings.known_users and source.parts:
        stream = replace(stream, known=known_users(source, stream))
    return with_item_features(stream, source, features, hearing)


def with_item_features(stream: Stream, source: DatasetSource, features: FeatureSource | None,
                       hearing: Callbacks = Callbacks()) -> Stream:
    """A stream with what is known of its items; see ``load_stream``."""
    if source.texts:
        stream = replace(stream, features=(text_vectors(source, stream),))
    if features and not source.parts:
        return replace(stream, item_features=load_item_features(features, source, stream, hearing))
    return replace(stream, features=load_features(features, source, stream, hearing)) if features else stream


def build_stream(source: DatasetSource, settings: StreamSettings) -> Stream:
    """The dataset's stream from its file of interactions; raises as ``load_stream``."""
    if settings.split_file:
        return read_split_file(source.path)
    if source.parts:
        return domain_streams.build_domains(domain_rows(source, settings), settings)
    if settings.stream == "sessions":
        data = _interactions(source, settings, session_columns(source, settings), source.config.drop_events)
        return session_streams.build_sessions(data, settings, str(source.path))
    build = build_static if settings.stream == "static" else build_blocks
    return build(_interactions(source, settings), settings, source.name)


def domain_rows(source: DatasetSource, settings: StreamSettings) -> list[tuple[str, Interactions]]:
    """The name of each domain, and its rows after the filters."""
    return [(part.name, _interactions(part, settings)) for part in source.parts]


def split_rows(source: DatasetSource, settings: StreamSettings) -> tuple[Interactions, np.ndarray]:
    """The rows of blocks or a static stream with their splits, and each one's block; ids are those of the stream."""
    data, static = _interactions(source, settings), settings.stream == "static"
    return rows_of_static(data, settings, source.name) if static else rows_of_blocks(data, settings)


def _interactions(source: DatasetSource, settings: StreamSettings, columns: Mapping[str, str] = MappingProxyType({}),
                  drop_events: Collection[str] = ()) -> Interactions:
    """The rows of one dataset after its filters, with more ``columns`` than those that every stream reads."""
    _require_memory(source.path)
    config = source.config
    names = {"user": config.USER_ID_FIELD, "item": config.ITEM_ID_FIELD, "time": config.TIME_FIELD, **columns}
    if source.rating:
        names["rating"] = source.rating
    return load_interactions(source.path, settings.k_core, names, config.val_interval, drop_events)


_PER_ROW = 25  # bytes that reading and splitting a row takes at the very least; a third more in large files


def _require_memory(path: Path) -> None:
    """Raise UserError if a file of interactions cannot be read into the memory there is, saying how many rows fit."""
    memory, size = available(torch.device("cpu")), path.stat().st_size if path.is_file() else 0
    if memory is None or size < memory.bytes // _PER_ROW:  # a row has a byte at least
        return
    lines = first_lines(path, str(path), "a header line, then one interaction per line")[1:-1]  # the last may be cut
    rows = int(size / (sum(len(line.encode()) + 1 for line in lines) / max(len(lines), 1) or size))
    if rows * _PER_ROW > memory.bytes:
        raise UserError(f"{path}: not enough memory: {in_gib(memory.bytes)} are left ({memory.limit}). Its "
                        f"about {rows:,} interactions take {in_gib(rows * _PER_ROW)} and more; about "
                        f"{3 * memory.bytes // (4 * _PER_ROW):,} would fit.")


def thin_note(stream: Stream, settings: StreamSettings) -> str:
    """A sentence that suggests a filter, if most users of a block have nothing to test in it; else empty.

    A user needs 3 interactions in a block for one to be tested.
    """
    if settings.stream != "blocks" or settings.split_file or settings.k_core > 1:
        return ""
    shares = [(int((step.test.lengths > 0).sum()), int((step.train.lengths > 0).sum())) for step in stream.steps]
    block = min(range(len(shares)), key=lambda t: shares[t][0] / shares[t][1])
    tested, active = shares[block]
    if 2 * tested >= active:
        return ""
    return (f"blocks are thin: in block {block} only {tested:,} of {active:,} users have a test item; a filter leaves "
            f"out users and items with few interactions, as --set k_core=5.")


def events_note(source: DatasetSource, settings: StreamSettings) -> str:
    """A sentence if rows stay that a dataset's config drops from streams of sessions; else empty."""
    if settings.stream == "sessions" or settings.split_file:
        return ""
    events = dict.fromkeys(event for part in source.parts or (source,) for event in part.config.drop_events)
    kept = f"drop_events is for streams of sessions alone: rows of {', '.join(events)} are kept here."
    return kept if events else ""


def absent_events_note(source: DatasetSource, settings: StreamSettings) -> str:
    """A sentence if no row has an event that is to be dropped from a stream of sessions; else empty. The column of
    events is read anew."""
    config = source.config
    if not config.drop_events or settings.stream != "sessions" or settings.split_file:
        return ""
    events = read_table(source.path, {config.EVENT_FIELD: "token"}).column(0).unique().to_pylist()
    absent = [event for event in config.drop_events if event not in events]
    return (f"drop_events names {', '.join(map(quoted, absent))}, which no row has in the column {config.EVENT_FIELD}; "
            f"it has {listed(sorted(events))}.") if absent else ""


_LOOKED_AT = 5_000_000  # interactions at most among which repeated items are looked for


def masked_note(stream: Stream) -> str:
    """A sentence if items to test are not ranked for their user, who trains on or validates them too; else empty."""
    wanted = masked = 0
    if stream.domains or stream.steps[0].sessions or sum(step.interactions for step in stream.steps) > _LOOKED_AT:
        return ""
    for step in stream.steps:
        test, *others = (step.split(split).owners * step.n_items + step.split(split).values
                         for split in ("test", "train", "valid"))
        test = test.unique()
        wanted, masked = wanted + len(test), masked + int(torch.isin(test, torch.cat(others)).sum())
    if not masked:
        return ""
    return (f"{masked:,} of {wanted:,} items to test cannot be found: their user also trains on or validates them in "
            f"the same block, and such items are not ranked.")


def statistics(stream: Stream) -> dict[str, list[float]]:
    """In the layout of a paper's Table 1: one value per block or domain, or one in all of sessions."""
    if stream.domains:
        return domain_streams.statistics(stream)
    return (session_streams if stream.steps[0].sessions else blocks).statistics(stream)

