"""From a MODEL argument to a bundle, fetched and exported on first use.

The names of the bundle's own modules are here too: `manifest` states the format,
`bundle_files` opens, checks and writes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec import hub, models
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
from edgespec.manifest import (
    MANIFEST,
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
    "OnnxEntry",
    "TokenizerEntry",
    "WeightsEntry",
    "describe_file",
    "open_bundle",
    "resolve",
    "write_manifest",
]

# Both: the foreign targets read one each.
FORMATS = ("gguf", "onnx")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is exported, and what the bundle says of it."""

    path: Path
    name: str
    origin: str
    sha256: str | None = None
    licence: str | None = None
    quant: str | None = None


def resolve(
    model: str, *, offline: bool = False, progress: Progress | None = None
) -> Bundle:
    """The bundle that MODEL means.

    MODEL is a name of `models/`, `hf:ORG/REPO[:QUANT]`, a bundle's directory or a .gguf
    file, looked for in this order ("./NAME" is always a path). All but directories are
    exported once into the cache, without the check that `edgespec export` makes.

    Raises:
        ModelNotFoundError: no such path, or no source could be reached.
        UsageError: neither a path nor a known name.
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
        return _from_file(path, report)
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
    digest = hashlib.sha256()
    package = Path(spec.submodule_search_locations[0])
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _from_card(card: models.Card, offline: bool, progress: Progress) -> Bundle:
    def fetch() -> Checkpoint:
        return Checkpoint(
            models.fetch_card(card, offline=offline, progress=progress),
            card.name,
            f"hf:{card.origin}",
            card.file.sha256,
            card.licence,
        )

    return _cached(card.name, card.name, card.file.sha256, fetch, progress)


def _from_hub(reference: hub.HubReference, offline: bool, progress: Progress) -> Bundle:
    def fetch() -> Checkpoint:
        got = hub.obtain(reference, offline=offline, progress=progress)
        origin, licence = f"hf:{reference.repo}", got.listing.licence
        name = reference.repo.partition("/")[2]
        return Checkpoint(got.path, name, origin, got.sha256, licence, got.quant)

    # A commit fetched before is used without asking; `models get` looks for newer.
    listing = hub.saved_listing(reference) or hub.refresh(reference, offline)
    stem = models.bundle_stem(reference.repo)
    if reference.quant:
        stem += f"--{reference.quant.lower()}"
    return _cached(f"hf:{reference.repo}", stem, listing.revision, fetch, progress)


def _from_file(path: Path, progress: Progress) -> Bundle:
    path = path.resolve()
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
    checkpoint = Checkpoint(path, path.stem, path.name)
    stem = models.file_stem(path)
    return _cached(path.name, stem, identity, lambda: checkpoint, progress)


def _cached(
    model: str,
    stem: str,
    identity: str,
    fetch: Callable[[], Checkpoint],
    progress: Progress,
) -> Bundle:
    """The bundle of this identity made by this exporter; others of the stem go away."""
    key = hashlib.sha256(f"{identity}\0{exporter_key()}".encode()).hexdigest()
    directory = home() / "bundles" / f"{stem}-{key[: models.KEY_DIGITS]}"
    # A bundle appears at once: one that is there needs no lock, nor a writable cache.
    if (directory / MANIFEST).exists():
        return open_bundle(directory)
    with locked(directory):
        if not (directory / MANIFEST).exists():
            _require_exporter(model)
            for killed in models.unfinished(directory.name):
                shutil.rmtree(killed, ignore_errors=True)
            _export(fetch(), directory, progress)
            for other in models.bundles_of(stem):
                if other != directory:
                    shutil.rmtree(other, ignore_errors=True)
    return open_bundle(directory)


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

    is_gguf = checkpoint.path.suffix == ".gguf"
    export(
        checkpoint.path,
        directory,
        formats=FORMATS,
        quant=checkpoint.quant,
        check=False,
        progress=progress,
        name=checkpoint.name,
        origin_override=Origin(
            checkpoint.origin,
            "gguf" if is_gguf else "safetensors",
            checkpoint.sha256,
            checkpoint.licence,
        ),
    )
