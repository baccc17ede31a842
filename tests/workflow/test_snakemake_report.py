"""Snakemake's own report, made where there is no network."""

from __future__ import annotations

from dataclasses import replace

from tests.workflow.tiny_project import Project

NOWHERE = "http://127.0.0.1:9"  # the port of the discard protocol, where nothing listens


def test_snakemakes_report_holds_page_figures_and_tables_with_their_captions(project: Project) -> None:
    lost = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    offline = replace(project, variables={**lost, "no_proxy": "", "NO_PROXY": ""})
    offline.snakemake("--report", "report.html")
    text = (offline.dir / "report.html").read_text()
    for name in ("index.html", "figures/accuracy-by-length.svg", "figures/solver-health.svg"):
        assert f"results/tiny/report/{name}" in text
    assert "results/tiny/report/tables/published.csv" in text
    assert "Accuracy on the last ten tokens against the length of the test sequences" in text
