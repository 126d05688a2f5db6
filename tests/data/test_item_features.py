"""Features of the items of streams of users: what is made of columns, what they are fitted on, who reads them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import lay_log

from fedcl_bench.core.errors import UserError
from fedcl_bench.data.items import tfidf
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.items.features import locate_item_features
from fedcl_bench.data.settings import ItemFeatureSettings, StreamSettings
from fedcl_bench.data.source import locate
from fedcl_bench.experiments.partition import stream_part
from fedcl_bench.federation.remote import sizes_of
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.registry import discover
from fedcl_bench.testing.worlds import growing_stream

PLUGIN = """
from fedcl_bench import ItemFeatureSettings, Method
class Reads(Method):
    name, title, Settings, needs_features = "reads", "reads features", ItemFeatureSettings, True
    def aggregate(self, public):
        assert all(self.features[:len(table)].shape == (len(table), 7) for table in public.values())
        return public
"""
LABELS = ["red", "red blue", "blue", "blue red", "", "red", "blue", "green red"]  # the last two are of later blocks
YEARS = ["1990", "2000", "V", "", "1995", "1995", "2100", "3000"]
TITLES = ["a tale", "a tale of war", "the war", "love", "war", "tale", "tale of robots", "robots"]


def lay(rows=8, header="item_id:token\tkind:token_seq\tyear:token\ttitle:token_seq", later="robots",
        kinds="{kind: labels, year: numbers}"):
    """A shop whose items arrive in the order of their numbers, the last two after its first block."""
    log = [(f"u{user}", f"i{item}", user + 100 * item) for item in range(8) for user in range(9)]
    table = zip(LABELS, YEARS, (title.replace("robots", later) for title in TITLES))
    text = "".join(f"i{item}\t" + "\t".join(fields) + "\n" for item, fields in enumerate(table) if item < rows)
    path = lay_log("shop", log).with_suffix(".item")
    path.write_text(f"{header}\n{text}")
    path.with_suffix(".yaml").write_text(f"item_columns: {kinds}\n")


@pytest.fixture(autouse=True)
def shop(in_empty_folder):
    lay()


def made(stream="blocks", **settings):
    of_stream = StreamSettings(k_core=0, blocks=3, base_share=0.75, stream=stream)
    source = locate("shop", None, of_stream)
    located = locate_item_features(source, ItemFeatureSettings(**{"text_dim": 4, **settings}))
    return located, load_stream(source, of_stream, located)


def test_columns_become_labels_numbers_and_vectors_of_texts():
    located, stream = made()
    assert stream.steps[0].n_items == 6 and located.columns == (("kind", "labels"), ("year", "numbers"),
                                                                ("title", "text"))
    rows, items = stream.item_features.numpy(), [int(token[1:]) for token in stream.item_tokens]
    for row, item in zip(rows, items):
        assert row[:2].tolist() == ["blue" in LABELS[item], "red" in LABELS[item]]  # no column for green
        year = {"V": 1995, "": 1995}.get(YEARS[item]) or int(YEARS[item])
        assert row[2] == pytest.approx((year - 1995) / 12.5 ** 0.5)
        assert np.linalg.norm(row[3:]) == pytest.approx(float(item != 7), abs=1e-6)  # robots are unknown
    static = made("static")[1].item_features
    assert static.shape == (8, 3 + 1 + 4)  # all items are of one block


def test_nothing_is_fitted_on_what_comes_later():
    """Neither columns nor earlier items' vectors change with what later items are; and a later text is encoded as if
    it stood among those that came before."""
    first, before = made()
    lay(later="androids")
    second, after = made()
    assert first.fingerprint != second.fingerprint and torch.equal(before.item_features[:6], after.item_features[:6])
    texts = [f"word{n % 5} thing{n % 3}" for n in range(30)]
    fitted = tfidf.encode(texts, 8)  # as many as there are words
    again = tfidf.encode([*texts, *texts], 8, fitted=30)
    assert np.array_equal(again[:30], fitted) and np.allclose(again[30:], fitted, atol=1e-6)


def test_columns_and_vectors_of_ones_own_are_chosen():
    assert made(item_columns=("year",))[1].item_features.shape == (8, 1)
    lay(header="item_id:token\tkind:token\tyear:token\ttitle:token_seq", kinds="{}")
    located, stream = made(item_columns=("kind",))
    assert located.columns == (("kind", "category"),)  # a field with spaces is one
    assert [row.sum() for row in stream.item_features] == [
        LABELS[int(token[1:])] in ("red", "red blue", "blue", "blue red") for token in stream.item_tokens]
    lay()
    Path("vectors").mkdir()
    np.savez("vectors/shop.npz", item_id=[f"i{n}" for n in range(8)], vectors=np.eye(8, 3))
    stream = made(encoder="given:vectors")[1]
    assert {token: row.tolist() for token, row in zip(stream.item_tokens, stream.item_features)} == {
        f"i{n}": row.tolist() for n, row in enumerate(np.eye(8, 3))}


@pytest.mark.parametrize("settings, item_file, message", [
    ({"item_columns": ("colour",)}, {}, "unknown column in setting 'item_columns' 'colour'"),
    ({"item_columns": ("kind", "kind")}, {}, "'item_columns': found 'kind' several times"),
    ({}, {"kinds": "{colour: labels}"}, "unknown column under item_columns in .*shop.yaml 'colour'"),
    ({"encoder": "nobody"}, {}, "unknown encoder 'nobody'"),
    ({}, {"header": "item_id:token\tkind:token_seq\tyear:date\ttitle:sound"}, "'title': found type 'sound', accepted"),
    ({"item_columns": ("kind",)}, {"rows": 0}, "has none of the 6 items of shop's first block"),
    ({"item_columns": ("title",)}, {"kinds": "{title: numbers}"}, "column 'title': found no number, accepted"),
    ({"item_columns": ("kind",)}, {"header": "id:token\tkind:token_seq\ta:token\tb:token"}, "'item_id' is missing")])
def test_what_is_refused(settings, item_file, message):
    lay(**item_file)
    with pytest.raises(UserError, match=message):
        made(**settings)


def test_only_plugins_that_ask_have_them(registry):
    """They are in the run's hash, and go where its clients go; without a file there is no run."""
    Path("mine").mkdir()
    Path("mine/reads.py").write_text(PLUGIN)
    plugins, settings = discover([Path("mine")]), {"blocks": 3, "k_core": 0, "base_share": 0.75, "rounds": 1, "topk": 2,
                                                   "valid_metric": "ndcg@2", "negatives": 1}

    def config(method="reads", backbone="fedmf", **more):
        return make_config(plugins, method, backbone, "shop", overrides=[("test", {**settings, **more})])
    run = config(text_dim=4)
    stream = load_stream(run.source, run.stream, run.features)
    f = run.federation(stream)
    assert f.method.features is stream.item_features and f.backbone.features is None
    assert torch.equal(stream_part(sizes_of(stream), torch.arange(3)).item_features, stream.item_features)
    assert len({run.hash, config().hash, config(item_columns="year").hash}) == 3
    assert run.base_hash == config("ft").base_hash  # it acts from block 1 on
    assert config("ft").hash == make_config(registry, "ft", "fedmf", "shop", overrides=[("test", settings)]).hash
    lay(rows=7)
    assert config(text_dim=4).hash != run.hash
    with pytest.raises(UserError, match="method 'reads' reads features of items, which are not there"):
        run.federation(replace(growing_stream(), item_features=None)).check()
    Path("data/shop/shop.item").unlink()
    with pytest.raises(UserError, match="its items have no features, as there is no file .*shop.item"):
        config()
    assert config("ft").features is None
