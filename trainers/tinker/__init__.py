"""The trainer ``tinker``: a service that speaks the Tinker API samples and trains; episodes run here.

``main`` refuses what the API cannot express, and starts a run of the local trainer's loop with ``state``: the policy,
the engine and the learner on the service.
"""
