"""What a user mistypes, leaves out or writes wrongly into a file is answered in a line or two that lead on, and nothing
is written."""

import shlex
import shutil
from pathlib import Path

import pytest

from fedcl_bench.cli.main import main
from fedcl_bench.core.settings import LARGEST
from fedcl_bench.data.files.recbole_files import bundled

FT, RUN = "--method ft --backbone fedmf", "--method f3crec --backbone fedmf"
LOG, SPLIT = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n", "block\tuser\titem\tsplit\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a dataset of one's own, a table, an atomic file far away, and a plugin that `new-plugin` wrote."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("data/shop", "far/away", "two", "odd"):
        (folder / name).mkdir(parents=True)
    shutil.copy(bundled("ml-100k") / "ml-100k.inter", folder / "data/shop/shop.inter")
    (folder / "orders.csv").write_text("who,what,when,stars\n1,2,2010-01-31,3\n2,2,2010-02-03,4\n")
    for name in ("far/away/mine", "two/a", "two/b", "odd/my data"):
        (folder / f"{name}.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(
            f"u{i % 20}\ti{i * 7 % 45}\t{i}\n" for i in range(300)))
    (folder / "split.tsv").write_text(SPLIT + "0\t1\t2\ttrain\n")
    assert main(["new-plugin", "method", "my-ewc", "--plugins", str(folder / "my_plugins")]) == 0
    return folder


@pytest.fixture
def place(made, tmp_path):
    """A copy of that folder, in which the test works."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def sessions(method, backbone, assignment=""):
    """A run on sessions of ML-100K."""
    words = ["stream=sessions", "min_session_length=5", "min_sessions=4", *assignment.split()]
    return f"--method {method} --backbone {backbone} " + " ".join(f"--set {word}" for word in words)


@pytest.mark.parametrize("command, words", [
    # names
    ("--method f3crc --backbone fedmf", ["unknown method 'f3crc'", "'f3crec'"]),
    ("--method ft,kd --backbone fedmf", ["--method: found 'ft,kd'", "grid --methods ft,kd"]),
    ("--method f3crec:without=cc --backbone fedmf", ["--method f3crec --set without=cc"]),
    ("--method ft --backbone fedfm", ["unknown backbone 'fedfm'", "'fedmf'"]),
    ("--backbone fedmf", ["--method is missing", "f3crec"]),
    (f"{RUN} --dataset ml-10k", ["unknown dataset 'ml-10k'", "'ml-100k'"]),
    (f"{RUN} --dataset lastfm-2k", ["lastfm-2k.inter", "--data-dir", "https://"]),
    ("data convert --table a.csv --session s --valid v.csv tea", ["--valid: needs --test"]),
    (f"{FT} --dataset shpo", ["Did you mean 'shop'?"]),
    ("data ml-1000k", ["'ml-1000k'", "'ml-100k'"]), ("list f3crc", ["'f3crc'", "'f3crec'"]),
    ("--method my-ewc --backbone fedmf", ["my_plugins/my_ewc.py has one", "--plugins my_plugins"]),
    ("--method MY-EWC --backbone fedmf", ["--plugins my_plugins"]),
    ("check my-ewc", ["--plugins my_plugins"]), ("list my-ewc", ["--plugins my_plugins"]),
    ("compare my-ewc ft --backbone fedmf", ["--plugins my_plugins"]),
    ("--method my-ewk --backbone fedmf", ["unknown method 'my-ewk'", "Known: "]),
    ("tables --table 2 --datasets shop", ["unknown dataset", "has --rows, --columns or --methods"]),
    # words and options
    ("lst", ["unknown command 'lst'", "'list'"]), ("f3crec fedmf", ["as --method f3crec --backbone fedmf"]),
    ("data covert --table log.csv --user a shop", ["unknown data command 'covert'", "Did you mean 'convert'?"]),
    (f"{RUN} --colour", ["--colour"]),
    ("--methode ft", ["Did you mean '--method'?", "run_bench.py run --help"]),
    ("tables --tables 2", ["Did you mean '--table'?", "tables --help"]),
    ("data shop --blocks=3", ["--set blocks=VALUE", "data show --help"]),
    ("run ft fedmf", ["unrecognized arguments: ft fedmf", "as --method ft"]),
    ("report --format pdf", ["unrecognized arguments: --format", "report --help"]),
    ("tune", ["--methods is missing", "of `grid` also --file"]),
    (f"{RUN} --seed -1", ["--seed", "'-1'"]), (f"{RUN} --device tpu", ["--device", "'tpu'", "cpu"]),
    (f"{FT} --seeds 99999999999", ["from 1 to 10000"]), (f"{FT} --threads 99999999", ["from 1 to 1024"]),
    (f"{FT} --seed 9223372036854775807 --seeds 2", ["seeds from 0 to 9223372036854775807"]),
    ("compare ft kd --backbone fedmf --blocks 0-99999999999", ["at most 9999"]),
    ("data synth x --users 90000000 --items 9999999 --interactions-per-user 99999", ["GB are free"]),
    ("data synth x --items 99999999 --blocks 1000", ["both multiplied"]),
    ("tune --methods ft --backbones fedmf --budget 99999999999", ["from 1 to 100000"]),
    # many runs
    *((f"grid {words}", [says]) for words, says in (
        ("--methods regg --backbones fedmf", "unknown method 'regg'"),
        ("--methods ft, --backbones fedmf", "accepted: methods with commas"),
        ("--methods ft", "--backbones is missing"),
        ("--methods ft,reg --backbones fedmf --set lambda_reg=1", "for ft on fedmf"),
        ("--methods reg --backbones fedmf --vary lambda_reg=1,-1", "found '-1', accepted: a number"),
        ("--methods reg --backbones fedmf --vary lambda_reg=1,,2", "--vary: found"),
        ("--methods reg --backbones fedmf --vary lambda_reg=1 --set lambda_reg=2", "which --set gives too"),
        ("--methods ft,reg:lambda_reg=1 --backbones fedmf --vary lambda_reg=2", "which reg has of its own"),
        ("--methods ft --backbones biasmf --tuned", "no tuned settings for ft on biasmf"),
        ("--methods ft --backbones fedmf --datasets ml100k --tuned", "unknown dataset 'ml100k'"),
        ("--methods ft --backbones fedmf --table 2", "--paper"), ("--paper f3crec", "--table is missing"),
        ("--file nowhere.yaml", "nowhere.yaml: cannot be read"))),
    ("grid --methods ft --backbones fedmf --datasets ml-100k,lastfm-2k", ["lastfm-2k", "--data-dir"]),
    *((f"{command} --paper f3crec --table 1 --dry-run", ["--table and --figure name needs no runs; name others"])
      for command in ("grid", "tune")),
    ("tune --methods kdd --backbones fedmf", ["unknown method 'kdd'"]),
    *((f"tune --methods kd --backbones fedmf {words}", [says]) for words, says in (
        ("--budget 0", "accepted: a whole number from 1"), ("--sampler tpes", "invalid choice: 'tpes'"),
        ("--seed 9223372036854775807", "seeds from 0"), ("--sampler grid --budget 5", "10 points, more than"),
        ("--set lamda_kd=1", "unknown setting (--set) 'lamda_kd'"), ("--datasets lastfm-2k", "--data-dir"),
        ("--table 2", "--paper"))),
    ("sensitivity ft --backbone biasmf", ["neither ft nor biasmf names ambiguities"]),
    *((f"sensitivity {words} --backbone fedmf", [says]) for words, says in (
        ("f3crec --format jpg", "format 'jpg'"),
        ("f3crec --metric ndgc@20", "Did you mean 'ndcg@20'"), ("f3crec --metric ndcg@7", "unknown metric 'ndcg@7'"),
        ("f3crc", "Did you mean 'f3crec'"), ("f3crec:etta=1", "'etta'"))),
    *((f"check {words}", [says]) for words, says in (
        ("", "no name"), ("ft --all", "a name and --all"), ("f3crek", "Did you mean 'f3crec'?"),
        ("ft --with fedmg", "Did you mean 'fedmf'?"))),
    *((f"{RUN} {words}", [says]) for words, says in (
        ("--log tensorbord", "found 'tensorbord', accepted: tensorboard, csv, wandb"), ("--log csv:", "found 'csv:'"),
        ("--log csv --log csv", "twice"), ("--shards 2", "--shards: needs --ray"),
        ("--honest-rounds 2", "--honest-rounds: needs --honest"),
        ("--ray local --shards two", "found 'two', accepted: a whole number from 1"))),
    # places
    ("list ndcg --with fedmf", ["--with: has an effect on methods and backbones"]),
    ("list ft --dataset ml-1000k", ["unknown dataset 'ml-1000k'", "Did you mean 'ml-100k'?"]),
    ("list ml-100k --all", ["--all: has an effect on methods and backbones"]),
    ("report --records nowhere", ["no folder nowhere; name a results folder"]),
    (f"{RUN} --config absent.yaml", ["absent.yaml", "cannot be read"]),
    *((f"{RUN} --{option} absent", ["absent", "not a folder"]) for option in ("plugins", "data-dir")),
    *((f"{FT} --dataset '{path}'", words) for path, words in (
        ("orders.csv", ["orders.csv: is no atomic file", "data convert --table FILE"]),
        ("far/none.inter", ["no such file"]), ("far/nothing", ["is not there"]), ("./far", ["holds no .inter file"]),
        ("two/", ["holds a.inter, b.inter", "name one of them"]),
        ("odd/my data.inter", ["found the name 'my data'", "letters, digits"]))),
    *((f"{command} --set split_file=split.tsv {more}", [words]) for command in (RUN, "data ml-100k")
      for more, words in (("--set blocks=3", "'blocks' (--set) has no effect with split_file=split.tsv"),
                          ("--data-dir .", "--data-dir has no effect with 'split_file'"))),
    # settings
    (f"{FT} --set eps=1", ["'eps'", "ft on fedmf"]),
    (f"{FT} --set blocks=100001", ["at most 10000"]),
    (f"{FT} --set lr=1 --set lr=2", ["found 'lr' twice, '1' and '2'"]),
    (f"{RUN} --set k_core=80 --set blocks=3000", ["block", "--set blocks=N"]),
    (f"{FT} --set candidate_draw=redraw --set candidates=sampled", ["'candidate_draw'", "with stream=blocks"]),
    (f"{FT} --set session_gap=10", ["'session_gap'", "no effect with stream=blocks"]),
    *((f"{RUN} --set {assignment}", words) for assignment, words in (
        ("lamda_kd=1", ["'lamda_kd'", "'lambda_kd'"]), ("lr", ["--set", "found 'lr'", "NAME=VALUE"]),
        ("lr=fast", ["'lr'", "found 'fast'", "a number above 0"]),
        ("rounds=2.5", ["'rounds'", "found '2.5'", "a whole number at least 1"]),
        ("client_ratio=1.5", ["'client_ratio'", "at most 1.0"]),
        ("inc_split=chrono", ["'inc_split'", "one of chronological, random"]),
        ("topk=5,x", ["'topk'", "a list of whole numbers"]), ("topk=1137", ["topk", "found 1137", "1136"]),
        ("valid_metric=ndgc@20", ["'ndgc'", "'ndcg'"]), ("top_n=1137", ["'top_n'", "found 1137", "1136 in block 0"]),
        ("k_core=200", ["no interaction is left", "200-core", "k_core"]),
        ("split_file=absent.tsv", ["split_file", "absent.tsv"]))),
    ("--method gpfedrec --set weighting=interactions", ["'weighting'", "plain mean of smoothed tables"]),
    ("--method ft --backbone fedmf --set stream=static --set init_from=best", ["no effect with a stream of one step"]),
    # sessions
    ("--method fcucr --backbone fedmf", ["method 'fcucr' needs a sequential backbone", "stream=sessions",
                                         "found 'fedmf'",
                                         "Backbones that fit: gru4rec, sasrec, session-transformer, tisasrec."]),
    (sessions("fcucr", "fedmf"), ["needs a sequential backbone", "found 'fedmf'"]),
    (sessions("fcucr", "miasrec"), ["representations that scores are inner products with",
                                    "Methods that fit: fedprox, ft."]),
    (sessions("fcucr", "session-transformer", "head_size=9"), ["'head_size' (--set) has no effect",
                                                               "one representation of a session"]),
    (sessions("ft", "sasrec", "topology=central output_embedding=private"), ["'output_embedding': found private"]),
    ("--method ft --backbone sasrec", ["backbone 'sasrec' is sequential", "--set stream=sessions", "--dataset xing"]),
    ("--method fcucr --backbone gru4rec --set stream=static", ["backbone 'gru4rec' is sequential",
                                                               "--set stream=sessions"]),
    ("--method ft --backbone none", ["method 'ft' needs a backbone; found none, accepted: biasmf, "]),
    ("--method ft --backbone gpfedrec --set attack=fedrecattack", [
        "adds up clients' changes", "Backbones that fit: biasmf, feddae, fedmf, fedncf, fedrap, ncf, pfedrec."]),
    (sessions("kd", "sasrec"), ["method 'kd' works on scores of item lists", "'sasrec'",
                                "Methods that fit: ader, central, central-joint, fcucr, fedprox, ft."]),
    (sessions("f3crec", "fedmf"), ["'f3crec' acts from a stream's second step on", "--set stream=blocks",
                                   "Methods that fit: alone, canonfedrec, ccd, central, central-joint, colr, "]),
    (sessions("ft", "pfedrec", "init=per_client"), ["setting 'init': found per_client, accepted: server with "
                                                    "'pfedrec'"]),
    (sessions("ft", "sasrec", "negatives=3"), ["setting 'negatives': found 3, accepted: 1"]),
    (sessions("ft", "sasrec", "heads=3"), ["'heads'", "found 3", "a divisor of dim=50"]),
    (sessions("ft", "sasrec", "topk=1395"), ["topk", "found 1395", "1394"]),
    (sessions("ft", "sasrec", "sampled_candidates=9"), ["topk", "found 10", "at most sampled_candidates, 9"]),
    (sessions("ft", "sasrec", "blocks=2"), ["'blocks'", "no effect with stream=sessions"]),
    *((sessions("fcucr", "sasrec", assignment), [f"'{assignment.split('=')[0]}'",
                                                 "no effect with a sequential backbone"])
      for assignment in ("batch_size=64", "tolerance=0.1", "negative_pool=untouched", "negative_draw=distinct",
                         "reset_private=true", "init_from=best")),
    (sessions("ft", "sasrec", "k_core=300"), ["300-core", "k_core"]),
    (sessions("ft", "sasrec").replace("min_sessions=4", "min_sessions=60"), ["no user has 60 sessions",
                                                                             "min_sessions=N"])])
def test_bad_commands(refused, made, monkeypatch, command, words):
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    message = refused(*shlex.split(command))
    assert all(word in message for word in words), message
    assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize("path, content, command, words", [
    ("job.yaml", "backbon: fedmf\n", "--method ft --config job.yaml", ["'backbon'", "Did you mean 'backbone'?"]),
    *(("job.yaml", content, f"{FT} --config job.yaml", words) for content, words in (
        ("method: [unclosed\n", ["job.yaml"]), ("- a\n- b\n", ["expected 'name: value' lines"]),
        ("datset: shop\n", ["unknown field in job.yaml 'datset'", "Did you mean 'dataset'?"]),
        ("patiense: 3\n", ["'patience'"]), ("seed: minus one\n", ["field 'seed'"]),
        ("backbone:\n", ["field 'backbone': found nothing, accepted: one value"]),
        ("rounds: 010", ["'rounds' (job.yaml): found '010', accepted: a whole number"]),
        ("lr: 1:30", ["found '1:30', accepted"]), (f"rounds: {LARGEST + 1}", [f"at most {LARGEST}"]),
        ("seeds: 0x10", ["found '0x10'"]), ("a: 1\nb: {c: 1, d: 2, c: 3}\n", ["'c' is there 2 times"]),
        ("[" * 999, ["is not valid YAML"]))),
    *(("data/ml-100k.inter", content, RUN, ["ml-100k.inter", *words]) for content, words in (
        ("", ["is empty"]), (LOG, ["has no rows"]),
        ("user_id:token\titem_id:token\trating:float\n1\t2\t3\n", ["'timestamp' is missing", "rating"]),
        ("user_id:token\tmovie:token\ttimestamp:float\n1\t2\t3\n", ["'item_id' is missing", "movie"]),
        (LOG + "1\t2\t3\t4\n\n1\t3\t4\n", ["line 4", "found 3 fields", "expected 4 fields"]),
        (LOG + "1\t2\t3\tyesterday\n", ["line 2", "'timestamp'", "'yesterday'", "number"]),
        (LOG + "1\t2\t3\t4\n1\t3\t3\t\n", ["line 3", "'timestamp'", "''"]),
        (LOG + "1\t2\t3\tnan\n", ["line 2", "'timestamp'", "'nan'"]),
        (LOG + "1\t2\t3\t1262304000\n1\t3\t3\t1262304000500\n1\t4\t3\t1262304001\n",
         ["'timestamp'", "found 2 times in seconds (as 1262304000) and 1 time in milliseconds (as 1262304000500)",
          "divide milliseconds by 1,000"]),
        (LOG + "1\t2\t3\t20100131\n1\t3\t3\t20100201\n", ["found dates, as 20100131, in all rows (2)", "convert"]),
        (LOG + "1\t2\tgood\t4\n", ["line 2", "'rating'", "'good'"]),
        (LOG + "\t2\t3\t4\n", ["line 2", "'user_id'", "an id"]),
        (LOG + "1\t2\t3\t4\n", ["no interaction is left of 1"]), (b"\xff\xfe\x00a\n\x00b", ["not UTF-8"]))),
    *(("split.tsv", content, f"{RUN} --set split_file=split.tsv --set topk=1 --set valid_metric=ndcg@1", words)
      for content, words in (
        ("block\tuser\titem\n0\t1\t2\n", ["'split' is missing"]),
        (SPLIT + "0\t1\t2\ttrain\n2\t1\t3\ttrain\n", ["'block' has 0, 2"]),
        (SPLIT + "0\t1\t2\tholdout\n", ["line 2", "'holdout'", "train, valid or test"]),
        (SPLIT + "0\t1\t2\ttest\n", ["block 0 has no training interaction (1 rows in all)."]),
        (SPLIT.replace("\t", ","), ["'block' is missing", "Separate its columns by tabs"]),
        (SPLIT + "0\t1\t2\ttrain\n0\t1\t3\ttest\n", ["block 0 has no valid", "fewer than 3 rows in it."]),
        (SPLIT + "0\t1\t2\ttrain\n0\t1\t3\ttest\n0\t1\t4\ttest\n", ["no valid", "a split file that has some"]),
        (SPLIT + "0\t1\t2\ttrain\n0\t1\t3\ttrain\n0\t1\t2\tvalid\n0\t1\t3\ttest\n", ["all 2 items"]))),
    *(("far/away/mine.yaml", content, "data far/away/mine.inter", words) for content, words in (
        ("USER_FIELD: who\n", ["unknown field", "mine.yaml", "'USER_FIELD'", "USER_ID_FIELD"]),
        ("load_col: {inter: [a]}\n", ["unknown field", "'load_col'"]),
        ("settings: [k_core]\n", ["field 'settings'", "a mapping"]),
        ("TIME_FIELD: 3\n", ["field 'TIME_FIELD'", "found 3", "a text"]),
        ("drop_events: view\n", ["field 'drop_events'", "a list"]), ("raw: here\n", ["field 'raw'", "a mapping"]),
        ("expected: {users: 3}\n", ["field 'expected', 'users': found 3, accepted: a list of numbers"]),
        ("expected: {users: [a]}\n", ["field 'expected', 'users': found ['a'], accepted: a list of numbers"]),
        ("settings: {k_cor: 3}\n", ["'k_cor'", "mine.yaml", "Did you mean 'k_core'"]),
        ("USER_ID_FIELD: item_id\n", ["USER_ID_FIELD and ITEM_ID_FIELD: found 'item_id' 2 times", "of its own"]),
        ("USER_ID_FIELD: who\n", ["column 'who' is missing", "found columns user_id"]),
        ("[1]\n", ["expected 'name: value' lines"]))),
    ("my_plugins/renamed.py", '    name = "my-ewc"\n', "--method renamed --backbone fedmf",
     ["unknown method 'renamed'"])])
def test_bad_files(refused, place, path, content, command, words):
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(*shlex.split(command))
    assert all(word in message for word in words) and len(message.partition(" Known: ")[0]) < 500, message
    assert "--plugins" not in message  # a file of another plugin is not suggested
    assert not Path("results").exists()


# What leads on


def test_datasets_of_the_working_folder_are_listed(output, place):
    assert "shop data/shop/shop.inter" in " ".join(output("list").split())
    out = output("list", "Shop")
    assert "dataset shop: your own" in out and "`data shop` shows its blocks" in out
    (place / "data/shop/shop.yaml").write_text("title: our shop\n")
    assert "dataset shop: our shop" in output("list", "shop")


def test_a_conversion_says_the_days_of_its_times(output, place):
    convert = ["data", "convert", "--csv", "orders.csv", "--user", "who", "--item", "what", "--time"]
    assert "2 interactions of 2 users and 1 items, from 2010-01-31 to 2010-02-03" in output(*convert, "when", "visits")
    assert "all on 1970-01-01; is that the column of times?" in output(*convert, "stars", "wrong")


def test_run_takes_tuned_settings(run_json, refused, place):
    """Those of the results folder; --set lies over them."""
    (place / "results/my-tuned").mkdir(parents=True)
    (place / "results/my-tuned/shop-fedmf-ft.json").write_text('{"settings": {"lr": 0.25, "rounds": 7}}')
    quick = "--backbone fedmf --dataset Shop --tuned --set rounds=1 --set k_core=80".split()
    result, err = run_json("--method", "ft", *quick)
    assert "tuned settings: of results/my-tuned" in err and result["dataset"] == "shop"
    assert (result["settings"]["lr"], result["settings"]["rounds"]) == (0.25, 1)
    assert "no tuned settings for kd" in refused("--method", "kd", *quick)
