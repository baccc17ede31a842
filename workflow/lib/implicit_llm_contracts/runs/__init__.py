"""How a job is operated: identity, manifest, run directory, journal. The code digest leaves this folder out."""

from implicit_llm_contracts.runs.atomic import (
    StorageError,
    commit_directory,
    fsync_file,
    new_directory,
    new_file,
    read_object,
    remove_temporary,
    require_space,
    retried,
    size_difference,
    storage_errors,
    temporary_name,
    wait_for_files,
    write_atomic,
    write_json,
    write_once,
)
from implicit_llm_contracts.runs.errors import ConfigError, Preempted, UserError, failure_class_of, refuse_if
from implicit_llm_contracts.runs.fetched_files import (
    CONFIG_FILE,
    FETCH,
    INDEX_FILE,
    PICKLE_FILE,
    TEXT_SUFFIXES,
    WEIGHTS_FILE,
    Fetched,
    FetchedFilesError,
    HubFiles,
    fetched_files,
    fetched_model,
    find_fetched,
    is_text,
    weight_files,
    words_of,
)
from implicit_llm_contracts.runs.fill import EXPONENT_NUMBER, Only, as_number, below, check_fields, fill, fill_keys
from implicit_llm_contracts.runs.identity import (
    Identity,
    IdentityError,
    canonical_json,
    compute_fingerprint,
    config_differences,
    run_and_phase,
)
from implicit_llm_contracts.runs.journal import Journal, JournalError, JournalTail, Point, point_of, read_records
from implicit_llm_contracts.runs.launched import (
    FOLDER_VARIABLE,
    NODE_VARIABLE,
    PARENT_VARIABLE,
    WORLD_VARIABLE,
    Death,
    LaunchFolder,
    die_with_parent,
)
from implicit_llm_contracts.runs.logs import FILE_ONLY, wants_bar, without_password
from implicit_llm_contracts.runs.manifest import (
    IDENTITY_KEYS,
    MANIFEST,
    FileRecord,
    Manifest,
    ManifestError,
    Reads,
    finite,
    remove_command,
    sha256_of,
)
from implicit_llm_contracts.runs.places import PROJECT_DIR, downloads_folder, local_files, local_folder
from implicit_llm_contracts.runs.run_directory import (
    AGAIN,
    COMMIT,
    DECLARED,
    FINGERPRINT_DIGITS,
    FREED,
    JOURNAL,
    LOG,
    METRICS,
    MLFLOW,
    PROVENANCE,
    WORK,
    RunDirectory,
    committed,
    committed_below,
    experiment_folder,
    find_committed,
    is_done,
    is_result_shown,
    job_key,
    locked,
    run_directories,
    show_result,
    work_directory,
)
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_contracts.runs.task_folders import TASK_FOLDERS, file_digests, find_task_folder
