"""``check``: passes for what is shipped, and catches every cheating plugin by the property it violates."""

import functools
import json
from contextlib import nullcontext

import cheaters
import domain_cheaters
import pytest
import torch
from helpers import Here

from fedcl_bench import testing
from fedcl_bench.audit import honesty
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import PluginError, UserError
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.plugin import checks
from fedcl_bench.plugin.backbone import Backbone
from fedcl_bench.plugin.method import Method
from fedcl_bench.runs.registry import discover
from fedcl_bench.testing import assert_passed, check_backbone, check_method, check_plugin, domain_checks, properties
from fedcl_bench.testing.trials import is_of_domains, with_plugin
from fedcl_bench.testing.worlds import growing_stream

# (cheater, property that names it, parts of the evidence; of a hidden leak the hook and the table)
CHEATERS = [
    (cheaters.MeanOfNeighbours, "(a) other clients' data", "local_loss with other"),
    (cheaters.KnowsWhoAddsToSums, "(c) the server's knowledge", "aggregate_sums: ", "left something behind"),
    (cheaters.AddsForOthers, "(a) other clients' data", "end_local with other"),
    (cheaters.ReceivesTogether, "(a) other clients' data", "receive with other interactions, private 'user_emb"),
    (cheaters.ReadsOthersState, "(a) other clients' data", "replayed_items", "never left them"),
    (cheaters.WeighsByNumber, "(a) clients' numbers", "numbered the other way round, loss in round"),
    (cheaters.CountsOnce, "worlds of their own", "other clients, in which the items of half of the clients differ: ",
     "block 0, round 1: public", "(aggregate (cheaters.py:"),
    (cheaters.KnowsInLayers, "(c) the server's knowledge", "aggregate_dense: 'mlp.0.weight' differs"),
    (cheaters.KnowsTheLongest, "worlds of their own", "other clients, in which ", "(aggregate_updates (cheaters.py:"),
    (cheaters.WeighsPadding, "batched = one by one", "together and alone: ", "does a loss count padded slots, which",
     "There ``weights`` are 0 and ``batch.mask`` is False, of sessions ``batch.sequence.real``"),
    (cheaters.ForgetsTheMask, "batched = one by one", "together and alone: ", "does a loss count padded slots, which"),
    (cheaters.SumsOverClients, "batched = one by one", "is a mean or a sum taken over the first dimension, which is"),
    (cheaters.TrustsTheFirst, "batched = one by one", "aggregate_updates of the same clients in other chunks"),
    (cheaters.WeighsByLists, "(c) the server's knowledge", "aggregate_updates: 'item_embedding.weight' differs",
     "when clients have other interactions"),
    (cheaters.UploadsPrivate, "runs", "which is the private parameter 'user_embedding.weight'"),
    (cheaters.UploadsUndeclared, "runs", "sends 'norm', which uploads() does not declare"),
    (cheaters.UploadsOtherShape, "runs", "expected (18,) = (C, ...)"),
    (cheaters.UploadsInteractions, "(b) uploads", "marks exactly its training items"),
    (cheaters.CarriesPrivate, "(c) the server's knowledge", "end_step: 'mean' differs"),
    (cheaters.PassesPrivateAround, "(c) the server's knowledge", "aggregate: 'item_embedding.weight' differs"),
    (cheaters.RereadsThePast, "(d) past data", "training reads data of the past"),
    (cheaters.TrainsOnTest, "(e) evaluation data", "training reads what it is to be tested on"),
    (cheaters.RanksTestFirst, "(e) evaluation data", "rescore: with other validation, test"),
    (cheaters.Forgets, "resumes", "self.rounds_seen is no part of client_state or server_state"),
    (cheaters.KeepsInTheClass, "a new process", "does a class or module keep something?"),
    (cheaters.ReadsTheServer, "clients elsewhere", "apart from their server, as real clients are: loss in round 2 of "
     "step 0", "what `broadcasts` names"),
    (cheaters.WritesInPlace, "resumes", "was written to later: ", "change none in place"),
    (cheaters.Misspells, "names of hooks", "nothing reads 'local_los'; did you mean 'local_loss'?"),
    (cheaters.DeclaresANumber, "runs", "uploads returned {'loss': 1},\nexpected each upload's shape per client"),
    (cheaters.UploadsAFloat, "runs", "sends 'loss' = 0.5,\nexpected a tensor of shape (18,) = (C, ...)"),
    (cheaters.AnswersMoreAndMore, "runs", "end_round['more'] is a torch.float32 tensor of shape (18, 2),\n"
     "expected torch.float32 of shape (18, 1), as clients keep in client_state['more']"),
    (cheaters.CountsRounds, "runs", "server_state['rounds'] is 1,\nexpected a tensor"),
    (cheaters.KeepsOneNumber, "runs", "client_state['step'] is a torch.int64 tensor of shape (),\nexpected a tensor of "
     "shape (users, ...)"),
    (cheaters.PullsToTheServer, "clients elsewhere", "apart from their server, as real clients are: "),
    (cheaters.PullsToANumber, "runs", "pull returned 0.5 as 'to' of 'item_embedding.weight',\nexpected a floating "
     "tensor of 41 or fewer, as (24,) each"),
    (cheaters.PullsToNothing, "runs", "expected None or a Pull, with a weight from 0 and, of a private parameter, what "
     "to"),
    (cheaters.PenalisesNumbers, "runs", "row_penalty returned a torch.float64 tensor of shape", "a penalty per row"),
    (cheaters.DrawsRows, "items that arrive later", "two states of the global generators"),
    (cheaters.RanksOtherwise, "fast forms", "without score_all, by score alone, valid in round 1"),
    (cheaters.OneNumberARow, "declares its parameters", "expected a floating tensor of shape (7, d, ...)"),
    (cheaters.OneNumber, "declares its parameters", "expected a floating tensor of shape (d, ...), as (1,) of one"),
    (cheaters.CutOff, "trains every parameter", "local_loss returns terms that are cut off from all parameters"),
    (cheaters.ThrowsDice, "random numbers", "two states of the global generators"),
    (cheaters.IgnoresASetting, "reads its settings", "never read in 2 runs: unused"),
    (cheaters.NoHelp, "settings", "'strength' is not declared with setting(default, help)"),
    (cheaters.WrongShape, "runs", "method 'wrong-shape': local_loss returned a torch.float64 tensor of shape ()"),
    (cheaters.DropsATable, "runs", "expected the public item tables in their order: item_embedding.weight"),
    (cheaters.CountsMemories, "(c) the server's knowledge", "aggregate: ", "client_state['memory']"),
    (cheaters.DistilsCommon, "(a) other clients' data", "soft_targets", "client_state['memory']"),
    (cheaters.DistilsInSessions, "runs", "soft_targets returned lists to a sequential backbone,\nexpected None"),
    (cheaters.DistilsWithoutAList, "runs", "soft_targets returned a torch.float32 tensor of shape (3, 1),\nexpected a "
     "floating tensor of shape (3, 2) = (n, N): a probability per item of the lists"),
    (cheaters.CountsFlags, "(c) the server's knowledge", "aggregate: ", "client_state['active']"),
    (cheaters.CountsMarks, "(c) the server's knowledge", "aggregate: ", "client_state['seen']"),
    (cheaters.CountsInteractions, "(c) the server's knowledge", "aggregate: ", "interactions"),
    (cheaters.CountsOthers, "(a) other clients' data", "begin_round, local_loss", "interactions"),
    (cheaters.HashesOthers, "(a) other clients' data", "local_loss", "client_state['memory']"),
    (cheaters.CentreAtTheStart, "(a) other clients' data", "begin_step", "private 'user_embedding.weight'"),
    (cheaters.CentreAtTheEnd, "(a) other clients' data", "end_step", "private 'user_embedding.weight'"),
    (cheaters.AveragesAtTheEnd, "(a) other clients' data", "end_step", "private 'user_embedding.weight'"),
    (cheaters.LearnsFromRankings, "(c) the server's knowledge", "rescore: ", "'popular'"),
    (cheaters.WritesIntoTheModel, "(c) the server's knowledge", "begin_step: ", "private 'user_embedding.weight'"),
    (cheaters.RanksTogether, "(a) other clients' data", "rescore: ", "ranked together"),
    (cheaters.RanksByOthers, "(a) other clients' data", "rescore", "client_state['memory']"),
    (cheaters.KeepsTestItems, "(e) evaluation data", "end_step: ", "client_state['memory']"),
    (cheaters.KeepsThePast, "(d) past data", "end_step: ", "client_state['before']"),
    (cheaters.UploadsIds, "(b) uploads", "end_local: upload 'mask'", "holds the ids, divided by their number,"),
    (cheaters.MarksTheRest, "(b) uploads", "end_local: upload 'mask'", "marks exactly"),
    (cheaters.UploadsScaled, "(b) uploads", "upload 'number' has a number that is an entry of private 'user_embed"),
    (cheaters.UploadsThePast, "(b) uploads", "end_local: upload 'mask'", "its training items of step 1"),
    (cheaters.EncodesTogether, "(a) other clients' data", "represent: ", "ranked together"),
    (cheaters.SharesOfSessions, "(a) other clients' data", "represent", "interactions"),
    (cheaters.CountsSessions, "(c) the server's knowledge", "aggregate: ", "client_state['last']"),
    (cheaters.SeesTheTarget, "(e) evaluation data", "represent: ", "what it is to be tested on"),
    (cheaters.AddsDoubles, "runs", "RuntimeError: self and mat2 must have the same dtype"),
    (cheaters.UnknownRate, "declares its parameters", "learning_rates names 'bias.weight', a parameter that does not"),
    (cheaters.UserTableIsPublic, "declares its parameters", "expected a floating tensor of shape (7, d, ...) = (it"),
    (cheaters.NoGradient, "runs", "cut off from all parameters"),
    (cheaters.LeavesAClientOut, "runs", "without gradient"),
    (cheaters.StartsByPosition, "declares its parameters", "starts otherwise when it grows in two steps"),
    (cheaters.Overflows, "finite losses", "use softplus or logsigmoid"),
    (cheaters.ScoresTogether, "(a) other clients' data", "backbone 'scores-together': scores of client"),
    (cheaters.RemembersCommon, "(a) other clients' data", "backbone 'remembers-common' with other interactions"),
    (cheaters.CountsPadding, "padding does not matter", "session_vectors: 'scores' differs by"),
    (cheaters.CountsPaddingToo, "padding does not matter", "session_vectors: 'scores' differs by", "with no padding"),
    (cheaters.SeesTheNext, "no later position is seen", "encode: 'what it makes' differs by", "up to position 0"),
    (cheaters.ScoresItemsTogether, "padding does not matter", "with fewer items"),
    (cheaters.KnowsWhatOthersClick, "(a) other clients' data", "backbone 'knows-what-others-click' with other interac"),
    (cheaters.NeverReadsAParameter, "trains every parameter", "no training changes idle, and no score depends on it"),
    (cheaters.UnusedParameter, "trains every parameter", "no training changes bias, and no score depends on it"),
    (domain_cheaters.ForgetsRows, "runs", "'items.weight' has shape (", "in two domains,", "Name in rows"),
    (domain_cheaters.MakesNothing, "runs", "module returned NoneType,\nexpected a DomainModule"),
    (domain_cheaters.AnswersOne, "runs", "aggregate returned [{", "expected a list of 3 dictionaries"),
    (domain_cheaters.OneStage, "runs", "stages returned Stage(", "expected a tuple of Stage"),
    (domain_cheaters.WritesForUsers, "names of hooks", "'local_loss' is a hook of clients of one user each"),
    (domain_cheaters.KeepsInTheClass, "(a) other clients' data", "does a class or module keep something"),
    (domain_cheaters.CountsBatches, "resumes", "resumed within round 1"),
    (domain_cheaters.NeverTrains, "trains every parameter", "no training changes idle"),
    (domain_cheaters.MisnamesRows, "runs", "rows names 'mix.bias', of shape (8,)"),
    (domain_cheaters.LeavesAnItemOut, "runs", "(B, items): of all of the domain"),
    (domain_cheaters.UploadsUsers, "(b) uploads", "'more' of shape (13,) holds +3 numbers, in the shape (16,), when"),
    (domain_cheaters.UploadsPadded, "(b) uploads", "'more' of shape (99,) holds +3 numbers, in the shape (99,), when"),
    (domain_cheaters.RenamesAmongOthers, "(b) uploads", "'more' is the domain's own table of its items"),
    (domain_cheaters.UploadsSteps, "(b) uploads", "'more' is the domain's own table of its items"),
    (domain_cheaters.ChangesAfterFourCalls, "(c) the server's knowledge", "the method keeps something between calls"),
    (domain_cheaters.TellsTheServer, "(c) the server's knowledge", "the method keeps something between calls"),
    (domain_cheaters.TrainsItemsOfOthers, "(a) other clients' data", "whom the server answered the same"),
]


def of_domains(cls, **options):
    """A report on a plugin of domains beside partners that break nothing."""
    registry, plugin = with_plugin(cls)
    for other in (domain_cheaters.Mean, domain_cheaters.FedAvg):
        if other.name != cls.name:
            registry.plugins[other.kind, other.name] = with_plugin(other)[1]
    partner = "mean-of-items" if plugin.kind == "method" else "averages"
    return check_plugin(registry, plugin, partners=[partner], **options)


@pytest.mark.parametrize("cls,name,evidence", [(cls, name, evidence) for cls, name, *evidence in CHEATERS],
                         ids=lambda value: getattr(value, "name", None))
def test_every_cheater_is_caught(monkeypatch, cls, name, evidence):
    monkeypatch.setattr(honesty, "ForkedProcess", Here)
    if name != "runs":  # which ends with a second run, in single precision
        for module in (properties, domain_checks):
            monkeypatch.setattr(module, "require_numbers", lambda pair: None)
    monkeypatch.setattr(honesty, "WORLDS", {name: honesty.WORLDS[name] for name in ("as it is", "again",
                                                                                    "other clients")})
    if is_of_domains(cls):
        report = of_domains(cls, only=[name])
    elif issubclass(cls, Backbone):
        report = check_backbone(cls, partners=["ft"], only=[name])
    else:
        dense = cls.aggregate_dense is not Method.aggregate_dense
        partner = "sasrec" if cls.needs_sequential else "ncf" if dense else "fedmf"
        report = check_method(cls, partners=[partner], only=[name])
    found = {outcome.property: outcome.evidence for outcome in report.failures}
    assert name in found and all(part in found[name] for part in evidence), found
    with pytest.raises(AssertionError, match=f"'{report.name}' violates"):
        assert_passed(report)


class FedProx(Method):
    name, title, first_step = "fedprox", "a proximal term to what the server sent, whose size clients tell", 0
    broadcasts = ("item_",)

    def uploads(self, backbone, round_):
        return {"moved": ()}

    def begin_local(self, local):
        local.kept.update({name: value.detach().clone() for name, value in local.dense.items()})

    def distance(self, local):
        return sum((value - local.kept[name]).square().flatten(1).sum(1) for name, value in local.dense.items())

    def local_loss(self, batch):
        share = self.client_state.get("share")  # of clients that are new in a step too, zeros
        return 0.1 * self.distance(batch) * (1.0 if share is None else 1.0 + share[batch.users])

    def end_local(self, local):
        local.upload("moved", self.distance(local).sqrt())

    def end_round(self, round_, users, uploads):
        return {"share": uploads["moved"] / uploads["moved"].sum()}

    def row_penalty(self, name):
        sent = self.server_state.get(name)
        return None if sent is None else lambda rows, items: (items < len(sent)) * (
            rows - sent[items.clamp(max=len(sent) - 1)]).square().flatten(2).sum(2)

    def begin_step(self, step, model, backbone):
        self.server_state = dict(model.public)

    def aggregate(self, public):
        self.server_state = dict(public)
        return public


@pytest.mark.long
def test_an_honest_method_that_keeps_what_the_server_sent_passes():
    assert_passed(check_method(FedProx, partners=["ncf"], process=False))


@pytest.mark.parametrize("value, refused", [(torch.tensor([1]), False), (torch.tensor([1.75]), True),
                                            (torch.tensor([1.75]).half(), True), (torch.tensor([0.0]), False)])
def test_a_count_is_no_private_parameter(value, refused):
    """Though cut off to a whole number, or at zero, one has its values."""
    private = {"bias": torch.tensor([[1.75]], dtype=torch.float64), "zero": torch.zeros(1, 1, dtype=torch.float64)}
    with pytest.raises(PluginError, match="which is the private parameter 'bias'") if refused else nullcontext():
        checks.check_upload(cheaters.UploadsPrivate(None), {"count": ()}, "count", value, 1, private)


def test_honest_plugins_of_domains_pass():
    assert_passed(of_domains(domain_cheaters.Mean, process=False))
    # The same pair, of which the method is looked at.
    assert_passed(of_domains(domain_cheaters.FedAvg, only=["names of hooks", "settings", "reads its settings"]))


def test_slow_epochs_change_no_verdict(monkeypatch):
    """An epoch is told of after every batch."""
    monkeypatch.setattr(SIZES, "report_every", -1.0)
    assert_passed(of_domains(domain_cheaters.Mean, only=["a new process", "resumes", "(e) evaluation data"]))


def test_sums_of_squares_are_not_negative():
    assert check_method(cheaters.TakesRoots, partners=["fedmf"], only=["batched = one by one"]).passed


def test_some_properties_alone():
    assert check_backbone(cheaters.FedMF, partners=["ft"], only=["names of hooks", "finite losses"]).passed
    report = check_method(cheaters.IgnoresASetting, partners=["fedmf"], only=["threads"])
    assert report.passed and [verdict.property for verdict in report.verdicts] == ["runs", "threads"]
    assert not check_method(cheaters.DropsATable, partners=["fedmf"], only=["threads"]).passed
    with pytest.raises(UserError, match="unknown property 'thread'"):
        check_method(cheaters.DropsATable, partners=["fedmf"], only=["thread"])


@pytest.mark.parametrize("kind, name, partner", [("method", "fcucr", "sasrec"), ("backbone", "none", "popularity")])
def test_shipped_plugins_pass_with_one_partner(registry, kind, name, partner):
    """f3crec on fedmf is checked by the command below; the others take seconds and are in the test that follows."""
    assert_passed(check_plugin(registry, registry.get(kind, name), partners=[partner], process=False))


@pytest.mark.long
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in ("method", "backbone")
                                        for name in discover().names(kind)])
def test_every_shipped_plugin_passes_with_all_partners(registry, kind, name):
    assert_passed(check_plugin(registry, registry.get(kind, name), full=True))


def test_the_command_reports_and_returns_one(tmp_path, capsys, monkeypatch):
    (tmp_path / "dice.py").write_text('''
import torch
from fedcl_bench.plugin.method import Method


class Dice(Method):
    name = "dice"
    title = "draws from the global generator"

    def aggregate(self, public):
        return {name: table + torch.rand_like(table) for name, table in public.items()}
''')
    command = ["check", "dice", "--plugins", str(tmp_path), "--with", "fedmf"]
    with monkeypatch.context() as patch:
        patch.setattr(testing, "check_plugin", functools.partial(
            check_plugin, process=False, only=["random numbers", "(a) other clients' data"]))
        assert main(command) == 1
    out = capsys.readouterr().out
    assert "FAILED  random numbers" in out and "passed  (a) other clients' data" in out and "dice on fedmf" in out
    assert main(["check", "f3crec", "--with", "fedmf", "--json"]) == 0
    found, = json.loads(capsys.readouterr().out)
    assert found["passed"] and len(found["outcomes"]) == 23
    assert [o["property"] for o in found["outcomes"] if not o["passed"]] == [
        "padding does not matter", "no later position is seen", "fast forms"]  # no sequences, no score of its own


def test_a_plugin_that_cannot_be_imported_is_not_checked(tmp_path, capsys):
    (tmp_path / "my_broken.py").write_text("raise ValueError('at import')\n")
    for command, name in (("check", "my_broken"), ("check", "my-broken"), ("list", "my-broken"), ("check", "mine")):
        assert main([command, name, "--plugins", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "my_broken.py, line 1: ValueError: at import" in said and said.count(" ffmsr,") <= 1


@pytest.mark.parametrize("option,name,evidence", [
    ("--method", "wrong-shape", "method 'wrong-shape': local_loss returned a torch.float32 tensor of shape (),\n"
     "expected a floating tensor of shape ("),
    ("--backbone", "unknown-rate", "backbone 'unknown-rate': learning_rates names 'bias.weight', a parameter that does "
     "not exist;\ndeclared: item_embedding.weight, user_embedding.weight."),
])
def test_a_run_names_plugin_hook_and_expected_shape(tmp_path, monkeypatch, capsys, option, name, evidence):
    monkeypatch.chdir(tmp_path)
    source = cheaters.__file__
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cheaters.py").write_text(open(source).read())
    command = {"--method": "ft", "--backbone": "fedmf", option: name}
    arguments = [part for pair in command.items() for part in pair]
    assert main([*arguments, "--plugins", "mine", "--set", "k_core=80", "--set", "rounds=1", "--quiet"]) == 2
    assert evidence in capsys.readouterr().err


def test_every_block_of_the_stream_brings_users_and_items():
    steps = growing_stream().steps
    assert [(step.n_users, step.n_items) for step in steps] == [(18, 41), (20, 43), (22, 45)]
    assert all((step.split(kind).lengths > 0).any() for step in steps for kind in ("train", "valid", "test"))
