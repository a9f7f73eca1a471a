"""Draft heads trained on what their target writes.

`texts` makes prompts, `writing` has the target answer many at once, `shards` keeps what
it wrote, `data` runs the three. `packing` makes batches of the shards; `loop` trains
any head on them; `eagle3`, `medusa` and `pruned` are heads; `layouts` writes them.
"""
