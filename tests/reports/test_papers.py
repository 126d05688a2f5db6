"""The papers' definitions: the printed numbers, and the runs that rows stand for."""

import hashlib
from pathlib import Path

import pytest
from standing import FACTS

from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import UserError
from fedcl_bench.experiments import papers
from fedcl_bench.experiments.papers import Key, f3crec, fcucr, ffmsr
from fedcl_bench.runs.specs import RunSpec, expected_settings

OFFICE, RETAIL = ffmsr.DATASETS
NOT_PRINTED = {  # cells of our tables for which the paper prints nothing
    "f3crec": lambda key: key.row == "rlp2" and key.dataset == "hetrec2011-ml",
    "fcucr": lambda key: key.metric in ("all:hit@10", "all:ndcg@10", "upload_mib") or key.row == "without=both",
    "ffmsr": lambda key: key.column == "mean"}
NO_CELLS = {ffmsr.IMPROVEMENT}  # rows that the paper prints below a table, and we in a note


@pytest.mark.parametrize("name, digest", [("f3crec", "625bf792cd25c0e0"), ("fcucr", "2718fb909ef189a0"),
                                          ("ffmsr", "fa32e31e48ee497c")])
def test_printed_numbers_are_those_that_were_compared_with_the_papers(name, digest):
    """Number by number, with these bytes; whoever corrects one compares it with the paper and notes the new digest."""
    paper = papers.get(name)
    assert hashlib.sha256(Path(paper.__file__).with_suffix(".csv").read_bytes()).hexdigest().startswith(digest)
    for number, table in paper.TABLES.items():
        cells = set(table.keys())
        printed = {key for key in paper.printed()[number] if key.row not in NO_CELLS}
        assert printed <= cells and all(map(NOT_PRINTED[name], cells - printed)), number


def test_contradictions():
    """F3CRec: averages that are not those of their blocks, and changes that are not those of such averages. FFMSR: mean
    lengths that are not those of the printed counts."""
    found = f3crec.inconsistencies()
    averages = {place for place in found if place[1].column == "avg"}
    assert len(averages) == 10 and {(8, Key("hetrec2011-ml", "fedmf", "f3crec", metric, "avg"))
                                    for metric in ("ndcg@20", "recall@20")} < averages
    changes = [key for number, key in found if key.column == "change"]
    assert len(changes) == 6 and all((2, key._replace(column="avg")) in averages for key in changes)
    office, retail = (Key(dataset, "", "average_length", "", "D0") for dataset in (OFFICE, RETAIL))
    assert ffmsr.inconsistencies() == {(2, office): "the paper prints 7.84, and its counts give 7.83",
                                       (2, retail): "the paper prints 26.90, and its counts give 31.47",
                                       (3, Key(RETAIL, "ffmsr", "improvement", "ndcg@10", "D0")):
                                       "the paper prints 1.42, and its numbers give 1.46"}
    assert "OnlineRetail-Pantry 4.02/2.66, 3.21/1.73, 1.42/5.50" in " ".join(ffmsr.TABLES[3].notes)
    (known,) = [known for known in FACTS["ffmsr"].known if known.holds(2, office._replace(row="users"))]
    assert round(684_837 / 87_346, 2) == 7.84 and "87,346 users" in known.text


def test_numbers_that_several_tables_print_are_the_same():
    """FCUCR on SASRec in its Tables 2-5, its seconds in 4 and 5; FFMSR in its Tables 3-7."""
    printed = fcucr.printed()
    for dataset in fcucr.DATASETS:
        for metric in ("hit@10", "ndcg@10", "round_seconds"):
            key = Key(dataset, "sasrec", "fcucr", metric, "value")
            assert len({printed[number][key].text for number in (2, 3, 4, 5) if key in printed[number]}) == 1
    assert fcucr.inconsistencies() == {}
    printed = ffmsr.printed()
    for key, number in printed[4].items():
        assert {printed[other].get(key, number).value for other in (3, 6, 7, 8)} == {number.value}
    assert sum(cell.star for cell in printed[3].values()) == 16 and len(printed[8]) == 16
    assert all(printed[3][key].value == number.value for key, number in printed[5].items() if key.row == "ft")


def test_specs_and_added_methods_on_the_backbones_of_the_papers_own():
    specs = papers.specs
    assert len(specs("f3crec", [2])) == 72 and specs("f3crec", [1]) == []
    assert len(specs("f3crec", [2], datasets=["ml-100k"], backbones=["fedmf"], methods=["ft", "kd"])) == 2
    ablations = specs("f3crec", [3, 6], datasets=["ml-100k"])
    assert len(ablations) == 6 and RunSpec("f3crec", "fedmf", "ml-100k", (("without", "sc"),)) in ablations
    assert len(specs("f3crec", range(1, 9))) == len(set(specs("f3crec", range(1, 9)))) == 100
    assert {spec.settings[0][0] for spec in specs("f3crec", figures=[4])} == {"eps", "lambda_kd", "beta"}
    assert specs("fcucr", [2], datasets=["xing"]) == [
        *(RunSpec("ft", backbone, "xing") for backbone in fcucr.STATIC),
        *(RunSpec("ft", backbone, "xing", loss) for backbone in fcucr.WHOLE_SESSIONS
          for loss in ((), (("loss", "bce"),))),
        *(RunSpec(method, backbone, "xing") for backbone in fcucr.BACKBONES for method in ("ft", "fcucr"))]
    assert specs("fcucr", [4], datasets=["tmall"])[0] == RunSpec("fcucr", "sasrec", "tmall", (("window", 1),))
    assert len(specs("fcucr", range(1, 6), datasets=["xing"])) == 15 + 3 + 4 + 4
    assert specs("fcucr", figures=["2a"]) == specs("fcucr", figures=["early"])
    assert specs("fcucr", figures=["2b"]) == specs("fcucr", figures=["2c", "2bc", "probability"])
    counts = {name: len(specs("fcucr", figures=[name], datasets=["xing"])) for name in fcucr.FIGURES}
    assert counts == {"early": 9, "probability": 9, "k": 6, "lambda": 6, "noise": 14}
    assert {spec.settings for spec in specs("ffmsr", figures=["k"])} == {(("clusters", k),) for k in (30, 60, 90, 120)}
    assert {spec.settings[1] for spec in specs("ffmsr", figures=[6, "t"])} == {("clusters", 90)}
    added = fcucr.TABLES[2].adding(("mine",), "fcucr")
    assert [key.backbone for key in added.keys() if key.row == "mine" and key.dataset == "xing"][::5] == list(
        fcucr.BACKBONES)
    assert RunSpec("mine", "sasrec", "xing") in added.specs() and set(fcucr.TABLES[2].specs()) < set(added.specs())


@pytest.mark.parametrize("paper, dataset", [("f3crec", "ml-100k"), ("fcucr", "xing"), ("ffmsr", OFFICE),
                                            ("ffmsr", RETAIL)])
def test_every_setting_of_a_row_exists(paper, dataset, registry):
    definitions = papers.get(paper)
    runs = papers.specs(paper, definitions.TABLES, datasets=[dataset])
    runs += [spec for spec in papers.specs(paper, figures=definitions.FIGURES) if spec.dataset == dataset]
    for spec in runs:
        if registry.knows("backbone", spec.backbone):
            settings = expected_settings(registry, spec)
            assert paper != "fcucr" or settings["init"] == (
                "server" if spec.backbone in fcucr.STATIC else "per_client")


@pytest.mark.parametrize("row, backbone, dataset, expected", [
    ("ffmsr", "ffmsr", OFFICE, ("ffmsr",)), ("ffmsr", "ffmsr", RETAIL, ("ffmsr", ("clusters", 90))),
    ("without=gate", "ffmsr", OFFICE, ("ffmsr", ("without", "gate"))),
    ("clustering=kmeans++", "ffmsr", OFFICE, ("ffmsr", ("clustering", "kmeans++"), ("centroid", "plain"))),
    ("clustering=birch", "ffmsr", RETAIL, ("ffmsr", ("clustering", "birch"), ("clusters", 90))),
    ("text=pq", "ffmsr", RETAIL, ("ft", ("topology", "local"), ("text", "pq"))),
    ("ft", "unisrec", RETAIL, ("ft", ("topology", "local"))), ("ft", "ccdr", OFFICE, ("ft", ("topology", "central"))),
    ("semantics=true", "unisrec", OFFICE, ("ffmsr", ("semantics", True), ("text_layers", 3))),
    ("semantics=true", "recbole:S3Rec", RETAIL, ("ffmsr", ("semantics", True), ("clusters", 90))),
    ("pfcr", "vqrec", RETAIL, ("pfcr",))])
def test_rows_of_ffmsr_stand_for_runs(row, backbone, dataset, expected):
    assert ffmsr.row_spec(row, backbone, dataset) == RunSpec(expected[0], backbone, dataset, expected[1:])


@pytest.mark.parametrize("arguments, expected", [
    (("f3crc", [2]), "Did you mean 'f3crec'"), (("f3crec", [9]), "unknown table.*'9'"),
    (("f3crec", [3], (), ["ml-1m"]), "unknown dataset"), (("fcucr", [3], (), None, ["gru4rec"]), "unknown backbone"),
    # Neither may have no run of a name without saying so.
    (("f3crec", [3], ["3"], ["hetrec2011-ml"]), "unknown dataset of these tables of f3crec"),
    (("f3crec", [2], ["4"], None, None, ["ft"]), "unknown method of these figures of f3crec 'ft'.*\n.*Known: f3crec")])
def test_unknown_names(arguments, expected):
    with pytest.raises(UserError, match=expected):
        papers.specs(*arguments)
    with pytest.raises(UserError, match="unknown figure of fcucr '3'.*\n?.*2a"):
        papers.specs("fcucr", figures=["3"])


def test_a_table_that_cannot_be_built_says_why(capsys):
    assert main(["tables", "--paper", "ffmsr", "--table", "8"]) == 2
    assert "table 8 of ffmsr: it leaves out the users whom Office and Arts share" in capsys.readouterr().err
