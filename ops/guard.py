"""Starts a program that cannot outlive its parent: ``python guard.py PARENT_PID PROGRAM ARGUMENT...``.

The launcher runs every child through this file.  The kernel is asked to kill the process when its
parent dies (prctl(2), PR_SET_PDEATHSIG), which survives execve; the program then takes the place of this one,
under the same process id.  Elsewhere than on Linux the program just starts.
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
    # Ignored until the program handles it: SIGHUP asks it to read files again, and never ends it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != int(parent):
            sys.exit("the launcher died before its child started")
    os.execv(command[0], command)  # noqa: S606  The program is our own.


if __name__ == "__main__":
    main()
