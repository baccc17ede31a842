"""The process that submitit starts for a job: puts the job's pickle where submitit looks for it, then is submitit.

submitit writes the pickle under the job's id once sbatch has told it; a driver killed in between would leave a job
that finds nothing to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path


def place_pickle(folder: Path) -> None:
    from submitit.core import job_environment

    from snakemake_executor_plugin_submitit.submission import pickle_path

    os.environ["SUBMITIT_FOLDER"] = str(folder)
    target = job_environment.JobEnvironment().paths.submitted_pickle
    if not target.exists():  # there after a requeue
        source = pickle_path(folder, int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
        tmp = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        shutil.copyfile(source, tmp)
        os.replace(tmp, target)


def main() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until submitit has its handler, it would only kill this process

    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]  # submitit would load it, a tenth of a second a job

    from submitit.core.submission import process_job

    folder = Path(sys.argv[1])
    place_pickle(folder)
    process_job(folder)


if __name__ == "__main__":
    main()
