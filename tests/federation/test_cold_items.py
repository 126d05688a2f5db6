"""New items that arrive after a block's training: who knows them, what they are ranked by, what is refused."""

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from helpers import ITEM, STABLE, build, federation, lay_log, stream_of

from fedcl_bench import LocalSettings, UserError
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation.cold_items import cold_items_of
from fedcl_bench.federation.loop import run
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.testing.worlds import growing_stream, ragged

BACKBONES = {"fedmf": {"dim": 4}, "fedncf": {"dim": 4}, "biasmf": {"dim": 4}, "ncf": {"dim": 4}}


@pytest.fixture(scope="module")
def stream():
    """Two new items in the second and in the third block; the last item has no text."""
    stream = growing_stream(users=30, items=40)
    for step in stream.steps[1:]:
        assert step.n_items - step.old_items == 2 and int((step.train.values >= step.old_items).sum()) > 2
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    vectors[-1] = 0.0
    return replace(stream, features=(vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-9),))


def made(registry, stream, backbone="fedmf", method="ft", **server):
    settings = {"cold_items": "untrained", "fold_in_rounds": 2, "rounds": 2, "patience": 0, "precision": "float64",
                "similar_items": 3, **server}
    own = {name: value for name, value in STABLE.get(backbone, {}).items() if name != "local_epochs"}
    return federation(registry, stream, build(registry, "method", method),
                      build(registry, "backbone", backbone, **BACKBONES[backbone], **own),
                      local=LocalSettings(batch_size=20, negatives=2, optimiser="adam" if "mf" in backbone else "sgd"),
                      evaluation=EvaluationSettings(topk=(5,), valid_metric="ndcg@5"), **settings)


def ends(f):
    f.check()
    return [p for p in run(f) if p.trained]


def assert_alike(ours, theirs):
    for name, table in theirs.items():
        assert torch.equal(ours[name], table), name


@pytest.mark.parametrize("backbone", BACKBONES)
def test_no_client_knows_them_in_the_rounds(registry, stream, backbone):
    """Other interactions with new items change nothing, and nobody draws them as negatives. They take part from the
    next block on, and tests are of the same users."""
    *earlier, last = stream.steps
    swapped = [[last.n_items + last.old_items - 1 - item if item >= last.old_items else item for item in items]
               for items in (last.train.of(user).tolist() for user in range(last.n_users))]
    other = replace(stream, steps=(*earlier, replace(last, train=ragged(*swapped))))
    (_, before, first), (*_, second) = (ends(made(registry, world, backbone)) for world in (stream, other))
    assert_alike(first.model.public, second.model.public)
    assert_alike(first.model.private, second.model.private)
    start = made(registry, stream, backbone).backbone.new_rows(0, range(0), range(last.old_items, last.n_items))[0]
    for name, rows in start.items():
        assert torch.equal(first.model.public[name][last.old_items:], rows)
    new = slice(last.old_items - 2, last.old_items)  # in the block before
    assert not any(torch.equal(before.model.public[name][new], first.model.public[name][new]) for name in start)
    usual = [ends(made(registry, world, backbone, cold_items="none"))[-1] for world in (stream, other)]
    assert not all(map(torch.equal, *(end.model.private.values() for end in usual)))
    for (_, _, ours), (_, _, theirs) in zip(first.tests, usual[0].tests, strict=True):
        assert torch.equal(ours.users, theirs.users)


@pytest.mark.parametrize("backbone", ["fedmf", "biasmf"])
def test_mean_rows(registry, stream, backbone):
    """Of the items with the most similar texts, and of all by popularity, item by item."""
    step, vectors = stream.steps[-1], stream.features[0]
    counts = torch.zeros(step.n_items)
    for part in stream.steps:
        for item in part.train.values.tolist():
            counts[item] += 1
    for kind in ("similar", "popularity"):
        model = ends(made(registry, stream, backbone, cold_items=kind))[-1].model
        for item in range(step.old_items, step.n_items):
            cosines = [float(vectors[item] @ vectors[other]) for other in range(step.old_items)]
            chosen = sorted(range(step.old_items), key=lambda other: -cosines[other])[:3]
            if not vectors[item].any():
                chosen = list(range(step.old_items))
            weights = [counts[other] if kind == "popularity" else other in chosen for other in range(step.old_items)]
            for table in model.public.values():
                expected = sum(float(w) * table[other] for other, w in enumerate(weights)) / float(sum(weights))
                torch.testing.assert_close(table[item], expected)


@pytest.mark.parametrize("backbone", ["fedmf", "biasmf"])
def test_folded_in_rows_equal_the_oracle(registry, stream, backbone):
    """All clients train on all their items in more rounds, with private parameters frozen; only new rows are kept."""
    f = made(registry, stream, backbone, cold_items="fold_in", weighting="interactions")
    step, model = stream.steps[1], ends(f)[1].model
    arrived = cold_items_of(f, step, model).with_arrivals(model)
    start = f.backbone.new_rows(0, range(0), range(step.old_items, step.n_items))[0]
    expected = {name: torch.cat([table[:step.old_items], start[name]]) for name, table in model.public.items()}
    lists = {user: step.train.of(user).tolist() for user in range(step.n_users) if len(step.train.of(user))}
    for number in range(2):
        plain = oracle.Round(seed=0, step=1, round=number, backbone=backbone, settings=f.backbone.settings,
                             optimiser="adam", batch_size=20, epochs=1, negatives=2, weighted=True,
                             frozen=tuple(model.private))
        mean, *_ = plain.run(lists, replace(model, public=expected), oracle.nothing)
        expected = {name: torch.cat([table[:step.old_items], mean[name].view_as(table)[step.old_items:]])
                    for name, table in expected.items()}
    for name, table in expected.items():
        torch.testing.assert_close(arrived.public[name], table, atol=1e-9, rtol=1e-9)
        assert not torch.equal(table[step.old_items:], start[name])
    assert_alike(arrived.private, model.private)


def test_resumed_and_with_new_users_who_arrive_later(registry, stream, tmp_path):
    settings = {"cold_items": "fold_in", "fold_in": 3}
    whole = list(run(made(registry, stream, **settings)))
    middle = next(p for p in whole if p.step == 1 and p.round == 1)
    save_progress(tmp_path / "checkpoint.pt", middle, 1.0)
    restored, _ = load_progress(tmp_path / "checkpoint.pt", "cpu", made(registry, stream, **settings))
    assert_alike(list(run(made(registry, stream, **settings), restored))[-1].model.public, whole[-1].model.public)


def test_texts_come_from_the_item_file(registry, tmp_path, monkeypatch):
    """Titles and other words; they are part of the run's hash."""
    monkeypatch.chdir(tmp_path)
    lay_log("shop", [(f"u{user}", f"i{(user * 3 + place) % 12}", user + place) for user in range(9)
                     for place in range(8)])
    settings = {"cold_items": "similar", "blocks": 2, "topk": "5", "valid_metric": "ndcg@5"}
    with pytest.raises(UserError, match="'shop': its items have no texts, as there is no file"):
        stream_of(registry, "shop", "fedmf", **settings)
    texts = Path("data", "shop", "shop.item")
    texts.write_text("item_id:token\ttitle:token_seq\n" + "".join(f"i{i}\tword{i % 4}\n" for i in range(12)))
    config, stream = stream_of(registry, "shop", "fedmf", **settings)
    vectors = stream.features[0]
    same = [[int(a[1:]) % 4 == int(b[1:]) % 4 for b in stream.item_tokens] for a in stream.item_tokens]
    assert torch.equal(vectors @ vectors.T > 0.9, torch.tensor(same))
    config.federation(stream).check()
    texts.write_text(texts.read_text().replace("word1", "word9"))
    assert stream_of(registry, "shop", "fedmf", **settings)[0].hash != config.hash


@pytest.mark.parametrize("backbone, settings, message", [
    ("fedrap", {}, "'cold_items': found untrained, accepted: none with 'fedrap', whose clients train all item rows"),
    ("pfedrec", {"eval_item_table": "local"}, "accepted: none with 'pfedrec'"),
    ("fedmf", {"cold_items": "fold_in", "upload_noise": 0.1}, "fold_in with upload_noise or upload_clip"),
    ("fedncf", {"cold_items": "fold_in", "aggregator": "median"}, "or an aggregator, which do not protect")])
def test_what_is_refused(registry, stream, backbone, settings, message):
    config = make_config(registry, "ft", backbone, "ml-100k", overrides=[
        ("test", {"cold_items": "untrained", "topk": "5", "valid_metric": "ndcg@5", **settings})])
    with pytest.raises(UserError, match=message):
        config.federation(stream).check()
    if backbone == "fedmf":
        with pytest.raises(UserError, match="and the stream has no texts of items"):
            made(registry, replace(stream, features=()), cold_items="similar").check()
        assert ITEM in ends(made(registry, stream, method="reg"))[-1].model.public
