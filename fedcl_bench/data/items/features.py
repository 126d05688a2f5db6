"""What is known of items, as numbers: made once, kept beside the data, and mapped into memory by every run.

The items of a domain have the encoder's vectors of their texts. Those of a stream of users have one vector each, made
of the columns of their ``.item`` file: a column of labels becomes an indicator per label, a column of numbers is
standardised, and an item's texts, joined, become the encoder's vector. There labels, means, deviations and what TF-IDF
is fitted on are of the first block's items alone; a label that is new in a later block has no column.

A file of features is named by a hash of the texts, in the stream's order, and of what encodes them. It holds an array
and, behind it, a checksum over that hash and the array. So a file that was changed, cut off or renamed is noticed, and
made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, ContextManager, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.errors import UserError, unknown
from ...core.files import fingerprint, replacing, sweep
from ...core.text import hash_of, quoted
from . import language_models, precomputed_vectors, tfidf
from ..files.recbole_files import finite
from .item_texts import columns_of, item_file, joined, read_fields, read_texts
from ..settings import ItemFeatureSettings
from ..source import DatasetSource, config_label, configured
from ..stream import Stream

TFIDF, GIVEN = "tfidf", "given:"
SIMILAR_DIM = 512  # of vectors by which items with similar texts are found
KINDS = {"token_seq": "text", "token": "category", "float": "numbers", "float_seq": "numbers"}  # of types of columns
FFMSR_LAYERS = 3  # of a language model (FFMSR: a)
_FORMAT = 1
_DIGEST = 16  # bytes
_WAYS = (f"Accepted: a file with ':token_seq' columns beside the interactions, or --set encoder={GIVEN}FOLDER with "
         f"vectors of the items.")


@dataclass(frozen=True)
class Callbacks:
    """What hears of long or odd work on a stream."""

    warn: Callable[[str], None] = lambda text: None  # called with a line of text
    # A context for work on so many things (what it is, how many), which yields what is told of those done.
    counting: Callable[[str, int], ContextManager[Callable[[int], None]]] = (
        lambda label, total: contextlib.nullcontext(lambda count: None))


@dataclass(frozen=True)
class FeatureSource:
    """How the items of a run's domains become vectors."""

    encoder: str  # ``tfidf``, ``given:FOLDER``, the name of a packaged language model or the folder of another
    layers: int  # how many; 0: as many as there are, but 3 of a language model
    dim: int  # length of the vectors of ``tfidf``
    fingerprint: str  # of all that decides the features beside the interactions and settings
    model: language_models.LanguageModel | None = None
    columns: tuple[tuple[str, str], ...] = ()  # of a stream of users, name and kind of those features are made of


def locate_features(source: DatasetSource, encoder: str, layers: int, dim: int, pooling: str = "own") -> FeatureSource:
    """Find what makes the features of a dataset's domains, and hash it; ``pooling`` as in ``language_models.located``;
    raises UserError for an unknown encoder or one that is not installed, layers that it has not, and a domain without a
    file of texts or vectors."""
    model = _model(encoder, pooling)
    most = model.layers if model else 1 if encoder == TFIDF else None
    if most is not None and layers > most:
        raise UserError(f"setting 'text_layers': found {layers}, accepted: at most {most}, the layers of encoder "
                        f"'{encoder}', or 0.")
    files = [[fingerprint(path) for path in _files(encoder, part)] for part in source.parts or (source,)]
    return FeatureSource(encoder, layers, dim, hash_of([_kind(encoder, model), files]), model)


def _kind(encoder: str, model: language_models.LanguageModel | None) -> str:
    """What stands for an encoder in hashes, wherever its files lie."""
    return f"{model.digest} {model.pooling}" if model else encoder.partition(":")[0]


def _model(encoder: str, pooling: str) -> language_models.LanguageModel | None:
    """The language model that an encoder is; None for the other kinds."""
    if encoder == TFIDF or encoder.startswith(GIVEN):
        return None
    known = (TFIDF, *language_models.PACKAGED)
    if encoder in language_models.PACKAGED:
        return language_models.packaged(encoder, pooling)
    folder = Path(encoder).expanduser()
    if folder.is_dir() and encoder:
        return language_models.located(encoder, folder, pooling)
    if "/" in encoder or os.sep in encoder:
        raise UserError(f"encoder '{encoder}': there is no folder of this name.\nModels are never fetched: put the "
                        f"model's files in a folder and name that, or take one of {', '.join(known)}.")
    raise UserError(f"{unknown('encoder', encoder, known)} Also the folder of a language model, or "
                    f"{GIVEN}FOLDER.")


def _files(encoder: str, part: DatasetSource) -> list[Path]:
    """The file that a domain's features are made of, and if need be that of its items; raises UserError without it."""
    described = item_file(part.path)
    if encoder.startswith(GIVEN):
        return precomputed_vectors.files_of(Path(encoder.removeprefix(GIVEN)).expanduser(), part.name, described)
    if not described.is_file():
        raise UserError(f"domain '{part.name}': its items have no texts, as there is no file {described}.\n{_WAYS}")
    return [described]


def load_features(features: FeatureSource, source: DatasetSource, stream: Stream,
                  hearing: Callbacks = Callbacks()) -> tuple[Tensor, ...]:
    """Of each domain the vectors of its items, in the stream's order: float32 of shape (items, layers, d).

    They are mapped from a file beside the domain's, which is made if it is not there. Where it cannot be written, they
    are in memory alone. Raises UserError for wrong files, a domain none of whose items has a text, and vectors of
    different shapes.
    """
    made = tuple(_of_domain(features, part, items, hearing) for part, items in zip(source.parts, _items(stream)))
    for part, vectors in zip(source.parts, made):
        if vectors.shape[1:] != made[0].shape[1:]:
            words = ["{} layers of {} numbers".format(*shape[1:]) for shape in (made[0].shape, vectors.shape)]
            raise UserError(f"domains '{source.parts[0].name}' and '{part.name}': their items' vectors have {words[0]} "
                            f"and {words[1]}, accepted: the same in all domains.\nEncode all of them alike: what reads "
                            f"them has the same shape in every domain.")
    return made


def _items(stream: Stream) -> list[list[str]]:
    """Of each domain the publisher's ids of its items, without its name."""
    return [[token[len(part.name) + 1:] for token in stream.item_tokens[part.items.start:part.items.stop].tolist()]
            for part in stream.domains]


def texts_of(source: DatasetSource, stream: Stream) -> Mapping[str, list[str]]:
    """Of each domain the texts of its items, in the stream's order; empty for those without."""
    return {part.name: _texts(part, items) for part, items in zip(source.parts, _items(stream))}


def _texts(part: DatasetSource, items: list[str]) -> list[str]:
    known = read_texts(item_file(part.path), part.config.ITEM_ID_FIELD)
    return [known.get(item, "") for item in items]


def text_vectors(source: DatasetSource, stream: Stream) -> Tensor:
    """TF-IDF vectors of the texts of a dataset's items, in the stream's order: float32 of shape (items, d). Raises
    UserError if none has a text."""
    if not any(texts := _texts(source, stream.item_tokens.tolist())):
        raise UserError(f"{item_file(source.path)}: none of the {len(texts):,} items of '{source.name}' has a text, "
                        f"accepted: the ids of the interactions, and columns whose names end with ':token_seq'.")
    return torch.from_numpy(tfidf.encode(texts, SIMILAR_DIM)[:, 0])


def locate_texts(source: DatasetSource) -> str:
    """The hash of the file that describes a dataset's items; raises UserError if there is none."""
    if not (path := item_file(source.path)).is_file():
        raise UserError(f"dataset '{source.name}': its items have no texts, as there is no file {path}.\nAccepted: a "
                        f"file with ':token_seq' columns beside the interactions, or cold_items=popularity or fold_in.")
    return fingerprint(path)


def silent(vectors: Tensor) -> int:
    """How many items have no text, or one that says nothing: their vectors are zeros."""
    return len(vectors) - int(vectors.flatten(1).any(1).sum())


def notes(stream: Stream) -> list[str]:
    """A sentence for each domain in which items have no text, or if those of a stream of users have none or no
    features."""
    of_users = [] if stream.item_features is None else [("the stream", stream.item_features)]
    names = [part.name for part in stream.domains] or ["the stream"]
    return [f"{name}: {count:,} of {len(vectors):,} items have no text or vector; theirs are zeros."
            for name, vectors in [*zip(names, stream.features), *of_users]
            if (count := silent(vectors))]


def _of_domain(features: FeatureSource, part: DatasetSource, items: list[str], hearing: Callbacks) -> Tensor:
    """The features of a domain, from its file if that is whole."""
    files = _files(features.encoder, part)
    if features.encoder.startswith(GIVEN):
        content = [[fingerprint(path) for path in files], items]
        return _cached(features, part, content, partial(_precomputed, features, part, items), hearing)
    texts = _texts(part, items)
    if not any(texts):
        raise UserError(f"domain '{part.name}': none of its {len(items):,} items has a text in {files[0]}.\n"
                        f"{_WAYS}")
    return _cached(features, part, texts, partial(_encoded, features, texts, part.name, hearing), hearing)


def _cached(features: FeatureSource, part: DatasetSource, content: Any, make: Callable[[], np.ndarray],
                   hearing: Callbacks) -> Tensor:
    """Vectors from the file beside a dataset's, which is made if it is not there, or not whole; besides the encoder
    ``content`` decides them."""
    dim = features.dim if features.encoder == TFIDF else 0
    key = hash_of([_FORMAT, _kind(features.encoder, features.model), features.layers, dim, content])
    path = part.path.with_name(f"{part.path.stem}.features-{key[:12]}.npy")
    if (kept := _open(path, key)) is not None:
        return kept
    if os.path.lexists(path):
        hearing.warn(f"{path}: its content is not what was written under this name; it is made anew.")
    vectors = make()
    try:
        sweep(path.parent)
        with replacing(path) as file:
            np.lib.format.write_array(file, vectors, allow_pickle=False)
            file.flush()
            file.write(_checksum(np.memmap(file, np.uint8, "r"), key))
        kept = _open(path, key)
    except (OSError, UserError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0].rstrip(".")
        hearing.warn(f"{path}: cannot be kept ({reason}), so every run makes these vectors anew.")
    return torch.from_numpy(np.ascontiguousarray(vectors)) if kept is None else kept


def _precomputed(features: FeatureSource, part: DatasetSource, items: Sequence[str]) -> np.ndarray:
    """The last layers of given vectors of a dataset's items, (items, layers, d)."""
    files = _files(features.encoder, part)
    vectors = precomputed_vectors.read(files[0], items, files[1:], part.config.ITEM_ID_FIELD)
    if features.layers > vectors.shape[1]:
        raise UserError(f"setting 'text_layers': found {features.layers}, accepted: at most {vectors.shape[1]}, the "
                        f"layers of {files[0]}, or 0.")
    return vectors[:, -features.layers:]  # all of them for 0


def _encoded(features: FeatureSource, texts: Sequence[str], name: str, hearing: Callbacks) -> np.ndarray:
    if features.model is None:
        return tfidf.encode(texts, features.dim)
    layers = features.layers or min(FFMSR_LAYERS, features.model.layers)
    with hearing.counting(f"encoding texts of {name}", len(texts)) as done:
        return language_models.encode(features.model, texts, layers, done)


def _open(path: Path, key: str) -> Tensor | None:
    """The mapped array of a file, all of which is read once; None if it is not what was written for ``key``."""
    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        content = np.memmap(path, np.uint8, "r")
        if content[-_DIGEST:].tobytes() != _checksum(content[:-_DIGEST], key):
            return None
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))  # "c": never written back
    except (OSError, ValueError):  # not readable, empty
        return None


def _checksum(content: np.ndarray, key: str) -> bytes:
    """Of a file's content and what it stands for."""
    return hashlib.blake2b(content, key=key.encode(), digest_size=_DIGEST).digest()


def locate_item_features(source: DatasetSource, settings: ItemFeatureSettings) -> FeatureSource:
    """Find what makes the features of a dataset's items, and hash it; raises UserError without a ``.item`` file or
    vectors, for an unknown column, kind or encoder, or one that is not installed."""
    s, path = settings, item_file(source.path)
    if s.encoder.startswith(GIVEN):
        return locate_features(source, s.encoder, s.text_layers, 0)
    if not path.is_file():
        raise UserError(f"dataset '{source.name}': its items have no features, as there is no file {path}.\nAccepted: "
                        f"such a file (a header as item_id:token, genres:token_seq, and a line per item), or --set "
                        f"encoder={GIVEN}FOLDER with vectors of the items.")
    columns = _chosen(source, s.item_columns)
    made = FeatureSource("", 0, 0, "")
    if any(kind == "text" for _, kind in columns):
        made = locate_features(source, s.encoder, s.text_layers, s.text_dim, s.text_pooling)
    digest = hash_of([made.fingerprint, columns, fingerprint(path)])
    return replace(made, fingerprint=digest, columns=tuple(columns))


def _chosen(source: DatasetSource, names: Sequence[str]) -> list[tuple[str, str]]:
    """The columns that are asked for, or all, and what is made of each."""
    path, said = item_file(source.path), source.config.item_columns
    types, accepted = columns_of(path, source.config.ITEM_ID_FIELD), sorted({*KINDS.values(), "labels"})
    if wrong := [name for name in names if name not in types]:
        raise unknown("column in setting 'item_columns'", wrong[0], types)
    # Configs of the suite name the columns of several versions of a publisher's file.
    if wrong := [name for name in said if name not in types and source.name not in configured()]:
        raise unknown(f"column under item_columns in {config_label(source.name)}", wrong[0], types)
    chosen = [(name, said.get(name) or KINDS.get(types[name], "")) for name in names or types]
    for name, kind in chosen:
        if names.count(name) > 1:
            raise UserError(f"setting 'item_columns': found '{name}' several times, accepted: once.")
        if kind not in accepted:
            found, where = (f"kind '{kind}'", config_label(source.name)) if kind else (f"type '{types[name]}'", path)
            raise UserError(f"{where}, column '{name}': found {found}, accepted: types {', '.join(KINDS)}, or under "
                            f"item_columns in the dataset's YAML file one of {', '.join(accepted)}.")
    return chosen


def load_item_features(features: FeatureSource, source: DatasetSource, stream: Stream,
                       hearing: Callbacks = Callbacks()) -> Tensor:
    """The vectors of all items in the stream's order, float32 of shape (items, d); of an item without any, zeros;
    raises UserError for wrong files, and if no item of the first block has features."""
    items, first = stream.item_tokens.astype(str).tolist(), stream.steps[0].n_items
    if features.encoder.startswith(GIVEN):
        return torch.from_numpy(_precomputed(features, source, items).reshape(len(items), -1))
    path, column = item_file(source.path), source.config.ITEM_ID_FIELD
    rows = read_fields(path, column, [name for name, _ in features.columns])
    if not any(item in rows for item in items[:first]):
        raise UserError(f"{path}: has none of the {first:,} items of {source.name}'s first block; its ids are as "
                        f"{quoted(next(iter(rows), ''))}, the stream's as {quoted(items[0])}.\nGive items the ids of "
                        f"the .inter file.")
    empty = ("",) * len(features.columns)
    table = [rows.get(item, empty) for item in items]
    parts, texts = [np.zeros((len(items), 0), np.float32)], [""] * len(items)
    for place, (name, kind) in enumerate(features.columns):
        fields = [row[place] for row in table]
        if kind == "text":
            texts = [joined(pair) for pair in zip(texts, fields)]
        else:
            made = _numbers if kind == "numbers" else partial(_labels, kind)
            parts.append(made(fields, first, f"{path}, column '{name}'"))
    if any(kind == "text" for _, kind in features.columns):
        parts.append(_of_texts(features, texts, first, source, hearing))
    vectors = np.concatenate(parts, axis=1)
    if not vectors[:first].any():
        raise UserError(f"{path}: nothing in column{'s'[:len(features.columns) > 1]} "
                        f"{', '.join(name for name, _ in features.columns)} of the {first:,} items of the first block; "
                        f"choose others with --set item_columns=NAMES.")
    return torch.from_numpy(vectors)


def _labels(kind: str, fields: Sequence[str], first: int, where: str) -> np.ndarray:
    """Whether each item has each of the labels of the first items, (items, labels); the whole field of a category is
    one."""
    of_item = [[field] * bool(field) if kind == "category" else field.split() for field in fields]
    place = {label: number for number, label in enumerate(sorted(set().union(*of_item[:first])))}
    result = np.zeros((len(fields), len(place)), np.float32)
    for item, labels in enumerate(of_item):
        result[item, [place[label] for label in labels if label in place]] = 1.0
    return result


def _numbers(fields: Sequence[str], first: int, where: str) -> np.ndarray:
    """Numbers less their mean over the first items, in standard deviations, (items, numbers); 0 for what is none."""
    of_item = [[finite(text) for text in field.split()] for field in fields]
    of_item = [numbers if np.isfinite(numbers).any() else [] for numbers in of_item]
    widths = sorted({len(numbers) for numbers in of_item if numbers})
    if len(widths) != 1:
        found = f"items with {' and '.join(map(str, widths[:3]))} numbers" if widths else "no number"
        raise UserError(f"{where}: found {found}, accepted: as many for every item that has any.\nLeave the column out "
                        f"with --set item_columns=OTHERS, or name it a text or labels in the dataset's YAML file.")
    values = np.array([numbers or [np.nan] * widths[0] for numbers in of_item])
    there, here = ~np.isnan(values), values[:first]
    count = np.maximum(there[:first].sum(0), 1)
    mean = np.nansum(here, 0) / count
    deviation = np.sqrt(np.nansum(np.square(here - mean), 0) / count)
    return np.where(there, (values - mean) / np.where(deviation > 0, deviation, 1.0), 0.0).astype(np.float32)


def _of_texts(features: FeatureSource, texts: Sequence[str], first: int, source: DatasetSource, hearing: Callbacks
             ) -> np.ndarray:
    """The vectors of texts, (items, d); those of a language model are kept, which needs no fitting."""
    if features.encoder == TFIDF:
        return tfidf.encode(texts, features.dim, first)[:, 0]
    make = partial(_encoded, features, texts, source.name, hearing)
    return _cached(features, source, texts, make, hearing).flatten(1).numpy()
