"""A dataset before it is read: its YAML config, where its files are, and what identifies them."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Mapping

import yaml

from ..core.errors import UserError, unknown
from ..core.files import fingerprint, shipped, write_atomically
from ..core.text import JOIN, LONGEST, for_terminal, safe_name, quoted
from .settings import StreamSettings

_MAKE_IT = ("Make one of a table with: run_bench.py data convert --table FILE --user COLUMN --item COLUMN --time "
            "COLUMN NAME")


@dataclass(frozen=True)
class PublishedDataset:
    """What a dataset's publisher offers, and how to tell that it arrived whole."""

    url: str = ""  # address of the zip; empty if it cannot be fetched freely (``source`` then says where to get it)
    md5: str = ""  # the zip's checksum as its publisher prints it; empty if none is known
    sha256: Mapping[str, str] = field(default_factory=dict)  # of files in the zip known to be the publisher's, by name
    counts: Mapping[str, int] = field(default_factory=dict)  # ``rows``, ``users``, ``items`` and ``titles``, of items


@dataclass(frozen=True)
class DatasetConfig:
    """A dataset's YAML file (see ``config_file``); field names in capitals and ``val_interval`` are RecBole's."""

    title: str = ""
    source: str = ""
    licence: str = ""
    notes: str = ""
    raw: PublishedDataset = PublishedDataset()  # the publisher's files, which ``data convert`` reads
    USER_ID_FIELD: str = "user_id"
    ITEM_ID_FIELD: str = "item_id"
    TIME_FIELD: str = "timestamp"
    RATING_FIELD: str = "rating"  # read for a loss of ratings alone
    # Columns that only streams of sessions read, as text: a row's session, its split (train, valid or test) and what
    # happened. Empty if the file has none.
    SESSION_FIELD: str = ""
    SPLIT_FIELD: str = ""
    EVENT_FIELD: str = ""
    drop_events: tuple[str, ...] = ()  # rows of these events are left out of streams of sessions
    # Columns of the ``.item`` file whose type does not say what features are made of them, and what is in them:
    # ``text``, ``labels`` or ``numbers`` (see ``features.py``).
    item_columns: Mapping[str, str] = field(default_factory=dict)
    val_interval: Mapping[str, str] = field(default_factory=dict)  # RecBole value filter, as {"rating": "(0,inf)"}
    settings: Mapping[str, Any] = field(default_factory=dict)  # defaults of any run on this dataset
    # Name to defaults of that backbone or method on this dataset.
    backbone_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    method_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Plugin name to setting to the values that `tune` tries on this dataset instead of the plugin's.
    search: Mapping[str, Mapping[str, list]] = field(default_factory=dict)
    expected: Mapping[str, list] = field(default_factory=dict)  # statistic to its value per block under these settings


@dataclass(frozen=True)
class JoinedConfig(DatasetConfig):
    """Of several datasets in one run; ``parts`` are the names of all and their configs, in order."""

    parts: Mapping[str, DatasetConfig] = field(default_factory=dict)


@functools.cache
def configured() -> dict[str, Path]:
    """Name of every dataset with a shipped config file, and the file."""
    return {path.stem: path for path in sorted(shipped("dataset_configs").glob("*.yaml"))}


def atomic_files(folder: Path = Path("data")) -> dict[str, Path]:
    """Name of every dataset in a folder, shipped or one's own, and its atomic file."""
    return {path.stem: path for path in (*folder.glob("*.inter"), *sorted(folder.glob("*/*.inter")))
            if path.parent == folder or path.parent.name == path.stem}


def is_path(dataset: str) -> bool:
    """Whether a dataset is given as a file or folder, not by its name."""
    return "/" in dataset or "\\" in dataset or dataset.endswith(".inter") or dataset in (".", "..", "~")


def parts_of(dataset: str) -> list[str]:
    """The datasets that are joined by ``+``, or the only one; a path that exists is one."""
    there = is_path(dataset) and os.path.exists(os.path.expanduser(dataset))
    return [dataset] if there else dataset.split(JOIN)


def dataset_name(dataset: str) -> str:
    """The name of a dataset that is given by its name or as a path: of a path the stem of its atomic file; of several
    their names, joined.

    Folders of records and files of settings are called by it. Raises UserError if the path leads to no atomic file, its
    name is not safe, or one of several is there twice.
    """
    names = [safe_name(_atomic_file(part).stem, f"dataset {part}") if is_path(part) else safe_name(part, "dataset")
             for part in parts_of(dataset)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"dataset {quoted(dataset)}: found {twice[0]} {names.count(twice[0])} times, accepted: each "
                        f"domain once.")
    if len(names) > 1 and len(JOIN.join(names)) > LONGEST:
        raise UserError(f"dataset {quoted(dataset)}: the joined names have {len(JOIN.join(names))} characters, "
                        f"accepted: at most {LONGEST}; give the files shorter names.")
    return JOIN.join(names)


def _atomic_file(dataset: str) -> Path:
    """The atomic file of a dataset given as a path: that file, or the one in that folder."""
    path = Path(dataset).expanduser().absolute()
    if path.is_dir():
        inside = sorted(path.glob("*.inter"))
        named = [file for file in inside if file.stem == path.resolve().name]
        if len(named or inside) != 1:
            listed = ", ".join(file.name for file in inside[:5])
            raise UserError(f"dataset {dataset}: the folder holds {listed or 'no .inter file'}; "
                            + ("name one of them." if inside else "make one with `data convert --table FILE`."))
        return (named or inside)[0]
    if path.suffix != ".inter":
        is_there = "is no atomic file (.inter)" if path.exists() else "is not there"
        raise UserError(f"dataset {dataset}: {is_there}; accepted: a file NAME.inter, or a folder that holds one.\n"
                        f"{_MAKE_IT}")
    if not path.is_file():
        raise UserError(f"dataset {dataset}: no such file.")
    return path


def spelled(dataset: str, data_dir: Path | None = None) -> str:
    """A dataset as the rest of the suite takes it: an absolute path, or a name in its spelling, whatever its case.
    Raises UserError as ``dataset_name``.

    Where the data in ``data_dir`` has another YAML file than the name alone, the result is a path, so that this file is
    read.
    """
    name, parts = dataset_name(dataset), parts_of(dataset)
    if len(parts) > 1:
        return JOIN.join(spelled(part, data_dir) for part in parts)
    if is_path(dataset):
        return str(_atomic_file(dataset))
    folder = data_dir or Path("data")
    if _file_in(folder, name) is None and name not in configured():
        alike = [known for known in {**configured(), **atomic_files(folder)} if known.lower() == name.lower()]
        name = alike[0] if len(alike) == 1 else name
    path = _file_in(folder, name) if data_dir is not None else None
    return str(path.absolute()) if path is not None and config_file(str(path)) != config_file(name) else name


def config_file(dataset: str) -> Path | None:
    """The YAML file of a dataset: beside its data (in ``./data`` if it is given by its name), in
    ``./dataset_configs``, or shipped; None if it has none, as several that are joined."""
    name = dataset_name(dataset)
    if len(parts_of(dataset)) > 1:
        return None
    beside = [_atomic_file(dataset).parent] if is_path(dataset) else [Path("data", name), Path("data")]
    for folder in (*beside, Path("dataset_configs")):
        path = folder / f"{name}.yaml"
        if path.is_file() and path.resolve() != configured().get(name):
            return path
    return configured().get(name)


def config_label(dataset: str) -> str:
    """What messages call ``config_file``."""
    name, path = dataset_name(dataset), config_file(dataset)
    if len(parts_of(dataset)) > 1:
        return f"dataset {name}"
    return f"dataset_configs/{name}.yaml" if path == configured().get(name) else str(path)


def unfiltered(dataset: str) -> dict[str, int]:
    """The defaults of a dataset that is not shipped: like RecBole's, all its rows are kept; so are those of several."""
    return {} if dataset_name(dataset) in configured() else {"k_core": 0}


_BASE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_PLAIN = {_INT: r"[-+]?(?:0|[1-9][0-9]*)",
          _FLOAT: r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
                  r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"}


class _Loader(_BASE):
    """YAML whose numbers are what they look like: ``010`` and ``1:30`` are texts here, and not 8 and 90 as in YAML 1.1.
    A key that is there twice is an error."""

    yaml_implicit_resolvers = {first: [(tag, re.compile(f"(?:{_PLAIN[tag]})$") if tag in _PLAIN else pattern)
                                       for tag, pattern in resolvers]
                               for first, resolvers in _BASE.yaml_implicit_resolvers.items()}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there {keys.count(key.value)} "
                                                        f"times, leave one of them", key.start_mark)
        return super().construct_mapping(node, deep)


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> Any:
    """The content of a file, kept: tables ask for a few files hundreds of times. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping; raises UserError for anything else."""
    try:
        content = copy.deepcopy(parsed(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of texts, numbers and dates that are none
        raise UserError(f"{path}: is not valid YAML ({' '.join(str(error).split())[:160]}).") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path}: expected 'name: value' lines, found {type(content).__name__}.")
    return content


def write_config(inter: Path, content: Mapping[str, Any]) -> Path:
    """Write a dataset's YAML file beside its file of interactions; its path. Raises OSError."""
    path = inter.with_suffix(".yaml")
    write_atomically(path, yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None).encode())
    return path


def load_config(name: str) -> DatasetConfig:
    """The config of a dataset, given by its name or as a path, or RecBole's usual field names if it has none.

    That of several has their columns; their other settings are for runs of them alone. Raises UserError for an unknown
    field, a value of another type, or one column for several fields.
    """
    path, parts = config_file(name), parts_of(name)
    if len(parts) > 1:
        return JoinedConfig(title=f"{len(parts)} domains", settings={"stream": "domains"},
                            parts={dataset_name(part): load_config(part) for part in parts})
    if path is None:
        return DatasetConfig()
    content = read_yaml(path)
    _check_intervals(content.get("val_interval", {}), str(path))
    for key in ("backbone_settings", "method_settings", "search"):
        of_plugins = content.get(key, {})
        for plugin, values in of_plugins.items() if isinstance(of_plugins, dict) else ():
            if not isinstance(plugin, str) or not isinstance(values, dict):
                raise UserError(f"{path}, field '{key}', {quoted(plugin)}: found {quoted(values)}, accepted: a "
                                f"plugin's name with a mapping of its settings.")
    config = _typed(DatasetConfig, content, str(path))
    for name, values in config.expected.items():
        if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
            raise UserError(f"{path}, field 'expected', {quoted(name)}: found {quoted(values)}, accepted: a list of "
                            f"numbers, one per block or domain.")
    columns = {name: getattr(config, name) for name in ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")}
    if same := [name for name, column in columns.items() if list(columns.values()).count(column) > 1]:
        raise UserError(f"{path}, fields {' and '.join(same)}: found {quoted(columns[same[0]])} {len(same)} times, "
                        f"accepted: a column of its own for each.")
    return config


def _check_intervals(intervals: Any, where: str) -> None:
    """Raise UserError for a value filter that RecBole would leave out of account, or read as something else."""
    number = r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?inf)\s*"
    for column, text in intervals.items() if isinstance(intervals, dict) else ():
        parts = text.split(";") if isinstance(text, str) else [""]
        matches = [re.fullmatch(rf"\s*[(\[]{number},{number}[)\]]\s*", part) for part in parts]
        if not all(match and float(match[1]) <= float(match[2]) for match in matches):
            raise UserError(f"{where}, field 'val_interval', column {quoted(column)}: found {quoted(text)}, accepted: "
                            f"intervals, as '[3,inf)' or '[1,2];(4,5]'.")


def _typed(cls: type, content: Mapping[str, Any], where: str) -> Any:
    known, values = {f.name: f for f in fields(cls)}, {}
    for key, value in content.items():
        if key not in known:
            raise unknown(f"field in {where}", key, known)
        default = known[key].default
        kind, accepted = {str: (str, "a text"), tuple: (list, "a list")}.get(type(default), (dict, "a mapping"))
        if not isinstance(value, kind):
            raise UserError(f"{where}, field '{key}': found {value!r}, accepted: {accepted}.")
        if isinstance(value, str) and for_terminal(value) != value:
            raise UserError(f"{where}, field '{key}': found {quoted(value)}, accepted: a text without control "
                            f"characters.")
        if isinstance(default, PublishedDataset):
            value = _typed(PublishedDataset, value, f"{where}, {key}")
        values[key] = tuple(map(str, value)) if kind is list else value
    return cls(**values)


def find_file(name: str, data_dir: Path | None) -> Path:
    """The ``.inter`` file of a dataset, given by its name or as a path: in ``data_dir`` (if not given, ``./data``),
    else the copy that RecBole bundles. Raises UserError naming the nearest known dataset, or the files looked for."""
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"--data-dir: '{data_dir}' is not a folder.")
    if path := file_there(name, data_dir):
        return path
    folder = data_dir or Path("data")
    if name not in configured() and data_dir is None:
        if Path(name).is_dir():
            raise UserError(f"unknown dataset '{name}'.\nThere is a folder of this name; to take the data in it, use "
                            f"./{name}.")
        if Path(name).is_file():
            raise UserError(f"dataset {name}: is no atomic file (.inter).\n{_MAKE_IT}")
        raise unknown("dataset", name, {**configured(), **atomic_files()})
    config = load_config(name)
    hint = f"\nOfficial source: {config.source}" if config.source else ""
    if config.raw.url:
        hint += f"; `data download {name}` fetches and converts it."
    raise UserError(f"dataset '{name}': no file {folder / name / name}.inter (nor {name}.inter beside it); give its "
                    f"folder with --data-dir.{hint}")


def file_there(name: str, data_dir: Path | None) -> Path | None:
    """As ``find_file``, but None if there is no file of this name; of several the first one's, if all have one."""
    if len(parts := parts_of(name)) > 1:
        paths = [file_there(part, data_dir) for part in parts]
        return paths[0] if all(paths) else None
    if is_path(name):
        return _atomic_file(name)
    path = _file_in(data_dir or Path("data"), name)
    if path is None:
        from .files.recbole_files import bundled
        folder = bundled(name)
        path = folder and folder / f"{name}.inter"
    return path


def _file_in(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name / f"{name}.inter", folder / f"{name}.inter") if path.is_file()), None)


@dataclass(frozen=True)
class DatasetSource:
    """The file a stream is built from, and the hash of its bytes."""

    name: str
    config: DatasetConfig
    path: Path  # of several datasets, that of the first
    fingerprint: str
    parts: tuple["DatasetSource", ...] = ()  # the several datasets; empty if there is one
    persons: tuple[str, ...] = ()  # hashes of the files that say who their users are, with ``known_users``, or empty
    rating: str = ""  # the column of ratings, if they are to be read
    texts: str = ""  # the hash of the file that describes the items, if it is to be read


def locate(name: str, data_dir: Path | None, settings: StreamSettings) -> DatasetSource:
    """Find the file of a dataset (or of its fixed split), given by its name or as a path, and hash it; raises UserError
    if it cannot be found or read, its name is not safe, or several domains and the stream do not go together."""
    config = load_config(name)
    if isinstance(config, JoinedConfig):
        return _locate_parts(name, config, data_dir, settings)
    if settings.stream == "domains" and not settings.split_file:
        raise UserError(f"dataset {dataset_name(name)}: found one domain, accepted with stream=domains: several "
                        f"datasets joined by {JOIN}, as {dataset_name(name)}{JOIN}OTHER.")
    return _locate_alone(name, config, data_dir, settings)


def _locate_parts(name: str, config: JoinedConfig, data_dir: Path | None, settings: StreamSettings) -> DatasetSource:
    """The files of several datasets; their fingerprint is a hash of their names and fingerprints."""
    wrong = ("split_file", settings.split_file) if settings.split_file else ("stream", settings.stream)
    if wrong != ("stream", "domains"):
        raise UserError(f"setting '{wrong[0]}': found {wrong[1]} with the {len(config.parts)} datasets "
                        f"{', '.join(config.parts)}, accepted: stream=domains and no split_file; or name one dataset.")
    parts = tuple(_locate_alone(part, of_part, data_dir, settings)
                  for part, of_part in zip(parts_of(name), config.parts.values()))
    text = "\n".join(f"{part.name} {part.fingerprint}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    persons = tuple(fingerprint(path) if path.is_file() else "" for path in
                    (persons_beside(part.path) for part in parts)) if settings.known_users else ()
    return DatasetSource(dataset_name(name), config, parts[0].path, digest, parts, persons)


def persons_beside(inter: Path) -> Path:
    """The file that says who the users of an ``.inter`` file are, whether it is there or not."""
    return inter.with_suffix(".overlap")


def _locate_alone(name: str, config: DatasetConfig, data_dir: Path | None, settings: StreamSettings) -> DatasetSource:
    if settings.split_file:
        if data_dir is not None:
            raise UserError("--data-dir has no effect with 'split_file', which holds the data; leave one of the two "
                            "out.")
        path = Path(settings.split_file)
        if not path.is_file():
            raise UserError(f"setting 'split_file': no file {path}.")
    else:
        path = find_file(name, data_dir)
    return DatasetSource(dataset_name(name), config, path, fingerprint(path))


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
                                f"{setting}={otherwise}, or name the column as {field_} in "
                                f"dataset_configs/{source.name}.yaml, or in {source.name}.yaml beside the data.")
    if config.drop_events:
        columns["event"] = config.EVENT_FIELD
        if not config.EVENT_FIELD:
            raise UserError(f"{source.name}.yaml: 'drop_events' needs EVENT_FIELD, the column that "
                            f"holds events.")
    return columns
