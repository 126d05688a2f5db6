"""A dataset before it is read: its YAML config, where its files are, and what identifies them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import yaml

from ..errors import UserError, unknown
from ..files import shipped

if TYPE_CHECKING:
    from .stream import StreamSettings

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml


@dataclass(frozen=True)
class Published:
    """What a dataset's publisher offers, and how to tell that it arrived whole.

    Attributes:
        url: address of the zip; empty if it cannot be fetched freely (``source`` then says where to get it).
        md5: the zip's checksum as its publisher prints it; empty if none is known.
        sha256: checksums of files in the zip, by their name; only of bytes known to be the publisher's.
        counts: ``rows``, ``users`` and ``items`` of the interaction file, ``titles`` of the file that describes items.
    """

    url: str = ""
    md5: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetConfig:
    """One file of ``dataset_configs/``; field names in capitals and ``val_interval`` are RecBole's.

    Attributes:
        title, source, licence, notes: for people.
        raw: the publisher's files, which ``data convert`` reads.
        SESSION_FIELD, SPLIT_FIELD, EVENT_FIELD: columns that only streams of sessions read, as text: a row's session,
            its split (train, valid or test) and what happened. Empty if the file has none.
        drop_events: rows with one of these values in the event column are left out of streams of sessions.
        val_interval: RecBole value filter, as ``{"rating": "(0,inf)"}``.
        settings: defaults of any run on this dataset.
        method_settings: method name to defaults of that method on this dataset.
        search: plugin name to setting to the values that `tune` tries on this dataset instead of the plugin's.
        expected: statistic (see ``statistics``) to its value per block under these settings.
    """

    title: str = ""
    source: str = ""
    licence: str = ""
    notes: str = ""
    raw: Published = Published()
    USER_ID_FIELD: str = "user_id"
    ITEM_ID_FIELD: str = "item_id"
    TIME_FIELD: str = "timestamp"
    SESSION_FIELD: str = ""
    SPLIT_FIELD: str = ""
    EVENT_FIELD: str = ""
    drop_events: tuple[str, ...] = ()
    val_interval: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    method_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    search: Mapping[str, Mapping[str, list]] = field(default_factory=dict)
    expected: Mapping[str, list] = field(default_factory=dict)


def configured() -> dict[str, Path]:
    """Name of every dataset with a config file, and the file."""
    return {path.stem: path for path in sorted(shipped("dataset_configs").glob("*.yaml"))}


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Tables ask for a few files hundreds of times."""
    return yaml.load(text, Loader=_LOADER)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping; raises UserError for anything else."""
    try:
        content = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not valid YAML ({' '.join(str(error).split())[:160]}).") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path}: expected 'name: value' lines, found {type(content).__name__}.")
    return content


def load_config(name: str) -> DatasetConfig:
    """A dataset's config, or RecBole's usual field names if it has none."""
    path = configured().get(name)
    if path is None:
        return DatasetConfig()
    content = read_yaml(path)
    content["raw"] = _typed(Published, content.pop("raw", {}), f"{path}, raw")
    content["drop_events"] = tuple(str(event) for event in content.pop("drop_events", ()))
    return _typed(DatasetConfig, content, str(path))


def _typed(cls: type, content: Mapping[str, Any], where: str) -> Any:
    known = {f.name for f in fields(cls)}
    for key in content:
        if key not in known:
            raise unknown(f"field in {where}", key, known)
    return cls(**content)


def find_file(name: str, data_dir: Path | None) -> Path:
    """The dataset's ``.inter`` file: in ``data_dir`` if given, else in ``./data``, else bundled with RecBole.

    Raises:
        UserError: naming the nearest known dataset, or the files looked for.
    """
    folder = data_dir or Path("data")
    candidates = [folder / name / f"{name}.inter", folder / f"{name}.inter"]
    for path in candidates:
        if path.is_file():
            return path
    if data_dir is None:
        from .recbole_files import bundled
        path = bundled(name)
        if path is not None:
            return path / f"{name}.inter"
    elif not data_dir.is_dir():
        raise UserError(f"--data-dir: '{data_dir}' is not a folder.")
    if name not in configured() and data_dir is None:
        raise unknown("dataset", name, configured())
    config = load_config(name)
    hint = f"\nOfficial source: {config.source}" if config.source else ""
    if config.raw.url:
        hint += f"; `data download {name}` fetches and converts it."
    raise UserError(f"dataset '{name}': no file {candidates[0]} (nor {candidates[1].name} beside it); give its folder "
                    f"with --data-dir.{hint}")


@dataclass(frozen=True)
class DatasetSource:
    """The file a stream is built from, and the hash of its bytes."""

    name: str
    config: DatasetConfig
    path: Path
    fingerprint: str


def locate(name: str, data_dir: Path | None, settings: StreamSettings) -> DatasetSource:
    """Find the file of a dataset (or of its fixed split) and hash it."""
    from .stream import fingerprint

    config = load_config(name)
    if settings.split_file:
        if data_dir is not None:
            raise UserError("--data-dir has no effect with 'split_file', which holds the data; leave one of the two "
                            "out.")
        path = Path(settings.split_file)
        if not path.is_file():
            raise UserError(f"setting 'split_file': no file {path}.")
    else:
        path = find_file(name, data_dir)
    try:
        return DatasetSource(name, config, path, fingerprint(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None


def session_columns(source: DatasetSource, settings: StreamSettings) -> dict[str, str]:
    """Names of the ``session``, ``split`` and ``event`` columns that a stream of sessions reads under ``settings``.

    Raises UserError if the settings ask for a column that the dataset's config does not name.
    """
    config, columns = source.config, {}
    for setting, part, field_, otherwise in (("session_from", "session", "SESSION_FIELD", "gap"),
                                             ("session_split", "split", "SPLIT_FIELD", "last")):
        if getattr(settings, setting) == "column":
            columns[part] = getattr(config, field_)
            if not columns[part]:
                raise UserError(f"setting '{setting}': dataset '{source.name}' has no {part} column; use --set "
                                f"{setting}={otherwise}, or name the column as {field_} in dataset_configs/"
                                f"{source.name}.yaml.")
    if config.drop_events:
        columns["event"] = config.EVENT_FIELD
        if not config.EVENT_FIELD:
            raise UserError(f"dataset_configs/{source.name}.yaml: 'drop_events' needs EVENT_FIELD, the column that "
                            f"holds events.")
    return columns
