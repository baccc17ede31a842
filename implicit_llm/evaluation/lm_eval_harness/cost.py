"""What the answers to the requests of one task cost, and how many of them there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from implicit_llm.evaluation.solver_tally import SolverTally


@dataclass
class RequestCost:
    """Requests answered, those of them without a finite number, and the solver's work on their tokens."""

    num_requests: int = 0
    num_nonfinite: int = 0
    solver: SolverTally = field(default_factory=SolverTally)
