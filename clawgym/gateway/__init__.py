"""The gateway: an OpenAI-compatible server between agents and engines that records every token.

Modules, in the order in which a request passes them:

- ``server`` (listeners, routes, secrets) and ``control`` (the owner's API) take requests.
- ``dialects`` translate wire formats to and from ``calls``, a checked request.
- ``core`` runs one turn. ``sessions`` and ``stitch`` find the turn that it continues, ``roles`` what it is for,
  ``render`` makes its token ids, ``gate`` limits how many run.
- An engine samples; ``decode`` and ``parsers`` turn its ids into a message; the pool's writer stores the turn.

A new wire format is a file in ``dialects``. A new way in which agents rewrite their history is a rule in ``stitch``,
documented in ``docs/concepts/exact-tokens.md``.
"""
