"""Black boxes: agent programs of others, unmodified, in a box, with our gateway for a model.

:class:`Claw` says how one kind of program gets into a box and is talked to; :class:`BlackBoxAgent` makes an
:class:`~clawgym.agents.protocol.Agent` of it. ``docs/new-agent.md`` adds one in one file.
"""

from clawgym.agents.blackbox.agent import BlackBoxAgent
from clawgym.agents.blackbox.protocol import Claw, ClawStopped, ModelLink, Running

__all__ = ["BlackBoxAgent", "Claw", "ClawStopped", "ModelLink", "Running"]
