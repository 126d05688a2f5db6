"""The rooms of the package: each imports only rooms below it, and nothing imports itself, however far round."""

import contextlib
import graphlib
import io
from pathlib import Path

import grimp
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).resolve().parents[1]


def test_each_room_imports_only_rooms_below_it():
    """The layers stand in setup.cfg; imports in functions and under TYPE_CHECKING count."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = lint_imports(config_filename=str(ROOT / "setup.cfg"), cache_dir=None)
    assert status == EXIT_STATUS_SUCCESS, said.getvalue()


def test_no_module_imports_itself_by_way_of_others():
    graph = grimp.build_graph("fedcl_bench", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
