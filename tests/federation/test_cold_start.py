"""New users and new items that arrive after a block's training: who trains and who knows them, what they get or are
ranked by, what it may depend on, what is refused."""

from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from helpers import ITEM, STABLE, USER, build, federation, lay_log, same_tables, stream_of, threads

from fedcl_bench import SIZES, LocalSettings, UserError, score_users
from fedcl_bench.api import running
from fedcl_bench.data.stream import Ragged
from fedcl_bench.evaluation.metrics import EvaluationSettings
from fedcl_bench.federation import cold_start
from fedcl_bench.federation.client_sampling import Attendance
from fedcl_bench.federation.cold_start import cold_items_of, cold_start_of, notes, ranks_by
from fedcl_bench.federation.loop import run
from fedcl_bench.federation.settings import truncated_for_new_users
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.summary import summary
from fedcl_bench.testing.worlds import growing_stream, ragged

K = 3
BACKBONES = {"fedmf": {"dim": 4}, "fedncf": {"dim": 4}, "pfedrec": {"dim": 4, "eval_item_table": "local"},
             "fedrap": {"dim": 4}, "gpfedrec": {"dim": 4}, "biasmf": {"dim": 4}, "ncf": {"dim": 4}}


@pytest.fixture(scope="module")
def stream():
    """Two new users, with more than K training interactions, and two new items in the second and in the third block;
    the last item has no text."""
    stream = growing_stream(users=30, items=40)
    for step in stream.steps[1:]:
        assert step.n_users - step.old_users == 2 and (step.train.lengths[step.old_users:] > K).all()
        assert (step.test.lengths[step.old_users:] > 0).all()
        assert step.n_items - step.old_items == 2 and int((step.train.values >= step.old_items).sum()) > 2
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    vectors[-1] = 0.0
    return replace(stream, features=(vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-9),))


def made(registry, stream, method="ft", backbone="fedmf", **server):
    settings = {"fold_in": K, "fold_in_rounds": 2, "rounds": 2, "patience": 0, "precision": "float64", **server}
    own = {name: value for name, value in STABLE.get(backbone, {}).items() if name != "local_epochs"}
    method_settings = {"top_n": 5} if method in ("kd", "f3crec") else {}
    return federation(registry, stream, build(registry, "method", method, **method_settings),
                      build(registry, "backbone", backbone, **BACKBONES[backbone], **own),
                      evaluation=EvaluationSettings(topk=(5,), valid_metric="ndcg@5"), **settings)


def points(f, progress=None):
    f.check()
    return list(run(f, progress))


def with_train(stream, change):
    """The stream with other training lists of the users new in its last block: ``change`` of each."""
    *steps, last = stream.steps
    lists = [last.train.of(user).tolist() for user in range(last.n_users)]
    lists[last.old_users:] = map(change, lists[last.old_users:])
    return replace(stream, steps=(*steps, replace(last, train=ragged(*lists))))


def test_what_clients_know_of_a_step(stream):
    step = stream.steps[1]
    known = truncated_for_new_users(step, K)
    for user in range(step.n_users):
        items = step.train.of(user)
        assert torch.equal(known.train.of(user), items if user < step.old_users else items[:K])
    assert truncated_for_new_users(stream.steps[0], K) is stream.steps[0] and truncated_for_new_users(step, 0) is step
    lists = Ragged(torch.tensor([0, 2, 2, 5]), torch.arange(5))
    assert lists.at_most(torch.tensor([1, 1, 9])).values.tolist() == [0, 2, 3, 4]
    assert lists.at_most(torch.tensor([0, 0, 1])).indptr.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_new_users_take_no_part_in_the_rounds(registry, stream, backbone):
    """What the server has and sends is as if they had no training data; they take part from the next block on."""
    server = {"weighting": "interactions"} if backbone == "fedmf" else {}
    with_them = points(made(registry, stream, backbone=backbone, **server))
    without = points(made(registry, with_train(stream, lambda items: []), backbone=backbone, **server))
    last = len(stream.steps) - 1
    step = stream.steps[last]
    ends = [next(p for p in these if p.step == last and p.trained) for these in (with_them, without)]
    for kind in ("public", "dense"):
        for a, b in zip(*(getattr(end.model, kind).values() for end in ends)):
            assert torch.equal(a, b)
    for a, b in zip(*(end.model.private.values() for end in ends)):
        assert torch.equal(a[:step.old_users], b[:step.old_users])
    moved = [not torch.equal(a[step.old_users:], b[step.old_users:])
             for a, b in zip(*(end.model.private.values() for end in ends))]
    assert any(moved)
    new, here = with_them[-1].curve[-1], int((step.train.lengths[:step.old_users] > 0).sum())
    assert new["participants"] == here
    joined = stream.steps[1]
    first, later = (next(p.model.private for p in with_them if p.step == t and p.trained) for t in (1, last))
    users = [user for user in range(joined.old_users, joined.n_users) if step.train.lengths[user]]
    alike = [name for name in first if first[name].shape[1:] == later[name].shape[1:]]  # personal tables have grown
    assert users and any(not torch.equal(first[name][users], later[name][users]) for name in alike)


@pytest.mark.parametrize("method, backbone", [
    ("f3crec", "fedmf"), ("spp", "fedncf"), ("rlp2", "fedmf"), ("reg", "fedrap"), ("kd", "pfedrec")])
def test_later_interactions_are_unused(registry, stream, method, backbone):
    """No parameter and no state of a method depends on a new user's interactions after the first K."""
    others = with_train(stream, lambda items: items[:K] + sorted(set(range(40)) - set(items))[:len(items) - K])
    first, second = (points(made(registry, world, method, backbone, rounds=1))[-1] for world in (stream, others))
    same_tables(first.model, second.model)
    for state in ("client_state", "server_state"):
        for a, b in zip(getattr(first, state).values(), getattr(second, state).values(), strict=True):
            assert torch.equal(a, b)
    usual = [points(made(registry, world, method, backbone, fold_in=0, rounds=1))[-1] for world in (stream, others)]
    assert not all(map(torch.equal, *(p.model.tables() for p in usual)))


def test_the_next_block_starts_from_what_was_fitted(registry, stream):
    """Also in what is tested and kept. The rounds of the block itself go on without."""
    all_points = points(made(registry, stream, rounds=3, evaluate_every=2))
    step = stream.steps[1]
    new = slice(step.old_users, step.n_users)
    rounds = [p for p in all_points if p.step == 1 and p.round > 0]
    start, *later = [p.model.private[USER][new] for p in rounds]
    fresh = made(registry, stream).backbone.new_rows(0, range(step.old_users, step.n_users), range(0))[1][USER]
    assert torch.equal(start, fresh) and torch.equal(later[0], fresh) and not torch.equal(later[1], fresh)
    end = rounds[-1]
    best, f = end.best.model, made(registry, stream)
    made_anew = cold_start_of(f, f.server.as_known(step), best).with_arrivals(best).private[USER][new]
    assert torch.equal(best.private[USER][new], made_anew) and not torch.equal(made_anew, fresh)
    following = next(p for p in all_points if p.step == 2 and p.round == 1)
    absent = [user for user in range(step.old_users, step.n_users) if not stream.steps[2].train.lengths[user]]
    for user in absent:
        assert torch.equal(following.model.private[USER][user], end.model.private[USER][user])


def test_mean_of_public_vectors(registry, stream):
    for backbone, name in (("fedmf", USER), ("pfedrec", "score.weight")):
        f = made(registry, stream, backbone=backbone, cold_start="mean")
        end = next(p for p in points(f) if p.step == 1 and p.trained)
        step = stream.steps[1]
        for user in range(step.old_users, step.n_users):
            rows = end.model.public[ITEM][step.train.of(user)[:K]]
            torch.testing.assert_close(end.model.private[name][user].flatten(), rows.mean(0))
    few = with_train(stream, lambda items: items[:1])
    end, step = points(made(registry, few, cold_start="mean"))[-1], few.steps[-1]
    for user in range(step.old_users, step.n_users):
        torch.testing.assert_close(end.model.private[USER][user], end.model.public[ITEM][step.train.of(user)[0]])


@pytest.mark.parametrize("method", ["ft", "rlp2"])
def test_popularity(registry, stream, method):
    """New users get the items most trained on, until they have trained themselves."""
    f = made(registry, stream, method, cold_start="popularity")
    end = points(f)[-1]
    f.method.client_state, f.method.server_state = dict(end.client_state), dict(end.server_state)
    for t in (1, 2):
        step = stream.steps[t]
        known = [truncated_for_new_users(past, K).train.values for past in stream.steps[:t + 1]]
        counts = sum(torch.bincount(values, minlength=step.n_items) for values in known)
        users = torch.arange(step.n_users)
        made_up = torch.randn(len(users), step.n_items, generator=torch.Generator().manual_seed(1)).double()
        usual, scores = (each.rescore(users, made_up.clone(), end.model, f.backbone)
                         for each in (f.method, ranks_by(f, step, f.method)))
        assert torch.equal(usual, made_up) == (method == "ft")
        new = users >= stream.steps[0].n_users
        for past in stream.steps[2:t + 1]:
            new[:past.old_users] &= past.train.lengths[:past.old_users] == 0
        assert new[step.old_users:].all()
        assert torch.equal(scores[new], counts.double().expand(int(new.sum()), -1))
        assert torch.equal(scores[~new], usual[~new])
    assert ranks_by(f, stream.steps[0], f.method) is f.method
    row = next(scores for t, s, scores in end.tests if t == s == 2)
    step = stream.steps[2]
    for user in range(step.old_users, step.n_users):
        order = counts.double()
        order[torch.cat([step.train.of(user), step.valid.of(user)])] = -1.0
        top = order.argsort(descending=True, stable=True)[:5]
        hits = torch.isin(top, step.test.of(user)).double().mean()
        assert float(row.values["precision@5"][row.users == user]) == pytest.approx(float(hits))


def test_popularity_counts_items_that_arrived_in_earlier_blocks(registry, stream):
    f, step = made(registry, stream, cold_start="popularity", cold_items="untrained"), stream.steps[2]
    lists = [truncated_for_new_users(past, K).train.values for past in stream.steps]
    lists[2] = lists[2][lists[2] < step.old_items]
    counts = ranks_by(f, step, f.method).counts
    assert torch.equal(counts, sum(torch.bincount(values, minlength=step.n_items) for values in lists))


@pytest.mark.parametrize("arrivals", [{"fold_in": 0, "cold_items": "untrained"}, {"fold_in": K},
                                      {"fold_in": K, "cold_items": "untrained"}], ids=str)
def test_a_server_that_trains_knows_no_arrivals(registry, stream, monkeypatch, arrivals):
    f, seen = made(registry, stream, "central", rounds=1, **arrivals), []
    samples = type(f.method).samples

    def seeing(self, step, draw):
        users, items = samples(self, step, draw)
        here = stream.steps[draw.step]
        seen.append((draw.step, int(users.max()) < here.old_users, int(items.max()) < here.old_items))
        return users, items
    monkeypatch.setattr(type(f.method), "samples", seeing)
    points(f)
    assert {(old, known) for step, old, known in seen if step} == {("fold_in" in arrivals and arrivals["fold_in"] > 0,
                                                                    "cold_items" in arrivals)}


def test_new_users_do_not_draw_new_items(registry, stream, monkeypatch):
    f, seen = made(registry, stream, cold_items="untrained", rounds=1), []

    def looked_at(step, *others):
        if step.n_users == 2:  # the new ones alone
            seen.append(step.n_items == stream.steps[step.index].old_items)
        return chunks(step, *others)
    chunks = cold_start.list_chunks
    monkeypatch.setattr(cold_start, "list_chunks", looked_at)
    points(f)
    assert seen and all(seen)


def test_all_variants_have_the_same_users_and_items_to_find(registry, stream):
    usual = points(made(registry, stream, fold_in=0))[-1]
    for settings in ({}, {"cold_start": "mean"}, {"cold_start": "popularity"}):
        other = points(made(registry, stream, **settings))[-1]
        for (_, _, ours), (_, _, theirs) in zip(other.tests, usual.tests, strict=True):
            assert torch.equal(ours.users, theirs.users)
        kinds = [{kind: values for t, kind, _, values in p.analysis if t == 2} for p in (other, usual)]
        assert torch.equal(kinds[0]["known"], kinds[1]["known"])
        assert torch.equal(kinds[0]["interactions"], kinds[1]["interactions"])


# Five sixths of the pairs go to the long tests; each method and each backbone is in the others.
@pytest.mark.parametrize("method, backbone", [
    pytest.param(method, backbone, marks=[pytest.mark.long] * ((i + j) % 6 > 0))
    for i, method in enumerate(("ft", "reg", "kd", "f3crec", "rlp2", "spp")) for j, backbone in enumerate(BACKBONES)])
def test_chunks_and_threads(registry, stream, monkeypatch, method, backbone):
    expected = points(made(registry, stream, method, backbone, rounds=1))[-1]
    monkeypatch.setattr(SIZES, "padding_elements", 0)
    with threads(3):
        other = points(made(registry, stream, method, backbone, rounds=1))[-1]
    same_tables(other.model, expected.model, 1e-9)
    for (_, _, ours), (_, _, theirs) in zip(other.tests, expected.tests, strict=True):
        torch.testing.assert_close(ours.values["ndcg@5"], theirs.values["ndcg@5"], rtol=0.0, atol=1e-12)


def test_bytes(registry, stream):
    """New users receive the model once, when they arrive, and send nothing."""
    f = made(registry, stream)
    curve = points(f)[-1].curve
    ends = {row["step"]: row for row in curve}
    for row in curve:
        step = stream.steps[row["step"]]
        last = row is ends[row["step"]] and row["step"] > 0
        assert row["bytes_down_new"] == (2 * step.n_items * 4 * 8 if last else 0)
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"fold_in": K})])
    progress = points(made(registry, stream))[-1]
    content = summary(config, progress, 1.0, False)
    usual = sum(row["bytes_down"] * row["participants"] for row in curve)
    assert content["bytes"]["total_down"] == usual + sum(row["bytes_down_new"] for row in curve)
    assert "bytes_down_new" not in points(made(registry, stream, fold_in=0))[-1].curve[0]
    *_, progress = points(made(registry, stream, cold_items="fold_in"))
    new = {name: sum(row[name] for row in progress.curve) for name in ("bytes_up_new", "bytes_down_new")}
    fitted = sum(2 * int((step.train.lengths[:step.old_users] > 0).sum()) * 2 * 4 * 8 for step in stream.steps[1:])
    assert new["bytes_up_new"] == fitted > 0  # in each of two rounds the rows of two new items
    assert new["bytes_down_new"] == fitted + sum(row["bytes_down_new"] for row in curve)
    up = sum(row["bytes_up"] * row["participants"] for row in progress.curve)
    assert summary(config, progress, 1.0, False)["bytes"]["total_up"] == up + fitted


def test_who_is_asked(stream):
    for settings in ({}, {"ratio": 0.5}, {"availability": "activity"}, {"dropout": 0.3}):
        users, *_ = Attendance(**settings, known_only=True).of(stream.steps[1], 0, 1)
        assert len(users) and int(users.max()) < stream.steps[1].old_users
        first, *_ = Attendance(**settings, known_only=True).of(stream.steps[0], 0, 1)
        assert torch.equal(first, Attendance(**settings).of(stream.steps[0], 0, 1).users)


def test_what_is_refused(registry, stream):
    with pytest.raises(UserError, match="'cold_start': found mean, accepted: fold_in or popularity with 'ncf'"):
        made(registry, stream, backbone="ncf", cold_start="mean").check()
    made(registry, stream, backbone="ncf", fold_in=0).check()
    step = stream.steps[1]
    nobody = ragged(*[[]] * step.old_users, *[step.train.of(u).tolist() for u in range(step.old_users, step.n_users)])
    alone = replace(stream, steps=(stream.steps[0], replace(step, train=nobody)))
    with pytest.raises(UserError, match="'fold_in': found 3, accepted: 0 with this stream; all .* in block 1 are new"):
        made(registry, alone, client_dropout=0.5).check()
    new = ragged(*[[item for item in step.train.of(u).tolist() if item >= step.old_items] for u in range(step.n_users)])
    new_items = replace(stream, steps=(stream.steps[0], replace(step, train=new)))
    made(registry, new_items, fold_in=0).check()
    for method in ("ft", "central"):
        with pytest.raises(UserError, match="'cold_items': found untrained, accepted: none with this stream; all items "
                                            ".* in block 1 have are new in it, so nobody is left to train"):
            made(registry, new_items, method, fold_in=0, cold_items="untrained", client_dropout=0.5).check()
    points(made(registry, new_items, "frozen", fold_in=0, cold_items="untrained"))


def test_backbones_of_recbole(registry, stream):
    """With private parameters, and with none: then there is nothing to fit, which is said."""
    stream = replace(stream, steps=stream.steps[:2])
    for name, says in (("BPR", 0), ("MultiDAE", 1)):
        backbone = build(registry, "backbone", f"recbole:{name}")
        f = replace(made(registry, stream, rounds=1), backbone=backbone, local=LocalSettings("adam"))
        assert len(notes(f)) == says
        end, step = points(f)[-1], stream.steps[-1]
        for user in range(step.old_users, step.n_users):
            scores = score_users(backbone, end.model, torch.tensor([user]))
            assert bool(torch.isfinite(scores).all())
        assert len(end.tests) == 3
        others = with_train(stream, lambda items: items[:K] + items[:0:-1])
        same_tables(points(replace(f, stream=others))[-1].model, end.model)


def test_what_a_model_recommends_is_what_was_tested(tmp_path, monkeypatch):
    """Popular items to a new user, not what its untrained vector scores."""
    monkeypatch.chdir(tmp_path)
    results = running.run("ft", "fedmf", "ml-100k", k_core=80, rounds=1, dim=4, fold_in=K, cold_start="popularity")
    model = results.model()
    step = model.stream.steps[-1]
    known = [truncated_for_new_users(past, K).train.values for past in model.stream.steps]
    counts = sum(torch.bincount(values, minlength=step.n_items) for values in known)
    assert model.scores(model.user_ids[-1]).tolist() == counts.tolist()
    assert model.scores(model.user_ids[0]).tolist() != counts.tolist()


# New items.

def made_items(registry, stream, backbone="fedmf", method="ft", **server):
    f = made(registry, stream, method, backbone, **{"fold_in": 0, "cold_items": "untrained", "similar_items": 3,
                                                    **server})
    optimiser = "adam" if "mf" in backbone else "sgd"
    return replace(f, local=LocalSettings(batch_size=20, negatives=2, optimiser=optimiser))


def ends(f):
    f.check()
    return [p for p in run(f) if p.trained]


def assert_alike(ours, theirs):
    for name, table in theirs.items():
        assert torch.equal(ours[name], table), name


@pytest.mark.parametrize("backbone", ["fedmf", "fedncf", "biasmf", "ncf"])
def test_no_client_knows_them_in_the_rounds(registry, stream, backbone):
    """Other interactions with new items change nothing, and nobody draws them as negatives. They take part from the
    next block on, and tests are of the same users."""
    *earlier, last = stream.steps
    swapped = [[last.n_items + last.old_items - 1 - item if item >= last.old_items else item for item in items]
               for items in (last.train.of(user).tolist() for user in range(last.n_users))]
    other = replace(stream, steps=(*earlier, replace(last, train=ragged(*swapped))))
    (_, before, first), (*_, second) = (ends(made_items(registry, world, backbone)) for world in (stream, other))
    assert_alike(first.model.public, second.model.public)
    assert_alike(first.model.private, second.model.private)
    arrived = range(last.old_items, last.n_items)
    start = made_items(registry, stream, backbone).backbone.new_rows(0, range(0), arrived)[0]
    for name, rows in start.items():
        assert torch.equal(first.model.public[name][last.old_items:], rows)
    new = slice(last.old_items - 2, last.old_items)  # in the block before
    assert not any(torch.equal(before.model.public[name][new], first.model.public[name][new]) for name in start)
    usual = [ends(made_items(registry, world, backbone, cold_items="none"))[-1] for world in (stream, other)]
    assert not all(map(torch.equal, *(end.model.private.values() for end in usual)))
    for (_, _, ours), (_, _, theirs) in zip(first.tests, usual[0].tests, strict=True):
        assert torch.equal(ours.users, theirs.users)


def test_rows_of_new_items_are_not_trained_with(registry, stream):
    """F3CRec ranks all rows of the table: whatever new ones are made of, a block's losses stay."""
    losses = {tuple(row["loss"] for row in ends(made_items(
        registry, stream, "fedmf", "f3crec", cold_items=kind, rounds=3))[1].curve)
        for kind in ("untrained", "similar", "fold_in")}
    assert len(losses) == 1


@pytest.mark.parametrize("backbone", ["fedmf", "biasmf"])
def test_mean_rows(registry, stream, backbone):
    """Of the items with the most similar texts, and of all by popularity among the interactions that clients know, item
    by item."""
    step, vectors = stream.steps[-1], stream.features[0]
    for kind, fold_in in (("similar", 0), ("popularity", 0), ("popularity", K)):
        counts = torch.zeros(step.n_items)
        for part in stream.steps:
            for item in truncated_for_new_users(part, fold_in).train.values.tolist():
                counts[item] += 1
        model = ends(made_items(registry, stream, backbone, cold_items=kind, fold_in=fold_in))[-1].model
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
    f = made_items(registry, stream, backbone, cold_items="fold_in", weighting="interactions")
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
    whole = list(run(made_items(registry, stream, **settings)))
    middle = next(p for p in whole if p.step == 1 and p.round == 1)
    save_progress(tmp_path / "checkpoint.pt", middle, 1.0)
    restored, _ = load_progress(tmp_path / "checkpoint.pt", "cpu", made_items(registry, stream, **settings))
    assert_alike(list(run(made_items(registry, stream, **settings), restored))[-1].model.public, whole[-1].model.public)


def test_texts_come_from_the_item_file(registry, tmp_path, monkeypatch):
    """Titles and other words; they are part of the run's hash."""
    monkeypatch.chdir(tmp_path)
    lay_log("shop", [(f"u{user}", f"i{(user * 3 + place) % 12}", user + place) for user in range(9)
                     for place in range(8)])
    settings = {"cold_items": "similar", "blocks": 2, "topk": "5", "valid_metric": "ndcg@5"}
    with pytest.raises(UserError, match="'shop': its items have no texts, as there is no file"):
        stream_of(registry, "shop", "fedmf", **settings)
    texts = Path("data", "shop", "shop.item")
    texts.write_text("item_id:token\ttitle:token_seq\nothers\tword\n")
    with pytest.raises(UserError, match="none of the 12 items of 'shop' has a text"):
        stream_of(registry, "shop", "fedmf", **settings)
    texts.write_text("item_id:token\ttitle:token_seq\n" + "".join(f"i{i}\tword{i % 4}\n" for i in range(12)))
    config, stream = stream_of(registry, "shop", "fedmf", **settings)
    vectors = stream.features[0]
    same = [[int(a[1:]) % 4 == int(b[1:]) % 4 for b in stream.item_tokens] for a in stream.item_tokens]
    assert torch.equal(vectors @ vectors.T > 0.9, torch.tensor(same))
    config.federation(stream).check()
    texts.write_text(texts.read_text().replace("word1", "word9"))
    assert stream_of(registry, "shop", "fedmf", **settings)[0].hash != config.hash
    # Of a split file too, whatever stream the dataset's own file names.
    Path("split.tsv").write_text("block\tuser\titem\tsplit\n" + "".join(
        f"{block}\tu{user}\ti{(5 * user + 3 * block + place) % 12}\t{split}\n" for block in range(2)
        for user in range(9) for place, split in enumerate(("train", "train", "valid", "test"))))
    texts.with_suffix(".yaml").write_text("settings: {stream: static}\n")
    settings = {**settings, "split_file": "split.tsv"}
    del settings["blocks"]
    beside = Path("split.item")
    beside.write_text(texts.read_text())
    before = stream_of(registry, "shop", "fedmf", **settings)
    beside.write_text(texts.read_text().replace("word9", "word8"))
    assert before[1].features and stream_of(registry, "shop", "fedmf", **settings)[0].hash != before[0].hash


@pytest.mark.parametrize("backbone, settings, message", [
    ("fedrap", {}, "'cold_items': found untrained, accepted: none with 'fedrap', whose clients train all item rows"),
    ("fedrap", {"l2": 0.0, "local_epochs": 1}, "or have some of their own"),
    ("pfedrec", {"eval_item_table": "local"}, "accepted: none with 'pfedrec'"),
    ("fedmf", {"cold_items": "fold_in", "upload_noise": 0.1}, "fold_in with upload_noise or upload_clip"),
    ("fedncf", {"cold_items": "fold_in", "aggregator": "median"}, "or an aggregator, which do not protect")])
def test_what_is_refused_of_new_items(registry, stream, backbone, settings, message):
    config = make_config(registry, "ft", backbone, "ml-100k", overrides=[
        ("test", {"cold_items": "untrained", "topk": "5", "valid_metric": "ndcg@5", **settings})])
    with pytest.raises(UserError, match=message):
        config.federation(stream).check()
    if backbone == "fedmf":
        with pytest.raises(UserError, match="and the stream has no texts of items"):
            made_items(registry, replace(stream, features=()), cold_items="similar").check()
        assert ITEM in ends(made_items(registry, stream, method="reg"))[-1].model.public
