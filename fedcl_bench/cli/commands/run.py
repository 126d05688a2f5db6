"""Run a method on a backbone and a dataset."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ...api.stopping import stop_between_rounds
from ...core.clock import since_start
from ...core.errors import UserError, require_known
from ...core.text import for_terminal, quoted
from ...core.tuning import importing
from ...data.source import read_yaml
from ...runs.metadata import refuse_typos
from .. import add_options, cores, count, print_json, say_tuned, seed, seeds, settings_of, tuned_of, workers

if TYPE_CHECKING:
    from ...data.stream import Stream
    from ...deployment.starting import RealClients
    from ...runs.config import RunConfig
    from ...runs.specs import Layers

EXAMPLES = """\
examples:
  run_bench.py --method f3crec --backbone fedmf              the main job: F3CRec on FedMF over MovieLens 100K
  run_bench.py --method ft --backbone fedmf --seeds 5        five seeds, mean and standard deviation
  run_bench.py --method f3crec --backbone fedmf --set eps=0.001 --set lambda_kd=0.01
  run_bench.py --method f3crec --backbone fedmf --set without=cc          an ablation of the paper
  run_bench.py --method f3crec --backbone fedmf --reading paper           where paper and code differ, as the paper
  run_bench.py --method pfedrec                              a federated recommender alone: FT on that backbone
  run_bench.py --method pfedrec --set stream=static          leave-one-out and sampled ranking, as in its paper
  run_bench.py --method kd --backbone fedmf --dataset ml-latest-small --data-dir ~/atomic
  run_bench.py --method ft --backbone fedmf --ray local --shards 2        the clients spread over two workers
  run_bench.py --method ft --backbone fedmf --engine flower --clients 3   each client a process with its own data
  run_bench.py --method mymethod --backbone fedmf --plugins DIR --honest      does it use what it must not know?
  run_bench.py list              methods, backbones and datasets
  run_bench.py list f3crec       the settings of one of them, their ranges and the paper's search
  run_bench.py data ml-100k      block statistics of a dataset
  run_bench.py doctor            check this installation

A run is kept under --results; the same command again shows the record, an interrupted one goes on where it stopped.
Exit status: 0 done, 1 the run failed or --honest found something, 2 something to fix in the command or the data, 130
interrupted.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", metavar="NAME", help="what makes it continual: ft, reg, kd, f3crec, ...")
    parser.add_argument("--backbone", metavar="NAME", help="the federated recommender: fedmf, ...")
    parser.add_argument("--dataset", metavar="NAME",
                        help="a name, or the path of an atomic file or its folder (default: ml-100k)")
    parser.add_argument("--seed", type=seed, metavar="N", help="random seed (default: 0)")
    add_options(parser, seeds="run K seeds, from --seed on, and show mean and deviation")
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="YAML file of `name: value` lines: method, backbone, dataset, seed, seeds, device, "
                             "data_dir and any setting; the command line wins")
    add_options(parser, "data-dir", "set")
    parser.add_argument("--reading", choices=("paper", "code"), metavar="WHOSE",
                        help="take all settings that paper and code read differently as the `paper` or as the `code` "
                             "has them; --set wins. Elsewhere: METHOD:reading=paper, or --set reading=paper")
    add_options(parser, "tuned", "device")
    parser.add_argument("--threads", type=workers, metavar="N",
                        help="threads of PyTorch; no result depends on it (default: 1 for small work, else all cores; "
                             "with --ray 1 per shard)")
    add_options(parser, ray="spread the clients of each run")
    parser.add_argument("--shards", type=workers, metavar="N",
                        help="with --ray: into so many parts (default: the cores of the cluster)")
    real = parser.add_argument_group("real clients", "each a process with its own data; see docs/real-clients.md")
    real.add_argument("--engine", metavar="flower[:HOST:PORT]",
                      help="clients of this machine that are started for the run; or at an address, where others join")
    real.add_argument("--clients", type=workers, metavar="N",
                      help="how many must join (default: on this machine 4, or one per domain)")
    real.add_argument("--min-clients", type=workers, metavar="N",
                      help="with how many a round goes on when others fail (default: all)")
    real.add_argument("--round-timeout", type=count, metavar="SECONDS",
                      help="how long a client may take to answer (default: 600)")
    real.add_argument("--federation", type=Path, metavar="DIR",
                      help="with an address: what the server publishes, as `data deal` writes it")
    add_options(parser, "results")
    parser.add_argument("--log", action="append", default=[], metavar="KIND[:DIR]",
                        help="also write every round and test to a log: tensorboard, csv or wandb (offline unless "
                             "WANDB_MODE says otherwise); repeatable (default DIR: logs/KIND in the results folder)")
    parser.add_argument("--rerun", action="store_true", help="run again even if the record exists; if that is stopped, "
                        "the command of that seed without --rerun goes on")
    parser.add_argument("--save-lists", action="store_true",
                        help="also write users' ranked lists (TREC run files), the items to find (qrels) and their "
                             "origin (ir_metadata) to lists/RUN in the results folder, for ir-measures, ranx, ...")
    parser.add_argument("--honest", action="store_true",
                        help="instead, try short runs on other test items, other clients' data and the like: whoever "
                             "must not know does the same. No record is made; exit status 1 if somebody noticed")
    parser.add_argument("--honest-rounds", type=count, metavar="N",
                        help="rounds of every block in these (default: 4)")
    add_options(parser, "quiet", "json", by="also show results of groups of users or items")
    parser.add_argument("-v", "--verbose", action="store_true", help="also say how clients are trained in each block")
    add_options(parser, "plugins")


_FILE_KEYS = {"method": str, "backbone": str, "dataset": str, "seed": seed, "seeds": seeds, "device": str,
              "data_dir": lambda text: Path(text).expanduser()}


def _merge_config_file(args: argparse.Namespace) -> dict[str, Any]:
    """Fill arguments that the command line left open from --config; return the settings of the file."""
    if args.config is None:
        return {}
    settings = read_yaml(args.config)
    for name, convert in _FILE_KEYS.items():
        if name in settings:
            value = settings.pop(name)
            if value is None or isinstance(value, (list, dict)):  # as text None would name the backbone none
                found = "nothing" if value is None else value
                raise UserError(f"{args.config}, field '{name}': found {found}, accepted: one value; or leave it out.")
            try:
                value = convert(str(value))
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{args.config}, field '{name}': {error}.") from None
            if getattr(args, name) is None:
                setattr(args, name, value)
    if args.device not in (None, "cpu", "cuda", "auto"):
        raise UserError(f"{args.config}, field 'device': found '{args.device}', accepted: cpu, cuda, auto.")
    for name in ("method", "backbone", "dataset"):
        if getattr(args, name) is None and (near := get_close_matches(name, map(str, settings), n=1, cutoff=0.8)):
            raise UserError(f"unknown field in {args.config} '{near[0]}'.\nDid you mean '{name}'?")
    if args.reading:
        settings.pop("reading", None)
    return settings


def _require_one(args: argparse.Namespace) -> None:
    """Raise UserError for several methods or backbones, or for settings behind a method, as other commands take."""
    for name in ("method", "backbone"):
        if "," in (found := getattr(args, name) or ""):
            raise UserError(f"--{name}: found {quoted(found)}, accepted: one name; several at a time: grid --{name}s "
                            f"{found}.")
    name, colon, setting = (args.method or "").partition(":")
    if colon and "=" in setting:
        raise UserError(f"--method: found {quoted(args.method)}, accepted: a name; settings stand apart: --method "
                        f"{name} --set {setting}.")


def run(args: argparse.Namespace) -> int:
    from_file = _merge_config_file(args)
    _require_one(args)
    refuse_typos(args.method, args.backbone, args.plugins)
    with importing():
        from ...api.seeds import combined
        from ...evaluation.beyond_accuracy import GROUPS
        from ...records.store import leak_notes
        from ...runs.ranked_lists import folder_of
        from ...runs.runner import Interrupted
        from ..show import few_users, improvement_notes, sampling_notes, show_groups, show_result

    require_known("group in --by", args.by, GROUPS)
    configs, overrides = _configs(args, from_file)
    if args.by:
        configs[0].stream.require_users("--by")
    try:
        if args.honest:
            return _honest(args, configs[0], overrides)
        start = since_start()
        results = _results(args, configs, overrides)
    except Interrupted as error:
        print(f"run_bench.py: {error}", file=sys.stderr)
        return 130
    result = combined(results) if args.seeds else results[0]
    if args.json:
        print_json({**result, "notes": [*leak_notes([("", result["settings"])]), *sampling_notes(result),
                                        *few_users(result), *improvement_notes(result)]})
    else:
        show_result(configs[0], result, None if args.seeds or result["reused"] else start)
        if args.by:
            show_groups(result, args.by)
        for config in configs if args.save_lists else ():
            print(f"lists: {folder_of(config.name, args.results)}")
    return 0


def _honest(args: argparse.Namespace, config: RunConfig, overrides: Layers) -> int:
    from rich.console import Console

    from ...audit.honesty import RealRun, examine
    from ...experiments.worker import Job
    from ..show import print_table

    without = ("ray", "engine", "log", "save_lists", "by", "rerun", *(["seeds"] if (args.seeds or 1) > 1 else ()))
    if found := next((name for name in without if getattr(args, name)), ""):
        raise UserError(f"--honest: found --{found.replace('_', '-')}, accepted: runs in this process without.")
    words = tuple(word for word in args.words if not word.startswith("--honest"))
    job = Job(config.method.name, config.backbone.name, "ml-100k" if args.dataset is None else args.dataset,
              config.seed, overrides, args.data_dir, args.results, tuple(folder.absolute() for folder in args.plugins),
              config.hash, config.device)
    console, rounds = Console(stderr=True, highlight=False, markup=False, quiet=args.quiet), args.honest_rounds or 4
    with stop_between_rounds() as stop, console.status("as it is") as status:
        found = list(examine(config, RealRun(job, rounds), words, args.threads, status.update, stop))
    honest = all(verdict.honest is not False for verdict in found) and bool(found[0].honest)
    if args.json:
        print_json({"honest": honest, "rounds": rounds, "worlds": [vars(verdict) for verdict in found]})
        return 0 if honest else 1
    print_table(["world", "what differs", "verdict"],
                [[v.world, v.differs, {True: "honest", False: "NOTICED", None: "-"}[v.honest]] for v in found])
    for verdict in found:
        if not verdict.honest:
            print(f"{verdict.world}: {for_terminal(verdict.evidence)}")
            print("".join(f"  {hook}\n" for hook in verdict.hooks), end="")
    return 0 if honest else 1


def _results(args: argparse.Namespace, configs: list[RunConfig], overrides: Layers) -> list[dict[str, Any]]:
    if args.ray and args.save_lists:
        raise UserError("--save-lists: found --ray, accepted: runs in this process, which sees all users' lists.")
    from ...api.seeds import Execution, run_seeds
    from ...runs.logs import targets

    with ExitStack() as stack:
        stop = stack.enter_context(stop_between_rounds())
        elsewhere = _sharding(args, stack) if args.ray else _real_clients(args, stack, configs[0], stop) \
            if args.engine else {}
        return run_seeds(configs, overrides, Execution(
            args.results, stop, args.rerun, args.save_lists, args.quiet, args.verbose, targets(args.log, args.results),
            threads=args.threads, **elsewhere))


def _real_clients(args: argparse.Namespace, stack: ExitStack, config: RunConfig, stop: Callable[[], bool]
                  ) -> dict[str, Any]:
    """Fields of ``Execution`` for real clients, who are started or awaited when the first run needs them."""
    from ...api.progress_bars import Display
    from ...data.datasets import load_stream
    from ...deployment.engine import Federates, FlowerEngine
    from ...deployment.starting import federates
    from ...runs.runner import Interrupted

    found: list[Federates] = []

    def check() -> None:
        if stop():
            raise Interrupted("stopped while waiting for clients; the same command goes on from the last round.")

    def load(config: RunConfig, display: Display) -> Stream:
        def data() -> Stream:
            return load_stream(config.source, config.stream, config.features)
        if not found:
            found.append(stack.enter_context(federates(_federation(args), config, data, display.note, check)))
        return found[0].stream(config)
    return {"load_data": load, "engine_of": lambda config, warn: FlowerEngine(config, lambda: found[0])}


def _federation(args: argparse.Namespace) -> RealClients:
    from ...deployment.client_files import read_published
    from ...deployment.starting import RealClients

    kind, _, address = args.engine.partition(":")
    if kind != "flower":
        raise UserError(f"--engine: found {quoted(args.engine)}, accepted: flower, or flower:HOST:PORT.")
    if found := next((name for name in ("ray", "save_lists") if getattr(args, name)), ""):
        raise UserError(f"--engine: found --{found.replace('_', '-')} too, accepted: one of the two.")
    if address and (args.federation is None or args.clients is None):
        raise UserError("--engine flower:HOST:PORT: needs --federation DIR and --clients N.")
    if not address and args.federation is not None:
        raise UserError("--federation: needs an address, as --engine flower:0.0.0.0:9092.")
    published = read_published(args.federation) if address else None
    return RealClients(address, published, args.clients or 0, args.min_clients or 0, args.round_timeout or 600,
                       tuple(folder.absolute() for folder in args.plugins), args.results, args.threads or 1)


def _sharding(args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Fields of ``Execution`` for the cluster of ``--ray``, which is left when the stack is closed."""
    from ...experiments import cluster
    from ...experiments.ray_crew import ShardStarter
    from ...experiments.shards import Conductor

    joined, threads = stack.enter_context(cluster.joined(args.ray, cores())), args.threads or 1
    joined.check_threads(threads)
    shards, plugins = args.shards or joined.cores, tuple(folder.absolute() for folder in args.plugins)
    return {"engine_of": lambda config, warn: Conductor(config, shards, plugins, ShardStarter(joined, threads), warn)}


def configured_run(args: argparse.Namespace) -> RunConfig:
    """The configuration of a command line's first seed; raises UserError for what is wrong with it."""
    return _configs(args, _merge_config_file(args))[0][0]


def _configs(args: argparse.Namespace, from_file: dict[str, Any]) -> tuple[list[RunConfig], Layers]:
    """The configuration of every seed, and the settings that the user changed, by where they are written;
    ``from_file``: the settings of ``--config``. Raises UserError for anything that is wrong with the options or the
    file of ``--config``."""
    from ...runs.config import make_config, resolve_device
    from ...runs.registry import discover
    from ...runs.specs import RunSpec, spelled_spec

    registry = discover(args.plugins)
    args.method, args.backbone = registry.pair(args.method, args.backbone)
    if args.honest_rounds and not args.honest:
        raise UserError("--honest-rounds: needs --honest.")
    if args.shards and not args.ray:
        raise UserError("--shards: needs --ray, as --ray local, or --ray HOST:PORT of a cluster's head.")
    of_clients = ("clients", "min_clients", "round_timeout", "federation")
    if not args.engine and (found := next((name for name in of_clients if getattr(args, name)), "")):
        raise UserError(f"--{found.replace('_', '-')}: needs --engine flower, or --engine flower:HOST:PORT.")
    if args.threads and not args.ray:
        import torch
        torch.set_num_threads(args.threads)
    asked = {"reading": args.reading} if args.reading else {}
    overrides = [("--reading", asked), (str(args.config), from_file), ("--set", settings_of(args))]
    device = resolve_device(args.device or "cpu")
    first, published = args.seed or 0, None
    names = args.method, args.backbone, "ml-100k" if args.dataset is None else args.dataset
    if args.engine and (published := _federation(args).published):
        if args.dataset not in (None, published.dataset):
            raise UserError(f"--dataset: found {quoted(args.dataset)}, accepted: {published.dataset}, which "
                            f"--federation has; or leave it out.")
        names = (*names[:2], published.dataset)
        overrides = [(str(args.federation), published.settings), *overrides]
    if tuned := tuned_of(args):
        spec = spelled_spec(registry, RunSpec(*names), args.data_dir)
        overrides = [*spec.layers(tuned)[:1], *overrides]
        say_tuned(tuned, [spec], args.quiet)
    elsewhere = partial(published.source, args.federation) if published else None
    return [make_config(registry, *names, number, overrides, args.data_dir, device, elsewhere) for number in
            range(first, first + (args.seeds or 1))], overrides
