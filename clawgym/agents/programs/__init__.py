"""Agent programs that are installed once, verified by checksums, and mounted into each sandbox.

:mod:`~clawgym.agents.programs.install` installs them by name, and each other module is the adapter of one program.
"""
