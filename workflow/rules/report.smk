rule report:
    """Draw every figure and table of the experiment, and judge every claim, from the results of all jobs."""
    input:
        results=job.upstream("report"),
    output:
        manifest="results/{config}/report/manifest.json",
        page=report(
            "results/{config}/report/index.html",
            caption="../report/captions/report.rst",
            category="Report",
        ),
        claims="results/{config}/report/claims.json",
        numbers="results/{config}/report/numbers.tex",
        csv=[
            report(
                f"results/{{config}}/report/tables/{table}.csv",
                caption="../report/captions/table.rst",
                category="Tables",
                labels={"table": table},
            )
            for table in plan.tables
        ],
        tex=expand("results/{{config}}/report/tables/{table}.tex", table=plan.tables),
        figures=[
            report(
                f"results/{{config}}/report/figures/{figure}.svg",
                caption=(plan.run_dir(plan.nodes["report"]) / "figures" / f"{figure}.rst").absolute(),
                category="Figures",
                labels={"figure": figure},
            )
            for figure in plan.figures
        ],
    log:
        "results/{config}/report/job.log",
    benchmark:
        "results/{config}/report/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        identity=job.identity("report"),
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/report" " --identity {params.identity:q} --log {log:q}"


rule excerpt:
    """Draw a figure or table of the paper by itself, from the jobs behind it alone."""
    input:
        results=job.upstream("excerpt"),
    output:
        manifest="results/{config}/excerpt/{excerpt}/manifest.json",
        page="results/{config}/excerpt/{excerpt}/index.html",
        claims="results/{config}/excerpt/{excerpt}/claims.json",
    log:
        "results/{config}/excerpt/{excerpt}/job.log",
    benchmark:
        "results/{config}/excerpt/{excerpt}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        identity=job.identity("excerpt"),
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/excerpt/{wildcards.excerpt:q}"
        " --identity {params.identity:q} --log {log:q}"
