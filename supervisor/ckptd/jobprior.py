"""What does the log that `prior.log` names say about failures? From this site's history into the job's prior."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.sitelog import Prior
from ckptd.errors import HistoryError, JobSpecError
from ckptd.yamltext import read

if TYPE_CHECKING:
    from ckptd.core.policy import Policy
    from ckptd.jobspec import JobSpec


def resolve(spec: JobSpec) -> str | None:
    """Look the log up, and have the spec believe it. Returns what it says, for people; None: no log is named.

    Raises:
        JobSpecError: there is no such log, or it gives no rate.
    """
    if spec.prior.log is None:
        return None
    from ckptd.history import read_prior

    try:
        prior, summary = read_prior(None, spec.prior.log, spec.prior.max_failures)
    except HistoryError as error:
        where = "job.yaml" if spec.source is None else f"{spec.source}:{read(spec.text).line(('prior', 'log'))}"
        raise JobSpecError([f"{where}: prior.log: {error}"]) from None
    spec.believe(prior)
    return (
        f"log {spec.prior.log}: {summary.counted} failures in {summary.exposure_device_s / 3600:.6g} device-hours, "
        f"taken as {prior.failures:g} in {prior.device_seconds / 3600:.6g}"
    )


def keep(spec: JobSpec, policy: Policy) -> None:
    """Have a run that is under way go on with the prior that it went by so far, where the log cannot be looked up."""
    spec.believe(Prior(failures=policy.prior_failures, device_seconds=policy.prior_device_seconds))
