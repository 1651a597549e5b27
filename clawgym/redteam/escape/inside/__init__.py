"""The probes that run in the sandbox: they are copied there as files and run by the sandbox's own Python.

Standard library only, without ClawGym. They are harmless where they succeed: a probe looks, or writes back what it
read. A call that could change something gets arguments that fail right after the permission check. It counts as open if
it reaches that failure (EFAULT, EINVAL, ...); nothing is exploited.
"""
