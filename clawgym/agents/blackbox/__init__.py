"""Black-box agents: unmodified agent programs that run in the sandbox and call the gateway as their model.

A :class:`Claw` is the adapter of one program: it starts the program in a sandbox and sends it user messages.
:class:`BlackBoxAgent` makes an :class:`~clawgym.agents.protocol.Agent` of it.
``docs/tutorials/plug-in-an-agent.md`` shows how to write one.
"""

from clawgym.agents.blackbox.agent import BlackBoxAgent
from clawgym.agents.blackbox.protocol import Claw, ClawStopped, ModelLink, Running

__all__ = ["BlackBoxAgent", "Claw", "ClawStopped", "ModelLink", "Running"]
