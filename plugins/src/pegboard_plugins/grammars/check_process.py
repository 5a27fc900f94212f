"""A process that compiles grammars from strangers first. A line in is a job, an object in JSON; a line out is the verdict, a
text in JSON: empty for a grammar that can be served, else what is wrong with it.

Started by ``checker`` as ``python -m pegboard_plugins.grammars.check_process``. Ends with its standard input; by SIGPROF when a
grammar takes too long, by the library's abort when it takes too much memory, by SIGALRM when nothing is asked for long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from pegboard.wire import GrammarSpec
from pegboard_plugins.grammars.limits import CHECK_IDLE, CHECK_MEMORY, CHECK_SECONDS
from pegboard_plugins.grammars.sources import library_grammar
from pegboard_plugins.grammars.state import start_matcher
from pegboard_plugins.grammars.vocabulary import byte_vocabulary


def check(kind: str, text: str, whitespace: str) -> str:
    """The verdict on a grammar, compiled for a vocabulary of bytes: whether the model's can spell its texts is not seen."""
    try:
        start_matcher(library_grammar(GrammarSpec(kind, text), whitespace), byte_vocabulary())  # type: ignore[arg-type]
    except MemoryError:
        return f"compiling it takes more than {CHECK_MEMORY >> 20} MiB; make it simpler"
    except Exception as error:  # whatever it is, there must be an answer
        return str(error) or type(error).__name__
    return ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_MEMORY, CHECK_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    byte_vocabulary()
    signal.alarm(CHECK_IDLE)
    for line in sys.stdin:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, CHECK_SECONDS)
        verdict = check(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)
        signal.alarm(CHECK_IDLE)


if __name__ == "__main__":
    main()
