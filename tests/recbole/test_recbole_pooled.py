"""RecBole's own recommenders on pooled data: equal to RecBole's pipeline, to formulas and to ``popularity``."""

import os
import random

import numpy as np
import pytest
import torch
from helpers import assert_same, build, executed, lay_log, one_step, output_of, ragged, recbole_config, refused
from test_recbole_domains import Pipeline

from fedcl_bench import rng
from fedcl_bench.core.errors import RunFailed, UserError
from fedcl_bench.federation.loop import run
from fedcl_bench.recbole import pooled
from fedcl_bench.rng import DrawKey
from fedcl_bench.runs.checkpoints import load_progress, save_progress
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import Registry
from fedcl_bench.runs.specs import RunSpec, tuned_file
from fedcl_bench.testing.worlds import growing_stream

SIZES = {"BPR": {"embedding_size": 6}, "LightGCN": {"embedding_size": 6}, "Pop": {}, "ItemKNN": {"k": 4}, "EASE": {},
         "SASRec": {"hidden_size": 6, "inner_size": 8, "max_length": 4}}
SMALL = {name: {**sizes, **({"train_batch_size": 32} if name in ("BPR", "LightGCN", "SASRec") else {})}
         for name, sizes in SIZES.items()}
TRAINED = [name for name in SMALL if issubclass(pooled.KINDS[name][0], pooled.RecBoleTrained)]
KEY = DrawKey(3, 1, 0)


@pytest.fixture(scope="module")
def lists():
    """Items of 14 users in time order; items are numbered as they appear."""
    generator, numbers = np.random.default_rng(1), {}
    return [[numbers.setdefault(item, len(numbers)) for item in generator.permutation(25)[:generator.integers(7, 15)]]
            for _ in range(14)]


@pytest.fixture(scope="module")
def step(lists):
    """All but each user's last two items; one more user has nothing so far."""
    return one_step(ragged(*(items[:-2] for items in lists), []), 1 + max(map(max, lists)), index=1).training


def method_of(registry, name, **settings):
    return build(registry, "method", f"recbole:{name}", **{**SMALL[name], **settings})


def scores_of(registry, name, step, **settings):
    """What a method ranks all users by after the first round of a step."""
    method = method_of(registry, name, **settings)
    method.begin_round(step, 0, None)
    if method.trains == "server":
        method.central_round(step, None, None, KEY)
    users = torch.arange(step.n_users)
    return method.rescore(users, torch.zeros(step.n_users, step.n_items), None, None)


def matrix_of(step):
    matrix = np.zeros((step.n_users, step.n_items))
    for user in range(step.n_users):
        np.add.at(matrix[user], step.train.of(user).numpy(), 1.0)
    return matrix


@pytest.mark.parametrize("lists_of_users", [None, [[0, 1], [1, 1, 2], [1], []]])
def test_pop_counts_as_popularity_does(registry, step, lists_of_users):
    """Also where a user has an item of several blocks."""
    step = step if lists_of_users is None else one_step(ragged(*lists_of_users), 4).training
    ours = build(registry, "method", "popularity")
    ours.begin_round(step, 0, None)
    counts = ours.server_state["counts"]
    torch.testing.assert_close(scores_of(registry, "Pop", step)[1], counts / counts.max())


def test_ease_is_its_closed_form_and_itemknn_the_sum_of_similarities(registry, step):
    """Of the k most similar items of each; of equal ones any, so k is all of them."""
    x = matrix_of(step)
    inverse = np.linalg.inv(x.T @ x + 20.0 * np.eye(step.n_items))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0.0)
    np.testing.assert_allclose(scores_of(registry, "EASE", step, reg_weight=20.0), x @ weights, atol=1e-5)
    x = matrix_of(step)
    norms = np.sqrt((x ** 2).sum(0))
    similar = x.T @ x / (norms[:, None] * norms + 2.0 + 1e-6)
    np.fill_diagonal(similar, 0.0)
    found = scores_of(registry, "ItemKNN", step, k=step.n_items, shrink=2.0)
    np.testing.assert_allclose(found, x @ similar, atol=1e-5)


def pipeline(name, lists):
    """RecBole's, seeded as the method's round is, of these lists; and the mean loss of its epoch, a function."""
    lay_log("books", [(f"u{user}", f"i{item}", 100 * user + place)
                      for user, items in enumerate(lists) for place, item in enumerate(items)])
    of_step, seed = (rng.key(KEY.seed, "recbole", KEY.step, number) >> 1 for number in (0, KEY.round + 1))
    own = {"MAX_ITEM_LIST_LENGTH" if key == "max_length" else key: value for key, value in SMALL[name].items()}
    made = Pipeline(name, of_step, seed=seed, epochs=1, **own,
                    **({"train_neg_sample_args": None} if name == "SASRec" else {}))

    def fit():
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        with recbole_config():
            made.trainer.fit(made.train, None, verbose=False, saved=False)
        made.trainer.tensorboard.close()  # which would write to the folder that is current later
        return made.trainer.train_loss_dict[0] / len(made.train)
    return made, fit


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINED)
def test_the_first_epoch_is_recboles(registry, lists, step, tmp_path, monkeypatch, name):
    """Parameters and loss after RecBole's ``fit`` of one epoch, dropout and negatives included, and all scores."""
    monkeypatch.chdir(tmp_path)
    method, n_users, n_items = method_of(registry, name), len(lists), step.n_items
    known = one_step(ragged(*(items[:-2] for items in lists)), n_items, index=1).training
    _, loss = method.central_round(known, None, None, KEY)
    assert not os.listdir()  # RecBole itself writes files
    recbole, fit = pipeline(name, lists)
    assert loss == pytest.approx(fit(), rel=1e-5)
    for key, value in recbole.model.state_dict().items():
        torch.testing.assert_close(method.server_state[f"model.{key}"], value, rtol=0.0, atol=1e-5)
    latest = [items[-2 - SMALL["SASRec"]["max_length"]:-2] for items in lists]
    asked = {"user_id": torch.arange(n_users) + 1, "item_length": torch.tensor([*map(len, latest)]),
             "item_id_list": torch.tensor([[item + 1 for item in items] for items in latest])}
    recbole.model.eval()
    expected = recbole.model.full_sort_predict(asked).view(n_users, -1)[:, 1:].detach()
    torch.testing.assert_close(method.server_state["scores"], expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_a_run_resumes_to_the_bit_and_moves_no_generator(registry, tmp_path, monkeypatch, capfd, name):
    """Blocks in which users and items are new; a model begins each anew. Nothing is printed, and no file is left."""
    monkeypatch.chdir(tmp_path)
    stream = growing_stream()

    def federation():
        settings = {**SMALL[name], "topk": 5, "valid_metric": "ndcg@5", "rounds": 2}
        f = make_config(registry, f"recbole:{name}", "fedmf", "ml-100k", overrides=[("test", settings)]
                        ).federation(stream)
        f.check()
        return f
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    points = list(run(federation()))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert not os.listdir() and capfd.readouterr() == ("", "")
    assert {(t, s) for t, s, _ in points[-1].tests} == {(t, s) for t in range(3) for s in range(t + 1)}
    rounds = 2 if name in TRAINED else 1
    assert len(points[-1].curve) == 3 * rounds
    for point in points[1:-1:4]:
        save_progress(tmp_path / "checkpoint.pt", point, 1.0)
        f = federation()
        *_, again = run(f, load_progress(tmp_path / "checkpoint.pt", "cpu", f)[0])
        assert_same(again, points[-1])


def test_what_is_tested_is_the_best_round(registry):
    """Its scores are kept with it, whatever later rounds make of the model."""
    settings = {**SMALL["BPR"], "learning_rate": 0.1, "topk": 5, "valid_metric": "ndcg@5", "rounds": 6}
    f = make_config(registry, "recbole:BPR", "none", "ml-100k", overrides=[("test", settings)]
                    ).federation(growing_stream())
    for progress in run(f):
        if progress.trained and progress.best.round < progress.round - 1:
            break
    kept, last = progress.best.server_state["scores"], progress.server_state["scores"]
    assert not torch.equal(kept, last)
    f.method.server_state = dict(progress.best.server_state)
    users = torch.arange(5)
    assert torch.equal(f.method.rescore(users, torch.zeros(5, kept.shape[1]), None, None), kept[:5])


@pytest.mark.parametrize("name", ["LightGCN", "ItemKNN"])
def test_ml_100k(registry, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    config = make_config(registry, f"recbole:{name.lower()}", "", "ml-100k", overrides=[
        ("test", {"k_core": 80, "blocks": 2, "rounds": 1, **SMALL[name],
                  **({"train_batch_size": 2048} if name in TRAINED else {})})])
    result = executed(config)
    assert (result["method"], result["backbone"]) == (f"recbole:{name}", "none")
    assert config.name.startswith(f"recbole-{name}-none-ml-100k-s0-") and os.listdir() == ["results"]
    assert result["metrics"]["ndcg@20"]["per_block"][0] > 0.0 and capfd.readouterr() == ("", "")


def test_names_are_spelled_and_safe_and_the_command_knows_them(registry, tmp_path, monkeypatch, capsys):
    spec = RunSpec("recbole:ease", "none", "ml-100k")
    assert spec.method == "recbole:EASE" and Registry().get("method", "RecBole:BPR").name == "recbole:BPR"
    assert tuned_file(tmp_path, spec.method, "none", "ml-100k").name == "ml-100k-none-recbole-EASE.json"
    assert registry.knows("method", "recbole:pop") and not registry.knows("method", "recbole:NeuMF")
    assert registry.pair("recbole:pop", None)[1] == "none"
    with pytest.raises(UserError, match="Known: BPR, EASE, ItemKNN, LightGCN, Pop, SASRec"):
        registry.pair("recbole:NeuMF", None)
    monkeypatch.chdir(tmp_path)
    assert "recbole:EASE on none, ml-100k" in output_of(capsys, "--method", "recbole:ease", "--set", "k_core=80",
                                                        "--quiet")
    assert "reg_weight = 250.0" in output_of(capsys, "list", "recbole:ease")
    assert "Known: BPR, EASE, ItemKNN, LightGCN, Pop, SASRec." in refused(capsys, "--method", "recbole:NeuMF")


def test_what_recbole_refuses_is_said_and_divergence_ends_the_run(registry, step):
    with pytest.raises(UserError, match="recbole:SASRec.* multiple of the number of attention heads"):
        scores_of(registry, "SASRec", step, n_heads=4)
    with pytest.raises(UserError, match="recbole:BPR.* interacted with all items"):
        scores_of(registry, "BPR", one_step(ragged([0, 1, 2], [0]), 3).training)
    settings = {**SMALL["BPR"], "learning_rate": 1e30, "topk": 5, "valid_metric": "ndcg@5"}
    f = make_config(registry, "recbole:BPR", "none", "ml-100k", overrides=[("test", settings)]
                    ).federation(growing_stream())
    with pytest.raises(RunFailed):
        list(run(f))
