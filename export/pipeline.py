"""A checkpoint in, a bundle out: read, write the containers, check them, publish."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from edgespec import bundle as bundles
from edgespec._native import NativeModel
from edgespec.bundle import (
    Architecture,
    Bundle,
    CheckEntry,
    Container,
    Generation,
    Manifest,
    OnnxEntry,
    TokenizerEntry,
    WeightsEntry,
)
from edgespec.chat import ChatTemplate
from edgespec.cpu import usable_cores
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.gguf_model import BIT_FOR_BIT
from edgespec.manifest import (
    CHAT_TEMPLATE,
    MANIFEST,
    TARGETS,
    TOKENIZER,
    HeadEntry,
)
from edgespec.progress import Progress, silent
from edgespec.tokenizer import Tokenizer
from edgespec_export import check as checks
from edgespec_export import gguf_file, head_bundle, onnx_graph, reference, sources
from edgespec_export.head_bundle import NO_HEADS, Draft, HeadOptions
from edgespec_export.quantize import QUANTS, made_from
from edgespec_export.weights import Origin, WeightSet

UNPACKED = ".unpacked.gguf"
FORMATS = ("gguf", "onnx", "packed")  # in the order they are made


def _quiet(line: str) -> None:
    pass


def export(
    source: Path,
    out: Path,
    *,
    formats: Iterable[str] = ("gguf",),
    quant: str | None = None,
    attention: str = onnx_graph.DEFAULT_ATTENTION,
    taps: Iterable[int] = (),
    check: bool = True,
    progress: Progress | None = None,
    name: str | None = None,
    origin_override: Origin | None = None,
    log: Callable[[str], None] = _quiet,
    check_tokens: int | None = None,
    max_kl: float | None = None,
    heads: HeadOptions = NO_HEADS,
) -> Bundle:
    """Exports a .gguf file or a Hugging Face checkpoint directory as the bundle `out`.

    Everything is written beside `out` and renamed at the end: after an error, Ctrl-C or
    a full disk there is nothing new, and a bundle that `out` was before is as it was.

    Args:
        formats: some of FORMATS.
        quant: q4_0, q4_1, q8_0, f16, f32; None keeps what the source holds.
        attention, taps: of the ONNX graph, see `onnx_graph.write`.
        check: compare with the source, fail above the limit, note the result.
        name: of the model; default the source's own, else its file name.
        origin_override: where the source comes from, when the caller knows better.
        log: gets the report, line by line.
        check_tokens: at most so many tokens of the check text.
        max_kl: limit in place of the quantisation's.
        heads: draft heads to write beside the target.

    Raises UsageError for options that do not exist and for an `out` that is something
    else than a bundle, and what the source's reader and the writers raise.
    """
    asked = set(formats)
    expected = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    for form in asked.difference(FORMATS):
        raise UsageError(f"--format {form}: expected {expected}")
    if not asked:
        raise UsageError(f"no format: expected {expected}")
    wanted = [form for form in FORMATS if form in asked]
    taps = tuple(taps)
    if taps and "onnx" not in wanted:
        raise UsageError("--taps: only the ONNX graph has them; add --format onnx")
    if attention not in onnx_graph.ATTENTIONS:
        expected = " or ".join(onnx_graph.ATTENTIONS)
        raise UsageError(f"--attention {attention}: expected {expected}")
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"--quant {quant}: expected one of {', '.join(QUANTS)}")
    _check_out(out, source)
    weights = sources.read(source)
    if origin_override is not None:
        weights = replace(weights, origin=origin_override)
    _check_text(weights)
    drafts = head_bundle.read(heads, weights)
    head_bundle.check_forms(drafts, wanted)
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=_parent(out)))
    except OSError as error:
        raise EdgeSpecError(
            f"{out}: cannot write the bundle: {out.absolute().parent}: {error.strerror}"
        ) from error
    try:
        writer = _Writer(weights, work, quant, progress or silent, log)
        for form in wanted:
            if form == "gguf":
                writer.gguf()
            elif form == "onnx":
                needed = head_bundle.taps(drafts)
                writer.onnx(attention, tuple(dict.fromkeys([*taps, *sorted(needed)])))
            else:
                writer.packed()
        writer.heads(drafts, heads.quant)
        if check:
            writer.check(source, check_tokens, max_kl)
        else:
            writer.sizes()
        writer.finish(name or weights.name or source.stem)
        _publish(work, out)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, EdgeSpecError):
            # numpy reports a short write as an OSError without a number
            is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT)
            why = "no space left on the device" if is_full else str(error)
            raise EdgeSpecError(f"{out}: cannot write the bundle: {why}") from error
        raise
    return bundles.open_bundle(out)


def _check_text(weights: WeightSet) -> None:
    """Opens tokenizer and template as a session will: better refused now than then."""
    tokenizer = Tokenizer(
        weights.tokenizer_json, weights.bos_id, weights.eos_ids, weights.add_bos
    )
    ChatTemplate(weights.chat_template, tokenizer)


class _Writer:
    """One export under way in a directory of its own."""

    def __init__(
        self,
        weights: WeightSet,
        work: Path,
        quant: str | None,
        progress: Progress,
        log: Callable[[str], None],
    ) -> None:
        self.weights = weights
        self.work = work
        self.quant = quant
        self.progress = progress
        self.log = log
        self.containers: dict[str, Container] = {}
        self.checks: dict[str, CheckEntry] = {}
        self.entry: OnnxEntry | None = None
        self.errors: dict[str, float] = {}
        self.unpacked: Path | None = None  # what target.packed.gguf was made of
        self.drafts: tuple[HeadEntry, ...] = ()
        self.draft_weights: tuple[WeightsEntry, ...] = ()

    def gguf(self) -> None:
        """target.gguf."""
        self.containers["gguf"] = self._write_gguf(self.work / TARGETS["gguf"])

    def _write_gguf(self, path: Path) -> Container:
        report = gguf_file.write(
            self.weights,
            self.quant,
            path,
            lambda _, done, total: self.progress("write target.gguf", done, total),
        )
        types = Counter(report.kinds.values())
        made = Counter(
            made_from(kind, tensor.kind)
            for name, kind in report.kinds.items()
            if len((tensor := self.weights.tensors[name]).shape) > 1
            and kind != tensor.kind
        )
        kept = self.quant is None and self.weights.origin.format == "gguf"
        return Container(
            self.quant or _matrix_kind(self.weights).lower(),
            report.n_bytes,
            dict(sorted(types.items())),
            BIT_FOR_BIT
            if kept
            else "; ".join(f"{how}: {count}" for how, count in sorted(made.items())),
        )

    def onnx(self, attention: str, taps: tuple[int, ...]) -> None:
        """target.onnx and its data."""
        report = onnx_graph.write(
            self.weights,
            self.work / TARGETS["onnx"],
            quant=self.quant,
            attention=attention,
            taps=taps,
            progress=lambda done, total: self.progress(
                "write target.onnx", done, total
            ),
        )
        self.errors = report.errors
        kinds = "/".join(dict.fromkeys(form.split("+")[0] for form in report.counts))
        self.containers["onnx"] = Container(
            kinds, report.bytes, report.counts, "; ".join(report.notes)
        )
        self.entry = OnnxEntry(
            "gqa" if attention == "gqa" else "explicit",
            taps,
            onnx_graph.INPUTS_VERSION,
        )

    def packed(self) -> None:
        """target.packed.gguf, out of target.gguf or of a GGUF that does not stay."""
        container = self.containers.get("gguf")
        self.unpacked = self.work / TARGETS["gguf"]
        if container is None:
            self.unpacked = self.work / UNPACKED
            container = self._write_gguf(self.unpacked)
        path = self.work / TARGETS["packed"]
        model = NativeModel(self.unpacked, threads=usable_cores())
        try:
            model.load(self.progress, f"write {path.name}")
            model.save(path)
        finally:
            model.close()
        self.containers["packed"] = replace(container, bytes=path.stat().st_size)

    def heads(self, heads: list[Draft], quant: str | None) -> None:
        """draft-* files."""
        self.drafts, self.draft_weights = head_bundle.write(
            heads,
            self.work,
            self.weights,
            forms=self.containers,
            quant=quant,
            log=self.log,
        )

    def check(self, source: Path, tokens: int | None, max_kl: float | None) -> None:
        """Every container against the source; raises above the limit."""
        windows = checks.windows(self.weights, limit=tokens)
        truth = reference.of_source(self.weights, source, windows, self.progress)
        errors: dict[str, float] | None = None
        for form, container in self.containers.items():
            path = self.work / TARGETS[form]
            if form == "gguf":
                result = checks.check_gguf(path, self.weights, truth, self.progress)
                errors = result.errors
            elif form == "packed":
                assert self.unpacked is not None
                if errors is None:
                    written = sources.gguf.read(self.unpacked)
                    errors = checks.tensor_errors(self.weights, written)
                result = checks.check_packed(path, truth, errors, self.progress)
            else:
                result = checks.check_onnx(
                    path, self.weights, truth, self.errors, self.progress
                )
            self._report(form, container, result)
            checks.require(form, result, self.quant, max_kl)
            self.checks[form] = CheckEntry(result.kl, result.top1, result.tokens)

    def finish(self, name: str) -> None:
        """Tokenizer, template and the manifest."""
        weights, config = self.weights, self.weights.config
        (self.work / UNPACKED).unlink(missing_ok=True)
        (self.work / TOKENIZER).write_text(weights.tokenizer_json, encoding="utf-8")
        if weights.chat_template is not None:
            path = self.work / CHAT_TEMPLATE
            path.write_text(weights.chat_template, encoding="utf-8")
        names = sorted(path.name for path in self.work.iterdir())
        origin = weights.origin
        manifest = Manifest(
            name=name,
            architecture=Architecture(
                config.arch,
                config.n_layers,
                config.hidden,
                config.n_heads,
                config.n_kv_heads,
                config.head_dim,
                config.ffn,
                config.vocab,
                config.max_position,
                config.is_tied,
                config.rope.kind,
            ),
            quantisation=self.containers,
            files={n: bundles.describe_file(self.work / n) for n in names},
            tokenizer=TokenizerEntry(
                weights.bos_id, weights.add_bos, tuple(sorted(weights.eos_ids))
            ),
            generation=Generation(weights.temperature, weights.top_p),
            onnx=self.entry,
            weights=tuple(
                WeightsEntry(n, origin.licence, origin.source, origin.sha256)
                for n in names
                if n.startswith("target.")
            )
            + self.draft_weights,
            check=self.checks,
            heads=self.drafts,
        )
        bundles.write_manifest(self.work, manifest)

    def sizes(self) -> None:
        """What was written, when nothing was checked."""
        for form, container in self.containers.items():
            self.log(_size_column(form, container))
            self._log_note(container)

    def _report(self, form: str, container: Container, result: checks.Check) -> None:
        self.log(
            f"{_size_column(form, container)}   KL {result.kl:.5f}   "
            f"top-1 {result.top1:6.2%}   {result.tokens} tokens against {result.by}"
        )
        self._log_note(container)
        if result.flips is not None:
            self.log(
                f"  int8 activations change {result.flips} of {result.flips_of} "
                "argmaxes against float ones"
            )
        for line in _tensor_lines(result.errors):
            self.log(line)

    def _log_note(self, container: Container) -> None:
        if container.note:
            self.log(f"  {container.note}")


def _size_column(form: str, container: Container) -> str:
    return f"target.{form:<7}{container.kind:<12}{container.bytes / 1e6:9.1f} MB"


def _tensor_lines(errors: dict[str, float]) -> list[str]:
    """Relative error by kind of tensor, over the layers."""
    if not errors:
        return ["  every tensor exact"]
    groups: dict[str, list[tuple[float, str]]] = {}
    for tensor, error in errors.items():
        kind = re.sub(r"^blk\.\d+\.", "", tensor)
        groups.setdefault(kind, []).append((error, tensor))
    return [
        f"  {kind:<12} relative error {sum(e for e, _ in found) / len(found):7.3%}, "
        f"worst {max(found)[0]:7.3%} ({max(found)[1]})"
        for kind, found in groups.items()
    ]


def _matrix_kind(weights: WeightSet) -> str:
    """The type most matrices have."""
    kinds = Counter(t.kind for t in weights.tensors.values() if len(t.shape) == 2)
    return kinds.most_common(1)[0][0]


def _parent(out: Path) -> Path:
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return parent


def _check_out(out: Path, source: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out}: exists and is not a directory")
    if out.exists() and source.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{out}: the source lies inside; choose another directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UsageError(
            f"{out}: exists and is not a bundle (no {MANIFEST}); "
            "choose another directory"
        )


def _publish(work: Path, out: Path) -> None:
    """Moves the finished directory to its place; an old bundle goes last."""
    os.chmod(work, 0o755)
    if not out.exists():
        work.rename(out)
        return
    old = work.with_name(work.name + "-old")
    try:
        out.rename(old)
        work.rename(out)
    except BaseException:
        if not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
