"""What runs in the box: small attacks, put there as files and run by the box's own Python.

Standard library only, and nothing of ClawGym. Harmless where they succeed: a probe looks, or writes back what it
read; a call that could change something gets arguments that fail right behind the permission check, and
"reachable" means that the call got as far as those (EFAULT, EINVAL, ...), not that it was exploited.
"""
