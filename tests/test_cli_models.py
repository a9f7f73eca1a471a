"""`edgespec models` as a user meets it, and the exit codes of the command line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.bundle import open_bundle
from edgespec.cli import app
from edgespec.cli.app import main
from edgespec.errors import FormatError, ModelNotFoundError, UsageError
from edgespec.version import __version__
from tests.hub_server import Hub, serve
from tests.processes import python

REPO = "Org/Toy-GGUF"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, edgespec_home: Path) -> Iterator[Hub]:
    with serve() as running:
        running.repos[REPO] = {"toy-Q4_1.gguf": b"GGUF" + bytes(1000)}
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield running


def test_get_prints_the_path_alone_on_stdout(server: Hub, capsys: Output) -> None:
    assert main(["models", "get", f"hf:{REPO}"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).read_bytes() == server.repos[REPO]["toy-Q4_1.gguf"]
    assert "download toy-Q4_1.gguf" in err


def test_list_shows_known_and_fetched(server: Hub, capsys: Output) -> None:
    assert main(["models", "get", f"hf:{REPO}"]) == 0
    capsys.readouterr()
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "PRESENT", "SIZE", "DESCRIPTION"]
    assert lines[1].split()[:4] == ["smollm2-135m", "no", "98", "MB"]
    assert lines[2].split()[:2] == [f"hf:{REPO}", "yes"]


def test_rm_removes_all_of_a_model(
    server: Hub, edgespec_home: Path, capsys: Output
) -> None:
    main(["models", "get", f"hf:{REPO}"])
    bundles = edgespec_home / "bundles"
    kept = ["Org--Toy-GGUF-more-0123456789ab", "smollm2-135m-0123456789ab"]
    for name in [
        "Org--Toy-GGUF-0123456789ab",
        "Org--Toy-GGUF--q4_1-0123456789ab",
        *kept,
    ]:
        (bundles / name).mkdir(parents=True)
        (bundles / name / "x").write_bytes(bytes(500_000))
    assert main(["models", "rm", f"hf:{REPO}"]) == 0
    assert "removed 1 MB" in capsys.readouterr().err
    assert sorted(p.name for p in bundles.iterdir() if p.is_dir()) == sorted(kept)
    assert main(["models", "list"]) == 0
    assert REPO not in capsys.readouterr().out
    assert main(["models", "rm", f"hf:{REPO}"]) == 1
    assert "nothing of it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["models", "get", "nope"], 2, "no model named 'nope'; known: smollm2-135m"),
        (["models", "rm", "../x"], 2, "no model named '../x'"),
        (["models", "rm", "hf:../x"], 2, "expected hf:ORG/REPO"),
        (["models", "get", "smollm2-135m", "--offline"], 1, "not in the cache"),
        (["models", "build", "smollm2-135m", "--offline"], 1, "not in the cache"),
        (["models", "get", "hf:Org/None"], 1, "HTTP 404"),
        (["models", "get"], 2, "Missing argument"),
        (["models", "nope"], 2, "No such command"),
        (["--nope"], 2, "No such option"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(
    server: Hub, capsys: Output, arguments: list[str], code: int, message: str
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong"), 2),
        (FormatError("wrong"), 1),
        (ModelNotFoundError("wrong"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("edgespec.models.statuses", fail)
    assert main(["models", "list"]) == code


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("edgespec.models.statuses", fail)
    with pytest.raises(ZeroDivisionError):
        main(["models", "list"])


def test_version_and_help(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"edgespec {__version__}\n"
    assert main(["-h"]) == 0
    assert "Usage: edgespec" in capsys.readouterr().out
    assert app.app.info.no_args_is_help
    for command in ("chat", "generate"):
        assert main([command, "-h"]) == 0
        assert "[[" not in capsys.readouterr().out


def test_closed_streams_and_ascii_terminals_do_no_harm(edgespec_home: Path) -> None:
    code = (
        "from edgespec.cli.app import main\n"
        "assert main(['models', 'list']) == 0\n"
        "print('\\N{PARTY POPPER}')\n"
        "assert main(['chat', 'nothing']) == 2\n"
    )
    for close in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        done = subprocess.run(
            ["sh", "-c", f'"$@" {close}', "sh", *python(code)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert ("no model" in done.stderr) == ("2>&-" not in close)
        assert done.stdout.endswith("?\n") == (not close.startswith(">&-"))


def test_refusals_of_the_system_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def fail() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("edgespec.models.statuses", fail)
    assert main(["models", "list"]) == 1
    assert capsys.readouterr().err == "edgespec: /some/file: Permission denied\n"


def test_closed_pipe_is_quiet(edgespec_home: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "edgespec", "models", "list"],
            cwd=edgespec_home.parent,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b""


def test_help_is_light() -> None:
    code = (
        "import sys; from edgespec.cli.app import main; main(['--help']);"
        "heavy = {'numpy', 'onnxruntime', 'onnx', 'torch', 'prompt_toolkit'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(python(code), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_build_makes_the_bundle_of_the_real_model(
    smollm2_gguf: Path, capsys: Output
) -> None:
    assert main(["models", "build", "smollm2-135m", "--offline"]) == 0
    out, _ = capsys.readouterr()
    bundle = open_bundle(Path(out.strip()))
    assert set(bundle.manifest.quantisation) == {"gguf"}
    assert {entry.licence for entry in bundle.manifest.weights} == {"Apache-2.0"}
    assert {entry.origin for entry in bundle.manifest.weights} == {
        "hf:HuggingFaceTB/SmolLM2-135M-Instruct"
    }
    for name in bundle.manifest.files:
        assert bundle.path_of(name).is_file()
    assert os.path.samefile(bundle.path_of("target.gguf"), smollm2_gguf)
