"""Models on a Hugging Face hub: `hf:ORG/REPO[:QUANT]` to files in the cache.

$HF_ENDPOINT names another hub, $HF_TOKEN is sent to it for gated models, and
$HF_HUB_OFFLINE keeps off the network, as in `huggingface_hub`.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.cache import home, locked
from edgespec.errors import (
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.fetch import Expected, FetchError, download, fetch_json
from edgespec.progress import Progress, silent
from edgespec.strict_json import build, parse_object

DEFAULT_ENDPOINT = "https://huggingface.co"
LISTING = "listing.json"
# What people publish most and lose little by, best guess first.
PREFERRED_QUANTS = ("Q4_K_M", "Q4_1", "Q4_0", "Q8_0", "F16", "BF16", "F32")
EXPORT_QUANTS = ("q4_0", "q4_1", "q8_0", "f16")
CHECKPOINT_EXTRAS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """`hf:ORG/REPO[:QUANT]`, parsed."""

    repo: str
    quant: str | None

    @property
    def directory(self) -> Path:
        """Where its files are kept."""
        return home() / "hub" / self.repo.replace("/", "--")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository; sha256 is known for large files."""

    size: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repo: str
    revision: str
    licence: str | None
    files: Mapping[str, HubFile]


@dataclass(frozen=True, slots=True)
class Obtained:
    """A checkpoint in the cache: a (first) GGUF file, or a safetensors directory."""

    path: Path
    listing: Listing
    sha256: str | None  # of the weights, when they are one file
    quant: str | None  # to export with: set when QUANT chose no file


def parse_reference(text: str) -> HubReference:
    """Parses `hf:ORG/REPO[:QUANT]`; raises UsageError."""
    part = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
    match = re.fullmatch(rf"hf:({part}/{part})(?::([A-Za-z0-9_]+))?", text)
    if match is None or ".." in text or "--" in text:
        raise UsageError(f"expected hf:ORG/REPO or hf:ORG/REPO:QUANT, got {text!r}")
    return HubReference(match[1], match[2])


def obtain(
    reference: HubReference, *, offline: bool = False, progress: Progress = silent
) -> Obtained:
    """Fetches what is not yet here: one GGUF (all its shards) or a checkpoint.

    A repository fetched before is used as it is when the hub cannot be reached.

    Raises:
        ModelNotFoundError: neither reachable nor here.
        UsageError: QUANT names no file, or several files could be meant.
    """
    directory = reference.directory
    with locked(directory):
        listing, problem = _list(reference, offline)
        names = choose(listing, reference.quant)
        missing = [n for n in names if not _is_present(directory / n, listing.files[n])]
        if missing and problem is not None:
            raise ModelNotFoundError(
                f"hf:{reference.repo}: {', '.join(missing)} not in the cache, and "
                f"the hub cannot be used: {problem}"
            )
        for name in missing:
            entry = listing.files[name]
            download(
                file_url(reference.repo, listing.revision, name),
                directory / name,
                Expected(entry.sha256, entry.size),
                headers=headers(),
                progress=progress,
            )
    is_gguf = names[0].endswith(".gguf")
    weights = [n for n in names if n.endswith((".gguf", ".safetensors"))]
    return Obtained(
        path=directory / names[0] if is_gguf else directory,
        listing=listing,
        sha256=listing.files[weights[0]].sha256 if len(weights) == 1 else None,
        quant=None if is_gguf else reference.quant and reference.quant.lower(),
    )


def present(
    reference: HubReference, listing: Listing, names: Sequence[str]
) -> Path | None:
    """The first of these files, when all of them have been fetched."""
    directory = reference.directory
    is_whole = all(_is_present(directory / n, listing.files[n]) for n in names)
    return directory / names[0] if is_whole else None


def choose(listing: Listing, quant: str | None) -> list[str]:
    """The files that make up the model asked for, the (first) weight file first."""
    where = f"hf:{listing.repo}"
    models: dict[str, list[str]] = {}
    for name in sorted(listing.files):
        if name.endswith(".gguf") and "mmproj" not in name.lower():
            stem = re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".gguf"))
            models.setdefault(stem, []).append(name)
    if not models:
        return _choose_checkpoint(listing, quant)
    wanted = [quant] if quant else list(PREFERRED_QUANTS)
    for candidate in wanted:
        found = [stem for stem in models if _has_quant(stem, candidate)]
        if len(found) > 1:
            raise UsageError(f"{where}: {candidate} could be {' or '.join(found)}")
        if found:
            return _all_shards(models[found[0]], where)
    if quant is None and len(models) == 1:
        return _all_shards(next(iter(models.values())), where)
    raise UsageError(
        f"{where}: expected hf:ORG/REPO:QUANT with QUANT found in one of these "
        f"names, got {quant or 'no QUANT'}: {', '.join(models)}"
    )


def file_url(repo: str, revision: str, name: str) -> str:
    """Address of a file at a commit."""
    return f"{endpoint()}/{repo}/resolve/{revision}/{urllib.parse.quote(name)}"


def endpoint() -> str:
    """The hub's address."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def headers() -> dict[str, str]:
    """Headers that identify the user to the hub, if $HF_TOKEN is set."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def refusal(offline: bool) -> str | None:
    """Why the network must not be used; None when it may."""
    if offline:
        return "--offline"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    return None


def saved_listing(reference: HubReference) -> Listing | None:
    """The repository as last seen, None when never."""
    path = reference.directory / LISTING
    return _read_listing(path) if path.exists() else None


def refresh(reference: HubReference, offline: bool = False) -> Listing:
    """The repository as it is now; raises ModelNotFoundError when it cannot be seen."""
    with locked(reference.directory):
        listing, problem = _list(reference, offline)
    if problem is not None:
        raise _absent(reference, problem)
    return listing


def _list(reference: HubReference, offline: bool) -> tuple[Listing, str | None]:
    """The repository's files, from the hub or as last seen, then with the reason."""
    problem = refusal(offline)
    if problem is None:
        try:
            listing = _ask(reference.repo)
        except FetchError as error:
            problem = str(error)
        else:
            _replace(reference.directory / LISTING, listing)
            return listing, None
    saved = saved_listing(reference)
    if saved is None:
        raise _absent(reference, problem)
    return saved, problem


def _absent(reference: HubReference, problem: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"hf:{reference.repo}: not in the cache ({home()}), and the hub cannot be "
        f"used: {problem}"
    )


def _read_listing(path: Path) -> Listing:
    listing: Listing = build(
        Listing, parse_object(path.read_bytes(), str(path)), str(path), ""
    )
    return listing


def _replace(saved: Path, listing: Listing) -> None:
    """Saves a listing, after removing files that are others at its commit."""
    if saved.exists():
        old = _read_listing(saved)
        for name, entry in old.files.items():
            is_same = old.revision == listing.revision or (
                entry.sha256 is not None and entry == listing.files.get(name)
            )
            if not is_same:
                (saved.parent / name).unlink(missing_ok=True)
    saved.parent.mkdir(parents=True, exist_ok=True)
    part = saved.with_suffix(".part")
    part.write_text(json.dumps(asdict(listing), indent=1), encoding="utf-8")
    os.replace(part, saved)


def _ask(repo: str) -> Listing:
    url = f"{endpoint()}/api/models/{repo}/revision/main?blobs=true"
    answer = fetch_json(url, headers())
    try:
        files = {
            _checked_name(item["rfilename"], url): HubFile(
                item.get("size"), (item.get("lfs") or {}).get("sha256")
            )
            for item in answer["siblings"]
        }
        listing = Listing(repo, answer["sha"], _licence(answer), files)
    except (LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"{url}: not a repository listing: {error!r}") from None
    if not re.fullmatch(r"[0-9a-f]{7,64}", listing.revision):
        raise FormatError(
            f"{url}: sha: expected a commit, got {listing.revision!r:.80}"
        )
    return listing


def _licence(answer: Any) -> str | None:
    licence = (answer.get("cardData") or {}).get("license")
    return licence if isinstance(licence, str) else None


def _checked_name(name: Any, url: str) -> str:
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise FormatError(
            f"{url}: expected file names inside the repository, got {name!r}"
        )
    return str(name)


def _has_quant(stem: str, quant: str) -> bool:
    pattern = rf"(?:^|[^a-z0-9]){re.escape(quant.lower())}(?:$|[^a-z0-9_])"
    return re.search(pattern, stem.lower()) is not None


def _all_shards(names: list[str], where: str) -> list[str]:
    match = re.search(r"-\d{5}-of-(\d{5})\.gguf$", names[0])
    if match and int(match[1]) != len(names):
        raise FormatError(
            f"{where}: {names[0]}: expected {int(match[1])} shards, got {len(names)}"
        )
    return names


def _choose_checkpoint(listing: Listing, quant: str | None) -> list[str]:
    where = f"hf:{listing.repo}"
    if quant is not None and quant.lower() not in EXPORT_QUANTS:
        raise UsageError(
            f"{where}: a full-precision checkpoint is exported to one of "
            f"{', '.join(EXPORT_QUANTS)}, got {quant}"
        )
    top = [name for name in listing.files if "/" not in name]
    weights = sorted(n for n in top if re.fullmatch(r"model.*\.safetensors", n))
    index = [name for name in top if name == "model.safetensors.index.json"]
    if not weights or "config.json" not in top:
        raise UnsupportedError(
            f"{where}: has neither a GGUF file nor config.json with model*.safetensors"
        )
    if index:
        weights = [n for n in weights if re.search(r"-\d{5}-of-\d{5}\.", n)]
    elif "model.safetensors" in weights:
        weights = ["model.safetensors"]
    return weights + index + [name for name in CHECKPOINT_EXTRAS if name in top]


def _is_present(path: Path, entry: HubFile) -> bool:
    # Digests were checked on arrival, and _replace removes what a new commit changed.
    return path.exists() and entry.size in (None, path.stat().st_size)
