"""The native target as Python sees it: calls, errors, memory, copies, rounds."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec import fitting, models, packed_copy
from edgespec._native import (
    DRAFT,
    NativeModel,
    NativeSession,
    SampleParams,
    cpu_variants,
    tree_derive,
)
from edgespec._native import model as native_model
from edgespec.bundle import Model, open_bundle, resolve
from edgespec.bundle_files import describe_file, write_manifest
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.conversation import Conversation
from edgespec.errors import (
    BackendError,
    ContextError,
    FormatError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
)
from edgespec.gguf_header import open_gguf
from edgespec.gguf_model import read_gguf_model
from edgespec.loading import open_session, open_target
from edgespec.memory import Memory
from edgespec.replay import Recorder
from edgespec.session import Session
from edgespec.targets.native import NativeTarget
from edgespec.tree.topology import Tree, chain
from edgespec_export.pipeline import export
from tests.export import families
from tests.export.checkpoints import Shape, gguf_checkpoint
from tests.hub_server import serve

CONTEXT = 256
IDS = np.array([5, 9, 300, 17, 44, 91, 260, 33, 12, 7], np.int32)
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)
GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=0.9, top_p=1.0, seed=11)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_checkpoint(tmp_path_factory.mktemp("native") / "tiny.gguf")


@pytest.fixture
def target(path: Path) -> Iterator[NativeTarget]:
    made = NativeTarget(path, context=CONTEXT, threads=1)
    yield made
    made.close()


def a_tree() -> Tree:
    tokens = np.array([3, 50, 60, 70, 80, 90, 100, 110], np.int32)
    return tree_derive(tokens, PARENTS)


def one_by_one(target: NativeTarget, tokens: np.ndarray) -> np.ndarray:
    """Logits of every token, each forwarded alone; leaves them committed."""
    rows = []
    for token in tokens:
        rows.append(target.forward(chain(np.array([token], np.int32)))[0].copy())
        target.commit(np.zeros(1, np.int32))
    return np.stack(rows)


# ---- forwards -----------------------------------------------------------------------


def test_what_it_says_of_itself(target: NativeTarget, path: Path) -> None:
    shape = Shape()
    assert (target.name, target.context, target.length) == ("native", CONTEXT, 0)
    assert target.info.architecture == "llama"
    assert (target.info.layers, target.info.hidden) == (shape.n_layers, shape.hidden)
    assert target.info.max_position == shape.max_position
    assert target.vocab == read_gguf_model(path).manifest.architecture.vocab
    assert target.info.file_bytes == path.stat().st_size
    assert not target.info.is_packed
    able = target.capabilities
    assert able.tree
    assert able.row_invariant
    assert able.rounds
    assert (able.window, able.sinks, able.kv_block) == (0, 0, 0)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_are_the_weights_own(family: str, tmp_path: Path) -> None:
    model = families.gguf(tmp_path / "a.gguf", family)
    target = NativeTarget(model.path, context=64, threads=1)
    ids = IDS[target.vocab > IDS]
    found = target.forward(chain(ids[:6]))
    # Keys and values are rounded to 16 bits, which a family swapped in or a rotation
    # turned the wrong way exceeds a hundredfold.
    assert np.abs(found - model.logits(ids[:6])).max() < 5e-3
    target.close()


def test_rows_asked_for_are_those_of_the_whole(target: NativeTarget) -> None:
    target.prefill(IDS)
    tree = a_tree()
    every = target.forward(tree).copy()
    assert every.shape == (8, target.vocab)
    some = target.forward(tree, np.array([2, 5, 7]))
    assert np.array_equal(some, every[[2, 5, 7]])


def test_c07_rows_have_the_same_bits_alone_and_in_a_tree(target: NativeTarget) -> None:
    target.prefill(IDS)
    tree = a_tree()
    together = target.forward(tree).copy()
    for leaf in (4, 6, 7):
        rows = np.flatnonzero(tree.mask[leaf])
        alone = one_by_one(target, tree.tokens[rows])
        assert np.array_equal(alone, together[rows])
        target.truncate(len(IDS))


@pytest.mark.parametrize("rows", [[0], [0, 2, 5, 7], [0, 1, 3, 6], []])
def test_c05_a_scattered_path_is_kept_as_if_decoded(
    target: NativeTarget, rows: list[int]
) -> None:
    tree = a_tree()
    target.prefill(IDS)
    target.forward(tree)
    target.commit(np.array(rows, np.int32))
    assert target.length == len(IDS) + len(rows)
    after = target.forward(chain(IDS[:3])).copy()
    target.truncate(0)
    target.prefill(np.concatenate([IDS, tree.tokens[rows]]).astype(np.int32))
    assert np.array_equal(target.forward(chain(IDS[:3])), after)


@pytest.mark.parametrize("step", [1, 3, 7, 64, 150])
def test_prefill_in_any_parts_gives_the_same_bits(
    target: NativeTarget, step: int
) -> None:
    ids = (np.arange(200, dtype=np.int32) * 37 + 5) % target.vocab
    whole = target.prefill(ids).copy()
    target.truncate(0)
    for start in range(0, len(ids), step):
        logits = target.prefill(ids[start : start + step])
    assert np.array_equal(logits, whole)
    assert target.length == 200


@pytest.mark.parametrize(
    "options", [{"threads": 2}, {"use_mmap": False}, {"cpu": "generic"}]
)
def test_however_it_is_run_the_bits_are_the_same(
    target: NativeTarget, path: Path, options: dict[str, object]
) -> None:
    other = NativeTarget(path, **{"context": CONTEXT, "threads": 1} | options)
    for made in (target, other):
        made.prefill(IDS)
    assert np.array_equal(target.forward(a_tree()), other.forward(a_tree()))
    other.close()


def test_int8_keys_and_values_are_close_and_smaller(
    target: NativeTarget, path: Path
) -> None:
    small = NativeTarget(path, context=CONTEXT, threads=1, kv="int8")
    for made in (target, small):
        made.prefill(IDS)
    left, right = target.forward(a_tree()), small.forward(a_tree())
    assert not np.array_equal(left, right)
    assert np.abs(left - right).max() < 0.05 * np.abs(left).max()
    small.close()


def test_shards_give_the_bits_of_the_whole(
    target: NativeTarget, tmp_path: Path
) -> None:
    first = gguf_checkpoint(tmp_path / "tiny.gguf", n_shards=3)
    parts = NativeTarget(first, context=CONTEXT, threads=1)
    for made in (target, parts):
        made.prefill(IDS)
    assert np.array_equal(target.forward(a_tree()), parts.forward(a_tree()))
    parts.close()


# ---- errors -------------------------------------------------------------------------


def test_c27_the_context_ends_with_an_error_and_the_target_lives(
    target: NativeTarget,
) -> None:
    ids = np.ones(CONTEXT - 4, np.int32)
    target.prefill(ids)
    with pytest.raises(ContextError):
        target.forward(a_tree())
    with pytest.raises(ContextError):
        target.prefill(np.ones(5, np.int32))
    assert target.length == CONTEXT - 4
    assert target.forward(chain(IDS[:4])).shape == (4, target.vocab)


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_tokens_outside_the_vocabulary_are_named(
    target: NativeTarget, bad: int
) -> None:
    ids = np.array([1, bad], np.int32)
    for call in (target.prefill, lambda ids: target.forward(chain(ids))):
        with pytest.raises(UsageError, match=f"token {bad}"):
            call(ids)
    assert target.length == 0


def test_rows_that_were_not_forwarded_cannot_be_kept(target: NativeTarget) -> None:
    target.forward(chain(IDS[:3]))
    for rows in ([0, 3], [1, 0], [-1]):
        with pytest.raises((UsageError, ContextError)):
            target.commit(np.array(rows, np.int32))
    with pytest.raises(UsageError):
        target.truncate(1)


def test_a_closed_target_says_so(path: Path) -> None:
    made = NativeTarget(path, context=64, threads=1)
    made.close()
    made.close()
    with pytest.raises(UsageError, match="closed"):
        made.prefill(IDS)


@pytest.mark.parametrize("size", [0, 3, 37, 1024, -1])
def test_c37_a_truncated_file_is_named(path: Path, tmp_path: Path, size: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FormatError, match=r"cut\.gguf"):
        NativeTarget(cut, context=64, threads=1)


def test_c37_a_file_cut_at_any_edge_is_named(path: Path, tmp_path: Path) -> None:
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    edges = {t.offset for t in open_gguf(path).tensors}
    edges |= {t.offset + t.n_bytes for t in open_gguf(path).tensors}
    for size in sorted(edge + off for edge in edges for off in (-1, 0, 1)):
        if size >= len(whole):
            continue
        cut.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"cut\.gguf"):
            NativeTarget(cut, context=64, threads=1)


@pytest.mark.parametrize("where", [8, 16])
def test_c37_counts_beyond_reason_are_refused(
    path: Path, tmp_path: Path, where: int
) -> None:
    data = bytearray(path.read_bytes())
    data[where : where + 8] = (1 << 62).to_bytes(8, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(FormatError, match=r"bad\.gguf"):
        NativeTarget(bad, context=64, threads=1)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"none\.gguf"):
        NativeTarget(tmp_path / "none.gguf", context=64, threads=1)


def test_an_unknown_architecture_says_who_may_run_it(
    path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(path.read_bytes().replace(b"llama", b"grok7"))
    with pytest.raises(UnsupportedError, match=r"grok7.*--backend llamacpp may run it"):
        open_target(resolve(str(other)), Runtime())


def test_nobody_is_named_who_refuses_the_options(tmp_path: Path) -> None:
    windowed = families.gguf(tmp_path / "a.gguf", "gemma3")
    with pytest.raises(UnsupportedError, match="have a window of 16") as caught:
        open_target(resolve(str(windowed.path)), Runtime(window=5))
    assert "--backend" not in str(caught.value)


def test_a_kernel_variant_that_does_not_run_here_is_a_usage_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ("avx2", "neon_dotprod")  # no processor has both
    absent = next(name for name in known if name not in cpu_variants())
    monkeypatch.setenv("EDGESPEC_CPU", absent)
    with pytest.raises(UsageError, match=f"EDGESPEC_CPU: {absent}: .*generic"):
        open_target(resolve(str(path)), Runtime())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_load_the_model_itself(path: Path) -> None:
    """Threads do not survive a fork: waiting for them would be for ever."""
    target = NativeTarget(path, context=CONTEXT, threads=2)
    expected = target.prefill(IDS).copy()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            with pytest.raises(BackendError) as caught:
                target.forward(a_tree())
            os.write(writer, str(caught.value).encode())
            target.close()
            own = NativeTarget(path, context=CONTEXT, threads=2)
            code = 0 if np.array_equal(own.prefill(IDS), expected) else 2
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert f"loaded in process {os.getpid()}" in said
    target.truncate(0)
    assert np.array_equal(target.prefill(IDS), expected)
    target.close()


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (Runtime(kv="int4"), "kv: expected f16 or int8"),
        (Runtime(window=0), "window: expected 1 or more"),
        (Runtime(sinks=-1), "sinks: expected 0 or more"),
        (Runtime(window=512), "window and sinks together below 512"),
        (Runtime(window=64, context=128), "ctx: with a window"),
        (Runtime(context=513), "ctx: expected 1 to 512"),
        (Runtime(threads=100_000), "threads: expected at most"),
        (Runtime(backend="llamacpp", kv="int8"), "--kv: only the native backend"),
        (Runtime(backend="llamacpp", window=9), "--window: only the native backend"),
        (Runtime(backend="llamacpp", mmap=False), "--no-mmap: only the native"),
        (Runtime(backend="llamacpp", mlock=True), "--mlock: only the native"),
    ],
)
def test_options_that_cannot_work_are_named(
    path: Path, runtime: Runtime, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        open_target(resolve(str(path)), runtime)


def test_too_little_memory_is_said_before_loading(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeModel, "load", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(fitting.ram, "available", lambda: 100_000)
    with pytest.raises(OutOfMemoryError, match=r"tiny\.gguf: needs .* only 0.10 MB"):
        NativeTarget(path, context=CONTEXT, threads=1)


def test_a_smaller_context_needs_less(path: Path, monkeypatch) -> None:
    needs = []
    monkeypatch.setattr(
        "edgespec.targets.native.check_fits",
        lambda need, *_, **__: needs.append([need(512, "f16"), need(512, "int8")]),
    )
    for context, options in ((512, {}), (128, {}), (512, {"window": 32})):
        NativeTarget(path, context=context, threads=1, **options).close()
    shape = Shape()
    row = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim
    assert needs[0][0].context - needs[0][1].context > 0.3 * row * 512
    assert needs[2][0].context < needs[0][0].context
    assert needs[0][0].weights > 0
    assert needs[0][0].file == 0


# ---- loading ------------------------------------------------------------------------


def test_packing_shows_progress_and_can_be_interrupted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of the test's own: a tiny file is packed at once."""
    calls = []

    def slowly(handle: object, done: object, total: object) -> None:
        calls.append(1)
        done._obj.value, total._obj.value = len(calls), 3  # type: ignore[attr-defined]

    monkeypatch.setattr(native_model, "_load", slowly)
    monkeypatch.setattr(native_model, "QUIET_SECONDS", -1.0)
    shown = []
    model = NativeModel(path, threads=1)
    model.load(lambda *now: shown.append(now), "pack it")
    assert shown == [("pack it", i, 3) for i in (1, 2, 3)]

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        model.load(interrupt)
    assert len(calls) == 1
    model.close()


def test_quick_packing_is_not_worth_a_word(path: Path) -> None:
    def report(*_: object) -> None:
        pytest.fail("reported")

    NativeTarget(path, context=64, threads=1, progress=report).close()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, edgespec_home: Path) -> None:
    """Every packing is slow enough for a copy, and every disk large enough."""
    monkeypatch.setattr(packed_copy, "SECONDS", 0.0)
    monkeypatch.setattr(packed_copy, "SPARE_BYTES", 0)


def served(path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    with serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repos["Org/Tiny"] = {"tiny-Q4_1.gguf": path.read_bytes()}
        return resolve("hf:Org/Tiny")


def answer(model: Model, **options: object) -> tuple[np.ndarray, bool]:
    """Some logits, and whether they came from a packed file."""
    target = open_target(model, Runtime(context=64, threads=1, **options))
    assert isinstance(target, NativeTarget)
    logits = target.prefill(IDS).copy()
    is_packed = target.info.is_packed
    target.close()
    return logits, is_packed


@pytest.mark.usefixtures("kept")
def test_a_cached_model_that_is_slow_to_pack_gets_a_copy(
    path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(path, monkeypatch)
    first, was_packed = answer(model)
    assert not was_packed
    (copy,) = (edgespec_home / "packed").iterdir()
    second, is_packed = answer(model)
    assert is_packed
    assert np.array_equal(first, second)
    size = models.statuses()[-1].size
    assert size > path.stat().st_size + copy.stat().st_size
    assert models.remove("hf:Org/Tiny") == size
    assert not copy.exists()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_damaged_copy_is_ignored_and_written_anew(
    path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    model = served(path, monkeypatch)
    first, _ = answer(model)
    (copy,) = (edgespec_home / "packed").iterdir()
    whole = copy.read_bytes()
    copy.write_bytes(whole[:size])
    second, is_packed = answer(model)
    assert not is_packed
    assert np.array_equal(first, second)
    assert copy.read_bytes() == whole


@pytest.mark.usefixtures("kept")
def test_a_copy_of_another_file_goes(
    path: Path, tmp_path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(path, monkeypatch)
    answer(model)
    (stale,) = (edgespec_home / "packed").iterdir()
    other = gguf_checkpoint(tmp_path / "other.gguf", seed=1)
    weights = model.directory / "target.gguf"
    weights.write_bytes(other.read_bytes())
    files = dict(model.manifest.files) | {"target.gguf": describe_file(weights)}
    write_manifest(model.directory, dataclasses.replace(model.manifest, files=files))
    changed = dataclasses.replace(open_bundle(model.directory), stem=model.stem)
    logits, is_packed = answer(changed)
    assert not is_packed
    assert np.array_equal(logits, answer(resolve(str(other)))[0])
    assert not stale.exists()
    assert len(list((edgespec_home / "packed").iterdir())) == 1


@pytest.mark.usefixtures("kept")
def test_without_room_or_a_writable_cache_there_is_no_copy(
    path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(path, monkeypatch)
    monkeypatch.setattr(packed_copy, "SPARE_BYTES", 1 << 60)
    answer(model)
    assert list((edgespec_home / "packed").iterdir()) == []
    monkeypatch.setattr(packed_copy, "SPARE_BYTES", 0)
    (edgespec_home / "packed").rmdir()
    (edgespec_home / "packed").write_text("in the way")
    answer(model)


@pytest.mark.usefixtures("kept")
def test_files_of_ones_own_and_quick_packing_get_no_copy(
    path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(resolve(str(path)))
    monkeypatch.setattr(packed_copy, "SECONDS", 60.0)
    answer(served(path, monkeypatch))
    assert not (edgespec_home / "packed").exists()


def test_a_bundle_of_packed_weights_runs(path: Path, tmp_path: Path) -> None:
    made = export(path, tmp_path / "out", check=False)
    model = NativeModel(path, threads=1)
    model.load()
    packed = made.directory / "target.packed.gguf"
    model.save(packed)
    model.close()
    (made.directory / "target.gguf").unlink()
    files = {n: e for n, e in made.manifest.files.items() if n != "target.gguf"}
    files[packed.name] = describe_file(packed)
    weights = dataclasses.replace(made.manifest.weights[0], file=packed.name)
    manifest = dataclasses.replace(
        made.manifest,
        files=files,
        quantisation={"packed": made.manifest.quantisation["gguf"]},
        weights=(weights,),
    )
    write_manifest(made.directory, manifest)
    logits, is_packed = answer(open_bundle(made.directory))
    assert is_packed
    assert np.array_equal(logits, answer(resolve(str(path)))[0])
    # The file alone is a MODEL too, its sizes those of the source.
    bare = read_gguf_model(packed)
    assert bare.manifest.architecture == read_gguf_model(path).manifest.architecture
    assert np.array_equal(answer(bare)[0], logits)


# ---- rounds and sessions ------------------------------------------------------------


def opened(
    path: Path, *, tree: str = "auto", slope: float | None = 0.05, **options: object
) -> Session:
    runtime = Runtime(**{"context": CONTEXT, "threads": 1} | options)  # type: ignore
    speculation = Speculation(tree=tree, cost_slope=slope)
    return open_session(resolve(str(path)), runtime=runtime, speculation=speculation)


def unending(session: Session, sampling: Sampling) -> Sampling:
    """The same without tokens that end a reply."""
    bias = dict.fromkeys(session.engine.eos, -np.inf)
    return dataclasses.replace(sampling, logit_bias=bias)


class InHalves(Recorder):
    """The same target with Python between the halves of every round."""

    def __init__(self, target: NativeTarget) -> None:
        super().__init__(target)
        self.capabilities = dataclasses.replace(target.capabilities, rounds=False)


PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["auto", "chain:4"])
def test_whole_rounds_say_what_halves_say(
    path: Path, tree: str, sampling: Sampling
) -> None:
    replies, drafted = [], []
    for in_halves in (False, True):
        with opened(path, tree=tree) as session:
            if in_halves:
                session.target = InHalves(session.target)  # type: ignore[arg-type]
            for n, logprobs in ((100, 0), (40, 3)):
                stream = session.generate(
                    PROMPT,
                    sampling=sampling,
                    stopping=Stopping(max_tokens=n),
                    logprobs=logprobs,
                )
                drafted.append([d for delta in stream for d in delta.drafted])
                replies.append(stream.reply)
    for whole, halves in zip(replies[:2], replies[2:], strict=True):
        assert whole.tokens == halves.tokens
        assert whole.logprobs == halves.logprobs
        assert whole.finish_reason == halves.finish_reason
        for name in ("rounds", "drafted", "accepted", "acceptance", "tokens_per_round"):
            assert getattr(whole.stats, name) == getattr(halves.stats, name)
    assert drafted[:2] == drafted[2:]
    assert replies[0].stats.accepted > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"kv": "int8"}], ids=["f16", "int8"])
def test_c06_drafts_change_no_token(
    path: Path, options: dict[str, object], sampling: Sampling
) -> None:
    with opened(path, tree="chain:7", **options) as session:
        sampling = unending(session, sampling)
        session.is_speculating = False
        plain = session.complete(PROMPT, sampling=sampling)
        session.is_speculating = True
        spec = session.complete(PROMPT, sampling=sampling)
    assert plain.finish_reason == "context"
    assert spec.tokens == plain.tokens
    assert spec.stats.drafted > 0


@pytest.mark.parametrize("n_prompt", [*range(250, 257)])
def test_c27_a_prompt_near_the_end_of_the_context(path: Path, n_prompt: int) -> None:
    with opened(path, tree="chain:31") as session:
        ids = (PROMPT * 30)[:n_prompt]
        session.is_speculating = False
        plain = session.complete(ids, sampling=GREEDY)
        session.is_speculating = True
        spec = session.complete(ids, sampling=GREEDY)
        assert spec.tokens == plain.tokens
        assert len(spec.tokens) == CONTEXT - n_prompt + 1
        assert spec.finish_reason == "context"
        with pytest.raises(ContextError, match="257 tokens"):
            session.generate((PROMPT * 30)[:257])


def test_c33_ten_replies_and_an_error_in_between(path: Path) -> None:
    with opened(path) as session:
        replies = set()
        sampling = unending(session, GREEDY)
        for _ in range(10):
            stop = Stopping(max_tokens=40)
            reply = session.complete([9] * 150, sampling=sampling, stopping=stop)
            assert len(reply.tokens) == 40
            replies.add(reply.tokens)
            with pytest.raises(ContextError):
                session.complete([9] * 1000)
        assert len(replies) == 1


def test_an_interrupted_prefill_goes_on_where_it_stopped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(i * 31 + 3) % 300 for i in range(200)]
    with opened(path) as session:
        fresh = session.complete(ids, sampling=GREEDY, stopping=Stopping(max_tokens=20))
    with opened(path, prefill_chunk=16) as session:
        target, calls = session.target, []
        real = target.prefill

        def interrupted(tokens: np.ndarray) -> np.ndarray:
            calls.append(len(tokens))
            if len(calls) == 5:
                raise KeyboardInterrupt
            return real(tokens)

        monkeypatch.setattr(target, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.complete(ids, sampling=GREEDY)
        assert target.length == 64
        reply = session.complete(ids, sampling=GREEDY, stopping=Stopping(max_tokens=20))
    assert reply.tokens == fresh.tokens
    assert reply.evaluated_tokens == 200 - 64


def test_interrupted_between_commit_and_record_nothing_is_wrong(path: Path) -> None:
    """Ctrl-C right after a round in C: rows are there that Python never heard of."""
    with opened(path, tree="chain:4") as session:
        stop = Stopping(max_tokens=60)
        whole = session.complete(PROMPT, sampling=GREEDY, stopping=stop)
        session.reset()
        engine, calls = session.engine, []
        real = engine.target.run_round

        def interrupted(*args: object, **options: object) -> object:
            ran = real(*args, **options)
            calls.append(ran)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return ran

        engine.target.run_round = interrupted
        with pytest.raises(KeyboardInterrupt):
            session.complete(PROMPT, sampling=GREEDY, stopping=stop)
        again = session.complete(PROMPT, sampling=GREEDY, stopping=stop)
        assert again.tokens == whole.tokens
        said = session.last_reply
        assert said is not None


WINDOW = 32


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 128 positions."""
    return gguf_checkpoint(
        tmp_path_factory.mktemp("short") / "tiny.gguf", Shape(max_position=128)
    )


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_c01_a_window_goes_on_beyond_the_positions_and_drafts_change_nothing(
    short: Path, sampling: Sampling, kv: str
) -> None:
    bias = dict.fromkeys((0, 1, 2), -np.inf)
    sampling = dataclasses.replace(sampling, logit_bias=bias)
    runtime = {"context": None, "window": WINDOW, "kv": kv}
    with opened(short, tree="chain:6", **runtime) as session:
        assert session.context == 128
        arms = []
        for is_speculating in (False, True, True):
            session.is_speculating = is_speculating
            stream = session.generate(
                PROMPT, sampling=sampling, stopping=Stopping(max_tokens=600)
            )
            told = [delta.notice for delta in stream if delta.notice]
            arms.append((stream.reply.tokens, told))
        assert stream.reply.stats.accepted > 0
    plain, *drafted = arms
    assert len(plain[0]) == 600
    assert len(plain[1]) == 1 + (600 + len(PROMPT) - 129) // (128 - WINDOW - 4)
    assert drafted == [plain, plain]


def test_rows_outside_the_window_are_not_seen(short: Path) -> None:
    """The same last tokens behind another past: in the window's reach or beyond it."""
    deep = Shape().n_layers * WINDOW  # what a row can be reached from, layer by layer
    near, far = [], []
    for first in (40, 41):
        target = NativeTarget(short, context=64, threads=1, window=WINDOW)
        ids = np.array([first, *range(50, 50 + deep + 2)], np.int32)
        far.append(target.prefill(ids).copy())
        target.truncate(0)
        near.append(target.prefill(ids[: WINDOW - 2]).copy())
        target.close()
    assert np.array_equal(*far)
    assert not np.array_equal(*near)


def test_c04_turn_two_of_a_windowed_chat_equals_a_cold_one(short: Path) -> None:
    messages = [{"role": "user", "content": "one two three four five six"}]
    runtime = {"context": None, "window": WINDOW}
    with opened(short, **runtime) as session, opened(short, **runtime) as cold:
        stop = Stopping(max_tokens=50)
        memory = Memory()
        for turn in range(8):
            stream = session.chat(
                messages, sampling=SEEDED, stopping=stop, memory=memory
            )
            said = [token for delta in stream for token in delta.tokens]
            cold.reset()
            before = Memory(replies=dict(list(memory.replies.items())[:turn]))
            other = cold.chat(messages, sampling=SEEDED, stopping=stop, memory=before)
            assert [t for delta in other for t in delta.tokens] == said
            messages += [
                {"role": "assistant", "content": stream.reply.text},
                {"role": "user", "content": f"and turn {turn}?"},
            ]
        assert memory.evicted > 128


def test_c40_memory_is_flat_over_a_hundred_turns(short: Path) -> None:
    """The resident size after turn 100 within 2 % of that after turn 10."""
    with opened(short, context=128) as session:
        chat = Conversation(session, sampling=SEEDED, stopping=Stopping(max_tokens=16))
        sizes = []
        for turn in range(100):
            for _ in chat.ask(f"turn {turn}"):
                pass
            if turn in (9, 99):
                gc.collect()
                sizes.append(resident())
        # A conversation's own messages are the little that may grow.
        assert sizes[1] < 1.02 * sizes[0]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_targets_free_their_memory(path: Path) -> None:
    def load() -> None:
        NativeTarget(path, context=512, threads=2).close()

    for _ in range(10):
        load()
    before = resident()
    for _ in range(100):
        load()
    gc.collect()
    assert resident() < before + (4 << 20)


def test_a_round_tells_what_it_emitted_and_committed(target: NativeTarget) -> None:
    session = NativeSession(target.vocab, CONTEXT, draft="ngram")
    session.append(PROMPT)
    session.begin_generation(SampleParams(temperature=0.0), 100)
    target.prefill(np.array(PROMPT[:-1], np.int32))
    ran, logits = target.run_round(session, DRAFT, keeps_logits=False)
    assert logits is None
    assert len(ran.tokens) == len(ran.rows) == len(ran.committed)
    assert ran.committed[0] == PROMPT[-1]
    assert ran.committed[1:] == ran.tokens[:-1]
    assert session.tokens.tolist() == [*PROMPT, *ran.tokens]
    assert target.length == session.length - 1
    ran, logits = target.run_round(session, DRAFT, keeps_logits=True)
    assert logits is not None
    tree = target.last_tree()
    assert logits[ran.rows[-1]].argmax() == ran.tokens[-1]
    assert tree.tokens[0] == ran.committed[0]
