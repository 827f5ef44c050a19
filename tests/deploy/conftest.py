"""Jobs for what is deployed round them: as the system tests have them."""

from system.conftest import make_job

__all__ = ["make_job"]
