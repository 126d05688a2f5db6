"""Data: RecBole's filters, blocks, splits, fixed split files, and the published counts."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import ROOT, recbole_config, stream_of
from hypothesis import given, strategies as st

from fedcl_bench.data.files.recbole_files import Interactions, bundled, load_interactions
from fedcl_bench.data.source import configured, load_config
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.data.stream import block_of_rows, build_blocks, read_split_file, split_of_rows, statistics
from fedcl_bench.testing.worlds import ragged

FIELDS = {"user": "user_id", "item": "item_id", "time": "timestamp"}


def test_ml100k_counts(ml100k):
    expected = load_config("ml-100k").expected
    found = statistics(ml100k)
    assert set(expected) == set(found)
    assert all(list(values) == found[name] for name, values in expected.items())


@pytest.mark.parametrize("name", ["ml-latest-small", "lastfm-2k"])
def test_published_counts_of_other_datasets(registry, shared, name):
    found = statistics(stream_of(registry, name, "fedmf", shared / "data" / "atomic")[1])
    for statistic, values in load_config(name).expected.items():
        assert list(values) == found[statistic]


def test_expected_counts_agree_with_the_paper(shared):
    table = pd.read_csv(shared / "paper_tables" / "f3crec_table1.csv")
    names = {"# of accumulated users": "accumulated_users", "# of accumulated items": "accumulated_items",
             "# of interactions": "interactions", "sparsity (%)": "sparsity"}
    papers = {"ml-100k": "ML-100K", "ml-latest-small": "ML-Latest-Small", "hetrec2011-ml": "HetRec2011",
              "lastfm-2k": "Lastfm-2K"}
    for dataset, paper in papers.items():
        rows = table[table.dataset == paper]
        for metric, name in names.items():
            assert rows[rows.metric == metric].value.tolist() == load_config(dataset).expected[name]


def test_authors_split_file(registry, shared):
    stream = read_split_file(shared / "data" / "splits" / "ml-100k.f3crec_authors.tsv")
    found = statistics(stream)
    for name, values in load_config("ml-100k").expected.items():
        assert found[name] == list(values)
    assert stream.user_tokens.tolist() == [str(u) for u in range(943)]  # their numbering already grows with the blocks
    assert stream.item_tokens.tolist() == [str(i) for i in range(1152)]


@pytest.mark.parametrize("interval, count", [("(0,inf)", 10), ("[1,2];(4,5]", 30), ("[3,5)", 0)])
def test_readers_and_filters_are_recboles(interval, count):
    """Against RecBole's dataset.

    The file has no missing values, which RecBole's Dataset leaves as they are under pandas 3.
    """
    path = bundled("ml-100k") / "ml-100k.inter"
    ours = load_interactions(path, count, FIELDS, {"rating": interval})
    enough = f"[{count},inf)"
    with recbole_config():
        from recbole.config import Config
        from recbole.data.dataset import Dataset
        from recbole.model.general_recommender import BPR

        config = Config(model=BPR, dataset="ml-100k", config_dict={
            "load_col": {"inter": ["user_id", "item_id", "rating", "timestamp"]}, "val_interval": {"rating": interval},
            "user_inter_num_interval": enough, "item_inter_num_interval": enough, "use_gpu": False,
            "normalize_all": None})  # their settings for ml-100k scale times to [0, 1]
        theirs = Dataset(config)
    assert np.array_equal(ours.user + 1, theirs.inter_feat["user_id"])
    assert np.array_equal(ours.item + 1, theirs.inter_feat["item_id"])
    assert np.array_equal(ours.time, theirs.inter_feat["timestamp"])
    assert np.array_equal(ours.user_tokens, theirs.field2id_token["user_id"][1:])


def test_ids_by_first_appearance_and_fixed_ties():
    """Ties keep the order of the file; ids follow time."""
    data = Interactions(user=np.array([0, 1, 0, 1]), item=np.array([2, 0, 1, 2]), time=np.array([5.0, 1.0, 1.0, 5.0]),
                        user_tokens=np.array(["a", "b"]), item_tokens=np.array(["x", "y", "z"]))
    stream = build_blocks(data, StreamSettings(blocks=1), "toy")
    assert stream.user_tokens.tolist() == ["b", "a"] and stream.item_tokens.tolist() == ["x", "y", "z"]
    assert stream.steps[0].train.of(0).tolist() == [0, 2] and stream.steps[0].train.of(1).tolist() == [1, 2]


@given(n=st.integers(1, 5000), blocks=st.integers(1, 8), share=st.floats(0.05, 0.95))
def test_blocks_cover_rows_in_order(n, blocks, share):
    block = block_of_rows(n, blocks, share)
    assert len(block) == n and (np.diff(block) >= 0).all() and block.max(initial=0) < blocks
    sizes = np.bincount(block, minlength=blocks)
    if blocks > 1:
        assert sizes[0] == int(share * n)
        assert (sizes[1:-1] == int((1 - share) * n / (blocks - 1))).all() and sizes[-1] >= sizes[1:-1].max(initial=0)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=120), st.sampled_from(["random", "chronological"]),
       st.integers(0, 9))
def test_split_sizes_and_order(users, how, seed):
    user = np.array(users)
    split = split_of_rows(user, how, seed, 1)
    for u in set(users):
        mine = split[user == u]
        n = len(mine)
        test = math.ceil(n / 10) if n >= 3 else 0
        valid = math.ceil((n - test) / 9) if n >= 3 else 0
        assert [(mine == s).sum() for s in range(3)] == [n - test - valid, valid, test]
        if how == "chronological":
            assert (np.diff(mine) >= 0).all()


def test_random_split_is_per_user_and_keyed():
    """Another user's rows do not change a user's random split; another seed or block does."""
    user = np.repeat([0, 1, 2], 40)
    split = split_of_rows(user, "random", 0, 0)
    assert np.array_equal(split[user != 1], split_of_rows(user[user != 1], "random", 0, 0))
    assert not np.array_equal(split, split_of_rows(user, "random", 1, 0))
    assert not np.array_equal(split, split_of_rows(user, "random", 0, 1))
    assert not (np.diff(split[user == 0].astype(int)) >= 0).all()


def test_split_setting_changes_only_its_blocks(registry):
    default, random, other = (stream_of(registry, "ml-100k", "fedmf", **changed)[1]
                              for changed in ({}, {"inc_split": "random"}, {"split_seed": 1}))
    assert torch.equal(default.steps[0].test.values, random.steps[0].test.values)
    assert not torch.equal(default.steps[1].test.values, random.steps[1].test.values)
    assert not torch.equal(default.steps[0].test.values, other.steps[0].test.values)
    assert torch.equal(default.steps[1].test.values, other.steps[1].test.values)


def test_every_dataset_config_loads(registry):
    for name in configured():
        config = load_config(name)
        assert config.title and config.source.startswith("https://") and config.licence
        # Of sessions, only the authors' XING is known under settings that can be reproduced.
        assert config.expected or config.settings["stream"] == "sessions" and "Table 1" in config.notes
        for kind, settings in (("backbone", config.backbone_settings), ("method", config.method_settings)):
            assert all(registry.get(kind, plugin) for plugin in settings)


@given(lists=st.lists(st.lists(st.integers(0, 6), max_size=9), max_size=5))
def test_ragged_distinct(lists):
    found = ragged(*lists).distinct()
    assert [found.of(user).tolist() for user in range(len(lists))] == [list(dict.fromkeys(items)) for items in lists]


def test_recbole_is_imported_without_scikit_learn_and_its_metrics_still_work():
    """RecBole's import of scikit-learn takes longer than reading ML-100K; so does that of tensorboard."""
    code = ("import sys\n"
            "from fedcl_bench.runs.config import make_config\nfrom fedcl_bench.data.datasets import load_stream\n"
            "from fedcl_bench.runs.registry import discover\n"
            "config = make_config(discover(), 'ft', 'fedmf', 'ml-100k')\n"
            "load_stream(config.source, config.stream)\nconfig.backbone.cls(config.backbone_settings).new_rows(0, "
            "range(2), range(3))\n"
            "assert not [name for name in sys.modules if name.split('.')[0] in ('sklearn', 'tensorboard')]\n"
            "from recbole.evaluator import metrics\n"
            "assert metrics.sk_auc([0.0, 1.0], [0.0, 1.0]) == 0.5 and 'sklearn.metrics' in sys.modules\n"
            "from sklearn.metrics import mean_squared_error\nassert mean_squared_error([1.0], [3.0]) == 4.0\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
