"""Define the commands of an experiment: set up, run, list, status, explain, estimate, accept, prefetch, clean up."""

import os
import shlex
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_contracts.runs.places import downloads_folder
from implicit_llm_contracts.runs.run_directory import RunDirectoryBusy
from implicit_llm_workflow import estimates
from implicit_llm_workflow.commands import options
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.planning.staleness import ACCEPTED, FORCED
from implicit_llm_workflow.prefetch import needs_of, satisfy
from implicit_llm_workflow.project_dirs import (
    CONFIG_DIR,
    ENVIRONMENTS_DIR,
    LOCAL_PROFILE,
    PROJECT_DIR,
    SNAKEFILE,
    nearest_with,
)
from implicit_llm_workflow.results import listing
from implicit_llm_workflow.results.accept import chosen_jobs, new_acceptances, take_back, take_back_forced
from implicit_llm_workflow.text import size_text

SNAKEFILE_TEXT = """\
# The rules are those of the installed package; the experiments beside this file, in workflow/config/, are yours.
from implicit_llm_workflow.project_dirs import PROJECT_DIR


localrules:
    everything,


# Snakemake takes no default target from an included file.
rule everything:
    default_target: True
    input:
        lambda wildcards: plan.target_manifests,


# Write rules of your own above this line, which checks the targets.
include: str(PROJECT_DIR / "Snakefile")
"""
README_TEXT = """\
# Experiments with implicit language models

Each YAML file in `workflow/config/` is an experiment; `demo.yaml` is the smallest. Edit one, or add your own. Results
go to `results/`. Type in this folder:

    implicit-llm explain demo       # what would run, and why
    implicit-llm run demo           # run it; again, to resume
    implicit-llm status demo        # from a second terminal

The report is `results/demo/report/index.html`.
"""
EXIT_FAILED = 1  # exit code of `prefetch` if a file could not be fetched


class InitError(UserError):
    """The folder could not be set up."""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to set up; created if it does not exist.", metavar="DIR")],
) -> None:
    """Set up a folder for experiments of your own: Snakefile, profiles and the project's experiments as a start.

    Rules and code stay in the installed package. An experiment looks for models, tasks and curricula beside itself
    first, so it uses the files that you edit or add in DIR/workflow/config/. No existing file is overwritten.

    **Example**

        implicit-llm init my-study
        cd my-study
        implicit-llm run demo -- -n
    """
    made = write_project(folder)
    typer.echo(f"{folder}: {', '.join(made)}")
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"next: {there}implicit-llm run demo -- -n")


def write_project(folder: Path) -> list[str]:
    """Set up a project in `folder`, but keep an existing README.md; return the names of the written files and folders.

    Raises: InitError if another of these files or folders exists already, or if `folder` cannot be written.
    """
    copies = {"profiles": PROJECT_DIR / "profiles", "workflow/config": CONFIG_DIR, "envs": ENVIRONMENTS_DIR}
    texts = {SNAKEFILE: SNAKEFILE_TEXT, ".gitignore": "/results/\n/.snakemake/\n"}
    if not (folder / "README.md").exists():  # a repository often has one
        texts["README.md"] = README_TEXT
    for name in (*copies, *texts):
        if (folder / name).exists():
            raise InitError(f"{folder / name}: is there already; name another folder, or move it away")
    try:
        for name, source in copies.items():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InitError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from error
    return [*copies, *texts]


def run(
    words: Annotated[
        list[str] | None,
        options.words(
            "TARGET: a job, a pattern such as 'train/*/free', or a name such as figure_1_right or train; the whole "
            "experiment if none is given. Behind --, options of Snakemake.",
            "[EXPERIMENT] [TARGET]... [-- SNAKEMAKE OPTIONS]",
        ),
    ] = None,
    config: options.Config = None,
    profile: Annotated[
        str, typer.Option(help="Profile of Snakemake: where the jobs run.", metavar="DIR")
    ] = LOCAL_PROFILE,
) -> None:
    """Run an experiment: print the Snakemake command, and start it.

    It makes what is missing or stale, and resumes what was stopped. Ctrl-C lets running jobs commit what they have.

    **Example**

        implicit-llm run demo
        implicit-llm run demo 'train/s3-*/*' -- -n
        implicit-llm run paper figure_3 --profile profiles/cluster
    """
    words = words or []
    first_option = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    plan, targets = options.choose(words[:first_option], config, options.RESULTS)
    jobs = [target for target in targets if set(target) & set("/*?[")]
    paths = [plan.target(plan.nodes[key]) for key in chosen_jobs(plan, jobs)]
    names, asked = [target for target in targets if target not in jobs], words[first_option:]
    command = [*plan.snakemake(profile, [*names, *paths]), *asked]
    if not Path(SNAKEFILE).is_file():
        root = nearest_with(SNAKEFILE, Path.cwd())
        advice = "`implicit-llm init my-study`, then work there" if root is None else f"`cd {shlex.quote(str(root))}`"
        raise options.OptionError(f"there is no {SNAKEFILE} here; type {advice}")
    if asked:
        from implicit_llm_workflow.rules.snakemake_internals import refused_options

        if (refusal := refused_options(asked)) is not None:
            raise options.OptionError(f"{shlex.join(asked)}: Snakemake refuses this: {refusal}")
    typer.secho(f"$ {shlex.join(command)}", bold=True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606  (safer without a shell)


def list_(
    results: options.Results = options.RESULTS,
    as_json: Annotated[bool, options.as_json("experiments and trained models")] = False,
) -> None:
    """List the experiments, with what they take and how far they are, and the trained models of the package.

    It lists the experiments in workflow/config/, and those in other folders that ran here. GPU-hours are those of
    training, by `implicit-llm estimate`. A dash means none, as after training on a CPU, or that those of some jobs are
    unknown: `implicit-llm estimate NAME` shows which and why.

    **Example**

        implicit-llm list
    """
    experiments, models = listing.experiments(options.experiments(results), results), listing.models()
    if as_json:
        options.print_json({"experiments": experiments, "models": models})
    else:
        options.show(*listing.tables(experiments, models))


def status(
    words: Annotated[
        list[str] | None,
        options.words(
            "TARGET: a job, such as evaluate/a5-implicit-s1/free/word-problem, its run directory, or a pattern such as "
            "'train/*/free', with everything it is made from; the whole experiment if none is given."
        ),
    ] = None,
    config: options.Config = None,
    jobs: Annotated[
        bool, options.flag("--jobs", "List every job: how far it is, how healthy, and why it is not done.")
    ] = False,
    lines: Annotated[int, typer.Option(help="Log lines to show for each failed job.", metavar="N", min=0)] = 8,
    results: options.Results = options.RESULTS,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Show how far an experiment is: its stages, what runs, what failed and why, and what to type next.

    A done job was made from the current settings and code, a stale one from others. A queued job is submitted, or next
    in line for the driver. A waiting job waits for other jobs, or for a driver. The next snakemake resumes a stopped
    job. The driver is the snakemake that starts the jobs. The command changes nothing: use it while jobs run.

    Steps count over the whole curriculum. Loss, residual, iter and unconv are the last ones in the journal; for a
    finished phase they are means over its last 50 steps. Residual is the largest of a batch, iter the solver iterations
    per token. Unconv is the share of tokens that did not converge. Age is the time since the job last wrote something.

    **Example**

        implicit-llm status
        implicit-llm status demo --jobs
        implicit-llm status demo 'train/*/free' --jobs
        implicit-llm status demo --json | jq '.jobs[] | select(.state == "failed")'
    """
    from implicit_llm_workflow.results import status as view

    plan, targets = options.choose(words, config, results, to_stderr=as_json)
    wanted = tuple(chosen_jobs(plan, targets))
    snapshot = view.Snapshot(plan, plan.with_inputs(wanted or plan.wanted), wanted, lines)
    if as_json:
        options.print_json(view.as_json(snapshot))
    elif jobs:
        typer.echo(view.headline(snapshot))
        options.show(view.job_table(snapshot))
    else:
        options.show(*view.view(snapshot))
        typer.echo(view.last_words(snapshot))


def explain(
    words: Annotated[
        list[str] | None,
        options.words(
            "TARGET: a job, such as train/a5-implicit-s1/free, its run directory or manifest; the whole experiment if "
            "none is given."
        ),
    ] = None,
    identity: Annotated[
        bool,
        options.flag("--identity", "Print what the result of one job depends on instead, as the job's own JSON."),
    ] = False,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Show which jobs will run next, why, how long they take, and what stays.

    The reasons are settings, functions or inputs that changed. Times come from earlier runs, or else from
    `implicit-llm estimate`. With --identity it prints what a job's fingerprint is made of (config, code and the
    fingerprints of its inputs) and where the inputs are. Pass that to a job that you run manually, as its --identity.

    **Example**

        implicit-llm explain
        implicit-llm explain demo train/a5-implicit-s1/free --json
        implicit-llm explain demo data/a5-train --identity > id.json
    """
    from implicit_llm_workflow.results import explain as why

    plan, wanted = options.choose(words, config, results, to_stderr=as_json or identity)
    if identity:
        if len(wanted) != 1:
            raise options.OptionError("--identity: needs one job, for example `explain demo data/a5-train --identity`")
        typer.echo(plan.identity_text(plan.find(wanted[0])))
        return
    found = why.explain(plan, wanted)
    if as_json:
        options.print_json({"experiment": plan.experiment.name, **why.as_json(found)})
        return
    typer.echo(why.headline(found))
    if any(job.runs for job in found):
        options.show(why.running_table(found))
    for line in why.lines_below(found):
        typer.echo(line)
    if any(job.result.why == FORCED for job in found):
        typer.echo(f"To keep what was forced: `implicit-llm accept {plan.argument} '*' --forced`")


JobsOf = Annotated[
    list[str] | None,
    options.words("TARGET: a job, a pattern or a figure such as figure_1_right; the whole experiment without one."),
]


def _keys(plan: Plan, targets: list[str]) -> list[str] | None:
    """Return the keys of the targets and of all their direct and indirect inputs, or None without targets."""
    return plan.with_inputs(chosen_jobs(plan, targets)) if targets else None


def estimate(
    words: JobsOf = None,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
    hardware: Annotated[
        str | None,
        typer.Option(help="GPU of all training jobs instead of that of the profile, such as h200.", metavar="NAME"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each training job instead of those of the profile.", metavar="N")
    ] = None,
    as_json: Annotated[bool, options.as_json()] = False,
) -> None:
    """Estimate what the training of an experiment takes: FLOPs, hours, disk.

    If a job or another seed of it ran before, its hours are those of that run. Other hours come from measured training
    steps, or else from FLOPs and an assumed share of the GPU's peak, which is marked. Evaluations have no estimate. The
    GPUs of each job come from the profile of the last run, or else from profiles/cluster.

    **Example**

        implicit-llm estimate paper
        implicit-llm estimate paper figure_1_right --hardware h100
        implicit-llm estimate state-tracking --hardware h200 --gpus 1 --json
    """
    plan, targets = options.choose(words, config, results, to_stderr=as_json)
    costs = estimates.CostModel(plan, hardware, gpus)
    jobs = estimates.training_estimates(plan, costs, _keys(plan, targets))
    if as_json:
        options.print_json({"experiment": plan.experiment.name, **estimates.as_json(jobs, costs)})
        return
    options.show(estimates.training_table(jobs))
    for line in estimates.notes(jobs, costs):
        typer.echo(line)


def accept(
    words: Annotated[
        list[str],
        options.words(
            "TARGET: a job, such as train/a5-implicit-s1/free, its run directory or manifest, or a pattern such as "
            "'train/*', which skips fresh results.",
            "EXPERIMENT TARGET...",
        ),
    ],
    why: Annotated[str, typer.Option(help="The reason, stored with the result.", metavar="TEXT")] = "",
    revoke: Annotated[bool, options.flag("--revoke", "Undo acceptances: the results become stale again.")] = False,
    forced: Annotated[
        bool, options.flag("--forced", "Take back what -R, -f or -F forced, where a run was stopped before its jobs.")
    ] = False,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
) -> None:
    """Keep results although their code changed, and everything made from them; or although they were forced.

    You can accept changed code only: another config or input makes another result. The acceptance lasts until the code
    changes again. It does not change the manifest: the reason is stored in accepted.json and shown in the lineage.

    **Example**

        implicit-llm accept demo 'train/*' --why "only a log line was reworded"
        implicit-llm accept demo 'train/*' --revoke
        implicit-llm accept demo '*' --forced
    """
    from implicit_llm_workflow.rules.snakemake_driver import hold_lock

    if not (revoke or forced or why.strip()):
        raise options.OptionError("--why: is missing; say why the result holds although its code changed: --why TEXT")
    plan, targets = options.choose(words, config, results, must_name="implicit-llm accept EXPERIMENT TARGET")
    if not targets:
        raise options.OptionError(
            f"TARGET is missing; type `implicit-llm accept {plan.argument} TARGET`, such as 'train/*'"
        )
    with hold_lock(plan.driver_lock, "accept"):
        chosen = chosen_jobs(plan, targets)
        if revoke or forced:
            for key in take_back(plan, chosen) if revoke else take_back_forced(plan, chosen):
                typer.echo(f"{'revoked' if revoke else 'no longer forced'}: {key}")
            return
        plan.record_code()
        found = new_acceptances(plan, chosen, why.strip())
        for key, acceptance in found.items():
            write_json(plan.root / key / ACCEPTED, acceptance)
            what = "not recorded" if acceptance.changed is None else ", ".join(acceptance.changed)
            typer.echo(f"accepted: {key} (code {what})")
    typer.echo(f"{len(found)} accepted; `implicit-llm explain {plan.argument}` says what is still stale")


def prefetch(
    words: JobsOf = None,
    config: options.Config = None,
    downloads: Annotated[
        Path | None,
        typer.Option(help="Folder of fetched files; else $IMPLICIT_LLM_DATA, else results/downloads.", metavar="DIR"),
    ] = None,
) -> None:
    """Fetch what the jobs of an experiment need from the network: data sets, tokenizers, models, evaluation data.

    Run it on a machine with internet, such as the login node of a cluster. It resumes an interrupted call and fetches
    no file twice. The exit code is 1 if something could not be fetched.

    **Example**

        implicit-llm prefetch paper --downloads /scratch/downloads
        implicit-llm prefetch paper figure_catbabi
        snakemake prefetch --profile profiles/local \\
            --configfile workflow/config/paper.yaml
    """
    plan, targets = options.choose(words, config, options.RESULTS)
    folder, needs, failed = downloads_folder(downloads), needs_of(plan, _keys(plan, targets)), 0
    for need in needs:
        state, what = satisfy(need, folder)
        failed += state == "failed"
        typer.echo(f"{typer.style(state, 'red' if state == 'failed' else 'green')} {what}")
    if not needs:
        typer.echo(f"{', '.join(targets) or plan.experiment.name} needs nothing from the network")
    if failed:
        typer.echo(f"{failed} of {len(needs)} could not be fetched; the rest is in {folder}")
        raise typer.Exit(EXIT_FAILED)


def gc(
    words: Annotated[
        list[str] | None,
        options.words(
            "TARGET, with --payload: a finished job of data, train or checkpoint, its run directory, or a pattern such "
            "as 'data/text-shard-*', which skips jobs that cannot be freed.",
            "EXPERIMENT [TARGET]...",
        ),
    ] = None,
    payload: Annotated[
        bool, options.flag("--payload", "Delete the models, shards and checkpoints of the targets.")
    ] = False,
    remove: Annotated[bool, options.flag("--remove", "Delete what is listed; without it nothing is deleted.")] = False,
    config: options.Config = None,
    results: options.Results = options.RESULTS,
) -> None:
    """Free disk space: list what no job of the experiment wants, or delete the larger files of finished jobs.

    It lists run directories that the experiment does not name, and results of former settings or code that no manifest
    refers to. With --payload, manifest, metrics and journal stay, so the job still counts as done. If another job
    needs the files later, they are rebuilt, and `implicit-llm explain` says so beforehand.

    **Example**

        implicit-llm gc demo
        implicit-llm gc demo --remove
        implicit-llm gc demo train/a5-implicit-s1/unrolled --payload
    """
    from implicit_llm_workflow.results import garbage
    from implicit_llm_workflow.rules.snakemake_driver import hold_lock

    plan, targets = options.choose(words, config, results, must_name="implicit-llm gc EXPERIMENT")
    if bool(targets) != payload:
        raise options.OptionError(
            "--payload: goes with jobs, and jobs with --payload; "
            f"type `implicit-llm gc {plan.argument} TARGET --payload`"
        )
    with hold_lock(plan.driver_lock, "gc") if payload or remove else nullcontext():
        if payload:
            costs, freed = estimates.CostModel(plan), garbage.freeable(plan, targets)
            for key in freed:
                number, size = garbage.free(plan, key)
                took = costs.recorded(plan.nodes[key]).text
                typer.echo(f"freed: {key}, {number} files, {size_text(size)} (it took {took})")
            typer.echo(f"jobs freed: {len(freed)}; each counts as done until a job needs its files")
            return
        if links := garbage.kept_links(plan):
            typer.echo(f"kept, because links may lead to another experiment: {', '.join(map(str, links))}")
        found = garbage.find_garbage(plan)
        for item in [*found]:
            try:
                if remove:
                    garbage.delete(item)
            except RunDirectoryBusy as error:
                found.remove(item)
                typer.echo(str(error))
                continue
            typer.echo(f"{item.path}: {item.why} ({size_text(item.size)})")
    total = f"{len(found)} folders, {size_text(sum(item.size for item in found))}"
    end = "deleted" if remove else "type the same with --remove to delete them"
    typer.echo(f"{total}: {end}" if found else "nothing to delete")
