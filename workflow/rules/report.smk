rule report:
    """Draw every figure and table of the experiment, and judge every claim, from the results of all jobs."""
    input:
        results=job.upstream("report"),
    output:
        manifest="results/{config}/report/work/{fingerprint}/manifest.json",
        page=report(
            "results/{config}/report/work/{fingerprint}/index.html",
            caption="../report/captions/report.rst",
            category="Report",
        ),
        claims="results/{config}/report/work/{fingerprint}/claims.json",
        rows="results/{config}/report/work/{fingerprint}/numbers.html",
        numbers="results/{config}/report/work/{fingerprint}/numbers.tex",
        csv=[
            report(
                f"results/{{config}}/report/work/{{fingerprint}}/tables/{table}.csv",
                caption="../report/captions/table.rst",
                category="Tables",
                labels={"table": table},
            )
            for table in plan.tables
        ],
        tex=expand("results/{{config}}/report/work/{{fingerprint}}/tables/{table}.tex", table=plan.tables),
        figures=[
            report(
                f"results/{{config}}/report/work/{{fingerprint}}/figures/{figure}.svg",
                caption=(plan.run_dir(plan.nodes["report"]) / "figures" / f"{figure}.rst").absolute(),
                category="Figures",
                labels={"figure": figure},
            )
            for figure in plan.figures
        ],
    log:
        "results/{config}/report/work/{fingerprint}/job.log",
    benchmark:
        "results/{config}/report/work/{fingerprint}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/report"
        " --identity @results/{wildcards.config:q}/.jobs/report/{wildcards.fingerprint:q}.json"
        " --log {log:q}"


rule excerpt:
    """Draw a single figure or table of the paper, from only the jobs that it needs."""
    input:
        results=job.upstream("excerpt"),
    output:
        manifest="results/{config}/excerpt/{excerpt}/work/{fingerprint}/manifest.json",
        page="results/{config}/excerpt/{excerpt}/work/{fingerprint}/index.html",
        claims="results/{config}/excerpt/{excerpt}/work/{fingerprint}/claims.json",
    log:
        "results/{config}/excerpt/{excerpt}/work/{fingerprint}/job.log",
    benchmark:
        "results/{config}/excerpt/{excerpt}/work/{fingerprint}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/excerpt/{wildcards.excerpt:q}"
        " --identity @results/{wildcards.config:q}/.jobs/excerpt/{wildcards.excerpt:q}/{wildcards.fingerprint:q}.json"
        " --log {log:q}"
