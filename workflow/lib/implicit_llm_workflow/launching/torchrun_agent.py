"""torchrun as the launcher needs it: stop signals are not its business, and how its processes ended goes to a file.

torchrun gives its processes 30 seconds after a SIGTERM, too few for a large checkpoint, and dies of SIGUSR2; the node
agent tells the processes themselves. Arguments: options of torchrun, then `-m MODULE` with the module's own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from implicit_llm_contracts.runs.launched import FOLDER_VARIABLE, NODE_VARIABLE, Death, LaunchFolder, die_with_parent
from implicit_llm_workflow.launching.launch_errors import LaunchError, shown_slurm_variables


def main(arguments: list[str]) -> int:
    """Run torchrun; returns 0, or 1 when a process ended badly or not all nodes came."""
    _become_child_of_the_agent()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    folder, node = LaunchFolder(Path(os.environ[FOLDER_VARIABLE])), int(os.environ[NODE_VARIABLE])
    host = socket.gethostname()
    known = {word for action in run.get_args_parser()._actions for word in action.option_strings}
    ours = ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"] if "--signals-to-handle" in known else []
    try:
        # torchrun's parser takes options of the module, such as --log, for abbreviations of its own.
        end = arguments.index("-m") + 2
        options = run.parse_args([*ours, *arguments[:end]])
        options.training_script_args = arguments[end:]
        run.run(options)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
        folder.record_deaths(node, [Death(rank, failure.exitcode, host) for rank, failure in failures])
        return 1
    except RendezvousError as error:
        if folder.has_begun:  # the first node has gone, for a reason of its own
            return 1
        reason = LaunchError(
            f"the nodes did not come together ({type(error).__name__}); see that all of them can reach "
            f"the first one: {shown_slurm_variables()}"
        )
        folder.record_end(reason, rank=-1 - node)
        return 1
    return 0


def _become_child_of_the_agent() -> None:
    die_with_parent()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the processes inherit this, until they have a handler
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # this they do not inherit: torchrun may end them so


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
