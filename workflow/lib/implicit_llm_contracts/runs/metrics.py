"""Define the table of training metrics, which the progress line, MLflow, `status`, the report and docs/ share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric of training.

    `key`: its name in the journal. `section`: its section of MLflow's charts; "" for "Model metrics". `meaning`: its
    text in the page of metrics. `head`, `format`: its label and format in `status --jobs` and in a line of progress; a
    metric without `head` is not in the line. `is_column`: whether `status --jobs` has a column for it. `axis`: the
    label of its axis in the figures of the solver's health.
    """

    key: str
    section: str
    meaning: str
    head: str = ""
    format: str = "{:.3g}"
    is_column: bool = False
    axis: str = ""

    @property
    def mlflow_key(self) -> str:
        return f"{self.section}/{self.key}" if self.section else self.key

    def text(self, value: float) -> str:
        return self.format.format(value)


# Keys never change, because charts, searches and stores of earlier runs use them. A line of progress has this order, so
# the metrics that a narrow terminal must show come first.
_ALL = (
    Metric("loss", "", "nats per label, over the steps since the last point", "loss", "{:.4f}", is_column=True),
    Metric(
        "accuracy_last10",
        "",
        "share of right labels among the last ten of a sequence of the training batches (word problems)",
        "last-10",
        "{:.3f}",
    ),
    Metric("accuracy", "", "share of right labels of the training batches (CatbAbI)", "accuracy", "{:.3f}"),
    Metric(
        "f_evaluations",
        "solver",
        "`num_iter`, phantom or unrolled steps, and an evaluation that returns a state",
        "f-evaluations",
        "{:.1f}",
    ),
    Metric("tokens_per_s", "cost", "tokens per second, over all processes", "tokens/s", "{:,.0f}"),
    Metric("mfu", "cost", "share of the devices' peak", "mfu", "{:.1%}"),
    Metric(
        "num_iter",
        "solver",
        "iterations of the solver, mean over sequences",
        "iter",
        "{:.1f}",
        is_column=True,
        axis="solver iterations",
    ),
    Metric(
        "residual",
        "solver",
        "largest relative residual of a batch",
        "residual",
        "{:.2g}",
        is_column=True,
        axis="largest relative residual",
    ),
    Metric(
        "unconverged_share",
        "solver",
        "share of the tokens without a fixed point",
        "unconv",
        "{:.1%}",
        is_column=True,
        axis="unconverged tokens",
    ),
    Metric(
        "carried_share",
        "",
        "share of the sequences that start in a carried state; only with state passing",
        "carried",
        "{:.0%}",
    ),
    Metric(
        "mode_gap",
        "solver",
        "loss in evaluation mode minus loss in training mode, on the same tokens",
        "mode gap",
        "{:+.3f}",
    ),
    Metric("spectral_radius", "solver", "of the Jacobian at the fixed point", "spectral radius", "{:.3f}"),
    Metric("grad_norm", "", "norm of the gradient before clipping", "gradient", "{:.2g}"),
    Metric("learning_rate", "", "learning rate of the step", "rate", "{:.2g}"),
    Metric("memory_gib", "cost", "largest use of a GPU's memory", "memory", "{:.1f} GiB"),
    Metric("tokens", "cost", "tokens trained on since the first phase"),
    Metric("flops", "cost", "FLOPs spent since the first phase"),
    Metric("flops_per_s", "cost", "FLOPs per second, over all processes"),
)
METRICS = {metric.key: metric for metric in _ALL}
