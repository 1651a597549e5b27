"""Linux mechanisms that the local backends share: cgroups, seccomp, Landlock, the default root, the supervisor."""
