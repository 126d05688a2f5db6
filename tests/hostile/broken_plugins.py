"""Plugins that are written wrongly, in all the ways that were seen."""

GOOD = '''
from fedcl_bench.method import Method

class Good(Method):
    name = "good"
    title = "does nothing"
'''
LATIN = GOOD.replace("does nothing", "na\xefve").encode("latin-1")


def named(name: str) -> str:
    """A method of this name, written as Python code."""
    return GOOD.replace('"good"', name)


# What a file holds, and what is said of it.
BROKEN = {
    "latin": (LATIN, "line 6: SyntaxError"),
    "no_text": (named("3"), "line 4: method Good: its name is 3"),
    "slash": (named("'../x'"), "line 4: method Good: its name is '../x'"),
    "empty": (named("''"), "line 4: method Good: its name is ''"),
    "markup": (named("'x[/b]'"), "line 4: method Good: its name is 'x[/b]'"),
    "formula": (named("'=cmd|calc'"), "line 4: method Good: its name is '=cmd|calc'"),
    "script": (named("'<script>'"), "line 4: method Good: its name is '<script>'"),
    "long": (named("'x' * 5000"), "(5000 characters)"),
    "escape": (named("'a\\x1b[2J'"), "its name is 'a\\x1b[2J'"),
    "untitled": (GOOD.replace('title = "does nothing"', "pass"), "line 4: method Good: its title is missing"),
    "moving": (GOOD.replace("does nothing", "\\x1b[2J"), "its title is '\\x1b[2J'"),
    "leaves": ("import sys\nsys.exit(0)\n", "line 2: SystemExit"),
    "syntax": ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
    "nul": ("x = 1\0\n", "nul.py"),
    "imports": ("\n\nimport nothing_of_this_name\n", "line 3: ModuleNotFoundError"),
    "settings": (GOOD + "    from dataclasses import make_dataclass\n"
                        "    Settings = make_dataclass('S', [('a', int, 3)])\n",
                 "line 4: method Good: its Settings cannot be read")}
