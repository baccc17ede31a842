"""How the jobs of a plan are doing. Reads only, and takes no lock, so that it may look at any time, however often."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.job_look import JobLook, Observed, last_lines
from implicit_llm_workflow.results.lock_holder import Holder, holder_of
from implicit_llm_workflow.results.submitted_jobs import submitted_jobs


class Observer:
    """Looks at a plan, again and again if wanted; identities are computed once."""

    def __init__(self, plan: Plan, submitit_folder: Path | None = None) -> None:
        self.plan = plan
        self._folder = submitit_folder
        self._lock = plan.root / ".driver.lock"

    def driver(self) -> Holder | None:
        """The Snakemake that works, or last worked, on the experiment."""
        return holder_of(self._lock)

    def failed_preflights(self) -> list[Path]:
        """Logs of the looks at a hardware class that failed, and so keep the jobs of that class from starting."""
        driver = self.driver()
        if driver is not None and driver.is_alive:
            return []  # it may be at work on them
        logs = sorted((self.plan.root / ".preflight").glob("*.log"))
        return [log for log in logs if not log.with_suffix(".json").exists() and last_lines(log, 1)]

    def observe(self, keys: Iterable[str] | None = None) -> dict[str, Observed]:
        """The jobs of these keys, which come with what they are made from; all of the plan without."""
        plan, statuses = self.plan, self.plan.look()
        wanted = plan.nodes if keys is None else {key: plan.nodes[key] for key in keys}
        unfinished = [node for key, node in wanted.items() if statuses[key].state != "fresh"]
        submitted = submitted_jobs(plan, unfinished, self._folder)
        since = self._driven_since()
        found: dict[str, Observed] = {}
        for key, node in wanted.items():
            is_ready = since is not None and all(statuses[item].state == "fresh" for item in node.upstream.values())
            look = JobLook(plan, node, statuses[key], submitted.get(key), since if is_ready else None)
            found[key] = look.observed()
        return found

    def _driven_since(self) -> float | None:
        """When the driver that lives took its lock, in seconds since 1970."""
        driver = self.driver()
        try:
            return self._lock.stat().st_mtime if driver is not None and driver.is_alive else None
        except OSError:
            return None
