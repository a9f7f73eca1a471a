"""A host with nothing but ONNX Runtime: a draft head's graph wired to a target's graph.

Run as: python head_host.py TARGET DRAFT|- N ID,ID,... [TAP,TAP,...]; the taps are those
of an EAGLE-3 head. Prints {"tokens", "forwards"}.
"""

import json
import sys

import numpy as np
import onnxruntime as ort

CAPACITY = 256


def open_session(path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Graph:
    """A session and its KV buffers, read and written in place."""

    def __init__(self, path):
        self.session = open_session(path)
        self.length = 0
        self.buffers = {}
        for value in self.session.get_inputs():
            if value.name.startswith(("past_key_", "past_value_")):
                shape = [1, value.shape[1], CAPACITY, value.shape[3]]
                self.buffers[value.name] = np.zeros(shape, np.float32)

    def run(self, inputs, outputs):
        binding = self.session.io_binding()
        for name in outputs:
            binding.bind_output(name)
        if self.buffers:
            inputs = inputs | {"past_len": np.array([self.length], np.int64)}
        for name, value in inputs.items():
            binding.bind_cpu_input(name, value)
        for name, buffer in self.buffers.items():
            where = ("cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_input(name, *where)
            binding.bind_output(name.replace("past", "present"), *where)
        self.session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[: len(outputs)]]


class Target(Graph):
    def __init__(self, path, taps):
        super().__init__(path)
        self.features = [f"tap_{tap}" for tap in taps] or ["hidden"]

    def forward(self, ids, mask, depth):
        """Logits and what the head takes, by row."""
        inputs = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "tree_mask": mask,
            "tree_depth": depth,
            "logit_rows": np.arange(len(ids), dtype=np.int64),
        }
        logits, *features = self.run(inputs, ["logits", *self.features])
        return logits[0], np.concatenate(features, axis=-1)[0]

    def commit(self, path):
        for buffer in self.buffers.values():
            rows = buffer[:, :, [self.length + row for row in path]]
            buffer[:, :, self.length : self.length + len(path)] = rows
        self.length += len(path)


class Draft(Graph):
    def propose(self, tokens, features):
        """A tree behind the tokens that followed rows with these features."""
        outputs = ["draft_tokens", "tree_parent", "tree_mask", "tree_depth"]
        tokens = np.array(tokens, np.int64)
        if not self.buffers:
            inputs = {"root": tokens[-1:], "hidden": features[-1:]}
            return self.run(inputs, outputs)
        found = self.run({"tokens": tokens, "taps": features}, outputs)
        self.length += len(tokens)
        return found


def generate(target_path, draft_path, prompt, count, taps):
    target = Target(target_path, taps)
    draft = None if draft_path == "-" else Draft(draft_path)
    ids = list(prompt)
    n = len(ids) - 1
    chain = np.tri(n, dtype=bool), np.arange(n, dtype=np.int64)
    _, features = target.forward(ids[:-1], *chain)
    target.commit(range(n))
    news = ids[1:]
    forwards = 0
    while len(ids) < len(prompt) + count:
        if draft is None:
            tokens, parent = np.array(ids[-1:]), [-1]
            mask, depth = np.ones((1, 1), bool), np.zeros(1, np.int64)
        else:
            tokens, parent, mask, depth = draft.propose(news, features)
            assert tokens[0] == ids[-1]
        logits, features = target.forward(tokens, mask, depth)
        best = logits.argmax(axis=1)
        forwards += 1
        row, path = 0, [0]
        while True:
            ids.append(int(best[row]))
            children = [c for c in range(len(tokens)) if parent[c] == row]
            hits = [c for c in children if tokens[c] == best[row]]
            if not hits:
                break
            row = hits[0]
            path.append(row)
        target.commit(path)
        news, features = ids[-len(path) :], features[path]
    return ids[len(prompt) : len(prompt) + count], forwards


if __name__ == "__main__":
    _, target_path, draft_path, count, prompt, *taps = sys.argv
    tokens, forwards = generate(
        target_path,
        draft_path,
        [int(i) for i in prompt.split(",")],
        int(count),
        [int(i) for i in taps[0].split(",")] if taps else [],
    )
    assert not any(name.startswith("edgespec") for name in sys.modules)
    print(json.dumps({"tokens": tokens, "forwards": forwards}))
