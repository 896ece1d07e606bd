"""Hard clustering with Gaussian mixtures, globally and with a certificate, on the GPU.

Given points and a number of clusters, jaxcmle looks for the weighted spherical Gaussians and the
partition that minimise the complete-data negative log-likelihood, and says how far from optimal the
answer can be.

Axis letters, everywhere: `n` points, `d` features, `k` clusters, `m` candidates, `b` instances.
"""

from typing import TYPE_CHECKING, Any

from jaxcmle.apps.saving import load, save
from jaxcmle.candidates.plan import Plan
from jaxcmle.candidates.planning import plan
from jaxcmle.candidates.seeding import seed
from jaxcmle.memory import OutOfMemoryError, SmallerTilesWarning
from jaxcmle.problem.bounds import UpperBound, lower_bound, upper_bound, with_certificate
from jaxcmle.problem.instance import (
    InstanceReport,
    YRange,
    check_instance,
    is_balanced,
    rescale,
    variance_floor,
    y_range,
)
from jaxcmle.problem.objective import assign, cost, estimate, partition_cost, point_costs
from jaxcmle.problem.placement import ProcessLostError
from jaxcmle.problem.score import score
from jaxcmle.problem.types import (
    CMLE,
    UCMLE,
    WKM,
    Guarantee,
    Mixture,
    Problem,
    Solution,
    Status,
)
from jaxcmle.proof.certify import certify
from jaxcmle.refine.anneal import anneal
from jaxcmle.refine.cem import cem, cem_restarts
from jaxcmle.refine.polish import move_deltas, polish
from jaxcmle.refine.tempered import free_energy
from jaxcmle.solve.approximate import TooManyCandidatesError, approximate
from jaxcmle.solve.approximate_many import approximate_many
from jaxcmle.solve.effort import Effort
from jaxcmle.solve.fit import fit
from jaxcmle.solve.many import fit_many
from jaxcmle.solve.pieces import cem_many, lower_bound_many, score_many
from jaxcmle.solve.select import Selection, SelectionTable, select
from jaxcmle.solve.stability import Stability, stability
from jaxcmle.stream.cem import cem_streamed as _cem_streamed
from jaxcmle.stream.fit import fit_streamed as _fit_streamed
from jaxcmle.stream.kinds import enter as _enter
from jaxcmle.stream.predict import predict

if TYPE_CHECKING:
    from jaxcmle.apps.estimator import HardGaussianMixture

__version__ = "0.1.0"

__all__ = [
    "CMLE",
    "UCMLE",
    "WKM",
    "Effort",
    "Guarantee",
    "HardGaussianMixture",
    "InstanceReport",
    "Mixture",
    "OutOfMemoryError",
    "Plan",
    "Problem",
    "ProcessLostError",
    "Selection",
    "SelectionTable",
    "SmallerTilesWarning",
    "Solution",
    "Stability",
    "Status",
    "TooManyCandidatesError",
    "UpperBound",
    "YRange",
    "anneal",
    "approximate",
    "approximate_many",
    "assign",
    "cem",
    "cem_many",
    "cem_restarts",
    "certify",
    "check_instance",
    "cost",
    "estimate",
    "fit",
    "fit_many",
    "free_energy",
    "is_balanced",
    "load",
    "lower_bound",
    "lower_bound_many",
    "move_deltas",
    "partition_cost",
    "plan",
    "point_costs",
    "polish",
    "predict",
    "rescale",
    "save",
    "score",
    "score_many",
    "seed",
    "select",
    "stability",
    "upper_bound",
    "variance_floor",
    "with_certificate",
    "y_range",
]

_enter("cem", _cem_streamed)
_enter("fit", _fit_streamed)


def __getattr__(name: str) -> Any:
    """Return the estimator when somebody asks: it imports scikit-learn, which takes a second."""
    if name == "HardGaussianMixture":
        from jaxcmle.apps.estimator import HardGaussianMixture

        return HardGaussianMixture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, also those that are not loaded yet."""
    return sorted({*globals(), *__all__})
