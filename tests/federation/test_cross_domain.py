"""Cross-domain recommenders end to end on small domains: what leaves a domain, and resuming to the bit."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import by_domain, executed, federation_of

from fedcl_bench.plugin import checks
from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.config import make_config

SMALL = {"max_length": 4, "dim": 6, "batch_size": 16, "rounds": 3, "topk": [3], "valid_metric": "mrr@3",
         "precision": "float64"}
DCSR = {"heads": 2, "layers": 1, "anchor_rows": 4}


@pytest.fixture
def shops(shops):
    for name, items in (("books", 15), ("games", 11)):
        texts = [f"i{item}\tabout {item % 4} and {item % 3}\n" for item in range(1, items)]  # one item has none
        Path("data", name, f"{name}.item").write_text("item_id:token\ttitle:token_seq\n" + "".join(texts))


def configured(registry, method, backbone, **settings):
    return make_config(registry, method, backbone, "books+games", 0, [("test", {**SMALL, **settings})])


def progresses(config, *, after=Progress()):
    """What a run has after each round that follows some progress, with new modules."""
    return [progress for progress in run(federation_of(config), after) if not progress.fraction_done]


def is_resumed_to_the_bit(seen, config):
    again, expected = progresses(config, after=seen[0])[-1], seen[-1]
    for kind in ("public", "dense"):
        for name, values in getattr(expected.model, kind).items():
            assert torch.equal(getattr(again.model, kind)[name], values), name
    assert all(torch.equal(again.server_state[name], values) for name, values in expected.server_state.items())
    return [row["valid"] for row in again.curve] == [row["valid"] for row in expected.curve]


def test_feddcsr_averages_its_encoder_and_representations_and_needs_its_backbone(registry, shops, tmp_path):
    config = configured(registry, "feddcsr", "feddcsr", **DCSR)
    seen = progresses(config)
    assert is_resumed_to_the_bit(seen, config)
    dense = by_domain(seen[1].model.dense)  # the discriminator is not trained in the first round
    for name, (first, second) in dense.items():
        alike = name.startswith("shared.encoder.") or name == "anchor"
        assert torch.equal(first, second) == alike, name
    assert all(map(torch.any, dense["anchor"])) and any(dense["batches"])
    result = executed(config, tmp_path / "results")
    uploaded = set(result["privacy"]["uploaded"])
    assert "anchor" in uploaded and all(name == "anchor" or name.startswith("shared.encoder.") for name in uploaded)
    assert uploaded.isdisjoint(result["privacy"]["kept_at_client"])
    rounds = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
    assert set(rounds["bytes_up"]) == {8 * sum(dense[name][0].numel() for name in uploaded)}
    assert config.server.weighting == "interactions" and config.local.adam_beta2 == 0.98
    with pytest.raises(UserError, match="feddcsr"):
        progresses(configured(registry, "feddcsr", "sasrec"))
    with pytest.raises(UserError, match="topology"):
        progresses(configured(registry, "feddcsr", "feddcsr", topology="local", **DCSR))


MERGE = {"encoder": "tfidf", "text_dim": 5, "heads": 2, "layers": 1, "learning_steps": 4, "lr": 0.01}


def test_mergerec_merges_the_best_models_once_and_tests_that(registry, shops, tmp_path):
    config = configured(registry, "mergerec", "unisrec", **MERGE)
    assert not config.backbone_settings.ids  # by the method's default
    seen = progresses(config)
    assert is_resumed_to_the_bit(seen, config)
    dense, alone = by_domain(seen[-1].model.dense), by_domain(seen[-3].best.model.dense)
    for name, (first, second) in dense.items():
        if name == "start":
            assert torch.equal(first, second)
        else:
            assert torch.equal(first, second) and not torch.equal(*alone[name]), name
    result = executed(config, tmp_path / "results")
    rounds = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
    merged = rounds["stage"] == 1
    assert merged.sum() == 2 and (rounds["loss"] == 0).equals(merged) and (rounds["bytes_up"] > 0).equals(merged)
    assert (rounds["train_seconds"] == 0).equals(merged)
    with pytest.raises(UserError, match="a model of texts alone, which 'unisrec' has none of with these"):
        progresses(configured(registry, "mergerec", "unisrec", ids=True, **MERGE))
    with pytest.raises(UserError, match="(?s)a model of texts alone, which 'vqrec'.*that fit: unisrec"):
        progresses(configured(registry, "mergerec", "vqrec", **MERGE))


def test_what_is_sent_begins_with_a_declared_name():
    class Method:
        kind, name = "method", "sender"
    checks.check_domain_upload(Method, {"a.b": torch.ones(1)}, ("a.", "c"))
    with pytest.raises(PluginError, match="sends 'b.a'"):
        checks.check_domain_upload(Method, {"b.a": torch.ones(1)}, ("a.", "c"))


CCDR = {"topology": "central", "encoder": "tfidf", "text_dim": 8, "categories": 3, "link_negatives": 4,
        "neighbours": [2, 2]}


def test_ccdr_pools_domains_shares_their_categories_and_asks_for_texts(registry, shops):
    config = configured(registry, "ft", "ccdr", **CCDR)
    seen = progresses(config)
    assert is_resumed_to_the_bit(seen, config)
    first, last = (by_domain(progress.model.dense)["categories"] for progress in (seen[0], seen[-1]))
    assert torch.equal(*last) and not torch.equal(last[0], first[0])
    assert seen[-1].model.public["games/items"].shape == (11, 6)
    with pytest.raises(UserError, match="topology"):
        progresses(configured(registry, "ft", "ccdr", **CCDR | {"topology": "federated"}))
    Path("data", "games", "games.item").unlink()
    with pytest.raises(UserError, match="games"):
        progresses(config)


GURU = {"topology": "central", "layers": 1, "head_size": 4, "inner_size": 5, "align_rounds": 1, "batch_size": 32}


def test_recguru_trains_in_stages_with_a_decoder_per_domain(registry, shops):
    config = configured(registry, "ft", "recguru", **GURU, pretrain_rounds=2, rounds=2)
    seen = progresses(config)
    assert is_resumed_to_the_bit(seen, config)
    assert [row["stage"] for row in seen[-1].curve if row["step"] == 0] == [0, 0, 1, 2, 2]

    def moved(number, name):
        before, after = (seen[n].model.dense[f"books/{name}"] for n in (number - 1, number))
        return not torch.equal(before, after)
    discriminator = "discriminator.0.weight"
    assert [moved(n, discriminator) for n in (1, 2, 3)] == [False, True, False]
    for number in (0, 1):
        assert [moved(n, f"recommenders.{number}.blocks.0.inner.weight") for n in (1, 2, 3)] == [False, False, True]
    assert not torch.equal(*(seen[-1].model.dense[f"books/decoders.{number}.blocks.0.inner.weight"]
                             for number in (0, 1)))


def test_recguru_pulls_users_who_are_known_together_once_it_aligns(registry, shops):
    for name in ("books", "games"):
        rows = "".join(f"u{user}\tp{user}\n" for user in range(12))
        Path("data", name, f"{name}.overlap").write_text(f"user_id:token\tperson:token\n{rows}")
    runs = []
    for known in (False, True):
        config = configured(registry, "ft", "recguru", **GURU, pretrain_rounds=1, rounds=1, known_users=known)
        runs.append(progresses(config))
    assert is_resumed_to_the_bit(runs[-1], config)
    losses = [[row["loss"] for row in seen[-1].curve if row["step"] == 0] for seen in runs]
    assert losses[0][0] == losses[1][0] and losses[0][1] < losses[1][1] and losses[0][2] != losses[1][2]
