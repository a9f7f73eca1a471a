"""The llamacpp target: trees, commits and truncation against decoding one by one."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import (
    BackendError,
    ContextError,
    FormatError,
    UnsupportedError,
    UsageError,
)
from edgespec.targets import llamacpp, llamacpp_library
from edgespec.targets.llamacpp import LlamaCppTarget
from edgespec.tree.shape import from_record
from edgespec.tree.topology import Tree, chain
from edgespec_export import pipeline
from tests.export import checkpoints

CONTEXT = 256
PROMPT = 40
# Keys and values are stored as float16, the inputs of quantised weights rounded to
# 8 bits: either may fall to the other side. A wrong row would be off by several units.
TOLERANCE = {"f16": 0.01, "q4_1": 0.3}
PARENT = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]
RANK = [0, 0, 1, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
PATHS = ([0], [0, 1, 4, 9, 14], [0, 2, 6], [0, 2, 7, 12], [0, 3, 8, 13])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights, exported in full precision and in blocks."""
    directory = tmp_path_factory.mktemp("llamacpp")
    source = checkpoints.hf_checkpoint(directory / "hf")
    made = {}
    for quant in ("f16", "q4_1"):
        bundle = pipeline.export(
            source, directory / quant, formats=("gguf",), quant=quant, check=False
        )
        made[quant] = Path(bundle.path_of("target.gguf"))
    return made


@pytest.fixture(scope="module", params=["f16", "q4_1"])
def loaded(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Any]:
    made = LlamaCppTarget(files[request.param], context=CONTEXT, threads=1)
    yield made
    made.close()


@pytest.fixture
def target(loaded: LlamaCppTarget) -> LlamaCppTarget:
    """Loaded once, with an empty cache."""
    loaded.truncate(0)
    return loaded


def words(target: LlamaCppTarget, count: int, seed: int = 0) -> NDArray[np.int32]:
    random = np.random.default_rng(seed)
    return random.integers(0, target.vocab, count).astype(np.int32)


def grown(
    target: LlamaCppTarget, parent: Sequence[int] = PARENT, seed: int = 1
) -> Tree:
    ranks = [0] * len(parent)
    for row in range(1, len(parent)):
        ranks[row] = sum(p == parent[row] for p in parent[1:row])
    shape = from_record(list(parent), ranks, where="test")
    tokens = words(target, shape.n, seed)
    return Tree(tokens, shape.parent, shape.rank, shape.depth, shape.mask)


def one_by_one(target: LlamaCppTarget, tokens: Sequence[int]) -> NDArray[np.float32]:
    rows = []
    for token in tokens:
        rows.append(target.forward(chain(np.array([token], np.int32)))[0].copy())
        target.commit(np.zeros(1, np.int32))
    return np.array(rows)


def assert_same(
    target: LlamaCppTarget, found: NDArray[np.float32], expected: NDArray[np.float32]
) -> None:
    assert expected.std() > 1  # else closeness would say little
    quant = target.path.parent.name
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[quant], rtol=0)


def cells(target: LlamaCppTarget) -> dict[int, int]:
    """Highest position of every sequence that has cells."""
    api, memory = target._api, target._memory
    last = {s: api.llama_memory_seq_pos_max(memory, s) for s in range(64)}
    return {s: position for s, position in last.items() if position >= 0}


def test_tree_rows_equal_their_paths_decoded_one_by_one(
    target: LlamaCppTarget,
) -> None:
    target.prefill(words(target, PROMPT))
    tree = grown(target)
    logits = target.forward(tree).copy()
    assert logits.shape == (tree.n, target.vocab)
    for path in PATHS:
        target.truncate(PROMPT)
        assert_same(
            target, logits[path], one_by_one(target, tree.tokens[path].tolist())
        )


@pytest.mark.parametrize("path", PATHS)
def test_c05_commit_of_a_path_with_gaps_equals_decoding_it(
    target: LlamaCppTarget, path: list[int]
) -> None:
    prompt = words(target, PROMPT)
    target.prefill(prompt)
    tree = grown(target)
    target.forward(tree)
    target.commit(np.array(path, np.int32))
    assert target.length == PROMPT + len(path)
    assert cells(target) == {0: PROMPT + len(path) - 1}
    after = grown(target, seed=2)
    found = target.forward(after).copy()
    target.truncate(PROMPT)
    one_by_one(target, tree.tokens[path].tolist())
    assert_same(target, found, target.forward(after))


def test_rejected_rows_are_gone(target: LlamaCppTarget) -> None:
    """More rounds than the cache could hold if anything were left behind."""
    target.prefill(words(target, PROMPT))
    for seed in range(40):
        target.forward(grown(target, seed=seed))
        assert max(cells(target)) == 4  # five leaves
        if seed % 3 == 0:
            target.commit(np.array([0, 3, 8], np.int32)[: seed % 2 + 1])
        elif seed % 3 == 1:
            target.commit(np.array([], np.int32))
            assert cells(target) == {0: target.length - 1}
    target.truncate(PROMPT)
    assert cells(target) == {0: PROMPT - 1}
    found = target.forward(grown(target)).copy()
    target.truncate(0)
    assert cells(target) == {}
    target.prefill(words(target, PROMPT))
    assert_same(target, found, target.forward(grown(target)))


def test_forward_drops_what_was_never_committed(target: LlamaCppTarget) -> None:
    target.prefill(words(target, PROMPT))
    target.forward(grown(target, seed=5))
    target.forward(grown(target, [-1, 0], seed=6))
    assert cells(target) == {0: PROMPT + 1}
    found = target.forward(grown(target)).copy()
    target.truncate(PROMPT)
    assert_same(target, found, target.forward(grown(target)))


def test_c30_truncate_then_continue_equals_fresh(target: LlamaCppTarget) -> None:
    long, short = words(target, 90), words(target, 60, seed=3)
    short[:25] = long[:25]
    target.prefill(long)
    target.truncate(25)
    found = target.prefill(short[25:]).copy()
    assert target.length == 60
    target.truncate(0)
    assert_same(target, found, target.prefill(short))
    # The same prompt again evaluates its last token only.
    target.truncate(59)
    assert_same(target, target.prefill(short[59:]), found)


def test_a_prompt_longer_than_a_batch(files: dict[str, Path]) -> None:
    target = LlamaCppTarget(files["f16"], context=600, threads=1)
    prompt = words(target, 2 * llamacpp.BATCH + 20)
    found = target.prefill(prompt).copy()
    assert target.length == len(prompt)
    target.truncate(0)
    for start in range(0, len(prompt), 100):
        expected = target.prefill(prompt[start : start + 100])
    assert_same(target, found, expected)
    target.close()


def test_logits_only_of_the_rows_asked_for(target: LlamaCppTarget) -> None:
    target.prefill(words(target, PROMPT))
    tree = grown(target)
    everything = target.forward(tree).copy()
    rows = np.array([2, 7, 15])
    np.testing.assert_array_equal(target.forward(tree, rows), everything[rows])


@pytest.mark.parametrize("leaves", [1, 63])
def test_widest_and_deepest_trees(target: LlamaCppTarget, leaves: int) -> None:
    parent = [-1, *([0] * 63 if leaves == 63 else range(63))]
    target.prefill(words(target, PROMPT))
    tree = grown(target, parent)
    logits = target.forward(tree).copy()
    last = [0, 63] if leaves == 63 else list(range(64))
    target.commit(np.array(last, np.int32))
    target.truncate(PROMPT)
    assert_same(target, logits[last], one_by_one(target, tree.tokens[last].tolist()))


def test_c27_the_context_is_usable_to_its_last_row(target: LlamaCppTarget) -> None:
    target.prefill(words(target, CONTEXT - 16))
    target.forward(grown(target))
    with pytest.raises(ContextError, match=f"17 rows behind {CONTEXT - 16}"):
        target.forward(grown(target, [*PARENT, 11]))
    with pytest.raises(ContextError, match="17 rows"):
        target.prefill(words(target, 17))
    target.forward(grown(target))
    target.commit(np.array([0, 2, 6, 11], np.int32))
    target.forward(chain(words(target, 12)))
    target.commit(np.arange(12, dtype=np.int32))
    assert target.length == CONTEXT
    with pytest.raises(ContextError):
        target.forward(chain(words(target, 1)))


def test_no_commit_but_of_a_path_from_the_root(target: LlamaCppTarget) -> None:
    target.prefill(words(target, 4))
    with pytest.raises(UsageError, match="path of the last forward"):
        target.commit(np.array([0], np.int32))
    target.forward(grown(target))
    for rows in ([1, 4], [0, 4], [0, 2, 1], [0, 1, 16], [0, 0], [-1]):
        with pytest.raises(UsageError, match="path of the last forward"):
            target.commit(np.array(rows, np.int32))
    target.commit(np.array([0, 1], np.int32))
    assert target.length == 6
    for length in (-1, 7):
        with pytest.raises(UsageError, match="0 to 6"):
            target.truncate(length)


def test_tokens_outside_the_vocabulary_are_refused(target: LlamaCppTarget) -> None:
    target.prefill(words(target, 4))
    for bad in (-1, target.vocab):
        with pytest.raises(UsageError, match=f"token {bad}: expected 0 to"):
            target.forward(chain(np.array([3, bad], np.int32)))
        with pytest.raises(UsageError, match=f"token {bad}"):
            target.prefill(np.array([bad], np.int32))
    with pytest.raises(UsageError, match="at least one token"):
        target.prefill(np.array([], np.int32))
    with pytest.raises(UsageError, match="1 to 256 rows"):
        target.forward(chain(words(target, 257)))
    assert target.length == 4


@pytest.mark.parametrize(
    ("status", "error", "words_"),
    [
        (1, ContextError, "no free KV cells"),
        (2, BackendError, "was aborted"),
        (-3, BackendError, r"failed \(-3\)"),
    ],
)
def test_failed_decodes_leave_the_committed_rows(
    target: LlamaCppTarget,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    error: type[Exception],
    words_: str,
) -> None:
    target.prefill(words(target, PROMPT))
    expected = target.forward(grown(target)).copy()
    target.commit(np.array([], np.int32))
    decode = target._api.llama_decode

    def fail(*args: Any) -> int:
        decode(*args)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(target._api, "llama_decode", fail)
        with pytest.raises(error, match=words_):
            target.forward(grown(target, seed=9))
        with pytest.raises(error, match=words_):
            target.prefill(words(target, 7))
    assert target.length == PROMPT
    assert cells(target) == {0: PROMPT - 1}
    assert_same(target, target.forward(grown(target)), expected)


def test_row_invariance_is_measured(files: dict[str, Path]) -> None:
    """float16 weights take another kernel for one row; 8-bit blocks hide it here."""
    for quant, expected in (("f16", False), ("q4_1", True)):
        target = LlamaCppTarget(files[quant], context=CONTEXT, threads=1)
        assert target.capabilities.row_invariant is expected
        assert target.capabilities.tree
        assert target.length == 0
        assert cells(target) == {}
        target.close()


def test_flash_attention_gives_the_same_logits(files: dict[str, Path]) -> None:
    both = [
        LlamaCppTarget(files["f16"], context=CONTEXT, threads=1, flash_attention=on)
        for on in (False, True)
    ]
    logits = []
    for target in both:
        target.prefill(words(target, PROMPT))
        logits.append(target.forward(grown(target)).copy())
        target.close()
    np.testing.assert_allclose(*logits, atol=0.1)


def test_closing_twice_and_loading_in_silence(
    files: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    target = LlamaCppTarget(files["q4_1"], context=CONTEXT, threads=1)
    target.prefill(words(target, 3))
    target.close()
    target.close()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_files_that_are_not_models(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        LlamaCppTarget(tmp_path / "absent.gguf", context=8, threads=1)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04")
    with pytest.raises(FormatError, match="expected a GGUF file"):
        LlamaCppTarget(other, context=8, threads=1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["q4_1"].read_bytes()[:-100])
    with pytest.raises(BackendError, match=r"cut\.gguf: llama\.cpp cannot load it: "):
        LlamaCppTarget(cut, context=8, threads=1)
    with pytest.raises(UsageError, match="expected 1 or more"):
        LlamaCppTarget(files["q4_1"], context=0, threads=1)


def test_recurrent_models_are_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = llamacpp_library.library()
    monkeypatch.setattr(api, "llama_model_is_recurrent", lambda model: True)
    with pytest.raises(UnsupportedError, match="attention only"):
        LlamaCppTarget(files["q4_1"], context=8, threads=1)


def test_a_missing_or_old_package_names_the_remedy(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = llamacpp_library.library()
    monkeypatch.setattr(llamacpp_library, "_api", None)
    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_context_params", object)
        with pytest.raises(BackendError, match="too old"):
            LlamaCppTarget(files["q4_1"], context=8, threads=1)
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llama_cpp":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendError, match=r"pip install 'edgespec\[llama\]'"):
        LlamaCppTarget(files["q4_1"], context=8, threads=1)


def test_smollm2_says_something_sensible_through_trees(smollm2_gguf: Path) -> None:
    """Greedy text through trees with one wrong and one right branch equals plain."""
    target = LlamaCppTarget(smollm2_gguf, context=128, threads=1)
    prompt = np.array([504, 3575, 282, 4649, 314], np.int32)  # The capital of France is
    plain = [int(target.prefill(prompt).argmax())]
    margins = []
    while len(plain) < 5:
        row = target.forward(chain(np.array(plain[-1:], np.int32)))[0]
        best = np.partition(row, -2)[-2:]
        margins.append(best[1] - best[0])
        plain.append(int(row.argmax()))
        target.commit(np.zeros(1, np.int32))
    assert plain[0] == 7042  # Paris
    assert min(margins) > 0.5
    target.truncate(len(prompt))
    shape = from_record([-1, 0, 0, 2, 3], [0, 0, 1, 0, 0], where="test")
    said = plain[:1]
    while len(said) < 5:
        draft = [*said[-1:], 11, *plain[len(said) : len(said) + 2], 11]
        draft += [11] * (5 - len(draft))
        tokens = np.array(draft, np.int32)
        tree = Tree(tokens, shape.parent, shape.rank, shape.depth, shape.mask)
        logits = target.forward(tree)
        rows, new = [0], [int(logits[0].argmax())]
        for row in (2, 3, 4):
            if tree.tokens[row] != new[-1]:
                break
            rows.append(row)
            new.append(int(logits[row].argmax()))
        target.commit(np.array(rows, np.int32))
        said += new
    assert said[:5] == plain
    target.close()
