"""The example backend: built, installed beside slotmirror, found by it, and conforming."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys

import pytest

from support import fresh_env as envs
from support.fresh_env import FreshEnv, dependencies_of
from support.source_tree import ROOT

pytestmark = pytest.mark.packaging

EXAMPLE = ROOT / "examples" / "backend-example"
SOURCE = EXAMPLE / "src" / "slotmirror_threadcopy" / "__init__.py"
CODE_LINES_MAX = 80

FIND = """
import json
from stevedore import DriverManager
from slotmirror.core.registry import list_backends, load_backend

loaded = DriverManager("slotmirror.backends", "threadcopy").extensions[0].plugin
listed = {backend.name: backend.distribution for backend in list_backends()}
print(json.dumps([loaded.__module__, type(load_backend("threadcopy")) is loaded, listed]))
"""


@pytest.fixture(scope="session")
def example_wheel(tmp_path_factory):
    """The wheel of a copy of the example."""
    copy = tmp_path_factory.mktemp("example") / "backend-example"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pyc*"))
    out = tmp_path_factory.mktemp("example_wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out)]
    done = subprocess.run(
        [*command, str(copy)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="session")
def env_with_example(wheel, example_wheel, tmp_path_factory):
    """A fresh environment with both wheels, pytest and hypothesis, as an author has it."""
    env = FreshEnv(tmp_path_factory.mktemp("example_env") / "env")
    env.install(wheel)
    for name in sorted(dependencies_of(["pytest", "hypothesis"])):
        envs._link(envs.distribution(name), env.site_packages)
    pip = [sys.executable, "-m", "pip", "--python", str(env.scripts / "python"), "install"]
    envs._run([*pip, "--no-index", "--no-deps", str(example_wheel)], env.folder)
    return env


def code_lines(source: str) -> int:
    """Lines of code: no blank lines, comments or docstrings."""
    lines = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and not _is_docstring(node)
        for line in range(node.lineno, _last_head_line(node) + 1)
    }
    return len(lines)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _last_head_line(node: ast.stmt) -> int:
    """The last line of the statement itself, without the statements inside it."""
    body = getattr(node, "body", None)
    if not body:
        return node.end_lineno or node.lineno
    return max(node.lineno, body[0].lineno - 1)


def test_lines_of_code_are_counted():
    """Docstrings, comments and blank lines are not code; a wrapped signature is."""
    assert code_lines('"""Text."""\n\n# why\nx = 1\n\n\ndef f(\n    a,\n):\n    return a\n') == 5


def test_the_example_is_small():
    """A whole backend in at most 80 lines of code."""
    assert code_lines(SOURCE.read_text(encoding="utf-8")) <= CODE_LINES_MAX


def test_the_example_is_found_through_stevedore(env_with_example, tmp_path):
    """The entry point of another distribution is listed and loaded, beside our own."""
    module, same, listed = json.loads(env_with_example.run("python", "-c", FIND, cwd=tmp_path))
    assert (module, same) == ("slotmirror_threadcopy", True)
    assert listed["threadcopy"] == "slotmirror-threadcopy"
    assert listed["cpu_ref"] == "slotmirror"
    assert "threadcopy" in env_with_example.run("slotmirror", "backends", cwd=tmp_path)


def test_the_example_passes_the_kit_as_a_command(env_with_example, tmp_path):
    """`slotmirror conformance threadcopy` names the distribution and finds no fault."""
    report_file = tmp_path / "report.json"
    env_with_example.run(
        "slotmirror", "conformance", "threadcopy", "--json", report_file, cwd=tmp_path
    )
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert report["backend"]["distribution"] == "slotmirror-threadcopy"
    assert report["ok"] is True
    assert report["failed"] == 0
    assert report["capabilities"]["async_copy"] is True


def test_the_example_passes_the_kit_in_pytest(env_with_example, tmp_path):
    """By its own test file, and by name with no file at all."""
    tests = tmp_path / "tests"
    shutil.copytree(EXAMPLE / "tests", tests)
    own = env_with_example.run("python", "-m", "pytest", "-q", tests, cwd=tmp_path)
    named = env_with_example.run(
        *("python", "-m", "pytest", "-q", "--pyargs", "slotmirror.conformance"),
        *("--backend", "threadcopy"),
        cwd=tmp_path,
    )
    for output in (own, named):
        assert " passed" in output
        assert "failed" not in output


def test_the_cache_serves_a_trace_on_the_example(env_with_example, tmp_path):
    """`slotmirror replay --backend threadcopy` verifies every output."""
    conversation = [
        {"role": role, "content": text}
        for role, text in [("user", "What is a slot?"), ("assistant", "Room for one token.")]
    ]
    trace = tmp_path / "chats.jsonl"
    trace.write_text((json.dumps({"messages": conversation}) + "\n") * 3, encoding="utf-8")
    report_file = tmp_path / "report.json"
    env_with_example.run(
        *("slotmirror", "replay", trace, "--backend", "threadcopy", "--model", "fingerprint"),
        *("--json", report_file),
        cwd=tmp_path,
    )
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert report["ok"] is True
    assert report["backend"] == "threadcopy"
