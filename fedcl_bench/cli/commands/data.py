"""Show a dataset's blocks or sessions, convert the publisher's files, download them, or make synthetic ones."""

from __future__ import annotations

import argparse
import codecs
import difflib
import re
import shlex
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Mapping

from ...core.errors import UserError, unknown
from ...core.files import bar
from ...core.text import quoted, safe_name
from ...data.source import config_file, configured, load_config, spelled, write_config
from .. import add_options, count, interrupted, located, names, seed, settings_of, writing

if TYPE_CHECKING:
    from ...data.files.from_csv import Tables

ACTIONS = ("show", "convert", "download", "synth", "prepare", "deal")

EXAMPLES = """\
examples:
  run_bench.py data ml-100k                                      block statistics (short for: data show ml-100k)
  run_bench.py data download ml-latest-small                     fetch from the publisher and convert into ./data
  run_bench.py data convert hetrec2011-ml --raw ~/hetrec         from a folder of the publisher's files
  run_bench.py data convert lastfm-2k --raw ~/hetrec2011-lastfm-2k.zip --out ~/atomic
  run_bench.py data lastfm-2k --data-dir ~/atomic                its statistics, from there
  run_bench.py data xing --set session_from=gap --set session_split=last     with sessions cut and split anew
  run_bench.py data convert --table log.csv --user uid --item sku --time when mine     your own table
  run_bench.py data convert --table log.parquet --items items.jsonl --texts title,brand mine       with items' texts
  run_bench.py data convert --table train.csv --test test.csv --session SessionId --item ItemId --time Time shop
  run_bench.py data ~/logs/mine.inter                            the blocks of an atomic file anywhere
  run_bench.py data synth big --users 100000 --items 20000       synthetic interactions of any size
  run_bench.py data deal ml-100k --clients 3 --out clients       tables for three real clients
  run_bench.py data prepare big                                  read and split once; runs then start at once
"""


_OUT = {"type": Path, "default": Path("data"), "metavar": "DIR",
        "help": "where to write NAME/NAME.inter (default: ./data, where datasets are looked for)"}
_FILE = {"metavar": "FILE", "type": Path}
_TABLE_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "user": ("the column of users, by its name, or by its number from 1 if the table has no header (default: user_id; "
             "of sessions without users, that of sessions)", {}),
    "item": ("that of items (default: item_id)", {}),
    "time": ("that of times: seconds, milli-, micro- or nanoseconds since 1970, ISO 8601, or other dates of one format "
             "(default: timestamp)", {}),
    "time-format": ("of times that are not recognised, as '%%d/%%m/%%y %%H:%%M'", {"metavar": "FORMAT"}),
    "rating": ("that of ratings, if they are to be kept", {}),
    "keep": ("only rows with such a rating, as '>=4'", {"metavar": "COND"}),
    "session": ("that of sessions", {}),
    "valid": ("a table of sessions that validate, with the same columns", _FILE),
    "test": ("a table of sessions that are tested; those of --table then train", _FILE),
    "items": ("a table of items, of any kind that --table has, for NAME.item", _FILE),
    "items-id": ("its column of items (default: that of --item)", {}),
    "texts": ("its columns of texts, as title,genres", {"metavar": "A,B", "type": names}),
    "encoding": ("of text that is not UTF-8, as cp1252 or gb18030", {"metavar": "NAME"}),
    "skip-bad": ("leave out and count rows that cannot be read: of another width, or with a time or rating that is "
                 "none", {"action": "store_true", "default": None})}


def with_action(arguments: list[str]) -> list[str]:
    """The words after ``data`` with the action spelled out: ``NAME`` alone is short for ``show NAME``."""
    if arguments and arguments[0] in (*ACTIONS, "-h", "--help"):
        return arguments
    others = ("--table", "--csv", "--raw", "--clients", "--users")  # which `show` has not
    if (len(arguments) > 1 and not arguments[0].startswith("-")
            and (not arguments[1].startswith("-") or arguments[1].partition("=")[0] in others)
            and difflib.get_close_matches(arguments[0], ACTIONS)):
        raise unknown("data command", arguments[0], ACTIONS)
    return ["show", *arguments]


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="{" + ",".join(ACTIONS) + "}", required=True)

    def action(name: str, about: str, description: str,
               named: str = "dataset, or the path of an atomic file or its folder") -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=about, description=description)
        made.set_defaults(parser=made)
        made.add_argument("name", help=named)
        return made

    show = action(
        "show", "show a dataset's blocks or sessions and compare them with the expected counts",
        "Show a dataset's blocks in the layout of F3CRec's Table 1, or its sessions in that of FCUCR's, and compare "
        "them with the counts in its config.")
    convert = action(
        "convert", "turn your own table, or the publisher's files, into atomic files",
        "With --table: write OUT/NAME/NAME.inter from any table of interactions, in bounded memory: text separated by "
        "commas, tabs, semicolons, bars, double colons or spaces, JSON Lines, or Parquet; text also as .gz, .bz2, .xz, "
        ".zst or .zip; column names may have RecBole's types, as user_id:token. With --raw: check a publisher's raw "
        "files (checksums where published, format, number of rows, users and items) and write OUT/NAME/NAME.inter, "
        "and NAME.item where items are described. `list NAME` says where to get them.",
        "name of your dataset, or of a published one")
    origin = convert.add_mutually_exclusive_group(required=True)
    origin.add_argument("--raw", type=Path, metavar="DIR",
                        help="folder of the publisher's files, or the publisher's zip")
    origin.add_argument("--table", "--csv", type=Path, metavar="FILE",
                        help="your own table of interactions: text, JSON Lines or Parquet")
    for option, (text, more) in _TABLE_OPTIONS.items():
        usual = {} if "action" in more else {"metavar": "COL"}
        convert.add_argument(f"--{option}", help=f"with --table: {text}", **usual | more)
    download = action(
        "download", "fetch the publisher's files and convert them",
        "Fetch a dataset from its publisher, then do as `data convert`. By using it you accept the publisher's terms: "
        "`list NAME` names them.", "dataset")
    for made in (convert, download):
        made.add_argument("--out", **_OUT)
        made.add_argument("--force", action="store_true", help="replace atomic files that differ")
        made.add_argument("--any-checksum", action="store_true",
                          help="warn instead of stopping if a file is not the published one byte for byte, or has "
                               "other counts; only for files that you trust as you do their publisher")
    _add_synth(action(
        "synth", "make synthetic interactions of any size",
        "Write OUT/NAME/NAME.inter with skewed, learnable, drifting interactions: Zipf popularity, log-normal "
        "activity, tastes from latent factors that move from block to block, users who arrive late; and NAME.yaml, by "
        "which runs have these blocks. Memory stays bounded; the same options give the same bytes.",
        "name of the new dataset"))
    prepare = action(
        "prepare", "read and split a large dataset once, for all runs on it",
        "Write the stream of a dataset under its settings to a file beside its own. Runs under these settings map "
        "them instead of reading the interactions: they start at once, need memory only for what they look at, and "
        "share it. Numbers are the same. Delete the file to undo it.")
    deal = action(
        "deal", "deal a dataset out to real clients, each its own table",
        "Write OUT/server, what the server of a federation publishes, and a folder with a table of interactions for "
        "each client; see docs/real-clients.md.")
    deal.add_argument("--clients", type=count, required=True, metavar="N", help="how many")
    deal.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write the folders")
    for made in (show, prepare, deal):
        add_options(made, "data-dir", "set")


def low_high(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)):
        raise argparse.ArgumentTypeError(f"found {quoted(text)}, accepted: LOW-HIGH, as 10-50")
    return int(match[1]), int(match[2])


def _add_synth(synth: argparse.ArgumentParser) -> None:
    synth.add_argument("--users", type=count, default=1000, metavar="N", help="default: %(default)s")
    synth.add_argument("--items", type=count, default=1000, metavar="M",
                       help="items to choose from (default: %(default)s)")
    for option, default, text in (
            ("interactions-per-user", 50.0, "mean of the log-normal distribution of a user's interactions"),
            ("activity", 1.0, "standard deviation of their logarithm; 0: all users have equally many"),
            ("exponent", 1.0, "of Zipf's law of popularity; 0: all items are equally popular"),
            ("taste", 3.0, "how much a user's taste decides; 0: nothing but popularity does"),
            ("drift", 0.3, "how much popularity and tastes change from block to block, from 0 (not at all) to 1 (all)"),
            ("base-share", 0.6, "share of the interactions before the first change")):
        synth.add_argument(f"--{option}", type=float, default=default, metavar="X",
                           help=f"{text} (default: {default:g})")
    synth.add_argument("--counts", type=low_high, default=(), metavar="LOW-HIGH",
                       help="interactions of a user between these, all numbers alike, instead of log-normal ones")
    synth.add_argument("--repeats", action="store_true", help="a user may have an item several times")
    synth.add_argument("--blocks", type=count, default=4, metavar="B", help="of the drift (default: %(default)s)")
    synth.add_argument("--seed", type=seed, default=0, metavar="S", help="default: %(default)s")
    synth.add_argument("--out", **_OUT)
    synth.add_argument("--force", action="store_true", help="replace a dataset of this name")


def run(args: argparse.Namespace) -> int | None:
    try:
        return {"show": _show, "convert": _convert, "download": _download, "synth": _synth,
                "prepare": _prepare, "deal": _deal}[args.action](args)
    except KeyboardInterrupt:
        return interrupted("no file is half written, the same command starts again.")


def _show(args: argparse.Namespace) -> int:
    from ...data.datasets import absent_events_note, events_note, load_stream, masked_note, statistics, thin_note
    from ...data.items.features import texts_of
    from ...data.streams.overlap import shared_users
    from ..show import show_statistics

    source, settings = located(args.name, args.data_dir, settings_of(args))
    stream = load_stream(source, settings)
    status = show_statistics(source, settings, statistics(stream), {} if args.assignments else source.config.expected)
    for name, texts in texts_of(source, stream).items():
        print(f"note: {sum(map(bool, texts)):,} of {len(texts):,} items of {name} have a text")
    for pair, users in shared_users(source, stream).items() if stream.domains else ():
        if len(users):
            domains = " and ".join(stream.domains[number].name for number in pair)
            print(f"note: {len(users):,} users of {domains} are known to be the same; runs use that with "
                  f"known_users=true alone")
    for text in filter(None, (thin_note(stream, settings), events_note(source, settings),
                              absent_events_note(source, settings), masked_note(stream))):
        print(f"note: {text}")
    return status


def _prepare(args: argparse.Namespace) -> None:
    from ...data.streams import prepared
    from ...data.datasets import build_stream

    source, settings = located(args.name, args.data_dir, settings_of(args))
    stream = build_stream(source, settings)
    path = prepared.file_of(source, settings)
    size = prepared.save(stream, path)
    print(f"{source.name}: {sum(step.interactions for step in stream.steps):,} interactions in {len(stream.steps)} "
          f"step{'s' * (len(stream.steps) > 1)}, {size / (1 << 20):,.1f} MiB")
    print(f"wrote: {path}")


def _deal(args: argparse.Namespace) -> None:
    from ...data.datasets import load_stream
    from ...deployment.client_files import Published
    from ...deployment.domain_files import deal_all
    from ...experiments.partition import divide

    source, settings = located(args.name, args.data_dir, settings_of(args))
    stream = load_stream(source, settings)
    published = Published.of(source, settings, stream)
    tables = deal_all(published, source, stream, divide(stream, args.clients, "--clients"), args.out)
    print(f"{source.name}: {stream.steps[-1].n_users} users and {stream.steps[-1].n_items} items")
    print(f"wrote: {args.out / 'server'}, {tables[0]}" + (f" to {tables[-1]}" if len(tables) > 1 else ""))
    if (path := config_file(spelled(args.name, args.data_dir))) not in (None, configured().get(source.name)):
        print(f"note: what {path} sets beside blocks and splits is not dealt; put it into ./dataset_configs at the "
              f"server")


def _convert(args: argparse.Namespace) -> None:
    if args.table is not None:
        return _import(args)
    if given := [option for option in _TABLE_OPTIONS if getattr(args, option.replace("-", "_")) is not None]:
        raise UserError(f"--{given[0]} has no effect with --raw; it says how to read --table.")
    _report(args, args.raw)


def _tables_of(args: argparse.Namespace) -> Tables:
    """The user's own tables, as the options say; raises UserError for options that lack another."""
    from ...data.files.from_csv import Columns, Tables

    for option, needed in (("keep", "rating"), ("valid", "test"), ("test", "session"), ("items", "texts"),
                           ("texts", "items"), ("items_id", "items")):
        if getattr(args, option) and not getattr(args, needed):
            raise UserError(f"--{option.replace('_', '-')}: needs --{needed}; `data convert --help` says what it is.")
    if args.any_checksum:
        raise UserError("--any-checksum has no effect with --table; leave it out.")
    item, encoding = args.item or "item_id", _encoding(args.encoding or "utf-8")
    columns = Columns(args.user or _users_by_default(args.table, args.session, encoding), item,
                      args.time or "timestamp", args.rating or "", args.session or "", args.keep or "")
    return Tables(args.table, columns, encoding, bool(args.skip_bad), args.valid, args.test, args.items,
                  args.items_id or item, args.texts or (), args.time_format or "")


def _encoding(name: str) -> str:
    """The name, that of UTF-8 in one spelling; raises UserError unless it is of an encoding of text."""
    try:
        "a".encode(name)
    except (LookupError, UnicodeError):
        raise UserError(f"--encoding: found {quoted(name)}, accepted: one of Python's, as cp1252, latin-1, utf-16 or "
                        f"gb18030.") from None
    return "utf-8" if codecs.lookup(name).name == "utf-8" else name


def _users_by_default(table: Path, session: str | None, encoding: str) -> str:
    """The column of users where none is named: user_id, or that of sessions in a table of them that has none."""
    from ...data.files.table_files import detect

    try:
        if session:
            detect(table, {"user_id": "--user"}, "--table", encoding)
    except UserError:
        return session
    return "user_id"


def _import(args: argparse.Namespace) -> None:
    from ...data.files.from_csv import import_table

    tables = _tables_of(args)
    _refuse_taken(args.name, "convert --table")
    done = import_table(tables, args.name, args.out, args.force)
    print(f"{args.table}: {done.notes[0]}; {done.notes[1]}")
    print(f"{args.name}: {done.written:,} interactions of {done.users:,} users and {done.items:,} items, "
          f"{done.notes[2]}")
    for note in done.notes[3:]:
        print(f"note: {note}")
    for reason, count_ in done.left_out.items():
        print(f"left out: {count_:,} row{'s' * (count_ > 1)} {reason}")
    for path in done.files:
        print(f"wrote: {path}")
    _say_next(args, "--method ft --backbone sasrec" if args.session else "--method f3crec --backbone fedmf")


def _refuse_taken(name: str, what: str) -> None:
    from ...data.files.recbole_files import bundled

    if name.lower() in configured() or bundled(name):
        raise UserError(f"data {what}: '{name}' is a dataset that exists; choose another name.")


def _download(args: argparse.Namespace) -> None:
    from ...data.files.archives import fetch
    from ...data.files.convert import format_of

    args.name = spelled(args.name)
    format_of(args.name)
    config = load_config(args.name)
    then = f"run_bench.py data convert {args.name} --raw"
    if not config.raw.url:
        raise UserError(f"dataset '{args.name}' cannot be downloaded freely; get it from {config.source}\n"
                        f"Then run: {then} DIR{_out(args, '--out')}")
    file = config.raw.url.rsplit("/", 1)[-1]
    with tempfile.TemporaryDirectory(prefix="fedcl_bench-") as folder:
        fetch(config.raw.url, Path(folder) / file,
              f"Fetch it by hand, then run: {then} {file}{_out(args, '--out')}")
        _report(args, Path(folder) / file, config.raw.url)


def _synth(args: argparse.Namespace) -> None:
    from ...data.items.item_texts import item_file
    from ...data.streams.synth import SyntheticLog, write

    safe_name(args.name, "data synth")
    _refuse_taken(args.name, "synth")
    for option in ("interactions_per_user", "activity") if args.counts else ():
        if getattr(args, option) != args.parser.get_default(option):
            raise UserError(f"--{option.replace('_', '-')} has no effect with --counts; leave it out.")
    per_user = sum(args.counts) / 2 if args.counts else args.interactions_per_user
    log = SyntheticLog(args.users, args.items, per_user, args.blocks, args.base_share, args.exponent, args.activity,
                       args.taste, args.drift, args.seed, args.counts, args.repeats)
    log.check()
    path = args.out / args.name / f"{args.name}.inter"
    files = path, path.with_suffix(".yaml")
    if not args.force and (exist := [file for file in files if file.exists()]):
        raise UserError(f"{exist[0]}: exists; replace it with --force, or choose another name.")
    with bar(args.name, int(2 * log.users * log.per_user), "rows made and written") as done:
        rows, items = write(log, path, done=done)
    with writing(files[1]):
        write_config(path, {"settings": {"blocks": log.blocks, "base_share": log.base_share}})
    print(f"{args.name}: {rows:,} interactions of {log.users:,} users and {items:,} items"
          + (f" ({log.items - items:,} others have none)" if items < log.items else ""))
    for file in files:
        print(f"wrote: {file}")
    if (items_of := item_file(path)).exists():
        print(f"note: {items_of}: was there before, and is read with these interactions")
    _say_next(args, "--method f3crec --backbone fedmf")


def _out(args: argparse.Namespace, option: str) -> str:
    return "" if args.out == Path("data") else f" {option} {shlex.quote(str(args.out))}"


def _say_next(args: argparse.Namespace, run_as: str = "", settings: Mapping[str, str] = MappingProxyType({})) -> None:
    """The commands that go on with a dataset that was written."""
    options = _out(args, "--data-dir") + "".join(f" --set {name}={value}" for name, value in settings.items())
    print(f"next: run_bench.py data {args.name}{options}")
    if run_as:
        print(f"then: run_bench.py {run_as} --dataset {args.name}{options}")


def _report(args: argparse.Namespace, raw: Path, label: str = "") -> None:
    """Convert and say what was done; ``label`` as for ``convert``."""
    from ...data.files.convert import convert

    args.name = spelled(args.name)
    done = convert(args.name, raw, args.out, args.force, args.any_checksum, label=label)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    counts = done.counts
    print(f"{args.name}: {counts['rows']:,} rows of {counts['users']:,} users and {counts['items']:,} items"
          + (f"; {counts['titles']:,} titles" if "titles" in counts else ""))
    if done.interactions < counts["rows"]:
        print(f"{done.interactions:,} interactions without repeated rows and those that name no item")
    for check in done.checks:
        print(check)
    for path in done.files:
        print(f"{'wrote' if done.changed else 'already there'}: {path}")
    _say_next(args, settings=done.settings)
