"""From names and overrides to one checked, immutable run configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch

from ..plugin.backbone import Backbone
from ..data.source import (DatasetConfig, DatasetSource, JoinedConfig, config_label, load_config, locate,
                           session_columns, spelled, unfiltered)
from ..data.settings import ItemFeatureSettings, StreamSettings
from ..core.errors import PluginError, UserError, unknown
from ..evaluation.metrics import DEFAULT, RATING_ERRORS, EvaluationSettings, parse_metric
from ..federation.settings import FederationSettings
from ..plugin.method import Method, NoSettings
from ..plugin.metric import Metric
from ..core.text import hash_of, quoted
from ..plugin.local_settings import LocalSettings
from ..records.store import leak_notes, short_name
from ..core.settings import AT_DEFAULT, LARGEST_SEED, assemble, flat, inactive
from ..core.version import NUMBERS
from .readings import READING, ambiguities, requested_reading, expanded, in_effect, note, without_reading
from .registry import Plugin, Registry, of_aggregator

if TYPE_CHECKING:
    from ..data.items.features import FeatureSource
    from ..data.stream import Stream
    from ..federation.parts import Federation
    from ..plugin.silo import Stage

Layers = Sequence[tuple[str, Mapping[str, Any]]]
_COLUMNS = ("USER_ID_FIELD", "ITEM_ID_FIELD", "TIME_FIELD")
SHARED = "shared"  # folder of results whose files many runs begin with
CORE_SETTINGS = (StreamSettings, LocalSettings, FederationSettings, EvaluationSettings)


@dataclass(frozen=True)
class RunConfig:
    """dataset x stream x backbone x method x settings x seed."""

    source: DatasetSource
    backbone: Plugin
    method: Plugin
    stream: StreamSettings
    local: LocalSettings
    server: FederationSettings
    evaluation: EvaluationSettings
    backbone_settings: Any
    method_settings: Any
    attack_settings: Any
    seed: int
    device: str
    # Where the plugins come from; errors name others of it.
    registry: Registry = field(default_factory=Registry, repr=False, compare=False)
    # What the features of the items are made of, if the backbone or the method reads them.
    features: FeatureSource | None = None

    def __post_init__(self):
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"found the seed {quoted(self.seed)}, accepted: seeds from 0 to {LARGEST_SEED}.")

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that have an effect as one flat, JSON-ready mapping."""
        return effective(self._parts(with_method=True))

    @property
    def gives_up(self) -> dict[str, str]:
        """The statements of docs/constraints.md that the method or the aggregator gives up, with how."""
        return {**self.method.cls.gives_up, **of_aggregator(self.settings)}

    @property
    def inactive(self) -> dict[str, str]:
        """Settings that others leave without effect, and why."""
        return inactive(self._parts(with_method=True))

    @property
    def ambiguities(self) -> dict[str, Mapping[Any, str]]:
        """What papers and their code read differently (see ``runs/readings.py``)."""
        method, backbone = self.method.cls, self.backbone.cls
        parts = AllSettings(self.stream, self.local, self.server, self.evaluation, self.backbone_settings,
                            self.method_settings, self.attack_settings)
        ignored = _ignored(parts, backbone, method)
        return {name: values for name, values in declared(self.stream, method, backbone).items() if name not in ignored}

    @property
    def readings(self) -> list[str]:
        """The readings, ``paper`` or ``code``, whose values all of these settings have."""
        return in_effect(self.ambiguities, self.settings)

    @property
    def attack(self) -> Plugin | None:
        return attack_of(self.registry, self.server.attack)

    @property
    def metrics(self) -> list[Plugin]:
        """The metrics besides those of every run, by name."""
        return extra_metrics(self.registry, self.evaluation)

    @property
    def per_step(self) -> int:
        """How many of a record's blocks a step of time has: one, or one per domain."""
        return len(self.source.parts) if self.stream.of_domains else 1

    def _parts(self, with_method: bool) -> list[Any]:
        parts = [self.stream, self.local, self.server, self.evaluation, self.backbone_settings, self.attack_settings]
        return parts + ([self.method_settings] if with_method else [])

    def _identity(self, with_method: bool) -> dict[str, Any]:
        source = self.source
        settings = effective(self._parts(with_method))
        settings["split_file"] = bool(settings["split_file"])  # its bytes count, not its place
        identity = {"numbers": NUMBERS, "data": source.fingerprint, "persons": source.persons, "seed": self.seed,
                    "device": self.device, "settings": settings,
                    "backbone": [self.backbone.name, self.backbone.numbers],
                    "metrics": [[plugin.name, plugin.numbers] for plugin in self.metrics]}
        identity |= {name: value for name in ("rating", "texts") if (value := getattr(source, name))}
        if not self.stream.split_file:
            configs = source.config.parts.values() if isinstance(source.config, JoinedConfig) else [source.config]
            identity["read"] = [[[getattr(config, column) for column in _COLUMNS], dict(config.val_interval)]
                                for config in configs]
            if self.stream.stream == "sessions":
                identity["sessions"] = [session_columns(source, self.stream), list(source.config.drop_events)]
        if self.features and "encoder" in settings:  # else the method reads them
            settings["encoder"] = short_name(settings["encoder"])  # its files count, not their place
            identity["features"] = self.features.fingerprint
        if self.attack:
            identity["attack"] = [self.attack.name, self.attack.numbers]
        if with_method:
            identity["method"] = [self.method.name, self.method.numbers]
        else:
            settings.pop("lr_later", None)
        return identity

    @cached_property
    def hash(self) -> str:
        """Hash of everything that can change the run's result."""
        return hash_of(self._identity(with_method=True))

    @cached_property
    def base_hash(self) -> str:
        """Hash of everything that can change block 0 under a method that acts only from block 1 on."""
        return hash_of(self._identity(with_method=False))

    @property
    def shares_base(self) -> bool:
        """Whether block 0 is that of all methods that train the backbone as it is from block 1 on. Methods of domains
        act in it; static streams and sessions have no other."""
        cls = self.method.cls
        return (cls.first_step > 0 and cls.trained_backbone is Method.trained_backbone
                and self.stream.stream_in_effect == "blocks")

    def base_file(self, results: Path) -> Path:
        return results / SHARED / f"{self.base_hash}.pt"

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The phases of training; one, but for some methods of domains."""
        from ..federation.cross_silo import stages_of

        return stages_of(*self.instances())

    @property
    def rounds(self) -> int:
        """The most rounds that a block takes, over its stages."""
        return sum(stage.rounds or self.server.rounds for stage in self.stages)

    @property
    def name(self) -> str:
        """The run's folder: readable, then unique."""
        plugins = f"{self.method.name}-{self.backbone.name}".replace(":", "-")
        return f"{plugins}-{self.source.name}-s{self.seed}-{self.hash[:12]}"

    def instances(self) -> tuple[Any, Any]:
        """The method and the backbone with their settings, made anew, as a method has state."""
        return self.method.cls(self.method_settings), self.backbone.cls(self.backbone_settings)

    def federation(self, stream: Stream) -> Federation:
        from ..federation.compatibility import goes_with
        from ..federation.parts import Federation

        method, backbone = self.instances()
        with self.registry.naming(partial(goes_with, stream)):
            backbone = method.trained_backbone(backbone, stream.steps[-1].n_users)
        return Federation(stream, backbone, method, self.local, self.server, self.evaluation, self.seed,
                          torch.device(self.device), metrics=metrics_of(self.registry, self.evaluation),
                          topology=self.stream.topology_in_effect,
                          attack=self.attack and self.attack.cls(self.attack_settings))

    @property
    def misfit(self) -> str:
        """Why method, backbone and kind of stream do not go together, which no data need be read for; empty if they
        do."""
        from ..federation import compatibility

        s = self.stream
        kind = compatibility.StreamKind(s.of_domains, s.stream_in_effect == "sessions",
                                        s.of_domains and s.known_users, self.features is not None)
        method, backbone = self.instances()
        try:
            backbone = method.trained_backbone(backbone, 1)  # how many train it changes no more than rates
            compatibility.check(backbone, method, kind, s.topology_in_effect, self.local, self.server)
        except UserError as error:
            return str(error)
        return ""

    def check(self, federation: Federation) -> None:
        """Raise UserError if the run's parts do not go together, or do not fit the data or into memory at all."""
        from ..federation.compatibility import goes_with
        from .memory_check import require_item_tables

        require_item_tables(federation)
        with self.registry.naming(partial(goes_with, federation.stream)):
            federation.check()


DEVICES = ("cpu", "cuda", "auto")


def resolve_device(name: str) -> str:
    """``cpu``, ``cuda`` or ``auto`` as the device to use. Raises UserError for another, and for cuda without one."""
    if name not in DEVICES:
        raise unknown("device", str(name), DEVICES)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no CUDA device here; use --device cpu or auto.")
    return name


STREAM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # What its papers (PFedRec, FedRAP, GPFedRec) have in common, but for negatives; 100 rounds, none ends early.
    "static": {"k_core": 0, "candidates": "sampled", "topk": (10,), "valid_metric": "hit@10", "valid_decimals": 17,
               "negative_draw": "distinct", "rounds": 100, "patience": 0, "best_round": "latest"},
    # FCUCR. Its released code trains 40 rounds and never ends early; the paper stops after 5 rounds without gain.
    "sessions": {"k_core": 0, "candidates": "sampled", "sampled_candidates": 100, "topk": (10,),
                 "valid_metric": "hit@10", "valid_decimals": 17, "negatives": 1, "rounds": 40, "patience": 5},
    # FFMSR. Rounds are not printed; RecBole's default is as many epochs.
    "domains": {"topk": (10, 50), "valid_metric": "recall@10", "valid_decimals": 17, "batch_size": 1024, "rounds": 300,
                "patience": 10}}
# What papers of a stream and their code read differently, whatever the method and the backbone.
STREAM_AMBIGUITIES: Mapping[str, Mapping[str, Mapping[Any, str]]] = {
    "static": {"negative_pool": {"untrained": "no test item is spared",
                                 "untouched": "released code of PFedRec, GPFedRec and FedRAP: leaks test items"}}}
# Of one client that holds all sessions (DMI-GNN, HearInt and their kin): samples of a mini-batch, epochs.
CENTRAL_DEFAULTS = {"candidates": "all", "topk": (20,), "valid_metric": "mrr@20", "batch_size": 100, "rounds": 20,
                    "patience": 3}


def declared(stream: StreamSettings, *plugins: type) -> dict[str, Mapping[Any, str]]:
    """What the papers of a stream, a method and a backbone and their code read differently."""
    return {**STREAM_AMBIGUITIES.get(stream.stream_in_effect, {}), **ambiguities(*plugins)}


def without_effect(parts: AllSettings, backbone: type, method: type) -> dict[str, str]:
    """Settings that others, the backbone or the method leave without effect, and why."""
    return {**_ignored(parts, backbone, method), **inactive(parts)}


_CORE_NAMES = {each.name for cls in CORE_SETTINGS for each in fields(cls)}
_OF_CHANGES = ("weighting", "upload_noise", "upload_mechanism", "upload_clip")  # of public parameters
# Of local training, and of what clients upload or which of them do.
_OF_CLIENTS = (*(each.name for each in fields(LocalSettings)), "client_ratio", "availability", "client_dropout",
               "stragglers", *_OF_CHANGES, "aggregator", "attack", "server_optimiser")


def _ignored(parts: AllSettings, backbone: type, method: type) -> dict[str, str]:
    """What backbone and method ignore is of a user's training in a round. Where clients hold many, and both have stages
    of training, it is what only the backbone's read."""
    if parts.stream.in_epochs:
        from ..plugin.silo import DomainMethod

        has_stages = backbone.for_domains and method.for_domains and method.stages is not DomainMethod.stages
        return dict.fromkeys(backbone.of_stages if has_stages else (),
                             f"with the method {method.name}, which has stages of its own")
    no_client = method.trains != "clients" and method.first_step == 0
    sampling = ("negatives", "negative_pool", "negative_draw") if _predicts_ratings(backbone, parts) else ()
    protected = _OF_CHANGES if method.sums is not Method.sums else ()
    between_blocks = ("reset_private", "init_from") if parts.stream.stream_in_effect != "blocks" else ()
    return {**dict.fromkeys(between_blocks, "with a stream of one step"), **backbone.ignored,
            **dict.fromkeys(sampling, "where ratings are predicted, of which no negatives are drawn"),
            **method.ignored,
            **dict.fromkeys(protected, f"with the method {method.name}, whose clients send no changes"),
            **dict.fromkeys(_needing_clients(method, parts.server) if no_client else (),
                            f"with the method {method.name}, as no client trains")}


def _needing_clients(method: type[Method], server: FederationSettings) -> Iterator[str]:
    """What clients' training in rounds alone reads; new ones fit parameters by local training, too."""
    fits = server.fold_in and server.cold_start == "fold_in" or server.cold_items == "fold_in"
    acting = {each.name for each in fields(LocalSettings)} if fits and method.needs_backbone else set()
    acting |= {"weighting"} if server.cold_items == "fold_in" else set()
    return (name for name in _OF_CLIENTS if name not in acting)


def _predicts_ratings(backbone: type[Backbone], parts: AllSettings) -> bool:
    return backbone.explicit is not False and backbone(parts.backbone).explicit


def refuse_inactive(parts: Iterable[Any], overrides: Iterable[tuple[str, Mapping[str, Any]]],
                    ignored: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise UserError if the user set something of every run that other settings, or the backbone, leave without
    effect. What has none at its default may be set to that: scripts do, who go through a setting's values."""
    without = {name: why for name, why in inactive(parts).items() if why != AT_DEFAULT} | dict(ignored)
    for origin, layer in overrides:
        for name in layer:
            if name in ignored or name in without and name in _CORE_NAMES:
                raise UserError(f"setting '{name}' ({origin}) has no effect {without[name]}; leave it out.")


def setting_notes(config: RunConfig, overrides: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Sentences on what the reading that the user asked for comes to, on settings that the user gave and that the
    plugins' other settings leave without effect, on those of plugins that are not there, and on test items that leak.
    """
    overrides = list(overrides)
    reading, _ = requested_reading(overrides)
    return [*([note(reading, config.ambiguities, config.settings)] if reading else []),
            *(f"setting '{name}' ({origin}) has no effect {config.inactive[name]}."
              for origin, layer in overrides for name in layer if name in config.inactive),
            *unknown_plugin_notes(config.source.name, config.source.config, config.registry),
            *leak_notes([("", config.settings)])]


def unknown_plugin_notes(dataset: str, config: DatasetConfig, registry: Registry) -> Iterator[str]:
    """A sentence for each plugin that a dataset's config has settings or a search for, and that is not there."""
    for field_, kinds in (("backbone_settings", ["backbone"]), ("method_settings", ["method"]),
                          ("search", ["method", "backbone"])):
        for name in getattr(config, field_):
            if not any(registry.knows(kind, name) for kind in kinds):
                known = {each for kind in kinds for each in registry.names(kind)}
                error = str(unknown(" or ".join(kinds), name, known)).replace("\n", " ")
                yield f"the config of dataset {dataset} has {field_} for an {error}"


def layers(dataset: str, overrides: Layers, backbone: type | None = None, method: str | None = None) -> Layers:
    """All settings that lie over the classes' defaults, the weakest first: the backbone's, those of the stream, the
    dataset's, then ``overrides``. A stream that the dataset's config does not name has the last word over the config,
    which says what suits another one."""
    config, overrides = load_config(dataset), list(overrides)
    file, name = config_label(dataset), getattr(backbone, "name", None)
    of_dataset = [(file, config.settings), (file, config.backbone_settings.get(name, {})),
                  (file, config.method_settings.get(method, {}))]
    every = [*of_dataset, *overrides]
    named = _last(of_dataset, "stream", "blocks")
    chosen = "blocks" if any(layer.get("split_file") for _, layer in every) else _last(overrides, "stream", named)
    of_stream = [(f"stream={chosen}", STREAM_DEFAULTS.get(chosen, {}))]
    if backbone is not None:
        defaults = {"static": backbone.static_defaults, "sessions": backbone.session_defaults,
                    "domains": backbone.central_defaults}.get(chosen, {})
        of_stream.append((f"backbone {name}", defaults))
    if chosen == "sessions" and _last(every, "topology", "federated") == "central":
        of_stream += [("topology=central", CENTRAL_DEFAULTS),
                      (f"backbone {name}", backbone.central_defaults if backbone is not None else {})]
    of_backbone = [(f"backbone {name}", backbone.defaults)] if backbone is not None else []
    common = [*of_stream, *of_dataset] if chosen == named else [*of_dataset, *of_stream]
    return [(f"dataset {dataset}", unfiltered(dataset)), *of_backbone, *common, *overrides]


def _last(layered: Iterable[tuple[str, Mapping[str, Any]]], name: str, otherwise: Any) -> Any:
    """The value of a setting in the last layer that has it."""
    return [otherwise, *(layer[name] for _, layer in layered if name in layer)][-1]


class AllSettings(NamedTuple):
    """One instance of each class of a run's settings."""

    stream: StreamSettings
    local: LocalSettings
    server: FederationSettings
    evaluation: EvaluationSettings
    backbone: Any
    method: Any
    attack: Any


def extra_metrics(registry: Registry, evaluation: EvaluationSettings) -> list[Plugin]:
    """A run's metrics besides those of every run, by name."""
    always = {*(metric.name for metric in DEFAULT), *RATING_ERRORS}
    names = {*evaluation.extra_metrics, parse_metric(evaluation.valid_metric)[0]}
    return [registry.get("metric", name) for name in sorted(names - always)]


def metrics_of(registry: Registry, evaluation: EvaluationSettings) -> tuple[Metric, ...]:
    """A run's metrics, those of every run first."""
    return (*DEFAULT, *(plugin.cls() for plugin in extra_metrics(registry, evaluation)))


def with_known_metrics(registry: Registry, evaluation: EvaluationSettings) -> EvaluationSettings:
    """The settings with metrics as the registry spells them. However they are written, equal ones are equal: sorted,
    and without the metric of the validation, which is in every test. Raises UserError for a metric that does not exist,
    is in every run anyway, or cannot choose the best round."""
    name, k = parse_metric(evaluation.valid_metric)
    valid = registry.get("metric", name) if k else None
    if valid and valid.cls.of_items:
        hits = [name for name in registry.names("metric") if not registry.get("metric", name).cls.of_items]
        raise UserError(f"setting 'valid_metric': found '{evaluation.valid_metric}', whose metric looks at the items "
                        f"of lists, accepted: a metric of hits: {', '.join(hits)}.")
    always = [metric.name for metric in DEFAULT]
    extra = set()
    for name in evaluation.extra_metrics:
        if "@" in name:
            raise UserError(f"setting 'extra_metrics': found '{name}', accepted: names of metrics without @K, as "
                            f"{name.partition('@')[0]}; topk has the list lengths.")
        extra.add(registry.get("metric", name).name)
    if doubled := sorted(extra.intersection(always)):
        raise UserError(f"setting 'extra_metrics': found '{doubled[0]}', which every run has; leave it out.")
    if valid is None:
        return replace(evaluation, extra_metrics=tuple(sorted(extra)))
    return replace(evaluation, valid_metric=f"{valid.name}@{k}", extra_metrics=tuple(sorted(extra - {valid.name})))


def resolve(registry: Registry, method: str, backbone: str, dataset: str, overrides: Layers = ()) -> AllSettings:
    """The settings of a combination, without looking at its data. Arguments and errors as for ``make_config``."""
    backbone = registry.backbone_for(method, backbone)
    method_plugin, backbone_plugin = registry.get("method", method), registry.get("backbone", backbone)
    overrides = list(overrides)
    if method_plugin.cls.for_domains or backbone_plugin.cls.for_domains:
        from ..federation import compatibility

        trained = backbone_plugin.of_domains() if method_plugin.cls.for_domains else backbone_plugin
        with registry.naming():
            compatibility.check_classes(trained.cls, method_plugin.cls)
    if any(READING in layer for _, layer in overrides):  # the settings that it stands for
        parts = resolve(registry, method, backbone, dataset, without_reading(overrides))
        trained, cls = backbone_of(registry, backbone, parts).cls, method_plugin.cls
        overrides = expanded(overrides, declared(parts.stream, cls, trained), flat(parts),
                             without_effect(parts, trained, cls))
    layered = _layered(method_plugin.cls, backbone_plugin.cls, dataset, overrides)
    attack = attack_of(registry, str(_last(layered, "attack", "none")))
    parts = AllSettings(*assemble([*CORE_SETTINGS, backbone_plugin.cls.Settings, method_plugin.cls.Settings,
                                   attack.cls.Settings if attack else NoSettings], layered, f"{method} on {backbone}"))
    parts = parts._replace(server=replace(parts.server, attack=attack.name if attack else "none"),
                           evaluation=with_known_metrics(registry, parts.evaluation))
    refuse_inactive(parts, overrides, _ignored(parts, backbone_of(registry, backbone, parts).cls, method_plugin.cls))
    return parts


def attack_of(registry: Registry, name: str) -> Plugin | None:
    """A run's attack; None for ``none``."""
    return None if name == "none" else registry.get("attack", name)


def _layered(method: type, backbone: type, dataset: str, overrides: Layers) -> Layers:
    return layers(dataset, [_of_method(method, backbone, dataset), *overrides], backbone, method.name)


def origins(method: type, backbone: type, dataset: str, overrides: Layers) -> dict[str, str]:
    """Where the settings of a combination come from that are not the default of their class."""
    return {name: where for where, layer in _layered(method, backbone, dataset, overrides) for name in layer}


def _of_method(method: type, backbone: type, dataset: str) -> tuple[str, dict[str, Any]]:
    """The layer of a method's own defaults for those of the backbone's settings that the backbone has."""
    known = {each.name for each in fields(backbone.Settings)}
    defaults = getattr(method, "backbone_defaults", {})
    layer = {name: value for name, value in defaults.items() if name in known}
    if method.topology and load_config(dataset).settings.get("stream") == "domains":
        layer["topology"] = method.topology
    return f"method {method.name}", layer


def backbone_of(registry: Registry, name: str, parts: AllSettings) -> Plugin:
    """A run's backbone; a RecBole model is another one where clients are domains."""
    plugin = registry.get("backbone", name)
    return plugin.of_domains() if parts.stream.of_domains else plugin


def effective(parts: Sequence[Any]) -> dict[str, Any]:
    """Settings classes as one flat, JSON-ready mapping of those that have an effect: what a run record holds."""
    without = inactive(parts)
    return {name: value for name, value in flat(parts).items() if name not in without}


def make_config(registry: Registry, method: str, backbone: str, dataset: str, seed: int = 0,
                overrides: Iterable[tuple[str, Mapping[str, Any]]] = (), data_dir: Path | None = None,
                device: str = "cpu", elsewhere: Callable[[StreamSettings], DatasetSource] | None = None) -> RunConfig:
    """Put a run together. Raises UserError for an unknown name or setting, a value or seed out of range, or a missing
    file.

    Args:
        method, backbone, dataset: names, whatever their case; the dataset may be a path.
        overrides: layers of (where they come from, settings), later ones win; they lie over the plugins' defaults and
            the dataset's.
        data_dir: folder of atomic files; None: ``./data``. What is not there may be bundled with RecBole.
        device: ``cpu`` or ``cuda``.
        elsewhere: gives the source of data that are not here; None: they are.
    """
    dataset, backbone = spelled(dataset, data_dir), registry.backbone_for(method, backbone)
    parts = resolve(registry, method, backbone, dataset, overrides)
    backbone_plugin, method_plugin = backbone_of(registry, backbone, parts), registry.get("method", method)
    there = elsewhere(parts.stream) if elsewhere else locate(dataset, data_dir, parts.stream)
    source = with_ratings(backbone_plugin.cls, parts, there)
    if source.rating:
        from ..federation import compatibility

        with registry.naming(lambda cls: not (cls.for_domains or cls.needs_sequential)):
            compatibility.check_ratings(backbone_plugin.name, method_plugin.cls)
    if parts.stream.stream_in_effect == "blocks" and parts.server.cold_items == "similar":
        from ..data.items.features import locate_texts

        source = replace(source, texts=locate_texts(source))
    return RunConfig(source, backbone_plugin, method_plugin, *parts, seed, device, registry,
                     _features(backbone_plugin.cls, method_plugin.cls, parts, source))


def with_ratings(backbone: type[Backbone], parts: AllSettings, source: DatasetSource) -> DatasetSource:
    """The source with its column of ratings, for a backbone that predicts them."""
    if backbone.for_domains or not _predicts_ratings(backbone, parts):
        return source
    if parts.stream.split_file or parts.stream.stream not in ("blocks", "static"):
        found = "split_file" if parts.stream.split_file else f"stream={parts.stream.stream}"
        raise UserError(f"backbone '{backbone.name}' predicts ratings with these settings: found {found}, accepted: "
                        f"stream=blocks or static without a split_file, whose interactions have ratings.")
    return replace(source, rating=source.config.RATING_FIELD)


def _features(backbone: type[Backbone], method: type[Method], parts: AllSettings, source: DatasetSource
              ) -> FeatureSource | None:
    """What the features of items are made of, for a backbone or method that reads them."""
    from ..data.items.features import locate_features, locate_item_features

    if backbone.for_domains and backbone.needs_features and source.parts:
        s = parts.backbone
        return locate_features(source, s.encoder, s.text_layers, s.text_dim, s.text_pooling)
    reading = [(cls, settings) for cls, settings in ((method, parts.method), (backbone, parts.backbone))
               if cls.needs_features and not cls.for_domains]
    if not reading or source.parts or parts.stream.topology_in_effect == "central":
        return None
    cls, settings = reading[0]
    if not isinstance(settings, ItemFeatureSettings):
        raise PluginError(f"{cls.kind} '{cls.name}': needs_features is set, expected Settings that are an "
                          f"ItemFeatureSettings.")
    return locate_item_features(source, settings)
