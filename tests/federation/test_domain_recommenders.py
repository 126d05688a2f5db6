"""Cross-domain recommenders end to end on small domains whose items have texts: what leaves a domain, what each stage
trains, and resuming to the bit."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import by_domain, executed, federation_of

import fedcl_bench as fb
from fedcl_bench.core.errors import UserError
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.federation import cold_start
from fedcl_bench.federation.cross_silo import CrossSilo
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.parts import Progress
from fedcl_bench.runs.config import make_config

TABLE = "content.code_table"
SMALL = {"max_length": 4, "dim": 6, "batch_size": 16, "rounds": 3, "topk": [3], "valid_metric": "mrr@3",
         "precision": "float64"}
TEXTS = {"heads": 2, "inner_size": 5, "patience": 2, "lr": 0.01, "encoder": "tfidf", "text_dim": 8}
WORDS = "red blue green small large round flat old new soft hard warm cold light dark".split()
DCSR = {"heads": 2, "layers": 1, "anchor_rows": 4}
CODED = {"codes": 4, "centroids": 6}
STILL = {"dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture
def shops(shops):
    for number, (name, items) in enumerate((("books", 15), ("games", 11))):
        rows = [f"i{item}\t{' '.join(WORDS[(item * step + number) % len(WORDS)] for step in (1, 2, 3, 5))}\n"
                for item in range(1, items)]  # one item has none
        Path("data", name, f"{name}.item").write_text("item_id:token\ttitle:token_seq\n" + "".join(rows))


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
    config = configured(registry, "feddcsr", "feddcsr", rounds=2, **DCSR)
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
    config = configured(registry, "mergerec", "unisrec", rounds=2, **MERGE)
    assert not config.backbone_settings.ids  # by the method's default
    seen = progresses(config)
    assert is_resumed_to_the_bit(seen, config)
    dense, alone = by_domain(seen[-1].model.dense), by_domain(seen[-3].best.model.dense)
    for name, (first, second) in dense.items():
        assert torch.equal(first, second) and (name == "start" or not torch.equal(*alone[name])), name
    result = executed(config, tmp_path / "results")
    rounds = pd.read_parquet(Path(result["record"]) / "rounds.parquet")
    merged = rounds["stage"] == 1
    assert merged.sum() == 2 and (rounds["loss"] == 0).equals(merged) and (rounds["bytes_up"] > 0).equals(merged)
    assert (rounds["train_seconds"] == 0).equals(merged)
    with pytest.raises(UserError, match="a model of texts alone, which 'unisrec' has none of with these"):
        progresses(configured(registry, "mergerec", "unisrec", ids=True, **MERGE))
    with pytest.raises(UserError, match="(?s)a model of texts alone, which 'vqrec'.*that fit: unisrec"):
        progresses(configured(registry, "mergerec", "vqrec", **MERGE))


CCDR = {"topology": "central", "encoder": "tfidf", "text_dim": 8, "categories": 3, "link_negatives": 4,
        "neighbours": [2, 2]}


def test_ccdr_pools_domains_shares_their_categories_and_asks_for_texts(registry, shops):
    config = configured(registry, "ft", "ccdr", rounds=2, **CCDR)
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


def trained_by(*names, **settings):
    return federation_of(configured(*names, **TEXTS | settings))


def rounds_of(f):
    """The progress after every round."""
    return [progress for progress in run(f) if not progress.fraction_done and not progress.step]


def pfcr(registry, **settings):
    return trained_by(registry, "pfcr", "vqrec", **CODED, prompts=8, prompt_heads=2, federated_rounds=2, **settings)


@pytest.mark.parametrize("backbone, options", [
    ("unisrec", {"experts": 2}), ("vqrec", {**CODED, "permutation_rounds": 1})])
@pytest.mark.parametrize("topology", ["federated", "local", "central"])
def test_each_trains_under_each_topology(registry, shops, backbone, options, topology):
    f = trained_by(registry, "ft", backbone, topology=topology, rounds=1, **options)
    assert cold_start.notes(f) == []  # which asks other backbones for their private tables
    progress = rounds_of(f)[-1]
    assert len(progress.tests) == 2 and all(row["loss"] == row["loss"] for row in progress.curve)
    for name, copies in by_domain(progress.model.dense).items():
        if name != "permutation":  # of which nothing is left
            assert torch.equal(copies[0], copies[1]) is (topology != "local"), name


def test_domains_that_train_together_have_one_quantiser(registry, shops):
    def codes(topology):
        f = trained_by(registry, "ft", "vqrec", topology=topology, **CODED)
        f = replace(f, stream=replace(f.stream, features=(f.stream.features[0], f.stream.features[0][:11] + 0.01)))
        return [domain.module.codes for domain in CrossSilo(f).domains]

    for topology, alike in (("federated", True), ("central", True), ("local", False)):
        left, right = codes(topology)
        assert left.shape == (15, 4) and (float((left[:11] == right).double().mean()) > 0.9) is alike


def test_the_permutation_is_trained_and_then_fixed(registry, shops):
    seen = rounds_of(trained_by(registry, "ft", "vqrec", topology="local", permutation_rounds=2, **CODED, rounds=2))
    table = [progress.model.dense["books/code_table"] for progress in seen]
    raw = [progress.model.dense["books/permutation"] for progress in seen]
    assert torch.equal(table[0], table[1]) and not torch.equal(raw[0], raw[1])
    assert not torch.equal(table[1], table[2]) and torch.equal(raw[2], raw[3])
    assert torch.equal(raw[2][0], 60 * torch.eye(6, dtype=torch.float64))  # nothing is left to permute


def test_domains_that_exchange_fix_one_permutation(registry, shops):
    f = trained_by(registry, "ft", "vqrec", permutation_rounds=1, **CODED, rounds=1)
    before = rounds_of(f)[0]
    after = CrossSilo(f).enter(1, before)
    for progress in (before, after):
        left, right = by_domain(progress.model.dense)["code_table"]
        assert torch.equal(left, right)
    assert not torch.equal(left, before.model.dense["books/code_table"])


def test_pfcr_in_a_run(registry, shops):
    """The shared table, what is sent in which stage, and what each stage leaves as it is."""
    f = pfcr(registry, rounds=2, **STILL)
    start, seen = CrossSilo(f).start(), rounds_of(f)
    stages = [max(row["stage"] for row in progress.curve) for progress in seen]
    assert sorted(set(stages)) == [0, 1, 2] and stages.count(0) == 2
    for progress, stage in zip(seen, stages):
        left, right = by_domain(progress.model.dense)[TABLE]
        assert torch.equal(left, right) is (stage == 0)
    size = start.dense[f"books/{TABLE}"].numel() * 8
    assert {(row["stage"], row["bytes_up"], row["bytes_down"]) for row in seen[-1].curve} == {
        (0, size, size), (1, 0, 0), (2, 0, 0)}
    last = {stage: max(number for number, each in enumerate(stages) if each == stage) for stage in (0, 1, 2)}
    tuned = seen[last[2]].model
    for name, values in seen[last[1]].model.dense.items():
        own = name.split("/")[1]
        before_prompts = own.startswith("content.") or own in ("received", "gradient", "tallied")
        assert before_prompts or torch.equal(values, start.dense[name])  # prompts wait for their stage
        best = seen[last[1]].best.model.dense[name]
        assert torch.equal(tuned.dense[name], best) is (before_prompts and own != TABLE)
    assert not torch.equal(tuned.public["books/items"], start.public["books/items"])


def test_pfcr_sends_each_epochs_gradients_alone(registry, shops):
    """They are clipped before they are sent, so one table moves the further the more rounds there are."""
    f = pfcr(registry, rounds=1, ldp="unbiased", ldp_epsilon=40.0, ldp_clip=0.12, server_lr=1.0, single_train=False)
    start, seen = CrossSilo(f).start().dense[f"books/{TABLE}"], rounds_of(f)
    first, second = ((progress.model.dense[f"books/{TABLE}"] - start).abs().max() for progress in seen[:2])
    assert float(first) == pytest.approx(0.12) and float(second) == pytest.approx(0.24)
    assert not seen[0].model.dense["books/tallied"].any()


def test_a_record_names_what_left_and_scores_as_it_was_tested(registry, shops, tmp_path):
    config = configured(registry, "pfcr", "vqrec", **TEXTS, **CODED, prompts=8, prompt_heads=2, federated_rounds=1,
                        rounds=1)
    stream = load_stream(config.source, config.stream, config.features)
    result = executed(config, tmp_path / "results")
    assert result["privacy"]["uploaded"] == [TABLE, "features"] and "prompts" in result["privacy"]["kept_at_client"]
    users = pd.read_parquet(Path(result["record"]) / "users.parquet")
    hits = users[users["metric"] == "hit@3"].set_index("user")["value"]
    model = fb.load(tmp_path / "results").model()
    for user, hit in hits.items():
        step = next(step for step in stream.steps if user < step.n_users)
        scores = torch.from_numpy(model.scores(stream.user_tokens[user]))
        assert hit == (scores >= scores[int(step.test.of(user)[0])]).sum().le(3)


def test_what_the_server_learns_by_depends_on_its_settings(registry, shops):
    def after_a_round(**changed):
        first = next(progress for progress in run(pfcr(registry, **changed)) if not progress.fraction_done)
        return first.model.dense[f"books/{TABLE}"]
    usual, *others = [after_a_round(**changed) for changed in (
        {}, {"ldp": "unbiased"}, {"ldp": "released"}, {"server_lr": 0.5}, {"weighting": "interactions"})]
    assert not any(torch.equal(usual, other) for other in others)


@pytest.mark.parametrize("method, backbone, name, value", [
    ("pfcr", "vqrec", "permutation_rounds", 2), ("pfcr", "vqrec", "frozen_encoder", True),
    ("ffmsr", "recbole:S3Rec", "pretrain_rounds", 3)])
def test_settings_of_a_backbones_stages_are_refused_under_a_method_with_stages(registry, shops, method, backbone, name,
                                                                               value):
    settings = [("test", {"encoder": "tfidf", **({"semantics": True} if method == "ffmsr" else {}), name: value})]
    with pytest.raises(UserError, match=f"'{name}' .* no effect with the method {method}, which has stages of its own"):
        make_config(registry, method, backbone, "books+games", 0, settings)
    alone = make_config(registry, "ft", backbone, "books+games", 0, [("test", {
        "encoder": "tfidf", name: value, "topology": "local"})])
    assert alone.settings[name] == value
