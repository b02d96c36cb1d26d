"""The installed wheel works by itself, from a folder that is not the checkout."""

from __future__ import annotations

import json

import pytest

from support.fresh_env import dependencies_of
from support.source_tree import shipped_modules

pytestmark = pytest.mark.packaging

FIND_BACKENDS = """
import json
from importlib.metadata import entry_points
from stevedore import DriverManager

group = "slotmirror.backends"
loaded = DriverManager(group, "cpu_ref").extensions[0].plugin
print(json.dumps([sorted(entry_points(group=group).names), loaded.__module__, loaded.name]))
"""

IMPORT_ALL = """
import importlib, json, sys

print(json.dumps([importlib.import_module(name).__file__ for name in sys.argv[1:]]))
"""

CONVERSATIONS = [
    ["What is a block?", "A fixed number of slots.", "And a slot?", "Room for one token."],
    ["What is a block?", "A fixed number of slots.", "Who frees it?", "The last request."],
]


def chat_file(folder):
    """A small chat trace: two conversations that share their first turn."""
    roles = ["user", "assistant"] * 2
    lines = [
        json.dumps(
            {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]}
        )
        for texts in CONVERSATIONS
    ]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_every_module_comes_from_the_wheel(fresh_env, tree, tmp_path):
    """All modules import with the declared dependencies alone, none from the checkout."""
    names = [f"slotmirror.{module.name}".rstrip(".") for module in shipped_modules(tree)]
    importable = [name for name in names if not name.endswith("__main__")]
    files = json.loads(fresh_env.run("python", "-c", IMPORT_ALL, *importable, cwd=tmp_path))
    assert len(files) == len(importable) > 0
    assert [file for file in files if not file.startswith(str(fresh_env.site_packages))] == []


def test_the_environment_holds_declared_dependencies_alone(fresh_env, tmp_path):
    """What only development needs cannot be imported there, or the tests here would prove less."""
    find = "from importlib.util import find_spec; print(*map(find_spec, ['pytest', 'hypothesis']))"
    assert fresh_env.run("python", "-c", find, cwd=tmp_path).split() == ["None", "None"]


def test_stevedore_finds_the_reference_backend(fresh_env, tmp_path):
    """The group lists our backends, each once, and stevedore loads cpu_ref under its name."""
    names, module, name = json.loads(fresh_env.run("python", "-c", FIND_BACKENDS, cwd=tmp_path))
    assert names == ["cpu_ref", "cuda", "npu", "simulated", "torch"]
    assert module.startswith("slotmirror.backends.cpu_ref")
    assert name == "cpu_ref"


def test_the_command_lists_the_backends(fresh_env, tmp_path):
    """``slotmirror backends`` runs and shows cpu_ref."""
    assert "cpu_ref" in fresh_env.run("slotmirror", "backends", cwd=tmp_path)


def test_the_command_replays_a_trace(fresh_env, tmp_path):
    """``slotmirror replay`` serves a small trace with hits, verifies it and writes a report."""
    trace, report_file = chat_file(tmp_path), tmp_path / "report.json"
    fresh_env.run(
        "slotmirror", "replay", trace, "--model", "fingerprint", "--json", report_file, cwd=tmp_path
    )
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert report["ok"] is True
    assert report["requests"] == 2 * len(CONVERSATIONS)
    assert report["with_caching"]["stages"]["thinker"]["hit_tokens"] > 0


def test_the_module_runs_as_a_command(fresh_env, tmp_path):
    """``python -m slotmirror`` is the same command."""
    assert "replay" in fresh_env.run("python", "-m", "slotmirror", "--help", cwd=tmp_path)


def test_dependencies_follow_markers_and_extras():
    """What a requirement leads to is found in full; extras and foreign platforms only on demand."""
    assert dependencies_of(["no-such-distribution; python_version < '3'"]) == set()
    assert "markdown-it-py" in dependencies_of(["rich"])
    assert "hypothesis" not in dependencies_of(["slotmirror"])
    assert "hypothesis" in dependencies_of(["slotmirror[test]"])
