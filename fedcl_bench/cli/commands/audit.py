"""Attack the uploads of a method's clients, per level of noise."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ...api.stopping import stop_between_rounds
from ...core.errors import UserError
from ...core.files import bar, write_atomically
from ...core.settings import LARGEST
from .. import Extend, add_options, count, counts, interrupted, print_json, seeds, settings_of, whole

if TYPE_CHECKING:
    from pandas import DataFrame

    from ...audit.audit import Level
    from ...data.stream import Stream
    from ...runs.config import RunConfig
    from ...runs.registry import Registry

EXAMPLES = """\
examples:
  run_bench.py audit --method ft --backbone fedmf                       uploads of rounds 1 and 20, six levels of noise
  run_bench.py audit --method f3crec --backbone fedmf --noise 0,0.5,5 --rounds 1,50 --seeds 3
  run_bench.py audit --method ft --backbone fedmf --noise 0,1,10 --set upload_clip=1      with a formal guarantee
  run_bench.py audit --method ft --backbone fedmf --noise 0,1,10 --set upload_clip=1 --set upload_mechanism=gaussian
  run_bench.py audit --method fcucr --backbone sasrec --dataset xing --noise 0,0.1 --rounds 1,5 --clients 100

Each level of noise is a whole run with that noise, and of the rounds named the very uploads of its clients are
attacked, alone and added to the client's earlier ones in the block: items are ranked by how much the client changed
their rows (F3CRec, section 5.6), and by how far along the main direction of its changes. --out gets audit.json, .csv,
.md, .png and .svg, and the clients' numbers of every finished level: the same command goes on where it was stopped.
docs/privacy.md explains all of it.
Exit status: 0 done, 1 a run diverged, 2 something to fix in the command or the data, 130 interrupted.
"""

NOISE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # F3CRec's Table 8
OWN = {"upload_noise": "--noise", "rounds": "--rounds", "patience": "--rounds"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", metavar="NAME", help="ft, f3crec, ...")
    parser.add_argument("--backbone", metavar="NAME", help="fedmf, ...")
    parser.add_argument("--dataset", metavar="NAME", default="ml-100k",
                        help="a name, or the path of an atomic file or its folder (default: ml-100k)")
    levels = numbers("numbers from 0 with commas, as 0,0.1,0.5", lambda x: 0.0 <= x < math.inf)
    parser.add_argument("--noise", type=levels, action=Extend, default=NOISE, metavar="A,B",
                        help="levels of upload_noise (default: 0,0.1,0.2,0.3,0.4,0.5)")
    parser.add_argument("--rounds", type=counts, action=Extend, default=(1, 20), metavar="A,B",
                        help="whose uploads are attacked, from 1; every block is trained up to the last (default: "
                             "1,20)")
    parser.add_argument("--block", type=whole(0, LARGEST), metavar="T",
                        help="the block they are of (default: the first in which the method acts)")
    parser.add_argument("--clients", type=count, default=0, metavar="N",
                        help="attack so many clients, drawn at random, each an item table in memory (default: all)")
    parser.add_argument("--delta", type=numbers("a number between 0 and 1, as 1e-5", lambda x: 0.0 < x < 1.0, False),
                        default=None, metavar="D",
                        help="of the (epsilon, delta) of clipped uploads (default: 1e-5)")
    add_options(parser, "seed")
    parser.add_argument("--seeds", type=seeds, default=1, metavar="K", help="K seeds from --seed on (default: 1)")
    add_options(parser, "data-dir", "set")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: results/audits/METHOD-BACKBONE-DATASET; an "
                        "earlier report there is replaced")
    add_options(parser, "quiet", "json", "plugins")


def numbers(accepted: str, is_one: Callable[[float], bool], several: bool = True) -> Callable[[str], Any]:
    """argparse type of numbers with commas, sorted, or of one number."""
    def levels(text: str) -> Any:
        try:
            values = [float(part) for part in (text.split(",") if several else [text])]
        except ValueError:
            values = [math.nan]
        if not all(map(is_one, values)):
            raise argparse.ArgumentTypeError(f"found '{text}', accepted: {accepted}")
        return tuple(sorted(set(values))) if several else values[0]
    return levels


def run(args: argparse.Namespace) -> int:
    from ...audit import audit as report
    from ...runs.registry import discover
    from ...stats.accounting import DELTA
    from ..show import print_table

    registry = discover(args.plugins)
    args.method, args.backbone = registry.pair(args.method, args.backbone)
    stream, planned = _planned(args, registry)
    first = planned[0]
    dataset = first.config.source.name
    name = f"{args.method}-{args.backbone}-{dataset}".replace(":", "-")  # as records' folders
    out = args.out or Path("results/audits") / name
    if not args.quiet:
        print(f"audit of {args.method} on {args.backbone}, {dataset}, block {first.block}, "
              f"round{'s' if len(first.rounds) > 1 else ''} {', '.join(map(str, first.rounds))}", file=sys.stderr)
    frames: list[DataFrame] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        _attack(args, stream, planned, out, frames)
        results = report.content(planned, frames, args.delta or DELTA)
        files = _write(results, out)
    except report.Stopped:
        return interrupted(f"{len(frames)} of {len(planned)} runs are kept in {out}, the same command goes on from "
                           f"there.")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}).") from None
    if args.json:
        print_json({**results, "folder": str(out)})
    else:
        print(report.title(results))
        print_table(*report.table(results))
        print(*report.notes(results), *files, sep="\n")
    return 0


def _planned(args: argparse.Namespace, registry: Registry) -> tuple[Stream, list[Level]]:
    """The stream, and a run per level of noise and seed, all of them checked before the first is run."""
    from ...audit.audit import Level
    from ...data.datasets import load_stream
    from ...plugin.method import Method
    from ...runs.config import make_config

    settings, rounds = settings_of(args), tuple(sorted(set(args.rounds)))
    if name := next((name for name in settings if name in OWN), ""):
        raise UserError(f"--set {name}: an audit sets it itself; use {OWN[name]}.")

    plain = {name: value for name, value in settings.items() if name != "upload_mechanism"}  # which needs noise
    make_config(registry, args.method, args.backbone, args.dataset, args.seed, [("--set", plain)],
                args.data_dir).stream.require_users("audit")

    def config(noise: float, number: int) -> RunConfig:
        changes = dict(settings)
        if noise == 0.0 and "upload_clip" not in changes:
            changes.pop("upload_mechanism", None)  # of no effect at this level only
        return make_config(registry, args.method, args.backbone, args.dataset, number, [
            ("--set", changes), ("--rounds", {"rounds": rounds[-1], "patience": 0}),
            ("--noise", {"upload_noise": noise})], args.data_dir)

    configs = [config(noise, args.seed + k) for noise in sorted(set(args.noise)) for k in range(args.seeds)]
    stream = load_stream(configs[0].source, configs[0].stream, configs[0].features)
    last = len(stream.steps) - 1
    chosen = min(configs[0].method.cls.first_step, last) if args.block is None else args.block
    if chosen > last:
        raise UserError(f"--block: found {chosen}, accepted: 0 to {last}, the blocks of {configs[0].source.name} here.")
    if configs[0].federation(stream).acting_in(stream.steps[chosen]).trains != "clients":
        raise UserError(f"--block: found {chosen}, accepted: a block in which clients train; with '{args.method}' none "
                        f"do in this one.")
    if configs[0].method.cls.sums is not Method.sums:
        raise UserError(f"--method: found {args.method}, accepted: methods whose clients send their changes of item "
                        f"tables, which an audit attacks; these send sums in their place.")
    for run_config in configs:
        run_config.check(run_config.federation(stream))
    return stream, [Level(run_config, chosen, rounds, args.clients) for run_config in configs]


def _attack(args: argparse.Namespace, stream: Stream, planned: list[Level], out: Path,
            frames: list[DataFrame]) -> None:
    """Run and attack every level, and add its clients' numbers to ``frames``. Raises Stopped if the user stops it,
    OSError if a level's numbers cannot be kept."""
    from ...audit.audit import Stopped, level_clients

    with stop_between_rounds() as stop:
        for level in planned:
            began, label = time.perf_counter(), f"  noise {level.noise:g}, seed {level.config.seed}"
            with bar(label, (level.block + 1) * level.rounds[-1], "rounds", args.quiet) as update:
                frame, again = level_clients(level, out, lambda: stream, on_round=lambda: update(1), stop=stop)
            frames.append(frame)
            if not args.quiet:
                took = "from an earlier audit" if again else f"{time.perf_counter() - began:.1f} s"
                print(f"{label}: {took}", file=sys.stderr)
            if stop() and level is not planned[-1]:
                raise Stopped


def _write(results: dict[str, Any], out: Path) -> list[Path]:
    from ...audit import audit as report
    from ...reports.draw import audit_curves, save

    texts = {"audit.json": json.dumps(results, indent=1, allow_nan=False) + "\n",
             "audit.csv": report.csv_text(results), "audit.md": report.markdown(results)}
    for name, text in texts.items():
        write_atomically(out / name, text.encode(errors="backslashreplace"))
    figure = audit_curves(results, report.title(results))
    pictures = [out / f"audit.{kind}" for kind in ("png", "svg")]
    for path in pictures:
        save(figure, path)
    return [*(out / name for name in texts), *pictures]
