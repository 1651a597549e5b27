"""The local trainer: one process, one policy, one engine beside it.

``main`` begins a run; ``sft`` and ``grpo`` are its two methods. ``setting`` opens engine, gateway and boxes,
``collector`` plays episodes into the pool, ``judging`` and ``teaching`` add what a judge says, ``batch`` makes tensors
of a batch, ``learner`` updates the ``policy``, ``checkpoints`` and ``run`` write what is kept.
"""
