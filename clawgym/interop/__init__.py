"""Adapters to other packages, one file each. They are imported by name, and import the other package when used.

- :mod:`clawgym.interop.acp`: any program that speaks the Agent Client Protocol is an agent.
- :mod:`clawgym.interop.data`: data sets of ``datasets`` are task sets and pools, pools are verl's ``DataProto``.
- :mod:`clawgym.interop.mcp`: assistants run and compare evaluations.
- :mod:`clawgym.interop.openenv`: OpenEnv's clients step our environments, and ``gym.make`` steps its environments.
- :mod:`clawgym.interop.inspect`: our sandboxes and tasks in Inspect AI, its tasks in our evaluation, our runs as its
  logs.
- :mod:`clawgym.interop.nemo_gym`: our tasks and sandboxes as a resources server of NeMo Gym.
- :mod:`clawgym.interop.otel`: OpenTelemetry shows the episodes of a run as traces.
- :mod:`clawgym.interop.traces`: exact tokens of a pool for Agent Lightning, AReaL and SkyRL.
- :mod:`clawgym.interop.trl`: ``GRPOTrainer`` trains on episodes of our environments.
- :mod:`clawgym.interop.verifiers`: our task sets and sandboxes in verifiers, its tasks in our evaluation.
"""
