"""The ONNX Runtime target on tiny random checkpoints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec._native import tree_derive
from edgespec.config import Sampling, Speculation, Stopping
from edgespec.errors import (
    BackendError,
    ContextError,
    EdgeSpecError,
    FormatError,
    UsageError,
)
from edgespec.memory import Memory
from edgespec.session import Session
from edgespec.targets.onnx import OnnxTarget
from edgespec.tree.topology import chain
from edgespec_export import onnx_graph, sources
from tests import toy
from tests.export import checkpoints
from tests.processes import python

KINDS = ("F32", "Q4_1")
PATH = np.array([0, 2, 5, 9], dtype=np.int32)
PARENTS = [-1, 0, 0, 0, 1, 2, 4, 1, 5, 5, 2, 10, 10, 3, 13, 9]
WIDTHS = (1, 2, 3, 4, 8, 16, 32, 64)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, n).astype(np.int32)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Graphs named KIND-ATTENTION-LEVEL."""
    directory = tmp_path_factory.mktemp("graphs")
    found = {}
    for kind in KINDS:
        source = checkpoints.gguf_checkpoint(directory / f"{kind}.gguf", kind=kind)
        for attention in onnx_graph.ATTENTIONS:
            for level in (0, 4):
                path = directory / f"{kind}-{attention}-{level}.onnx"
                onnx_graph.write(
                    sources.read(source),
                    path,
                    attention=attention,
                    accuracy_level=level,
                )
                found[path.stem] = path
    return found


NAMES = [
    f"{k}-{a}-{level}" for k in KINDS for a in ("gqa", "explicit") for level in (0, 4)
]


def target(graphs: dict[str, Path], name: str, **options) -> OnnxTarget:
    options = {"context": 256, "threads": 1} | options
    return OnnxTarget(graphs[name], **options)


def session(model: OnnxTarget, **options) -> Session:
    return Session(model, toy.ToyTokenizer(), eos_ids=(), **options)


@pytest.mark.parametrize("name", [name for name in NAMES if "explicit" in name])
def test_c07_rows_keep_their_bits_at_every_width(graphs, name: str) -> None:
    model = target(graphs, name)
    assert model.capabilities.row_invariant
    model.prefill(tokens(40, 1))
    rows = tokens(64, 2)
    alone = model.forward(chain(rows[:1])).copy()
    for width in WIDTHS:
        beside = model.forward(chain(rows[:width]))
        assert np.array_equal(beside[:1], alone), width


@pytest.mark.parametrize("name", [name for name in NAMES if "explicit" in name])
def test_c07_prefill_in_any_chunks_leaves_the_same_bits(graphs, name: str) -> None:
    prompt = tokens(100, 3)
    states = []
    for chunk in (1, 7, 64, 100):
        model = target(graphs, name)
        for first in range(0, 100, chunk):
            logits = model.prefill(prompt[first : first + chunk])
        states.append((model.kv[:, :, :, :100].copy(), logits.copy()))
    for kv, logits in states[1:]:
        assert np.array_equal(kv, states[0][0])
        assert np.array_equal(logits, states[0][1])


def test_a_graph_that_rounds_lone_rows_differently_gets_twins_or_says_so(
    graphs,
) -> None:
    inexact = target(graphs, "F32-explicit-0", is_exact=False)
    exact = target(graphs, "F32-explicit-0")
    assert (inexact.has_twin_rows, inexact.capabilities.row_invariant) == (False, False)
    assert (exact.has_twin_rows, exact.capabilities.row_invariant) == (True, True)
    assert not target(graphs, "F32-gqa-4").has_twin_rows


def test_a_twin_fits_behind_the_last_row(graphs) -> None:
    limit = checkpoints.Shape().max_position
    model = target(graphs, "F32-explicit-0", context=limit)
    model.prefill(tokens(limit - 1))
    assert model.has_twin_rows
    model.forward(chain(tokens(1)))
    model.commit(np.zeros(1, np.int32))
    assert model.length == limit
    with pytest.raises(ContextError, match=str(limit)):
        model.forward(chain(tokens(1)))


@pytest.mark.parametrize("name", NAMES)
def test_c05_a_scattered_path_is_committed_like_rows_one_by_one(graphs, name) -> None:
    model = target(graphs, name)
    tree = tree_derive(tokens(16, 5), PARENTS)
    model.prefill(tokens(30, 4))
    model.forward(tree)
    model.commit(PATH)
    assert model.length == 34
    committed = model.kv[:, :, :, :34].copy()
    after = model.forward(chain(tokens(1, 6))).copy()
    model.truncate(30)
    for row in PATH:
        model.forward(chain(tree.tokens[row : row + 1]))
        model.commit(np.zeros(1, np.int32))
    expected = model.kv[:, :, :, :34]
    next_expected = model.forward(chain(tokens(1, 6)))
    is_exact = model.capabilities.row_invariant
    tolerance = 0.0 if is_exact else (0.3 if "Q4" in name else 1e-4)
    for part in (0, 1):  # K, V
        difference = np.abs(committed[:, part] - expected[:, part]).max()
        assert difference <= tolerance
    assert np.abs(after - next_expected).max() <= tolerance * 2
    # The rows of another path would have been noticed.
    other = model.kv[:, :, :, 30:33].copy()
    for part in (0, 1):
        spread = np.abs(other[:, part, :, :1] - other[:, part, :, 1:]).max()
        assert spread > max(tolerance, 0.1)


def test_logits_are_given_for_the_rows_asked_for(graphs) -> None:
    model = target(graphs, "F32-explicit-4")
    model.prefill(tokens(5))
    every = model.forward(chain(tokens(6, 1))).copy()
    some = model.forward(chain(tokens(6, 1)), np.array([1, 4]))
    assert every.shape == (6, model.vocab)
    assert np.array_equal(some, every[[1, 4]])
    one = model.forward(chain(tokens(6, 1)), np.array([5]))
    assert np.array_equal(one, every[5:])


def test_rows_that_were_not_committed_leave_nothing_behind(graphs) -> None:
    model = target(graphs, "Q4_1-explicit-4")
    model.prefill(tokens(20))
    expected = model.forward(chain(tokens(1, 1))).copy()
    model.forward(chain(tokens(64, 2)))
    model.forward(chain(tokens(9, 3)))
    model.commit(np.arange(4, dtype=np.int32))
    model.truncate(20)
    assert np.array_equal(model.forward(chain(tokens(1, 1))), expected)


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [0, 3], [-1, 0]])
def test_rows_that_cannot_be_committed_are_refused(graphs, rows) -> None:
    model = target(graphs, "F32-explicit-4")
    model.prefill(tokens(4))
    model.forward(chain(tokens(3)))
    with pytest.raises(UsageError, match="ascending"):
        model.commit(np.array(rows, np.int32))
    assert model.length == 4
    model.commit(np.array([0, 1], np.int32))
    with pytest.raises(UsageError):
        model.commit(np.array([0], np.int32))
    for length in (-1, 7):
        with pytest.raises(UsageError, match="truncate"):
            model.truncate(length)


@pytest.mark.parametrize("options", [{"context": 0}, {"threads": 0}])
def test_sizes_must_be_positive(graphs, options) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        target(graphs, "F32-gqa-4", **options)


@pytest.mark.parametrize("name", [name for name in NAMES if "explicit" in name])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_c08_speculation_gives_the_plain_reply(graphs, name, temperature) -> None:
    """Levels 0 and 4; replies of random weights loop, which n-grams foresee."""
    model = target(graphs, name, context=400)
    sampling = Sampling(temperature=temperature, top_k=2, seed=5)
    for tree in ("auto", "chain:5"):
        engine = session(model, speculation=Speculation(tree=tree))
        for seed in range(3):
            prompt = np.tile(tokens(12, seed), 4).tolist()
            replies = []
            for engine.is_speculating in (False, True):
                engine.reset()
                replies.append(
                    engine.complete(
                        prompt, sampling=sampling, stopping=Stopping(max_tokens=120)
                    )
                )
            assert replies[0].tokens == replies[1].tokens
            assert len(replies[0].tokens) == 120
            assert replies[1].stats.drafted > 0


def test_c01_six_hundred_tokens_with_rejected_drafts(tmp_path: Path) -> None:
    shape = checkpoints.Shape(max_position=640)
    source = checkpoints.gguf_checkpoint(tmp_path / "m.gguf", shape)
    onnx_graph.write(sources.read(source), tmp_path / "m.onnx")
    model = OnnxTarget(tmp_path / "m.onnx", context=640, threads=1)
    engine = session(model, speculation=Speculation(rows=8))
    replies = []
    for engine.is_speculating in (False, True):
        engine.reset()
        replies.append(
            engine.complete(
                tokens(12, 7).tolist(),
                sampling=Sampling(temperature=0.6, top_k=4, seed=1),
                stopping=Stopping(max_tokens=600),
            )
        )
    assert replies[0].tokens == replies[1].tokens
    assert len(replies[0].tokens) == 600
    stats = replies[1].stats
    assert 0 < stats.accepted < stats.drafted


def test_c34_turns_are_dropped_alike_with_and_without_speculation(graphs) -> None:
    template = toy.ToyTemplate(toy.ToyTokenizer())
    replies = []
    for is_speculating in (False, True):
        model = target(graphs, "F32-explicit-4", context=96)
        engine = session(model, template=template)
        engine.is_speculating = is_speculating
        memory, messages = Memory(), [{"role": "system", "content": "s"}]
        said, notices = [], 0
        for turn in range(8):
            messages.append({"role": "user", "content": f"question {turn} " * 2})
            generation = engine.chat(
                messages,
                memory=memory,
                sampling=Sampling(temperature=0),
                stopping=Stopping(max_tokens=40),
            )
            notices += sum(bool(delta.notice) for delta in generation)
            said.append(generation.reply.tokens)
            messages.append({"role": "assistant", "content": generation.reply.text})
        assert notices > 2
        replies.append(said)
    assert replies[0] == replies[1]
    assert all(len(tokens) == 40 for tokens in replies[0])


def test_c06_tree_shapes_on_random_weights(graphs, tmp_path: Path) -> None:
    model = target(graphs, "Q4_1-explicit-4", context=400)
    shape = {"parent": [-1, *(i // 2 for i in range(62))]}
    shape["rank"] = [0, *(i % 2 for i in range(62))]
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(shape))
    replies = {}
    for tree in ("none", "chain:5", "chain:25", str(path)):
        options = {"draft": "none"} if tree == "none" else {"tree": tree}
        engine = session(model, speculation=Speculation(**options))
        engine.reset()
        replies[tree] = engine.complete(
            np.tile(tokens(12, 1), 4).tolist(),
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=200),
        )
    assert len({reply.tokens for reply in replies.values()}) == 1
    assert replies[str(path)].stats.accepted > 0


@pytest.mark.parametrize("length", range(250, 257))
def test_c27_drafting_up_to_the_last_row(graphs, length: int) -> None:
    model = target(graphs, "F32-explicit-4")
    engine = session(model, speculation=Speculation(rows=32))
    reply = engine.complete(
        np.tile(tokens(8), 40)[:length].tolist(), sampling=Sampling(temperature=0)
    )
    assert reply.finish_reason == "context"
    assert len(reply.tokens) == 257 - length
    assert model.length == 256


def test_c33_ten_replies_on_one_handle(graphs) -> None:
    engine = session(target(graphs, "Q4_1-explicit-4", context=264))
    for i in range(10):
        reply = engine.complete(
            tokens(200, i).tolist(), stopping=Stopping(max_tokens=64)
        )
        assert len(reply.tokens) == 64
        if i == 4:
            with pytest.raises(ContextError, match="265"):
                engine.complete([1] * 265)


def test_c40_memory_does_not_grow_with_turns(graphs) -> None:
    """Peak size of a process after 100 replies, against after 10."""
    code = f"""
import resource
from pathlib import Path
from edgespec.config import Stopping
from edgespec.memory import Memory
from edgespec.session import Session
from edgespec.targets.onnx import OnnxTarget
from tests import toy
target = OnnxTarget(Path({str(graphs["Q4_1-explicit-4"])!r}), context=256, threads=1)
session = Session(target, toy.ToyTokenizer(), eos_ids=())
for turn in range(1, 101):
    prompt = [turn % 300, 5, 9] * (1 + turn % 40)
    session.complete(prompt, stopping=Stopping(max_tokens=40))
    if turn in (10, 100):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    result = subprocess.run(
        python(code),
        cwd=Path(__file__).parent.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    early, late = map(int, result.stdout.split())
    assert late <= early * 1.02


def broken(path: Path, change, tmp_path: Path) -> Path:
    model = onnx.load(path)
    change(model.graph)
    out = tmp_path / "target.onnx"
    onnx.save(model, out)
    return out


def rename_input(old: str, new: str):
    def change(graph):
        for value in graph.input:
            if value.name == old:
                value.name = new
        for node in graph.node:
            for i, name in enumerate(node.input):
                if name == old:
                    node.input[i] = new

    return change


def drop_output(name: str):
    def change(graph):
        kept = [value for value in graph.output if value.name != name]
        del graph.output[:]
        graph.output.extend(kept)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename_input("tree_mask", "mask"), "tree_mask.*unexpected: mask"),
        (rename_input("past_value_1", "past_v_1"), "past_value_1"),
        (rename_input("past_len", "length"), "past_len"),
        (drop_output("hidden"), "hidden"),
        (drop_output("present_key_0"), "present_key_0"),
    ],
)
def test_a_graph_with_other_inputs_or_outputs_is_named(
    graphs, change, words, tmp_path: Path
) -> None:
    path = broken(graphs["F32-explicit-4"], change, tmp_path)
    with pytest.raises(FormatError, match=words) as caught:
        OnnxTarget(path, context=64, threads=1)
    assert str(path) in str(caught.value)


def test_an_input_of_another_type_is_named(graphs, tmp_path: Path) -> None:
    def change(graph):
        for value in graph.input:
            if value.name == "tree_depth":
                value.type.tensor_type.elem_type = onnx.TensorProto.INT32
        cast = onnx.helper.make_node("Cast", ["tree_depth"], ["depth64"], to=7)
        for node in graph.node:
            for i, name in enumerate(node.input):
                if name == "tree_depth":
                    node.input[i] = "depth64"
        graph.node.insert(0, cast)

    path = broken(graphs["F32-explicit-4"], change, tmp_path)
    with pytest.raises(FormatError, match=r"tree_depth.*int64.*int32"):
        OnnxTarget(path, context=64, threads=1)


def test_tokens_outside_the_vocabulary_are_refused(graphs) -> None:
    """The graph's Gather would take a negative id for one from the end."""
    model = target(graphs, "F32-explicit-4")
    model.prefill(tokens(4))
    for bad in (-1, model.vocab):
        with pytest.raises(UsageError, match=f"token {bad}: expected 0 to"):
            model.forward(chain(np.array([3, bad], np.int32)))
    with pytest.raises(UsageError, match="at least one token"):
        model.prefill(np.array([], np.int32))
    assert model.length == 4


def test_a_failing_forward_carries_the_message_and_drops_its_rows(graphs) -> None:
    model = target(graphs, "F32-explicit-4")
    model.prefill(tokens(4))
    expected = model.forward(chain(tokens(2))).copy()
    with pytest.raises(BackendError, match="ONNX Runtime") as caught:
        model.forward(chain(tokens(2)), np.array([10**6]))
    assert str(model.path) in str(caught.value)
    with pytest.raises(UsageError):
        model.commit(np.zeros(1, np.int32))
    assert np.array_equal(model.forward(chain(tokens(2))), expected)


@pytest.fixture(scope="module")
def big_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose weights are in a file of their own."""
    directory = tmp_path_factory.mktemp("big")
    shape = checkpoints.Shape(hidden=256, ffn=512)
    source = checkpoints.gguf_checkpoint(directory / "m.gguf", shape, kind="F32")
    onnx_graph.write(sources.read(source), directory / "target.onnx")
    assert (directory / "target.onnx.data").exists()
    return directory


@pytest.mark.parametrize("name", ["target.onnx", "target.onnx.data"])
@pytest.mark.parametrize("size", [0, 37, 1024, -1, -4096])
def test_c37_truncated_files_are_errors_naming_the_file(
    big_graph: Path, name: str, size: int, tmp_path: Path
) -> None:
    for path in big_graph.glob("target.onnx*"):
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:size] if path.name == name else data)
    with pytest.raises(EdgeSpecError, match=r"target\.onnx") as caught:
        OnnxTarget(tmp_path / "target.onnx", context=64, threads=1)
    assert isinstance(caught.value, FormatError | BackendError)


def test_c37_data_cut_at_any_tensor_is_an_error(
    big_graph: Path, tmp_path: Path
) -> None:
    graph = onnx.load(big_graph / "target.onnx", load_external_data=False).graph
    stored = [
        {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
        if tensor.external_data
    ]
    edges = {int(s["offset"]) for s in stored}
    edges |= {int(s["offset"]) + int(s["length"]) for s in stored}
    data = (big_graph / "target.onnx.data").read_bytes()
    (tmp_path / "target.onnx").write_bytes((big_graph / "target.onnx").read_bytes())
    last = max(edges)
    cuts = sorted({edge + d for edge in edges for d in (-1, 0, 1)} - {-1})
    for cut in (cut for cut in cuts if cut < last):
        (tmp_path / "target.onnx.data").write_bytes(data[:cut])
        with pytest.raises(EdgeSpecError, match=r"target\.onnx"):
            OnnxTarget(tmp_path / "target.onnx", context=64, threads=1)


def test_c37_a_missing_data_file_is_an_error_naming_it(
    big_graph: Path, tmp_path: Path
) -> None:
    (tmp_path / "target.onnx").write_bytes((big_graph / "target.onnx").read_bytes())
    with pytest.raises(BackendError, match=r"target\.onnx\.data"):
        OnnxTarget(tmp_path / "target.onnx", context=64, threads=1)
    with pytest.raises(FormatError, match="no such file"):
        OnnxTarget(tmp_path / "nothing.onnx", context=64, threads=1)
