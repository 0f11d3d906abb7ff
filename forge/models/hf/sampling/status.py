"""Status of a row that was sampled on the device: STATUS_OK, or the reason that it has no token.

Owns the numbers and their error texts. They are int8 on the device, since a step cannot raise: the
host reads the status with the token.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from forge import sampling

STATUS_OK = 0
STATUS_NAN = 1
STATUS_POSITIVE_INF = 2
STATUS_NOTHING_ALLOWED = 3
"""Every token of `allowed_token_ids` has a logit of -inf."""
STATUS_NEGATIVE_INF = 4
"""Every logit is -inf."""
STATUS_NO_MASK = 5
"""The next plan gave no mask for this late row: its sequence has ended."""

NUM_STATUSES = 5
"""Statuses that a sampler gives. STATUS_NO_MASK is none of them: the host sets it."""

_ERROR_TEXTS = {
    STATUS_NAN: "the model's logits are not finite: NaN",
    STATUS_POSITIVE_INF: "the model's logits are not finite: their maximum is inf",
    STATUS_NEGATIVE_INF: "the model's logits are not finite: their maximum is -inf",
    STATUS_NOTHING_ALLOWED: sampling.NO_ALLOWED_TOKEN,
    STATUS_NO_MASK: "the next plan gave no mask for this row",
}


def error_text(status: int) -> str:
    """Return why a row with this status has no token, in the words of forge.sampling."""
    return _ERROR_TEXTS[status]


def logits_status(max_logits: Tensor) -> Tensor:
    """Return the status of each row, int8 [rows], from its largest logit.

    max_logits   [rows]   NaN where any logit of the row is NaN, as torch.amax returns it
    """
    status = (
        torch.isnan(max_logits) * STATUS_NAN
        + (max_logits == inf) * STATUS_POSITIVE_INF
        + (max_logits == -inf) * STATUS_NEGATIVE_INF
    )
    return status.to(torch.int8)
