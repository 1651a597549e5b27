"""The gateway: an OpenAI-compatible server between agents and engines that records every token.

Where things are, from outside to inside: ``server`` (listeners, routes, secrets) and ``control`` (the owner's API) take
requests; ``dialects`` translate wire formats to and from ``calls`` (one checked request); ``core`` runs one turn:
``sessions`` and ``stitch`` say what it continues, ``roles`` what it is for, ``render`` makes its ids, ``gate`` lets it
start, an engine samples, ``decode`` and ``parsers`` read the answer, and the pool's writer stores it. A new wire format
is a file in ``dialects``; a new rewrite that agents do is a rule in ``stitch``, with its line in ``docs/gateway.md``.
"""
