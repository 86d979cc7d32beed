"""Training under a config for some steps, compared with what the config planned."""

from splittune.verify.result import Lack, Verification
from splittune.verify.run import DEFAULT_NUM_STEPS, verify

__all__ = ["DEFAULT_NUM_STEPS", "Lack", "Verification", "verify"]
