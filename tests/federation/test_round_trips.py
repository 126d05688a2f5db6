"""A round on a GPU must not wait for the host: which operations of a round need values on the host, for every plugin.

Seen on the CPU: operations whose result or whose result's shape is read by Python, or that make a tensor without saying
where, are caught as they are called.
"""

import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedcl_bench import Method, SequentialBackbone
from fedcl_bench.plugin import checks
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.rng import DrawKey
from fedcl_bench.evaluation.ranking import pairs_of
from fedcl_bench.federation.parts import Progress
from fedcl_bench.federation.round import Work, train_clients
from fedcl_bench.federation.server import aggregate_sums, mean
from fedcl_bench.federation.cross_device import CrossDevice, begin_step
from fedcl_bench.kernels import ops
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.testing.trials import is_of_domains
from fedcl_bench.testing.worlds import ragged

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive",
         "unique_dim"}
MAKES = (torch.arange, torch.ones, torch.zeros, torch.full, torch.empty, torch.eye, torch.tensor, torch.as_tensor,
         torch.tril_indices, torch.triu_indices, torch.rand, torch.randn, torch.linspace)
# Names of parameters are taken from initial values, which are made on the host and stay there; ``Slots.distinct``,
# ``functional._known_full`` and ``places.most`` read a number on the CPU only.
ON_HOST = ("uniform_values", "normal_rows", "new_personal", "distinct", "_known_full", "most")
OURS = (ROOT / "fedcl_bench", ROOT / "plugins", ROOT / "tests")  # not all of it: an environment may be in there
NAMES = discover()
SESSIONS = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4}
BLOCKS = {"blocks": 2, "base_share": 0.5, "k_core": 80}
STREAMS = {}


def stream_of(config):
    """Loaded once for all combinations."""
    key = str((config.source, config.stream, config.features))
    if key not in STREAMS:
        STREAMS[key] = load_stream(config.source, config.stream, config.features)
    return STREAMS[key]


def is_sequential(backbone):
    return issubclass(NAMES.get("backbone", backbone).cls, SequentialBackbone)


def combinations():
    """Every backbone of clients of one user each under FT, and every method for them on one backbone."""
    for backbone in NAMES.names("backbone"):
        if backbone != "none" and not is_of_domains(NAMES.get("backbone", backbone).cls):
            yield "ft", backbone
    yield "ader", "sasrec"  # goes with both kinds
    for method in NAMES.names("method"):
        if method != "ft" and not is_of_domains(NAMES.get("method", method).cls):
            yield method, "sasrec" if NAMES.get("method", method).cls.needs_sequential else "fedmf"


def caller():
    """The function of this project that is being executed."""
    return next(frame.name for frame in reversed(traceback.extract_stack())
                if any(Path(frame.filename).is_relative_to(folder) for folder in OURS)
                and frame.name not in ("caller", "__torch_dispatch__", "__torch_function__"))


class Placed(TorchFunctionMode):
    """Counts tensors that are made on the default device, by the function that made them."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in MAKES and (kwargs or {}).get("device") is None:
            self.found[function.__name__, caller()] += 1
        return function(*args, **(kwargs or {}))


class Read(TorchDispatchMode):
    """Counts operations whose result, or its shape, has to be waited for, by name and the function that called them."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1])
        repeats = name == "repeat_interleave" and function._overloadname in ("Tensor", "self_Tensor")
        if name in READS or masked or repeats:
            self.found[name, caller()] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def watched():
    found = Counter()
    with Placed(found), Read(found):
        yield found


def opened(f):
    """The second step of a stream with its first one ended untrained, or the only step; and the method that acts."""
    progress, step = begin_step(f, f.stream.steps[0], Progress()), f.stream.steps[0]
    if len(f.stream.steps) > 1:
        trained = (step.train.lengths > 0).nonzero().flatten()
        f.method.end_step(step, progress.model, f.backbone, trained, DrawKey(f.seed, 0))
        step = f.stream.steps[1]
        progress = begin_step(f, step, progress)
    return progress.model, step, f.acting_in(step)


@pytest.mark.parametrize("method,backbone", list(combinations()))
def test_a_round_waits_once(registry, monkeypatch, method, backbone):
    """For its mean loss. Methods that distil lists of the users known before ask once per chunk who they are, and those
    that replay sessions how many there are."""
    monkeypatch.setattr(ops, "why_not", lambda: "as on a GPU")
    own = registry.get("method", method).cls.rescore_session is not Method.rescore_session
    settings = SESSIONS if own or is_sequential(backbone) else BLOCKS
    config = make_config(registry, method, backbone, "ml-100k", overrides=[("test", settings)])
    f = config.federation(stream_of(config))
    f.check()  # as every run is
    f.method.client_state, f.method.server_state = {}, {}
    model, step, acting = opened(f)
    users = (step.train.lengths > 0).nonzero().flatten()[:8]
    step_opened = CrossDevice(f, step, model)
    chunks = step_opened.protocol.chunks(users, 1, model)
    acting.begin_round(step, 1, f.backbone)
    acting.soft_targets()  # asks once per block who has no list yet
    replays = acting.overrides("replayed_sessions") and is_sequential(backbone)
    if replays:
        acting.client_state["latest"].zero_()  # all clients have trained on their first session
    for check in ("check_items", "check_sessions"):  # they look at ids only where they need not be waited for
        monkeypatch.setattr(checks, check, lambda *arguments: None)
    with watched() as found:
        work, key = [Work(step_opened.training, chunks)], step_opened.key(step.index, 1)
        sums = train_clients(work, model, key)
        if acting.overrides("sums"):
            aggregate_sums(sums, model, acting, key, len(users))
        else:
            mean(sums, model, f.backbone, f.seed)
        assert isinstance(sums.loss, float)
    expected = {("_local_scalar_dense", "loss"): 1}
    if replays:
        expected |= dict.fromkeys((("nonzero", "of"), ("_local_scalar_dense", "of")), len(chunks))
    elif method in ("ader", "kd", "f3crec"):
        expected["nonzero", "known"] = len(chunks)
    assert {key: count for key, count in found.items() if key[1] not in ON_HOST} == expected


def test_what_is_seen():
    """Each kind of operation once, so that the test above can fail."""
    def calls(lists, values):
        pairs_of(lists, torch.arange(2), 3)
        values[values > 0] = 1.0
        values[values == 0].nonzero()
        return float(values.sum())

    lists, values = ragged([1, 2], [0]), torch.zeros(3)
    with watched() as found:
        calls(lists, values)
    assert dict(found) == {("arange", "calls"): 1, ("repeat_interleave", "select"): 1, ("_unique2", "pairs_of"): 1,
                           ("index_put_", "calls"): 1, ("index", "calls"): 1, ("nonzero", "calls"): 1,
                           ("_local_scalar_dense", "calls"): 1}
