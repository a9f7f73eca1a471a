"""--draft options: what they mean for a model, and heads of every layout made GGUFs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from edgespec import models
from edgespec.bundle import Bundle, open_bundle
from edgespec.cli.app import main
from edgespec.config import Runtime, Speculation
from edgespec.drafts import Choice, parse_draft
from edgespec.drafts.available import available, find
from edgespec.drafts.conversion import as_gguf
from edgespec.drafts.fit import ENOUGH, Fit
from edgespec.errors import (
    EdgeSpecError,
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.gguf_header import open_gguf
from edgespec.gguf_model import read_gguf_model
from edgespec.loading import load, locate_draft, open_session
from edgespec_export import head_bundle, pipeline
from edgespec_export.head_bundle import HeadOptions
from tests.export import heads as tiny
from tests.export.checkpoints import Shape, gguf_checkpoint
from tests.export.test_head_gguf import llama_file

SHAPE = Shape(n_layers=tiny.LAYERS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_checkpoint(tmp_path_factory.mktemp("target") / "tiny.gguf", SHAPE)


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With a Medusa and two EAGLE heads, in this order."""
    work = tmp_path_factory.mktemp("bundle")
    heads = (
        tiny.medusa(rows=None).write(work / "m"),
        tiny.eagle(own_embedding=False).write(work / "e"),
        tiny.eagle3().write(work / "e3"),
    )
    options = HeadOptions(heads)
    pipeline.export(target, work / "out", check=False, heads=options)
    return open_bundle(work / "out")


# Words


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("auto", Choice("auto", None, True)),
        ("none", Choice("none")),
        ("ngram", Choice("ngram", None, True)),
        ("eagle", Choice("eagle")),
        ("eagle+ngram", Choice("eagle", None, True)),
        ("medusa:a/b+ngram", Choice("medusa", "a/b+ngram")),
        ("model+ngram:/x:y", Choice("model", "/x:y", True)),
    ],
)
def test_options_are_read(option: str, expected: Choice) -> None:
    assert parse_draft(option) == expected


@pytest.mark.parametrize(
    "option",
    ["", "eagle3", "eagle:", "auto:x", "auto+ngram", "ngram:x", "none+ngram", "Eagle"],
)
def test_other_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="draft: expected auto, none, ngram, eagle"):
        parse_draft(option)


def test_kinds_are_those_that_would_do() -> None:
    assert parse_draft("auto").kinds == parse_draft("eagle").kinds
    assert parse_draft("ngram").kinds == parse_draft("none").kinds == ()
    assert not parse_draft("auto").needs_head
    assert parse_draft("model:x").needs_head


# Heads a model has


def test_a_bundle_offers_its_heads(bundle: Bundle) -> None:
    found = {head.name: head for head in available(bundle)}
    assert list(found) == ["medusa", "eagle", "eagle3"]
    assert found["medusa"].path() == bundle.directory / "draft-medusa.gguf"
    assert found["medusa"].size == found["medusa"].path().stat().st_size
    # EAGLE-3 is the better one, wherever it stands.
    assert find(bundle, parse_draft("eagle")).name == "eagle3"  # type: ignore[union-attr]
    assert find(bundle, parse_draft("auto")).name == "eagle3"  # type: ignore[union-attr]
    assert find(bundle, parse_draft("eagle:eagle")).name == "eagle"  # type: ignore[union-attr]


def test_inspect_lists_drafts(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--no-measure", "--json"]
    assert main(["inspect", str(bundle.directory), *flags]) == 0
    found = json.loads(capsys.readouterr().out)["drafts"]
    assert [draft["option"] for draft in found] == [
        *("medusa:medusa", "eagle:eagle", "eagle:eagle3")
    ]
    assert {draft["origin"] for draft in found} == {"bundle"}
    assert main(["inspect", str(bundle.directory), "--no-measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("--draft eagle:eagle") for line in lines) == 2


def test_damaged_head_of_a_bundle_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle.directory, copy)
    path = copy / "draft-medusa.gguf"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(FormatError, match="draft-medusa.gguf: sha256"):
        load(copy, speculation=Speculation("medusa"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("model", "Tiny has no model draft; it has medusa:medusa, eagle:eagle"),
        ("eagle:nothing", "'nothing' is neither a file or directory nor an EAGLE head"),
        ("medusa:eagle3", "it has medusa:medusa, eagle:eagle, eagle:eagle3 and ngram"),
    ],
)
def test_a_head_that_is_not_there_names_what_is(
    bundle: Bundle, option: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        open_session(bundle, speculation=Speculation(option))


def test_a_gguf_alone_has_ngrams_only(target: Path) -> None:
    model = read_gguf_model(target)
    assert available(model) == []
    assert find(model, parse_draft("auto")) is None
    with pytest.raises(UsageError, match="it has ngram only; .*--draft eagle:PATH"):
        find(model, parse_draft("eagle"))


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("onnx", "head is a graph of the bundle: export .* --format onnx --head PATH"),
        ("llamacpp", "it has ngram only; to use an EAGLE head of yours"),
    ],
)
def test_backends_without_heads_say_so(target: Path, backend: str, words: str) -> None:
    model, runtime = read_gguf_model(target), Runtime(backend=backend)
    assert locate_draft(model, "auto", runtime) is None
    with pytest.raises(UsageError, match=words):
        locate_draft(model, "eagle", runtime)


# Heads that come with edgespec


@pytest.fixture
def shipped(
    target: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Cards with heads for the target, as the package has them."""
    cards = tmp_path / "cards"
    (cards / "known").mkdir(parents=True)
    lines = [
        'description = "tiny"\nlicence = "MIT"\norigin = "Org/Tiny"\n[generation]',
        f'[file]\nname = "tiny.gguf"\nsize = {target.stat().st_size}',
        f'sha256 = "{sha256(target.read_bytes()).hexdigest()}"',
        '[[sources]]\nhub = "Org/Tiny"\nrevision = "main"\nfile = "tiny.gguf"',
    ]
    for kind, name in (("medusa", "small"), ("eagle3", "good")):
        data = (bundle.directory / f"draft-{kind}.gguf").read_bytes()
        (cards / "known" / f"{name}.gguf").write_bytes(data)
        lines.append(
            f'[[drafts]]\nkind = "{kind}"\nfile = "{name}.gguf"\n'
            f'size = {len(data)}\nsha256 = "{sha256(data).hexdigest()}"'
        )
    (cards / "known.toml").write_text("\n".join(lines))
    known = {"known": models.read_card(cards / "known.toml")}
    monkeypatch.setattr(models, "cards", lambda: known)
    monkeypatch.setattr(models, "_cards_directory", lambda: cards)
    return cards


def test_shipped_heads_are_those_of_the_weights(
    shipped: Path, target: Path, tmp_path: Path
) -> None:
    renamed = tmp_path / "any-name.gguf"
    shutil.copy(target, renamed)
    for path in (target, renamed):
        assert [h.name for h in available(read_gguf_model(path))] == ["small", "good"]
    found = find(read_gguf_model(renamed), parse_draft("auto"))
    assert found is not None and not isinstance(found, Path)
    assert found.path() == shipped / "known" / "good.gguf"
    assert found.origin == "edgespec"


def test_shipped_heads_are_those_of_bundles_of_the_weights(
    shipped: Path, bundle: Bundle, target: Path, tmp_path: Path
) -> None:
    names = [head.name for head in available(bundle)]
    assert names == ["medusa", "eagle", "eagle3", "small", "good"]
    # The bundle's own come first.
    assert find(bundle, parse_draft("eagle")).origin == "bundle"  # type: ignore[union-attr]
    pipeline.export(target, tmp_path / "q8", quant="q8_0", check=False)
    names = [head.name for head in available(open_bundle(tmp_path / "q8"))]
    assert names == ["small", "good"]


def test_other_weights_have_no_shipped_heads(
    shipped: Path, target: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    data = bytearray(target.read_bytes())
    data[-1] ^= 1  # of the same size
    other.write_bytes(data)
    assert available(read_gguf_model(other)) == []
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(target.read_bytes() + b"\0")
    assert available(read_gguf_model(longer)) == []


def test_damaged_shipped_head_asks_for_a_new_installation(
    shipped: Path, target: Path
) -> None:
    path = shipped / "known" / "good.gguf"
    found = find(read_gguf_model(target), parse_draft("eagle"))
    assert found is not None and not isinstance(found, Path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FormatError, match="sha256: expected .*; reinstall edgespec"):
        found.path()
    path.write_bytes(data[:-1])
    with pytest.raises(FormatError, match=r"size: expected \d+, got .*; reinstall"):
        found.path()
    path.unlink()
    with pytest.raises(FormatError, match="good.gguf: missing; reinstall edgespec"):
        found.path()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("small.gguf", "../x.gguf"), r"drafts\[0\].file: expected a plain name"),
        (("small.gguf", "small.bin"), r"drafts\[0\].file: expected .* ending in .gguf"),
        (("small.gguf", "good.gguf"), r"drafts\[1\].file: expected .* of its own"),
        (('"medusa"', '"hydra"'), r"drafts\[0\].kind"),
    ],
)
def test_cards_name_what_is_wrong_with_a_draft(
    shipped: Path, change: tuple[str, str], words: str
) -> None:
    card = shipped / "known.toml"
    card.write_text(card.read_text().replace(*change))
    with pytest.raises(FormatError, match=words):
        models.read_card(card)


# Heads of yours


def test_a_head_of_yours_is_converted_once(
    target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    path = tiny.eagle3().write(tmp_path / "my head")
    model, choice = read_gguf_model(target), parse_draft(f"eagle:{path}")
    seen: list[str] = []
    made = as_gguf(path, model, choice, lambda what, *_: seen.append(what))
    assert "convert my head" in seen
    assert made.parent == edgespec_home / "heads"
    assert made.name.startswith("Tiny--my-head-")
    assert open_gguf(made).metadata["general.architecture"] == "eagle3"
    # Few weights stay as exact as they may be.
    kinds = {t.kind for t in open_gguf(made).tensors if len(t.shape) > 1}
    assert kinds == {"F16"}
    seen.clear()
    before = made.stat().st_mtime_ns
    assert as_gguf(path, model, choice, lambda what, *_: seen.append(what)) == made
    assert made.stat().st_mtime_ns == before
    assert not any(what.startswith("convert") for what in seen)
    # By content: a copy elsewhere is the same head, a changed one ousts it.
    shutil.copytree(path, tmp_path / "elsewhere" / "my head")
    assert as_gguf(tmp_path / "elsewhere" / "my head", model, choice) == made
    tiny.eagle3(seed=5).write(path)
    other = as_gguf(path, model, choice)
    assert other != made and not made.exists()
    assert [p for p in made.parent.iterdir() if p.suffix != ".lock"] == [other]


def test_a_conversion_that_fails_leaves_nothing(
    target: Path,
    tmp_path: Path,
    edgespec_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny.eagle3().write(tmp_path / "head")
    model, choice = read_gguf_model(target), parse_draft(f"eagle:{path}")
    made = as_gguf(path, model, choice)
    made.unlink()

    def full(*_args: object, **_options: object) -> None:
        raise OSError("9 requested and 5 written")  # numpy's, without errno

    with monkeypatch.context() as patched:
        patched.setattr(head_bundle, "write", full)
        words = f"{made.name}: cannot write: 9 requested and 5 written; make room"
        with pytest.raises(EdgeSpecError, match=re.escape(words)):
            as_gguf(path, model, choice)
    assert [p.suffix for p in made.parent.iterdir()] == [".lock"]
    left = made.parent / f".{made.stem}-killed"
    left.mkdir()
    (left / "half.gguf").write_bytes(b"GGUF")
    assert as_gguf(path, model, choice) == made
    assert not left.exists()


def test_directories_that_do_not_say_which_draft(
    bundle: Bundle, tmp_path: Path, edgespec_home: Path
) -> None:
    choice = parse_draft(f"eagle:{tmp_path}")
    with pytest.raises(ModelNotFoundError, match=r"no weights in it: expected .*\.pt"):
        as_gguf(tmp_path, bundle, choice)
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(bundle.directory / "draft-eagle.gguf", tmp_path / name)
    with pytest.raises(UsageError, match=r"has a.gguf, b.gguf: name one"):
        as_gguf(tmp_path, bundle, choice)


def test_a_large_head_is_made_small(
    target: Path,
    tmp_path: Path,
    edgespec_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgespec.drafts.conversion.SMALL", 1000)
    path = tiny.medusa(rows=None).write(tmp_path / "head", "medusa_lm_head.pt")
    made = as_gguf(path, read_gguf_model(target), parse_draft(f"medusa:{path}"))
    assert {t.kind for t in open_gguf(made).tensors if len(t.shape) > 1} == {"Q8_0"}


def test_a_gguf_is_used_where_it_lies(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "edgespec_export", None)
    path = tmp_path / "a.gguf"
    shutil.copy(bundle.directory / "draft-eagle.gguf", path)
    choice = parse_draft(f"eagle:{path}")
    assert find(bundle, choice) == path
    assert as_gguf(path, bundle, choice) == path
    assert as_gguf(tmp_path, bundle, choice) == path  # a directory of nothing else


def test_a_gguf_of_llama_cpp_is_used_where_it_lies(
    target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    path = llama_file(
        tmp_path / "theirs.gguf",
        lambda w: w.add_array("eagle3.target_layers", [1, 3, 4]),
    )
    with load(target, speculation=Speculation(f"eagle:{path}")) as session:
        assert session.engine.head is not None
        assert session.engine.head.path == path
        assert session.engine.head.info.taps == tiny.TAPS
    assert not (edgespec_home / "heads").exists()


def test_another_kind_than_said_is_refused(
    bundle: Bundle, target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    model = read_gguf_model(target)
    gguf = bundle.directory / "draft-eagle3.gguf"
    words = f"{gguf} is not for medusa; say --draft eagle:{gguf}"
    with pytest.raises(UsageError, match=words):
        as_gguf(gguf, bundle, parse_draft(f"medusa:{gguf}"))
    path = tiny.medusa().write(tmp_path / "head")
    with pytest.raises(UsageError, match=f"not for eagle; say --draft medusa:{path}"):
        as_gguf(path, model, parse_draft(f"eagle:{path}"))
    with pytest.raises(UsageError, match=f"not for eagle; say --draft model:{target}"):
        as_gguf(target, model, parse_draft(f"eagle:{target}"))


def test_a_head_for_another_target_is_refused(
    tmp_path: Path, edgespec_home: Path, target: Path
) -> None:
    path = tiny.eagle3().write(tmp_path / "head")
    wide = gguf_checkpoint(tmp_path / "wide.gguf", Shape(n_layers=8, hidden=96))
    with pytest.raises(FormatError, match="hidden size 64, the target has 96"):
        as_gguf(path, read_gguf_model(wide), parse_draft(f"eagle:{path}"))
    assert list((edgespec_home / "heads").glob("*.gguf")) == []


def test_conversion_without_the_extra_names_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "edgespec_export", None)
    path = tiny.eagle3().write(tmp_path / "head")
    with pytest.raises(UnsupportedError, match=r"pip install 'edgespec\[export\]'"):
        as_gguf(path, read_gguf_model(target), parse_draft(f"eagle:{path}"))


def test_a_directory_without_weights_is_refused(
    target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    with pytest.raises(ModelNotFoundError, match="no weights"):
        as_gguf(tmp_path, read_gguf_model(target), parse_draft(f"eagle:{tmp_path}"))


def test_conversion_needs_the_target_as_gguf(
    target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    pipeline.export(target, tmp_path / "out", formats=("packed",), check=False)
    path = tiny.eagle3().write(tmp_path / "head")
    with pytest.raises(UsageError, match="lacks target.gguf; export .* --head"):
        as_gguf(path, open_bundle(tmp_path / "out"), parse_draft(f"eagle:{path}"))


def test_removing_a_model_removes_what_was_converted_for_it(
    target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    path = tiny.eagle3().write(tmp_path / "head")
    model = replace(read_gguf_model(target), stem="smollm2-135m")
    made = as_gguf(path, model, parse_draft(f"eagle:{path}"))
    assert made in models.places_of("smollm2-135m")
    models.remove("smollm2-135m")
    assert not made.exists()


# Heads that do not fit


def test_a_head_that_does_not_fit_is_told_once() -> None:
    fit = Fit("eagle3", Path("my/head"), has_taps=True)
    fit.add((ENOUGH - 1, 3), (0, 0))
    assert fit.notice() == ""
    fit.add((1,), (1,))
    said = fit.notice()
    assert f"of {ENOUGH} rounds 1 accepted" in said
    assert "--head my/head --tap-convention" in said
    assert fit.notice() == ""
    assert "--tap" not in _told(Fit("medusa", Path("my/head")))
    assert "my/head" in _told(Fit("medusa", Path("my/head")))
    assert "MODEL" not in _told(Fit("eagle3", None, has_taps=True))


def test_a_head_that_fits_is_not_told_off() -> None:
    fit = Fit("eagle3")
    fit.add((), ())
    fit.add((1000, 100), (100, 0))
    assert fit.notice() == ""


def _told(fit: Fit) -> str:
    fit.add((ENOUGH,), (0,))
    return fit.notice()


def test_the_project_ships_cards_that_can_be_read() -> None:
    for card in models.cards().values():
        for draft in card.drafts:
            path = card.draft_path(draft)
            assert path.stat().st_size == draft.size
            assert sha256(path.read_bytes()).hexdigest() == draft.sha256
