"""The argument list of virtiofsd."""

from __future__ import annotations

from runner.plan.shares import SharePlan


def virtiofsd_argv(share: SharePlan, listener: str) -> list[str]:
    """Return virtiofsd's argv; *listener* is ``--fd=N`` (a listening socket) or ``--socket-path=…``.

    ``sandbox=chroot`` needs CAP_SYS_CHROOT only, the default ``namespace`` needs CAP_SYS_ADMIN. ``--rlimit-nofile=0`` leaves the limit
    alone: raising it needs CAP_SYS_RESOURCE. ``--modcaps=-mknod`` (since 1.5) makes CAP_MKNOD unnecessary, with which the pod's processes
    could make nodes of the host's devices; the guest cannot make device nodes in the share, which float's device filter forbids anyway.
    ``--migration-verify-handles``: after an update another virtiofsd finds the guest's files by their paths, where another process may have
    put other files meanwhile.
    """
    if share.program.rust:
        argv = [str(share.program.path), listener, f"--shared-dir={share.path}", "--sandbox=chroot", "--cache=auto"]
        argv += ["--announce-submounts", "--rlimit-nofile=0", "--log-level=warn"]
        argv += ["--modcaps=-mknod"] if share.program.version >= (1, 5) else []
        argv += ["--migration-verify-handles"] if share.updatable else []
        return [*argv, "--readonly"] if share.read_only else argv
    options = f"source={_virtiofsd_escape(str(share.path))},sandbox=chroot,cache=auto,announce_submounts,log_level=warn"
    return [str(share.program.path), listener, "-f", "-o", options, "--rlimit-nofile=0"]


def _virtiofsd_escape(value: str) -> str:
    """Escape *value* for the C virtiofsd's ``-o`` lists (libfuse's ``fuse_opt``: backslash before comma and backslash)."""
    return value.replace("\\", "\\\\").replace(",", "\\,")
