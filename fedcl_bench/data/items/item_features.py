"""Features of the items of a stream of users: one vector per item, made of the columns of its ``.item`` file.

A column of labels becomes an indicator per label, a column of numbers is standardised, and the texts of an item,
joined, become the encoder's vector (``features.py``, which has those of domains). Labels, means, deviations and what
TF-IDF is fitted on are of the first block's items alone; a label that is new in a later block has no column.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.errors import UserError, unknown
from ...core.files import fingerprint
from ...core.text import hash_of, quoted
from . import features as of_texts, tfidf
from .features import GIVEN, TFIDF, Callbacks, FeatureSource
from .item_texts import columns_of, item_file, joined, read_fields
from ..settings import ItemFeatureSettings
from ..source import DatasetSource, config_label
from ..stream import Stream

KINDS = {"token_seq": "text", "token": "labels", "float": "numbers", "float_seq": "numbers"}  # of types of columns


def locate_item_features(source: DatasetSource, settings: ItemFeatureSettings) -> FeatureSource:
    """Find what makes the features of a dataset's items, and hash it; raises UserError without a ``.item`` file or
    vectors, for an unknown column, kind or encoder, or one that is not installed."""
    s, path = settings, item_file(source.path)
    if s.encoder.startswith(GIVEN):
        return of_texts.locate_features(source, s.encoder, s.text_layers, 0)
    if not path.is_file():
        raise UserError(f"dataset '{source.name}': its items have no features, as there is no file {path}.\nAccepted: "
                        f"such a file (a header as item_id:token, genres:token_seq, and a line per item), or --set "
                        f"encoder={GIVEN}FOLDER with vectors of the items.")
    columns = _chosen(source, s.item_columns)
    made = FeatureSource("", 0, 0, "")
    if any(kind == "text" for _, kind in columns):
        made = of_texts.locate_features(source, s.encoder, s.text_layers, s.text_dim, s.text_pooling)
    digest = hash_of([made.fingerprint, columns, fingerprint(path)])
    return replace(made, fingerprint=digest, columns=tuple(columns))


def _chosen(source: DatasetSource, names: Sequence[str]) -> list[tuple[str, str]]:
    """The columns that are asked for, or all, and what is made of each."""
    path, said = item_file(source.path), source.config.item_columns
    types, accepted = columns_of(path, source.config.ITEM_ID_FIELD), sorted({*KINDS.values()})
    if wrong := [name for name in names if name not in types]:
        raise unknown("column in setting 'item_columns'", wrong[0], types)
    chosen = [(name, said.get(name) or KINDS.get(types[name], "")) for name in names or types]
    for name, kind in chosen:
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
        return torch.from_numpy(of_texts.precomputed(features, source, items).reshape(len(items), -1))
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
            parts.append((_labels if kind == "labels" else _numbers)(fields, first, f"{path}, column '{name}'"))
    if any(kind == "text" for _, kind in features.columns):
        parts.append(_encoded(features, texts, first, source, hearing))
    vectors = np.concatenate(parts, axis=1)
    if not vectors[:first].any():
        raise UserError(f"{path}: nothing in column{'s'[:len(features.columns) > 1]} "
                        f"{', '.join(name for name, _ in features.columns)} of the {first:,} items of the first block; "
                        f"choose others with --set item_columns=NAMES.")
    return torch.from_numpy(vectors)


def _labels(fields: Sequence[str], first: int, where: str) -> np.ndarray:
    """Whether each item has each of the labels of the first items, (items, labels)."""
    of_item = [field.split() for field in fields]
    place = {label: number for number, label in enumerate(sorted(set().union(*of_item[:first])))}
    result = np.zeros((len(fields), len(place)), np.float32)
    for item, labels in enumerate(of_item):
        result[item, [place[label] for label in labels if label in place]] = 1.0
    return result


def _numbers(fields: Sequence[str], first: int, where: str) -> np.ndarray:
    """Numbers less their mean over the first items, in standard deviations, (items, numbers); 0 for what is none."""
    of_item = [[_number(text) for text in field.split()] for field in fields]
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


def _number(text: str) -> float:
    try:
        return value if np.isfinite(value := float(text)) else np.nan
    except ValueError:
        return np.nan


def _encoded(features: FeatureSource, texts: Sequence[str], first: int, source: DatasetSource, hearing: Callbacks
             ) -> np.ndarray:
    """The vectors of texts, (items, d); those of a language model are kept, which needs no fitting."""
    if features.encoder == TFIDF:
        return tfidf.encode(texts, features.dim, first)[:, 0]
    make = partial(of_texts.encoded, features, texts, source.name, hearing)
    return of_texts.cached_vectors(features, source, texts, make, hearing).flatten(1).numpy()
