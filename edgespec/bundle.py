"""From a MODEL argument to its files: fetched, and made a bundle of, on first use.

The names of the bundle's own modules are here too: `manifest` states the format,
`bundle_files` opens, checks and writes.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec import gguf_header, gguf_model, hub, models, tokenizer_gguf
from edgespec.bundle_files import (
    Bundle,
    describe_file,
    open_bundle,
    write_manifest,
)
from edgespec.cache import home, locked
from edgespec.errors import (
    EdgeSpecError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.gguf_model import GGUFModel, read_gguf_model
from edgespec.manifest import (
    CHAT_TEMPLATE,
    FORMAT_VERSION,
    MANIFEST,
    TARGETS,
    TOKENIZER,
    Architecture,
    CheckEntry,
    Container,
    FileEntry,
    Generation,
    Manifest,
    OnnxEntry,
    TokenizerEntry,
    WeightsEntry,
)
from edgespec.progress import Progress, silent

__all__ = [
    "Architecture",
    "Bundle",
    "CheckEntry",
    "Container",
    "FileEntry",
    "Generation",
    "Manifest",
    "Model",
    "OnnxEntry",
    "TokenizerEntry",
    "WeightsEntry",
    "describe_file",
    "open_bundle",
    "resolve",
    "write_manifest",
]

# A bundle, or a .gguf file that serves as one.
Model = Bundle | GGUFModel


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a bundle is made of, and what it says of that."""

    path: Path
    name: str
    origin: str
    sha256: str | None = None
    licence: str | None = None
    quant: str | None = None


def resolve(
    model: str, *, offline: bool = False, progress: Progress | None = None
) -> Model:
    """The files that MODEL means.

    MODEL is a name of `models/`, `hf:ORG/REPO[:QUANT]`, a bundle's directory or a .gguf
    file, looked for in this order ("./NAME" is always a path). A GGUF that was fetched
    becomes a bundle in the cache, its weights linked, not copied; one of shards, or of
    yours, is used where it lies. A safetensors checkpoint is exported into the cache,
    without the check that `edgespec export` makes.

    Raises:
        ModelNotFoundError: no such path, or no source could be reached.
        UsageError: neither a path nor a known name.
        FormatError, UnsupportedError: a GGUF whose words cannot be read.
        UnsupportedError: exporting is needed and the `[export]` extra is missing.
    """
    report = progress or silent
    if model.startswith("hf:"):
        return _from_hub(hub.parse_reference(model), offline, report)
    if model in models.cards():
        return _from_card(models.card(model), offline, report)
    if not model:
        raise UsageError("MODEL is empty; 'edgespec models list' shows names")
    path = Path(model).expanduser()
    if path.is_dir():
        return open_bundle(path)
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf_model(path)
    if path.exists():
        raise UsageError(
            f"{path}: expected a bundle directory or a .gguf file; "
            "a checkpoint directory is exported with: edgespec export DIR -o OUT"
        )
    if "/" in model or path.suffix:
        raise ModelNotFoundError(f"{path}: no such file or directory")
    raise UsageError(
        f"no model and no directory is called {model!r}; known models: "
        f"{', '.join(models.cards())}; any other: hf:ORG/REPO[:QUANT]"
    )


def exporter_key() -> str:
    """Digest of the exporter's code, so that a new version makes its bundles anew."""
    spec = importlib.util.find_spec("edgespec_export")
    if spec is None or not spec.submodule_search_locations:
        raise EdgeSpecError("edgespec_export is missing; reinstall edgespec")
    package = Path(spec.submodule_search_locations[0])
    files = sorted(package.rglob("*.py"))
    return _digest_of((path.relative_to(package).as_posix(), path) for path in files)


def reader_key() -> str:
    """Digest of the code that makes a bundle of a GGUF as it is."""
    files = [
        Path(module.__file__ or "")
        for module in (gguf_header, gguf_model, tokenizer_gguf)
    ]
    code = _digest_of((path.name, path) for path in files)
    return f"{FORMAT_VERSION} {code}"


def _digest_of(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _from_card(card: models.Card, offline: bool, progress: Progress) -> Model:
    def make(directory: Path) -> None:
        path = models.fetch_card(card, offline=offline, progress=progress)
        origin, file = f"hf:{card.origin}", card.file
        checkpoint = Checkpoint(path, card.name, origin, file.sha256, card.licence)
        _link(checkpoint, directory, progress)

    return _cached(card.name, f"{card.file.sha256}\0{reader_key()}", make)


def _from_hub(reference: hub.HubReference, offline: bool, progress: Progress) -> Model:
    # A commit fetched before is used without asking; `models get` looks for newer.
    listing = hub.saved_listing(reference) or hub.refresh(reference, offline)
    files = hub.choose(listing, reference.quant)
    name, origin = reference.repo.partition("/")[2], f"hf:{reference.repo}"
    stem = models.bundle_stem(reference.repo)
    if reference.quant:
        stem += f"--{reference.quant.lower()}"
    is_gguf = files[0].endswith(".gguf")
    if is_gguf and len(files) > 1:
        path = hub.present(reference, listing, files)
        if path is None:
            got = hub.obtain(reference, offline=offline, progress=progress)
            path, listing = got.path, got.listing
        return read_gguf_model(
            path, name=name, origin=origin, licence=listing.licence, stem=stem
        )

    def make(directory: Path) -> None:
        if not is_gguf:
            _require_exporter(f"hf:{reference.repo}")
        got = hub.obtain(reference, offline=offline, progress=progress)
        licence = got.listing.licence
        checkpoint = Checkpoint(got.path, name, origin, got.sha256, licence, got.quant)
        (_link if is_gguf else _export)(checkpoint, directory, progress)

    key = reader_key() if is_gguf else exporter_key()
    return _cached(stem, f"{listing.revision}\0{key}", make)


def _cached(stem: str, identity: str, make: Callable[[Path], None]) -> Bundle:
    """The bundle of this identity, made if need be; others of the stem go away."""
    key = hashlib.sha256(identity.encode()).hexdigest()
    directory = home() / "bundles" / f"{stem}-{key[: models.KEY_DIGITS]}"
    # A bundle appears at once: one that is there needs no lock, nor a writable cache.
    if not (directory / MANIFEST).exists():
        with locked(directory):
            if not (directory / MANIFEST).exists():
                for killed in models.unfinished(directory.name):
                    shutil.rmtree(killed, ignore_errors=True)
                make(directory)
                for other in models.bundles_of(stem):
                    if other != directory:
                        shutil.rmtree(other, ignore_errors=True)
    return replace(open_bundle(directory), stem=stem)


def _link(checkpoint: Checkpoint, directory: Path, progress: Progress) -> None:
    """A bundle of a GGUF file: the same file, its words and a manifest beside it."""
    model = read_gguf_model(
        checkpoint.path,
        name=checkpoint.name,
        origin=checkpoint.origin,
        sha256=checkpoint.sha256,
        licence=checkpoint.licence,
    )
    weights = TARGETS["gguf"]
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _link_or_copy(checkpoint.path, work / weights, progress)
        (work / TOKENIZER).write_text(model.tokenizer_json, encoding="utf-8")
        if model.chat_template is not None:
            (work / CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8")
        names = sorted(path.name for path in work.iterdir())
        files = {
            name: describe_file(
                work / name, checkpoint.sha256 if name == weights else None
            )
            for name in names
        }
        write_manifest(work, replace(model.manifest, files=files))
        os.chmod(work, 0o755)
        work.rename(directory)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, EdgeSpecError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "no space left on the device" if is_full else str(error)
            raise EdgeSpecError(
                f"{directory}: cannot write the bundle: {why}"
            ) from error
        raise


def _link_or_copy(source: Path, target: Path, progress: Progress) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        size = source.stat().st_size
        progress(f"copy {source.name}", 0, size)
        shutil.copyfile(source, target)
        progress(f"copy {source.name}", size, size)


def _require_exporter(model: str) -> None:
    """Raises UnsupportedError without the [export] extra: before the download."""
    try:
        importlib.import_module("edgespec_export.pipeline")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{model} has to be exported first, which needs the module {error.name}; "
            "install it with: pip install 'edgespec[export]'"
        ) from error


def _export(checkpoint: Checkpoint, directory: Path, progress: Progress) -> None:
    from edgespec_export.pipeline import export
    from edgespec_export.weights import Origin

    export(
        checkpoint.path,
        directory,
        quant=checkpoint.quant,
        check=False,
        progress=progress,
        name=checkpoint.name,
        origin_override=Origin(
            checkpoint.origin,
            "safetensors",
            checkpoint.sha256,
            checkpoint.licence,
        ),
    )
