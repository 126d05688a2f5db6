"""From a dataset's files to its stream of steps."""

from __future__ import annotations

from . import prepared, sessions, stream as blocks
from .recbole_files import load_interactions
from .source import DatasetSource, session_columns
from .stream import Stream, StreamSettings, build_blocks, build_static, read_split_file


def load_stream(source: DatasetSource, settings: StreamSettings) -> Stream:
    """The dataset's stream: mapped if it was prepared (see ``prepared``), else built.

    Raises:
        UserError: for bad files, and settings that leave an empty block.
    """
    kept = prepared.folder_of(source, settings)
    return prepared.load(kept) if kept.is_dir() else build_stream(source, settings)


def build_stream(source: DatasetSource, settings: StreamSettings) -> Stream:
    """The dataset's stream from its file of interactions; raises as ``load_stream``."""
    if settings.split_file:
        return read_split_file(source.path)
    config = source.config
    names = {"user": config.USER_ID_FIELD, "item": config.ITEM_ID_FIELD, "time": config.TIME_FIELD}
    if settings.stream == "sessions":
        data = load_interactions(source.path, settings.k_core, {**names, **session_columns(source, settings)},
                                 config.val_interval, config.drop_events)
        return sessions.build_sessions(data, settings, str(source.path))
    data = load_interactions(source.path, settings.k_core, names, config.val_interval)
    return (build_static if settings.stream == "static" else build_blocks)(data, settings, source.name)


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


def statistics(stream: Stream) -> dict[str, list[float]]:
    """A stream's statistics in the layout of its paper's Table 1: one value per block, or one in all of sessions."""
    return (sessions if stream.steps[0].sessions else blocks).statistics(stream)

