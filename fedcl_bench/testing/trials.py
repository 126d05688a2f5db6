"""A plugin put together with a partner on a small stream, and ways to run the pair."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..audit.honesty import STEADY_EPS
from ..data.stream import Step, Stream
from ..plugin.silo import TOPOLOGIES, DomainMethod, ModuleBackbone
from ..rng import DrawKey, Tables, uniform_values
from ..core.errors import RunFailed, UserError
from ..federation.loop import run
from ..federation.parts import Federation, Progress
from ..federation import compatibility
from ..federation.round import Work, train_clients, trainer_of, upload_first
from ..federation.server import RoundSums
from ..federation.cross_device import CrossDevice, begin_step
from ..training.trained import Trained
from ..plugin.method import Method
from ..plugin.state import Snapshot
from ..runs.config import AllSettings, RunConfig, attack_of, resolve
from ..runs.registry import BASES, Plugin, Registry, discover, numbers_of
from ..plugin.sequential import SequentialBackbone
from ..stats.clip_noise import OPEN
from .report import Violated
from .worlds import domain_stream, growing_stream, session_log, session_stream, with_item_features

SESSION_ITEMS = 40
DOMAINS = (1, 2, 3)  # the seeds of each one's interactions and features
ROUNDS = 2
# Different orders of summation differ by rounding, far below any real difference (see ``audit.honesty.shortened``).
_COMMON = {"rounds": ROUNDS, "patience": 0, "precision": "float64", "topk": "3,5", "valid_metric": "ndcg@5"}
_STREAMS = {"blocks": {}, "sessions": {"stream": "sessions", "sampled_candidates": 10},
            "domains": {"stream": "domains", "batch_size": 16}}
# Dimensions of several heads; as many centroids as give no two items the same codes, whose tie rounding would break.
_WIDTH = {"domains": {"dim": 8, "codes": 4, "centroids": 16, "prompts": 8}}
# Sizes, where a plugin has them under the usual names; many steps along a norm's gradient would make rounding large.
_SMALL = {"dim": 24, "hidden": "8", "max_length": 5, "head_size": 5, "hidden_size": 6, "top_n": 8, "pretrain_rounds": 2,
          "learning_steps": 2, "item_limit": 5, "align_steps": 3}
TOLERANCE = 1e-8
Split = Callable[[Tensor], Iterable[Tensor]]  # users in groups


def with_plugin(cls: type) -> tuple[Registry, Plugin]:
    """All plugins and the one under test, which may be a class that no folder holds."""
    kind = next(kind for kind, base in BASES.items() if issubclass(cls, base))
    registry = discover()
    path = Path(inspect.getfile(cls))
    plugin = Plugin(kind, cls.name, cls, path, numbers_of(cls, path, path.read_bytes()))
    registry.plugins[kind, cls.name] = plugin
    return registry, plugin


@dataclass(frozen=True)
class Pair:
    """A method and a backbone on a small stream."""

    registry: Registry
    method: str
    backbone: str
    kind: str  # of the stream, ``blocks``, ``sessions`` or ``domains``
    settings: Mapping[str, Any] = field(default_factory=dict)  # more settings, by name

    def __str__(self) -> str:
        return f"{self.method} on {self.backbone}, {self.kind}"

    @property
    def plugins(self) -> tuple[Plugin, Plugin]:
        backbone = self.registry.get("backbone", self.backbone)
        return self.registry.get("method", self.method), backbone.of_domains() if self.kind == "domains" else backbone

    @property
    def method_cls(self) -> type:
        return self.plugins[0].cls

    @property
    def backbone_cls(self) -> type:
        return self.plugins[1].cls

    @cached_property
    def stream(self) -> Stream:
        stream = self._without_features()
        return with_item_features(stream) if self.needs_features else stream

    def _without_features(self) -> Stream:
        if self.kind == "sessions":
            return session_stream(session_log(SESSION_ITEMS), SESSION_ITEMS)
        if self.kind == "domains":
            return domain_stream(DOMAINS)
        return growing_stream()

    @property
    def needs_features(self) -> bool:
        """Whether one of the two reads features of a stream's items."""
        return any(cls.needs_features and not cls.for_domains for cls in (self.method_cls, self.backbone_cls))

    def parts(self, **settings) -> AllSettings:
        """The pair's settings: small sizes where the plugins have them, and those given."""
        attack = attack_of(self.registry, self.settings.get("attack", "none"))
        classes = [self.method_cls, self.backbone_cls, *([attack.cls] if attack else [])]
        known = {f.name for cls in classes for f in dataclasses.fields(cls.Settings)}
        sizes = {**_SMALL, **_WIDTH.get(self.kind, {})}
        small = {name: value for name, value in sizes.items() if name in known - set(self.backbone_cls.ignored)}
        parts = resolve(self.registry, self.method, self.backbone, "ml-100k", [
            ("check", {**_COMMON, **_STREAMS[self.kind], **self._required_settings(), **small, **self.settings,
                       **settings})])
        return parts._replace(local=replace(parts.local, adam_eps=STEADY_EPS))

    @cached_property
    def _own_parts(self) -> AllSettings:
        return self.parts()

    def _required_settings(self) -> dict[str, str]:
        """What the plugins ask for: a start at the server; of domains a topology that both can be trained under."""
        if self.kind == "sessions" and self.method_cls.aggregate_updates is not Method.aggregate_updates:
            return {"init": "server"}
        if self.kind != "domains":
            return {}
        accepted = [getattr(cls, "topologies", TOPOLOGIES) for cls in (self.method_cls, self.backbone_cls)]
        both = [name for name in TOPOLOGIES if all(name in names for names in accepted)]
        return {"topology": both[0] if both else accepted[0][0]}

    def config(self, parts: AllSettings | None = None, seed: int = 0, source: Any = None) -> RunConfig:
        """The pair's run; ``source``: of its data, where somebody asks for it."""
        method, backbone = self.plugins
        return RunConfig(source, backbone, method, *(parts or self._own_parts), seed, "cpu", self.registry)

    def federation(self, stream: Stream | None = None, seed: int = 0, parts: AllSettings | None = None) -> Federation:
        """The pair with new objects, checked against its stream."""
        f = self.config(parts, seed).federation(stream or self.stream)
        f.check()
        return f

    def fits(self) -> str | None:
        """Why method, backbone and stream do not go together; None if they do."""
        try:
            s = self.parts()
            method, backbone = self.method_cls(s.method), self.backbone_cls(s.backbone)
            compatibility.check(backbone, method, compatibility.StreamKind.of(self.stream), s.stream.topology, s.local,
                                s.server)
            method.trained_backbone(backbone, self.stream.steps[-1].n_users)
        except UserError as error:
            return str(error)
        return None

    @cached_property
    def points(self) -> list[Progress]:
        """Every state of an uninterrupted run, but for those within a round, which are read before it goes on."""
        return [point for point in run(self.federation()) if not point.within]

    def after_step(self, step: int) -> Progress:
        """The state between a step and the next one; before the first with -1."""
        return Progress() if step < 0 else next(p for p in self.points if p.step == step + 1 and p.round == 0)


def stable(pair: Pair, run_of: Callable[[Pair], object] = lambda pair: pair.points) -> Pair:
    """The pair at a tenth of its learning rates, as often as it takes for a run not to diverge on so few items."""
    for tenths in range(4):
        parts = pair.parts()
        try:
            run_of(pair)
            return pair
        except RunFailed:
            of_backbone = parts.backbone
            rates = {f.name: getattr(of_backbone, f.name) / 10.0 for f in dataclasses.fields(of_backbone)
                     if f.name == "lr" or f.name.startswith("lr_") and isinstance(getattr(of_backbone, f.name), float)}
            pair = replace(pair, settings={**pair.settings, **rates})
    run_of(pair)
    return pair


def finished(f: Federation, progress: Progress | None = None) -> Progress:
    for progress in run(f, progress):
        pass
    return progress


def rounds_to_test(pair: Pair) -> list[Progress]:
    """States at which a round begins: the last step's first and second one."""
    last = len(pair.stream.steps) - 1
    second = next(p for p in pair.points if p.step == last and p.round == 1 and not p.trained)
    return [pair.after_step(last - 1), second]


def about_to_train(f: Federation, progress: Progress) -> tuple[Step, Progress]:
    """The step and the state of a round whose local training is about to start: the next of ``progress``."""
    f.method.client_state, f.method.server_state = dict(progress.client_state), dict(progress.server_state)
    step = f.stream.steps[progress.step]
    if progress.round == 0:
        progress = begin_step(f, step, progress)
    f.acting_in(step).begin_round(step.training, progress.round, f.backbone)
    return step, progress


def open_round(f: Federation, progress: Progress, split: Split = lambda users: [users]
               ) -> tuple[CrossDevice, Progress, Iterator[list]]:
    """A round whose local training is about to start, the next of ``progress``: the open step, the state, and the
    chunks of each group that its participants are ``split`` into."""
    step, progress = about_to_train(f, progress)
    opened, users = CrossDevice(f, step, progress.model), f.server.attendance.of(step, f.seed, progress.round).users
    return opened, progress, (opened.protocol.chunks(group, progress.round, progress.model) for group in split(users))


def trained_round(opened: CrossDevice, progress: Progress, groups: Iterable[list]) -> tuple[DrawKey, Tables, RoundSums]:
    """The training of a round's clients, all at once and unprotected: its key, what they send besides, and its sums."""
    key = opened.key(opened.step.index, progress.round)
    work = [Work(replace(opened.training, protection=OPEN), [chunk for chunks in groups for chunk in chunks])]
    sent = upload_first(work, progress.model, key) if opened.method.uploads_first else {}
    sums = train_clients(work, progress.model, key)
    return key, sent or sums.uploads, sums


def client_round(f: Federation, progress: Progress, split: Split = lambda users: [users]) -> dict[str, Tensor]:
    """What each client makes of one round: the next of ``progress``, its participants ``split`` into groups that are
    trained one after the other.

    Returns:
        Rows in ascending order of participants: ``upload NAME`` (changes of public parameters and declared uploads),
        ``private NAME`` (changes of private parameters), ``received NAME`` (what the method makes of them with any sums
        of what clients send), ``memory NAME`` (what a backbone remembers), ``state NAME``
        (the method's client state afterwards), ``loss`` and ``user``.
    """
    opened, progress, groups = open_round(f, progress, split)
    model, key = progress.model, opened.key(opened.step.index, progress.round)
    rows: dict[str, list[Tensor]] = {}
    for chunks in groups:
        if opened.method.uploads_first:  # clients train with what they have received before
            for name, value in upload_first([Work(opened.training, chunks)], model, key).items():
                rows.setdefault(f"upload {name}", []).append(value)
        train = trainer_of(chunks, model, opened.training, key)
        for chunk in chunks:
            trained = train(chunk)
            values = {f"upload {name}": value for name, value in trained.changes(model).items()}
            values |= {f"upload {name}": value for name, value in trained.uploads.items()}
            values |= {f"private {name}": _moved(trained, model, name) for name in model.private}
            values |= {f"received {name}": rows for name, rows in _received(opened, trained, model).items()}
            values |= {"loss": trained.loss, "user": trained.users}
            for name, value in values.items():
                rows.setdefault(name, []).append(value.detach())
    order = torch.cat(rows["user"]).argsort()
    result = {name: torch.cat(parts)[order] for name, parts in rows.items()}
    result |= {f"memory {name}": table[result["user"]] for name, table in model.client_context.items()}
    return result | {f"state {name}": table[result["user"]] for name, table in f.method.client_state.items()
                     if len(table) > int(result["user"].max())}


def _received(opened: CrossDevice, trained: Trained, model: Snapshot) -> Tables:
    """The private parameters that clients change once they have sums (``Method.receive``), here of no client."""
    method, key = opened.method, opened.key(opened.step.index, 0)
    if not (opened.sums and method.overrides("receive")):
        return {}
    sums = {name: uniform_values(0, name, tuple(shape), 1.0).abs().to(model.item_vectors)  # may be of squares
            for name, shape in opened.sums.items()}
    private = {name: table[trained.users] + _moved(trained, model, name) for name, table in model.private.items()}
    return method.receive(private, sums, opened.step.n_users, key)


def _moved(trained: Trained, model: Snapshot, name: str) -> Tensor:
    """How each client's private parameter changed, personal tables over all items."""
    if name not in trained.private:
        return torch.zeros(len(trained.users), dtype=torch.float64)
    return trained.private[name].against(model.private[name][trained.users])


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor], users: Tensor | None = None,
               tolerance: float = TOLERANCE) -> str | None:
    """Where two results of ``client_round`` differ most, in words; None if they agree. ``users``: ids of the clients to
    compare; None: all of them."""
    if list(a) != list(b):
        return f"{', '.join(sorted(set(a) ^ set(b)))} is there only once"
    if not torch.equal(a["user"], b["user"]):
        return "other clients take part"
    chosen = torch.ones_like(a["user"], dtype=torch.bool) if users is None else torch.isin(a["user"], users)
    for name in a:
        x, y = a[name][chosen].double(), b[name][chosen].double()
        if x.shape != y.shape:
            return f"{name} has shape {tuple(x.shape)} and {tuple(y.shape)}"
        if not x.numel():
            continue
        gap = _gap(x, y)
        if float(gap.max()) > tolerance * _scale(x):
            row = int(gap.flatten(1).amax(1).argmax()) if gap.dim() > 1 else int(gap.argmax())
            return f"{name} of client {int(a['user'][chosen][row])} differs by {float(gap.max()):.2g}"
    return None


def tables_differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> str | None:
    """Which table differs, in words; None if all agree."""
    if set(a) != set(b):
        return f"'{sorted(set(a) ^ set(b))[0]}' is there only once"
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape:
            return f"'{name}' has shape {tuple(x.shape)} and {tuple(y.shape)}"
        if x.numel():
            if (gap := float(_gap(x.double(), y.double()).max())) > tolerance * _scale(x.double()):
                return f"'{name}' differs by {gap:.2g}"
    return None


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|, 0 where both are the same infinity, infinite where one is no number."""
    return (x - y).abs().masked_fill(x == y, 0.0).nan_to_num(torch.inf)


def _scale(x: Tensor) -> float:
    """The largest finite size in x, at least 1."""
    return max(1.0, float(x.abs().nan_to_num(0.0, posinf=0.0).max()))


def all_tables(progress: Progress) -> Tables:
    """All parameters and the method's state."""
    model = progress.model
    kinds = {"public": model.public, "dense": model.dense, "private": model.private, "local": model.local,
             "personalised": model.personalised, "client state": progress.client_state,
             "server state": progress.server_state}
    return {f"{kind} {name}": table for kind, tables in kinds.items() for name, table in tables.items()}


def require_numbers(pair: Pair) -> None:
    """Raise Violated if a table of its run, or of one in the default precision, ends with what is no number."""
    for end in (pair.points[-1], finished(pair.federation(parts=pair.parts(precision="float32")))):
        for name, table in all_tables(end).items():
            if table.isnan().any():
                raise Violated(f"{name} has entries that are no number at the end")


def runs_differ(a: Progress, b: Progress, tolerance: float = TOLERANCE) -> str | None:
    """What differs between the ends of two runs, in words."""
    for x, y in zip(a.curve, b.curve):
        for key in ("step", "round", "loss", "valid"):
            if abs(x[key] - y[key]) > tolerance * max(1.0, abs(x[key])):
                return f"{key} in round {x['round'] + 1} of step {x['step']}: {x[key]:.9g} and {y[key]:.9g}"
    if len(a.curve) != len(b.curve):
        return f"{len(a.curve)} and {len(b.curve)} rounds"
    return tables_differ(all_tables(a), all_tables(b), tolerance)


def is_sequential(cls: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, SequentialBackbone)


def is_of_domains(cls: type) -> bool:
    return issubclass(cls, (DomainMethod, ModuleBackbone))


def where(error: BaseException, path: Path) -> str:
    """An exception in one line, with the deepest line of the plugin's file that it passed."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        line = frame.lineno if frame.filename == str(path) else line
    position = f" ({path.name}, line {line})" if line else ""
    return f"{type(error).__name__}: {error}{position}"
