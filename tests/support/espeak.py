"""``python espeak.py LIBRARY DATA TEXT``: speak, as 16-bit mono samples to standard output.

A process for each text: espeak-ng keeps state between two of them, so that in one process the samples would
depend on what was spoken before.  The rate goes to standard error.
"""

import ctypes
import sys

SYNCHRONOUS = 2
CHARACTERS = 1
UTF8 = 1


def main() -> None:
    library, data, text = sys.argv[1:]
    espeak = ctypes.CDLL(library)
    rate = espeak.espeak_Initialize(SYNCHRONOUS, 0, data.encode(), 0)
    if rate <= 0:
        sys.exit("espeak-ng does not start")

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def take(samples: int | None, count: int, _events: int | None) -> int:
        if samples is not None and count > 0:
            sys.stdout.buffer.write(ctypes.string_at(samples, 2 * count))
        return 0

    espeak.espeak_SetSynthCallback(take)
    spoken = text.encode()
    if espeak.espeak_Synth(spoken, ctypes.c_size_t(len(spoken) + 1), 0, CHARACTERS, 0, UTF8, None, None) != 0:
        sys.exit("espeak-ng does not speak")
    sys.stderr.write(str(rate))


if __name__ == "__main__":
    main()
