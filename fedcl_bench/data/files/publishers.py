"""How publishers write their datasets: one preset per dataset, which ``convert`` makes atomic files of.

A preset says which files there are, how they are written and which of their columns become which fields. Where they
are, their checksums and what they must count to stands in ``dataset_configs/NAME.yaml`` under ``raw``.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Mapping, Sequence

from ...core.errors import UserError
from ...core.text import quoted
from .pickled import TEST, TRAIN, pickled_rows, table_rows, tables_of
from .recbole_files import SPLITS
from .table_reader import read_parquet

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Kind:
    """What is accepted in a field, a regular expression and how to say it, and how it is written in atomic files; for
    what only looks right, ``written`` raises ValueError."""

    pattern: str
    accepted: str
    written: Callable[[str], str] | None = None


def _seconds(time: datetime.datetime) -> str:
    return str(round((time - datetime.datetime(1970, 1, 1)).total_seconds()))


ID = Kind("[0-9]{1,18}", "an id, which is a whole number")
WHOLE = Kind("-?[0-9]{1,18}", "a whole number")
NUMBER = Kind(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", "a number")
FLAG = Kind("[01]", "0 or 1")
CODE = Kind(r"[!-~]([ -~]*[!-~])?", "an id of letters, digits and signs")
LISTENER = Kind("user_[0-9]{6}", "a user as user_000639")
SHOP_EVENT = Kind("view|addtocart|transaction", "view, addtocart or transaction")
MILLISECONDS = replace(WHOLE, written=lambda text: f"{int(text) / 1000:.3f}")
ISO_TIME = Kind(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
                "a time as 2009-04-08T01:57:47Z",
                lambda text: _seconds(datetime.datetime.fromisoformat(text.removesuffix("Z"))))
DAY_OF_2014 = Kind("[0-9]{3,4}", "a day as 0829, month before day",
                   lambda text: _seconds(datetime.datetime(2014, int(text[:-2]), int(text[-2:]))))
TEXT = None  # is not looked at


@dataclass(frozen=True)
class RawTable:
    """How one of a publisher's files is written."""

    file: str  # its name
    # Name of a column to the kind of its fields, None for any text; with a header those that are read, which it must
    # name, perhaps each with that of its export before a dot; without one all, in order.
    columns: Mapping[str, Kind | None]
    separator: str = "\t"  # between fields; only files separated by commas quote fields
    header: bool = True  # the first line holds the names of the columns
    encoding: str = "utf-8"  # text that is valid UTF-8 is read as that in any case
    # Of a file that is neither text nor Parquet: frames with its columns, given its path and what messages call it.
    reader: Callable[[Path, str], Iterator[pd.DataFrame]] | None = None
    is_code: bool = False  # the format can hold code, so a file of another checksum is never taken as a sample


@dataclass(frozen=True)
class Format:
    """How a dataset's files become atomic ones."""

    interactions: tuple[RawTable, ...]  # with the same columns; the rows of one follow those of another
    # Header field of the ``.inter`` file to the table's column, or to several of which the first that is not empty
    # counts; user and item come first. Rows where all of those are empty are left out.
    columns: Mapping[str, str | tuple[str, ...]]
    items: tuple[RawTable, ...] = ()  # the tables that describe items; empty if there is no ``.item`` file
    describe: Callable[..., Iterable[Sequence[str]]] | None = None  # their rows to rows of an id and ``described``
    described: tuple[str, ...] = ("title", "genres")  # what the ``.item`` file has besides ids; spaces between genres
    distinct: bool = False  # rows that are alike in ``columns`` count once, at the first one's place
    otherwise: Format | None = None  # how the data is written elsewhere; taken where this format's files are missing
    counted: bool = True  # the counts of the dataset's config are those of this format
    settings: Mapping[str, str] = field(default_factory=dict)  # to use the written file, as its config is for another
    persons: str = ""  # what users' ids are of where an ``.overlap`` file is to say who each is (see ``overlap``)

    @property
    def tables(self) -> tuple[RawTable, ...]:
        """Of interactions, then of items."""
        return (*self.interactions, *self.items)


_GENRES = ("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
           "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western")


def _genres_as_flags(movies):
    for movie, title, _, _, _, *flags in movies:
        yield movie, title, " ".join(genre for genre, flag in zip(_GENRES, flags) if flag == "1")


def _genres_in_one_field(movies):
    for movie, title, genres in movies:
        yield movie, title, genres.replace("|", " ")


def _genres_in_a_table(movies, genres):
    of: dict[str, list[str]] = {}
    for movie, genre in genres:
        of.setdefault(movie, []).append(genre)
    for movie, title in movies:
        yield movie, title, " ".join(of.get(movie, ()))


def _fields(user: str, item: str | tuple[str, ...], time: str, **more: str) -> dict[str, str | tuple[str, ...]]:
    """Columns of an atomic file of interactions; those of ``more``, of the same name in the table, with their types."""
    return {"user_id:token": user, "item_id:token": item, **{f"{name}:{kind}": name for name, kind in more.items()},
            "timestamp:float": time}


def _session_set() -> Format:
    """A set of sessions as session recommenders' codes have it, pickled; or the same as tables."""
    def of(files: Mapping[str, str], reader: Callable[..., Iterator[pd.DataFrame]],
           otherwise: Format | None = None) -> Format:
        columns = {"session": TEXT, "item": ID, "position": ID, "split": TEXT}
        return Format(tuple(RawTable(file, columns, reader=partial(reader, split=split))
                            for split, file in files.items()),
                      {**_fields("session", "item", "position"), "split:token": "split"}, otherwise=otherwise)

    return of({TRAIN: "all_train_seq.txt", TEST: "test.txt"}, pickled_rows,
              of({TRAIN: "train.parquet", TEST: "test.parquet"}, table_rows))


def _split_sequences(path: Path, label: str, domain: str) -> Iterator[pd.DataFrame]:
    """One domain of a table whose sequences are split into train, valid and test: user, item and the item's place in
    the user's history.

    A sequence of a later split may repeat those before it. Of what repeats, the first row counts. Raises UserError if
    the file is no such table, or has nothing of the domain.
    """
    import pandas as pd

    frame = read_parquet(path, label, ("domain", "split", "user_id", "item_id"))
    domains = frame["domain"].astype(object).map(str)  # "nan" where one is missing, which pandas 3 would leave missing
    if not (domains == domain).any():
        raise UserError(f"{label}: has no domain '{domain}'; found {', '.join(sorted(set(domains))) or 'no rows'}.")
    frame = frame[domains == domain]
    splits = frame["split"].astype(object).map(str)
    if (wrong := ~splits.isin(SPLITS)).any():
        raise UserError(f"{label}: column 'split' has {quoted(splits[wrong].iloc[0])}, expected {', '.join(SPLITS)}.")
    split = pd.Categorical(splits, SPLITS)
    frame = frame.iloc[split.codes.argsort(kind="stable")].drop_duplicates(["user_id", "item_id"])
    yield frame.assign(order=frame.groupby("user_id", dropna=False).cumcount())


def _domain(time: str, described: Mapping[str, str]) -> Format:
    """A domain: tables of its interactions, in each user's order by the column ``time``, and of its items' texts, given
    what its columns are called in the ``.item`` file; none: it has no texts."""
    items = (RawTable("item.parquet", {"item_id": CODE, **dict.fromkeys(described, TEXT)}),) if described else ()
    return Format((RawTable("inter.parquet", {"user_id": CODE, "item_id": CODE, time: WHOLE}),),
                  _fields("user_id", "item_id", time), items, describe=iter, described=tuple(described.values()))


def _identified(domain: str, persons: str) -> Format:
    """A domain, by its name in a table of several, which split sequences and share the ids of ``persons``."""
    inter = RawTable("inter.parquet", {"user_id": CODE, "item_id": CODE, "order": WHOLE},
                  reader=partial(_split_sequences, domain=domain))
    return Format((inter,), _fields("user_id", "item_id", "order"), persons=persons)


FORMATS = {
    "amazon-arts": _domain("order", {"title": "title"}),
    "amazon-pantry": _domain("order", {"title": "title", "brand": "brand"}),
    "amazon-instruments-dated": _domain("timestamp", {}),
    **{f"amazon-{name}": _identified(name, "sport-cloth") for name in ("sport", "cloth")},
    **{f"amazon-{name}": _identified(name, "phone-electronic") for name in ("phone", "electronic")},
    **{f"amazon-{name}": _identified(name.title(), "feddcsr") for name in ("food", "kitchen", "clothing", "beauty")},
    "online-retail-ffmsr": _domain("timestamp", {"text": "title"}),
    "session-diginetica": _session_set(),
    "session-retailrocket": _session_set(),
    "ml-100k": Format(
        (RawTable("u.data", {"user id": ID, "item id": ID, "rating": NUMBER, "timestamp": WHOLE}, header=False),),
        _fields("user id", "item id", "timestamp", rating="float"),
        (RawTable("u.item", {"movie id": ID, "movie title": TEXT, "release date": TEXT, "video release date": TEXT,
                          "IMDb URL": TEXT, **dict.fromkeys(_GENRES, FLAG)},
               separator="|", header=False, encoding="latin-1"),), _genres_as_flags),
    "ml-latest-small": Format(
        (RawTable("ratings.csv", {"userId": ID, "movieId": ID, "rating": NUMBER, "timestamp": WHOLE}, separator=","),),
        _fields("userId", "movieId", "timestamp", rating="float"),
        (RawTable("movies.csv", {"movieId": ID, "title": TEXT, "genres": TEXT}, separator=","),), _genres_in_one_field),
    "lastfm-2k": Format(
        (RawTable("user_taggedartists-timestamps.dat", {"userID": ID, "artistID": ID, "timestamp": MILLISECONDS}),),
        _fields("userID", "artistID", "timestamp"), distinct=True),
    "hetrec2011-ml": Format(
        (RawTable("user_ratedmovies-timestamps.dat", {"userID": ID, "movieID": ID, "rating": NUMBER,
                                                   "timestamp": MILLISECONDS}),),
        _fields("userID", "movieID", "timestamp", rating="float"),
        (RawTable("movies.dat", {"id": ID, "title": TEXT}, encoding="latin-1"),
         RawTable("movie_genres.dat", {"movieID": ID, "genre": TEXT}, encoding="latin-1")), _genres_in_a_table),
    "xing": Format(
        (RawTable("session.hdf", {"user_id": ID, "item_id": ID, "interaction_type": ID, "created_at": WHOLE,
                               "session_id": ID, "split": TEXT},
               reader=partial(tables_of, keys=SPLITS, key_column="split", columns=(
                   "user_id", "item_id", "interaction_type", "created_at", "session_id")), is_code=True),),
        {"user_id:token": "user_id", "item_id:token": "item_id", "session_id:token": "session_id",
         "interaction_type:float": "interaction_type", "timestamp:float": "created_at", "split:token": "split"},
        otherwise=Format(
            (RawTable("interactions.csv", {"user_id": ID, "item_id": ID, "interaction_type": ID,
                                           "created_at": WHOLE}),),
            _fields("user_id", "item_id", "created_at", interaction_type="token"),
            counted=False, settings={"session_from": "gap", "session_split": "last"})),
    "retailrocket": Format(
        (RawTable("events.csv", {"timestamp": MILLISECONDS, "visitorid": ID, "event": SHOP_EVENT, "itemid": ID},
               separator=","),),
        _fields("visitorid", "itemid", "timestamp", event="token")),
    "lastfm-1k": Format(
        (RawTable("userid-timestamp-artid-artname-traid-traname.tsv",
               {"userid": LISTENER, "timestamp": ISO_TIME, "musicbrainz-artist-id": TEXT, "artist-name": TEXT,
                "musicbrainz-track-id": TEXT, "track-name": TEXT}, header=False),),
        _fields("userid", ("musicbrainz-artist-id", "artist-name"), "timestamp")),
    "tmall": Format(
        (RawTable("user_log_format1.csv", {"user_id": ID, "item_id": ID, "time_stamp": DAY_OF_2014, "action_type": ID},
               separator=","),),
        _fields("user_id", "item_id", "time_stamp", action_type="token")),
}
