"""The import graph: one direction, no cycle, and no library module that needs the command line."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("pmlip", "pmlip_bench")
    for file in (SOURCE / package).rglob("*.py")
}


def imported(module):
    """The modules that one imports anywhere in its text: at the top, inside functions, and by name at run time.

    Imports for type checkers count too, but for the public names of `pmlip`, which are imported on first use.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in named}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                found.add(argument.value)
    return {name for name in found if name in MODULES and name != module}


GRAPH = {module: imported(module) for module in MODULES if module != "pmlip"}  # which imports on first use alone


def test_the_graph_is_not_empty():
    assert "pmlip.methods.base" in GRAPH["pmlip.loading"]
    assert len(GRAPH) > 80


def test_there_is_no_cycle():
    finished, path = set(), []

    def visit(module):
        if module in finished:
            return
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        path.append(module)
        for other in sorted(GRAPH.get(module, ())):
            visit(other)
        finished.add(path.pop())

    for module in sorted(GRAPH):
        visit(module)


def reached(module):
    """All that a module imports, directly or not."""
    found, waiting = set(), [module]
    while waiting:
        for other in GRAPH.get(waiting.pop(), ()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def within(module, *packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_no_library_module_imports_the_command_line_or_the_benchmarks():
    for module in GRAPH:
        if within(module, "pmlip") and not within(module, "pmlip.cli", "pmlip.__main__"):
            assert not [other for other in reached(module) if within(other, "pmlip.cli", "pmlip_bench")], module


def test_the_flow_has_one_direction():
    """Noise, samples and scores know nothing of backbones; backbones know nothing of methods and training."""
    upper = ("pmlip.backbones", "pmlip.methods", "pmlip.training")
    for module in GRAPH:
        if within(module, "pmlip.noise", "pmlip.samples", "pmlip.scores", "pmlip.structures", "pmlip.losses"):
            assert not [other for other in reached(module) if within(other, *upper)], module
        if within(module, "pmlip.backbones"):
            assert not [other for other in reached(module) if within(other, *upper[1:])], module
