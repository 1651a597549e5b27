"""Agents that run an unmodified OpenClaw: installation, images, one process per task or one for all tasks."""
