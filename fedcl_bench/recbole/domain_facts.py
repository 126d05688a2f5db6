"""What RecBole 1.2.0's sequential models do when domains of many users train them, one row a model.

The rows are found by calling the models: ``python tools/probe_recbole.py`` writes them anew.
"""

from __future__ import annotations

from dataclasses import dataclass

READS_TEXT = "FDSA", "GRU4RecF", "S3Rec", "SASRecF"  # whose features of items are made of their texts


@dataclass(frozen=True)
class DomainFacts:
    """How a model's loss treats a batch."""

    bpr: bool = False  # with the hyper-parameter ``loss_type: BPR`` it reads a negative item per sample
    draws: bool = False  # it, or RecBole's transform, draws from Python's or NumPy's generator
    fixed_length: bool = False  # padding behind the longest history of a batch changes loss or scores
    divides: bool = False  # without negatives it is the mean of samples that have nothing to do with one another


def status(name: str) -> str:
    """``yes``, ``yes, reading texts`` or ``refused: WHY``; empty for general models, which read no sequences."""
    row = TABLE.get(name, "")
    if isinstance(row, str):
        return row and f"refused: {row}"
    return "yes, reading texts" if name in READS_TEXT else "yes"


# Facts, or why domains cannot train the model.
TABLE: dict[str, DomainFacts | str] = {
    "BERT4Rec": DomainFacts(draws=True),
    "CORE": DomainFacts(divides=True),
    "Caser": "keeps a vector of every user (user_embedding.weight), and domains have different numbers of users",
    "DIEN": "needs features of items or users, or a knowledge graph (dataset.get_user_feature)",
    "DIN": "needs features of items or users, or a knowledge graph (dataset.get_user_feature)",
    "FDSA": DomainFacts(bpr=True, divides=True),
    "FEARec": DomainFacts(bpr=True, draws=True, fixed_length=True),
    "FOSSIL": "keeps a vector of every user (user_lambda.weight), and domains have different numbers of users",
    "FPMC": "keeps a vector of every user (UI_emb.weight), and domains have different numbers of users",
    "GCSAN": DomainFacts(bpr=True, divides=True),
    "GRU4Rec": DomainFacts(bpr=True, divides=True),
    "GRU4RecF": DomainFacts(bpr=True, divides=True),
    "GRU4RecKG": "needs features of items or users, or a knowledge graph (dataset.get_preload_weight)",
    "HGN": "keeps a vector of every user (user_embedding.weight), and domains have different numbers of users",
    "HRM": "keeps a vector of every user (user_embedding.weight), and domains have different numbers of users",
    "KSR": "needs features of items or users, or a knowledge graph (dataset.num(None))",
    "LightSANs": DomainFacts(bpr=True, fixed_length=True),
    "NARM": DomainFacts(bpr=True, divides=True),
    "NPE": "keeps a vector of every user (user_embedding.weight), and domains have different numbers of users",
    "NextItNet": DomainFacts(bpr=True, fixed_length=True),
    "RepeatNet": DomainFacts(fixed_length=True),
    "S3Rec": DomainFacts(bpr=True, divides=True),
    "SASRec": DomainFacts(bpr=True, divides=True),
    "SASRecF": DomainFacts(bpr=True, divides=True),
    "SHAN": "needs RecBole's transform 'inverse_itemseq' of every batch",
    "SINE": DomainFacts(bpr=True, fixed_length=True),
    "SRGNN": DomainFacts(bpr=True, divides=True),
    "STAMP": DomainFacts(bpr=True, fixed_length=True),
    "TransRec": "keeps a vector of every user (user_embedding.weight), and domains have different numbers of users",
}
