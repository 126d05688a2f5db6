"""Alone: no federation, every client trains a recommender of its own."""

from __future__ import annotations

from dataclasses import dataclass

from fedcl_bench import Incompatible, Method, ModuleBackbone, SequentialBackbone, setting
from fedcl_bench.toolbox.own_parameters import without_public


@dataclass(frozen=True)
class AloneSettings:
    own_rate: float = setting(1.0, "learning rates of what was public, as a multiple of the backbone's over the number "
                              "of the run's users, later blocks' too", above=0.0,
                              search=(0.1, 0.3, 1.0, 3.0, 10.0))


class Alone(Method):
    """Nobody uploads anything: public item tables and dense parameters become private, from the same start."""

    name = "alone"
    numbers = 1
    title = "bound: no federation, every client trains by itself on its own data"
    reference = "local training, the usual lower reference of federated learning (McMahan et al., AISTATS 2017)"
    Settings = AloneSettings
    first_step = 0
    topology = "local"
    ignored = dict.fromkeys(("weighting", "upload_noise", "upload_mechanism", "upload_clip", "cold_items",
                             "aggregator", "server_optimiser"),
                            "with the method alone, whose clients share no table and upload nothing")

    def trained_backbone(self, backbone, clients):
        if isinstance(backbone, (SequentialBackbone, ModuleBackbone)):  # of domains
            return backbone
        if backbone.whole_tables or backbone.keeps_local_tables or backbone.serves_tables:
            raise Incompatible(f"method '{self.name}' gives each client its own rows of the items that it looks up, "
                               f"and clients of '{backbone.name}' train all rows or keep their own.", "backbone",
                               lambda cls: not (cls.whole_tables or cls.keeps_local_tables or cls.serves_tables))
        return without_public(type(backbone), self.settings.own_rate / clients)(backbone.settings)
