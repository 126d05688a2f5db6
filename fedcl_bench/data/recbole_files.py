"""The door to RecBole's data pipeline.

RecBole's ``Config`` reads ``sys.argv``, overwrites ``CUDA_VISIBLE_DEVICES``, patches numpy, forces a path of its own
for ml-100k and downloads what is missing. All of that is fenced in here; nothing of it leaks into the caller's process.
Files are checked before RecBole sees them, because it would fill a missing time with the column's mean.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Collection, Iterator, Mapping

import numpy as np
import pandas as pd

from ..core.errors import UserError

SPLITS = ("train", "valid", "test")
_ROW = "row of the file"  # a column RecBole carries along, to find the text of others again behind its filters


@dataclass(frozen=True)
class Interactions:
    """The rows of a dataset after RecBole's filters, in file order.

    Attributes:
        user, item: int64 ids from 0, numbered by first appearance in the file.
        time: float64, one per row.
        user_tokens, item_tokens: the publisher's id of each user and item.
        session: the publisher's session id of each row as text, or None if it was not asked for.
        split: which of ``SPLITS`` each row is in, as its number (int8), or None if it was not asked for.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    user_tokens: np.ndarray
    item_tokens: np.ndarray
    session: np.ndarray | None = None
    split: np.ndarray | None = None


def bundled(name: str) -> Path | None:
    """The folder of a dataset that ships with RecBole, or None."""
    import recbole

    folder = Path(recbole.__file__).parent / "dataset_example" / name
    return folder if (folder / f"{name}.inter").is_file() else None


def _line_of(path: Path, number: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        for i, line in enumerate(file, start=1):
            if i == number:
                return line.rstrip("\n")[:80]
    return ""


def read_table(path: Path, required: Mapping[str, str], optional: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read columns of a tab-separated file with a header, plain (``user``) or typed as in RecBole (``user:token``).

    Args:
        path: the file.
        required, optional: column name to kind, ``token`` (kept as text) or ``float`` (finite numbers).

    Returns:
        A frame with the required columns and those optional ones that the file has.

    Raises:
        UserError: for a missing or empty file, a missing column, a row of the wrong width, an empty id, a value that
            is not a finite number; names the file, line and field.
    """
    body, names = _body_and_columns(path)
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: column '{name}' is there {names.count(name)} times; rename all but one of them "
                            f"in the first line.")
    for name in required:
        if name not in names:
            raise UserError(f"{path}: column '{name}' is missing; found columns {', '.join(names)} "
                            f"(tab-separated header, as user_id:token).")
    body = body.rstrip(b"\r\n") + b"\n"
    _check_widths(path, body, len(names))
    wanted = {name: kind for name, kind in {**required, **(optional or {})}.items() if name in names}
    frame = pd.read_csv(io.BytesIO(body), sep="\t", header=None, names=names, usecols=list(wanted), dtype=str,
                        quoting=3, keep_default_na=False, skip_blank_lines=False)
    for name, kind in wanted.items():
        if kind == "token":
            bad = frame[name] == ""
            expected = "an id"
        else:
            numbers = pd.to_numeric(frame[name], errors="coerce")
            bad = ~np.isfinite(numbers)
            expected = "a finite number"
        if bad.any():
            row = int(np.argmax(bad.to_numpy()))
            raise UserError(f"{path}, line {row + 2}: field '{name}' is {frame[name].iloc[row]!r}, "
                            f"expected {expected}.")
        if kind == "float":
            frame[name] = numbers.astype(np.float64)
    return frame


def _body_and_columns(path: Path) -> tuple[bytes, list[str]]:
    """What follows the header line of a file, and the names of its columns without their types."""
    try:
        header, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    if not body.strip():
        raise UserError(f"{path}: has no rows; expected a header line and one interaction per line.")
    try:
        typed = header.decode("utf-8-sig").rstrip("\r").split("\t")
        body.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}).") from None
    return body, [field.split(":")[0] for field in typed]


def _check_widths(path: Path, body: bytes, width: int) -> None:
    """Raise UserError if a row has not so many fields, in one pass: the tabs between consecutive line ends."""
    text = np.frombuffer(body, dtype=np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    tabs = np.diff(np.searchsorted(np.flatnonzero(text == ord("\t")), ends), prepend=0)
    wrong = np.flatnonzero(tabs != width - 1)
    if len(wrong):
        line = int(wrong[0]) + 2
        raise UserError(f"{path}, line {line}: found {tabs[wrong[0]] + 1} fields, the header has {width} "
                        f"({_line_of(path, line)!r}).")


class _Later(ModuleType):
    """Stands in for a module of scikit-learn while RecBole is imported; what is called is looked up then."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Warning"):
            return type(name, (UserWarning,), {})

        def call(*args, **kwargs):
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)
        return call


@contextmanager
def _without_sklearn() -> Iterator[None]:
    """RecBole imports scikit-learn for a few metrics and two models, none of which is used here. That alone takes
    longer than reading a dataset."""
    if "sklearn" in sys.modules:
        yield
        return
    names = ("sklearn", *(f"sklearn.{part}" for part in ("metrics", "linear_model", "exceptions", "utils",
                                                         "utils.extmath")))
    sys.modules.update({name: _Later(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            if isinstance(sys.modules.get(name), _Later):
                del sys.modules[name]


# What RecBole's Config reads of NumPy and NumPy 2 no longer has. No other code of RecBole reads a removed name, unless
# one that Config sets itself: metrics read np.float.
_REMOVED = {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}


@contextmanager
def fenced() -> Iterator[None]:
    """Where RecBole's Config is made, and its datasets and metrics are used: hides the command line from it, gives it
    the names that NumPy 2 removed, and undoes what it does to the process.

    RecBole's datasets fill missing values in place, which pandas 3 warns of and does not do: a file that is read by
    RecBole itself must have none.
    """
    argv, visible = sys.argv, os.environ.get("CUDA_VISIBLE_DEVICES")
    patched = ("bool", "int", "float", "complex", "object", "str", "long", "unicode", *_REMOVED)
    before = {name: np.__dict__[name] for name in patched if name in np.__dict__}
    sys.argv = argv[:1]
    for name, value in _REMOVED.items():
        setattr(np, name, value)
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning, pd.errors.ChainedAssignmentError):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        sys.argv = argv
        for name in patched:
            if name in before:
                setattr(np, name, before[name])
            elif name in np.__dict__:
                delattr(np, name)
        if visible is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


# What to do about a column that only streams of sessions read.
_WITHOUT = {"session": "cut sessions at inactivity with --set session_from=gap",
            "split": "take the last sessions for testing with --set session_split=last",
            "event": "take EVENT_FIELD and drop_events out of the dataset's config to use every row"}


def _read(path: Path, fields: Mapping[str, str], keep: Mapping[str, str], drop_events: Collection[str]) -> pd.DataFrame:
    """The columns of ``fields`` and ``keep`` without the rows of dropped events, checked."""
    required = {fields[part]: "float" if part == "time" else "token" for part in ("user", "item", "time")}
    extra = {part: fields[part] for part in _WITHOUT if part in fields}
    frame = read_table(path, {**required, **{name: "float" for name in keep}}, dict.fromkeys(extra.values(), "token"))
    absent = [part for part, column in extra.items() if column not in frame]
    if absent:
        raise UserError(f"{path}: {' and '.join(f'{extra[part]!r} ({part})' for part in absent)} is missing among its "
                        f"columns; {', '.join(_WITHOUT[part] for part in absent)}.")
    if "split" in extra:
        check_splits(path, frame[extra["split"]])
    if "event" in extra:
        dropped = frame[extra["event"]].isin(list(drop_events))
        if dropped.all():
            raise UserError(f"{path}: every row has a value of column '{extra['event']}' that drop_events of the "
                            f"dataset's config drops ({', '.join(drop_events)}).")
        frame = frame[~dropped].reset_index(drop=True)
    return frame


def check_splits(path: Path, split: pd.Series) -> None:
    """Raise UserError if a row of a file is in no split, naming its line."""
    bad = ~split.isin(SPLITS)
    if bad.any():
        row = int(np.argmax(bad.to_numpy()))
        raise UserError(f"{path}, line {row + 2}: field '{split.name}' is {split.iloc[row]!r}, expected train, valid "
                        f"or test.")


def _filtered(path: Path, frame: pd.DataFrame, columns: tuple[str, str, str], k_core: int, keep: Mapping[str, str]):
    """RecBole's dataset over a frame, filtered by it.

    Args:
        path: the file that the frame is of.
        columns: names of those of users, items and times.
    """
    with _without_sklearn():
        from recbole.config import Config
        from recbole.data.dataset import Dataset
        from recbole.model.general_recommender import BPR
        from recbole.utils.enum_type import FeatureSource, FeatureType

    user, item, time = columns
    interval = f"[{k_core},inf)" if k_core > 1 else None

    class CheckedDataset(Dataset):
        """RecBole's dataset over the rows checked above, so the file is read once, by pandas' fast reader."""

        def _load_feat(self, filepath, source):
            if source != FeatureSource.INTERACTION:
                return None
            for name in frame.columns:
                self.field2source[name] = source
                self.field2type[name] = FeatureType.TOKEN if name in (user, item) else FeatureType.FLOAT
                self.field2seqlen[name] = 1
            return frame.copy()

    with fenced():
        config = Config(model=BPR, dataset=path.stem, config_dict={
            "USER_ID_FIELD": user, "ITEM_ID_FIELD": item, "TIME_FIELD": time, "LABEL_FIELD": None,
            "load_col": {"inter": list(frame.columns)}, "val_interval": dict(keep) or None,
            "user_inter_num_interval": interval, "item_inter_num_interval": interval, "use_gpu": False,
            # RecBole's own settings for a dataset named ml-100k scale every number to [0, 1]: times would have no unit.
            "normalize_all": None})
        config["data_path"] = str(path.parent)
        try:
            return CheckedDataset(config)
        except ValueError as error:
            if "empty" not in str(error):
                raise
            raise UserError(f"{path}: no interaction is left of {len(frame)} after the {k_core}-core filter"
                            f"{' and ' + str(dict(keep)) if keep else ''}; lower it with --set k_core=N.") from None


def load_interactions(path: Path, k_core: int, fields: Mapping[str, str], keep: Mapping[str, str],
                      drop_events: Collection[str] = ()) -> Interactions:
    """Read a ``.inter`` file and apply RecBole's value and k-core filters.

    Args:
        path: the atomic file ``.../NAME.inter``.
        k_core: every user and item keeps at least this many rows (0 or 1: no filter).
        fields: names of the ``user``, ``item`` and ``time`` columns, and of those of ``session``, ``split`` and
            ``event`` that are to be read (all three as text).
        keep: RecBole value intervals of float columns, as ``{"rating": "(0,inf)"}``; a column the file lacks is an
            error.
        drop_events: rows with one of these values in the ``event`` column are left out before any other filter.

    Raises:
        UserError: for a bad file, or when the filters leave no interaction.
    """
    user, item, time = fields["user"], fields["item"], fields["time"]
    read = _read(path, fields, keep, drop_events)
    frame = read
    if set(fields) & set(_WITHOUT):
        frame = read[[user, item, time, *keep]].assign(**{_ROW: np.arange(len(read), dtype=np.float64)})
    dataset = _filtered(path, frame, (user, item, time), k_core, keep)
    rows = dataset.inter_feat
    extra = {}
    if _ROW in frame:
        kept = read.iloc[rows[_ROW].to_numpy(np.int64)]
        if "session" in fields:
            extra["session"] = kept[fields["session"]].to_numpy()
        if "split" in fields:
            extra["split"] = kept[fields["split"]].map(SPLITS.index).to_numpy(np.int8)
    return Interactions(
        user=rows[user].to_numpy(np.int64) - 1,  # RecBole's id 0 is padding
        item=rows[item].to_numpy(np.int64) - 1,
        time=rows[time].to_numpy(np.float64),
        user_tokens=np.asarray(dataset.field2id_token[user][1:]),
        item_tokens=np.asarray(dataset.field2id_token[item][1:]),
        **extra)
