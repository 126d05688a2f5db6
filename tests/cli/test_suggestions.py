"""What a new user mistypes or leaves out gets an answer that leads on."""

from __future__ import annotations

import shutil

import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.data.recbole_files import bundled

RUN = ["--method", "ft", "--backbone", "fedmf"]


@pytest.fixture
def place(tmp_path):
    """A working folder with a dataset of one's own, a table, and a plugin that `new-plugin` wrote."""
    (tmp_path / "data" / "shop").mkdir(parents=True)
    shutil.copy(bundled("ml-100k") / "ml-100k.inter", tmp_path / "data" / "shop" / "shop.inter")
    (tmp_path / "orders.csv").write_text("who,what,when,stars\n1,2,2010-01-31,3\n2,2,2010-02-03,4\n")
    assert main(["new-plugin", "method", "my-ewc"]) == 0
    return tmp_path


@pytest.mark.parametrize("arguments, words", [
    (["--methode", "ft"], ["Did you mean '--method'?", "run_bench.py run --help"]),
    (["tables", "--tables", "2"], ["Did you mean '--table'?", "tables --help"]),
    (["data", "shop", "--blocks=3"], ["--set blocks=VALUE", "data show --help"]),
    (["run", "ft", "fedmf"], ["unrecognized arguments: ft fedmf", "as --method ft"]),
    (["report", "--format", "pdf"], ["unrecognized arguments: --format", "report --help"]),
    ([*RUN, "--dataset", "shpo"], ["Did you mean 'shop'?"]),
    ([*RUN, "--dataset", "orders.csv"], ["orders.csv: is no atomic file", "data convert --csv FILE"]),
    (["--method", "my-ewc", "--backbone", "fedmf"], ["my_plugins/my_ewc.py has one", "--plugins my_plugins"]),
    (["--method", "MY-EWC", "--backbone", "fedmf"], ["--plugins my_plugins"]),
    (["check", "my-ewc"], ["--plugins my_plugins"]), (["list", "my-ewc"], ["--plugins my_plugins"]),
    (["compare", "my-ewc", "ft", "--backbone", "fedmf"], ["--plugins my_plugins"]),
    (["--method", "my-ewk", "--backbone", "fedmf"], ["unknown method 'my-ewk'", "Known: "]),
    (["tables", "--table", "2", "--datasets", "shop"], ["unknown dataset", "has --rows, --columns or --methods"]),
    (["tune"], ["--methods is missing", "of `grid` also --file"]),
    (["report", "nowhere"], ["no folder nowhere; name a results folder"]),
])
def test_errors_lead_on(refused, place, arguments, words):
    found = refused(*arguments)
    assert all(word in found for word in words), found


def test_a_file_of_another_plugin_is_not_suggested(refused, place):
    shutil.move(place / "my_plugins" / "my_ewc.py", place / "my_plugins" / "renamed.py")
    assert "--plugins" not in refused("--method", "renamed", "--backbone", "fedmf")


def test_datasets_of_the_working_folder_are_listed(capsys, output, place):
    assert main(["list"]) == 0
    assert "shop data/shop/shop.inter" in " ".join(capsys.readouterr().out.split())
    out = output("list", "Shop")
    assert "dataset shop: your own" in out and "`data shop` shows its blocks" in out
    (place / "data" / "shop" / "shop.yaml").write_text("title: our shop\n")
    assert "dataset shop: our shop" in output("list", "shop")


def test_a_conversion_says_the_days_of_its_times(output, place):
    convert = ["data", "convert", "--csv", "orders.csv", "--user", "who", "--item", "what", "--time"]
    shown = output(*convert, "when", "visits")
    assert "2 interactions of 2 users and 1 items, from 2010-01-31 to 2010-02-03" in shown
    assert "all on 1970-01-01; is that the column of times?" in output(*convert, "stars", "wrong")


def test_run_takes_tuned_settings(capsys, refused, place):
    """Those of the results folder; --set lies over them."""
    (place / "results" / "my-tuned").mkdir(parents=True)
    (place / "results" / "my-tuned" / "shop-fedmf-ft.json").write_text('{"settings": {"lr": 0.25, "rounds": 7}}')
    quick = ["--dataset", "Shop", "--tuned", "--set", "rounds=1", "--set", "k_core=70"]
    assert main([*RUN, *quick]) == 0
    captured = capsys.readouterr()
    assert "tuned settings: of results/my-tuned" in captured.err
    (record,) = (place / "results" / "runs").glob("ft-fedmf-shop-*/run.json")
    assert '"lr": 0.25' in record.read_text() and '"rounds": 1,' in record.read_text()
    assert "no tuned settings for kd" in refused("--method", "kd", *RUN[2:], *quick)
