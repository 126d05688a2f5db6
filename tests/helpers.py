"""What tests in several rooms use: parts of a federation put together by hand, records compared, paths."""

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedcl_bench import LocalSettings, Snapshot
from fedcl_bench.cli.main import main
from fedcl_bench.training.strategies import Training, choose_strategy
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.stream import Step
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation import round as rounds, server
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parameter_growth import grow
from fedcl_bench.federation.parts import Federation, FederationSettings
from fedcl_bench.kernels import memory
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.records.record import Record
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import read_model
from fedcl_bench.runs.runner import Interrupted, Watch, execute
from fedcl_bench.training.sampling import Needs, draw_negatives, make_chunks
from fedcl_bench.stats.clip_noise import OPEN
from fedcl_bench.testing.worlds import ragged
from fedcl_bench.experiments.shards import Died, Shard
from fedcl_bench.experiments.worker import STOP, run_job

ROOT = Path(__file__).resolve().parents[1]
# Small and stable: few users and items, few epochs, rates at which no model diverges in two rounds.
SMALL = {"k_core": 80, "rounds": 2, "dim": 8}
STABLE = {"fedrap": {"lr_items": 1.0, "local_epochs": 2}, "gpfedrec": {"lr": 0.01, "hidden": [8]},
          "biasmf": {"local_epochs": 1}, "ncf": {"local_epochs": 1, "hidden": [8], "init_std": 0.3},
          "fedncf": {"lr": 0.01}, "pfedrec": {"lr": 0.01}}
USER, ITEM = "user_embedding.weight", "item_embedding.weight"


def script(name):
    """A script of the repository as a module, as ``"tools/make_tables"``."""
    folder, _, module = name.rpartition("/")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / folder)
        return importlib.import_module(module)


@contextmanager
def recbole_config():
    """Where RecBole's Config is made: it takes the command line for its own, reads names that NumPy 2 removed, and
    changes NumPy and the environment."""
    names = {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_, "long": int, "unicode": str,
             **{kind.__name__: kind for kind in (bool, int, float, complex, object, str)}}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", sys.argv[:1])
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        for name, kind in names.items():
            patch.setattr(np, name, np.__dict__.get(name, kind), raising=False)
        yield


class TableBackbone:
    """Scores are given outright, as the private table ``scores``."""

    scores_local_tables = False

    def score_all(self, private, public):
        return private["scores"].clone()


def build(registry, kind, name, **settings):
    cls = registry.get(kind, name).cls
    return cls(cls.Settings(**settings))


def module_of(registry, kind, name):
    return sys.modules[registry.get(kind, name).cls.__module__]


def one_step(train, n_items, valid=None, test=None, index=0, old_users=0, old_items=0):
    """A step with this training data and, unless given, nothing to validate or test."""
    none = ragged(*[[] for _ in train.lengths])
    return Step(index, len(train.lengths), n_items, old_users, old_items, len(train.values), train, valid or none,
                test or none)


def federation(registry, stream, method, backbone=None, seed=0, rounds=4, local=LocalSettings(),
               evaluation=EvaluationSettings(), **server):
    return Federation(stream, backbone or build(registry, "backbone", "fedmf"), method, local,
                      FederationSettings(rounds=rounds, **server), evaluation, seed)


def finish(f):
    for progress in run(f):
        pass
    return progress


def grown(backbone, step, seed=0, dtype=torch.float64, method=None):
    """What a run that begins with this step begins with."""
    return grow(Snapshot({}, {}), backbone, seed, step, dtype, torch.device("cpu"), method)


@contextmanager
def threads(number):
    """PyTorch's operations take so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_tables(found, expected, near=0.0):
    """Two models are equal to the bit, or but for rounding."""
    for table, other in zip(found.tables(), expected.tables(), strict=True):
        torch.testing.assert_close(table, other, rtol=near, atol=near)


def same_clients(private, expected, near=1e-9):
    """Private tables of all users have what is expected of some, by user and name, whatever its shape there."""
    for user, values in expected.items():
        for name, value in values.items():
            found = private[name][user]
            torch.testing.assert_close(found, value.reshape(found.shape), rtol=near, atol=near)


def strategy_of(backbone, method, model, settings):
    """How these clients are trained in a step of blocks."""
    return choose_strategy(backbone, method, model, settings, sessions=False)


def training(backbone, method, model, settings, protection=OPEN, own_start=False):
    """What these clients have in common when they train."""
    return Training(backbone, method, settings, strategy_of(backbone, method, model, settings), protection, own_start)


def trainer_of(chunks, model, backbone, method, settings, key, protection):
    """``round.trainer_of`` of parts given one by one."""
    return rounds.trainer_of(chunks, model, training(backbone, method, model, settings, protection), key, True)


def train_round(chunks, model, backbone, method, settings, seed, step, round_, weights=None, own_start=False,
                protection=OPEN, observe=None, aggregator=None):
    """Clients train and the server averages, as in a round of the loop: (model, mean loss, the method's uploads)."""
    common = training(backbone, method, model, settings, protection, own_start)
    work = rounds.Work(replace(common, keeps=aggregator is not None), chunks)
    key = DrawKey(seed, step, round_)
    sums = rounds.train_clients([work], model, key, weights, observe)
    if method.overrides("sums"):
        model = server.aggregate_sums(sums, model, method, key, sum(len(c.users) for c in chunks))
    elif sums.held is not None:
        model = server.aggregate_updates(sums, model, method, protection, key, sums.uploads, aggregator)
    else:
        model = server.mean(sums, model, backbone, seed)
    return model, sums.loss, sums.uploads


def train_once(backbone, model, train, settings=LocalSettings(), round_=0):
    """One local round of the clients with items in ``train``, under FT with seed 0.

    Returns:
        (snapshot after it, mean loss, each client's negatives by user).
    """
    step = one_step(train, model.n_items)
    users = (train.lengths > 0).nonzero().flatten()
    chunks = make_chunks(step, users, settings, 2, Needs(backbone.pairwise, backbone.whole_tables))
    after, loss, _ = train_round(chunks, model, backbone, Method(NoSettings()), settings, 0, 0, round_)
    negatives = {}
    for chunk in chunks:
        drawn = draw_negatives(chunk, settings, 0, 0, round_)
        for user, items, count in zip(chunk.users.tolist(), drawn.tolist(), chunk.count.tolist()):
            negatives[user] = items[:settings.negatives * count]
    return after, loss, negatives


class SameProcess:
    """A crew and its workers, which do their runs where they are, to spare a test the start of processes."""

    tries, keeps_idle = 1, True

    def __init__(self, threads):
        self.running, self._messages, self._streams = None, deque(), OrderedDict()

    def hire(self):
        return SameProcess(1)

    def listen(self, workers, seconds):
        return [worker for worker in workers if worker._messages]

    def send(self, job):
        if job != STOP:  # a run is at its end before anybody could ask for it
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory, "reset_peak", lambda: None)  # which is of all that the tests hold
                self._messages.append(run_job(job, self._messages.append, lambda: False, 1, self._streams))

    def receive(self):
        return self._messages.popleft()

    def end(self, kill=False):
        return ""


class Here:
    """A process that is none, to spare a test its start: plugins are imported anew, and all is as before at the end."""

    closed = False

    def __init__(self, target, *arguments):
        before = dict(os.environ), list(sys.argv), tempfile.tempdir, os.getcwd()
        self.pipe, self._messages = self, deque()
        self.send = self._messages.append
        plugins = {name: module for name, module in sys.modules.items() if name.startswith("fedcl_bench_plugin_")}
        for name in plugins:
            del sys.modules[name]
        try:
            target(self, *arguments)
        finally:
            sys.modules.update(plugins)
            os.environ.clear()
            os.environ.update(before[0])
            sys.argv, tempfile.tempdir = before[1:3]
            os.chdir(before[3])

    def poll(self, seconds):
        return True

    def receive(self):
        return self._messages.popleft()

    def end(self, kill=False):
        return ""


def install(source, environment, *options):
    """Make an environment that sees this one's packages, with the package of a folder installed; returns its
    site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    done = subprocess.run([sys.executable, "-m", "pip", "--python", environment / "bin" / "python",
                           "--disable-pip-version-check", "install", "--no-index", "--no-build-isolation", "--no-deps",
                           *options, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def records(folder):
    """Every finished run of a results folder by its name."""
    return {path.parent.name: {**json.loads(path.read_text()), "record": str(path.parent)}
            for path in folder.glob("runs/*/run.json")}


def stopped_everywhere(config, stream, results):
    """A run that is stopped at each sign of life, and goes on from there; its result, and where it was stopped."""
    told = []
    while True:
        watch = Watch(lambda _, progress: told.append((progress.round, progress.fraction_done)), stop=lambda: True)
        try:
            return execute(config, lambda: stream, results, watch), told[:-1]  # the end is no stop
        except Interrupted:
            pass


def numbers_of(progress):
    """Everything that a run has computed by name, as tensors, without the seconds."""
    found = {f"curve {name} {row['step']} {row['round']}": torch.tensor(value, dtype=torch.float64)
             for row in progress.curve for name, value in row.items() if not name.endswith("_seconds")}
    found["place"] = torch.tensor([progress.step, progress.round, progress.best.round])
    for which, model in (("model", progress.model), ("best", progress.best.model), ("previous", progress.previous)):
        found |= {f"{which} {kind} {name}": value for kind, tables in vars(model).items()
                  for name, value in tables.items()}
    for which, end in (("", progress), ("best ", progress.best)):
        found |= {f"{which}client {name}": value for name, value in end.client_state.items()}
        found |= {f"{which}server {name}": value for name, value in end.server_state.items()}
    for t, s, scores in progress.tests:
        found |= {f"test {t} {s} {name}": values for name, values in {"users": scores.users, **scores.values}.items()}
    for t, kind, ids, values in progress.analysis:
        found |= {f"{kind} {t} of": ids, f"{kind} {t}": values}
    return found


def assert_same(found, expected, atol=0.0):
    """Two ends of a run, or numbers of them by name, are equal to the bit, or but for rounding."""
    here, wanted = (each if isinstance(each, dict) else numbers_of(each) for each in (found, expected))
    assert here.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(here[name], value, rtol=0.0, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}")


class Threads:
    """A group of shards in this process, which may die."""

    def __init__(self, plans, dies=lambda answers: False):
        self.shards = [Shard() for _ in plans]
        self.dies, self.answered = dies, 0
        self.requests = {number: shard.begin(plan) for number, (shard, plan) in enumerate(zip(self.shards, plans))}

    def receive(self):
        requests, self.requests = self.requests, {}
        return requests

    def answer(self, answers):
        self.answered += 1
        if self.dies(self.answered):
            raise Died("a test's worker died")
        for number, answer in answers.items():
            self.requests[number] = self.shards[number].exchange(answer)

    def close(self):
        pass


def by_domain(tables):
    """Of each parameter its values at every domain."""
    result = {}
    for name, value in tables.items():
        result.setdefault(name.split("/", 1)[1], []).append(value)
    return result


def frame_of(folder, part):
    """One of a run's tables, without what depends on the machine."""
    return pd.read_parquet(Path(folder) / f"{part}.parquet").drop(columns=["train_seconds", "evaluate_seconds"],
                                                                  errors="ignore")


def same_numbers(found, expected, kinds=("public", "private", "dense")):
    for key in ("metrics", "matrix", "continual", "rounds", "best_round", "bytes", "settings", "hash"):
        assert found[key] == expected[key], key
    a, b = Record(Path(found["record"])), Record(Path(expected["record"]))
    for part in kinds:
        for name, table in getattr(read_model(b.folder).tables, part).items():
            assert torch.equal(getattr(read_model(a.folder).tables, part)[name], table)
    pd.testing.assert_frame_equal(a.frame("users"), b.frame("users"))
    pd.testing.assert_frame_equal(*[frame_of(record.folder, "rounds") for record in (a, b)])
    assert {p.name for p in a.folder.iterdir()} == {p.name for p in b.folder.iterdir()}


def lay_log(name, rows, header="user_id:token\titem_id:token\ttimestamp:float"):
    """A dataset in ``./data`` of these rows, lines or tuples of fields; its file."""
    path = Path("data", name, f"{name}.inter")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n" + "".join(row if isinstance(row, str) else "\t".join(map(str, row)) + "\n"
                                            for row in rows))
    return path


def stream_of(registry, dataset, backbone="sasrec", data_dir=None, **settings):
    """The configuration of a run of FT and its stream."""
    config = make_config(registry, "ft", backbone, dataset, overrides=[("test", settings)], data_dir=data_dir)
    return config, load_stream(config.source, config.stream)


def lay_two_shops():
    """20 users and 15 items of books, 12 and 11 of games, with vectors of what their texts say in ./vectors."""
    Path("vectors").mkdir()
    for name, seed, users, items in (("books", 1, 20, 15), ("games", 2, 12, 11)):
        lay_shop(name, seed, users, items)
        np.savez(Path("vectors", name), item_id=[f"i{item}" for item in range(items)],
                 vectors=np.random.default_rng(seed).normal(size=(items, 3, 4)))


def lay_shop(name, seed, users, items, texts=False):
    """A dataset in ``./data`` whose histories go round the items, so that there is something to learn; with ``texts``
    of two words an item."""
    generator, rows = np.random.default_rng(seed), []
    for user in range(users):
        first, stride = generator.integers(items), 1 + user % 2
        rows += [f"u{user}\ti{(first + stride * place) % items}\t{place}\n"
                 for place in range(generator.integers(3, 8))]
    lay_log(name, rows)
    if texts:
        rows = [f"i{item}\tword{item % 4} word{item % 3}\n" for item in range(items)]
        Path("data", name, f"{name}.item").write_text("item_id:token\ttitle:token_seq\n" + "".join(rows))


def federation_of(config):
    """The checked parts of a run over its data."""
    f = config.federation(load_stream(config.source, config.stream, config.features))
    config.check(f)
    return f


def executed(config, results="results"):
    """What a run over its data returns."""
    return execute(config, lambda: load_stream(config.source, config.stream, config.features), Path(results))


def output_of(capsys, *words):
    """What a command prints that ends well."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    """What a bad command says, in one line, after checking its form: status 2, one or two lines and nothing else."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err and len(said.err.strip().splitlines()) in (1, 2)
    return " ".join(said.err.split())
