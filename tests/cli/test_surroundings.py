"""What surrounds a command: a terminal of ASCII, an output that takes nothing."""

import io
import os
import stat
import subprocess
import sys

import pytest
from helpers import ROOT

from fedcl_bench.cli.main import main
from fedcl_bench.core.files import write_atomically

TABLES = ["tables", "--paper", "f3crec", "--table", "2", "--datasets", "ml-100k", "--backbones", "fedmf", "--records",
          str(ROOT / "results" / "published" / "f3crec")]


@pytest.mark.parametrize("words", [[*TABLES, "--format", "md"], [*TABLES, "--format", "text"], ["list"]])
def test_a_terminal_of_ascii_is_enough(words, monkeypatch, capsys):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(words) == 0 and capsys.readouterr().err.count("\n") <= 1
    out.flush()
    assert ("\\xb1" in out.buffer.getvalue().decode("ascii")) == (words[0] == "tables")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_is_full_is_said(registry):
    assert registry.plugins  # all are imported, so that the cache holds them

    def run(words, **options):
        return subprocess.run([sys.executable, str(ROOT / "run_bench.py"), *words], timeout=120, text=True, **options)
    with open("/dev/full", "w") as full:
        done = run(["list"], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "(No space left on device)" in done.stderr and len(done.stderr.splitlines()) <= 4
        assert run(["--method", "nobody"], stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("words, stream", [(["list"], "stdout"), (["lst"], "stderr")])
def test_an_output_that_is_closed(words, stream, monkeypatch, capsys):
    """Python then has None in its place."""
    monkeypatch.setattr(sys, stream, None)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("run_bench.py: standard output: is closed") == (stream == "stdout")
    if stream == "stderr":
        sys.stderr.close()


@pytest.mark.parametrize("threads, first", [("4,2", "4"), ("2", None), ("", None), ("many", "1")])
def test_threads_of_nested_levels(threads, first):
    """numexpr, which pandas imports, takes the first; threads that wait sleep soon, unless they are told to spin."""
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    for name in ("NUMEXPR_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        environment.pop(name, None)
    if threads == "2":
        environment["OMP_WAIT_POLICY"] = "ACTIVE"
    done = subprocess.run([sys.executable, "-c", "import os, sys, fedcl_bench; assert 'torch' not in sys.modules; "
                           "print(os.environ.get('NUMEXPR_NUM_THREADS'), os.environ.get('GOMP_SPINCOUNT'))"], text=True,
                          capture_output=True, env=environment, cwd=ROOT)
    assert done.stdout.split() == [str(first), "None" if threads == "2" else "5000"], done.stderr


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="is no file"):
            write_atomically(path, b"content")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and [*tmp_path.iterdir()] == [tmp_path / "pipe"]
