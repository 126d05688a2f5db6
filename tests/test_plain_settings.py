"""Numbers, files of settings and columns that could mean something else than they say: each is refused before work
starts."""

import pytest

import fedcl_bench as fb
from fedcl_bench.data.source import parsed
from fedcl_bench.data.files.recbole_files import read_table
from fedcl_bench.data.source import load_config, read_yaml
from fedcl_bench.core.errors import RunFailed, UserError
from fedcl_bench.core.settings import plain_number
from fedcl_bench.runs.config import make_config


@pytest.mark.parametrize("text", ["010", "1:30", "1_000", "0x10", "inf", "1e", "٣", "1,5", "9" * 5000, ""])
def test_what_is_not_plain_decimal_is_no_number(text):
    with pytest.raises(ValueError):
        plain_number(text)
    with pytest.raises(UserError, match="found '.*accepted: a "):
        fb.run("ft", "fedmf", lr=text)


def test_plain_decimals_are_what_they_say():
    assert [plain_number(text) for text in ("0", "-3", "+4", "1e-5", "2E3", ".5", "5.", "1.25e+2")] == \
        [0, -3, 4, 1e-5, 2000.0, 0.5, 5.0, 125.0]
    assert parsed("a: 10\nb: -1.5\nc: .5\nd: 1.0e-5\ne: +3\nf: .inf") == {
        "a": 10, "b": -1.5, "c": 0.5, "d": 1e-5, "e": 3, "f": float("inf")}


def test_a_value_filter_that_recbole_would_ignore_is_refused(tmp_path):
    (tmp_path / "mine.inter").write_text("user_id:token\n1\n")
    for interval in ("abc", "[3,5", "3,5", "[5,3]", "[a,b]", "", "[1,2];x", "3", "[1,2,3]"):
        (tmp_path / "mine.yaml").write_text(f"val_interval: {{rating: '{interval}'}}\n")
        with pytest.raises(UserError, match="column 'rating': found .*, accepted: intervals"):
            load_config(str(tmp_path / "mine.inter"))
    for interval in ("[3,inf)", "(0, 5.5]", "[-1e3,2];(4,5)", "(-inf,inf)"):
        (tmp_path / "mine.yaml").write_text(f"val_interval: {{rating: '{interval}'}}\n")
        assert load_config(str(tmp_path / "mine.inter")).val_interval == {"rating": interval}


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "mine.inter"
    path.write_text("user_id:token\titem_id:token\titem_id:token\ttimestamp:float\n1\t1\t2\t1\n")
    with pytest.raises(UserError, match="mine.inter: column 'item_id' is there 2 times; rename"):
        read_table(path, {"user_id": "token"})


def test_a_file_that_is_no_mapping_of_texts(tmp_path):
    for content in ("- 1", "1: 2", "", "\xff", "? [a]\n: 1"):
        (tmp_path / "x.yaml").write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match="x.yaml: (expected|is not valid)"):
            read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize("method, settings, said, unsaid", [
    ("reg", {"lambda_reg": 1e-2}, ["try a smaller one with lr=0.1, or less of what the method 'reg' adds: "
                                   "lambda_reg=0.01.", "A step moves item_embedding.weight by ",
                                   " times the gradient, so a penalty w/2 |x|^2 on it overshoots from w=0.0"],
     ["default"]),
    ("reg", {"lambda_reg": 1e4, "item_lr": "plain"}, ["adds: lambda_reg=10000."], ["default", "overshoots"]),
    ("kd", {"lambda_kd": 1.0, "lr": 1e30, "upload_clip": 1e9}, ["above its default: upload_clip=1e+09."],
     ["adds", "overshoots"]),
    ("ft", {"lr": 1e30}, ["with lr=1e+29."], ["default", "adds", "overshoots"])])
def test_a_divergence_names_all_settings_that_may_have_caused_it(method, settings, said, unsaid, tmp_path):
    """The method's own at any value, where it acts; a weight on rows whose learning rate is that of FedMF's."""
    with pytest.raises(RunFailed, match="training diverged") as caught:
        fb.run(method, "fedmf", results=tmp_path, progress=False, rounds=30, k_core=70, **settings)
    message = str(caught.value)
    assert [words for words in said if words not in message] + [words for words in unsaid if words in message] == []


@pytest.mark.parametrize("method, backbone, default, others", [
    ("ft", "fedmf", {"evaluate_every": 1}, [{"evaluate_every": 2}]),
    ("ft", "biasmf", {"loss": "bpr"}, [{"loss": "squared_error"}]),
    ("f3crec", "fedmf", {"repeated_positives": "every"}, [{"repeated_positives": "once"}]),
    ("f3crec", "fedmf", {"fold_in": 0}, [{"fold_in": 6}, *({"fold_in": 5, **more} for more in (
        {}, {"fold_in_rounds": 7}, {"cold_start": "mean"}, {"cold_start": "popularity"}))]),
    ("ft", "fedmf", {"cold_items": "none"}, [{"cold_items": "similar", "similar_items": 3}, *(
        {"cold_items": kind} for kind in ("untrained", "similar", "popularity", "fold_in"))])], ids=str)
def test_a_default_changes_no_hash_and_other_values_do(registry, method, backbone, default, others):
    usual, same, *found = [make_config(registry, method, backbone, "ml-100k", overrides=[("test", settings)])
                           for settings in ({}, default, *others)]
    assert same.hash == usual.hash and len({config.hash for config in (usual, *found)}) == 1 + len(others)
    assert all(config.settings[name] == value for settings, config in zip(others, found)
               for name, value in settings.items())
    for name in {"loss", "cold_items"} & default.keys():
        assert name not in usual.settings and usual.inactive[name] == "at its default"


@pytest.mark.parametrize("settings, message", [
    ({"evaluate_every": 0}, "'evaluate_every' .*found 0, accepted: a whole number at least 1"),
    ({"stream": "sessions", "repeated_positives": "once"}, "'repeated_positives'.*no effect with stream=sessions"),
    ({"cold_start": "mean"}, "'cold_start' .* has no effect without fold_in"),
    ({"fold_in_rounds": 7}, "'fold_in_rounds' .* has no effect .*without fold_in"),
    ({"fold_in": 5, "cold_start": "mean", "fold_in_rounds": 7}, "with cold_start=mean"),
    ({"fold_in": 5, "stream": "static"}, "'fold_in' .* with stream=static"),
    ({"fold_in": 5, "stream": "sessions"}, "with stream=sessions"),
    ({"similar_items": 3}, "'similar_items' .* has no effect"),
    ({"cold_items": "similar", "stream": "static"}, "no effect with stream=static"),
    ({"lr_later": 0.1, "stream": "static"}, "'lr_later'.*no effect with stream=static"),
    ({"server_optimiser": "momentum", "server_beta2": 0.9}, "'server_beta2'.*no effect with server_optimiser=momentum"),
    ({"aggregator": "trimmed_mean", "trimmed_share": 0.5}, "accepted: a number .* below 0.5")])
def test_settings_without_effect_and_out_of_range(registry, settings, message):
    with pytest.raises(UserError, match=message):
        make_config(registry, "f3crec", "fedmf", "ml-100k", overrides=[("test", settings)])
