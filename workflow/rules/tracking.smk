from implicit_llm_workflow.rules.invocation import announce

if workflow.is_main_process:
    announce()


localrules:
    mlflow_init,


# Clients that open an empty store at the same time break it, so one job makes it before all others.
rule mlflow_init:
    output:
        ready=touch("results/.mlflow-ready"),
    log:
        "results/.mlflow-init.log",
    shell:
        "implicit-llm mlflow init --results results > {log:q} 2>&1"
