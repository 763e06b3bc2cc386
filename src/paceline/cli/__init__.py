"""The command line: one file a command, each parsing, calling and printing; `main` is the entry point.

Nothing heavy is imported at the top of these modules, so that `paceline --help` answers at once and the
thread counts are set before torch reads them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence as Seq

from paceline.errors import PacelineError

INTERRUPTED = 130
BAD_REQUEST = 2
REMEDY = "what paceline keeps goes to PACELINE_CACHE_DIR, which may be on another disk"


def main(arguments: Seq[str] | None = None) -> None:
    """Run a command and exit: 2 after an error that paceline raised on purpose, 130 after Ctrl-C.

    Args:
        arguments: words after the program's name; by default those of this process.
    """
    from paceline.cli.threads import configure_threads

    configure_threads()
    from paceline.cli.app import build_app

    try:
        build_app()(args=None if arguments is None else list(arguments), prog_name="paceline")
    except PacelineError as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(BAD_REQUEST)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader (`| head`) has left; a second error while the interpreter flushes would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = f" ({error.filename})" if error.filename else ""
        print(f"error: the disk is full{place}: free some space; {REMEDY}", file=sys.stderr)
        sys.exit(BAD_REQUEST)
