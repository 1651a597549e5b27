"""Which entries of ``/proc`` a sandbox sees beside its own processes.

This is an allow-list, so that entries of newer kernels are hidden. Hidden entries either describe the machine (boot
parameters, disks, interrupts, the PCI bus, keys), or let a process create kernel state: a pressure trigger takes ten
milliseconds to close, and a process may hold thousands. Standard library only: process 1 imports it.
"""

from __future__ import annotations

__all__ = ["KNOWN", "KNOWN_SETTINGS", "SETTINGS", "SHOWN"]

SHOWN = frozenset(
    (
        "cpuinfo",
        "filesystems",
        "loadavg",
        "meminfo",
        "mounts",
        "net",
        "self",
        "stat",
        "swaps",
        "sys",
        "thread-self",
        "uptime",
        "version",
        "vmstat",
    )
)
"""What common programs read: ps, top, free, vmstat, nproc, the C library, Node, the JVM. ``net`` shows the sandbox's
own network; ``sys`` is read-only."""
SETTINGS = frozenset(("fs", "kernel", "net", "user", "vm"))
"""The entries of ``/proc/sys`` that are shown."""

KNOWN = frozenset(
    (
        *("acpi", "asound", "buddyinfo", "bus", "cgroups", "cmdline", "config.gz", "consoles", "crypto", "devices"),
        *("diskstats", "dma", "driver", "dynamic_debug", "execdomains", "fb", "fs", "interrupts", "iomem", "ioports"),
        *("irq", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags"),
        *("latency_stats", "locks", "lockdep", "mdstat", "misc", "modules", "mpt", "mtrr", "pagetypeinfo"),
        *("partitions", "pressure", "sched_debug", "schedstat", "scsi", "slabinfo", "softirqs", "spl", "sysrq-trigger"),
        *("sysvipc", "timer_list", "timer_stats", "tty", "vmallocinfo", "vz", "xen", "zoneinfo"),
    )
)
"""Other entries of kernels: for a Docker engine, which hides by name and may run on another machine."""
KNOWN_SETTINGS = frozenset(("abi", "crypto", "debug", "dev", "fscache", "sunrpc", "xen"))
"""Other entries of ``/proc/sys``."""
