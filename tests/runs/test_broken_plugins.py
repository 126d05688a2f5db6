"""A plugin that is broken is listed with its file and line, and whatever it does, the others work."""

import re

import pytest
import torch

import fedcl_bench as fb
from fedcl_bench.cli.main import main
from fedcl_bench.core.errors import RunFailed, UserError
from fedcl_bench.evaluation import metrics
from fedcl_bench.runs.registry import discover

GOOD = '''
from fedcl_bench.plugin.method import Method

class Good(Method):
    name = "good"
    title = "does nothing"
'''
HOOK = GOOD.replace('"good"', '"mine"') + """    first_step = 0

    def check(self, step):
        deeper()

def deeper():
    {}
"""
JOB = ["run", "--method", "mine", "--backbone", "fedmf", "--set", "rounds=1", "--set", "k_core=80", "--quiet"]


def named(name: str) -> str:
    """A method of this name, written as Python code."""
    return GOOD.replace('"good"', name)


# What a file holds, and what is said of it.
BROKEN = {
    "latin": (GOOD.replace("does nothing", "na\xefve").encode("latin-1"), "line 6: SyntaxError"),
    "no_text": (named("3"), "line 4: method Good: its name is 3"),
    "slash": (named("'../x'"), "line 4: method Good: its name is '../x'"),
    "long": (named("'x' * 5000"), "(5000 characters)"),
    "escape": (named("'a\\x1b[2J'"), "its name is 'a\\x1b[2J'"),
    "untitled": (GOOD.replace('title = "does nothing"', "pass"), "line 4: method Good: its title is missing"),
    "leaves": ("import sys\nsys.exit(0)\n", "line 2: SystemExit"),
    "syntax": ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
    "nul": ("x = 1\0\n", "nul.py"),
    "imports": ("\n\nimport nothing_of_this_name\n", "line 3: ModuleNotFoundError"),
    "double": (GOOD + "import torch\ntorch.set_default_dtype(torch.float64)\n", "changes torch's default dtype,"),
    "patches": (GOOD + "from fedcl_bench.evaluation import metrics\nprint('{}')\n"
                       "metrics.NDCG.values = metrics.measure = lambda *given: None\n",
                "changes fedcl_bench.evaluation.metrics.NDCG.values, fedcl_bench.evaluation.metrics.measure, on which"),
    "settings": (GOOD + "    from dataclasses import make_dataclass\n"
                        "    Settings = make_dataclass('S', [('a', int, 3)])\n",
                 "line 4: method Good: its Settings cannot be read")}


def write(folder, name, content):
    (folder / f"{name}.py").write_bytes(content if isinstance(content, bytes) else content.encode())


def test_broken_plugins_are_listed_and_fail_only_when_chosen(tmp_path, capsys):
    for name, (content, _) in BROKEN.items():
        write(tmp_path, name, content)
    write(tmp_path, "good", GOOD)
    registry = discover([tmp_path])
    assert registry.get("method", "good").name == "good" and registry.get("method", "ft")
    assert registry.broken.keys() == BROKEN.keys()
    for name, (_, says) in BROKEN.items():
        assert says in registry.broken[name] and f"{tmp_path / name}.py" in registry.broken[name]
        assert len(registry.broken[name]) < 400 and "\n" not in registry.broken[name]
    assert main(["list", "--plugins", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "does nothing" in shown and all(says in shown for _, says in BROKEN.values()) and "\x1b" not in shown
    assert torch.get_default_dtype() is torch.float32 and metrics.NDCG.values.__name__ == "values"
    with pytest.raises(UserError, match="imports.py, line 3: ModuleNotFoundError.*nothing_of_this_name"):
        registry.get("method", "imports")
    assert main(["doctor", "--plugins", str(tmp_path), "--results", str(tmp_path)]) == 1
    assert "FIX" in capsys.readouterr().out


@pytest.mark.parametrize("does, says", [
    ("return 1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(0)", "SystemExit"),
    ("raise RuntimeError('\\x1b[2J\\nb' * 500)", r"RuntimeError: \\x1b")])
def test_an_error_of_a_hook_names_plugin_hook_and_line(tmp_path, capsys, does, says):
    write(tmp_path, "mine", HOOK.format(does))
    assert main([*JOB, "--plugins", str(tmp_path), "--results", str(tmp_path / "results")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.match(f"run_bench.py: method 'mine': check raised {says}", lines[0]) and len(lines) == 3
    assert f"{tmp_path}/mine.py, line 10, in check: deeper()" in lines[1]
    assert f"{tmp_path}/mine.py, line 13, in deeper: " in lines[2]


def test_grids_and_python_say_the_same_of_a_hook(tmp_path, capsys, same_process):
    write(tmp_path, "mine", HOOK.format("return 1 / 0"))
    assert main(["grid", "--methods", "mine", "--backbones", "fedmf", "--set", "rounds=1", "--set", "k_core=80",
                 "--plugins", str(tmp_path), "--results", str(tmp_path / "results")]) == 1
    out = capsys.readouterr().out
    assert "method 'mine': check raised ZeroDivisionError" in out and "mine.py, line 13, in deeper: return 1 / 0" in out
    with pytest.raises(RunFailed, match="method 'mine': check raised ZeroDivisionError") as caught:
        fb.run("mine", "fedmf", plugins=tmp_path, results=tmp_path / "results", progress=False, rounds=1, k_core=80)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_hook_that_ends_the_program_fails_the_run_of_a_grid(tmp_path, capsys):
    write(tmp_path, "mine", HOOK.format("__import__('os')._exit(0)"))
    assert main(["grid", "--methods", "mine", "--backbones", "fedmf", "--set", "k_core=80", "--plugins", str(tmp_path),
                 "--results", str(tmp_path / "results"), "--jobs", "1"]) == 1
    said = "".join(capsys.readouterr())
    assert "mine on fedmf" in said and "exit code 0 in the middle of its run" in said and "Traceback" not in said
