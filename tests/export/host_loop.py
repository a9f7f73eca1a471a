"""A host with nothing but ONNX Runtime: wires a draft graph to a target graph.

Run as: python host_loop.py TARGET DRAFT|- N ID,ID,...; prints {"tokens", "forwards"}.
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


class Target:
    def __init__(self, path):
        self.session = open_session(path)
        self.length = 0
        self.buffers = {}
        for value in self.session.get_inputs():
            if value.name.startswith(("past_key_", "past_value_")):
                shape = [1, value.shape[1], CAPACITY, value.shape[3]]
                self.buffers[value.name] = np.zeros(shape, np.float32)

    def forward(self, ids, mask, depth):
        binding = self.session.io_binding()
        binding.bind_output("logits")
        rows = np.arange(len(ids), dtype=np.int64)
        binding.bind_cpu_input("input_ids", np.asarray(ids, np.int64)[None])
        binding.bind_cpu_input("tree_mask", mask)
        binding.bind_cpu_input("tree_depth", depth)
        binding.bind_cpu_input("past_len", np.array([self.length], np.int64))
        binding.bind_cpu_input("logit_rows", rows)
        for name, buffer in self.buffers.items():
            where = ("cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_input(name, *where)
            binding.bind_output(name.replace("past", "present"), *where)
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()[0]

    def commit(self, path):
        for buffer in self.buffers.values():
            rows = buffer[:, :, [self.length + row for row in path]]
            buffer[:, :, self.length : self.length + len(path)] = rows
        self.length += len(path)


def generate(target_path, draft_path, prompt, count):
    target = Target(target_path)
    draft = None if draft_path == "-" else open_session(draft_path)
    ids = list(prompt)
    n = len(ids) - 1
    target.forward(ids[:-1], np.tri(n, dtype=bool), np.arange(n, dtype=np.int64))
    target.commit(range(n))
    forwards = 0
    while len(ids) < len(prompt) + count:
        if draft is None:
            tokens, parent = np.array(ids[-1:]), [-1]
            mask, depth = np.ones((1, 1), bool), np.zeros(1, np.int64)
        else:
            wanted = ["draft_tokens", "tree_parent", "tree_mask", "tree_depth"]
            got = draft.run(wanted, {"ids": np.array(ids, np.int64)})
            tokens, parent, mask, depth = got
        best = target.forward(tokens, mask, depth).argmax(axis=1)
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
    return ids[len(prompt) : len(prompt) + count], forwards


if __name__ == "__main__":
    _, target_path, draft_path, count, prompt = sys.argv
    tokens, forwards = generate(
        target_path, draft_path, [int(i) for i in prompt.split(",")], int(count)
    )
    assert not any(name.startswith("edgespec") for name in sys.modules)
    print(json.dumps({"tokens": tokens, "forwards": forwards}))
