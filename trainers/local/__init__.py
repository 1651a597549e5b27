"""The local trainer: one process, one policy, one engine beside it.

``main`` starts a run; ``sft`` and ``grpo`` are its two methods. ``learner`` updates the policy. From
``clawgym.trainers.common``: ``services`` opens engine, gateway and sandboxes; ``collector`` runs episodes into the
pool; ``judging`` and ``teaching`` add process rewards and teachers; ``batch`` makes tensors; ``checkpoints`` and
``run`` write the run folder.
"""
