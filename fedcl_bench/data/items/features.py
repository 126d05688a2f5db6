"""What items' texts say, as numbers: made once, kept beside the data, and mapped into memory by every run.

A file of features is named by a hash of the texts, in the stream's order, and of what encodes them. It holds an array
and, behind it, a checksum over that hash and the array. So a file that was changed, cut off or renamed is noticed, and
made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, ContextManager, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.errors import UserError, unknown
from ...core.files import fingerprint, replacing, sweep
from ...core.text import hash_of
from . import language_models, precomputed_vectors, tfidf
from .item_texts import item_file, read_texts
from ..source import DatasetSource
from ..stream import Stream

TFIDF, GIVEN = "tfidf", "given:"
SIMILAR_DIM = 512  # of vectors by which items with similar texts are found
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
    """TF-IDF vectors of the texts of a dataset's items, in the stream's order: float32 of shape (items, d)."""
    return torch.from_numpy(tfidf.encode(_texts(source, stream.item_tokens.tolist()), SIMILAR_DIM)[:, 0])


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
    """A sentence for each domain in which items have no text, or if those of a stream of users have no features."""
    of_users = [] if stream.item_features is None else [("the stream", stream.item_features)]
    return [f"{name}: {count:,} of {len(vectors):,} items have no text or vector; theirs are zeros."
            for name, vectors in [*zip([part.name for part in stream.domains], stream.features), *of_users]
            if (count := silent(vectors))]


def _of_domain(features: FeatureSource, part: DatasetSource, items: list[str], hearing: Callbacks) -> Tensor:
    """The features of a domain, from its file if that is whole."""
    files = _files(features.encoder, part)
    if features.encoder.startswith(GIVEN):
        content = [[fingerprint(path) for path in files], items]
        return cached_vectors(features, part, content, partial(precomputed, features, part, items), hearing)
    texts = _texts(part, items)
    if not any(texts):
        raise UserError(f"domain '{part.name}': none of its {len(items):,} items has a text in {files[0]}.\n"
                        f"{_WAYS}")
    return cached_vectors(features, part, texts, partial(encoded, features, texts, part.name, hearing), hearing)


def cached_vectors(features: FeatureSource, part: DatasetSource, content: Any, make: Callable[[], np.ndarray],
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


def precomputed(features: FeatureSource, part: DatasetSource, items: Sequence[str]) -> np.ndarray:
    """The last layers of given vectors of a dataset's items, (items, layers, d)."""
    files = _files(features.encoder, part)
    vectors = precomputed_vectors.read(files[0], items, files[1:], part.config.ITEM_ID_FIELD)
    if features.layers > vectors.shape[1]:
        raise UserError(f"setting 'text_layers': found {features.layers}, accepted: at most {vectors.shape[1]}, the "
                        f"layers of {files[0]}, or 0.")
    return vectors[:, -features.layers:]  # all of them for 0


def encoded(features: FeatureSource, texts: Sequence[str], name: str, hearing: Callbacks) -> np.ndarray:
    """The vectors of texts by an encoder."""
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
