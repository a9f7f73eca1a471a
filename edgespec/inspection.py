"""What a model is made of, what it needs, and how close to the memory wall it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bundle import Model
from edgespec.config import DEFAULT_CONTEXT, Runtime
from edgespec.drafts.available import available
from edgespec.errors import (
    EdgeSpecError,
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.gguf_header import (
    check_shards,
    logical_tensors,
    open_gguf,
    shards,
)
from edgespec.gguf_model import read_architecture, read_gguf_model
from edgespec.manifest import TARGETS, Architecture
from edgespec.tree.topology import MAX_ROWS, Tree

if TYPE_CHECKING:
    from edgespec.machine import Rates

# Of one value: ONNX graphs keep float32, the native engine and llama.cpp float16.
KV_BYTES = {"onnx": 4, "gguf": 2, "packed": 2}
EMBEDDINGS = {"Gather", "GatherBlockQuantized"}  # ops that read rows, not whole tables


@dataclass(frozen=True, slots=True)
class TypeUse:
    """Tensors stored in one type."""

    tensors: int
    bytes: int | None  # None: the manifest alone was read


@dataclass(frozen=True, slots=True)
class Layout:
    """How one container stores the weights, and what one forward has to touch."""

    file: str
    bytes: int  # of all weights
    types: Mapping[str, TypeUse]
    read_bytes: int | None  # weights a forward reads, whatever its rows; None: unknown
    macs: int | None  # multiply-accumulates with weights per row
    note: str


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A draft head the model has, by what --draft calls it."""

    option: str
    kind: str
    bytes: int  # of its file
    origin: str  # "bundle", or "edgespec", which it came with


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes needed at a context, by backend. Buffers are an estimate."""

    weights: int
    kv: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers


@dataclass(frozen=True, slots=True)
class Floor:
    """The memory wall: the best possible time per token."""

    read_bytes: int  # per token: weights, and the KV rows of a full context
    ms: float  # with the context full
    ms_empty: float  # with nothing in the context


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything known about a model without running it."""

    name: str
    path: Path
    architecture: Architecture | None
    layouts: Mapping[str, Layout]  # by container: gguf, onnx
    tree: Tree | None  # stored with the model
    drafts: tuple[StoredDraft, ...] = ()


def inspect_bundle(bundle: Model) -> Inspection:
    """Reads a bundle: its manifest, and its containers where readers are installed."""
    layouts: dict[str, Layout] = {}
    tree = None
    readers = {"gguf": read_gguf, "packed": read_gguf, "onnx": read_onnx}
    for container, stored in bundle.manifest.quantisation.items():
        file = TARGETS[container]
        try:
            found = readers[container](bundle.path_of(file))
        except ImportError:
            types = {name: TypeUse(n, None) for name, n in stored.types.items()}
            layout = Layout(file, stored.bytes, types, None, None, stored.note)
        else:
            (layout,) = found.layouts.values()
            layout = Layout(**{**_fields(layout), "note": stored.note})
            tree = tree or found.tree
        layouts[container] = layout
    return Inspection(
        name=bundle.manifest.name,
        path=bundle.directory,
        architecture=bundle.manifest.architecture,
        layouts=layouts,
        tree=tree,
        drafts=_drafts(bundle),
    )


def _drafts(model: Model) -> tuple[StoredDraft, ...]:
    return tuple(
        StoredDraft(f"{head.word}:{head.name}", head.kind, head.size, head.origin)
        for head in available(model)
    )


def inspect_file(path: Path) -> Inspection:
    """Reads a .gguf or .onnx file. Raises FormatError for anything else."""
    readers = {".gguf": read_gguf, ".onnx": read_onnx}
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file")
    if path.suffix not in readers or not path.is_file():
        raise FormatError(
            f"{path}: expected a bundle directory, a .gguf or a .onnx file"
        )
    try:
        found = readers[path.suffix](path)
    except ImportError as error:
        raise UnsupportedError(
            f"{path}: reading it needs {error.name}; "
            "install it with: pip install 'edgespec[export]'"
        ) from None
    if path.suffix != ".gguf":
        return found
    try:
        return replace(found, drafts=_drafts(read_gguf_model(path)))
    except EdgeSpecError:  # a file that is shown although it does not run
        return found


def read_gguf(path: Path) -> Inspection:
    """A GGUF file, or all its shards, by the headers."""
    files = [open_gguf(shard) for shard in shards(path)]
    check_shards(files)
    metadata = files[0].metadata
    tensors = [tensor for file in files for tensor in logical_tensors(file)]
    names = {tensor.name for tensor in tensors}
    types: dict[str, TypeUse] = {}
    read = macs = 0
    for tensor in tensors:
        use = types.get(tensor.kind, TypeUse(0, 0))
        types[tensor.kind] = TypeUse(use.tensors + 1, (use.bytes or 0) + tensor.n_bytes)
        if tensor.name == "token_embd.weight" and "output.weight" in names:
            continue  # untied: a forward reads single rows of it
        read += tensor.n_bytes
        if len(tensor.shape) > 1:
            size = 1
            for side in tensor.shape:
                size *= side
            macs += size

    layout = Layout(
        file=path.name,
        bytes=sum(tensor.n_bytes for tensor in tensors),
        types=types,
        read_bytes=read,
        macs=macs,
        note="",
    )
    return Inspection(
        name=str(metadata.get("general.name", path.stem)),
        path=path,
        architecture=read_architecture(metadata, tensors),
        layouts={"gguf": layout},
        tree=_stored_tree(metadata, str(path)),
    )


def read_onnx(path: Path) -> Inspection:
    """An ONNX graph by its nodes and initialisers; external data is not read."""
    import onnx

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # protobuf's errors share no public base
        raise FormatError(f"{path}: not an ONNX graph: {error}") from None
    if not graph.node:
        raise FormatError(f"{path}: not an ONNX graph: it has no nodes")
    types: dict[str, TypeUse] = {}
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in graph.initializer:
        shape = tuple(tensor.dims)
        count = 1
        for side in shape:
            count *= side
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        sizes[tensor.name] = count * kind.itemsize
        shapes[tensor.name] = shape
        use = types.get(kind.name, TypeUse(0, 0))
        types[kind.name] = TypeUse(
            use.tensors + 1, (use.bytes or 0) + sizes[tensor.name]
        )
    read: set[str] = set()
    macs = 0
    for node in graph.node:
        if node.op_type in EMBEDDINGS:
            continue
        read.update(name for name in node.input if name in sizes)
        if node.op_type == "MatMulNBits":
            sides = {a.name: a.i for a in node.attribute}
            macs += sides["K"] * sides["N"]
        elif node.op_type in ("MatMul", "Gemm"):
            weights = [shapes[name] for name in node.input if name in shapes]
            macs += sum(shape[0] * shape[1] for shape in weights if len(shape) == 2)
    layout = Layout(
        file=path.name,
        bytes=sum(sizes.values()),
        types=types,
        read_bytes=sum(sizes[name] for name in read),
        macs=macs,
        note="",
    )
    return Inspection(path.stem, path, None, {"onnx": layout}, None)


def default_context(architecture: Architecture) -> int:
    """The context a model gets when none is asked for."""
    return min(DEFAULT_CONTEXT, architecture.max_position or DEFAULT_CONTEXT)


def memory(inspection: Inspection, container: str, context: int) -> Memory:
    """What running a container at a context takes; UsageError without sizes.

    Of a GGUF, what the native engine says; an estimate for what it does not run.
    """
    shape = _shape(inspection)
    kv = kv_row_bytes(shape, container) * context
    if container != "onnx":
        native = _native_memory(inspection, container, context, kv)
        if native is not None:
            return native
    rows = min(Runtime().prefill_chunk, context)
    heads = shape.n_heads * shape.head_dim
    activations = rows * (4 * shape.hidden + 3 * shape.ffn + 2 * heads)
    attention = shape.n_heads * rows * context + rows * context
    logits = MAX_ROWS * shape.vocab
    return Memory(
        weights=inspection.layouts[container].bytes,
        kv=kv,
        buffers=4 * (activations + attention + logits),
    )


def _native_memory(
    inspection: Inspection, container: str, context: int, kv: int
) -> Memory | None:
    from edgespec._native import NativeModel, target_memory

    path = inspection.path
    if path.is_dir():
        path = path / TARGETS[container]
    try:
        model = NativeModel(path, threads=1)
        needed = target_memory(model, context=context)
    except EdgeSpecError:
        return None
    weights = model.info.weight_bytes
    model.close()
    return Memory(weights=weights, kv=min(kv, needed), buffers=max(0, needed - kv))


def kv_row_bytes(shape: Architecture, container: str) -> int:
    """Bytes that one position takes in the KV cache."""
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * KV_BYTES[container]


def floor(
    inspection: Inspection, container: str, context: int, rates: Rates
) -> Floor | None:
    """Best possible milliseconds per token; None when the bytes read are unknown."""
    weights = inspection.layouts[container].read_bytes
    if weights is None or inspection.architecture is None:
        return None
    read = weights + kv_row_bytes(inspection.architecture, container) * context
    per_ms = rates.read_gb_per_s * 1e6
    return Floor(read_bytes=read, ms=read / per_ms, ms_empty=weights / per_ms)


def _shape(inspection: Inspection) -> Architecture:
    if inspection.architecture is None:
        raise UsageError(
            f"{inspection.path}: the file does not state the model's sizes, so memory "
            "cannot be told; inspect its bundle directory"
        )
    return inspection.architecture


def _stored_tree(metadata: Mapping[str, Any], where: str) -> Tree | None:
    from edgespec.tree.shape import from_record

    parent = metadata.get("edgespec.tree.parent")
    rank = metadata.get("edgespec.tree.rank")
    if parent is None or rank is None:
        return None
    return from_record([int(p) for p in parent], [int(r) for r in rank], where=where)


def _fields(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in Layout.__slots__}


def as_object(inspection: Inspection) -> dict[str, Any]:
    """The part of `inspect --json` that does not depend on the machine."""
    return {
        "name": inspection.name,
        "path": str(inspection.path),
        "architecture": inspection.architecture and asdict(inspection.architecture),
        "containers": {
            name: {
                **_fields(layout),
                "types": {kind: asdict(use) for kind, use in layout.types.items()},
            }
            for name, layout in inspection.layouts.items()
        },
        "tree": inspection.tree
        and {
            "parent": inspection.tree.parent.tolist(),
            "rank": inspection.tree.rank.tolist(),
        },
        "drafts": [asdict(draft) for draft in inspection.drafts],
    }
