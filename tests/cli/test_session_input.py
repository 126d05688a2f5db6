"""Bad and unusual input with streams of sessions, as a user of the command line meets it."""

from pathlib import Path

import pandas as pd
import pytest

from fedcl_bench.cli.main import main

SESSIONS = ["--set", "stream=sessions", "--set", "min_session_length=5", "--set", "min_sessions=4"]
QUICK = ["--set", "rounds=1"]
SMALL = ["--set", "dim=8", "--set", "max_length=5"]


def job(method, backbone, *assignments):
    return ["--method", method, "--backbone", backbone, *(part for text in assignments for part in ("--set", text))]


# What a user should know before the run is said once.

def test_fewer_prototypes_than_neighbours(run_json):
    """108 clients: at most 107 are of others after the first round."""
    many = [*job("fcucr", "sasrec", "neighbours=108"), *SESSIONS, *QUICK, *SMALL]
    found, err = run_json(*many, "--seeds", "2")
    assert len(found["runs"]) == 2
    note = ("neighbours=108: after the first round other clients have uploaded 107 prototypes; as long as there are "
            "fewer, all of them are used.")
    assert " ".join(err.split()).count(note) == 1
    assert err.index("neighbours=108") < err.index("block 0: 1 rounds")
    _, err = run_json(*many, "--seeds", "2")
    assert "neighbours" not in err  # nothing was trained
    for assignments in (["neighbours=107"], ["neighbours=108", "without=iupr"]):
        _, err = run_json(*job("fcucr", "sasrec", *assignments), *SESSIONS, *QUICK, *SMALL)
        assert "after the first round" not in err


def test_all_prototypes_are_used_if_there_are_fewer(run_json):
    """So that any k above their number gives the same."""
    runs = [run_json(*job("fcucr", "sasrec", f"neighbours={k}", "window=1"), *SESSIONS, *SMALL, "--set", "rounds=2",
                     "--quiet") for k in (108, 1000)]
    assert all("after the first round" in err for _, err in runs)  # which is no progress
    results = [result["metrics"] for result, _ in runs]
    assert results[0] == results[1]


def test_what_noise_guarantees_is_in_the_record(capsys, run_json):
    """And shown with the result, also when that is an earlier one."""
    noisy = [*job("fcucr", "sasrec", "prototype_noise=0.1", "upload_noise=0.01"), *SESSIONS, *QUICK, *SMALL]
    result, _ = run_json(*noisy, "--quiet")
    formula, uploads = result["privacy"]["notes"]
    assert formula.startswith("prototype_noise=0.1: FCUCR's formula gives epsilon 48.45 for delta 1e-05.")
    assert formula.endswith("this is no formal guarantee.")
    assert uploads.startswith("upload_noise=0.01: ")
    assert uploads.endswith("it bears no formal guarantee and no epsilon.")
    assert main([*noisy, "--quiet"]) == 0
    text = capsys.readouterr().out
    assert text.count(formula) == 1 and text.count(uploads) == 1 and "from its record" in text


# Files.

HEADER = "user_id:token\titem_id:token\tsession_id:token\tinteraction_type:float\ttimestamp:float\tsplit:token\n"


def xing(users):
    """A file of each user's sessions, (items, split); the arguments of a run on it."""
    lines, clock = [], 0
    for user, sessions in enumerate(users):
        for number, (items, split) in enumerate(sessions):
            clock += 10_000
            lines += [f"u{user}\ti{item}\ts{number}\t1\t{clock + i}\t{split}\n" for i, item in enumerate(items)]
    Path("data/xing").mkdir(parents=True, exist_ok=True)
    Path("data/xing/xing.inter").write_text(HEADER + "".join(lines))
    return ["--dataset", "xing"]


def usual(user):
    """Two training sessions, one to validate and one to test on, of 90 items in all."""
    return [([(7 * user + 3 * number + i) % 90 for i in range(length)], split)
            for number, (length, split) in enumerate([(12, "train"), (9, "train"), (4, "valid"), (5, "test")])]


USUAL = [usual(user) for user in range(12)]


def test_users_with_one_session_only(run_json):
    """Of the file's split: they train on it again in every round and are neither validated nor tested; a session of one
    interaction is none, and its user does not exist."""
    arguments = xing([*USUAL, [(range(40), "train")], [([5], "train")]])
    found, _ = run_json(*job("fcucr", "sasrec"), *arguments, "--set", "rounds=3")
    curve, users = (pd.read_parquet(Path(found["record"]) / f"{name}.parquet") for name in ("rounds", "users"))
    assert curve.participants.tolist() == [13, 13, 13]
    assert users[users.metric == "hit@10"].groupby("tested_block").size().tolist() == [12]


@pytest.mark.parametrize("users, words", [
    ([[(range(40), "train")]] * 3, "no valid session has 2 interactions with items that anybody trains on"),
    ([*USUAL, [(range(90), "train")]],
     "user u12 has interacted with all 90 items, and 1 must be left")])
def test_users_that_no_run_can_take(refused, users, words):
    assert words in refused(*job("fcucr", "sasrec"), *QUICK, *xing(users))


def test_sessions_longer_than_the_encoders_length(run_json):
    """Only the last max_length + 1 interactions count: with others before them no number changes."""
    first = [[(range(40), "train")], [(range(40, 60), "train")]]  # numbers the items, and has some for negatives

    def metrics(before):
        users = []
        for user in range(12):
            tails = [[(5 * user + 3 * number + i) % 40 for i in range(16)] for number in range(4)]
            users.append([((before * tail)[:-1] + tail, split)  # of its own items, so that no other is known to it
                          for tail, split in zip(tails, ("train", "train", "valid", "test"))])
        return run_json(*job("fcucr", "sasrec"), *xing(first + users), "--set", "rounds=2")[0]["metrics"]

    assert metrics(0) == metrics(3)


def test_a_single_test_session_is_said_to_be_one(output, run_json):
    """A perfect score of one user is no result: the counts stand beside it, and its interval."""
    # All sessions of u0 have the same items. Nobody trains on those of the other users' last two.
    rows = [f"u{user}\ti{user * (1000 + 100 * session) + item}\t{10 ** 6 * session + item}\t{session}"
            for user in range(6) for session in range(3) for item in range(5)]
    Path("data/tiny").mkdir(parents=True)
    Path("data/tiny/tiny.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\tsession_id:token\n"
                                            + "\n".join(rows) + "\n")
    command = [*job("ft", "gru4rec"), "--dataset", "tiny", "--set", "stream=sessions", "--set", "min_sessions=3",
               "--set", "min_session_length=2", "--set", "topk=3", "--set", "valid_metric=hit@3", "--set",
               "candidates=all", *QUICK]
    result, _ = run_json(*command)
    assert result["tested"] == {"users": [1], "interactions": [1]}
    (note,) = result["notes"]
    assert note.startswith("block 0 has only 1 test user; 95 % intervals of the means: ")
    assert any(f"hit@3 {text}" in note for text in ("0.0250 to 1.0000", "0.0000 to 0.9750"))
    out = output(*command)
    assert note in out and [line.split() for line in out.splitlines() if line.strip().startswith("test ")][1:] == [
        ["test", "users", "1"], ["test", "interactions", "1"]]
