"""Explicit ratings: what is trained on, how far predictions are off, what is refused, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from helpers import executed, federation_of, finish, grown, lay_log, same_clients, stream_of, train_round
from torch import nn

from fedcl_bench.core.errors import UserError
from fedcl_bench.data.streams.prepared import file_of, save
from fedcl_bench.evaluation.ranking import pooled, rating_errors
from fedcl_bench.plugin.method import Method, NoSettings
from fedcl_bench.runs.config import make_config
from fedcl_bench.training.sampling import Needs, make_chunks

EXPLICIT = {"loss": "squared_error", "valid_metric": "rmse"}
SMALL = {**EXPLICIT, "blocks": 2, "rounds": 3, "dim": 4, "topk": "5", "lr": 0.05, "precision": "float64"}
HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"


@pytest.fixture(scope="module")
def rows():
    """(user, item, rating, time) of 14 users; some rate an item twice, and differently."""
    generator = np.random.default_rng(5)
    return [(f"u{user}", f"i{item}", int(generator.integers(1, 6)), float(generator.random()))
            for user in range(14) for item in generator.integers(0, 20, generator.integers(10, 25))]


@pytest.fixture
def rated(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_log("rated", rows, HEADER)


class RatingRound(oracle.Round):
    """A round on pairs of item and rating."""

    ratings: dict

    def samples(self, user, positives, n_items, pairwise):
        return list(zip(positives, self.ratings[user]))

    def batch_loss(self, model, some, user, added_loss, passes):
        scores = model([item for item, _ in some])
        return nn.MSELoss()(scores, torch.tensor([rating for _, rating in some], dtype=scores.dtype))


@pytest.mark.parametrize("batch_size, local_epochs", [(512, 2), (4, 2)])
def test_a_round_equals_the_oracle(registry, rated, batch_size, local_epochs):
    config, stream = stream_of(registry, "rated", "biasmf", **SMALL, batch_size=batch_size, local_epochs=local_epochs)
    f, step = config.federation(stream), stream.steps[0]
    model = grown(f.backbone, step, 3)
    users = (step.train.lengths > 0).nonzero().flatten()
    assert any(len(step.train.of(int(u))) > len(step.train.of(int(u)).unique()) for u in users)
    chunks = make_chunks(step, users, f.local, 16, Needs())
    after, _, _ = train_round(chunks, model, f.backbone, f.method, f.local, 3, 1, 4)
    plain = RatingRound(seed=3, step=1, round=4, backbone="biasmf", settings=f.backbone.settings, negatives=0,
                        optimiser="adam", epochs=local_epochs, batch_size=batch_size)
    plain.ratings = {int(u): step.train.rated.of(int(u)).tolist() for u in users}
    mean, _, private = plain.run({int(u): step.train.of(int(u)).tolist() for u in users}, model, oracle.nothing)
    for key, expected in mean.items():
        torch.testing.assert_close(after.public[key], expected.reshape(after.public[key].shape), atol=1e-9, rtol=1e-9)
    same_clients(after.private, private)


class SumsErrors(Method):
    """Makes the mean squared error of what it sees."""

    def local_loss(self, batch):
        errors = ((batch.scores - batch.labels).square() * batch.weights).sum(1)
        self.client_state["padded"] = self.client_state.get("padded", 0) + (~batch.mask).sum()
        torch.testing.assert_close(errors, batch.loss)


def test_a_method_sees_ratings_as_labels(registry, rated):
    config, stream = stream_of(registry, "rated", "biasmf", **SMALL, batch_size=8)
    f, step = config.federation(stream), stream.steps[0]
    model = grown(f.backbone, step, 3)
    chunks = make_chunks(step, (step.train.lengths > 0).nonzero().flatten(), f.local, 16, Needs())
    method = SumsErrors(NoSettings())
    train_round(chunks, model, f.backbone, method, f.local, 3, 1, 4)
    assert method.client_state["padded"] > 0


def test_ratings_are_those_of_their_rows(registry, rated, rows):
    stream = stream_of(registry, "rated", "biasmf", **SMALL)[1]
    found = [(stream.user_tokens[user], stream.item_tokens[item], rating) for step in stream.steps
             for split in (step.train, step.valid, step.test) for user in range(step.n_users)
             for item, rating in zip(split.of(user).tolist(), split.rated.of(user).tolist())]
    assert sorted(found) == sorted(row[:3] for row in rows)
    lists = stream.steps[0].train
    users = torch.tensor([3, 1])
    assert torch.equal(lists.part(users).ratings, torch.cat([lists.rated.of(3), lists.rated.of(1)]))
    assert torch.equal(lists.at_most(torch.ones_like(lists.lengths)).ratings, lists.ratings[lists.indptr[:-1]])


def test_errors_equal_numpy(registry, rated):
    """Of each user, and over all ratings at once."""
    config, stream = stream_of(registry, "rated", "biasmf", **SMALL)
    result = executed(config)
    f, step = federation_of(config), stream.steps[-1]
    model = finish(f).best.model
    p, q = ({name: table.numpy() for name, table in tables.items()} for tables in (model.private, model.public))
    wrong = []
    for user in (step.test.lengths > 0).nonzero().flatten().tolist():
        items, ratings = step.test.of(user).numpy(), step.test.rated.of(user).numpy()
        constants = p["user_bias.weight"][user] + p["global_bias"][user]
        predicted = (q["item_embedding.weight"][items] @ p["user_embedding.weight"][user]
                     + q["item_bias.weight"][items, 0] + constants)
        wrong.append(predicted - ratings)
    mae, rmse = [np.abs(each).mean() for each in wrong], [np.sqrt((each ** 2).mean()) for each in wrong]
    errors, every = rating_errors(f.backbone, model, step.test), np.concatenate(wrong)
    np.testing.assert_allclose(errors.values["mae"], mae)
    np.testing.assert_allclose(errors.values["rmse"], rmse)
    of_all = {"mae": np.abs(every).mean(), "rmse": np.sqrt((every ** 2).mean())}
    assert pooled(errors, step.test.lengths[errors.users]) == pytest.approx(of_all)
    assert {name: values[-1] for name, values in result["ratings"].items()} == pytest.approx(of_all)
    assert result["metrics"]["rmse"]["per_block"][-1] == pytest.approx(np.mean(rmse))


def test_the_round_with_the_lowest_error_is_tested(registry, rated):
    config, _ = stream_of(registry, "rated", "biasmf", **{**SMALL, "rounds": 12, "patience": 4, "lr": 0.3})
    result = executed(config)
    curve = pd.read_parquet(f"{result['record']}/rounds.parquet")
    for block, of_block in curve.groupby("step"):
        assert (of_block["valid"] < 0).all()
        assert result["best_round"][block] == int(of_block["valid"].to_numpy().argmax()) + 1
    assert max(result["best_round"]) > 1 and all(near >= 1 for near in result["nearly_best"]["rounds"])


def test_alone_trains_on_ratings(registry, rated):
    """From the same start as FT, so that its first loss is the same."""
    losses = [finish(federation_of(make_config(registry, method, "biasmf", "rated", overrides=[
        ("test", {**SMALL, "local_epochs": 1})]))).curve[0]["loss"] for method in ("ft", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_prepared_streams_and_shards(registry, rated):
    """What was prepared has no ratings, so the file is read; a part of the clients has theirs."""
    from fedcl_bench.experiments.partition import stream_part

    config, stream = stream_of(registry, "rated", "biasmf", **SMALL)
    save(stream, file_of(config.source, config.stream))
    for step, read in zip(stream.steps, stream_of(registry, "rated", "biasmf", **SMALL)[1].steps, strict=True):
        assert torch.equal(read.train.ratings, step.train.ratings) and read.train.ratings.unique().numel() > 1
    assert stream_of(registry, "rated", blocks=2, backbone="biasmf", k_core=0)[1].steps[0].train.ratings is None
    part = stream_part(stream, torch.tensor([0, 2])).steps[0].train
    assert torch.equal(part.rated.of(1), stream.steps[0].train.rated.of(2))
    bare = [replace(step, train=replace(step.train, ratings=None)) for step in stream.steps]
    with pytest.raises(UserError, match="predicts ratings with these settings, and the stream has none"):
        config.federation(replace(stream, steps=tuple(bare))).check()


def test_ratings_are_read_where_they_are_predicted(registry):
    for loss, column in (("bpr", ""), ("squared_error", "rating")):
        config = make_config(registry, "ft", "biasmf", "ml-100k", overrides=[("test", {"loss": loss})])
        assert config.source.rating == column
    with pytest.raises(UserError, match="(?s)method 'kd' takes scores for logits.*Methods that fit: alone, "):
        make_config(registry, "kd", "biasmf", "ml-100k", overrides=[("test", {"loss": "squared_error"})])  # unread


@pytest.mark.parametrize("settings, message", [
    ({"stream": "sessions"}, "predicts ratings with these settings: found stream=sessions"),
    ({"loss": "bpr"}, "'valid_metric': found rmse, accepted: NAME@K with 'biasmf', which predicts no ratings"),
    ({"negatives": 8}, "'negatives' .* has no effect where ratings are predicted"),
    *(({"method": name}, f"method '{name}' takes scores for logits, and 'biasmf' predicts ratings")
      for name in ("kd", "central", "rlp2")),
    ({"dataset": "bare"}, "'rating' \\(rating\\) is missing among its columns; name the column .* as RATING_FIELD")])
def test_what_is_refused(registry, rated, rows, settings, message):
    lay_log("bare", [row[:2] + row[3:] for row in rows])
    settings = {"method": "ft", "dataset": "rated", **settings}
    method, dataset = settings.pop("method"), settings.pop("dataset")
    with pytest.raises(UserError, match=message):
        federation_of(make_config(registry, method, "biasmf", dataset,
                                  overrides=[("test", {**EXPLICIT, "topk": "5", **settings})]))
