"""Starts distributed_run.py through the launcher, and ends as the command line does.

Arguments: number of processes, then those of distributed_run.py.
"""

import sys
from pathlib import Path

from implicit_llm_workflow.launching.launch import Ended, launch, tell_who_started_this


def main(processes: str, *arguments: str) -> int:
    worker = ("-m", "tests.unit.training.distributed_run", *arguments)
    try:
        launch(1, int(processes), Path(arguments[0]), worker, 1)
    except Ended as end:
        tell_who_started_this(end)
        sys.stderr.write(f"error: {end}\n")
        return end.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
