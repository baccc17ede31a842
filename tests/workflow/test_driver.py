"""The driver itself: a first run, mistakes, two drivers, a killed one, failing jobs, profiles, Snakemake's own report.

Rows 37, 40, 47, 58 and 61 of tests/fault/README.md.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from implicit_llm_workflow.rules.snakemake_driver import hold_lock
from tests.limits import wait_until
from tests.workflow.tiny_project import ALL, DEADLINE_S, LIBRARY, NOTHING, ROOT, Project, edit_site, make_project

COMMAND = "$(touch pwned); touch pwned & `touch pwned` 'x' \"y"
NOWHERE = "http://127.0.0.1:9"  # the port of the discard protocol, where nothing listens


def test_every_job_leaves_a_manifest_and_a_log_and_a_second_run_does_nothing(built: Project) -> None:
    for key in ALL:
        assert (built.results / key / "manifest.json").is_file(), key
        assert "done" in (built.results / key / "job.log").read_text(), key
    first, second = (built.manifest(f"train/implicit-s0/{phase}") for phase in ("unrolled", "free"))
    assert second["identity"]["upstream"]["start"] == first["fingerprint"]
    assert NOTHING in built.snakemake()


def test_what_a_shell_would_run_stays_text_in_paths_and_in_values_of_a_configuration(tmp_path: Path) -> None:
    project = make_project(tmp_path / COMMAND)
    project.append(project.config, f"report: {{title: {json.dumps(COMMAND)}}}\n")
    project.snakemake()
    assert project.manifest("report")["identity"]["config"]["title"] == COMMAND
    assert not list(tmp_path.rglob("pwned"))


def test_snakemakes_report_is_made_offline_and_holds_page_figures_and_tables_with_their_captions(
    project: Project,
) -> None:
    lost = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    replace(project, variables={**lost, "no_proxy": "", "NO_PROXY": ""}).snakemake("--report", "report.html")
    text, work = (project.dir / "report.html").read_text(), project.declared("report").removesuffix("/manifest.json")
    for name in ("index.html", "figures/accuracy-by-length.svg", "figures/solver-health.svg", "tables/published.csv"):
        assert f"{work}/{name}" in text
    assert "Accuracy on the last ten tokens against the length of the test sequences" in text


@pytest.mark.parametrize("words", [("snakemake", "-n", "--cores", "1", "--configfile"), ("implicit-llm", "status")])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"batch_size: 8", b"batch_size: 8, batch_size: 4", r":\d+: is not valid YAML: key 'batch_size' occurs twice"),
        (b"name: tiny", b"name: [tiny", r":\d+: is not valid YAML: "),
        (b"name: tiny", b"name: tiny\ndescription: \xff", ": is not valid YAML: .*utf-8"),
        (b"tol: 0.1", b"tol: .inf", r": runs\.implicit\.override\.curriculum\.free\.solver\.tol: inf is not allowed"),
        (b"  explicit:\n", b"  " + b"a" * 300 + b":\n", ": runs: 'a+.* is not allowed"),
        (b"num_samples: 64", b"num_samples: 1e15", r": data\.s3\.train\.num_samples: expected an integer"),
    ],
)
def test_both_doors_refuse_a_bad_file_in_one_line_with_its_name(
    project: Project, words: tuple[str, ...], old: bytes, new: bytes, said: str
) -> None:
    project.config.write_bytes(project.config.read_bytes().replace(old, new, 1))
    option = [] if words[0] == "snakemake" else ["--config"]
    output = project.command(*words, *option, "tiny.yaml", code=2)
    (error,) = [line for line in output.splitlines() if "rror" in line]
    assert re.match(rf"error: tiny\.yaml{said}", error), output


def test_ranks_in_the_shell_of_the_user_do_not_reach_the_jobs(project: Project) -> None:
    manifest = project.declared(EXPLICIT_PHASE)
    shell = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "FAULT": "1"}
    replace(project, variables=shell).snakemake("-R", manifest)
    provenance = project.results / EXPLICIT_PHASE / "provenance.json"
    assert json.loads(provenance.read_text())["processes"] == 1


def test_a_config_file_that_is_not_there_is_refused_with_how_targets_are_typed(built: Project) -> None:
    refused = built.command("snakemake", "-n", "--cores", "1", "--configfile", "tiny.yaml", "train", code=2)
    assert "error: train: no such config file; --configfile takes every word up to the next option" in refused


def test_prefetch_refuses_a_configuration_that_is_not_in_one_file_in_a_line(built: Project) -> None:
    refused = built.snakemake("prefetch", "--dry-run", "--config", "report={'title': 'x'}", code=2)
    (error,) = [line for line in refused.splitlines() if "rror" in line]
    assert error.startswith("error: tiny.yaml: not the whole configuration is in tiny.yaml; put it into one file")


@pytest.mark.parametrize("word", ["prefetch", "a=1"])  # Snakemake needs a key of two letters
def test_a_word_of_config_that_snakemake_does_not_accept_is_refused_in_a_line(built: Project, word: str) -> None:
    refused = built.command("snakemake", "-n", "--cores", "1", "--config", "ab=1", word, code=2)
    (error,) = [line for line in refused.splitlines() if "rror" in line]
    assert error.startswith(f"error: command line: --config: {word} is no KEY=VALUE with a key of two letters or more")


def test_data_that_no_disk_holds_are_refused_before_anything_runs(fresh: Project) -> None:
    fresh.edit(fresh.config, "num_samples: 64", "num_samples: 1_000_000_000_000_000")
    said = r"^error: tiny\.yaml: data: num_samples: s3-train with 1,000,000,000,000,000 takes 14,901,161 GiB"
    assert re.search(said, fresh.snakemake(code=2), re.MULTILINE)
    assert not list(fresh.results.glob("data/*"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "data.text: files: nothing matches 'books/*.txt' in "),
        (("books/a.txt",), "data.text: num_shards: 10 shards are more than the corpus has files, 1; "),
    ],
)
def test_a_corpus_that_has_fewer_files_than_shards_is_refused_before_the_first_job(
    tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    project = make_project(tmp_path, "language")
    project.edit(project.config, "{source: python_library}", "{source: files, files: [books/*.txt]}")
    for name in files:
        (project.dir / name).parent.mkdir()
        (project.dir / name).write_text("text")
    assert f"error: language.yaml: {said}" in project.snakemake("data", code=2)
    assert not list(project.results.rglob("job.log"))
    project.snakemake("results/language/data/babi-text/manifest.json")  # which reads no corpus


def test_word_problems_of_a_folder_that_is_not_there_are_refused_before_the_first_job(fresh: Project) -> None:
    fresh.edit(fresh.config, "group: S3", "group: S3\n    folder: words")
    said = "error: tiny.yaml: folder: words/train_S3_L8_P050.bin is neither below "
    assert said in fresh.snakemake(code=2)
    assert not list(fresh.results.rglob("job.log"))


@pytest.mark.parametrize("option", ["--cores", "--jobs"])
def test_no_core_and_no_job_at_a_time_are_refused(built: Project, option: str) -> None:
    said = built.snakemake(option, "0", "--dry-run", code=2)
    assert f"error: command line: {option}: with 0 no job could start; give a whole number of at least 1" in said


def test_results_that_are_a_file_are_refused_also_by_a_dry_run(fresh: Project) -> None:
    shutil.rmtree(fresh.results.parent)
    fresh.results.parent.touch()
    for arguments in ((), ("--dry-run",)):
        assert "error: results: is a file, or a link to a folder" in fresh.snakemake(*arguments, code=2)


def test_a_checkout_that_would_run_the_code_of_another_one_is_refused(built: Project) -> None:
    project = replace(built, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    output = project.snakemake("--dry-run", code=2)
    named = f"error: {project.dir}: the installed package implicit_llm_workflow belongs to another tree, {ROOT}"
    assert re.search(rf"{re.escape(named)}.*`cd {project.dir} && make setup", output)


FREE = "results/tiny/train/implicit-s0/free/manifest.json"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], r"trian: no target of tiny\.yaml, by name there are .*\btiny\b.*; did you mean 'train'"),
        (["miniatur"], r"miniatur: no target of tiny\.yaml, .*; did you mean 'miniature'"),
        ([FREE.replace("free", "fre")], rf"\S+/fre/manifest\.json: no target .*; did you mean '{FREE}'"),
        (
            ["demo"],
            "demo: belongs to the experiment demo, and this call is of tiny.yaml; "
            "type `snakemake --configfile workflow/config/demo.yaml` with your other options",
        ),
        (["results/demo/report/manifest.json"], r"\S+: belongs to the experiment demo, .* workflow/config/demo\.yaml`"),
        (["train_word_problem"], r"train_word_problem: no target of tiny\.yaml, by name there are "),
        (["-O", "trian"], r"trian: no target of tiny\.yaml, .*; did you mean 'train'"),
        (["--forcerun", "train_word_problm"], r"train_word_problm: no target .*; did you mean 'train_word_problem'"),
        (["--configfile", "tiny.yaml", FREE], rf"{FREE}: is a target, and --configfile takes every word"),
    ],
)
def test_a_word_that_is_no_target_is_refused_with_what_to_type(built: Project, words: list[str], said: str) -> None:
    output = built.snakemake("--dry-run", *words, code=2)
    assert re.search(rf"^error: {said}", output, re.MULTILINE)
    assert ("did you mean" in output) == ("did you mean" in said)


def test_a_target_may_be_written_as_any_path_of_it(built: Project) -> None:
    assert built.planned(FREE.replace("tiny", "tiny/../tiny")) == set()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise ImportError('left out')\n", "mlflow is not installed; type `pip install mlflow`"),
        ("raise OSError('http://me:hunter2@host/api refuses')\n", "OSError: http://***@host/api refuses"),
    ],
)
def test_a_store_of_mlflow_that_cannot_be_made_stops_nothing_and_leaves_no_password_on_the_screen(
    project: Project, module: str, said: str
) -> None:
    (project.library.parent / "mlflow.py").write_text(module)
    (project.results.parent / "mlflow.db").unlink()
    (project.results / "report" / "manifest.json").unlink()
    output = project.snakemake()
    assert f"MLflow: {said}; the jobs run without it" in output
    assert "hunter2" not in output
    assert (project.results / "report" / "manifest.json").is_file()


def test_a_second_driver_is_refused_but_may_look(built: Project) -> None:
    with hold_lock(built.results / ".driver.lock"):
        said = built.snakemake(code=2)
        assert "\nerror: results/tiny/.driver.lock: another snakemake, `implicit-llm gc` or `accept` (process " in said
        assert NOTHING in built.snakemake("--dry-run")


def test_after_a_kill_of_everything_the_next_call_goes_on(fresh: Project) -> None:
    with fresh.held() as driver:
        os.killpg(driver.pid, signal.SIGKILL)
    assert not (fresh.results / "report" / "manifest.json").exists()
    done = {path: path.stat().st_mtime_ns for path in fresh.results.glob("data/*/manifest.json")}
    fresh.snakemake()
    assert fresh.manifest("report")
    assert {path: path.stat().st_mtime_ns for path in done} == done


FREE_PHASE, EXPLICIT_PHASE = "train/implicit-s0/free", "train/explicit-s0/explicit"
EXPLICIT = {EXPLICIT_PHASE, "evaluate/explicit-s0/explicit/word-problem", "report"}


@pytest.mark.parametrize(
    "fault",
    [
        "publish.before_manifest:kill9",  # between the commit and the file that Snakemake knows
        "publish.before_manifest:kill9@2",  # before the names that people know
        "publish.after_manifest:kill9",
        "publish.after_manifest:raise",
    ],
)
def test_a_job_that_fails_after_its_commit_is_not_computed_again(project: Project, fault: str) -> None:
    before = project.starts(FREE_PHASE)
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    replace(project, variables={"IMPLICIT_LLM_FAULT": fault}).snakemake(code=1)
    assert project.starts(FREE_PHASE) == before + 1
    assert project.planned() == {FREE_PHASE, "evaluate/implicit-s0/free/word-problem", "report"}
    project.snakemake()
    assert project.starts(FREE_PHASE) == before + 1
    assert project.manifest(FREE_PHASE)["identity"]["config"]["phase"]["solver"]["tol"] == 0.2


def test_a_job_that_outlives_its_driver_is_not_computed_again(project: Project) -> None:
    before = project.starts(FREE_PHASE)
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    with project.held() as driver:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        project.release()
        wait_until(lambda: project.manifest(FREE_PHASE)["identity"]["config"]["phase"]["solver"]["tol"] == 0.2)
    assert project.planned() == {"evaluate/implicit-s0/free/word-problem", "report"}
    project.snakemake()
    assert project.starts(FREE_PHASE) == before + 1


def test_a_forced_job_that_is_killed_leaves_the_old_result_until_the_next_run_has_computed_it(
    project: Project,
) -> None:
    starts, old = {key: project.starts(key) for key in ALL}, project.manifest(EXPLICIT_PHASE)
    with project.held("-R", project.declared(EXPLICIT_PHASE)) as driver:
        os.killpg(driver.pid, signal.SIGKILL)
    project.release()
    (aside,) = project.results.glob(f"{EXPLICIT_PHASE}/work/*.previous/commit.json")
    assert json.loads(aside.read_text()) == project.manifest(EXPLICIT_PHASE) == old
    assert project.planned() == EXPLICIT
    project.snakemake()
    assert not list(project.results.rglob("work/*.previous"))
    again = {key for key in ALL if project.starts(key) != starts[key] or key == EXPLICIT_PHASE}
    assert again == {EXPLICIT_PHASE}, "the journals of what is made from it begin anew"
    assert NOTHING in project.snakemake()


def test_ctrl_c_waits_for_what_runs_and_a_second_one_shows_no_traceback(fresh: Project) -> None:
    with fresh.held() as driver:
        driver.send_signal(signal.SIGINT)
        output = ""
        while "Terminating processes on user request" not in output:
            line = driver.stdout.readline()
            assert line, output
            output += line
        driver.send_signal(signal.SIGINT)
        fresh.release()
        output += driver.communicate(timeout=DEADLINE_S)[0]
    assert driver.returncode == 1
    assert "Traceback" not in output
    assert json.loads((fresh.results / ".driver.json").read_text()) == {
        "profile": "profiles/local",
        "config": "tiny.yaml",
        "is_stopping": True,
    }
    assert len(list(fresh.results.glob("train/*/*/manifest.json"))) == 1  # the job that ran has finished


def solved_by_code(project: Project) -> set[tuple[str, float]]:
    """(code digest, what that code computes) of every published result of training."""
    found = set()
    for path in project.results.glob("train/*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        model = json.loads((path.parent / manifest["files"][0]["path"]).read_text())
        found.add((manifest["identity"]["code"], model["solved"]))
    return found


def test_code_that_is_edited_while_jobs_wait_is_never_published_under_the_digest_of_the_old_code(
    project: Project,
) -> None:
    stack = project.library / "models" / "stack.py"
    project.edit(stack, "tol / 2", "tol / 4")
    with project.held() as driver:
        project.edit(stack, "tol / 4", "tol / 8")
        project.release()
        output, _ = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 1
    assert "the code was changed since the job was planned" in output
    published = solved_by_code(project)
    assert {0.5 / 4} <= {solved for _, solved in published} <= {0.5 / 2, 0.5 / 4}  # what ran, and what was there before
    assert len({code for code, _ in published}) == len(published)
    project.snakemake()
    assert {solved for _, solved in solved_by_code(project)} == {0.5 / 8}


def test_jobs_run_what_was_planned_while_the_files_of_the_experiment_are_edited(fresh: Project) -> None:
    (fresh.dir / "edit.sh").write_text("echo 'name: tiny, runs: [' > tiny.yaml; rm -rf curricula\n")
    executor = ["--executor", "submitit", "--submitit-cluster", "local", "--jobs", "6"]
    fresh.snakemake(*executor, "--default-resources", "setup='bash edit.sh'")
    for key in ALL:  # each job broke the files before it began
        assert (fresh.results / key / "manifest.json").is_file(), key
    assert "runs: [" in fresh.config.read_text()


def test_one_run_that_fails_for_good_does_not_stop_the_others(project: Project) -> None:
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    failing = "train/explicit-s0/explicit"
    lock = project.results / failing / "work" / ".lock"
    lock.unlink()
    lock.mkdir()  # where a file should be
    project.snakemake(code=1)
    assert project.planned() == {failing, "evaluate/explicit-s0/explicit/word-problem", "report"}
    done = {path: path.stat().st_mtime_ns for path in project.results.glob("train/implicit-s0/*/manifest.json")}
    lock.rmdir()
    project.snakemake()
    assert NOTHING in project.snakemake("--dry-run")
    assert done == {path: path.stat().st_mtime_ns for path in done}


SITE = """\
  classes:
    big: {partition: gpu, constraint: "a100&nvlink", venv: envs/big, gpus: 4, cpus: 64, mem_gb: 400, setup: "module load cuda", gpu_model: l40s}
    small: {partition: old, constraint: "", venv: "", gpus: 0, cpus: 8, mem_gb: 16, setup: ""}
  other_jobs: {partition: cpus}
  account: project7
  rules:
    train_word_problem: {class: big, gpus: 2, nodes: "2 if 'implicit' in wildcards.run else 1", runtime: 77}
    evaluate_word_problem: {class: small, mem_mb: "3000 if wildcards.run else 1", threads: 3}
"""  # noqa: E501


def dry_run(project: Project, *options: str, code: int = 0) -> str:
    """What a dry run on a cluster prints; with 64 cores it shows as many threads as a rule wants."""
    return replace(project, profile="profiles/cluster").snakemake("--dry-run", "--cores", "64", *options, code=code)


def on_site(project: Project, block: str, code: int = 0) -> str:
    """What a dry run prints on a cluster with this block in its profile."""
    edit_site(project.dir / "profiles" / "cluster" / "config.yaml", block)
    return dry_run(project, code=code)


def resources_of(output: str, rule: str) -> set[str]:
    """Different lines of resources of the rule's jobs."""
    blocks = re.findall(rf"^(?:local)?rule {rule}:\n((?:    .*\n)+)", output, re.MULTILINE)
    return {line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("resources:")}


def test_another_profile_and_a_missing_preflight_rerun_nothing(project: Project) -> None:
    assert NOTHING in dry_run(project)


def test_a_first_preflight_for_a_stale_job_reruns_no_fresh_one(project: Project) -> None:
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    output = dry_run(project)
    assert resources_of(output, "preflight")
    jobs = set(re.findall(rf"output: results/{project.name}/(\S+)/work/[0-9a-f]+/manifest\.json", output))
    assert jobs == {"train/implicit-s0/free", "evaluate/implicit-s0/free/word-problem", "report"}


def test_a_site_gives_each_rule_its_class_in_one_block(fresh: Project) -> None:
    output = on_site(fresh, SITE)
    training = resources_of(output, "train_word_problem")
    assert len(training) == 2
    where = ["slurm_partition=gpu", "constraint=a100&nvlink", "venv=envs/big", "setup=module load cuda"]
    size = ["gpus=2", "gpu_model=l40s", "processes_per_node=2", "mem_mb=199500", "device=cuda", "runtime=77"]
    assert [item for line in training for item in where + size if item not in line] == []
    assert sorted(re.search(r"nodes=(\d)", line)[1] for line in training) == ["1", "2"]
    assert output.count("threads: 32") == 3
    (evaluation,) = resources_of(output, "evaluate_word_problem")
    assert [item for item in ("slurm_partition=old", "mem_mb=3000", "device=cpu") if item not in evaluation] == []
    assert "gpus=" not in evaluation
    checks = resources_of(output, "preflight")
    assert {re.search(r"slurm_partition=(\w+)", line)[1] for line in checks} == {"gpu", "old"}
    assert {re.search(r"gpu_model=(\w*)", line)[1] for line in checks} == {"l40s", ""}
    assert all("slurm_partition" not in line for line in resources_of(output, "data_set"))


def test_no_job_asks_for_more_memory_than_a_node_of_its_class_has(fresh: Project) -> None:
    small = SITE.replace("mem_gb: 400", "mem_gb: 6").replace("mem_gb: 16", "mem_gb: 6").replace("gpus: 2,", "gpus: 4,")
    output = on_site(fresh, small)  # the executor adds 500 MB
    assert all("mem_mb=5500," in line for line in resources_of(output, "train_word_problem"))
    asked = {re.search(r"gpus=(\d).*|$", line)[1]: line for line in resources_of(output, "preflight")}
    assert "mem_mb=1000," in asked["1"]
    assert "mem_mb=5500," in asked["0"]


CPU_SITE = """\
  classes:
    small: {partition: old, constraint: "", venv: "", gpus: 0, cpus: 2, mem_gb: 16, setup: ""}
  other_jobs: {partition: old}
  rules:
    train_word_problem: {class: small}
    evaluate_word_problem: {class: small}
"""


def test_a_cluster_without_gpus_takes_what_its_nodes_have(fresh: Project) -> None:
    output = on_site(fresh, CPU_SITE)
    for rule in ("train_word_problem", "evaluate_word_problem"):
        assert all("mem_mb=15000" in line and "device=cpu" in line for line in resources_of(output, rule))
    assert output.count("threads: 2\n") == 5


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "class: small}",
            "class: smal}",
            "rules.train_word_problem.class: there is no class 'smal'; did you mean 'small",
        ),
        (
            "{class: small}",
            "{class: small, gpus: 1}",
            "rules.train_word_problem.gpus: a node of class 'small' has 0, not 1",
        ),
        ("{class: small}", "{class: small, runtme: 9}", "rules.train_word_problem: unknown key 'runtme'; did you mean"),
        ("  classes:", "  clases:", "unknown key 'clases'; did you mean 'classes'?"),
        ("  rules:", "  rule:", "unknown key 'rule'; did you mean 'rules'?"),
        ("  other_jobs:", "  acount: a\n  other_jobs:", "unknown key 'acount'; did you mean 'account'?"),
        ("class: small}", "class: small, runtime: -5}", "rules.train_word_problem.runtime: expected an integer of at"),
        ("gpus: 0", f"gpus: {10**23}", f"classes.small.gpus: {10**23} is not allowed; give an integer of at most"),
        ("partition: old,", "patition: old,", "classes.small: unknown key 'patition'; did you mean 'partition'"),
        ("  other_jobs: {partition", "  other_jobs: {partitio", "other_jobs: unknown key 'partitio'; did you mean"),
        ("gpus: 0", "gpus: none", "classes.small.gpus: expected an integer, found the text 'none'"),
    ],
)
def test_a_typo_in_the_block_of_a_site_is_one_line_with_the_nearest_name(
    project: Project, old: str, new: str, said: str
) -> None:
    refused = on_site(project, CPU_SITE.replace(old, new, 1), code=2)
    assert f"error: profiles/cluster/config.yaml: {said}" in refused.replace("config.yaml.", "config.yaml: ")
    assert "usage" not in refused


@pytest.mark.parametrize("profile", ["local", "cluster"])
@pytest.mark.parametrize(
    ("option", "rest", "said"),
    [
        ("set-threads", "train_catbbi: 1", ": there is no rule 'train_catbbi'; did you mean 'train_catbabi'?"),
        ("set-threads", "data_set: one", ".data_set: one is not allowed; give a whole number of at least 1"),
        ("set-threads", "data_set: 0", ".data_set: 0 is not allowed; give a whole number of at least 1"),
        ("set-threads", "data_set: -1", "Invalid threads definition: "),
        ("set-threads", "data_set: [1]", ".data_set: [1] is not allowed; give one number or text"),
        ("set-resources", "data_st: {runtime: 3}", ": there is no rule 'data_st'; did you mean 'data_set'?"),
        ("set-resources", "report: {runtme: 3}", ".report: nothing reads the resource 'runtme'; did you mean 'runtim"),
        ("set-resources", "data_set: {runtime: soon}", ".data_set.runtime: soon is not allowed; give a whole number"),
        ("set-resources", "data_set: {nodes: two}", ".data_set.nodes: two is not allowed; give a whole number"),
        ("set-resources", "data_set: {kernels: tritn}", ".data_set.kernels: tritn is not allowed; give one of 'auto'"),
        ("set-resources", "report: {cuda_graphs: on}", ".report.cuda_graphs: True is not allowed; give one of 'on'"),
        ("set-resources", "data_set: 30", "Invalid set-resources format in profile"),
        ("default-resources", "runtme: 3", ": nothing reads the resource 'runtme'; did you mean 'runtime'?"),
        ("resources", "gpu_slots: 3", ": no rule asks for 'gpu_slots'; "),
        ("", "set-thread: {data_set: 1}", "Snakemake has no option 'set-thread'; did you mean 'set-threads'?"),
        ("", "latency-wai: 5", "Snakemake has no option 'latency-wai'; did you mean 'latency-wait'?"),
        ("", "restart-times: often", "argument --retries/--restart-times/-T: invalid int value: 'often'"),
        ("", "printshellcmds: {a: 1}", "printshellcmds: its value would have no effect; give one of the option's kind"),
        ("", "printshellcmds:", "printshellcmds: its value would have no effect; give one of the option's kind"),
        ("", "resources: {mem_mb: -1}", "Resource 'mem_mb' was given value '-1', which is not a positive integer"),
    ],
)  # fmt: skip
def test_what_a_profile_sets_is_refused_in_one_line_if_it_has_no_effect(
    project: Project, profile: str, option: str, rest: str, said: str
) -> None:
    file, line = project.dir / "profiles" / profile / "config.yaml", f"\n{option}:"
    if option and line in file.read_text():
        project.edit(file, line, f"{line}\n  {rest}")
    else:
        project.append(file, f"{option}:\n  {rest}\n" if option else f"{rest}\n")
    output = replace(project, profile=f"profiles/{profile}").snakemake("--dry-run", code=2)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"error: profiles/{profile}" in error
    assert (f"{option}{said}" if said[0] in ".:" else said) in error
    assert "usage" not in output


@pytest.mark.parametrize(
    "rest", ["data_set: {nodes: 2, batch_size: 4, runtime: 2h}", "data_set: {mem_mb: 100 * attempt}"]
)
def test_numbers_units_and_expressions_of_a_profile_are_taken(project: Project, rest: str) -> None:
    project.append(project.dir / "profiles" / "local" / "config.yaml", f"set-resources:\n  {rest}\n")
    assert NOTHING in project.snakemake("--dry-run")


@pytest.mark.parametrize("words", [["--set-resources", "report:runtime=9"], ["--set-resources=report:runtime=9"]])
def test_a_resource_on_the_command_line_does_not_replace_those_of_the_cluster_profile(
    project: Project, words: list[str]
) -> None:
    said = "error: profiles/cluster/config.yaml: --set-resources would replace all that it sets for rules; edit it"
    assert said in dry_run(project, *words, code=2)
    assert NOTHING in project.snakemake("--dry-run", *words)  # the profile of this machine sets none


def test_each_of_several_profiles_is_checked(project: Project) -> None:
    (project.dir / "mine").mkdir()
    (project.dir / "mine" / "config.yaml").write_text("keep-goin: true\n")
    words = ["snakemake", "--profile", "mine", "--profile", "profiles/local", "--configfile", project.config.name, "-n"]
    assert "error: mine/config.yaml: Snakemake has no option 'keep-goin'" in project.command(*words, code=2)


@pytest.mark.parametrize("config", ["demo", pytest.param("paper", marks=pytest.mark.slow)])
def test_the_profile_as_it_is_plans_the_experiments_by_its_name(tmp_path: Path, config: str) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    linked = make_profiles(tmp_path)
    assert linked.returncode == 0, linked.stderr
    assert f"{tmp_path}/snakemake/cluster -> {ROOT}/profiles/cluster" in linked.stdout
    words = ("snakemake", "--profile", "cluster", "-n", "--forceall", "--configfile", f"workflow/config/{config}.yaml")
    output = Project(ROOT, LIBRARY, variables=home).command(*words)
    assert all("hardware=v100" in line for line in resources_of(output, "train_word_problem"))
    if config == "paper":
        pretraining = resources_of(output, "train_language_model")
        assert all("gpus=8" in line and "hardware=mi300x" in line for line in pretraining)
        assert {re.search(r"nodes=(\d)", line)[1] for line in pretraining} == {"1", "2", "4"}
        assert len(resources_of(output, "preflight")) == 3


def test_a_folder_where_the_link_should_be_is_left_alone(tmp_path: Path) -> None:
    there = tmp_path / "snakemake" / "cluster"
    there.mkdir(parents=True)
    done = make_profiles(tmp_path)
    assert (done.returncode, f"{there} is there and no link; move it away" in done.stderr) == (2, True)
    assert not there.is_symlink()


def make_profiles(home: Path) -> subprocess.CompletedProcess[str]:
    command, environment = ["make", "--no-print-directory", "profiles"], {**os.environ, "XDG_CONFIG_HOME": str(home)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
