"""What a sandbox sees of ``/proc`` beside its own processes: an allow-list, so that what a new kernel adds is hidden.

The rest tells about the machine (boot parameters, disks, interrupts, the PCI bus, keys), or lets whoever opens it make
state in the kernel: a pressure trigger takes ten milliseconds to close, and a process may hold thousands. Standard
library only: process 1 imports it.
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
"""What programs read: ps, top, free, vmstat, nproc, the C library, Node, the JVM. ``net`` is the sandbox's own network,
``sys`` is read-only."""
SETTINGS = frozenset(("fs", "kernel", "net", "user", "vm"))
"""Of ``/proc/sys``."""

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
"""What else kernels have there: for an engine that hides what it is given the names of, maybe on another machine."""
KNOWN_SETTINGS = frozenset(("abi", "crypto", "debug", "dev", "fscache", "sunrpc", "xen"))
"""Of ``/proc/sys``."""
