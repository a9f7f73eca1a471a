"""Drafts of yours: a GGUF is used as it is, any other layout is made one, once.

What was made is kept in the cache under the contents of the files it was made of.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import tempfile
from pathlib import Path

from edgespec.bundle import exporter_key
from edgespec.bundle_files import Bundle
from edgespec.cache import cannot_write, home, locked, sha256_of
from edgespec.drafts import Choice
from edgespec.errors import (
    EdgeSpecError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.gguf_header import open_gguf
from edgespec.gguf_model import GGUFModel
from edgespec.manifest import TARGETS
from edgespec.progress import Progress, silent

KEY_DIGITS = 12
# By general.architecture of a GGUF, the --draft word; every other one is a model's.
HEADS = {"eagle3": "eagle", "edgespec-eagle": "eagle", "edgespec-medusa": "medusa"}
SMALL = 1_000_000  # weights of a head, up to which 8 bits would save nothing
_PICKLES = (".bin", ".pt", ".pth")  # not read where there are .safetensors
_ABOUT = (".json", ".model")  # beside weights
_READ = (".safetensors", ".gguf", *_PICKLES, *_ABOUT)


def as_gguf(
    path: Path,
    bundle: Bundle | GGUFModel,
    choice: Choice,
    progress: Progress = silent,
) -> Path:
    """The GGUF file of a draft the user named.

    Raises UsageError when it is of another kind than `choice` says, UnsupportedError
    without the [export] extra where that is needed, and what reading a draft raises:
    FormatError naming both sides for one made for another target.
    """
    file = _sole_gguf(path)
    if file is None:
        return _converted(path, bundle, choice, progress)
    _check_word(path, _word(file), choice)
    return file


def _sole_gguf(path: Path) -> Path | None:
    """The file itself, or the one of a directory that has no other weights."""
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if any(path.glob("*.safetensors")) or not ggufs:
            return None
        if len(ggufs) > 1:
            if any(file.suffix in _PICKLES for file in path.iterdir()):
                return None
            names = ", ".join(file.name for file in ggufs)
            raise UsageError(f"draft: {path} has {names}: name one of these files")
        return ggufs[0]
    with path.open("rb") as file:
        return path if file.read(4) == b"GGUF" else None


def _word(file: Path) -> str:
    """What --draft calls the kind of a GGUF."""
    arch = open_gguf(file).metadata.get("general.architecture")
    return HEADS.get(str(arch), "model")


def _check_word(path: Path, word: str, choice: Choice) -> None:
    if word != choice.word:
        raise UsageError(
            f"draft: {path} is not for {choice.word}; say --draft {word}:{path}"
        )


def _converted(
    path: Path, bundle: Bundle | GGUFModel, choice: Choice, progress: Progress
) -> Path:
    try:
        from edgespec_export import head_bundle  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"{path} has to be converted first, which needs the module {error.name}; "
            "install it with: pip install 'edgespec[export]'"
        ) from error
    if TARGETS["gguf"] not in bundle:
        raise UsageError(
            f"draft: {path} has to be converted for its target, for which "
            f"{bundle.directory} lacks {TARGETS['gguf']}; export the target again with "
            f"--head {path}"
        )
    target = bundle.path_of(TARGETS["gguf"])
    stem = _plain(bundle.stem or bundle.manifest.name)
    name = f"{stem}--{_plain(path.resolve().name)}"
    key = _key(path, target, progress)[:KEY_DIGITS]
    place = home() / "heads" / f"{name}-{key}.gguf"
    if not place.exists():
        with locked(place):
            if not place.exists():
                _convert(path, target, place, choice, progress)
                pattern = f"{name}-{'[0-9a-f]' * KEY_DIGITS}.gguf"
                for other in place.parent.glob(pattern):
                    if other != place:
                        other.unlink(missing_ok=True)
    _check_word(path, _word(place), choice)
    return place


def _convert(
    path: Path, target: Path, place: Path, choice: Choice, progress: Progress
) -> None:
    from edgespec_export import head_bundle, sources

    progress(f"convert {path.name}", 0, 2)
    weights = sources.read(target)
    (draft,) = head_bundle.read(head_bundle.HeadOptions((path,)), weights)
    _check_word(path, "eagle" if draft.kind == "eagle3" else draft.kind, choice)
    progress(f"convert {path.name}", 1, 2)
    for left in place.parent.glob(f".{place.stem}-*"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.stem}-", dir=place.parent))
    try:
        head_bundle.write(
            [draft],
            work,
            weights,
            forms=("gguf",),
            quant="f16" if _is_small(draft) else None,
            log=lambda _: None,
        )
        (made,) = work.glob("*.gguf")
        made.chmod(0o644)
        made.replace(place)
    except OSError as error:
        if isinstance(error, EdgeSpecError):
            raise
        raise cannot_write(place, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"convert {path.name}", 2, 2)


def _is_small(draft: object) -> bool:
    """Whether a head that comes as floats has few weights."""
    from edgespec_export.heads import Head

    if not isinstance(draft, Head) or draft.origin.format == "gguf":
        return False
    return sum(math.prod(tensor.shape) for tensor in draft.tensors.values()) <= SMALL


def _key(path: Path, target: Path, progress: Progress) -> str:
    """Digest of a draft's files, of which target it is for, and of the exporter."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _READ)
        if any(file.suffix == ".safetensors" for file in files):
            files = [file for file in files if file.suffix not in _PICKLES]
    else:
        files = [path, *(f for f in [path.with_name("config.json")] if f.is_file())]
    if not files:
        raise ModelNotFoundError(
            f"{path}: no weights in it: expected a file in "
            f"{', '.join(suffix for suffix in _READ if suffix not in _ABOUT)}"
        )
    digest = hashlib.sha256(exporter_key().encode())
    status = target.stat()
    digest.update(f"\0{target}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    for file in files:
        digest.update(f"\0{file.name}\0{sha256_of(file, progress)}".encode())
    return digest.hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "draft"
