"""The README's commands, the CI script and the help cannot drift apart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.app import main
from edgespec.version import __version__
from tests.processes import python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_block(mark: str) -> str:
    """The fenced block after a marker comment."""
    match = re.search(rf"^<!-- {mark} -->\n```\w*\n(.*?)^```$", README, re.S | re.M)
    assert match is not None, f"README.md has no block marked {mark}"
    return match[1]


def test_help_in_the_readme_is_the_real_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main(["--help"]) == 0
    assert readme_block("help") == capsys.readouterr().out


def test_every_command_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    words = re.findall(r"^  (\w+)  ", readme_block("help").split("Commands:")[1], re.M)
    assert len(words) == 9
    for word in words:
        command = [word, "get"] if word == "models" else [word]
        assert main([*command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert re.search(rf"Examples?: edgespec {' '.join(command)} ", shown), word


def test_ci_runs_exactly_the_readmes_command(tmp_path: Path) -> None:
    """The script, with every program it calls replaced by one that writes it down."""
    clone, programs = tmp_path / "clone", tmp_path / "bin"
    (clone / ".ci").mkdir(parents=True)
    programs.mkdir()
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (clone / ".ci" / "run").write_text(script, encoding="utf-8")
    (clone / "README.md").write_text(README, encoding="utf-8")
    recorder = f'#!/bin/sh\necho "$(basename "$0") $*" >> {tmp_path}/log\n'
    tools = clone / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text("")
    for path in [
        programs / n for n in ("python3", "pip", "cmake", "ctest", "pytest")
    ] + [tools / n for n in ("ruff", "mypy")]:
        path.write_text(recorder)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(["bash", str(clone / ".ci" / "run")], check=True, env=environment)
    log = (tmp_path / "log").read_text()
    called = [line.strip() for line in log.splitlines()]
    wanted = (
        readme_block("test").replace("'", "").replace(" && . .venv/bin/activate", "")
    )
    readme_lines = wanted.splitlines()
    assert called[: len(readme_lines)] == readme_lines
    assert [line.split()[0] for line in called[len(readme_lines) :]] == [
        "ruff",
        "ruff",
        "mypy",
    ]


def test_ci_fails_when_the_readmes_command_does(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (tmp_path / ".ci" / "run").write_text(script, encoding="utf-8")
    for readme, code in [
        ("<!-- test -->\n```sh\nfalse\necho on\n```\n", 1),
        ("no command\n", 1),
    ]:
        (tmp_path / "README.md").write_text(readme, encoding="utf-8")
        done = subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")], capture_output=True, check=False
        )
        assert done.returncode == code
        assert done.stdout == b""


def test_the_first_command_needs_no_extra() -> None:
    """Fetching and running a GGUF: no torch, no llama.cpp, no writers of formats."""
    assert re.search(r"pip install \.$", readme_block("chat"), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = project["dependencies"]
    names = {re.split(r"[<>=!; \[]", package)[0].lower() for package in packages}
    assert not names & {"torch", "transformers", "optimum", "llama-cpp-python"}
    assert not names & {"gguf", "onnx", "safetensors"}
    assert {"numpy", "onnxruntime", "tokenizers", "jinja2"} <= names


def test_native_models_load_no_foreign_runtime() -> None:
    """Start-up and memory of the first command are the engine's own."""
    code = """
import sys
import edgespec.cli.app, edgespec.loading, edgespec.conversation
import edgespec.targets.native
heavy = {"onnxruntime", "llama_cpp", "torch", "gguf", "onnx", "rich.progress", "http"}
heavy |= {"edgespec_export", "prompt_toolkit", "http.client"}
print(*sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(python(code), check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_every_dependency_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(r'^    "[\w-]+>=[^"]*",(.*)$', text, re.M)
    assert len(packages) >= 15
    assert all(re.fullmatch(r" +# \w.*", reason) for reason in packages)


def test_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {__version__}" in changelog


def test_files_the_readme_names_exist() -> None:
    for name in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / name).exists(), name
