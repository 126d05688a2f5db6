"""What RecBole 1.2.0's models do when clients of one user each train them, one row a model.

The rows are found by calling the models: ``python tools/probe_recbole.py`` writes them anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Mapping

COMPUTED = ("is one of RecBole's traditional models, which are not trained by gradients but computed at once, from the "
            "interactions of all users or from nothing")


@dataclass(frozen=True)
class Facts:
    """How a model is called."""

    # What one sample of its loss is: a ``point`` (item, label), a ``pair`` (item, negative), a ``group`` (item, all its
    # negatives), a ``target`` (sequence, next item), a ``target pair`` (with a negative), or the ``user`` as a whole.
    samples: str
    bpr: bool = False  # with the hyper-parameter ``loss_type: BPR`` a target becomes a target pair
    reversed: bool = False  # it reads sequences with the latest item last
    history: Mapping[str, str] = field(default_factory=dict)  # attributes with a user's history: ids, values, lengths
    counters: tuple[str, ...] = ()  # attributes that count the calls of the loss
    score: str = "full_sort_predict"  # the method that scores all items, this or ``predict``
    log: bool = False  # its scores are probabilities that sum to 1
    loss_alone: str = ""  # why the loss is called for one client at a time; empty: it is not
    score_alone: str = ""
    loss_alone_with: Mapping[str, str] = field(default_factory=dict)  # by the hyper-parameter that makes it so
    of_users: tuple[str, ...] = ()  # parameters with a row per user

    def chosen(self, values: Mapping[str, Any]) -> "Facts":
        """Facts of the model with certain hyper-parameters, those of RecBole's file included."""
        samples = "target pair" if self.bpr and values["loss_type"] == "BPR" else self.samples
        alone = next((why for key, why in self.loss_alone_with.items() if values[key]), self.loss_alone)
        return replace(self, samples=samples, loss_alone=alone)

    @property
    def sequential(self) -> bool:
        return self.samples.startswith("target")

    @property
    def remembers(self) -> bool:
        """Whether scoring needs the client's own items."""
        return self.sequential or bool(self.history)


def status(name: str) -> str:
    """``vectorised``, ``one by one: OPERATORS`` or ``refused: WHY``."""
    row = TABLE[name]
    if isinstance(row, str):
        return f"refused: {row}"
    alone = ", ".join(sorted({row.loss_alone, row.score_alone} - {""}))
    return f"one by one: {alone}" if alone else "vectorised"


# Facts, or why clients of one user each cannot train the model.
TABLE: dict[str, Facts | str] = {
    "ADMMSLIM": COMPUTED,
    "BPR": Facts("pair", of_users=("user_embedding.weight",)),
    "CDAE": Facts("user", history={"history_item_id": "ids", "history_item_value": "values"},
        of_users=("h_user.weight",)),
    "ConvNCF": Facts("pair", score="predict", of_users=("user_embedding.weight",)),
    "DGCF": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "DMF": "needs other users' interactions (dataset.history_user_matrix), which no client has",
    "DiffRec": "draws its loss from a global random generator, which no client owns",
    "EASE": COMPUTED,
    "ENMF": Facts("user", history={"history_item_matrix": "ids", "history_lens": "lengths"},
        of_users=("user_embedding.weight",)),
    "FISM": Facts("point", history={"history_item_matrix": "ids", "history_lens": "lengths", "mask_mat": "values"},
        score="predict", of_users=("user_bias",)),
    "GCMC": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "ItemKNN": COMPUTED,
    "LDiffRec": "draws its loss from a global random generator, which no client owns",
    "LINE": "needs other users' interactions (dataset.inter_feat), which no client has",
    "LightGCN": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "MacridVAE": Facts("user", history={"history_item_id": "ids", "history_item_value": "values"},
        counters=("update",)),
    "MultiDAE": Facts("user", history={"history_item_id": "ids", "history_item_value": "values"}),
    "MultiVAE": Facts("user", history={"history_item_id": "ids", "history_item_value": "values"}, counters=("update",)),
    "NAIS": Facts("point", history={"history_item_matrix": "ids", "history_lens": "lengths", "mask_mat": "values"},
        score="predict"),
    "NCEPLRec": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "NCL": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "NGCF": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "NNCF": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "NeuMF": Facts("point", score="predict", of_users=("user_mf_embedding.weight", "user_mlp_embedding.weight")),
    "Pop": COMPUTED,
    "RaCT": Facts("user", history={"history_item_id": "ids", "history_item_value": "values"}, counters=("update",)),
    "Random": COMPUTED,
    "RecVAE": "takes turns in a trainer of its own: calculate_loss has more arguments than the batch",
    "SGL": "needs other users' interactions (dataset.inter_feat), which no client has",
    "SLIMElastic": COMPUTED,
    "SimpleX": Facts("group", history={"history_item_id": "ids", "history_item_len": "lengths"},
        of_users=("user_emb.weight",)),
    "SpectralCF": "needs other users' interactions (dataset.inter_matrix), which no client has",
    "BERT4Rec": "needs RecBole's transform 'mask_itemseq' of every batch",
    "CORE": Facts("target"),
    "Caser": Facts("target", bpr=True, of_users=("user_embedding.weight",)),
    "DIEN": "needs features of items or users, or a knowledge graph (dataset.get_user_feature)",
    "DIN": "needs features of items or users, or a knowledge graph (dataset.get_user_feature)",
    "FDSA": "needs features of items or users, or a knowledge graph (dataset.get_item_feature)",
    "FEARec": "needs other users' interactions (dataset.inter_feat), which no client has",
    "FOSSIL": Facts("target", bpr=True, of_users=("user_lambda.weight",)),
    "FPMC": Facts("target pair", of_users=("UI_emb.weight",)),
    "GCSAN": Facts("target", bpr=True, loss_alone="Tensor.numpy", score_alone="Tensor.numpy"),
    "GRU4Rec": Facts("target", bpr=True),
    "GRU4RecF": "needs features of items or users, or a knowledge graph (dataset.get_item_feature)",
    "GRU4RecKG": "needs features of items or users, or a knowledge graph (dataset.get_preload_weight)",
    "HGN": Facts("target", bpr=True, of_users=("user_embedding.weight",)),
    "HRM": Facts("target", bpr=True, loss_alone="Tensor.numpy", score_alone="Tensor.numpy",
        of_users=("user_embedding.weight",)),
    "KSR": "needs features of items or users, or a knowledge graph (dataset.num(None))",
    "LightSANs": Facts("target", bpr=True),
    "NARM": Facts("target", bpr=True),
    "NPE": Facts("target", bpr=True, of_users=("user_embedding.weight",)),
    "NextItNet": Facts("target", bpr=True),
    "RepeatNet": Facts("target", log=True, loss_alone_with={"joint_train": "control flow that depends on data"}),
    "S3Rec": "needs features of items or users, or a knowledge graph (dataset.num('class'))",
    "SASRec": Facts("target", bpr=True),
    "SASRecF": "needs features of items or users, or a knowledge graph (dataset.field2type)",
    "SHAN": Facts("target", bpr=True, reversed=True, of_users=("user_embedding.weight",)),
    "SINE": Facts("target", bpr=True),
    "SRGNN": Facts("target", bpr=True, loss_alone="Tensor.numpy", score_alone="Tensor.numpy"),
    "STAMP": Facts("target", bpr=True),
    "TransRec": Facts("target pair", of_users=("user_embedding.weight",)),
}
