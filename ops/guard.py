"""Starts a program that cannot outlive its parent: ``python guard.py PARENT_PID PROGRAM ARGUMENT...``.

The kernel kills the process when its parent dies (prctl(2), PR_SET_PDEATHSIG, which survives execve); the
program keeps this process id.  Other systems than Linux have no such guard.
"""

import ctypes
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Become the program."""
    parent, *command = sys.argv[1:]
    # SIGHUP means "reload": ignored until the program handles it.  Who started this blocked it until here.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != int(parent):
            sys.exit("the launcher died before its child started")
    os.execv(command[0], command)  # noqa: S606  The program is our own.


if __name__ == "__main__":
    main()
