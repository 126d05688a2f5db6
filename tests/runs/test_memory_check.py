"""What the tables of a run take, what is available, the refusal before a run, and what is said when memory ends. A disk
that is full, or a limit on the size of files: one clear error with the path, and what was there stays."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, refused, same_numbers

from fedcl_bench.cli import main as command
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import OutOfMemory, UserError, ran_out
from fedcl_bench.core.files import replacing, write_atomically
from fedcl_bench.core.tuning import SIZES
from fedcl_bench.data.datasets import load_stream
from fedcl_bench.data.streams import prepared
from fedcl_bench.federation import round as rounds
from fedcl_bench.federation.cross_device import CrossDevice
from fedcl_bench.kernels import memory
from fedcl_bench.kernels.memory import Available, available
from fedcl_bench.runs import memory_check
from fedcl_bench.runs.config import make_config
from fedcl_bench.runs.memory_check import bytes_of_tables, ended, require
from fedcl_bench.runs.runner import execute
from fedcl_bench.toolbox.distillation import ranks_of
from fedcl_bench.training.list_trainer import BatchView

CPU = torch.device("cpu")
LAST, BEFORE = (943, 1152), (827, 1148)  # users and items of ML-100K's blocks 3 and 2


def federation(registry, ml100k, backbone, **settings):
    return make_config(registry, "ft", backbone, "ml-100k", overrides=[("test", settings)]).federation(ml100k)


@pytest.mark.parametrize("name, settings, of_pair, of_user, uploads", [
    ("fedmf", {}, 0, 32, 0), ("fedrap", {}, 32, 33, 0), ("fedncf", {}, 0, 97, 0),
    ("pfedrec", {"eval_item_table": "local"}, 32, 33, 1),
    ("gpfedrec", {}, 64, 32 + 65 * 32 + 33 * 16 + 17 * 8 + 9, 3)])
def test_tables_are_counted_exactly(registry, ml100k, name, settings, of_pair, of_user, uploads):
    """Three times those of the last block and once of the one before it, 4 bytes a number; and whole uploads, which a
    server that serves tables holds three of."""
    def numbers(users, items):
        return items * 32 + users * of_user + users * items * of_pair
    expected = 4 * (3 * numbers(*LAST) + numbers(*BEFORE) + uploads * 943 * 1152 * 32)
    assert bytes_of_tables(federation(registry, ml100k, name, **settings)) == expected
    assert bytes_of_tables(federation(registry, ml100k, name, precision="float64", **settings)) == 2 * expected


def test_mini_batches_count_scores_and_what_the_optimiser_keeps(registry):
    """Of one client that holds all sessions."""
    def tables(**more):
        settings = {"stream": "sessions", "min_session_length": 5, "min_sessions": 4, "topology": "central", **more}
        config = make_config(registry, "ft", "sasrec", "ml-100k", overrides=[("test", settings)])
        return config.federation(load_stream(config.source, config.stream))
    f = tables(optimiser="adam", batch_size=100)
    items = f.stream.steps[0].n_items
    parameters = sum(table.numel() for table in f.backbone.new_dense(0).values()) + items * f.backbone.settings.dim
    assert bytes_of_tables(f) == 4 * (6 * parameters + 3 * 100 * items)
    assert bytes_of_tables(f) - bytes_of_tables(tables(optimiser="sgd", batch_size=100)) == 4 * 2 * parameters
    assert "a smaller --set batch_size=N (now 100)" in str(ended(MemoryError(), f))


def lay(root, **files):
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_what_is_available(tmp_path):
    """The least of the machine's memory and every enclosing control group's limit, whose cached files count as free."""
    assert available(CPU, tmp_path) is None
    lay(tmp_path, proc__meminfo="MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert available(CPU, tmp_path) == Available(800 << 10, "available on this machine")
    inner = "sys/fs/cgroup/jobs/mine/"
    for name, content in (("proc/self/cgroup", "0::/jobs/mine\n"), (inner + "memory.max", "max\n"),
                          (inner + "memory.current", "7\n"), ("sys/fs/cgroup/jobs/memory.max", str(1 << 20)),
                          ("sys/fs/cgroup/jobs/memory.current", str(700 << 10)),
                          ("sys/fs/cgroup/jobs/memory.stat",
                           f"anon 5\ninactive_file {60 << 10}\nactive_file {40 << 10}\n")):
        lay(tmp_path, **{name: content})
    assert available(CPU, tmp_path) == Available(424 << 10, "of this process's limit of 1.00 MiB")
    lay(tmp_path, **{"sys/fs/cgroup/jobs/memory.current": str(2 << 20)})
    assert available(CPU, tmp_path).bytes == 0


def test_a_limit_of_addresses_counts(tmp_path, monkeypatch):
    """What is left is the limit without the pages that the process has, used or not."""
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (
        (3 << 30, 4 << 30) if kind == memory.resource.RLIMIT_AS else (-1, -1)))
    lay(tmp_path, proc__meminfo=f"MemAvailable: {8 << 20} kB\n",
        proc__self__statm=f"{(1 << 30) // memory.resource.getpagesize()} 1 1 1 0 1 0\n")
    assert available(CPU, tmp_path) == Available(2 << 30, "of this process's limit of 3.00 GiB, see ulimit -v")


def left(monkeypatch, number):
    monkeypatch.setattr(memory_check, "available", lambda device: number and Available(number, "available here"))


def test_a_run_that_does_not_fit_is_refused(registry, ml100k, monkeypatch):
    """By one byte, with the numbers and what helps; nothing is said where nothing is known."""
    f = federation(registry, ml100k, "fedrap", precision="float64")
    need = bytes_of_tables(f)
    for enough in (need, None):
        left(monkeypatch, enough)
        require(f)
    left(monkeypatch, need - 1)
    with pytest.raises(UserError) as error:
        require(f)
    assert f"are left (available here). The run's tables take {need / 2 ** 30:.2f} GiB (943 users, 1,152 items, " \
           f"float64).\nWhat helps: a smaller --set dim=N (now 32), --set precision=float32" in str(error.value)


@pytest.mark.parametrize("method, backbone, words", [
    ("ft", "session-transformer", "a smaller --set dim=N (now 50), a smaller --set max_length=N (now 50)"),
    ("recbole:BPR", "none", "a smaller --set embedding_size=N (now 64)"),
    ("ft", "recbole:BPR", "a smaller --set dim=N (now that of the model)")])
def test_settings_that_help_are_those_of_backbone_and_method(registry, ml100k, method, backbone, words):
    stream = {"stream": "sessions"} if backbone == "session-transformer" else {}
    config = make_config(registry, method, backbone, "ml-100k", overrides=[("test", stream)])
    assert f"What helps: {words}, a larger machine" in str(ended(MemoryError(), config.federation(ml100k)))


def test_what_does_not_fit_is_refused_before_anything_is_made_or_written(
        registry, ml100k, monkeypatch, tmp_path, capsys):
    """Rows of 10^9 numbers: 8 GB each; and by the command."""
    left(monkeypatch, 20 << 30)
    config = make_config(registry, "ft", "fedmf", "ml-100k", overrides=[("test", {"dim": 10 ** 9})])
    with pytest.raises(UserError, match="item tables alone take .* GiB .*\n.*a smaller --set dim=N .now 1000000000"):
        config.check(config.federation(ml100k))
    left(monkeypatch, 1 << 20)
    assert main(["--method", "pfedrec", "--set", "rounds=1", "--results", str(tmp_path / "results")]) == 2
    assert "not enough memory: 1.00 MiB are left (available here). The run's tables take" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("backbone, settings", [("fedmf", {"dim": 64}), ("fedrap", {})])
def test_users_that_fit_do(registry, ml100k, monkeypatch, backbone, settings):
    """A refusal says how many users there is room for: tables of that share of all would take no more."""
    f = federation(registry, ml100k, backbone, **settings)
    without = max(memory_check._of_step(f, memory_check._without_users(step)) for step in f.stream.steps)
    needed = bytes_of_tables(f)
    left(monkeypatch, (needed + without) // 2)
    with pytest.raises(UserError, match="\nWhat helps: .*\nAbout 471 of the users would fit.$"):
        require(f)
    left(monkeypatch, without)
    with pytest.raises(UserError) as refused:
        require(f)
    assert "would fit" not in str(refused.value)


def test_a_disk_without_room_for_checkpoints_is_refused_before_anything_is_written(monkeypatch, tmp_path, capsys):
    """Each holds two models of the last block and one of the block before, and two lie there while one is replaced."""
    takes = 2 * 4 * 32 * (2 * sum(LAST) + sum(BEFORE))
    words = ["--method", "ft", "--backbone", "fedmf", "--set", "rounds=1", "--results", str(tmp_path / "results")]
    monkeypatch.setattr(memory_check, "free_bytes", lambda path: takes - 1)
    assert main(words) == 2
    assert f"not enough room: {(takes - 1) / 2 ** 20:.2f} MiB are free, and two checkpoints of the run take " \
           f"{takes / 2 ** 20:.2f} MiB" \
        in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    monkeypatch.setattr(memory_check, "free_bytes", lambda path: takes)
    assert main(words) == 0


def test_scores_for_ranks_are_made_in_pieces(monkeypatch):
    """Of at most so many clients that their scores of all items are no more than the size; the ranks are the same."""
    scores, asked = torch.randn(17, 50), []
    clients = torch.tensor([16, 3, 5, 4, 0, 9, 1])
    items = torch.randint(50, (7, 4))
    view = object.__new__(BatchView)
    view._trainer = SimpleNamespace(n_items=50)
    monkeypatch.setattr(BatchView, "all_scores", lambda self, part: asked.append(len(part)) or scores[part])
    whole = view.ranks(clients, items)
    monkeypatch.setattr(SIZES, "ranked_scores", 3 * 50 + 49)
    assert torch.equal(view.ranks(clients, items), whole) and asked == [7, 3, 3, 1]
    assert torch.equal(whole, ranks_of(scores[clients], items))


TEXT = ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 3.00 GiB is "
        "free. Process 7 has 13.00 GiB memory in use. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.")


def too_large(kind):
    """An error as PyTorch, NumPy and the compiled kernels raise it."""
    if kind == "gpu":
        raise torch.OutOfMemoryError(TEXT)
    if kind == "torch":
        torch.empty(1 << 50)
    if kind == "numpy":
        np.empty(1 << 50)
    raise MemoryError("no memory for negatives")


@pytest.mark.parametrize("kind, words", [
    ("gpu", "out of GPU memory: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 16.00 "
            "GiB of which 3.00 GiB is free."),
    ("torch", "out of memory: Tried to allocate 4194304.00 GiB."), ("numpy", "out of memory: Unable to allocate"),
    ("kernels", "out of memory: no memory for negatives.")])
def test_what_is_said_when_memory_ends(registry, ml100k, kind, words):
    """What could not be allocated, what the tables take, what helps, and that nothing is lost."""
    with pytest.raises((RuntimeError, MemoryError)) as error:
        too_large(kind)
    f = federation(registry, ml100k, "fedmf")
    said = str(ended(error.value, f)).splitlines()
    assert ran_out(error.value) and len(said) == 4 and said[0].startswith(words)
    assert said[1] == f"The run's tables take {bytes_of_tables(f) / 2 ** 20:.2f} MiB (943 users, 1,152 items, float32)."
    assert said[2].startswith("What helps: a smaller --set dim=N (now 32), ")


def test_when_memory_ends_the_checkpoint_is_kept(registry, monkeypatch, tmp_path):
    """In training or validation; the next try goes on from it, with the same numbers."""
    config = make_config(registry, "kd", "fedmf", "ml-100k", overrides=[("test", {"rounds": 1, "k_core": 80})])
    stream = load_stream(config.source, config.stream)
    whole = execute(config, lambda: stream, tmp_path / "whole")
    for module, name in ((rounds, "trainer_of"), (CrossDevice, "validate")):
        usual, calls = getattr(module, name), []

        def failing(*arguments, **named):
            calls.append(name)
            if len(calls) != 3:
                return usual(*arguments, **named)
            return too_large if name == "trainer_of" else too_large("torch")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises(OutOfMemory, match="^out of memory: "):
                execute(config, lambda: stream, tmp_path / name)
            assert len(list(tmp_path.glob(f"{name}/runs/*/checkpoint.pt"))) == 1
            again = execute(config, lambda: stream, tmp_path / name)
            assert len(calls) == 3 + 2  # blocks 2 and 3
        same_numbers(again, whole)


@contextmanager
def files_of(size):
    """No file of this process grows beyond so many bytes; of bytecode Python would leave a part, so it writes none."""
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode


def save_tensor(path):
    with replacing(path) as file:
        torch.save(torch.zeros(10 ** 5), file)


@pytest.mark.parametrize("write", [save_tensor, lambda path: write_atomically(path, bytes(10 ** 5)),
                                   lambda path: write_atomically(path, bytes(5000))], ids=["torch", "large", "small"])
def test_a_file_that_does_not_fit(write, tmp_path):
    """Also where the bytes wait in a buffer until the end; nothing half written is left."""
    path = tmp_path / "kept.pt"
    path.write_bytes(b"before")
    with files_of(4096), pytest.raises(UserError) as error:
        write(path)
    assert str(error.value).startswith(f"no space left at {path} (File too large): it is not written.\n")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["kept.pt"]
    write(path)
    assert path.read_bytes() != b"before"


def test_a_run_whose_checkpoint_does_not_fit(tmp_path, capsys):
    """And goes on when there is space again."""
    run = ["--method", "ft", "--backbone", "fedmf", "--results", str(tmp_path), "--quiet"]
    run += [word for text in ("k_core=80", "rounds=1", "dim=8", "blocks=2") for word in ("--set", text)]
    with files_of(2048):
        assert main(run) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"run_bench.py: no space left at {tmp_path}") and len(said) == 2
    assert not list(tmp_path.rglob(".*.pt.*"))
    assert main(run) == 0


def test_prepared_data_that_does_not_fit(ml100k, tmp_path):
    with files_of(2048), pytest.raises(UserError, match="no space left at .*w.stream-1 "):
        prepared.save(ml100k, tmp_path / "w.stream-1")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_whatever_else_a_command_writes(monkeypatch, capsys, number):
    def full(arguments):
        raise OSError(number, os.strerror(number), "some/file.csv")
    monkeypatch.setattr(command, "parse", full)
    assert f"no space left at some/file.csv ({os.strerror(number)})" in refused(capsys, "list")


@pytest.mark.parametrize("error", [MemoryError(), ValueError("Error tokenizing data. C error: out of memory"),
                                   RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_before_a_run(monkeypatch, capsys, error):
    def full(arguments):
        raise error
    monkeypatch.setattr(command, "parse", full)
    assert main(["list"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("run_bench.py: out of memory (") and said[1].startswith("What helps: ")


ON_FULL_DISKS = """
import contextlib, io, subprocess, sys
from fedcl_bench.cli.main import main
disk, sizes = sys.argv[1], sys.argv[2:]
run = ["--method", "kd", "--backbone", "fedmf", "--results", disk + "/results", "--quiet", "--set", "k_core=80"]
run += [word for text in ("rounds=1", "dim=8", "blocks=2") for word in ("--set", text)]
for size in sizes:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=True)
    messages = io.StringIO()
    with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(io.StringIO()):
        status = main(run)
    print(size, status, messages.getvalue().replace("\\n", "|"))
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(run) == 0  # there is room again
    subprocess.run(["umount", disk], check=True)
"""


@pytest.mark.skipif(subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
                                   capture_output=True).returncode != 0 if shutil.which("unshare") else True,
                    reason="needs to mount a file system of its own")
@pytest.mark.parametrize("sizes", [[8, 64], pytest.param(list(range(4, 260, 8)), marks=pytest.mark.long)])
def test_a_run_on_a_disk_that_is_full(sizes, tmp_path):
    """Before the run or at whichever file it fills: lines that name the path; it goes on when there is room."""
    done = subprocess.run(["unshare", "-rm", sys.executable, "-c", ON_FULL_DISKS, str(tmp_path), *map(str, sizes)],
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        size, status, messages = line.split(" ", 2)
        said = messages.rstrip("|").split("|")
        before = f"results folder {tmp_path}/results: not enough room: " in said[0] and len(said) in (2, 3)
        refused = status == "2" and (before or "no space left at" in said[0] and len(said) == 2)
        assert not messages if status == "0" else refused, line
    assert len(done.stdout.splitlines()) == len(sizes)
